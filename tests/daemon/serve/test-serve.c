/* SPDX-License-Identifier: Apache-2.0 */

/* The protocol with a running daemon, whose loop uses epoll or io_uring. */

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "client/kvd.h"
#include "ipc/base/layout.h"
#include "ipc/base/util.h"
#include "tests/lib/peer.h"
#include "tests/lib/suite.h"

static const char *const loops[] = {"daemon.loop=epoll", "daemon.loop=auto"};

static struct instance in;

static void start(int loop) {
        instance_start(&in, (const char *const[]){loops[loop], NULL});
}

#define MSG(name_, ...) ((struct kvd_msg){.number = KVD_MSG_##name_, .name_ = {__VA_ARGS__}})

/* ---- sessions -------------------------------------------------------------------------------- */

START_TEST(attach) {
        struct peer_end *p;
        struct kvd_msg r;

        start(_i);
        p = peer_connect(in.socket);
        r = peer_ok(p, MSG(attach, .protocol = KVD_PROTOCOL, .name = kvd_slice_of("me")));
        ck_assert_uint_eq(r.attach_reply.protocol, KVD_PROTOCOL);
        ck_assert_uint_eq(r.attach_reply.client, 1);
        ck_assert_uint_eq(r.attach_reply.admin, 1);
        ck_assert_uint_ne(r.attach_reply.instance, 0);
        peer_refused(p, MSG(attach, .protocol = KVD_PROTOCOL), -EISCONN);
        r = peer_client(p, getpid());
        ck_assert(kvd_slice_is(r.client_info_reply.name, "me"));
        ck_assert_uint_eq(r.client_info_reply.connected, 1);
        ck_assert_uint_eq(r.client_info_reply.uid, getuid());
        peer_close(p);
        instance_end(&in);
}
END_TEST

START_TEST(another_protocol) {
        struct peer_end *p;
        struct kvd_msg r;

        start(_i);
        p = peer_connect(in.socket);
        peer_refused(p, MSG(attach, .protocol = KVD_PROTOCOL + 1), -EPROTO);
        ck_assert(!peer_receive(p, &r));
        peer_close(p);
        instance_end(&in);
}
END_TEST

START_TEST(nothing_before_attach) {
        struct peer_end *p;

        start(_i);
        p = peer_connect(in.socket);
        peer_refused(p, MSG(daemon_info), -EPROTO);
        peer_refused(p, MSG(allocate, .space = 1, .count = 1), -EPROTO);
        peer_ok(p, MSG(attach, .protocol = KVD_PROTOCOL));
        peer_ok(p, MSG(daemon_info));
        peer_close(p);
        instance_end(&in);
}
END_TEST

START_TEST(a_refused_request_changes_nothing) {
        struct peer_end *p;
        uint32_t space;

        start(_i);
        p = peer_attach(in.socket);
        space = peer_open_space(p, "s");
        peer_refused(p, MSG(allocate, .space = space + 1, .count = 1), -EBADF);
        peer_refused(p, MSG(allocate, .space = space), -EINVAL);
        peer_refused(p, MSG(release, .space = space, .blocks = {"1234567", 7}), -EINVAL);
        peer_refused(p, MSG(seal, .space = space, .prefix_key = {"123", 3}), -EINVAL);
        peer_refused(p, MSG(lease, .space = space), -EINVAL);
        peer_refused(p, MSG(evict, .space = kvd_slice_of("none")), -ENOENT);
        peer_refused(p, MSG(evict, .space = kvd_slice_of("s"), .domain = kvd_slice_of("none")),
                     -ENOENT);
        peer_refused(p, MSG(space_set, .space = kvd_slice_of("s"), .key = kvd_slice_of("colour")),
                     -EINVAL);
        peer_refused(p, MSG(space, .name = kvd_slice_of("none")), -ENOENT);
        peer_refused(p, MSG(space, .name = kvd_slice_of("a/b"), .create = 1), -EINVAL);
        peer_refused(p, (struct kvd_msg){.number = KVD_MSG_attach_reply}, -ENOSYS);
        peer_refused(p, (struct kvd_msg){.number = KVD_MSG_error}, -ENOSYS);
        peer_ok(p, MSG(allocate, .space = space, .count = 1));
        peer_close(p);
        instance_end(&in);
}
END_TEST

