/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The daemon in a thread of the test: it allocates nothing in its steady state, and leaves no
 * descriptor open when it ends.
 */

#include <dirent.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

#include "daemon/main/daemon.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tests/lib/inproc.h"
#include "tests/lib/peer.h"
#include "tests/lib/suite.h"

#define STORM 30u /* fewer than the connections that may wait to attach */

static struct inproc it;
static uint32_t fds_before;

#define MSG(name_, ...) ((struct kvd_msg){.number = KVD_MSG_##name_, .name_ = {__VA_ARGS__}})

static void setup(void) {
        fds_before = fds_of(0);
        inproc_start(&it, SETTINGS("daemon.pool=64M", "daemon.segment=1M"));
}

static void end_daemon(void) {
        inproc_stop(&it);
}

static void teardown(void) {
        if (it.daemon)
                end_daemon();
        ck_assert_uint_eq(fds_of(0), fds_before);
}

/* A round of all common requests. */
static void work(struct peer_end *p, uint32_t space, uint32_t round) {
        uint32_t tokens[4] = {round % 500, 1, 2, 3};
        struct kvd_msg r;
        kvd_ref blocks[4];

        r = peer_ok(p, MSG(allocate, .space = space, .count = 4));
        ck_assert_uint_eq(r.allocate_reply.blocks.size, sizeof blocks);
        memcpy(blocks, r.allocate_reply.blocks.data, sizeof blocks);
        peer_ok(p, MSG(seal, .space = space, .blocks = {blocks, 8},
                       .tokens = {tokens, sizeof tokens}));
        peer_ok(p, MSG(release, .space = space, .blocks = {blocks, sizeof blocks}));
        peer_ok(p, MSG(lease, .space = space, .op = 1, .prefix_key = {"0123456789abcdef", 16}));
        peer_ok(p, MSG(lease, .space = space, .op = 2, .prefix_key = {"0123456789abcdef", 16}));
        peer_ok(p, MSG(segments, .space = space));
        peer_ok(p, MSG(space_info));
        peer_ok(p, MSG(client_info));
        peer_ok(p, MSG(evict, .space = kvd_slice_of("s"), .blocks = 1));
        peer_refused(p, MSG(allocate, .space = 7, .count = 1), -EBADF);
}

static bool work_allocates(struct peer_end *p, uint32_t space) {
        size_t before = mallinfo2().uordblks;

        for (uint32_t i = 0; i < 2000; i++)
                work(p, space, i);
        return mallinfo2().uordblks != before;
}

/*
 * On a busy machine the warm-up may miss something, so that the daemon allocates later. It may do
 * so in one round, but not in two.
 */
START_TEST(steady_state_allocates_nothing) {
        struct peer_end *p = peer_attach(it.in.socket);
        uint32_t space = peer_open_space(p, "s");

        for (uint32_t i = 0; i < 100; i++)
                work(p, space, i);
        ck_assert(!work_allocates(p, space) || !work_allocates(p, space));
        peer_close(p);
}
END_TEST

static bool connections_allocate(struct peer_end *p) {
        size_t before = mallinfo2().uordblks;

        for (int i = 0; i < 100; i++) {
                peer_close(peer_attach(it.in.socket));
                WAIT_UNTIL(peer_ok(p, MSG(daemon_info)).daemon_info_reply.clients == 1);
        }
        return mallinfo2().uordblks != before;
}

START_TEST(connections_allocate_nothing) {
        struct peer_end *p = peer_attach(it.in.socket);

        connections_allocate(p);
        ck_assert(!connections_allocate(p) || !connections_allocate(p));
        peer_close(p);
}
END_TEST

START_TEST(stopped_while_clients_are_busy) {
        struct peer_end *p = peer_attach(it.in.socket), *q;

        peer_ok(p, MSG(allocate, .space = peer_open_space(p, "s"), .count = 4));
        q = peer_connect(it.in.socket);
        peer_send(q, &MSG(attach, .protocol = KVD_PROTOCOL));
        end_daemon();
        peer_close(p);
        peer_close(q);
}
END_TEST

/*
 * A storm of connections: between two polls of its sockets, the loop accepts at most one
 * connection.
 */
static struct {
        struct kvd_sys table;
        pthread_mutex_t gate; /* closed while they connect */
        uint32_t accepted, since_look, most;
} storm = {.gate = PTHREAD_MUTEX_INITIALIZER};

static int count_accept(int fd, int flags) {
        int r = kvd_sys_real.accept(fd, flags);

        storm.accepted += r >= 0;
        storm.since_look += r >= 0;
        storm.most = MAX(storm.most, storm.since_look);
        return r;
}

static int count_look(int epfd, struct epoll_event *events, int n, int timeout_ms) {
        pthread_mutex_lock(&storm.gate);
        pthread_mutex_unlock(&storm.gate);
        storm.since_look = 0;
        return kvd_sys_real.epoll_wait(epfd, events, n, timeout_ms);
}

static void start_storm(void) {
        storm.table = kvd_sys_real;
        storm.table.accept = count_accept;
        storm.table.epoll_wait = count_look;
        sys = &storm.table;
        setup();
}

static void end_storm(void) {
        teardown();
        sys = &kvd_sys_real;
}

START_TEST(one_connection_is_accepted_at_a_time) {
        struct peer_end *p = peer_attach(it.in.socket);
        int fds[STORM];

        pthread_mutex_lock(&storm.gate);
        for (uint32_t i = 0; i < STORM; i++)
                fds[i] = raw_connect(it.in.socket);
        pthread_mutex_unlock(&storm.gate);
        while (peer_ok(p, MSG(daemon_info)).number && storm.accepted < STORM + 1)
                ;
        ck_assert_uint_eq(storm.most, 1);
        for (uint32_t i = 0; i < STORM; i++)
                close(fds[i]);
        peer_close(p);
}
END_TEST

SUITE("inside", CASE("busy"), FIXTURE(setup, teardown),
      TESTS(steady_state_allocates_nothing, connections_allocate_nothing,
            stopped_while_clients_are_busy),
      CASE("storm"), FIXTURE(start_storm, end_storm), TESTS(one_connection_is_accepted_at_a_time))
