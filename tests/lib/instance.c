/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/instance.h"

#include <dirent.h>
#include <errno.h>
#include <glob.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "client/conn/conn.h"
#include "client/conn/deadline.h"
#include "client/kvd.h"
#include "ipc/address.h"
#include "ipc/base/util.h"
#include "tests/lib/sanitized.h"
#include "tests/lib/yard.h"

#define MAX_ARGUMENTS 64

void (*before_death)(void);
pid_t (*instance_fork)(void) = fork;

/* A busy machine may keep the daemon, or another thread of a connection, from running for seconds. */
static __attribute__((constructor)) void be_patient(void) {
        deadline_ms = PATIENCE_MS;
}

_Noreturn void die(const char *format, ...) {
        va_list args;

        if (before_death)
                before_death();
        va_start(args, format);
        vfprintf(stderr, format, args);
        va_end(args);
        fputc('\n', stderr);
        exit(1);
}

/* ---- the process ----------------------------------------------------------------------------- */

static _Noreturn void become(const char *const *arguments, int ready) {
        const char *argv[MAX_ARGUMENTS] = {getenv("KVD")};
        char number[16];
        int n = 1;

        while (*arguments && n < MAX_ARGUMENTS - 3)
                argv[n++] = *arguments++;
        snprintf(number, sizeof number, "%d", ready);
        if (ready >= 0) {
                argv[n++] = "--ready-fd";
                argv[n++] = number;
        }
        if (!argv[0])
                die("set KVD to the program");
        setenv("LISTEN_PID", "0", 0);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        execv(argv[0], (char *const *)argv);
        die("%s: %s", argv[0], strerror(errno));
}

/* Waits until kvd has also closed its end: some tests count its descriptors. */
static void wait_ready(int fd) {
        struct pollfd p = {fd, POLLIN, 0};
        char byte = 0, more;

        if (poll(&p, 1, PATIENCE_MS) != 1 || read(fd, &byte, 1) != 1 || byte != '\n')
                die("kvd did not become ready");
        while (read(fd, &more, 1) > 0)
                ;
}

int instance_notified(struct instance *in) {
        struct kvd_address address;
        char path[96];
        int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);

        snprintf(path, sizeof path, "%s/notify", in->dir);
        if (kvd_address_make(path, &address) < 0 ||
            bind(fd, kvd_address_of(&address), address.size) < 0)
                die("%s: %s", path, strerror(errno));
        setenv("NOTIFY_SOCKET", path, 1);
        return fd;
}

const char *next_state(int fd) {
        static char state[256];
        struct pollfd p = {fd, POLLIN, 0};
        ssize_t n;

        do {
                if (poll(&p, 1, PATIENCE_MS) != 1)
                        die("kvd does not say how it is");
                n = recv(fd, state, sizeof state - 1, 0);
                if (n <= 0)
                        die("kvd says nothing: %s", strerror(errno));
                state[n] = 0;
        } while (strcmp(state, "WATCHDOG=1") == 0);
        return state;
}

void instance_run(struct instance *in, const char *const *arguments, bool ready) {
        int ends[2];

        if (pipe(ends) < 0)
                die("pipe: %s", strerror(errno));
        in->pid = instance_fork();
        if (in->pid == 0) {
                close(ends[0]);
                become(arguments, ready ? ends[1] : -1);
        }
        close(ends[1]);
        if (ready)
                wait_ready(ends[0]);
        close(ends[0]);
}

static bool is_called(pid_t pid, const char *name) {
        char path[64], text[64] = "";
        FILE *f;

        snprintf(path, sizeof path, "/proc/%d/comm", pid);
        f = fopen(path, "re");
        if (!f)
                return false;
        if (fscanf(f, "%63[^\n]", text) != 1)
                text[0] = 0;
        fclose(f);
        return !name || strcmp(text, name) == 0;
}

static pid_t child_in(const char *children, const char *name) {
        FILE *f = fopen(children, "re");
        int pid, found = 0;

        while (f && !found && fscanf(f, "%d", &pid) == 1)
                if (is_called(pid, name))
                        found = pid;
        if (f)
                fclose(f);
        return found;
}

/* /proc lists children under the thread that forked them. */
pid_t child_of(pid_t parent, const char *name) {
        char pattern[64];
        pid_t found = 0;
        glob_t threads;

        snprintf(pattern, sizeof pattern, "/proc/%d/task/*/children", parent);
        if (glob(pattern, 0, NULL, &threads) != 0)
                return 0;
        for (size_t i = 0; !found && i < threads.gl_pathc; i++)
                found = child_in(threads.gl_pathv[i], name);
        globfree(&threads);
        return found;
}

bool instance_on_gpu(void) {
        const char *backend = getenv("KVD_TEST_BACKEND");

        return backend && strcmp(backend, "host") != 0;
}

uint32_t driver_calls(const char *function) {
        const char *path = getenv("FAKECUDA_LOG");
        FILE *log = path ? fopen(path, "re") : NULL;
        char mine[64], line[128];
        uint32_t n = 0;

        if (!log)
                die("the driver has no log");
        snprintf(mine, sizeof mine, "%d %s\n", getpid(), function);
        while (fgets(line, sizeof line, log))
                n += strcmp(line, mine) == 0;
        fclose(log);
        return n;
}