static void send_raw(struct peer_end *p, const void *frame, size_t size) {
        ck_assert_int_eq(kvd_frame_send(p->fd, frame, size, NULL, 0), 0);
}

/* The frame is well-formed, so the daemon can answer it, and the connection stays open. */
START_TEST(a_message_from_the_future) {
        struct peer_end *p;
        struct kvd_msg r;

        start(_i);
        p = peer_attach(in.socket);
        send_raw(p, "\x93\x7f\x07\x80", 4);
        ck_assert(peer_receive(p, &r));
        ck_assert_uint_eq(r.error.code, ENOSYS);
        ck_assert_uint_eq(r.serial, 7);
        send_raw(p,
                 "\x93\x05\x08\x81\xa5"
                 "count\xcd\x13\x88",
                 13);
        ck_assert(peer_receive(p, &r));
        ck_assert_uint_eq(r.error.code, EINVAL);
        ck_assert_uint_eq(r.serial, 8);
        ck_assert(kvd_slice_is(r.error.text, "field 'count' of 'allocate' is 5000, at most 4096"));
        r = peer_ok(p, MSG(daemon_info));
        ck_assert_uint_eq(r.daemon_info_reply.bad_frames, 2);
        peer_close(p);
        instance_end(&in);
}
END_TEST

START_TEST(a_malformed_frame_ends_the_connection) {
        static uint8_t large[KVD_FRAME_MAX + 100];
        struct peer_end *p, *q;
        struct kvd_msg r;

        start(_i);
        q = peer_attach(in.socket);
        for (int i = 0; i < 3; i++) {
                p = i == 2 ? peer_connect(in.socket) : peer_attach(in.socket);
                if (i == 1)
                        send_raw(p, large, sizeof large);
                else
                        send_raw(p, "\xdd\x1f\x00\x00\x00", 5);
                ck_assert(peer_receive(p, &r));
                ck_assert_uint_eq(r.number, KVD_MSG_error);
                ck_assert_uint_eq(r.error.code, EBADMSG);
                ck_assert(
                        kvd_slice_is(r.error.text, i == 1 ? "the frame is larger than 65536 bytes" :
                                                            "an array or map claims more elements "
                                                            "than the frame has bytes for"));
                ck_assert(!peer_receive(p, &r));
                peer_close(p);
        }
        r = peer_ok(q, MSG(daemon_info));
        ck_assert_uint_eq(r.daemon_info_reply.bad_frames, 3);
        ck_assert_uint_eq(r.daemon_info_reply.clients, 1);
        peer_close(q);
        instance_end(&in);
}
END_TEST

/* ---- cache ----------------------------------------------------------------------------------- */

