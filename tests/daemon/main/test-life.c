/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Connections and processes that end, stall, flood or break the protocol. The daemon frees all that
 * it held for them.
 */

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "ipc/base/util.h"
#include "tests/lib/peer.h"
#include "tests/lib/suite.h"

static const char *const loops[] = {"daemon.loop=epoll", "daemon.loop=auto"};

static struct instance in;
static struct peer_end *watcher;

#define MSG(name_, ...) ((struct kvd_msg){.number = KVD_MSG_##name_, .name_ = {__VA_ARGS__}})

static void start(int loop) {
        instance_start(&in, (const char *const[]){loops[loop], NULL});
        watcher = peer_attach(in.socket);
}

static void stop(void) {
        watcher = peer_close(watcher);
        instance_end(&in);
}

static struct kvd_msg_space_info_reply space_state(void) {
        return peer_ok(watcher, MSG(space_info)).space_info_reply;
}

static uint32_t clients(void) {
        return peer_ok(watcher, MSG(daemon_info)).daemon_info_reply.clients;
}

/* A process that attaches, allocates blocks, calls then(), and waits until it is told to end. */
struct actor {
        pid_t pid;
        int go; /* closing it tells the actor to end */
};

static void act(int go, void (*then)(struct peer_end *)) {
        struct peer_end *p = peer_attach(in.socket);
        char byte;

        peer_ok(p, MSG(allocate, .space = peer_open_space(p, "s"), .count = 4));
        then(p);
        while (read(go, &byte, 1) < 0)
                ;
        _exit(0);
}

static struct actor start_actor(void (*then)(struct peer_end *)) {
        struct actor a;
        int ends[2];

        ck_assert_int_eq(pipe(ends), 0);
        a.pid = fork();
        if (a.pid == 0) {
                close(ends[1]);
                act(ends[0], then);
        }
        close(ends[0]);
        a.go = ends[1];
        return a;
}

static void end_actor(struct actor *a, int signal) {
        if (signal)
                kill(a->pid, signal);
        close(a->go);
        waitpid(a->pid, NULL, 0);
}

static void do_nothing(struct peer_end *p) {
}

static void close_socket(struct peer_end *p) {
        close(p->fd);
}

static void detach_and_close(struct peer_end *p) {
        struct kvd_msg info = peer_client(p, getpid());

        ck_assert_uint_eq(info.client_info_reply.filling, 4);
        peer_ok(p, MSG(detach, .space = 64));
        close(p->fd);
}

static int held[2]; /* a pipe: closing it ends the process that outlives an actor */

/* Forks a child that inherits the connection and outlives the actor, as engines' helpers do. */
static void leave_child(struct peer_end *p) {
        char byte;

        if (fork() == 0) {
                close(held[1]);
                while (read(held[0], &byte, 1) < 0)
                        ;
                _exit(0);
        }
}

/* ---- death ----------------------------------------------------------------------------------- */

START_TEST(killed) {
        struct actor a;

        start(_i);
        a = start_actor(do_nothing);
        WAIT_UNTIL(peer_client(watcher, a.pid).client_info_reply.filling == 4);
        end_actor(&a, SIGKILL);
        WAIT_UNTIL(clients() == 1);
        ck_assert_uint_eq(space_state().filling + space_state().limbo, 0);
        ck_assert_uint_eq(space_state().clients, 0);
        stop();
}
END_TEST

START_TEST(socket_closed_and_process_alive) {
        struct kvd_msg info;
        struct actor a;

        start(_i);
        a = start_actor(close_socket);
        WAIT_UNTIL(peer_client(watcher, a.pid).number &&
                   !peer_client(watcher, a.pid).client_info_reply.connected);
        info = peer_client(watcher, a.pid);
        ck_assert_uint_eq(info.client_info_reply.spaces, 1);
        ck_assert_uint_eq(space_state().limbo, 4);
        ck_assert_uint_eq(space_state().filling, 0);
        end_actor(&a, 0);
        WAIT_UNTIL(clients() == 1);
        ck_assert_uint_eq(space_state().limbo, 0);
        stop();
}
END_TEST

START_TEST(process_dead_and_socket_inherited) {
        struct actor a;

        start(_i);
        ck_assert_int_eq(pipe(held), 0);
        a = start_actor(leave_child);
        WAIT_UNTIL(peer_client(watcher, a.pid).client_info_reply.filling == 4);
        WAIT_UNTIL(child_of(a.pid, NULL) > 0);
        end_actor(&a, SIGKILL);
        WAIT_UNTIL(clients() == 1); /* although the child still holds the socket */
        ck_assert_uint_eq(space_state().filling + space_state().limbo, 0);
        stop();
        close(held[0]);
        close(held[1]);
}
END_TEST

