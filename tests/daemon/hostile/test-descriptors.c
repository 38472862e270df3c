/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Unsolicited descriptors: closing one may take seconds or hours. Clients send a socket that
 * lingers, or many inotify queues. These clients have attached, have not attached, or are refused.
 * The loop must answer other clients meanwhile, and never sleep for any of them. The tests run with
 * Linux's protection from unwanted descriptors (6.16), and without it: then a filter simulates an
 * old kernel.
 */

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "ipc/base/util.h"
#include "tests/lib/container.h"
#include "tests/lib/peer.h"
#include "tests/lib/suite.h"

#define PASSRIGHTS 83
#define MANY 64u
#define OLD_KERNEL (_i & 1)
#define LOOP (_i & 2 ? "daemon.loop=epoll" : "daemon.loop=auto")

static struct instance in;
static struct peer_end *other;

/* ---- an old kernel --------------------------------------------------------------------------- */

static bool kernel_knows(void) {
        int ends[2], value;
        unsigned n = sizeof value;
        bool knows;

        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
        knows = getsockopt(ends[0], SOL_SOCKET, PASSRIGHTS, &value, &n) == 0;
        close(ends[0]);
        close(ends[1]);
        return knows;
}

static void start(int variant, const char *setting) {
        int _i = variant;

        if (OLD_KERNEL)
                forget_socket_option(PASSRIGHTS);
        instance_start_public(&in, SETTINGS(LOOP, setting, "domain ours.users=0"));
        other = peer_attach(in.socket);
}

static void stop(void) {
        other = peer_close(other);
        instance_end(&in);
}

/* ---- what is sent ---------------------------------------------------------------------------- */

/* Makes a loopback connection whose peer reads nothing, so that its close waits for an hour. */
static void set_linger(int socket, int seconds) {
        struct linger linger = {.l_onoff = seconds > 0, .l_linger = seconds};

        ck_assert_int_eq(setsockopt(socket, SOL_SOCKET, SO_LINGER, &linger, sizeof linger), 0);
}

static void make_lingering(int ends[2]) {
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        int listener = socket(AF_INET, SOCK_STREAM, 0), small = 4096;
        unsigned n = sizeof a;
        char bytes[4096] = {0};

        setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
        ck_assert_int_eq(bind(listener, (struct sockaddr *)&a, sizeof a), 0);
        ck_assert_int_eq(listen(listener, 1), 0);
        ck_assert_int_eq(getsockname(listener, (struct sockaddr *)&a, &n), 0);
        ends[0] = socket(AF_INET, SOCK_STREAM, 0);
        ck_assert_int_eq(connect(ends[0], (struct sockaddr *)&a, sizeof a), 0);
        ends[1] = accept(listener, NULL, NULL);
        close(listener);
        set_linger(ends[0], 3600);
        while (send(ends[0], bytes, sizeof bytes, MSG_DONTWAIT) > 0)
                ;
}

