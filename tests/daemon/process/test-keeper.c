/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvd --keep: which descriptors it keeps while their daemon is dead, which senders it accepts, and
 * when it gives up. The keeper is tested with this program in place of kvd, which runs a script,
 * and with kvd itself.
 */

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "daemon/process/keeper/keeper.h"
#include "ipc/address.h"
#include "ipc/base/util.h"
#include "tests/lib/peer.h"
#include "tests/lib/suite.h"

static struct instance in;

static void setup(void) {
        instance_make_dir(&in);
        setenv("TMPDIR", in.dir, 1);
}

static void teardown(void) {
        instance_sweep(&in);
}

/* ---- scripts that run in place of kvd -------------------------------------------------------- */

static int manager = -1;
static bool no_others; /* it was started with no descriptors except those handed over */

static void tell(const char *state, size_t size, const int *fds, unsigned n) {
        struct kvd_fds set = {.n = n};

        for (unsigned i = 0; i < n; i++)
                set.fd[i] = fds[i];
        if (kvd_frame_send(manager, state, size, &set, 0) < 0)
                _exit(90);
}

static void say(const char *state) {
        tell(state, strlen(state), NULL, 0);
}

static void store(const char *name, int fd) {
        char state[400];

        snprintf(state, sizeof state, "FDSTORE=1\nFDNAME=%s\nFDPOLL=0", name);
        tell(state, strlen(state), &fd, 1);
}

static int file_with(const char *text) {
        int fd = memfd_create("test", MFD_CLOEXEC);

        if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text))
                _exit(91);
        return fd;
}

static bool reads(int fd, const char *text) {
        char found[64] = "";

        return pread(fd, found, sizeof found - 1, 0) >= 0 && strcmp(found, text) == 0;
}

static bool handed(int n, const char *names) {
        bool so = atoi(getenv("LISTEN_FDS")) == n && atoi(getenv("LISTEN_PID")) == getpid() &&
                  strcmp(getenv("LISTEN_FDNAMES"), names) == 0 && no_others;

        if (!so)
                fprintf(stderr, "handed: %s %s\n", getenv("LISTEN_FDS"), getenv("LISTEN_FDNAMES"));
        return so;
}

static _Noreturn void crash(void) {
        raise(SIGKILL);
        abort();
}

/* Ends without a crash, so that the keeper exits with the script's verdict as its status. */
static _Noreturn void verdict(bool good) {
        _exit(good ? 0 : 77);
}

/* The number of starts in this test, including this one. */
static long start_number(void) {
        struct stat st;
        int fd = open(getenv("STARTS"), O_WRONLY | O_CREAT | O_APPEND, 0600);

        if (fd < 0 || write(fd, "x", 1) != 1 || fstat(fd, &st) < 0)
                _exit(92);
        close(fd);
        return (long)st.st_size;
}

static void script_keeps(long start) {
        if (start == 1) {
                store("a.1", file_with("one"));
                store("b.2", file_with("two"));
                store("c.3", file_with("three"));
                crash();
        }
        if (start == 2) {
                if (!handed(4, "listen:a.1:b.2:c.3") || !reads(4, "one") || !reads(6, "three"))
                        verdict(false);
                say("FDSTOREREMOVE=1\nFDNAME=a.1");
                say("FDSTOREREMOVE=1\nFDNAME=listen"); /* not one that it stored */
                crash();
        }
        verdict(handed(3, "listen:c.3:b.2") && reads(4, "three") && reads(5, "two"));
}

/* As many as there is room for names: 20,000 of five letters. */
static void script_many(long start) {
        long n = atol(getenv("MANY"));
        char name[24];
        int odd, even;

        if (start == 1) {
                odd = file_with("odd");
                even = file_with("even");
                for (long i = 0; i < n; i++) {
                        snprintf(name, sizeof name, "%05ld", i);
                        store(name, i % 2 ? odd : even);
                }
                crash();
        }
        for (long i = 0; i < n; i++)
                if (!reads(4 + (int)i, i % 2 ? "odd" : "even"))
                        verdict(false);
        verdict(atol(getenv("LISTEN_FDS")) == n + 1 && atol(getenv("FDSTORE")) > n);
}