START_TEST(clean_goodbye) {
        struct actor a;

        start(_i);
        a = start_actor(detach_and_close);
        WAIT_UNTIL(peer_ok(watcher, MSG(daemon_info)).daemon_info_reply.spaces == 1);
        WAIT_UNTIL(clients() == 1); /* gone at once, although the process lives */
        ck_assert_uint_eq(space_state().filling + space_state().limbo, 0);
        end_actor(&a, 0);
        stop();
}
END_TEST

/* A second request while the process still runs gets the same reply. */
START_TEST(a_client_that_is_ended_keeps_what_its_process_can_touch) {
        struct kvd_msg_client_end_reply kept;
        struct actor a;
        uint32_t number;

        start(_i);
        a = start_actor(do_nothing);
        WAIT_UNTIL(peer_client(watcher, a.pid).client_info_reply.filling == 4);
        number = peer_client(watcher, a.pid).client_info_reply.client;
        for (int i = 0; i < 2; i++) {
                kept = peer_ok(watcher, MSG(client_end, .client = number)).client_end_reply;
                ck_assert_int_eq((pid_t)kept.pid, a.pid);
                ck_assert_uint_eq(kept.gone, 0);
                ck_assert_uint_eq(kept.spaces, 1);
                ck_assert_uint_eq(kept.filling, 4);
        }
        ck_assert_uint_eq(peer_client(watcher, a.pid).client_info_reply.connected, 0);
        WAIT_UNTIL(space_state().limbo == 4);
        end_actor(&a, SIGKILL);
        WAIT_UNTIL(clients() == 1);
        ck_assert_uint_eq(space_state().filling + space_state().limbo, 0);
        peer_refused(watcher, MSG(client_end, .client = number), -ENOENT);
        stop();
}
END_TEST

/* A client without spaces is gone at once, although its process lives. */
START_TEST(a_client_that_ends_itself_gets_its_reply_first) {
        struct peer_end *p;
        struct kvd_msg reply;

        start(_i);
        for (int with_space = 0; with_space < 2; with_space++) {
                p = peer_connect(in.socket);
                reply = peer_ok(p, MSG(attach, .protocol = KVD_PROTOCOL));
                if (with_space)
                        peer_open_space(p, "own");
                reply = peer_ok(p, MSG(client_end, .client = reply.attach_reply.client));
                ck_assert_int_eq((pid_t)reply.client_end_reply.pid, getpid());
                ck_assert_uint_eq(reply.client_end_reply.spaces, (uint32_t)with_space);
                ck_assert(!peer_receive(p, &reply));
                ck_assert_uint_eq(clients(), 1 + (uint32_t)with_space);
                peer_close(p);
        }
        stop();
}
END_TEST

START_TEST(space_deleted_under_an_orphan) {
        struct actor a;

        start(_i);
        a = start_actor(close_socket);
        WAIT_UNTIL(peer_client(watcher, a.pid).number &&
                   !peer_client(watcher, a.pid).client_info_reply.connected);
        peer_ok(watcher, MSG(space_delete, .space = kvd_slice_of("s"), .force = 1));
        ck_assert_uint_eq(clients(), 1);
        end_actor(&a, 0);
        stop();
}
END_TEST

/* ---- teams ----------------------------------------------------------------------------------- */

static void join(struct peer_end *p) {
        static const uint8_t team[16] = {7};

        peer_ok(p, MSG(join, .team = {team, sizeof team}));
        peer_open_space(p, "joined");
}

static bool joined(const struct actor *a) {
        return peer_client(watcher, a->pid).client_info_reply.spaces == 2;
}

static void join_and_close(struct peer_end *p) {
        join(p);
        close(p->fd);
}

static void join_and_detach(struct peer_end *p) {
        join(p);
        peer_ok(p, MSG(detach, .space = 64));
}

/* The worker may be writing to blocks that its scheduler allocated. */
START_TEST(a_dead_member_s_blocks_wait_for_its_team) {
        struct actor scheduler, worker;

        start(_i);
        peer_open_space(watcher, "s");
        worker = start_actor(join);
        scheduler = start_actor(join);
        WAIT_UNTIL(joined(&scheduler) && joined(&worker));
        end_actor(&scheduler, SIGKILL);
        WAIT_UNTIL(space_state().limbo == 4);
        ck_assert_uint_eq(clients(), 3);
        ck_assert_uint_eq(peer_client(watcher, scheduler.pid).client_info_reply.connected, 0);
        end_actor(&worker, SIGKILL);
        WAIT_UNTIL(clients() == 1);
        ck_assert_uint_eq(space_state().limbo + space_state().filling, 0);
        stop();
}
END_TEST

