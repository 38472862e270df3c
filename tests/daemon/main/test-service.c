/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvd as a service: how it starts, what it reports to its service manager, how it ends, and with
 * which exit status.
 */

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "ipc/address.h"
#include "ipc/base/util.h"
#include "tests/lib/peer.h"
#include "tests/lib/suite.h"

static struct instance in;

static void setup(void) {
        instance_make_dir(&in);
}

static void teardown(void) {
        instance_sweep(&in);
}

#define RUN(ready, ...) instance_run(&in, (const char *const[]){__VA_ARGS__, NULL}, ready)

/* ---- exit status ----------------------------------------------------------------------------- */

START_TEST(answers_and_exits) {
        ck_assert_ptr_nonnull(freopen("/dev/null", "w", stdout));
        RUN(false, "--help");
        ck_assert_int_eq(wait_status(in.pid), 0);
        RUN(false, "--version");
        ck_assert_int_eq(wait_status(in.pid), 0);
        RUN(false, "-h");
        ck_assert_int_eq(wait_status(in.pid), 0);
        RUN(false, "-V");
        ck_assert_int_eq(wait_status(in.pid), 0);
        RUN(false, "--print-config");
        ck_assert_int_eq(wait_status(in.pid), 0);
        RUN(false, "--check-config", "/dev/null");
        ck_assert_int_eq(wait_status(in.pid), 0);
        RUN(false, "--check-config", in.dir);
        ck_assert_int_eq(wait_status(in.pid), 1);
        RUN(false, "--nonsense");
        ck_assert_int_eq(wait_status(in.pid), 1);
        RUN(false, "--config", "/nonexistent");
        ck_assert_int_eq(wait_status(in.pid), 1);
        RUN(false, "--private", "/proc/nonexistent");
        ck_assert_int_eq(wait_status(in.pid), 1);
        RUN(false, "--socket", "/nonexistent/kvd.sock");
        ck_assert_int_eq(wait_status(in.pid), 2);
}
END_TEST

START_TEST(ends_cleanly) {
        static const int signals[] = {SIGTERM, SIGINT};

        RUN(true, "--private", in.dir, "--pool", "64M");
        ck_assert_int_eq(access(in.socket, F_OK), 0);
        kill(in.pid, signals[_i]);
        ck_assert_int_eq(wait_status(in.pid), 0);
        ck_assert_int_eq(access(in.socket, F_OK), -1);
}
END_TEST

/* A core file contains the daemon's private memory and ELF headers, but not the pool. */
START_TEST(no_core_file_has_the_pool) {
        char path[64], filter[16] = "";
        FILE *f;

        RUN(true, "--private", in.dir, "--pool", "64M");
        snprintf(path, sizeof path, "/proc/%d/coredump_filter", in.pid);
        f = fopen(path, "re");
        ck_assert_ptr_nonnull(f);
        ck_assert_ptr_nonnull(fgets(filter, sizeof filter, f));
        fclose(f);
        ck_assert_str_eq(filter, "00000011\n");
        instance_stop(&in);
}
END_TEST

/* The default segment size adapts to a small pool. */
START_TEST(a_small_pool) {
        static const char *const pools[] = {"48M", "4M"};
        struct peer_end *p;

        RUN(true, "--private", in.dir, "--pool", pools[_i]);
        p = peer_attach(in.socket);
        peer_open_space(p, "s");
        peer_close(p);
        instance_stop(&in);
}
END_TEST