/* More than can be handed over: only the first ones are. */
static void script_too_many(long start) {
        char name[97];
        int fd = file_with("long");

        if (start == 1) {
                for (int i = 0; i < 3000; i++) {
                        snprintf(name, sizeof name, "%096d", i);
                        store(name, fd);
                }
                store("short", fd);
                crash();
        }
        verdict(atoi(getenv("LISTEN_FDS")) < 1300 && reads(4, "long") &&
                strstr(getenv("LISTEN_FDNAMES"), "000001:"));
}

static void other_process_stores(int fd) {
        pid_t pid = fork();
        int status;

        if (pid == 0) {
                store("stranger", fd);
                _exit(0);
        }
        if (waitpid(pid, &status, 0) != pid || status != 0)
                verdict(false);
}

static void script_hostile(long start) {
        static char huge[4000];
        int fd = file_with("x"), two[] = {fd, fd}, many[] = {fd, fd, fd, fd, fd, fd};
        static const char *const names[] = {"", "a:b", "a b", "../a", "a\xff", "LISTEN=1"};
        char path[108];

        if (start > 1)
                verdict(handed(2, "listen:good"));
        other_process_stores(fd);
        for (size_t i = 0; i < ARRAY_SIZE(names); i++)
                store(names[i], fd);
        memset(huge, 'a', sizeof huge);
        tell(huge, sizeof huge, &fd, 1);
        memcpy(huge, "FDSTORE=1\nFDNAME=", 17);
        tell(huge, 17 + 97, &fd, 1); /* a name that is too long */
        tell("FDSTORE=1\0FDNAME=a", 18, &fd, 1);
        tell("FDSTORE=1\nFDNAME=two", 20, two, 2);
        tell("FDSTORE=1\nFDNAME=many", 21, many, 6);
        tell("FDSTORE=1\nFDNAME=none", 21, NULL, 0);
        tell("FDNAME=a\nSOMETHING=2", 20, &fd, 1);
        tell("\n\n=\n", 4, &fd, 1);
        tell("", 0, NULL, 0);
        store("good", fd);
        snprintf(path, sizeof path, "%s", getenv("NOTIFY_SOCKET"));
        while (access(path, F_OK) == 0) /* the keeper removes it, so that no other connects */
                usleep(1000);
        crash();
}

/* It crashes because of a descriptor that is kept. */
static void script_poison(long start) {
        if (start == 1) {
                say("READY=1");
                store("poison.1", file_with("poison"));
                crash();
        }
        if (atoi(getenv("LISTEN_FDS")) > 1)
                crash();
        verdict(start == 7);
}

/* Makes this test's /proc/vmstat report n out-of-memory kills. */
static void say_kills(long n) {
        FILE *f = fopen(getenv("VMSTAT"), "w");

        if (!f || fprintf(f, "pgfault 7\noom_kill %ld\nunevictable_pgs_scanned 9\n", n) < 0 ||
            fclose(f) != 0)
                _exit(95);
}

static void begin_with_a_cache(long start) {
        say("READY=1");
        if (start == 1)
                store("a.1", file_with("one"));
        else if (!handed(2, "listen:a.1") || !reads(4, "one"))
                verdict(false);
}

/* Its cache does not fit into its cgroup, so it is killed for want of memory each time. */
static void script_starved(long start) {
        if (start > 3)
                verdict(handed(1, "listen"));
        begin_with_a_cache(start);
        say_kills(start);
        crash();
}

/* It is killed by other processes rather than for want of memory, so its cache is kept. */
static void script_killed(long start) {
        begin_with_a_cache(start);
        if (start == 6)
                verdict(true);
        if (start == 2)
                say_kills(100); /* only repeated out-of-memory kills count */
        crash();
}

static void script_loop(long start) {
        crash();
}

/* It has served for long enough, but its keeper hears that late. */
static void script_heard_late(long start) {
        struct timespec now;
        char state[80];

        clock_gettime(CLOCK_MONOTONIC, &now);
        snprintf(state, sizeof state, "READY=1\nMONOTONIC_USEC=%lld", (now.tv_sec - 1) * 1000000LL);
        say(state);
        if (start == 15)
                verdict(true);
        crash();
}

static void script_status(long start) {
        _exit(3);
}

static const struct {
        const char *name;
        void (*run)(long start);
} scripts[] = {{"keeps", script_keeps},       {"many", script_many},
               {"too-many", script_too_many}, {"hostile", script_hostile},
               {"poison", script_poison},     {"loop", script_loop},
               {"status", script_status},     {"starved", script_starved},
               {"killed", script_killed},     {"heard-late", script_heard_late}};