START_TEST(a_team_ends_in_any_order) {
        struct actor a[3];

        start(_i);
        peer_open_space(watcher, "s");
        for (int i = 0; i < 3; i++)
                a[i] = start_actor(i == 1 ? join_and_close : join);
        WAIT_UNTIL(joined(&a[0]) && joined(&a[2]) && space_state().limbo == 4);
        end_actor(&a[0], SIGKILL);
        end_actor(&a[2], 0);
        WAIT_UNTIL(space_state().limbo == 12); /* the one without a connection still runs */
        end_actor(&a[1], 0);
        WAIT_UNTIL(clients() == 1);
        ck_assert_uint_eq(space_state().limbo + space_state().filling, 0);
        stop();
}
END_TEST

START_TEST(detached_blocks_wait_for_the_team) {
        struct actor a, mate;

        start(_i);
        peer_open_space(watcher, "s");
        mate = start_actor(join);
        WAIT_UNTIL(joined(&mate));
        a = start_actor(join_and_detach);
        WAIT_UNTIL(space_state().limbo == 4);
        end_actor(&a, 0);
        WAIT_UNTIL(peer_client(watcher, a.pid).number &&
                   !peer_client(watcher, a.pid).client_info_reply.connected);
        ck_assert_uint_eq(space_state().limbo, 4);
        end_actor(&mate, 0);
        WAIT_UNTIL(clients() == 1);
        ck_assert_uint_eq(space_state().limbo, 0);
        stop();
}
END_TEST

START_TEST(teams_are_named) {
        static const uint8_t none[16], one[16] = {1}, two[16] = {2};
        struct peer_end *p;

        start(_i);
        p = peer_attach(in.socket);
        peer_refused(p, MSG(join, .team = {none, sizeof none}), -EINVAL);
        peer_refused(p, MSG(join, .team = {one, 8}), -EINVAL);
        ck_assert_uint_eq(peer_ok(p, MSG(join, .team = {one, sizeof one})).join_reply.members, 1);
        peer_refused(p, MSG(join, .team = {two, sizeof two}), -EBUSY);
        ck_assert_uint_eq(peer_ok(watcher, MSG(join, .team = {one, sizeof one})).join_reply.members,
                          2);
        peer_close(p);
        stop();
}
END_TEST

START_TEST(a_hundred_deaths_leave_nothing) {
        unsigned fds;
        struct actor a;

        start(_i);
        peer_open_space(watcher, "s");
        fds = instance_fds(&in);
        for (int i = 0; i < 100; i++) {
                a = start_actor(i % 3 ? do_nothing : close_socket);
                usleep((useconds_t)(i % 10) * 300);
                end_actor(&a, i % 2 ? SIGKILL : 0);
        }
        WAIT_UNTIL(clients() == 1);
        /* a segment that was made meanwhile has a descriptor */
        WAIT_UNTIL(instance_fds(&in) <= fds + 4);
        ck_assert_uint_eq(space_state().filling + space_state().limbo, 0);
        stop();
}
END_TEST

/* ---- hostile --------------------------------------------------------------------------------- */

/* The daemon becomes idle 20 times, and uses less than 20 ms of CPU time meanwhile. */
static void expect_rest(void) {
        uint64_t cpu;

        instance_rest(&in);
        cpu = instance_cpu_ns(&in);
        for (int i = 0; i < 20; i++)
                instance_rest(&in);
        ck_assert_uint_lt(instance_cpu_ns(&in) - cpu, 20000000);
}

/* Sends until the daemon stops reading, then receives: each request gets its reply, in order. */
START_TEST(never_reading) {
        struct kvd_msg request = MSG(daemon_info), reply;
        struct peer_end *p;
        uint64_t answered = 0;
        ssize_t n;
        int r = 0;

        start(_i);
        p = peer_attach(in.socket);
        while (r == 0) {
                request.serial = p->serial + 1;
                n = kvd_msg_encode(&request, p->frame, sizeof p->frame);
                r = kvd_frame_send(p->fd, p->frame, (size_t)n, NULL, MSG_DONTWAIT);
                p->serial += r == 0;
                if (r == -EAGAIN && answered++ < 50) {
                        usleep(1000);
                        r = 0;
                }
                ck_assert_uint_eq(clients(), 2); /* other clients are still served */
        }
        ck_assert_int_eq(r, -EAGAIN);
        ck_assert_uint_gt(p->serial, 100);
        for (answered = 2; answered <= p->serial; answered++) {
                ck_assert(peer_receive(p, &reply));
                ck_assert_uint_eq(reply.serial, answered);
        }
        peer_close(p);
        WAIT_UNTIL(clients() == 1);
        stop();
}
END_TEST