static void start(struct instance *in, bool public, const char *const *settings) {
        const char *arguments[MAX_ARGUMENTS] = {public ? "--socket" : "--private",
                                                public ? in->socket : in->dir, "--pool", "64M",
                                                "--set", "daemon.segment=1M", "--set",
                                                "daemon.pages=small", "--set",
                                                "daemon.quarantine_ms=20", "--set",
                                                "daemon.socket_mode=0666",
                                                /* a busy machine is not a hanging disk */
                                                "--set", "daemon.file_timeout=1800", "--backend",
                                                "host"};
        int n = 16;

        if (public && geteuid() == 0) { /* even if user kvd exists */
                arguments[n++] = "--user";
                arguments[n++] = "root";
        }
        if (instance_on_gpu()) { /* the stand-in allocates the reserve, to see whether it is free */
                arguments[n - 1] = getenv("KVD_TEST_BACKEND");
                arguments[n++] = "--set";
                arguments[n++] = "daemon.reserve=1M";
        }
        for (; settings && *settings && n < MAX_ARGUMENTS - 5; settings++) {
                arguments[n++] = "--set";
                arguments[n++] = *settings;
        }
        instance_run(in, arguments, true);
}

void instance_again(struct instance *in, const char *const *settings) {
        start(in, false, settings);
}

void instance_make_dir(struct instance *in) {
        *in = (struct instance){.dir = "/tmp/kvd-test-XXXXXX"};
        if (!mkdtemp(in->dir))
                die("mkdtemp: %s", strerror(errno));
        snprintf(in->socket, sizeof in->socket, "%s/kvd.sock", in->dir);
}

void instance_start(struct instance *in, const char *const *settings) {
        instance_make_dir(in);
        instance_again(in, settings);
}

void instance_start_public(struct instance *in, const char *const *settings) {
        instance_make_dir(in);
        chmod(in->dir, 0755);
        start(in, true, settings);
}