static _Noreturn void run_script(const char *name) {
        struct kvd_address address;

        no_others = fcntl(3 + atoi(getenv("LISTEN_FDS")), F_GETFD) < 0;
        manager = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
        if (kvd_address_make(getenv("NOTIFY_SOCKET"), &address) < 0 ||
            connect(manager, kvd_address_of(&address), address.size) < 0)
                _exit(93);
        for (size_t i = 0; i < ARRAY_SIZE(scripts); i++)
                if (strcmp(scripts[i].name, name) == 0)
                        scripts[i].run(start_number());
        _exit(94);
}

/* ---- the keeper alone ------------------------------------------------------------------------ */

static int listening(void) {
        struct kvd_address address;
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

        ck_assert_int_eq(kvd_address_make(in.socket, &address), 0);
        ck_assert_int_eq(bind(fd, kvd_address_of(&address), address.size), 0);
        ck_assert_int_eq(listen(fd, 8), 0);
        return fd;
}

static long starts(void) {
        struct stat st;

        return stat(getenv("STARTS"), &st) < 0 ? 0 : (long)st.st_size;
}

/* The number of mailbox folders that exist. */
static unsigned folders_left(void) {
        DIR *dir = opendir(in.dir);
        struct dirent *e;
        unsigned n = 0;

        while ((e = readdir(dir)))
                n += strncmp(e->d_name, "kvd-keep-", 9) == 0;
        closedir(dir);
        return n;
}

static int keep_script(const char *name) {
        char path[128], self[256] = "",
                        *arguments[] = {"test-keeper", "--script", (char *)name, NULL};
        int fd = listening();
        pid_t pid;

        snprintf(path, sizeof path, "%s/starts", in.dir);
        setenv("STARTS", path, 1);
        ck_assert_int_gt(readlink("/proc/self/exe", self, sizeof self - 1), 0);
        pid = fork();
        if (pid == 0)
                _exit(keeper_run(self, arguments, fd, -1));
        close(fd);
        return wait_status(pid);
}

START_TEST(kept_descriptors_come_back) {
        ck_assert_int_eq(keep_script("keeps"), 0);
        ck_assert_int_eq(starts(), 3);
        ck_assert_uint_eq(folders_left(), 0);
}
END_TEST

START_TEST(twenty_thousand_descriptors) {
        struct rlimit limit = {32768, 32768};
        char number[16];

        if (setrlimit(RLIMIT_NOFILE, &limit) < 0)
                ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
        snprintf(number, sizeof number, "%ld", (long)MIN(20000, limit.rlim_cur - 100));
        setenv("MANY", number, 1);
        ck_assert_int_eq(keep_script("many"), 0);
        ck_assert_int_eq(starts(), 2);
}
END_TEST

START_TEST(one_too_many_is_not_kept) {
        ck_assert_int_eq(keep_script("too-many"), 0);
        ck_assert_int_eq(starts(), 2);
}
END_TEST

START_TEST(only_its_own_daemon_is_believed) {
        ck_assert_int_eq(keep_script("hostile"), 0);
        ck_assert_int_eq(starts(), 2);
}
END_TEST

START_TEST(a_deadly_descriptor_is_dropped) {
        ck_assert_int_eq(keep_script("poison"), 0);
        ck_assert_int_eq(starts(), 7);
}
END_TEST

static bool own_vmstat(void) {
        static char path[128];

        if (geteuid() != 0 || unshare(CLONE_NEWNS) < 0 ||
            mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0) {
                fputs("not run: only root can stand in for /proc/vmstat\n", stderr);
                return false;
        }
        snprintf(path, sizeof path, "%s/vmstat", in.dir);
        setenv("VMSTAT", path, 1);
        say_kills(0);
        ck_assert_int_eq(mount(path, "/proc/vmstat", NULL, MS_BIND, NULL), 0);
        return true;
}

START_TEST(a_cache_that_does_not_fit_into_the_cgroup_is_dropped) {
        if (!own_vmstat())
                return;
        ck_assert_int_eq(keep_script("starved"), 0);
        ck_assert_int_eq(starts(), 4);
}
END_TEST

START_TEST(kills_by_others_cost_nothing) {
        if (!own_vmstat())
                return;
        ck_assert_int_eq(keep_script("killed"), 0);
        ck_assert_int_eq(starts(), 6);
}
END_TEST

