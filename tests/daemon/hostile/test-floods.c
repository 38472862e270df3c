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
#define ASKED 20u /* fewer than a connection of the flood can send ahead */
/*
 * Requests of the flood in that time: 8 for each of the victim's, and for its first one, which may
 * cost a hundred times as much while the daemon's memory is cold, a round of the flood and another.
 * Without turns it would be a round for each.
 */
#define MOST (8 * ASKED + 2 * FLOOD)
#define MSG(name_, ...) ((struct kvd_msg){.number = KVD_MSG_##name_, .serial = 1, .name_ = {__VA_ARGS__}})

static struct instance in;
static int go[2], ready[2];
static char nothing[4000];

/* ---- the flood ------------------------------------------------------------------------------- */

static int attach_and_open(void) {
        static const struct kvd_msg hello = {
                .number = KVD_MSG_attach, .serial = 1, .attach.protocol = KVD_PROTOCOL};
        int fd = raw_connect(in.socket);
        struct kvd_msg reply;

        if (raw_call(fd, &hello, &reply, NULL) != 1 || reply.number != KVD_MSG_attach_reply)
                die("the flood may not attach");
        return fd;
}

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
                fds[i] = attach_and_open();
        while (write(ready[1], "x", 1) == 1 && read(go[0], &byte, 1) == 1)
                for (uint32_t i = 0; i < FLOOD; i++)
                        send_all(fds[i], request);
        _exit(0);
}

/* ---- the victim ------------------------------------------------------------------------------ */

/* Requests like the flood's, which cost as much, between two that count all requests. */
static void ask(struct peer_end *p, const struct kvd_msg *like) {
        peer_send(p, &MSG(daemon_info));
        for (uint32_t i = 2; i < ASKED; i++)
                peer_send(p, like);
        peer_send(p, &MSG(daemon_info));
}

/* The number of other requests between the victim's first and its last. */
static uint64_t others_between(struct peer_end *p) {
        struct kvd_msg first, reply;

        ck_assert(peer_receive(p, &first));
        ck_assert_uint_eq(first.number, KVD_MSG_daemon_info_reply);
        for (uint32_t i = 1; i < ASKED; i++)
                ck_assert(peer_receive(p, &reply));
        ck_assert_uint_eq(reply.number, KVD_MSG_daemon_info_reply);
        return reply.daemon_info_reply.requests - first.daemon_info_reply.requests - (ASKED - 1);
}

static void start(int loop) {
        ck_assert_int_eq(pipe(go), 0);
        ck_assert_int_eq(pipe(ready), 0);
        instance_start_public(&in, SETTINGS(loop ? "daemon.loop=epoll" : "daemon.loop=auto",
                                            "daemon.max_clients=1024", "daemon.log=error"));
}

static uint64_t measure(const struct kvd_msg *request) {
        struct peer_end *victim = peer_attach(in.socket);
        pid_t pid = fork();
        uint64_t others;
        char byte;

        if (pid == 0)
                flood(request);
        ck_assert_int_eq(read(ready[0], &byte, 1), 1);
        kill(in.pid, SIGSTOP);
        ck_assert_int_eq(write(go[1], "x", 1), 1);
        ck_assert_int_eq(read(ready[0], &byte, 1), 1); /* all requests are sent */
        ask(victim, request);
        kill(in.pid, SIGCONT);
        others = others_between(victim);
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        peer_close(victim);
        return others;
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