START_TEST(stalled_clients_cost_no_time) {
        struct kvd_msg request = MSG(daemon_info);
        struct peer_end *p;
        ssize_t n;

        start(_i);
        p = peer_attach(in.socket);
        request.serial = 9;
        n = kvd_msg_encode(&request, p->frame, sizeof p->frame);
        for (int i = 0; i < 20; i++) {
                while (kvd_frame_send(p->fd, p->frame, (size_t)n, NULL, MSG_DONTWAIT) == 0)
                        ;
                usleep(1000);
        }
        expect_rest();
        peer_close(p);
        stop();
}
END_TEST

START_TEST(a_flood_of_connections) {
        struct peer_end *flood[300];
        struct kvd_msg reply;
        unsigned fds;

        start(_i);
        fds = instance_fds(&in);
        for (size_t i = 0; i < ARRAY_SIZE(flood); i++) {
                flood[i] = peer_connect(in.socket);
                if (i % 50 == 0)
                        peer_close(peer_attach(in.socket)); /* clients that attach are served */
        }
        ck_assert_uint_le(instance_fds(&in), fds + 2 * 34);
        ck_assert(!peer_receive(flood[0], &reply)); /* the oldest was closed to make room */
        WAIT_UNTIL(instance_fds(&in) == fds);       /* after a second the last are gone */
        for (size_t i = 0; i < ARRAY_SIZE(flood); i++)
                peer_close(flood[i]);
        ck_assert_uint_eq(clients(), 1);
        stop();
}
END_TEST

static void limit_descriptors(unsigned n) {
        struct rlimit limit = {n, 4096};

        ck_assert_int_eq(prlimit(in.pid, RLIMIT_NOFILE, &limit, NULL), 0);
}

static void check_calm(void) {
        expect_rest();
        ck_assert_uint_eq(clients(), 21); /* attached clients are served */
}

/* The next descriptor that the daemon would get. */
static unsigned next_fd(void) {
        char path[64], target[256];
        unsigned fd = 0;

        do
                snprintf(path, sizeof path, "/proc/%d/fd/%u", in.pid, fd++);
        while (readlink(path, target, sizeof target) > 0);
        return fd - 1;
}

/* The daemon has no descriptor left for a connection, or only one, where it needs two. */
static void refused_at_once(unsigned limit) {
        struct peer_end *waiting[3];
        struct kvd_msg reply;

        limit_descriptors(limit);
        for (int i = 0; i < 3; i++)
                waiting[i] = peer_connect(in.socket);
        for (int i = 0; i < 3; i++) {
                ck_assert(!peer_receive(waiting[i], &reply));
                peer_close(waiting[i]);
        }
        check_calm();
        limit_descriptors(1024);
}

/* The limit is so low that not even the spare descriptor can be reopened. */
static void wait_for_better_times(void) {
        struct peer_end *waiting;

        limit_descriptors(3);
        waiting = peer_connect(in.socket);
        check_calm();
        limit_descriptors(1024);
        peer_ok(waiting, MSG(attach, .protocol = KVD_PROTOCOL));
        peer_close(waiting);
}

START_TEST(out_of_descriptors) {
        struct peer_end *p[20];

        start(_i);
        for (int i = 0; i < 20; i++)
                p[i] = peer_attach(in.socket);
        refused_at_once(next_fd());
        refused_at_once(next_fd() + 1);
        wait_for_better_times();
        peer_close(peer_attach(in.socket));
        for (int i = 0; i < 20; i++)
                peer_close(p[i]);
        stop();
}
END_TEST

SUITE("life",
      LOOPS(2, a_client_that_is_ended_keeps_what_its_process_can_touch,
            a_client_that_ends_itself_gets_its_reply_first, killed, socket_closed_and_process_alive,
            process_dead_and_socket_inherited, clean_goodbye, space_deleted_under_an_orphan,
            a_dead_member_s_blocks_wait_for_its_team, a_team_ends_in_any_order,
            detached_blocks_wait_for_the_team, teams_are_named, a_hundred_deaths_leave_nothing,
            never_reading, stalled_clients_cost_no_time, a_flood_of_connections,
            out_of_descriptors))