START_TEST(a_block_from_free_to_evicted) {
        uint32_t tokens[4] = {1, 2, 3, 4}, space;
        struct kvd_msg r, info;
        struct peer_end *p;
        kvd_ref block;

        start(_i);
        p = peer_attach(in.socket);
        space = peer_open_space(p, "s");
        r = peer_ok(p, MSG(segments, .space = space));
        ck_assert_uint_eq(r.segments_reply.count, p->fds.n);
        r = peer_ok(p, MSG(allocate, .space = space, .count = 2));
        ck_assert_uint_eq(r.allocate_reply.blocks.size, 16);
        memcpy(&block, r.allocate_reply.blocks.data, sizeof block);
        r = peer_ok(p, MSG(seal, .space = space, .blocks = {&block, 8},
                           .tokens = {tokens, sizeof tokens}));
        ck_assert_uint_eq(r.seal_reply.blocks.size, 8);
        peer_refused(p,
                     MSG(seal, .space = space, .blocks = {&block, 8},
                         .tokens = {tokens, sizeof tokens}),
                     -ESTALE);
        r = peer_ok(p, MSG(release, .space = space, .blocks = {&block, 8}));
        ck_assert_uint_eq(r.release_reply.released, 0);

        info = peer_ok(p, MSG(space_info));
        ck_assert_uint_eq(info.space_info_reply.sealed, 1);
        ck_assert_uint_eq(info.space_info_reply.filling, 1);
        ck_assert_uint_eq(info.space_info_reply.clients, 1);
        ck_assert_uint_eq(info.space_info_reply.counters.size, KVD_N_SPACE_COUNTERS * 8);
        ck_assert_uint_eq(info.space_info_reply.geometry.size, sizeof(struct kvd_geometry));
        peer_refused(p, MSG(space_info, .cursor = info.space_info_reply.next), -ENOENT);
        r = peer_ok(p, MSG(chain_info, .space = kvd_slice_of("s")));
        ck_assert_uint_eq(r.chain_info_reply.tokens, 4);
        ck_assert_uint_eq(r.chain_info_reply.leaf, block);
        r = peer_ok(p, MSG(block_map, .space = kvd_slice_of("s")));
        ck_assert_uint_eq(r.block_map_reply.states.size, r.block_map_reply.total);
        ck_assert_uint_eq(r.block_map_reply.ages.size, 0);
        r = peer_ok(p, MSG(block_map, .space = kvd_slice_of("s"), .parents = 1, .ages = 1));
        ck_assert_uint_eq(r.block_map_reply.states.size, r.block_map_reply.ages.size);
        ck_assert_uint_eq(r.block_map_reply.parents.size, 4 * r.block_map_reply.ages.size);
        r = peer_ok(p, MSG(check, .space = kvd_slice_of("s")));
        ck_assert_uint_eq(r.check_reply.broken, 0);
        r = peer_ok(p, MSG(evict, .space = kvd_slice_of("s")));
        ck_assert_uint_eq(r.evict_reply.evicted, 1);
        peer_ok(p, MSG(detach, .space = space));
        peer_refused(p, MSG(allocate, .space = space, .count = 1), -EBADF);
        info = peer_ok(p, MSG(space_info));
        ck_assert_uint_eq(info.space_info_reply.total, info.space_info_reply.free);
        peer_close(p);
        instance_end(&in);
}
END_TEST

START_TEST(leases) {
        struct peer_end *p, *q;
        struct kvd_slice key = {"0123456789abcdef", 16};
        uint32_t a, b;

        start(_i);
        p = peer_attach(in.socket);
        q = peer_attach(in.socket);
        a = peer_open_space(p, "s");
        b = peer_open_space(q, "s");
        ck_assert_uint_eq(peer_ok(p, MSG(lease, .space = a, .op = 1, .prefix_key = key))
                                  .lease_reply.granted,
                          1);
        ck_assert_uint_eq(peer_ok(q, MSG(lease, .space = b, .op = 1, .prefix_key = key))
                                  .lease_reply.granted,
                          0);
        peer_ok(p, MSG(lease, .space = a, .op = 2, .prefix_key = key));
        ck_assert_uint_eq(peer_ok(q, MSG(lease, .space = b, .op = 1, .prefix_key = key))
                                  .lease_reply.granted,
                          1);
        peer_close(p);
        peer_close(q);
        instance_end(&in);
}
END_TEST

START_TEST(a_space_deleted_under_its_client) {
        struct peer_end *p, *q;
        uint32_t space, again;

        start(_i);
        p = peer_attach(in.socket);
        q = peer_attach(in.socket);
        space = peer_open_space(p, "s");
        peer_refused(q, MSG(space_delete, .space = kvd_slice_of("s")), -EBUSY);
        peer_ok(q, MSG(space_delete, .space = kvd_slice_of("s"), .force = 1));
        peer_refused(p, MSG(allocate, .space = space, .count = 1), -ESTALE);
        again = peer_open_space(p, "s");
        ck_assert_uint_ne(space, again);
        peer_ok(p, MSG(allocate, .space = again, .count = 1));
        peer_refused(p, MSG(allocate, .space = space, .count = 1), -ESTALE);
        peer_ok(p, MSG(detach, .space = space));
        peer_refused(p, MSG(detach, .space = space), -EBADF);
        peer_close(p);
        peer_close(q);
        instance_end(&in);
}
END_TEST

