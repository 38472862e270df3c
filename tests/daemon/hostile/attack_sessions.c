/* SPDX-License-Identifier: Apache-2.0 */

/* Connections that flood, hang, disconnect at the wrong time, or stop. */

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "ipc/base/util.h"
#include "tests/daemon/hostile/hostile.h"
#include "tests/daemon/hostile/raw.h"

/* ---- floods ---------------------------------------------------------------------------------- */

#define FLOOD 600u

static void half_open(const struct hostile *h) {
        int fds[FLOOD];

        for (uint32_t i = 0; i < FLOOD; i++)
                fds[i] = raw_connect(h->daemon.socket);
        if (hostile_fds(h) > h->fds + 2 * 66)
                die("%u descriptors for connections that did not attach", hostile_fds(h) - h->fds);
        hostile_goes_on(h, 300);
        for (uint32_t i = 0; i < FLOOD; i++)
                close(fds[i]);
}

/*
 * Opens more connections than one user may have. The daemon must refuse the surplus, and accept a
 * new connection once the others have closed.
 */
static void many_attached(const struct hostile *h) {
        uint32_t attached = 0, refused = 0;
        struct kvd_msg reply;
        int fds[FLOOD];

        for (uint32_t i = 0; i < FLOOD; i++) {
                fds[i] = raw_hello(h->daemon.socket, &reply);
                attached += reply.number == KVD_MSG_attach_reply;
                refused += reply.number == KVD_MSG_error && reply.error.code == EUSERS;
        }
        if (attached < 100 || attached > 260 || attached + refused != FLOOD)
                die("%u connections attached, %u refused", attached, refused);
        for (uint32_t i = 0; i < FLOOD; i++)
                close(fds[i]);
        close(raw_attach(h->daemon.socket));
}

static void connect_and_go(const struct hostile *h) {
        for (int i = 0; i < 2000; i++)
                close(i % 2 ? raw_connect(h->daemon.socket) : raw_attach(h->daemon.socket));
}

/* ---- not reading ----------------------------------------------------------------------------- */

