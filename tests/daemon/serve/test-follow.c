/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Following a space: a client that may attach to the space may read its index and its clients'
 * pages, but write neither. The space's clients record their lookups only while it is followed.
 */

#include <errno.h>
#include <grp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "client/kvd.h"
#include "ipc/base/layout.h"
#include "ipc/base/util.h"
#include "tests/lib/peer.h"
#include "tests/lib/suite.h"

static struct instance in;

#define MSG(name_, ...) ((struct kvd_msg){.number = KVD_MSG_##name_, .name_ = {__VA_ARGS__}})
#define FOLLOW(cursor_, ...) \
        MSG(follow, .space = kvd_slice_of("s"), .cursor = (cursor_), ##__VA_ARGS__)

static void setup(void) {
        instance_start(&in, SETTINGS("daemon.segment=1M"));
}

static void teardown(void) {
        if (in.pid)
                instance_end(&in);
}

static const void *map(const struct peer_end *p, uint64_t bytes) {
        void *at;

        ck_assert_uint_eq(p->fds.n, 1);
        at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, p->fds.fd[0], 0);
        ck_assert_msg(at == MAP_FAILED, "a follower can write");
        at = mmap(NULL, bytes, PROT_READ, MAP_SHARED, p->fds.fd[0], 0);
        ck_assert_ptr_ne(at, MAP_FAILED);
        return at;
}

static const struct kvd_index *follow(struct peer_end *p) {
        struct kvd_msg r = peer_ok(p, FOLLOW(0));
        const struct kvd_index *ix = map(p, r.follow_reply.bytes);

        ck_assert_uint_eq(r.follow_reply.next, 1);
        ck_assert_int_eq(kvd_index_validate(ix, r.follow_reply.bytes), 0);
        peer_ok(p, FOLLOW(1));
        return ix;
}

static uint32_t followers(const struct kvd_index *ix) {
        return atomic_load(&ix->n_followers);
}

/* The daemon may notice the end of a connection later. */
static void wait_for_followers(const struct kvd_index *ix, uint32_t n) {
        WAIT_UNTIL(followers(ix) == n);
}

START_TEST(followers_are_counted_while_they_are_there) {
        struct peer_end *owner = peer_attach(in.socket), *one = peer_attach(in.socket),
                        *two = peer_attach(in.socket);
        const struct kvd_index *ix;

        peer_refused(one, FOLLOW(0), -ENOENT);
        peer_open_space(owner, "s");
        peer_open_space(owner, "other");
        ix = follow(one);
        ck_assert_uint_eq(followers(ix), 1);
        follow(one); /* following twice counts once */
        ck_assert_uint_eq(followers(ix), 1);
        follow(two);
        ck_assert_uint_eq(followers(ix), 2);
        peer_ok(two, MSG(follow, .space = kvd_slice_of("other")));
        ck_assert_uint_eq(followers(ix), 2); /* reading an index is not following */
        peer_ok(two, MSG(follow, .space = kvd_slice_of("other"), .cursor = 1));
        ck_assert_uint_eq(followers(ix), 1);
        peer_close(one);
        wait_for_followers(ix, 0);
        peer_ok(owner, MSG(space_delete, .space = kvd_slice_of("other"), .force = 1));
        follow(two); /* the space that it followed is deleted */
        wait_for_followers(ix, 1);
        peer_close(two);
        wait_for_followers(ix, 0);
        peer_close(owner);
}
END_TEST

START_TEST(a_follower_is_killed) {
        struct peer_end *owner = peer_attach(in.socket), *one = peer_attach(in.socket);
        const struct kvd_index *ix;
        pid_t pid;

        peer_open_space(owner, "s");
        ix = follow(one);
        peer_close(one);
        wait_for_followers(ix, 0);
        pid = fork();
        if (pid == 0) {
                follow(peer_attach(in.socket));
                pause();
        }
        wait_for_followers(ix, 1);
        kill(pid, SIGKILL);
        ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
        wait_for_followers(ix, 0);
        peer_close(owner);
}
END_TEST

/* ---- lookups --------------------------------------------------------------------------------- */