int wait_status(pid_t pid) {
        int status;

        if (waitpid(pid, &status, 0) != pid)
                die("waitpid: %s", strerror(errno));
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void instance_stop(struct instance *in) {
        int status;

        kill(in->pid, SIGTERM);
        status = wait_status(in->pid);
        in->pid = 0;
        if (status != 0)
                die("kvd ended with status %d", status);
        if (access(in->socket, F_OK) == 0)
                die("kvd left its socket");
}

void instance_kill(struct instance *in) {
        kill(in->pid, SIGKILL);
        wait_status(in->pid);
        in->pid = 0;
}

void instance_sweep(struct instance *in) {
        char path[512];
        struct dirent *e;
        DIR *dir = opendir(in->dir);

        while (dir && (e = readdir(dir))) {
                snprintf(path, sizeof path, "%s/%s", in->dir, e->d_name);
                unlink(path);
        }
        if (dir)
                closedir(dir);
        rmdir(in->dir);
}

void instance_end(struct instance *in) {
        instance_stop(in);
        instance_sweep(in);
}

void instance_end_clean(struct instance *in) {
        instance_expect_clean(in);
        instance_end(in);
}

void become_user(uid_t user) {
        if (setresgid(user, user, user) < 0 || setresuid(user, user, 0) < 0)
                die("cannot become user %u: %s", user, strerror(errno));
}

/* ---- resources of the process ---------------------------------------------------------------- */

uint32_t fds_of(pid_t pid) {
        uint32_t n = 0;
        char path[64];
        DIR *dir;

        snprintf(path, sizeof path, "/proc/%d/fd", pid ? pid : getpid());
        dir = opendir(path);
        if (!dir)
                die("%s: %s", path, strerror(errno));
        while (readdir(dir))
                n++;
        closedir(dir);
        return n - 2 - (pid == 0); /* ., .., and the directory itself */
}

uint32_t instance_fds(const struct instance *in) {
        return fds_of(in->pid);
}

/* The number that format finds in a line of a file of /proc. */
static uint64_t number_in(pid_t pid, const char *file, const char *format) {
        unsigned long long number = 0;
        char path[64], line[256];
        FILE *f;

        snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
        f = fopen(path, "re");
        if (!f)
                die("%s: %s", path, strerror(errno));
        while (fgets(line, sizeof line, f) && sscanf(line, format, &number) != 1)
                ;
        fclose(f);
        return number;
}

uint64_t instance_rss_kib(const struct instance *in) {
        return number_in(in->pid, "status", "RssAnon: %llu");
}

uint64_t instance_shared_kib(const struct instance *in) {
        return number_in(in->pid, "status", "RssShmem: %llu");
}

/* The clock is up to date. /proc is as old as the last tick for a thread that runs. */
uint64_t instance_cpu_ns(const struct instance *in) {
        struct timespec t;
        clockid_t clock;

        if (clock_getcpuclockid(in->pid, &clock) != 0 || clock_gettime(clock, &t) < 0)
                die("processor time of %d: %s", in->pid, strerror(errno));
        return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static bool is_asleep(const struct instance *in) {
        char path[64], state = 0;
        FILE *f;

        snprintf(path, sizeof path, "/proc/%d/stat", in->pid);
        f = fopen(path, "re");
        if (!f || fscanf(f, "%*d %*s %c", &state) != 1)
                die("%s: %s", path, strerror(errno));
        fclose(f);
        return state == 'S';
}

void instance_rest(const struct instance *in) {
        uint64_t before;
        bool slept;

        do {
                before = instance_cpu_ns(in);
                slept = is_asleep(in);
                usleep(4000);
        } while (!slept || !is_asleep(in) || instance_cpu_ns(in) != before);
}

/* ---- how much the daemon works --------------------------------------------------------------- */

/* How long this thread has waited for a processor. */
static uint64_t own_delay_ns(void) {
        return number_in(gettid(), "schedstat", "%*llu %llu");
}

struct work_begun work_begin(const struct instance *in) {
        /* Read before the processor time: the daemon's work between the two must not count. */
        uint64_t delay_ns = own_delay_ns();

        return (struct work_begun){delay_ns, instance_cpu_ns(in)};
}

int64_t work_since(const struct instance *in, const struct work_begun *begun) {
        uint64_t cpu_ns = instance_cpu_ns(in) - begun->cpu_ns;

        return (int64_t)(cpu_ns - (own_delay_ns() - begun->delay_ns));
}

#define FEW_OVER 3u

/* 10 ms: the cost of a few turns of the loop, scaled to this machine. */
static uint64_t budget_ns(void) {
        static uint64_t ns;

        if (!ns)
                ns = (uint64_t)(10000000 * slowness());
        return ns;
}

void work_see(struct work_seen *seen, int64_t worked_ns) {
        if (worked_ns > (int64_t)seen->most_ns)
                seen->most_ns = (uint64_t)worked_ns;
        seen->n_over += worked_ns > (int64_t)budget_ns();
}

bool work_is_bounded(const struct work_seen *seen) {
        return SANITIZED || (seen->n_over <= FEW_OVER && seen->most_ns <= 4 * budget_ns());
}

/* ---- questions to it ------------------------------------------------------------------------- */

struct conn *instance_connect(const struct instance *in) {
        struct conn *conn;

        if (conn_open(in->socket, "test", &conn) < 0)
                die("%s", kvd_error());
        return conn;
}

void space_facts(struct conn *conn, uint32_t nth, struct kvd_msg_space_info_reply *ret) {
        ret->next = 0;
        do {
                struct kvd_msg_space_info request = {ret->next};

                if (conn_call(conn, KVD_MSG_space_info, &request, ret) < 0)
                        die("space_info: %s", kvd_error());
        } while (nth--);
}

/* False: the space changed during the check, so its sums were not compared. */
static bool check_space(struct conn *conn, const char *name, const char *domain) {
        struct kvd_msg_check request = {.space = kvd_slice_of(name),
                                        .domain = kvd_slice_of(domain)};
        struct kvd_msg_check_reply reply;
        char first[256];

        do {
                if (conn_call(conn, KVD_MSG_check, &request, &reply) < 0)
                        die("check: %s", kvd_error());
                if (reply.broken)
                        die("space %s: %u invariants broken, first: %s", name, reply.broken,
                            kvd_slice_copy(reply.first, first, sizeof first));
                request.cursor = reply.next;
        } while (reply.next);
        return !reply.partial;
}

static bool next_space(struct conn *conn, struct kvd_msg_space_info_reply *info, char name[64]) {
        struct kvd_msg_space_info request = {info->next};
        int r = conn_call(conn, KVD_MSG_space_info, &request, info);

        if (r == -ENOENT)
                return false;
        if (r < 0)
                die("space_info: %s", kvd_error());
        kvd_slice_copy(info->name, name, 64);
        return true;
}

static bool is_clean(struct conn *conn) {
        struct kvd_msg_space_info_reply info = {0};
        bool whole = true;
        char name[64], domain[64];

        while (next_space(conn, &info, name)) {
                kvd_slice_copy(info.domain, domain, sizeof domain);
                if (info.free + info.filling + info.sealed + info.limbo != info.total)
                        die("space %s: free + filling + sealed + limbo is not total", name);
                whole &= check_space(conn, name, domain);
        }
        return whole;
}

void expect_clean(struct conn *conn) {
        is_clean(conn);
}

static bool is_quiet(struct conn *conn) {
        struct kvd_msg_space_info_reply info = {0};
        char name[64];

        while (next_space(conn, &info, name))
                if (info.filling || info.limbo || info.clients || info.leases)
                        return false;
        return true;
}

void expect_quiet(struct conn *conn) {
        WAIT_UNTIL(is_quiet(conn));
}

void instance_expect_clean(const struct instance *in) {
        struct conn *conn = instance_connect(in);

        expect_quiet(conn);
        WAIT_UNTIL(is_clean(conn));
        conn_close(conn);
}