#define SMALL .layers = 1, .kv_heads = 1, .head_dim = 8, .dtype = 2, .vocab = 10

START_TEST(spaces_have_limits) {
        struct peer_end *p;
        char name[8] = "a";

        instance_start(&in, (const char *const[]){loops[_i], "daemon.max_spaces=3", NULL});
        p = peer_attach(in.socket);
        for (; name[0] < 'd'; name[0]++)
                peer_ok(p, MSG(space, .name = kvd_slice_of(name), .create = 2, SMALL));
        ck_assert_uint_eq(p->fds.n, 0);
        for (int i = 0; i < 62; i++)
                peer_ok(p, MSG(space, .name = kvd_slice_of("a")));
        /* the oldest unused space is deleted to make room */
        peer_ok(p, MSG(space, .name = kvd_slice_of("d"), .create = 2, SMALL));
        peer_refused(p, MSG(space, .name = kvd_slice_of("b")), -ENOENT);
        peer_ok(p, MSG(space, .name = kvd_slice_of("c")));
        peer_ok(p, MSG(space, .name = kvd_slice_of("d")));
        peer_refused(p, MSG(space, .name = kvd_slice_of("e"), .create = 2, SMALL), -EDQUOT);
        peer_refused(p, MSG(space, .name = kvd_slice_of("a")), -EMFILE);
        peer_close(p);
        instance_end(&in);
}
END_TEST

/* The request waits until the memory of deleted spaces is free. */
START_TEST(a_space_waits_for_room_that_others_leave) {
        struct peer_end *p;
        char name[16];

        instance_start(&in, (const char *const[]){loops[_i], "daemon.overhead=256M",
                                                  "daemon.max_spaces=4096", NULL});
        p = peer_attach(in.socket);
        for (uint32_t i = 0; i < 32; i++) {
                snprintf(name, sizeof name, "s%u", i);
                peer_ok(p, MSG(space, .name = kvd_slice_of(name), .create = 2, SMALL));
        }
        peer_refused(p, MSG(space, .name = kvd_slice_of("s0")), -ENOENT);
        peer_ok(p, MSG(space, .name = kvd_slice_of("s31")));
        peer_close(p);
        instance_end(&in);
}
END_TEST

/* Attaches clients until one is refused, which is closed. Returns the number attached. */
static uint32_t attach_all(struct peer_end **ends) {
        struct kvd_msg r;

        for (uint32_t n = 0;; n++) {
                ends[n] = peer_connect(in.socket);
                r = peer_call(ends[n], MSG(attach, .protocol = KVD_PROTOCOL));
                if (r.number == KVD_MSG_attach_reply)
                        continue;
                ck_assert_uint_eq(r.error.code, EUSERS);
                peer_close(ends[n]);
                return n;
        }
}

/* The daemon's own user may have four more. */
START_TEST(clients_have_limits) {
        struct peer_end *ends[16];

        instance_start(&in, (const char *const[]){loops[_i], "daemon.max_clients=2", NULL});
        ck_assert_uint_eq(attach_all(ends), 2 + 4);
        peer_close(ends[5]);
        WAIT_UNTIL(peer_ok(ends[0], MSG(daemon_info)).daemon_info_reply.clients == 5);
        ends[5] = peer_attach(in.socket);
        for (int i = 0; i < 6; i++)
                peer_close(ends[i]);
        instance_end(&in);

        instance_start(&in, (const char *const[]){loops[_i], "daemon.user_clients=1", NULL});
        ck_assert_uint_eq(attach_all(ends), 1 + 4);
        for (int i = 0; i < 5; i++)
                peer_close(ends[i]);
        instance_end(&in);
}
END_TEST

