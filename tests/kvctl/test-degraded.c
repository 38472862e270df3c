/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Each degraded state (ipc/base/degraded.def) is caused, must then be in the output of kvctl
 * status, and must disappear if it can. The table below is made of the same list, so this does not
 * compile if a state has no test.
 */

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pwd.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "daemon/base/identity.h"
#include "daemon/base/log.h"
#include "daemon/children/child.h"
#include "daemon/serve/closer.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tests/daemon/blocks.h"
#include "tests/lib/fake_server.h"
#include "tests/lib/inproc.h"
#include "tests/lib/peer.h"
#include "tests/lib/suite.h"
#include "tools/kvctl/degraded.h"

#define MINUTE_NS UINT64_C(80000000000) /* more than a minute, since times are rounded */
#define HOST(...) ((const char *const[]){"daemon.backend=host", ##__VA_ARGS__, NULL})
#define MSG(name_, ...) ((struct kvd_msg){.number = KVD_MSG_##name_, .name_ = {__VA_ARGS__}})

static struct inproc it;
static struct instance in;

/* ---- the system, as it should be for the daemon in this process ------------------------------ */

static struct kvd_sys replaced;
static _Atomic uint64_t ahead_ns;
static _Atomic int accept_fails, accept_lasts_ms;
static char elsewhere[96]; /* a folder whose files replace those of the system */
static bool no_user_kvd;

static int clock_ahead(uint64_t *ret) {
        int r = kvd_sys_real.clock_ns(ret);

        *ret += ahead_ns;
        return r;
}

static int accept_badly(int fd, int flags) {
        usleep((unsigned)atomic_exchange(&accept_lasts_ms, 0) * 1000);
        errno = atomic_exchange(&accept_fails, 0);
        return errno ? -1 : kvd_sys_real.accept(fd, flags);
}

FILE *fopen(const char *path, const char *mode) {
        FILE *(*real)(const char *, const char *) = (FILE * (*)(const char *, const char *))
                dlsym(RTLD_NEXT, "fopen64");
        char there[256];

        snprintf(there, sizeof there, "%s%s", elsewhere, path);
        return real(elsewhere[0] && access(there, F_OK) == 0 ? there : path, mode);
}

struct passwd *getpwnam(const char *name) {
        static struct passwd entry = {.pw_name = (char *)"kvd", .pw_uid = 4711, .pw_gid = 4711};

        return no_user_kvd ? NULL : &entry;
}

static void setup(void) {
        replaced = kvd_sys_real;
        replaced.clock_ns = clock_ahead;
        replaced.accept = accept_badly;
        sys = &replaced;
        unsetenv("JOURNAL_STREAM");
        unsetenv("LD_LIBRARY_PATH"); /* meson names the stand-in driver's; hide it from children */
}

/* ---- what kvctl says ------------------------------------------------------------------------- */

static const char *const names[KVD_N_DEGRADED] = {
#define KVD_DEGRADED(whose, name, unit, text, remedy) [KVD_DEGRADED_##name] = #name,
#include "ipc/base/degraded.def"
#undef KVD_DEGRADED
};

static enum kvd_degraded now_tested;

static bool says_of(enum kvd_degraded state, const char *socket, const char *verb) {
        char command[300], line[600], begin[64];
        bool found = false;
        FILE *f;

        snprintf(command, sizeof command, "KVD_SOCKET='%s' '%s' %s", socket, getenv("KVCTL"), verb);
        snprintf(begin, sizeof begin, "degraded: %s", names[state]);
        f = popen(command, "r");
        ck_assert_ptr_nonnull(f);
        while (fgets(line, sizeof line, f))
                found |= strncmp(line, begin, strlen(begin)) == 0 &&
                         strchr(",: (", line[strlen(begin)]);
        ck_assert_int_eq(pclose(f), 0);
        return found;
}

static bool says(const char *socket, const char *verb) {
        return says_of(now_tested, socket, verb);
}