/* Forbids it as container runtimes do, for this test's process and its children. */
static void forbid_io_uring(void) {
        struct sock_filter code[] = {
                BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        struct sock_fprog program = {ARRAY_SIZE(code), code};

        ck_assert_int_eq(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        ck_assert_int_eq(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

START_TEST(io_uring_is_forbidden) {
        struct peer_end *p;
        struct kvd_msg r;

        forbid_io_uring();
        RUN(false, "--private", in.dir, "--pool", "64M", "--set", "daemon.loop=io_uring");
        ck_assert_int_eq(wait_status(in.pid), 2);
        RUN(true, "--private", in.dir, "--pool", "64M");
        p = peer_attach(in.socket);
        r = peer_ok(p, (struct kvd_msg){.number = KVD_MSG_daemon_info});
        ck_assert(kvd_slice_is(r.daemon_info_reply.loop, "epoll"));
        peer_close(p);
        kill(in.pid, SIGTERM);
        ck_assert_int_eq(wait_status(in.pid), 0);
}
END_TEST

/* ---- socket ---------------------------------------------------------------------------------- */

START_TEST(a_dead_daemons_socket_is_replaced) {
        const char *dir = _i ? "." : in.dir;
        struct peer_end *p;

        ck_assert_int_eq(chdir(in.dir), 0);
        RUN(true, "--private", dir, "--pool", "64M");
        kill(in.pid, SIGKILL);
        wait_status(in.pid);
        ck_assert_int_eq(access(in.socket, F_OK), 0);
        RUN(true, "--private", dir, "--pool", "64M");
        p = peer_attach(in.socket);
        peer_close(p);
        kill(in.pid, SIGTERM);
        ck_assert_int_eq(wait_status(in.pid), 0);
}
END_TEST

START_TEST(a_living_daemons_socket_is_not) {
        struct peer_end *p;
        pid_t first;

        RUN(true, "--private", in.dir, "--pool", "64M");
        first = in.pid;
        RUN(false, "--private", in.dir, "--pool", "64M");
        ck_assert_int_eq(wait_status(in.pid), 2);
        kill(first, SIGSTOP); /* a daemon that does not answer keeps its socket, too */
        RUN(false, "--private", in.dir, "--pool", "64M");
        ck_assert_int_eq(wait_status(in.pid), 2);
        kill(first, SIGCONT);
        p = peer_attach(in.socket);
        peer_close(p);
        kill(first, SIGTERM);
        ck_assert_int_eq(wait_status(first), 0);
}
END_TEST

static int listening(int type, bool listens) {
        int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
        struct kvd_address address;

        ck_assert_int_eq(kvd_address_make(in.socket, &address), 0);
        ck_assert_int_eq(bind(fd, kvd_address_of(&address), address.size), 0);
        if (listens)
                ck_assert_int_eq(listen(fd, 16), 0);
        return fd;
}

START_TEST(a_file_is_not_a_socket) {
        close(open(in.socket, O_CREAT | O_WRONLY, 0600));
        RUN(false, "--private", in.dir);
        ck_assert_int_eq(wait_status(in.pid), 2);
        ck_assert_int_eq(access(in.socket, F_OK), 0);
}
END_TEST

START_TEST(two_that_start_together) {
        pid_t a, b, ended;
        int status;

        RUN(false, "--private", in.dir, "--pool", "64M");
        a = in.pid;
        RUN(false, "--private", in.dir, "--pool", "64M");
        b = in.pid;
        ended = waitpid(-1, &status, 0);
        ck_assert_int_eq(WEXITSTATUS(status), 2);
        in.pid = ended == a ? b : a;
        peer_close(peer_attach(in.socket)); /* connects to the other one */
        kill(in.pid, SIGTERM);
        ck_assert_int_eq(wait_status(in.pid), 0);
}
END_TEST

START_TEST(an_abstract_socket) {
        char name[96];

        snprintf(name, sizeof name, "@%s", in.dir);
        RUN(true, "--socket", name, "--pool", "64M");
        peer_close(peer_attach(name));
        kill(in.pid, SIGTERM);
        ck_assert_int_eq(wait_status(in.pid), 0);
}
END_TEST

/* Whether kvd has written this text to the file. */
static bool file_says(const char *path, const char *format, ...) {
        char text[4096] = "", wanted[256];
        FILE *from = fopen(path, "r");
        va_list list;

        va_start(list, format);
        vsnprintf(wanted, sizeof wanted, format, list);
        va_end(list);
        if (from) {
                text[fread(text, 1, sizeof text - 1, from)] = 0;
                fclose(from);
        }
        return strstr(text, wanted);
}

START_TEST(a_private_one_ends_with_its_parent) {
        char log[sizeof in.dir + 8];
        pid_t daemon, parent;
        int ends[2];

        snprintf(log, sizeof log, "%s/log", in.dir);
        prctl(PR_SET_CHILD_SUBREAPER, 1); /* so that we can wait for the grandchild */
        ck_assert_int_eq(pipe(ends), 0);
        parent = fork();
        if (parent == 0) {
                ck_assert_ptr_nonnull(freopen(log, "w", stderr));
                RUN(true, "--private", in.dir, "--pool", "64M");
                if (write(ends[1], &in.pid, sizeof in.pid) != sizeof in.pid)
                        abort();
                _exit(0);
        }
        wait_status(parent);
        ck_assert_int_eq(read(ends[0], &daemon, sizeof daemon), sizeof daemon);
        ck_assert_int_eq(wait_status(daemon), 0);
        ck_assert_int_eq(access(in.socket, F_OK), -1);
        ck_assert(file_says(log, "process %d, which started kvd, has ended: ending", parent));
}
END_TEST

START_TEST(the_log_names_the_sender_of_a_signal) {
        char log[sizeof in.dir + 8];

        snprintf(log, sizeof log, "%s/log", in.dir);
        ck_assert_ptr_nonnull(freopen(log, "w", stderr));
        RUN(true, "--private", in.dir, "--pool", "64M");
        kill(in.pid, SIGTERM);
        ck_assert_int_eq(wait_status(in.pid), 0);
        ck_assert(file_says(log, "SIGTERM from process %d: ending", getpid()));
}
END_TEST

/* ---- other users ----------------------------------------------------------------------------- */

/* Starts kvd and returns its exit status. If it serves, it is ended, and the status is 0. */
static int refusal(const char *what, const char *path) {
        char number[16], byte;
        int ends[2];

        ck_assert_int_eq(pipe(ends), 0);
        snprintf(number, sizeof number, "%d", ends[1]);
        RUN(false, what, path, "--pool", "64M", "--ready-fd", number);
        close(ends[1]);
        if (read(ends[0], &byte, 1) == 1)
                kill(in.pid, SIGTERM);
        close(ends[0]);
        return wait_status(in.pid);
}

/* A user that may write to the folder could replace the socket. */
START_TEST(a_private_folder_that_others_may_write_to_is_refused) {
        static const mode_t modes[] = {0777, 01777, 0770, 0702};
        char log[sizeof in.dir + 8];

        ck_assert_int_eq(chmod(in.dir, modes[_i]), 0);
        snprintf(log, sizeof log, "%s/log", in.dir);
        ck_assert_ptr_nonnull(freopen(log, "w", stderr));
        ck_assert_int_eq(refusal("--private", in.dir), 1);
        ck_assert(file_says(log, "give one of your own, such as %s/kvd-%u, which kvd makes", in.dir,
                            getuid()));
        ck_assert(!file_says(log, "chmod")); /* a user might follow that advice and break /tmp */
        ck_assert_int_eq(chmod(in.dir, 0755), 0);
        ck_assert_int_eq(refusal("--private", in.dir), 0);
}
END_TEST

START_TEST(a_link_to_a_private_folder_is_refused) {
        static const char *const ends[] = {"", "/", "//"};
        char path[96], given[100];

        snprintf(path, sizeof path, "%s/link", in.dir);
        snprintf(given, sizeof given, "%s%s", path, ends[_i]);
        ck_assert_int_eq(symlink(".", path), 0);
        ck_assert_int_eq(refusal("--private", given), 1);
        snprintf(given, sizeof given, "%s%s", in.dir, ends[_i]);
        ck_assert_int_eq(refusal("--private", given), 0);
}
END_TEST

/* Another process has moved the daemon's socket away, and bound its own in its place. */
START_TEST(a_daemon_removes_only_its_own_socket) {
        char moved[96];
        int other;

        RUN(true, "--private", in.dir, "--pool", "64M");
        snprintf(moved, sizeof moved, "%s/moved", in.dir);
        ck_assert_int_eq(rename(in.socket, moved), 0);
        other = listening(SOCK_SEQPACKET, true);
        kill(in.pid, SIGTERM);
        ck_assert_int_eq(wait_status(in.pid), 0);
        ck_assert_int_eq(access(in.socket, F_OK), 0);
        close(other);
}
END_TEST

static bool can_be_others(void) {
        if (getuid() == 0)
                return true;
        fputs("not run: only root can be two users\n", stderr);
        return false;
}

static int refusal_as(uid_t user, const char *what, const char *path) {
        pid_t pid = fork();

        if (pid == 0) {
                if (setgid(user) < 0 || setuid(user) < 0)
                        _exit(99);
                _exit(refusal(what, path));
        }
        return wait_status(pid);
}

START_TEST(a_private_folder_of_another_user_is_refused) {
        if (!can_be_others())
                return;
        ck_assert_int_eq(chown(in.dir, 4001, 4001), 0);
        ck_assert_int_eq(chmod(in.dir, _i ? 0777 : 0755), 0);
        ck_assert_int_eq(refusal_as(4002, "--private", in.dir), 1);
        ck_assert_int_eq(refusal("--private", in.dir), 1); /* root is refused, too */
}
END_TEST

/* No process listens, and the folder would let any user remove the socket. */
START_TEST(a_socket_of_another_user_is_not_replaced) {
        if (!can_be_others())
                return;
        ck_assert_int_eq(chmod(in.dir, 0777), 0);
        close(listening(SOCK_SEQPACKET, true));
        ck_assert_int_eq(chown(in.socket, 4001, 4001), 0);
        ck_assert_int_eq(chmod(in.socket, 0666), 0);
        ck_assert_int_eq(refusal_as(4002, "--socket", in.socket), 2);
        ck_assert_int_eq(access(in.socket, F_OK), 0);
}
END_TEST

static void limit_files(rlim_t bytes) {
        struct rlimit limit = {bytes, RLIM_INFINITY};

        ck_assert_int_eq(prlimit(in.pid, RLIMIT_FSIZE, &limit, NULL), 0);
}

/* A process that makes a memory file larger than the limit gets SIGXFSZ. */
START_TEST(a_limit_of_file_sizes_is_an_error_reply) {
        struct kvd_msg fill = {.number = KVD_MSG_allocate, .allocate = {.count = 1}};
        struct peer_end *p;

        RUN(true, "--private", in.dir, "--pool", "64M");
        limit_files(65536);
        p = peer_attach(in.socket);
        peer_refused(p, peer_space_message("s"), -EFBIG);
        limit_files(RLIM_INFINITY);
        fill.allocate.space = peer_ok(p, peer_space_message("s")).space_reply.space;
        limit_files(65536);
        peer_refused(p, fill, -ENOBUFS);
        limit_files(RLIM_INFINITY);
        peer_ok(p, fill);
        peer_close(p);
        instance_stop(&in);
}
END_TEST

/* ---- service manager ------------------------------------------------------------------------- */

START_TEST(tells_its_state) {
        int fd = instance_notified(&in);

        RUN(false, "--private", in.dir, "--pool", "64M");
        ck_assert_int_eq(strncmp(next_state(fd), "READY=1\nSTATUS=Serving\n", 23), 0);
        kill(in.pid, SIGHUP);
        ck_assert_int_eq(strncmp(next_state(fd), "RELOADING=1\nMONOTONIC_USEC=", 27), 0);
        ck_assert_str_eq(next_state(fd), "READY=1");
        kill(in.pid, SIGTERM);
        ck_assert_str_eq(next_state(fd), "STOPPING=1");
        ck_assert_int_eq(wait_status(in.pid), 0);
        close(fd);
}
END_TEST

START_TEST(feeds_the_watchdog) {
        int fd = instance_notified(&in);
        struct pollfd p = {fd, POLLIN, 0};
        unsigned fed = 0;
        char state[256];
        ssize_t n;

        setenv("WATCHDOG_USEC", "100000", 1);
        RUN(false, "--private", in.dir, "--pool", "64M");
        while (fed < 6 && poll(&p, 1, PATIENCE_MS) == 1) {
                n = recv(fd, state, sizeof state, 0);
                fed += n == 10 && memcmp(state, "WATCHDOG=1", 10) == 0;
        }
        ck_assert_uint_eq(fed, 6);
        kill(in.pid, SIGSTOP); /* a loop that hangs stops sending */
        while (poll(&p, 1, 200) == 1)
                recv(fd, state, sizeof state, 0);
        ck_assert_int_eq(poll(&p, 1, 300), 0);
        kill(in.pid, SIGCONT);
        ck_assert_int_eq(poll(&p, 1, PATIENCE_MS), 1);
        kill(in.pid, SIGTERM);
        ck_assert_int_eq(wait_status(in.pid), 0);
        close(fd);
}
END_TEST

START_TEST(an_absent_manager_is_no_trouble) {
        setenv("NOTIFY_SOCKET", "/nonexistent/notify", 1);
        RUN(true, "--private", in.dir, "--pool", "64M");
        kill(in.pid, SIGTERM);
        ck_assert_int_eq(wait_status(in.pid), 0);
}
END_TEST

/* Starts kvd with a descriptor 3 as a service manager would. */
static void activate(int fd, const char *names) {
        char pid[16];

        in.pid = fork();
        if (in.pid != 0)
                return;
        snprintf(pid, sizeof pid, "%d", getpid());
        setenv("LISTEN_PID", pid, 1);
        setenv("LISTEN_FDS", "1", 1);
        if (names)
                setenv("LISTEN_FDNAMES", names, 1);
        if (dup2(fd, 3) != 3 || (fd == 3 && fcntl(3, F_SETFD, 0) < 0))
                _exit(99);
        execl(getenv("KVD"), "kvd", "--pool", "64M", "--socket", "/nonexistent/unused", NULL);
        _exit(98);
}

START_TEST(a_socket_handed_over) {
        static const char *const names[] = {"listen", NULL, "unknown"};
        int fd = listening(SOCK_SEQPACKET, true);
        struct peer_end *p;

        p = peer_connect(in.socket); /* before the daemon is started */
        activate(fd, names[_i]);
        peer_ok(p,
                (struct kvd_msg){.number = KVD_MSG_attach, .attach = {.protocol = KVD_PROTOCOL}});
        peer_close(p);
        kill(in.pid, SIGTERM);
        ck_assert_int_eq(wait_status(in.pid), 0);
        ck_assert_int_eq(access(in.socket, F_OK), 0); /* it belongs to the manager */
        close(fd);
}
END_TEST

START_TEST(an_unusable_one) {
        int fd = listening(_i == 0 ? SOCK_STREAM : SOCK_SEQPACKET, _i != 1);

        activate(fd, _i == 2 ? "store" : "listen");
        ck_assert_int_eq(wait_status(in.pid), 1);
        close(fd);
}
END_TEST

/* ---- reload ---------------------------------------------------------------------------------- */

static void write_config(const char *path, const char *text) {
        FILE *f = fopen(path, "w");

        fputs(text, f);
        fclose(f);
}

static bool belongs_to(const char *domain) {
        struct peer_end *p = peer_connect(in.socket);
        struct kvd_msg r;
        bool so;

        r = peer_ok(p, (struct kvd_msg){.number = KVD_MSG_attach,
                                        .attach = {.protocol = KVD_PROTOCOL}});
        so = kvd_slice_is(r.attach_reply.domain, domain);
        peer_close(p);
        return so;
}

START_TEST(reload) {
        char path[96], text[128];

        snprintf(path, sizeof path, "%s/kvd.conf", in.dir);
        snprintf(text, sizeof text, "[daemon]\npool=128M\n[domain red]\nusers=%u\n", getuid());
        write_config(path, "[daemon]\npool=64M\n");
        RUN(true, "--private", in.dir, "--config", path);
        ck_assert(!belongs_to("red"));
        write_config(path, text);
        kill(in.pid, SIGHUP);
        WAIT_UNTIL(belongs_to("red"));
        write_config(path, "[daemon]\nnonsense\n"); /* the old configuration stays */
        kill(in.pid, SIGHUP);
        usleep(50000);
        ck_assert(belongs_to("red"));
        write_config(path, "");
        kill(in.pid, SIGHUP);
        WAIT_UNTIL(!belongs_to("red"));
        kill(in.pid, SIGTERM);
        ck_assert_int_eq(wait_status(in.pid), 0);
}
END_TEST

/* The configuration is a pipe, whose writer is slow. */
START_TEST(a_reload_that_waits_stops_nobody) {
        char path[96], text[128];

        snprintf(path, sizeof path, "%s/kvd.conf", in.dir);
        snprintf(text, sizeof text, "[domain red]\nusers=%u\n", getuid());
        write_config(path, "");
        RUN(true, "--private", in.dir, "--config", path);
        ck_assert_int_eq(unlink(path), 0);
        ck_assert_int_eq(mkfifo(path, 0600), 0);
        kill(in.pid, SIGHUP);
        for (int i = 0; i < 20; i++) {
                ck_assert(!belongs_to("red"));
                usleep(5000);
        }
        write_config(path, text);
        WAIT_UNTIL(belongs_to("red"));
        kill(in.pid, SIGHUP);
        ck_assert(belongs_to("red"));
        kill(in.pid, SIGTERM); /* the pipe has no writer any more */
        ck_assert_int_eq(wait_status(in.pid), 0);
}
END_TEST

SUITE("service", FIXTURE(setup, teardown), TESTS(answers_and_exits), LOOPS(2, ends_cleanly),
      TESTS(no_core_file_has_the_pool), LOOPS(2, a_small_pool), TESTS(io_uring_is_forbidden),
      LOOPS(2, a_dead_daemons_socket_is_replaced),
      TESTS(a_living_daemons_socket_is_not, a_file_is_not_a_socket),
      LOOPS(3, two_that_start_together),
      LOOPS(4, a_private_folder_that_others_may_write_to_is_refused),
      LOOPS(3, a_link_to_a_private_folder_is_refused), TESTS(a_daemon_removes_only_its_own_socket),
      LOOPS(2, a_private_folder_of_another_user_is_refused),
      TESTS(a_socket_of_another_user_is_not_replaced, a_limit_of_file_sizes_is_an_error_reply),
      TESTS(an_abstract_socket, a_private_one_ends_with_its_parent,
            the_log_names_the_sender_of_a_signal, tells_its_state, feeds_the_watchdog,
            an_absent_manager_is_no_trouble),
      LOOPS(3, a_socket_handed_over, an_unusable_one),
      TESTS(reload, a_reload_that_waits_stops_nobody))