/* ---- tenants --------------------------------------------------------------------------------- */

/* Runs body in a process of another user. A check that fails there fails the test. */
static void as_user(uid_t uid, gid_t group, void (*body)(void)) {
        pid_t pid = check_fork();

        if (pid == 0) {
                if (setgroups(group ? 1 : 0, &group) < 0 || setgid(65534) < 0 || setuid(uid) < 0)
                        _exit(99);
                body();
                _exit(0);
        }
        ck_assert_int_eq(wait_status(pid), 0);
}

static void sees_only_his_own(void) {
        struct peer_end *p = peer_connect(in.socket);
        struct kvd_msg r = peer_ok(p, MSG(attach, .protocol = KVD_PROTOCOL));

        ck_assert(kvd_slice_is(r.attach_reply.domain, "uid-4001"));
        ck_assert_uint_eq(r.attach_reply.admin, 0);
        ck_assert_uint_eq(r.attach_reply.client, 1);
        peer_refused(p, MSG(space_info), -ENOENT);
        peer_refused(p, MSG(client_info, .cursor = 1), -ENOENT);
        r = peer_ok(p, MSG(daemon_info));
        ck_assert_uint_eq(r.daemon_info_reply.spaces, 0);
        ck_assert_uint_eq(r.daemon_info_reply.clients, 1);
        ck_assert_uint_eq(r.daemon_info_reply.pool_used, 0);
        ck_assert_uint_eq(r.daemon_info_reply.requests, 0);
        peer_refused(p, MSG(space, .name = kvd_slice_of("s")), -ENOENT);
        peer_refused(p,
                     MSG(space_delete, .space = kvd_slice_of("s"), .domain = kvd_slice_of("uid-0")),
                     -EPERM);
        peer_refused(p, MSG(evict, .space = kvd_slice_of("s"), .domain = kvd_slice_of("uid-0")),
                     -EPERM);
        peer_open_space(p, "s"); /* the same name, another space */
        peer_ok(p, MSG(space_delete, .space = kvd_slice_of("s"), .domain = kvd_slice_of("uid-4001"),
                       .force = 1));
        peer_close(p);
}

static void is_in_red(void) {
        struct peer_end *p = peer_connect(in.socket);
        struct kvd_msg r = peer_ok(p, MSG(attach, .protocol = KVD_PROTOCOL));

        ck_assert(kvd_slice_is(r.attach_reply.domain, "red"));
        ck_assert_uint_eq(r.attach_reply.admin, 0);
        peer_close(p);
}

static void is_admin_of_blue(void) {
        struct peer_end *p = peer_connect(in.socket);
        struct kvd_msg r = peer_ok(p, MSG(attach, .protocol = KVD_PROTOCOL));

        ck_assert(kvd_slice_is(r.attach_reply.domain, "blue"));
        ck_assert_uint_eq(r.attach_reply.admin, 1);
        r = peer_ok(p, MSG(space_info));
        ck_assert(kvd_slice_is(r.space_info_reply.domain, "uid-0"));
        peer_close(p);
}

static void is_refused(void) {
        struct peer_end *p = peer_connect(in.socket);

        peer_refused(p, MSG(attach, .protocol = KVD_PROTOCOL), -EACCES);
        peer_close(p);
}

static int hold[2]; /* closing it ends the processes that hold connections */

/* Takes connections in a process that holds them; returns their number. */
static uint32_t take_all(uid_t uid, gid_t group) {
        struct peer_end *ends[512];
        int told[2];
        uint32_t n;
        char byte;

        ck_assert_int_eq(pipe(told), 0);
        if (check_fork() == 0) {
                close(hold[1]);
                if (setgroups(group ? 1 : 0, &group) < 0 || setgid(65534) < 0 || setuid(uid) < 0)
                        _exit(99);
                n = attach_all(ends);
                if (write(told[1], &n, sizeof n) != sizeof n)
                        _exit(98);
                _exit(read(hold[0], &byte, 1) != 0);
        }
        close(told[1]);
        ck_assert_int_eq(read(told[0], &n, sizeof n), sizeof n);
        close(told[0]);
        return n;
}