/* exit status of kvctl health */
static int health(const char *socket, const char *flag) {
        char command[300];
        int status;

        snprintf(command, sizeof command, "KVD_SOCKET='%s' '%s' health %s", socket, getenv("KVCTL"),
                 flag);
        status = system(command);
        ck_assert(WIFEXITED(status));
        return WEXITSTATUS(status);
}

#define SHOWN(daemon) says((daemon).socket, "status")

static bool is_gone_later(void) {
        ahead_ns += MINUTE_NS;
        return !SHOWN(it.in);
}

/* The state is shown now, and no longer after a minute. */
static void expect_for_a_minute(void) {
        ck_assert(SHOWN(it.in));
        WAIT_UNTIL(is_gone_later());
        inproc_stop(&it);
}

/* ---- at the start ---------------------------------------------------------------------------- */

static void run(const char *option, const char *value) {
        instance_make_dir(&in);
        instance_run(&in,
                     (const char *const[]){"--private", in.dir, "--pool", "64M", option, value,
                                           NULL},
                     true);
}

static void test_host_memory(void) {
        const char *driver = getenv("FAKECUDA");

        if (!driver) /* there is no driver here that could fail */
                return;
        setenv("LD_LIBRARY_PATH", driver, 1);
        setenv("FAKECUDA_DEVICES", "0", 1);
        run("--backend", "auto");
        ck_assert(SHOWN(in));
        ck_assert(says(in.socket, "doctor"));
        instance_end(&in);
        run("--backend", "host");
        ck_assert(!SHOWN(in));
        instance_end(&in);
}

