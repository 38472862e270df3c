/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sessions of agents, from libkvd to eviction: they outlive the process that made them, replace each
 * other by name, and are visible to their user only.
 */

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>

#include "client/conn/conn.h"
#include "client/kvd.h"
#include "ipc/base/util.h"
#include "tests/lib/instance.h"
#include "tests/lib/suite.h"

enum { TOKENS = 4, LENGTH = 6 }; /* blocks of a chain */

static const struct kvd_geometry geometry = {.layers = 1,
                                             .kv_heads = 1,
                                             .head_dim = 32,
                                             .block_tokens = TOKENS,
                                             .layer_groups = 1,
                                             .dtype = KVD_F32,
                                             .vocab = 1000000};

static struct instance server;
static kvd *handle;
static kvd_space *space;

static void connect_to_it(void) {
        ck_assert_msg(kvd_open(server.socket, &handle) == 0, "%s", kvd_error());
        ck_assert_msg(kvd_space_open(handle, "s", &geometry, NULL, &space) == 0, "%s", kvd_error());
}

static void set_up(void) {
        instance_start_public(&server, SETTINGS("daemon.pool=16M", "daemon.segment=256K",
                                                "domain d.users=0 4241 4242"));
        connect_to_it();
}

static void tear_down(void) {
        kvd_space_close(space);
        kvd_close(handle);
        instance_end_clean(&server);
}

/* Chains of different numbers have no block in common. */
static void tokens_of(uint32_t which, uint32_t *ret) {
        for (uint32_t i = 0; i < LENGTH * TOKENS; i++)
                ret[i] = which * 1000 + i;
}

static void store(uint32_t which, struct kvd_pin *pin) {
        struct kvd_block blocks[LENGTH];
        uint32_t tokens[LENGTH * TOKENS];

        tokens_of(which, tokens);
        for (int n = 0; n < LENGTH;)
                n += kvd_alloc(space, (uint32_t)(LENGTH - n), blocks + n);
        ck_assert_int_eq(kvd_seal(space, pin, LENGTH, blocks, tokens, LENGTH * TOKENS), LENGTH);
}

static void keep(const char *name, uint32_t how, uint32_t which) {
        struct kvd_pin pins[2] = {{0}};

        store(which, &pins[1]); /* the first one is empty, as after a miss */
        ck_assert_msg(kvd_session(space, name, how, 3600, pins, 2) == 0, "%s", kvd_error());
        ck_assert(!pins[1].view);
}

static uint32_t blocks_left(uint32_t which) {
        uint32_t tokens[LENGTH * TOKENS];

        tokens_of(which, tokens);
        return (uint32_t)kvd_match(space, 0, tokens, LENGTH * TOKENS) / TOKENS;
}

/* Evicts up to n blocks; 0: all that can be. */
static void evict(uint64_t n) {
        struct conn *conn = instance_connect(&server);
        struct kvd_msg_evict_reply reply;
        uint64_t evicted = 0;

        do {
                ck_assert_int_eq(conn_call(conn, KVD_MSG_evict,
                                           &(struct kvd_msg_evict){.space = kvd_slice_of("s"),
                                                                   .blocks = n ? n - evicted : 0},
                                           &reply),
                                 0);
                evicted += reply.evicted;
        } while (n ? evicted < n : reply.more || reply.evicted);
        conn_close(conn);
}

/* Number of sessions that this process sees; *ret is the first. */
static uint32_t sessions(struct kvd_msg_session_info_reply *ret) {
        struct kvd_msg_session_info request = {.space = kvd_slice_of("s")};
        struct conn *conn = instance_connect(&server);
        uint32_t n = 0;

        while (conn_call(conn, KVD_MSG_session_info, &request, ret) == 0) {
                ck_assert(kvd_slice_is(ret->name, "agent"));
                request.cursor = ret->next;
                n++;
        }
        conn_close(conn);
        return n;
}

static void in_process_that_is_killed(void (*run)(void)) {
        pid_t pid = fork();

        if (pid == 0) {
                connect_to_it();
                run();
                raise(SIGKILL);
        }
        ck_assert_int_eq(wait_status(pid), 128 + SIGKILL);
}

static void pin_one(void) {
        keep("agent", KVD_KEEP_PINNED, 1);
}

START_TEST(a_session_outlives_its_client) {
        struct kvd_msg_session_info_reply info;

        in_process_that_is_killed(pin_one);
        keep("done", KVD_KEEP_HIGH, 2);
        ck_assert_int_eq(kvd_session_end(space, "done"), 0);
        evict(0);
        ck_assert_uint_eq(blocks_left(1), LENGTH);
        ck_assert_uint_eq(blocks_left(2), 0);
        ck_assert_uint_eq(sessions(&info), 1);
        ck_assert_uint_eq(info.blocks, LENGTH);
        ck_assert_uint_eq(info.bytes, LENGTH * kvd_block_bytes(&geometry));
        ck_assert_uint_eq(info.keep, KVD_KEEP_PINNED);
        ck_assert_uint_eq(info.uid, getuid());
        ck_assert(info.left_ms > 0 && info.left_ms <= 3600000);
        ck_assert_int_eq(kvd_session_end(space, "agent"), 0);
        ck_assert_int_eq(kvd_session_end(space, "agent"), -ENOENT);
        evict(0);
        ck_assert_uint_eq(blocks_left(1), 0);
}
END_TEST