static void let_all_go(void) {
        close(hold[0]);
        close(hold[1]);
}

/* Each user gets at most half of the free connections, and root is never refused. */
START_TEST(a_few_users_cannot_take_all_connections) {
        struct peer_end *p;

        if (getuid() != 0)
                return;
        ck_assert_int_eq(pipe(hold), 0);
        instance_start_public(&in, SETTINGS("daemon.max_clients=16"));
        ck_assert_uint_eq(take_all(4001, 0), 8);
        ck_assert_uint_eq(take_all(4002, 0), 4);
        ck_assert_uint_eq(take_all(4003, 0), 2);
        ck_assert_uint_eq(take_all(4004, 0), 1);
        ck_assert_uint_eq(take_all(4005, 0), 1);
        ck_assert_uint_eq(take_all(4006, 0), 0);
        p = peer_attach(in.socket);
        ck_assert_uint_eq(peer_ok(p, MSG(daemon_info)).daemon_info_reply.clients, 17);
        peer_close(p);
        let_all_go();
        instance_end(&in);
}
END_TEST

/* 16 engines with 8 workers each have 144 connections. One user alone could have 128. */
START_TEST(many_engines_of_one_user_fit_by_default) {
        if (getuid() != 0)
                return;
        ck_assert_int_eq(pipe(hold), 0);
        instance_start_public(&in, NULL);
        ck_assert_uint_ge(take_all(4001, 0), 144);
        ck_assert_uint_ge(take_all(4002, 0), 64);
        let_all_go();
        instance_end(&in);
}
END_TEST

/* Unlisted users, however many uids they have, leave connections for listed users. */
START_TEST(unlisted_users_leave_seats_for_listed_users) {
        uint32_t n = 0;

        if (getuid() != 0)
                return;
        ck_assert_int_eq(pipe(hold), 0);
        instance_start_public(&in, SETTINGS("daemon.max_clients=64", "domain red.groups=4100"));
        for (uid_t uid = 100000; uid < 100040; uid++)
                n += take_all(uid, 0);
        ck_assert_uint_eq(n, 48);
        ck_assert_uint_ge(take_all(4001, 4100), 8);
        let_all_go();
        instance_end(&in);
}
END_TEST

static void write_file(const char *path, const char *text) {
        int fd = open(path, O_WRONLY);

        ck_assert_int_ge(fd, 0);
        ck_assert_int_eq(write(fd, text, strlen(text)), (ssize_t)strlen(text));
        close(fd);
}

/* In a user namespace that maps only root, all other users share one uid, which is refused. */
START_TEST(an_unmapped_user_is_refused) {
        int told[2];
        pid_t pid;

        if (getuid() != 0)
                return;
        ck_assert_int_eq(pipe(told), 0);
        pid = check_fork();
        if (pid == 0) { /* outside of the namespace */
                if (setgid(4001) < 0 || setuid(4001) < 0 || read(told[0], &in, sizeof in) < 0)
                        _exit(99);
                is_refused();
                _exit(0);
        }
        if (unshare(CLONE_NEWUSER) == 0) {
                write_file("/proc/self/uid_map", "0 0 1");
                instance_start_public(&in, NULL);
                ck_assert_int_eq(write(told[1], &in, sizeof in), sizeof in);
                ck_assert_int_eq(wait_status(pid), 0);
                peer_close(peer_attach(in.socket));
                instance_end(&in);
        }
}
END_TEST

static void run_public(const char *unlisted) {
        instance_start_public(&in, SETTINGS("domain red.groups=4100", "domain blue.users=4002",
                                            "daemon.admins=4002", unlisted));
}