/* Sends requests until the socket takes no more. Replies are never read. Returns their number. */
static uint32_t fill_socket(int fd, const struct kvd_msg *request) {
        static uint8_t frame[KVD_FRAME_MAX];
        ssize_t n = kvd_msg_encode(request, frame, sizeof frame);
        uint32_t sent = 0;

        for (int idle = 0; idle < 20;) {
                if (send(fd, frame, (size_t)n, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) {
                        sent++;
                        idle = 0;
                } else {
                        idle++;
                        usleep(2000);
                }
        }
        return sent;
}

static void never_reads(const struct hostile *h) {
        struct kvd_msg map = {.number = KVD_MSG_block_map,
                              .serial = 3,
                              .block_map.space = kvd_slice_of("victim")};
        struct kvd_msg open = victim_space_message(), reply;
        int fds[8];

        for (uint32_t i = 0; i < ARRAY_SIZE(fds); i++) {
                fds[i] = raw_attach(h->daemon.socket);
                fill_socket(fds[i], i % 2 ? &open : &map);
        }
        /* A client that finally reads gets all replies, in order. */
        for (int n = 0; n < 50; n++)
                if (raw_receive(fds[0], &reply, NULL) != 1)
                        die("the connection of a slow client has ended");
}

/* ---- disconnecting --------------------------------------------------------------------------- */

static uint32_t open_victim_space(int fd) {
        struct kvd_msg request = victim_space_message(), reply;
        struct kvd_fds fds;

        if (raw_call(fd, &request, &reply, &fds) != 1 || reply.number != KVD_MSG_space_reply)
                die("the victim's space cannot be opened");
        kvd_fds_close(&fds);
        return reply.space_reply.space;
}

/*
 * Each connection requests blocks and closes before the reply. All belong to one process, so the
 * blocks stay reserved until it ends, and are freed then.
 */
static void leaves_in_mid_request(const struct hostile *h) {
        static uint8_t frame[256];
        struct kvd_msg m = {.number = KVD_MSG_allocate, .serial = 9};

        for (int i = 0; i < 100; i++) {
                int fd = raw_attach(h->daemon.socket);
                ssize_t n;

                m.allocate = (struct kvd_msg_allocate){open_victim_space(fd), 1};
                n = kvd_msg_encode(&m, frame, sizeof frame);
                send(fd, frame, (size_t)n, MSG_NOSIGNAL);
                send(fd, frame, (size_t)n, MSG_NOSIGNAL);
                close(fd);
        }
}

/* ---- stopped --------------------------------------------------------------------------------- */

/* Pins a chain, reports that, stops itself, and checks the chain when it continues. */
static _Noreturn void hold_and_check(const struct hostile *h, int ready) {
        uint32_t tokens[VICTIM_BLOCKS * VICTIM_BT], ids[VICTIM_BLOCKS],
                chain = 700 + (uint32_t)getpid() % 1000 % 20;
        struct kvd_block blocks[4];
        struct kvd_pin pin = {0};
        struct kvd_space *space;
        struct kvd *handle;
        int n;

        victim_tokens(chain, tokens);
        if (kvd_open(h->daemon.socket, &handle) < 0 ||
            kvd_space_open(handle, "stopped", &victim_geometry, NULL, &space) < 0)
                die("%s", kvd_error());
        n = kvd_alloc(space, 4, blocks);
        for (int i = 0; i < n; i++)
                victim_block_fill(blocks[i].data, chain, (uint32_t)i);
        if (n <= 0 ||
            kvd_seal(space, &pin, (uint32_t)n, blocks, tokens, (uint32_t)n * VICTIM_BT) != n)
                die("stopped client: %s", kvd_error());
        for (int i = 0; i < n; i++)
                ids[i] = blocks[i].id;
        if (write(ready, "r", 1) != 1)
                die("pipe");
        raise(SIGSTOP);
        for (int i = 0; i < n; i++)
                if (!victim_block_is_right(kvd_pin_block(&pin, ids[i]), chain, (uint32_t)i))
                        die("a stopped client lost its pinned blocks");
        kvd_unpin(space, &pin);
        _exit(0);
}

static void evict_everything(const struct hostile *h, const char *space) {
        struct kvd_msg_evict request = {.space = kvd_slice_of(space)};
        struct kvd_msg_evict_reply reply = {0};
        struct conn *conn = instance_connect(&h->daemon);

        do
                if (conn_call(conn, KVD_MSG_evict, &request, &reply) < 0)
                        die("evict: %s", kvd_error());
        while (reply.more);
        conn_close(conn);
}

static void stopped_clients(const struct hostile *h) {
        pid_t pids[6];
        int ready[2], status;
        char byte;

        if (pipe(ready) < 0)
                die("pipe");
        for (uint32_t i = 0; i < ARRAY_SIZE(pids); i++) {
                pids[i] = fork();
                if (pids[i] == 0)
                        hold_and_check(h, ready[1]);
                if (read(ready[0], &byte, 1) != 1 ||
                    waitpid(pids[i], &status, WUNTRACED) != pids[i])
                        die("a client did not stop");
        }
        for (int i = 0; i < 20; i++) {
                evict_everything(h, "stopped");
                if (!h->attacker)
                        evict_everything(h, "victim");
                usleep(10000);
        }
        for (uint32_t i = 0; i < ARRAY_SIZE(pids); i++) {
                kill(pids[i], SIGCONT);
                waitpid(pids[i], &status, 0);
                if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
                        die("a client that was stopped ended with status %#x", status);
        }
}

/* ---- memory ---------------------------------------------------------------------------------- */

#define SPACES 48u

/* The daemon's memory for each of many spaces is freed when they are deleted. */
static void opens_many_spaces(const struct hostile *h) {
        int fd = raw_attach(h->daemon.socket);
        char name[32];

        for (uint32_t i = 0; i < SPACES; i++) {
                snprintf(name, sizeof name, "many-%u", i);
                raw_open_space(fd, name);
        }
        close(fd);
}

const struct attack_row session_attacks[] =
        {{"600 connections that do not attach", half_open, 64},
         {"600 connections that attach", many_attached, 256},
         {"2,000 connections that close at once", connect_and_go, 16},
         {"clients that never read", never_reads, 8},
         {"clients that leave before the reply", leaves_in_mid_request, 100},
         {"stopped clients keep their pins", stopped_clients, 6},
         {"a client that opens 48 spaces", opens_many_spaces, 1},
         {0}};