static const struct kvd_geometry geometry = {
        .layers = 1,
        .kv_heads = 1,
        .head_dim = 8,
        .block_tokens = 16,
        .dtype = KVD_F32,
        .vocab = 100,
};

static void look_up(kvd_space *space) {
        static const uint32_t tokens[40] = {1, 2, 3};
        uint32_t table[3];
        struct kvd_pin pin = {0};

        ck_assert_int_eq(kvd_lookup(space, 0, tokens, 40, table, 3, &pin), 0);
}

/* The page of the only client. */
static const struct kvd_pinpage *find_page(struct peer_end *p, const struct kvd_index *ix) {
        struct kvd_msg r = peer_ok(p, FOLLOW(1));
        const struct kvd_pinpage *page = map(p, r.follow_reply.bytes);

        ck_assert_uint_eq(r.follow_reply.bytes, kvd_pinpage_bytes(ix));
        peer_refused(p, FOLLOW(r.follow_reply.next), -ENOENT);
        return page;
}

START_TEST(lookups_are_recorded_for_followers) {
        struct peer_end *p = peer_attach(in.socket);
        const struct kvd_pinpage *page;
        const struct kvd_asked *note;
        const struct kvd_index *ix;
        kvd_space *space;
        kvd *daemon;

        ck_assert_int_eq(kvd_open(in.socket, &daemon), 0);
        ck_assert_int_eq(kvd_space_open(daemon, "s", &geometry, NULL, &space), 0);
        look_up(space);
        ix = follow(p);
        page = find_page(p, ix);
        ck_assert_uint_eq(atomic_load(&page->asked), 0);
        look_up(space);
        ck_assert_uint_eq(atomic_load(&page->asked), KVD_ASKED_HEAD + 3);
        ck_assert_uint_eq(atomic_load(&page->asked_begun), KVD_ASKED_HEAD + 3);
        note = (const void *)((const uint8_t *)page + kvd_asked_off(ix->capacity));
        ck_assert(note->n_keys == 3 && note->n_tokens == 40 && !note->found && !note->group);
        ck_assert(note->keys[0] != note->keys[1] && note->keys[1] != note->keys[2]);
        peer_close(p);
        wait_for_followers(ix, 0);
        look_up(space);
        ck_assert_uint_eq(atomic_load(&page->asked), KVD_ASKED_HEAD + 3);
        kvd_space_close(space);
        kvd_close(daemon);
}
END_TEST

/* ---- domains --------------------------------------------------------------------------------- */

static struct kvd_slice of_root(void) {
        return kvd_slice_of("uid-0");
}

static void sees_only_his_own(void) {
        struct peer_end *p = peer_attach(in.socket);
        struct kvd_msg r;

        peer_refused(p, FOLLOW(0), -ENOENT);
        peer_refused(p, FOLLOW(0, .domain = of_root()), -EPERM);
        peer_refused(p, FOLLOW(1, .domain = of_root()), -EPERM);
        peer_open_space(p, "s");
        peer_ok(p, FOLLOW(0));
        r = peer_ok(p, FOLLOW(1)); /* its own page, and no other */
        peer_refused(p, FOLLOW(r.follow_reply.next), -ENOENT);
        peer_close(p);
}

START_TEST(other_domains_are_not_followed) {
        struct peer_end *p;
        int status;
        pid_t pid;

        if (getuid() != 0)
                return;
        instance_end(&in);
        instance_start_public(&in, SETTINGS("daemon.unlisted=own"));
        p = peer_attach(in.socket);
        peer_open_space(p, "s");
        pid = fork();
        if (pid == 0) {
                if (setgroups(0, NULL) < 0 || setgid(4001) < 0 || setuid(4001) < 0)
                        _exit(99);
                sees_only_his_own();
                _exit(0);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(status, 0);
        peer_ok(p, FOLLOW(0, .domain = of_root()));
        peer_close(p);
}
END_TEST

SUITE("follow", FIXTURE(setup, teardown),
      TESTS(followers_are_counted_while_they_are_there, a_follower_is_killed,
            lookups_are_recorded_for_followers, other_domains_are_not_followed))
