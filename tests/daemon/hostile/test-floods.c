/* SPDX-License-Identifier: Apache-2.0 */

/*
 * 200 connections of one user send as many of the costliest requests as they can, while one of
 * another user sends its own. The test counts the requests that the daemon answers between two of
 * the victim's. If all requests cost the same, every second answer must be the victim's. The flood
 * may get more answers only if its requests cost less. The daemon is stopped while all of them
 * send, so that a busy machine does not distort the count.
 */

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/lib/peer.h"
#include "tests/lib/suite.h"

#define FLOOD 200u
#define ASKED 20u          /* fewer than a connection of the flood can send ahead */
#define MOST 8u            /* flood requests for each of the victim's, which cost as much */
#define OPENED (FLOOD + 3) /* requests that prepare the flood */
#define MSG(name_, ...) \
        ((struct kvd_msg){.number = KVD_MSG_##name_, .serial = 1, .name_ = {__VA_ARGS__}})

static struct instance in;
static int go[2], ready[2];
static char nothing[4000];

/* ---- the flood ------------------------------------------------------------------------------- */

static void send_all(int fd, const struct kvd_msg *request) {
        static uint8_t frame[KVD_FRAME_MAX];
        ssize_t n = kvd_msg_encode(request, frame, sizeof frame);

        while (send(fd, frame, (size_t)n, MSG_DONTWAIT | MSG_NOSIGNAL) > 0)
                ;
}

static _Noreturn void flood(const struct kvd_msg *request) {
        int fds[FLOOD];
        char byte;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (setgid(1001) < 0 || setuid(1001) < 0)
                _exit(2);
        peer_open_space(peer_attach(in.socket), "flooded");
        for (uint32_t i = 0; i < FLOOD; i++)
                fds[i] = raw_attach(in.socket);
        while (write(ready[1], "x", 1) == 1 && read(go[0], &byte, 1) == 1)
                for (uint32_t i = 0; i < FLOOD; i++)
                        send_all(fds[i], request);
        _exit(0);
}

/* ---- the victim ------------------------------------------------------------------------------ */

static uint64_t requests_of(const struct kvd_msg *reply) {
        ck_assert_uint_eq(reply->number, KVD_MSG_daemon_info_reply);
        return reply->daemon_info_reply.requests;
}

/* Asks what the flood asks, and how many requests the daemon had last. */
static void ask(struct peer_end *p, const struct kvd_msg *like) {
        for (uint32_t i = 1; i < ASKED; i++)
                peer_send(p, like);
        peer_send(p, &MSG(daemon_info));
}

/*
 * It sleeps while the daemon answers, if that is long enough: waking it for each reply costs the
 * daemon more than a request of the flood.
 */
static uint64_t requests_at_last(struct peer_end *p) {
        struct kvd_msg reply;

        usleep(300000);
        for (uint32_t i = 0; i < ASKED; i++)
                ck_assert(peer_receive(p, &reply));
        return requests_of(&reply);
}

static void start(int loop) {
        ck_assert_int_eq(pipe(go), 0);
        ck_assert_int_eq(pipe(ready), 0);
        instance_start_public(&in, SETTINGS(loop ? "daemon.loop=epoll" : "daemon.loop=auto",
                                            "daemon.max_clients=1024", "daemon.log=error"));
}

/*
 * How many requests of the flood are served for each of the victim's. The victim counts requests
 * before the flood has begun: that costs much more than a request of the flood, and would cost the
 * victim turns.
 */
static uint64_t measure(const struct kvd_msg *request) {
        struct peer_end *victim = peer_attach(in.socket);
        struct kvd_msg first = peer_ok(victim, MSG(daemon_info));
        uint64_t all;
        pid_t pid = fork();
        char byte;

        if (pid == 0)
                flood(request);
        ck_assert_int_eq(read(ready[0], &byte, 1), 1);
        kill(in.pid, SIGSTOP);
        ck_assert_int_eq(write(go[1], "x", 1), 1);
        ck_assert_int_eq(read(ready[0], &byte, 1), 1); /* all requests are sent */
        ask(victim, request);
        kill(in.pid, SIGCONT);
        all = requests_at_last(victim) - requests_of(&first);
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        peer_close(victim);
        ck_assert_uint_ge(all, OPENED + ASKED);
        return (all - OPENED - ASKED) / ASKED;
}

#define KINDS 5

START_TEST(a_flood_leaves_another_user_its_turns) {
        const struct kvd_msg kinds[KINDS] = {
                MSG(daemon_info),
                MSG(seal, .space = 1, .tokens = {nothing, sizeof nothing}),
                MSG(block_map, .space = kvd_slice_of("flooded")),
                MSG(check, .space = kvd_slice_of("flooded")),
                MSG(space_set, .space = kvd_slice_of("flooded"), .key = kvd_slice_of("policy"),
                    .value = kvd_slice_of("priority")),
        };

        if (getuid() != 0)
                return;
        start(_i / KINDS);
        ck_assert_uint_le(measure(&kinds[_i % KINDS]), MOST);
        instance_end(&in);
}
END_TEST

SUITE("floods", LOOPS(2 * KINDS, a_flood_leaves_another_user_its_turns))