static void test_epoll(void) {
        struct sock_filter code[] = {
                BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        struct sock_fprog program = {ARRAY_SIZE(code), code};

        ck_assert_int_eq(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        ck_assert_int_eq(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
        run("--set", "daemon.loop=auto");
        ck_assert(SHOWN(in));
        instance_end(&in);
        run("--set", "daemon.loop=epoll");
        ck_assert(!SHOWN(in));
        instance_end(&in);
}

static void write_file(const char *folder, const char *name, const char *text) {
        char path[256];
        FILE *f;

        snprintf(path, sizeof path, "%s%s", folder, name);
        for (char *at = path + 1; (at = strchr(at, '/')); *at++ = '/') {
                *at = 0;
                mkdir(path, 0700);
        }
        f = fopen(path, "w");
        ck_assert_ptr_nonnull(f);
        fputs(text, f);
        fclose(f);
}

static void start_elsewhere(const char *file, const char *text, const char *const *settings) {
        strcpy(elsewhere, in.dir);
        write_file(in.dir, file, text);
        inproc_start(&it, settings);
        elsewhere[0] = 0;
}

#define PAGES "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"

static void test_small_pages(void) {
        instance_make_dir(&in);
        start_elsewhere(PAGES, "3\n", HOST("daemon.pages=auto", "daemon.pool=64M"));
        ck_assert(SHOWN(it.in));
        inproc_stop(&it);
        start_elsewhere(PAGES, "0\n", HOST("daemon.pages=auto", "daemon.pool=64M"));
        ck_assert(!SHOWN(it.in));
        inproc_stop(&it);
        instance_sweep(&in);
}

static void test_memory_limit(void) {
        instance_make_dir(&in);
        write_file(in.dir, "/proc/self/cgroup", "0::/unit\n");
        start_elsewhere("/sys/fs/cgroup/unit/memory.max", "1048576\n", HOST());
        ck_assert(SHOWN(it.in));
        inproc_stop(&it);
        start_elsewhere("/sys/fs/cgroup/unit/memory.max", "67108864\n", HOST());
        ck_assert(!SHOWN(it.in));
        inproc_stop(&it);
        instance_sweep(&in);
}

static void test_as_root(void) {
        struct identity who;
        struct kvd_why why;
        struct config config;

        if (geteuid() != 0)
                return;
        config_init(&config);
        inproc_start(&it, HOST());
        for (no_user_kvd = true;; no_user_kvd = false) {
                ck_assert_int_eq(identity_choose(&config, false, &who, &why), 0);
                ck_assert(SHOWN(it.in) == no_user_kvd);
                if (!no_user_kvd)
                        break;
        }
        inproc_stop(&it);
        config_clear(&config);
}

static void test_notify(void) {
        setenv("NOTIFY_SOCKET", "nowhere", 1);
        run("--backend", "host");
        ck_assert(SHOWN(in));
        instance_end(&in);
        unsetenv("NOTIFY_SOCKET");
        run("--backend", "host");
        ck_assert(!SHOWN(in));
        instance_end(&in);
}

/* ---- the configuration ----------------------------------------------------------------------- */

static void load(const char *text) {
        write_file(in.dir, "/kvd.conf", text);
        kill(in.pid, SIGHUP);
}

static void configure_badly(const char *well, const char *badly) {
        char path[96];

        instance_make_dir(&in);
        snprintf(path, sizeof path, "%s/kvd.conf", in.dir);
        write_file(in.dir, "/kvd.conf", well);
        instance_run(&in, (const char *const[]){"--private", in.dir, "--config", path, NULL}, true);
        ck_assert(!SHOWN(in));
        load(badly);
        WAIT_UNTIL(SHOWN(in));
        load(well);
        WAIT_UNTIL(!SHOWN(in));
        instance_stop(&in);
        unlink(path);
        instance_sweep(&in);
}

static void test_reload(void) {
        configure_badly("[daemon]\npool=64M\n", "[daemon]\nnonsense\n");
}

static void test_restart(void) {
        configure_badly("[daemon]\npool=64M\n", "[daemon]\npool=128M\n");
}

/* ---- what happens ---------------------------------------------------------------------------- */

static void test_slow_turns(void) {
        inproc_start(&it, HOST());
        WAIT_UNTIL(is_gone_later()); /* this machine may be slow, too */
        accept_lasts_ms = 15;
        expect_for_a_minute();
}

static void test_full(void) {
        struct kvd_msg r = {0};
        struct peer_end *p;
        char name[] = "a";

        inproc_start(&it, HOST());
        ck_assert(!SHOWN(it.in));
        p = peer_attach(it.in.socket);
        for (uint32_t space = peer_open_space(p, name); r.error.code != ENOBUFS;) {
                r = peer_call(p, MSG(allocate, .space = space, .count = 64));
                if (r.number != KVD_MSG_error)
                        r.error.code = 0;
                else if (r.error.code != ENOBUFS) {
                        name[0]++;
                        space = peer_open_space(p, name);
                }
        }
        expect_for_a_minute();
        peer_close(p);
}

static void test_connections(void) {
        inproc_start(&it, HOST());
        ck_assert(!SHOWN(it.in));
        accept_fails = EMFILE;
        close(raw_connect(it.in.socket));
        WAIT_UNTIL(!accept_fails);
        expect_for_a_minute();
}

static void test_worker(void) {
        struct user u;

        inproc_start_with_worker(&it, HOST("daemon.pool=64M"), getenv("KVD"));
        user_open(&u, it.in.socket, (const char *const[]){"kvreviver=on", NULL});
        user_append(&u, 8);
        user_spill(&u);
        ck_assert(!SHOWN(it.in));
        kill(user_worker(&u), SIGKILL);
        WAIT_UNTIL(SHOWN(it.in));
        user_close(&u);
        expect_for_a_minute();
}

/* A killed child must not be reported as a dead worker. */
static void kill_child(const char *name) {
        pid_t pid;

        WAIT_UNTIL((pid = child_of(getpid(), name)) > 0);
        ck_assert(!SHOWN(it.in));
        kill(pid, SIGKILL);
        WAIT_UNTIL(SHOWN(it.in));
        ck_assert(!says_of(KVD_DEGRADED_worker, it.in.socket, "status"));
}

static void seal_one(struct peer_end *p, const char *name, uint32_t token) {
        uint32_t space = peer_open_space(p, name), tokens[4] = {token, 2, 3, 4};
        struct kvd_msg r = peer_ok(p, MSG(allocate, .space = space, .count = 1));
        kvd_ref block;

        memcpy(&block, r.allocate_reply.blocks.data, sizeof block);
        peer_ok(p, MSG(seal, .space = space, .blocks = {&block, sizeof block},
                       .tokens = {tokens, sizeof tokens}));
}

/* Once its work is done, the process is not late when time jumps. */
static void write_one(struct peer_end *p, uint32_t token) {
        uint64_t written = peer_ok(p, MSG(tier_info)).tier_info_reply.written_bytes;

        seal_one(p, "s", token);
        WAIT_UNTIL(peer_ok(p, MSG(tier_info)).tier_info_reply.written_bytes > written);
}

static void test_disk_process(void) {
        char setting[80], path[64];
        struct peer_end *p;

        snprintf(path, sizeof path, "/tmp/kvd-disk-process-%d", getpid());
        snprintf(setting, sizeof setting, "daemon.file=%s", path);
        inproc_start_with_worker(&it, HOST(setting, "daemon.file_size=16M", "daemon.file_depth=0"),
                                 getenv("KVD"));
        p = peer_attach(it.in.socket);
        write_one(p, 1);
        kill_child("kvd-disk");
        write_one(p, 2);
        peer_close(p);
        expect_for_a_minute();
        unlink(path);
}

static void test_remote_process(void) {
        inproc_start_with_worker(&it, HOST("daemon.remote=redis://127.0.0.1:1"), getenv("KVD"));
        kill_child("kvd-remote");
        expect_for_a_minute();
}

/* With the stand-in driver, if it is built. */
static void test_exporter(void) {
        const char *driver = getenv("FAKECUDA");
        struct peer_end *p;
        pid_t pid;

        if (!driver)
                return;
        setenv("LD_LIBRARY_PATH", driver, 1);
        run("--backend", "cuda-legacy");
        p = peer_attach(in.socket);
        peer_ok(p, peer_space_message("s"));
        WAIT_UNTIL((pid = child_of(in.pid, "kvd-exporter")) > 0);
        ck_assert(!SHOWN(in));
        kill(pid, SIGKILL);
        WAIT_UNTIL(SHOWN(in));
        peer_close(p);
        instance_end(&in);
}

static void test_no_worker(void) {
        struct user u;

        inproc_start(&it, HOST("daemon.pool=64M"));
        user_open(&u, it.in.socket, (const char *const[]){"memshare=on", NULL});
        ck_assert(!SHOWN(it.in));
        user_append(&u, 8);
        WAIT_UNTIL(SHOWN(it.in));
        user_close(&u);
        expect_for_a_minute();
}

static void test_gpu_memory(void) {
        static const struct child_ops none = {.name = "worker"};
        struct child child;

        inproc_start(&it, HOST());
        ck_assert_int_eq(child_init(&child, &none, "", NULL), 0);
        ck_assert_int_eq(health(it.in.socket, ""), 0);
        child_failed(&child, kvd_slice_of("no room"));
        ck_assert(SHOWN(it.in));
        ck_assert_int_eq(health(it.in.socket, ""), 1);
        ck_assert_int_eq(health(it.in.socket, "--alive"), 0);
        child_worked(&child);
        ck_assert(!SHOWN(it.in));
        ck_assert_int_eq(health(it.in.socket, ""), 0);
        child_clear(&child);
        inproc_stop(&it);
}

static void test_closing(void) {
        struct closer *full;

        inproc_start(&it, HOST());
        ck_assert(!SHOWN(it.in));
        ck_assert_int_eq(closer_new(0, &full), 0);
        closer_take(full, eventfd(0, EFD_CLOEXEC));
        closer_free(full);
        expect_for_a_minute();
}

/* The file's process cannot be started: this test has no program for it. */
static void test_file_tier(void) {
        char setting[80], path[64];

        inproc_start(&it, HOST());
        ck_assert(!SHOWN(it.in));
        inproc_stop(&it);
        snprintf(path, sizeof path, "/tmp/kvd-file-tier-%d", getpid());
        snprintf(setting, sizeof setting, "daemon.file=%s", path);
        inproc_start(&it, HOST(setting, "daemon.file_size=64M"));
        WAIT_UNTIL(SHOWN(it.in));
        ck_assert_int_eq(health(it.in.socket, ""), 0); /* the pool is there */
        inproc_stop(&it);
        unlink(path);
}

/* The file is moved away and back, and then deleted. */
static void test_file_gone(void) {
        char setting[80], path[64], moved[80];

        snprintf(path, sizeof path, "/tmp/kvd-file-gone-%d", getpid());
        snprintf(moved, sizeof moved, "%s-moved", path);
        snprintf(setting, sizeof setting, "daemon.file=%s", path);
        inproc_start(&it, HOST(setting, "daemon.file_size=64M"));
        ck_assert(!SHOWN(it.in));
        ck_assert_int_eq(rename(path, moved), 0);
        WAIT_UNTIL(SHOWN(it.in));
        ck_assert_int_eq(rename(moved, path), 0);
        WAIT_UNTIL(!SHOWN(it.in));
        unlink(path);
        WAIT_UNTIL(SHOWN(it.in));
        inproc_stop(&it);
}

/* No server listens at that port, and the process that would find out cannot be started either. */
static void test_remote_tier(void) {
        inproc_start(&it, HOST());
        ck_assert(!SHOWN(it.in));
        inproc_stop(&it);
        inproc_start(&it, HOST("daemon.remote=redis://127.0.0.1:1"));
        WAIT_UNTIL(SHOWN(it.in));
        inproc_stop(&it);
}

/* The server answers, but refuses every block. */
static void test_remote_refused(void) {
        struct fake_server replica = {.says = "-READONLY You can't write against a replica.\r\n"};
        char setting[64];
        struct peer_end *p;

        fake_server_start(&replica, "127.0.0.1", 0);
        snprintf(setting, sizeof setting, "daemon.remote=redis://127.0.0.1:%u", replica.port);
        inproc_start_with_worker(&it,
                                 HOST(setting, "daemon.remote_depth=0",
                                      "daemon.remote_timeout=10000"),
                                 getenv("KVD"));
        p = peer_attach(it.in.socket);
        ck_assert(!SHOWN(it.in));
        seal_one(p, "s", 1);
        WAIT_UNTIL(SHOWN(it.in));
        replica.says = NULL;
        WAIT_UNTIL(is_gone_later());
        peer_close(p);
        inproc_stop(&it);
}

/* Standard error is a full pipe without a reader. */
static void test_log_lost(void) {
        int ends[2], before = dup(STDERR_FILENO);

        inproc_start(&it, HOST());
        ck_assert(!SHOWN(it.in));
        ck_assert_int_eq(pipe2(ends, O_NONBLOCK), 0);
        while (write(ends[1], ends, sizeof ends) > 0)
                ;
        dup2(ends[1], STDERR_FILENO);
        log_error("lost");
        dup2(before, STDERR_FILENO);
        expect_for_a_minute();
}

/* ---- too little of something ----------------------------------------------------------------- */

#define MANY_SPACES 256u

/* Makes spaces with a client each, until the domain may have no more. */
static uint32_t fill_with_spaces(struct peer_end **ends) {
        struct kvd_msg r = {0};
        uint32_t n = 0;

        for (; r.number != KVD_MSG_error && n < MANY_SPACES; n++) {
                char name[16];

                snprintf(name, sizeof name, "s%u", n);
                ends[n] = peer_attach(it.in.socket);
                r = peer_call(ends[n], peer_space_message(name));
        }
        return n;
}

static void use_up(void) {
        struct peer_end *ends[MANY_SPACES];
        uint32_t n;

        inproc_start(&it, HOST("daemon.overhead=640M", "daemon.max_spaces=4096"));
        ck_assert(!SHOWN(it.in));
        n = fill_with_spaces(ends);
        ck_assert(SHOWN(it.in));
        for (uint32_t i = 0; i < n; i++) {
                char name[16];

                snprintf(name, sizeof name, "s%u", i);
                if (i + 1 < n)
                        peer_ok(ends[i],
                                MSG(space_delete, .space = kvd_slice_of(name), .force = 1));
                peer_close(ends[i]);
        }
        WAIT_UNTIL(!SHOWN(it.in));
        inproc_stop(&it);
}

static void test_little_left(void) {
        use_up();
}

static void test_near_limit(void) {
        use_up();
}

/* ---- spaces ---------------------------------------------------------------------------------- */

/* A client that closes its connection but lives on. */
static void linger(int go) {
        struct peer_end *p = peer_attach(it.in.socket);
        char byte;

        peer_ok(p, MSG(allocate, .space = peer_open_space(p, "s"), .count = 4));
        close(p->fd);
        while (read(go, &byte, 1) < 0)
                ;
        _exit(0);
}

static void test_limbo(void) {
        int ends[2];
        pid_t child;

        inproc_start(&it, HOST());
        ck_assert_int_eq(pipe2(ends, O_CLOEXEC), 0);
        child = fork();
        if (child == 0) {
                close(ends[1]);
                linger(ends[0]);
        }
        WAIT_UNTIL(SHOWN(it.in));
        close(ends[1]);
        ck_assert_int_eq(wait_status(child), 0);
        WAIT_UNTIL(!SHOWN(it.in));
        inproc_stop(&it);
}

/* These states need failing hardware, or years, so kvctl is given a made-up reply. */
static void tell(const struct kvd_msg_space_info_reply *info) {
        static const uint64_t zeros[KVD_N_SPACE_COUNTERS];
        const struct kvd_msg_space_info_reply well = {.counters = {zeros, sizeof zeros}};
        uint64_t n[KVD_N_DEGRADED];

        degraded_of_space(&well, n);
        for (uint32_t i = 0; i < KVD_N_DEGRADED; i++)
                ck_assert_uint_eq(n[i], 0);
        degraded_of_space(info, n);
        for (uint32_t i = 0; i < KVD_N_DEGRADED; i++)
                ck_assert_uint_eq(n[i], i == now_tested ? 3 : 0);
}

static void tell_counter(enum kvd_space_counter which) {
        uint64_t counters[KVD_N_SPACE_COUNTERS] = {0};

        counters[which] = 3;
        tell(&(struct kvd_msg_space_info_reply){.counters = {counters, sizeof counters}});
}

static void test_poisoned(void) {
        tell(&(struct kvd_msg_space_info_reply){.poisoned = 3});
}

static void test_copies_broken(void) {
        tell_counter(KVD_SPACE_REVIVE_BROKEN);
}

static void test_index_full(void) {
        tell_counter(KVD_SPACE_UNINDEXED);
}

static void test_runs_refused(void) {
        tell_counter(KVD_SPACE_RUNS_REFUSED);
}

static void test_worn_out(void) {
        tell_counter(KVD_SPACE_WORN_OUT);
}

/* ---- all of them ----------------------------------------------------------------------------- */

static void (*const tests[KVD_N_DEGRADED])(void) = {
#define KVD_DEGRADED(whose, name, unit, text, remedy) [KVD_DEGRADED_##name] = test_##name,
#include "ipc/base/degraded.def"
#undef KVD_DEGRADED
};

START_TEST(it_shows_while_it_is_so) {
        now_tested = (enum kvd_degraded)_i;
        tests[_i]();
}
END_TEST

SUITE("degraded", FIXTURE(setup, NULL), LOOPS(KVD_N_DEGRADED, it_shows_while_it_is_so))