START_TEST(a_crash_loop_ends) {
        ck_assert_int_eq(keep_script("loop"), 128 + SIGKILL);
        ck_assert_int_eq(starts(), 10);
        ck_assert_uint_eq(folders_left(), 0);
}
END_TEST

START_TEST(a_busy_keeper_does_not_give_up) {
        ck_assert_int_eq(keep_script("heard-late"), 0);
        ck_assert_int_eq(starts(), 15);
}
END_TEST

START_TEST(a_failed_start_is_not_repeated) {
        ck_assert_int_eq(keep_script("status"), 3);
        ck_assert_int_eq(starts(), 1);
}
END_TEST

/* ---- with kvd -------------------------------------------------------------------------------- */

#define RUN(ready, ...) instance_run(&in, (const char *const[]){__VA_ARGS__, NULL}, ready)
#define KEEP(...) RUN(true, "--keep", "--private", in.dir, "--pool", "64M", __VA_ARGS__)

/* The keeper's child; 0 if it has none now. */
static pid_t kept(void) {
        return child_of(in.pid, NULL);
}

static pid_t wait_for_another(pid_t old) {
        pid_t now = 0;

        WAIT_UNTIL((now = kept()) != 0 && now != old);
        return now;
}

/* Waits until a daemon answers; returns its process id. */
static pid_t answers(void) {
        struct peer_end *p = peer_attach(in.socket);
        struct kvd_msg r = peer_ok(p, (struct kvd_msg){.number = KVD_MSG_daemon_info});

        ck_assert(r.number == KVD_MSG_daemon_info + KVD_REPLY);
        peer_close(p);
        return kept();
}

START_TEST(kvd_comes_back) {
        pid_t first, now;

        KEEP("--set", "daemon.segment=1M");
        first = now = answers();
        ck_assert_uint_eq(folders_left(), 0);
        for (int i = 0; i < 4; i++) { /* in quick succession, so the keeper pauses in between */
                kill(now, SIGKILL);
                now = answers();
        }
        ck_assert_int_ne(now, first);
        instance_stop(&in);
        ck_assert_int_eq(kill(now, 0), -1);
}
END_TEST

/* Connections are never refused, even while no kvd runs. */
START_TEST(connections_wait) {
        pid_t pid;
        int fds[16];

        KEEP("--set", "daemon.segment=1M");
        pid = answers();
        kill(in.pid, SIGSTOP); /* so that the keeper starts no kvd */
        kill(pid, SIGKILL);
        for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
                fds[i] = raw_connect(in.socket);
        kill(in.pid, SIGCONT);
        wait_for_another(pid);
        answers();
        for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
                close(fds[i]);
        instance_stop(&in);
}
END_TEST

/* SIGUSR2 starts the program that is now installed at the same path. */
START_TEST(an_upgrade) {
        char path[128], command[600], exe[256] = "", link[64];
        struct stat before, after;
        pid_t pid;

        snprintf(path, sizeof path, "%s/kvd", in.dir);
        snprintf(command, sizeof command, "cp -f %s %s", getenv("KVD"), path);
        ck_assert_int_eq(system(command), 0);
        setenv("KVD", path, 1);
        KEEP("--set", "daemon.segment=1M");
        pid = answers();
        ck_assert_int_eq(stat(path, &before), 0);
        snprintf(command, sizeof command, "cp %s %s.new && mv -f %s.new %s", path, path, path,
                 path);
        ck_assert_int_eq(system(command), 0);
        kill(in.pid, SIGUSR2);
        pid = wait_for_another(pid);
        answers();
        snprintf(link, sizeof link, "/proc/%d/exe", pid);
        ck_assert_int_gt(readlink(link, exe, sizeof exe - 1), 0);
        ck_assert_str_eq(exe, path);
        ck_assert_int_eq(stat(link, &after), 0);
        ck_assert_uint_ne(before.st_ino, after.st_ino);
        instance_stop(&in);
}
END_TEST

START_TEST(signals_are_passed_on) {
        static const int signals[] = {SIGTERM, SIGINT};
        pid_t pid;

        KEEP("--set", "daemon.segment=1M");
        pid = kept();
        kill(in.pid, SIGHUP);
        ck_assert_int_eq(answers(), pid);
        kill(in.pid, signals[_i]);
        ck_assert_int_eq(wait_status(in.pid), 0);
        ck_assert_int_eq(kill(pid, 0), -1);
        ck_assert_int_eq(access(in.socket, F_OK), -1);
}
END_TEST