static int send_fds(int socket, const int *fds, uint32_t n) {
        char control[CMSG_SPACE(MANY * sizeof(int))] = {0};
        struct iovec piece = {"x", 1};
        struct msghdr m = {.msg_iov = &piece,
                           .msg_iovlen = 1,
                           .msg_control = control,
                           .msg_controllen = CMSG_SPACE(n * sizeof(int))};
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);

        *c = (struct cmsghdr){CMSG_LEN(n * sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
        memcpy(CMSG_DATA(c), fds, n * sizeof(int));
        return sendmsg(socket, &m, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

static void woken(int number) {
}

/* A signal ends the lingering if the daemon has closed its copy first and ours is the last. */
static void close_impatiently(int fd) {
        const struct sigaction action = {.sa_handler = woken};

        sigaction(SIGALRM, &action, NULL);
        ualarm(10000, 10000);
        close(fd);
        ualarm(0, 0);
}

static int send_lingering(int socket) {
        int ends[2], r;

        make_lingering(ends);
        r = send_fds(socket, ends, 1);
        close_impatiently(ends[0]);
        close(ends[1]);
        return r;
}

/*
 * Sends a lingering socket over a new connection, and returns that. If this process is stopped for
 * longer than the daemon waits for attach, it connects again.
 */
static int throw_lingering(bool attached, bool refused) {
        int socket = attached ? raw_attach(in.socket) : raw_connect(in.socket), r;

        while ((r = send_lingering(socket)) == -EPIPE) {
                close(socket);
                socket = attached ? raw_attach(in.socket) : raw_connect(in.socket);
        }
        ck_assert_int_eq(r, refused ? -EPERM : 0);
        return socket;
}

static void send_queues(int socket, bool refused) {
        int fds[MANY];

        for (uint32_t i = 0; i < MANY; i++) {
                WAIT_UNTIL((fds[i] = inotify_init()) >= 0); /* a user may have 128 */
                ck_assert_int_ge(inotify_add_watch(fds[i], in.dir, IN_CREATE), 0);
        }
        ck_assert_int_eq(send_fds(socket, fds, MANY), refused ? -EPERM : 0);
        for (uint32_t i = 0; i < MANY; i++)
                close(fds[i]);
}

/* ---- what happens then ----------------------------------------------------------------------- */

static bool keeps_off(int variant) {
        return !(variant & 1) && kernel_knows();
}

static void expect_end(int socket) {
        struct kvd_msg reply;

        ck_assert_int_eq(raw_receive(socket, &reply, NULL), 0);
        close(socket);
}

static void expect_answers(void) {
        for (int i = 0; i < 20; i++)
                peer_ok(other, (struct kvd_msg){.number = KVD_MSG_daemon_info});
}

/* Number of times that the loop's thread slept. */
static uint64_t sleeps(void) {
        unsigned long long n = 0;
        char path[64], line[256];
        FILE *f;

        snprintf(path, sizeof path, "/proc/%d/task/%d/status", in.pid, in.pid);
        f = fopen(path, "re");
        ck_assert_ptr_nonnull(f);
        while (fgets(line, sizeof line, f) &&
               sscanf(line, "voluntary_ctxt_switches: %llu", &n) != 1)
                ;
        fclose(f);
        return n;
}

START_TEST(lingering_sockets_delay_no_answer) {
        int socket;

        start(_i, "daemon.log=error");
        for (int k = 0; k < 2; k++) {
                socket = throw_lingering(k, keeps_off(_i));
                if (keeps_off(_i))
                        close(socket);
                else
                        expect_end(socket);
                expect_answers();
        }
        stop();
}
END_TEST

/* Sends queues to the daemon. Returns how often the loop's thread slept meanwhile. */
static uint64_t throw_queues(int variant) {
        uint32_t fds = instance_fds(&in);
        uint64_t before, after;
        int socket = raw_attach(in.socket);

        expect_answers();
        before = sleeps();
        send_queues(socket, keeps_off(variant));
        if (keeps_off(variant))
                close(socket);
        else
                expect_end(socket);
        expect_answers();
        after = sleeps();
        WAIT_UNTIL(instance_fds(&in) <= fds);
        return after - before;
}

/*
 * Each close of a queue sleeps, so the loop's thread must not close queues itself. It may sleep
 * only between its answers.
 */
START_TEST(the_loop_closes_no_inotify_queues) {
        uint64_t least = UINT64_MAX;

        start(_i, "daemon.log=error");
        for (int i = 0; i < 3 && least >= 20 + 20 + MANY / 4; i++)
                least = MIN(least, throw_queues(_i));
        ck_assert_uint_lt(least, 20 + 20 + MANY / 4);
        stop();
}
END_TEST

/* The descriptors wait unread in sockets that end because they did not attach in time. */
START_TEST(unread_descriptors_delay_no_answer) {
        int sockets[4];

        start(_i, "daemon.log=error");
        kill(in.pid, SIGSTOP);
        for (uint32_t i = 0; i < ARRAY_SIZE(sockets); i++) {
                sockets[i] = raw_connect(in.socket);
                send(sockets[i], "not a frame", 11, 0);
                ck_assert_int_eq(send_lingering(sockets[i]), keeps_off(_i) ? -EPERM : 0);
                send_fds(sockets[i], &sockets[i], 1); /* itself */
        }
        kill(in.pid, SIGCONT);
        for (uint32_t i = 0; i < ARRAY_SIZE(sockets); i++) {
                struct kvd_msg reply;

                while (raw_receive(sockets[i], &reply, NULL) == 1)
                        ;
                close(sockets[i]);
        }
        expect_answers();
        stop();
}
END_TEST

START_TEST(descriptors_of_a_refused_user_delay_no_answer) {
        int status;
        pid_t pid;

        if (getuid() != 0)
                return;
        start(_i, "daemon.unlisted=refuse");
        pid = fork();
        if (pid == 0) {
                if (setgid(1001) < 0 || setuid(1001) < 0)
                        _exit(1);
                for (int k = 0; k < 20; k++)
                        close(throw_lingering(false, keeps_off(_i)));
                _exit(0);
        }
        while (waitpid(pid, &status, WNOHANG) == 0)
                expect_answers();
        ck_assert_int_eq(status, 0);
        expect_answers();
        stop();
}
END_TEST

SUITE("descriptors",
      LOOPS(4, lingering_sockets_delay_no_answer, the_loop_closes_no_inotify_queues,
            unread_descriptors_delay_no_answer, descriptors_of_a_refused_user_delay_no_answer))