START_TEST(eviction_follows_what_sessions_say) {
        struct kvd_pin pin = {0};

        keep("first", KVD_KEEP_HIGH, 1);
        for (uint32_t which = 2; which < 4; which++) {
                store(which, &pin);
                kvd_unpin(space, &pin);
        }
        evict(LENGTH);
        ck_assert(blocks_left(1) == LENGTH && !blocks_left(2) && blocks_left(3) == LENGTH);
        keep("first", KVD_KEEP_HIGH, 4); /* its old chain is like others now, and older */
        evict(2 * LENGTH);
        ck_assert(!blocks_left(1) && !blocks_left(3) && blocks_left(4) == LENGTH);
}
END_TEST

static void post_behind(struct kvd_pin *pin, struct kvd_block *block) {
        const uint32_t more[TOKENS] = {9, 9, 9, 9};

        store(1, pin);
        ck_assert_int_eq(kvd_alloc(space, 1, block), 1);
        ck_assert_int_eq(kvd_post(space, pin, 1, block, more, TOKENS), 1);
}

/* Nobody waits for the daemon to take posts. The second time, another block has the content. */
START_TEST(posted_blocks_are_part_of_the_chain) {
        struct kvd_block blocks[2];
        struct kvd_pin pins[2] = {{0}};
        struct kvd_msg_session_info_reply info;

        for (uint32_t i = 0; i < 2; i++) {
                post_behind(&pins[i], &blocks[i]);
                ck_assert_msg(kvd_session(space, "agent", KVD_KEEP_PINNED, 60, &pins[i], 1) == 0,
                              "%s", kvd_error());
                ck_assert_uint_eq(sessions(&info), 1);
                ck_assert_uint_eq(info.blocks, LENGTH + 1);
        }
        kvd_free(space, 2, blocks);
}
END_TEST

START_TEST(what_is_refused_changes_nothing) {
        struct kvd_pin pin = {0}, none = {0};
        char longest[KVD_NAME_MAX + 2] = {0};

        store(1, &pin);
        memset(longest, 'x', KVD_NAME_MAX + 1);
        ck_assert_int_eq(kvd_session(space, longest, KVD_KEEP_HIGH, 60, &pin, 1), -EINVAL);
        ck_assert_int_eq(kvd_session(space, "", KVD_KEEP_HIGH, 60, &pin, 1), -EINVAL);
        ck_assert_int_eq(kvd_session(space, "a", 0, 60, &pin, 1), -EINVAL);
        ck_assert_int_eq(kvd_session(space, "a", KVD_KEEP_PINNED + 1, 60, &pin, 1), -EINVAL);
        ck_assert_int_eq(kvd_session(space, "a", KVD_KEEP_HIGH, 0, &pin, 1), -EINVAL);
        ck_assert_int_eq(kvd_session(space, "a", KVD_KEEP_HIGH, KVD_SESSION_SECONDS + 1, &pin, 1),
                         -EINVAL);
        ck_assert_int_eq(kvd_session(space, "a", KVD_KEEP_HIGH, 60, &none, 1), -EINVAL);
        ck_assert_int_eq(kvd_session(space, "a", KVD_KEEP_HIGH, 60, &pin, KVD_SESSION_PINS + 1),
                         -EINVAL);
        ck_assert_uint_eq(sessions(&(struct kvd_msg_session_info_reply){0}), 0);
        ck_assert_uint_eq(pin.n_blocks, LENGTH);
        kvd_unpin(space, &pin);
}
END_TEST

/* ---- other users ----------------------------------------------------------------------------- */

#define USER_A 4241u
#define USER_B 4242u

/* Ends that user's session. */
static int end_of(uid_t user) {
        struct kvd_msg_session_end request = {.space = kvd_slice_of("s"),
                                              .name = kvd_slice_of("agent"),
                                              .user = user + UINT64_C(1)};
        struct conn *conn = instance_connect(&server);
        int r = conn_call(conn, KVD_MSG_session_end, &request, NULL);

        conn_close(conn);
        return r;
}

static void see_none(void) {
        struct kvd_msg_session_info_reply info;

        if (sessions(&info) != 0 || kvd_session_end(space, "agent") != -ENOENT)
                die("a user sees another one's session");
        if (end_of(USER_A) != -EPERM || end_of(USER_B) != -ENOENT)
                die("a user ends another one's session");
        keep("agent", KVD_KEEP_HIGH, 2);
        if (sessions(&info) != 1 || info.uid != USER_B || info.keep != KVD_KEEP_HIGH)
                die("a user does not see its own session");
}

static void as_user(uid_t user, void (*run)(void)) {
        pid_t pid = fork();

        if (pid == 0) {
                become_user(user);
                connect_to_it();
                run();
                _exit(0);
        }
        ck_assert_int_eq(wait_status(pid), 0);
}

START_TEST(users_see_their_own_sessions) {
        struct kvd_msg_session_info_reply info;

        if (getuid() != 0)
                return; /* only root can become several users */
        as_user(USER_A, pin_one);
        as_user(USER_B, see_none);
        evict(0);
        ck_assert_uint_eq(sessions(&info), 2); /* root is an administrator */
        ck_assert_uint_eq(blocks_left(1), LENGTH);
        ck_assert_int_eq(end_of(USER_A), 0);
        ck_assert_int_eq(end_of(USER_A), -ENOENT);
        evict(0);
        ck_assert(sessions(&info) == 1 && info.uid == USER_B && !blocks_left(1));
}
END_TEST

SUITE("agents", FIXTURE(set_up, tear_down),
      TESTS(a_session_outlives_its_client, eviction_follows_what_sessions_say,
            posted_blocks_are_part_of_the_chain, what_is_refused_changes_nothing,
            users_see_their_own_sessions))