/* If kvd itself is stopped, the keeper does not restart it, but ends, too. */
START_TEST(a_clean_end_is_the_end) {
        KEEP("--set", "daemon.segment=1M");
        kill(kept(), SIGTERM);
        ck_assert_int_eq(wait_status(in.pid), 0);
        ck_assert_int_eq(access(in.socket, F_OK), -1);
}
END_TEST

START_TEST(a_wrong_configuration) {
        RUN(false, "--keep", "--private", in.dir, "--set", "daemon.nonsense=1");
        ck_assert_int_eq(wait_status(in.pid), 1);
        RUN(false, "--keep", "--private", in.dir, "--set", "daemon.backend=cuda", "--device", "77");
        ck_assert_int_eq(wait_status(in.pid), 2);
        ck_assert_int_eq(access(in.socket, F_OK), -1);
}
END_TEST

/* Its clients lose nothing. Only a private kvd ends with its parent; see kvd(8). */
START_TEST(kvd_goes_on_without_its_keeper) {
        struct peer_end *p;
        pid_t pid;

        chmod(in.dir, 0755);
        RUN(true, "--keep", "--socket", in.socket, "--pool", "64M", "--user",
            geteuid() == 0 ? "root" : getenv("USER"));
        pid = answers();
        instance_kill(&in);
        p = peer_attach(in.socket);
        peer_open_space(p, "s");
        peer_close(p);
        ck_assert_int_eq(kill(pid, SIGTERM), 0);
        WAIT_UNTIL(kill(pid, 0) < 0 || waitpid(pid, NULL, WNOHANG) == pid);
}
END_TEST

START_TEST(a_private_one_ends_with_its_keeper) {
        int alive;

        KEEP("--set", "daemon.segment=1M");
        alive = raw_attach(in.socket);
        instance_kill(&in);
        ck_assert_int_eq(raw_receive(alive, NULL, NULL), 0);
        close(alive);
}
END_TEST

/* The keeper keeps descriptors, but never maps the tenants' data. */
START_TEST(the_keeper_maps_nothing) {
        char path[64], line[512];
        struct peer_end *p;
        FILE *f;

        KEEP("--set", "daemon.segment=1M");
        p = peer_attach(in.socket);
        peer_open_space(p, "s");
        snprintf(path, sizeof path, "/proc/%d/maps", in.pid);
        f = fopen(path, "re");
        ck_assert_ptr_nonnull(f);
        while (fgets(line, sizeof line, f))
                ck_assert_msg(!strstr(line, "memfd") && !strstr(line, "rw-s"), "%s", line);
        fclose(f);
        peer_close(p);
        instance_stop(&in);
}
END_TEST

/* ---- the keeper's own manager ---------------------------------------------------------------- */

static void expect_state(int fd, const char *prefix) {
        ck_assert_int_eq(strncmp(next_state(fd), prefix, strlen(prefix)), 0);
}

START_TEST(states_are_passed_on) {
        int fd = instance_notified(&in);

        KEEP("--set", "daemon.segment=1M");
        expect_state(fd, "READY=1\nSTATUS=Serving");
        kill(in.pid, SIGHUP);
        expect_state(fd, "RELOADING=1");
        expect_state(fd, "READY=1");
        kill(in.pid, SIGUSR2); /* this reports no end */
        expect_state(fd, "READY=1\nSTATUS=Serving");
        kill(in.pid, SIGTERM);
        expect_state(fd, "STOPPING=1");
        ck_assert_int_eq(wait_status(in.pid), 0);
        close(fd);
}
END_TEST

SUITE("keeper", WHEN(argc == 3 && strcmp(argv[1], "--script") == 0, run_script(argv[2])),
      FIXTURE(setup, teardown),
      TESTS(kept_descriptors_come_back, twenty_thousand_descriptors, one_too_many_is_not_kept,
            only_its_own_daemon_is_believed, a_deadly_descriptor_is_dropped,
            a_cache_that_does_not_fit_into_the_cgroup_is_dropped, kills_by_others_cost_nothing,
            a_crash_loop_ends, a_busy_keeper_does_not_give_up, a_failed_start_is_not_repeated),
      TESTS(kvd_comes_back, connections_wait, an_upgrade, a_clean_end_is_the_end,
            a_wrong_configuration, kvd_goes_on_without_its_keeper,
            a_private_one_ends_with_its_keeper, the_keeper_maps_nothing, states_are_passed_on),
      LOOPS(2, signals_are_passed_on))