START_TEST(tenants) {
        struct peer_end *p;

        if (getuid() != 0)
                return;
        run_public("daemon.unlisted=own");
        p = peer_attach(in.socket);
        peer_open_space(p, "s");
        as_user(4001, 0, sees_only_his_own);
        as_user(4001, 4100, is_in_red);
        as_user(4002, 4100, is_admin_of_blue); /* a listed user's domain comes before its group's */
        peer_close(p);
        instance_end(&in);
        run_public("daemon.unlisted=refuse");
        as_user(4001, 0, is_refused);
        as_user(4001, 4100, is_in_red);
        peer_close(peer_attach(in.socket)); /* root is never refused */
        instance_end(&in);
}
END_TEST

/* Two users of one domain, neither an administrator. ended_number is the first one's client. */
static uint32_t ended_number;

static void may_not_end_it(void) {
        struct peer_end *p = peer_attach(in.socket);
        struct peer_end *own = peer_connect(in.socket);
        struct kvd_msg r = peer_ok(own, MSG(attach, .protocol = KVD_PROTOCOL));

        peer_refused(p, MSG(client_end, .client = ended_number), -EPERM);
        peer_refused(p, MSG(client_end, .client = 1, .domain = kvd_slice_of("uid-0")), -EPERM);
        peer_ok(p, MSG(client_end, .client = r.attach_reply.client));
        ck_assert(!peer_receive(own, &r));
        peer_close(own);
        peer_close(p);
}

static void is_ended_by_root_only(void) {
        struct peer_end *p = peer_connect(in.socket);
        struct kvd_msg r = peer_ok(p, MSG(attach, .protocol = KVD_PROTOCOL));

        ended_number = r.attach_reply.client;
        if (write(hold[1], &ended_number, sizeof ended_number) != sizeof ended_number)
                _exit(98);
        ck_assert(!peer_receive(p, &r));
        peer_close(p);
}

START_TEST(a_client_is_ended_by_its_user_or_an_administrator) {
        const struct kvd_slice red = kvd_slice_of("red");
        struct peer_end *p;
        pid_t pid;

        if (getuid() != 0)
                return;
        instance_start_public(&in, SETTINGS("domain red.users=4001 4003"));
        ck_assert_int_eq(pipe(hold), 0);
        pid = check_fork();
        if (pid == 0) {
                as_user(4001, 0, is_ended_by_root_only);
                _exit(0);
        }
        ck_assert_int_eq(read(hold[0], &ended_number, sizeof ended_number), sizeof ended_number);
        as_user(4003, 0, may_not_end_it);
        p = peer_attach(in.socket);
        peer_refused(p, MSG(client_end, .client = ended_number + 1, .domain = red), -ENOENT);
        peer_ok(p, MSG(client_end, .client = ended_number, .domain = red));
        ck_assert_int_eq(wait_status(pid), 0);
        peer_close(p);
        let_all_go();
        instance_end(&in);
}
END_TEST

static void cannot_use_it(void) {
        struct peer_end *p = peer_connect(in.socket);
        struct kvd_msg r;

        ck_assert(!peer_receive(p, &r));
        peer_close(p);
}

START_TEST(private_is_private) {
        struct stat st;

        start(0);
        ck_assert_int_eq(stat(in.socket, &st), 0);
        ck_assert_uint_eq(st.st_mode & 0777, 0600);
        if (getuid() == 0) {
                chmod(in.dir, 0755);
                chmod(in.socket, 0666); /* the daemon refuses them all the same */
                as_user(4001, 0, cannot_use_it);
        }
        instance_end(&in);
}
END_TEST

SUITE("serve",
      LOOPS(2, attach, another_protocol, nothing_before_attach, a_refused_request_changes_nothing,
            a_message_from_the_future, a_malformed_frame_ends_the_connection,
            a_block_from_free_to_evicted, leases, a_space_deleted_under_its_client,
            spaces_have_limits, a_space_waits_for_room_that_others_leave, clients_have_limits),
      TESTS(a_few_users_cannot_take_all_connections, many_engines_of_one_user_fit_by_default,
            unlisted_users_leave_seats_for_listed_users, an_unmapped_user_is_refused, tenants,
            a_client_is_ended_by_its_user_or_an_administrator, private_is_private))
