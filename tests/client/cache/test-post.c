/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks that are sealed without a reply: other clients find them, a refusal is reported once, and
 * they are freed when the daemon or their client dies before the daemon has seen them.
 */

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>

#include "client/conn/conn.h"
#include "client/conn/deadline.h"
#include "client/internal.h"
#include "ipc/base/layout.h"
#include "ipc/base/util.h"
#include "tests/lib/emulated.h"
#include "tests/lib/instance.h"
#include "tests/lib/peer.h"
#include "tests/lib/suite.h"
#include "tests/lib/waits.h"

enum { TOKENS = 4, LONGEST = 256, VOCAB = 1000000, MANY_POSTS = 32 };

static const struct kvd_geometry geometry = {.layers = 1,
                                             .kv_heads = 1,
                                             .head_dim = 32,
                                             .block_tokens = TOKENS,
                                             .dtype = KVD_F32,
                                             .vocab = VOCAB};

static struct instance server;
static kvd *mine, *other;
static kvd_space *space, *elsewhere;

struct posted {
        struct kvd_pin pin;
        struct kvd_block blocks[LONGEST];
        uint32_t tokens[LONGEST * TOKENS], n;
};

static void connect_to(kvd **handle, kvd_space **ret) {
        ck_assert_msg(kvd_open(server.socket, handle) == 0, "%s", kvd_error());
        ck_assert_msg(kvd_space_open(*handle, "engine", &geometry, NULL, ret) == 0, "%s",
                      kvd_error());
}

static void set_up(void) {
        instance_start(&server, SETTINGS("daemon.pool=16M", "daemon.segment=256K"));
        connect_to(&mine, &space);
        connect_to(&other, &elsewhere);
}

static void tear_down(void) {
        kvd_space_close(space);
        kvd_space_close(elsewhere);
        kvd_close(mine);
        kvd_close(other);
        instance_end_clean(&server);
}

/* Chains of different numbers have no block in common. */
static void number(struct posted *p, uint32_t which) {
        *p = (struct posted){0};
        for (uint32_t i = 0; i < LONGEST * TOKENS; i++)
                p->tokens[i] = which * 1000 + i / 2;
}

/* Fills block i of the chain with a value that identifies its writer. */
static void write_block(struct kvd_block *block, uint32_t which) {
        memset(block->data, (int)which, 64);
}

static int post(struct posted *p, kvd_space *to, uint32_t n, uint32_t what) {
        int posted = 0, r;

        for (uint32_t i = 0; i < n; i++) {
                struct kvd_block *block = &p->blocks[p->n];

                if (!block->view)
                        ck_assert_msg(kvd_alloc(to, 1, block) == 1, "%s", kvd_error());
                write_block(block, what);
                r = kvd_post(to, &p->pin, 1, block, p->tokens + p->n * TOKENS, TOKENS);
                if (r != 1)
                        return posted ? posted : r;
                p->n++;
                posted++;
        }
        return posted;
}

/* Takes one block per post, so that no later call asks the daemon for blocks. */
static void take(struct posted *p, kvd_space *from, uint32_t n) {
        for (uint32_t i = 0; i < n; i++)
                ck_assert_msg(kvd_alloc(from, 1, &p->blocks[i]) == 1, "%s", kvd_error());
}

/* Posts in one call, so that no other call's error is reported in between. */
static int post_at_once(struct posted *p, kvd_space *to, uint32_t n) {
        take(p, to, n);
        p->n = n;
        return kvd_post(to, &p->pin, n, p->blocks, p->tokens, n * TOKENS);
}

static void let_go(struct posted *p, kvd_space *of) {
        for (uint32_t i = 0; i < p->n; i++)
                ck_assert_ptr_nonnull(p->blocks[i].data);
        kvd_free(of, p->n, p->blocks);
        kvd_unpin(of, &p->pin);
}

/* Number of blocks of the chain that are found; all must have this content (what < 0: any). */
static uint32_t found(kvd_space *there, const struct posted *p, uint32_t n, int what) {
        struct kvd_pin pin = {0};
        uint32_t ids[LONGEST], tokens;

        tokens = (uint32_t)kvd_lookup(there, 0, p->tokens, n * TOKENS, ids, n, &pin);
        for (uint32_t i = 0; i < pin.n_blocks; i++)
                ck_assert(what < 0 || *kvd_pin_block(&pin, ids[i]) == what);
        kvd_unpin(there, &pin);
        return tokens / TOKENS;
}

static void evict_all(void) {
        struct conn *conn = instance_connect(&server);
        struct kvd_msg_evict_reply reply;

        do
                ck_assert_int_eq(conn_call(conn, KVD_MSG_evict,
                                           &(struct kvd_msg_evict){.space = kvd_slice_of("engine")},
                                           &reply),
                                 0);
        while (reply.more || reply.evicted);
        conn_close(conn);
}

/* ---- what it promises ------------------------------------------------------------------------ */

START_TEST(others_find_what_is_posted) {
        struct posted p;

        number(&p, 1);
        ck_assert_int_eq(post(&p, space, 20, 7), 20);
        kvd_catch_up(elsewhere);
        WAIT_UNTIL(found(elsewhere, &p, 20, 7) == 20); /* no client waited for a reply */
        ck_assert_int_eq(kvd_flush(space), 0);
        evict_all();
        kvd_catch_up(elsewhere);
        ck_assert_uint_eq(found(elsewhere, &p, 20, 7), 20); /* each is held by its own pin */
        let_go(&p, space);
        evict_all();
        ck_assert_uint_eq(found(elsewhere, &p, 20, 7), 0);
}
END_TEST

/* The client can still read its own duplicate, and its further blocks follow the other client's. */
START_TEST(a_chain_continues_after_duplicates) {
        struct posted first, second;

        number(&first, 2);
        number(&second, 2);
        ck_assert_int_eq(post(&first, elsewhere, 5, 1), 5);
        ck_assert_int_eq(kvd_flush(elsewhere), 0);
        ck_assert_int_eq(post(&second, space, 9, 2), 9);
        ck_assert_int_eq(kvd_flush(space), 0);
        for (uint32_t i = 0; i < 9; i++)
                ck_assert_int_eq(*second.blocks[i].data, 2);
        kvd_catch_up(elsewhere);
        ck_assert_uint_eq(found(elsewhere, &first, 5, 1), 5);
        ck_assert_uint_eq(found(elsewhere, &second, 9, -1), 9);
        let_go(&second, space);
        let_go(&first, elsewhere);
        ck_assert_uint_eq(found(elsewhere, &second, 9, -1), 9);
}
END_TEST

/* A block from the magazine that was once a duplicate is like any other block. */
START_TEST(a_duplicate_that_is_used_again_is_no_duplicate) {
        struct posted first, second, third;

        number(&first, 3);
        number(&second, 3);
        number(&third, 4);
        ck_assert_int_eq(post(&first, elsewhere, 1, 1), 1);
        ck_assert_int_eq(kvd_flush(elsewhere), 0);
        ck_assert_int_eq(post(&second, space, 1, 2), 1);
        ck_assert_int_eq(kvd_flush(space), 0);
        let_go(&second, space);
        third.tokens[1] = VOCAB; /* refused: no block may follow it, least of all after chain 3 */
        ck_assert_int_eq(post_at_once(&third, space, 2), 2);
        ck_assert_int_eq(kvd_flush(space), -ECANCELED);
        memcpy(first.tokens + TOKENS, third.tokens + TOKENS, TOKENS * sizeof *third.tokens);
        ck_assert_uint_eq(found(space, &first, 2, 1), 1);
        let_go(&third, space);
        let_go(&first, elsewhere);
}
END_TEST

START_TEST(a_seal_continues_after_posts) {
        struct kvd_block more[2];
        struct posted p;

        number(&p, 5);
        ck_assert_int_eq(post(&p, space, 3, 4), 3);
        ck_assert_int_eq(kvd_alloc(space, 2, more), 2);
        write_block(&more[0], 4);
        write_block(&more[1], 4);
        ck_assert_int_eq(kvd_seal(space, &p.pin, 2, more, p.tokens + 3 * TOKENS, 2 * TOKENS - 1),
                         2);
        ck_assert_uint_eq(p.pin.n_blocks, 5);
        ck_assert_uint_eq(p.pin.n_tokens, 5 * TOKENS - 1);
        kvd_free(space, p.n, p.blocks);
        p.n = 0;
        evict_all();
        ck_assert_uint_eq(found(space, &p, 4, 4), 4); /* the pin holds all of it now */
        let_go(&p, space);
}
END_TEST

/* ---- errors ---------------------------------------------------------------------------------- */

START_TEST(a_refusal_is_reported_once) {
        struct kvd_pin pin = {0};
        struct kvd_block block;
        struct posted p;

        number(&p, 6);
        p.tokens[TOKENS] = VOCAB;
        ck_assert_int_eq(post_at_once(&p, space, 4), 4);
        ck_assert_int_eq(kvd_flush(space), -ECANCELED);
        ck_assert_ptr_nonnull(strstr(kvd_error(), "3 posted blocks were refused"));
        ck_assert_int_eq(kvd_flush(space), 0);
        ck_assert_uint_eq(found(space, &p, 4, -1), 1);
        let_go(&p, space);

        ck_assert_int_eq(kvd_alloc(space, 1, &block), 1);
        ck_assert_int_eq(kvd_post(space, &pin, 1, &block, p.tokens, TOKENS - 1), -EINVAL);
        ck_assert_int_eq(kvd_post(space, &pin, 2, &block, p.tokens, TOKENS), -EINVAL);
        ck_assert_int_eq(kvd_post(space, &pin, 1, &block, p.tokens, TOKENS), 1);
        ck_assert_int_eq(kvd_post(space, &pin, 1, &block, p.tokens, TOKENS), -ESTALE);
        ck_assert_int_eq(kvd_seal(space, &pin, 1, &block, p.tokens, TOKENS), -ESTALE);
        kvd_free(space, 1, &block);
        kvd_unpin(space, &pin);
}
END_TEST

/* Freeing posted blocks before the daemon has seen them loses nothing. */
START_TEST(posts_may_be_freed_unseen) {
        struct posted p;

        for (uint32_t i = 0; i < 200; i++) {
                number(&p, 100 + i % 3);
                ck_assert_int_eq(post(&p, space, 8, 1), 8);
                let_go(&p, space);
        }
        ck_assert_int_eq(kvd_flush(space), 0);
        ck_assert_uint_eq(found(space, &p, 8, -1), 8);
}
END_TEST

/* ---- processes that stop or die -------------------------------------------------------------- */

START_TEST(a_stopped_daemon) {
        struct posted p;

        number(&p, 7);
        take(&p, space, LONGEST);
        stop_daemon_and_time(&server);
        ck_assert_int_eq(post(&p, space, KVD_POSTS, 3), KVD_POSTS);
        deadline_ms = 300;
        ck_assert_int_eq(post(&p, space, 1, 3), -ETIMEDOUT);
        deadline_ms = PATIENCE_MS;
        continue_daemon(&server);
        ck_assert_int_eq(kvd_flush(space), 0);
        ck_assert_int_eq(post(&p, space, LONGEST - KVD_POSTS, 3), LONGEST - KVD_POSTS);
        ck_assert_int_eq(kvd_flush(space), 0);
        ck_assert_uint_eq(found(space, &p, LONGEST, 3), LONGEST);
        let_go(&p, space);
}
END_TEST

START_TEST(a_daemon_dies_before_it_sees_posts) {
        struct posted p;

        number(&p, 8);
        take(&p, space, 10);
        stop_daemon(&server);
        ck_assert_int_eq(post(&p, space, 10, 1), 10);
        instance_kill(&server);
        ck_assert_int_lt(kvd_flush(space), 0); /* there is no daemon */
        instance_again(&server, SETTINGS("daemon.pool=16M", "daemon.segment=256K"));
        kvd_catch_up(elsewhere);
        ck_assert_int_eq(kvd_flush(space), -ECONNRESET);
        ck_assert_ptr_nonnull(strstr(kvd_error(), "10 posted blocks were not published"));
        ck_assert_int_eq(kvd_flush(space), 0);
        ck_assert_int_eq(*p.blocks[9].data, 1); /* the client can still read it */
        let_go(&p, space);
        number(&p, 8);
        ck_assert_int_eq(post(&p, space, 10, 2), 10);
        ck_assert_int_eq(kvd_flush(space), 0);
        WAIT_UNTIL((kvd_catch_up(elsewhere), found(elsewhere, &p, 10, 2) == 10));
        let_go(&p, space);
}
END_TEST

/* Each block that it had posted is either published or freed. */
START_TEST(a_client_that_dies) {
        for (uint32_t i = 0; i < 40; i++) {
                struct posted p;
                pid_t pid;

                number(&p, 9 + i);
                pid = fork();
                if (pid == 0) {
                        connect_to(&mine, &space);
                        for (;;)
                                post(&p, space, p.n < LONGEST ? 1 : 0, 5);
                }
                WAIT_UNTIL(i % 2 || (kvd_catch_up(elsewhere), found(elsewhere, &p, 1, 5) == 1));
                usleep(i * 50);
                kill(pid, SIGKILL);
                ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
                found(elsewhere, &p, LONGEST, 5);
        }
}
END_TEST

/* Posted blocks count as used until they are released. */
START_TEST(blocks_released_last_are_evicted_last) {
        const struct kvd_msg evict = {.number = KVD_MSG_evict,
                                      .evict = {.space = kvd_slice_of("engine"), .blocks = 64}};
        struct peer_end *admin = peer_attach(server.socket);
        static struct posted long_used, let_go_first, later[5];

        number(&long_used, 50);
        number(&let_go_first, 51);
        ck_assert_int_eq(post_at_once(&long_used, space, 64), 64);
        ck_assert_int_eq(post_at_once(&let_go_first, space, 64), 64);
        ck_assert_int_eq(kvd_flush(space), 0);
        let_go(&let_go_first, space);
        for (uint32_t i = 0; i < ARRAY_SIZE(later); i++) { /* more than the stock: time advances */
                number(&later[i], 52 + i);
                ck_assert_int_eq(post_at_once(&later[i], space, LONGEST), LONGEST);
        }
        ck_assert_int_eq(kvd_flush(space), 0);
        let_go(&long_used, space);
        ck_assert_uint_eq(peer_ok(admin, evict).evict_reply.evicted, 64);
        kvd_catch_up(elsewhere);
        ck_assert_uint_eq(found(elsewhere, &long_used, 64, -1), 64);
        ck_assert_uint_eq(found(elsewhere, &let_go_first, 64, -1), 0);
        for (uint32_t i = 0; i < ARRAY_SIZE(later); i++)
                let_go(&later[i], space);
        peer_close(admin);
}
END_TEST

START_TEST(a_child_posts_nothing) {
        struct posted p;
        pid_t pid;
        int status;

        number(&p, 60);
        ck_assert_int_eq(post(&p, space, 2, 1), 2);
        pid = fork();
        if (pid == 0) {
                bool refused = kvd_post(space, &p.pin, 1, p.blocks, p.tokens, TOKENS) == -ECHILD &&
                               kvd_flush(space) == -ECHILD;

                kvd_free(space, p.n, p.blocks);
                _exit(!refused);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(status, 0);
        ck_assert_int_eq(post(&p, space, 2, 1), 2);
        ck_assert_int_eq(kvd_flush(space), 0);
        ck_assert_uint_eq(found(space, &p, 4, 1), 4);
        let_go(&p, space);
}
END_TEST

/* ---- several threads ------------------------------------------------------------------------- */

static void *post_chain(void *arg) {
        struct posted *p = arg;

        ck_assert_int_eq(post(p, space, LONGEST, 6), LONGEST);
        return NULL;
}

/* Other threads use the connection all the time, so one of them has to notify the daemon. */
static void *ask(void *over) {
        while (!*(volatile bool *)over)
                kvd_catch_up(space);
        return NULL;
}

START_TEST(threads_post_into_one_ring) {
        static struct posted p[4];
        pthread_t threads[4], asking;
        bool over = false;

        for (uint32_t i = 0; i < ARRAY_SIZE(p); i++)
                number(&p[i], 70 + i);
        pthread_create(&asking, NULL, ask, &over);
        for (uint32_t i = 0; i < ARRAY_SIZE(p); i++)
                pthread_create(&threads[i], NULL, post_chain, &p[i]);
        for (uint32_t i = 0; i < ARRAY_SIZE(p); i++)
                pthread_join(threads[i], NULL);
        for (uint32_t i = 0; i < ARRAY_SIZE(p); i++)
                WAIT_UNTIL(
                        (kvd_catch_up(elsewhere), found(elsewhere, &p[i], LONGEST, 6) == LONGEST));
        *(volatile bool *)&over = true;
        pthread_join(asking, NULL);
        ck_assert_int_eq(kvd_flush(space), 0);
        for (uint32_t i = 0; i < ARRAY_SIZE(p); i++)
                let_go(&p[i], space);
}
END_TEST

/* ---- rounds ---------------------------------------------------------------------------------- */

static void *post_slowly(void *arg) {
        struct posted *p = arg;

        for (uint32_t i = 0; i < LONGEST; i++) {
                const struct timespec pause = {0, i % 64 < 48 ? 0 : (long)(i % 16) * 1000000};

                ck_assert_int_eq(post(p, space, 1, 8), 1);
                WAIT_UNTIL((kvd_catch_up(elsewhere), found(elsewhere, p, p->n, 8) == p->n));
                nanosleep(&pause, NULL);
        }
        return NULL;
}

/*
 * The threads post sometimes so fast that the daemon polls, and sometimes so slowly that it must be
 * notified. All posted blocks must be found. No client makes another request, so nothing else
 * brings them to the daemon.
 */
START_TEST(posts_are_taken_polled_or_notified) {
        struct posted p[3];
        pthread_t threads[ARRAY_SIZE(p)];

        for (uint32_t i = 0; i < ARRAY_SIZE(p); i++) {
                number(&p[i], 60 + i);
                take(&p[i], space, LONGEST);
        }
        for (uint32_t i = 0; i < ARRAY_SIZE(p); i++)
                pthread_create(&threads[i], NULL, post_slowly, &p[i]);
        for (uint32_t i = 0; i < ARRAY_SIZE(p); i++)
                pthread_join(threads[i], NULL);
        ck_assert_int_eq(kvd_flush(space), 0);
        for (uint32_t i = 0; i < ARRAY_SIZE(p); i++)
                let_go(&p[i], space);
}
END_TEST

/*
 * In rounds: the daemon saw each earlier post before the next one. Nothing notifies it of the last
 * post.
 */
static void post_and_die(uint32_t which, uint32_t *posted) {
        struct posted p;

        number(&p, which);
        connect_to(&mine, &space);
        take(&p, space, MANY_POSTS);
        while (p.n < MANY_POSTS - 1 && post(&p, space, 1, 9) == 1 && kvd_flush(space) == 0)
                ;
        post(&p, space, 1, 9);
        *posted = p.n;
        raise(SIGKILL);
}

/* Returns true once the daemon has reaped the dead client. */
static bool only_we_are_left(struct conn *conn) {
        struct kvd_msg_space_info_reply info;

        space_facts(conn, 0, &info);
        return info.clients == 2;
}

/* All blocks that a client posted survive its death; the daemon takes the last ones in idle time. */
START_TEST(posts_of_a_dead_polled_client_are_found) {
        struct conn *conn = instance_connect(&server);
        uint32_t *posted = mmap(NULL, sizeof *posted, PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);

        ck_assert_ptr_ne(posted, MAP_FAILED);
        for (uint32_t i = 0; i < 20; i++) {
                struct posted p;
                pid_t pid = fork();

                if (pid == 0)
                        post_and_die(200 + i, posted);
                ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
                ck_assert_uint_eq(*posted, MANY_POSTS);
                *posted = 0;
                number(&p, 200 + i);
                WAIT_UNTIL(only_we_are_left(conn));
                WAIT_UNTIL((kvd_catch_up(elsewhere),
                            found(elsewhere, &p, MANY_POSTS, 9) == MANY_POSTS));
        }
        conn_close(conn);
        munmap(posted, sizeof *posted);
}
END_TEST

/* ---- many rings ------------------------------------------------------------------------------ */

enum { SPACES = 40, RING = 64 };

static kvd_space *open_numbered(uint32_t i) {
        kvd_space *ret;
        char name[16];

        snprintf(name, sizeof name, "space%u", i);
        ck_assert_msg(kvd_space_open(mine, name, &geometry, NULL, &ret) == 0, "%s", kvd_error());
        return ret;
}

static uint32_t cursor_of(struct peer_end *p, const char *name) {
        uint32_t cursor = 0;

        for (;;) {
                struct kvd_msg info = {.number = KVD_MSG_space_info, .space_info = {cursor}};
                struct kvd_msg reply = peer_ok(p, info);

                if (kvd_slice_is(reply.space_info_reply.name, name))
                        return cursor;
                cursor = reply.space_info_reply.next;
        }
}

static void ask_about(struct peer_end *p, uint32_t cursor) {
        struct kvd_msg info = {.number = KVD_MSG_space_info, .space_info = {cursor}};

        peer_send(p, &info);
}

static uint32_t hear_sealed(struct peer_end *p) {
        struct kvd_msg reply;

        ck_assert(peer_receive(p, &reply));
        ck_assert_uint_eq(reply.number, KVD_MSG_space_info_reply);
        return (uint32_t)reply.space_info_reply.sealed;
}

/*
 * While the daemon is stopped, one client posts into many spaces, and then another client sends a
 * request. It must be answered after one of the rings has been emptied, not all.
 */
START_TEST(one_ring_is_taken_per_turn) {
        struct peer_end *asks = peer_attach(server.socket);
        static struct posted p[SPACES];
        kvd_space *spaces[SPACES];
        uint32_t first, last, sealed;

        for (uint32_t i = 0; i < SPACES; i++) {
                spaces[i] = open_numbered(i);
                number(&p[i], 100 + i);
                ck_assert_int_eq(kvd_alloc(spaces[i], RING, p[i].blocks), RING);
        }
        first = cursor_of(asks, "space0");
        last = cursor_of(asks, "space39");
        stop_daemon(&server);
        for (uint32_t i = 0; i < SPACES; i++)
                ck_assert_int_eq(post(&p[i], spaces[i], RING, 1), RING);
        ask_about(asks, first);
        ask_about(asks, last);
        continue_daemon(&server);
        sealed = hear_sealed(asks);
        ck_assert_msg(sealed == RING, "%u blocks of the first space were sealed", sealed);
        sealed = hear_sealed(asks);
        ck_assert_msg(sealed == 0, "%u blocks of the last space were sealed", sealed);
        for (uint32_t i = 0; i < SPACES; i++) {
                ck_assert_int_eq(kvd_flush(spaces[i]), 0);
                ck_assert_uint_eq(found(spaces[i], &p[i], RING, 1), RING);
                let_go(&p[i], spaces[i]);
                kvd_space_close(spaces[i]);
        }
        peer_close(asks);
}
END_TEST

/* ---- eviction -------------------------------------------------------------------------------- */

struct mapping {
        unsigned long begin, end, offset, inode;
        char mode[5];
};

/* The mapping of a process that contains an address, or the writable one of a file's offset. */
static struct mapping mapping_of(pid_t pid, uintptr_t address, const struct mapping *file,
                                 unsigned long offset) {
        char path[64], line[512];
        struct mapping m;
        FILE *f;

        snprintf(path, sizeof path, "/proc/%d/maps", pid);
        f = fopen(path, "re");
        ck_assert_ptr_nonnull(f);
        while (fgets(line, sizeof line, f)) {
                if (sscanf(line, "%lx-%lx %4s %lx %*s %lu", &m.begin, &m.end, m.mode, &m.offset,
                           &m.inode) != 5)
                        continue;
                if (file ? m.inode == file->inode && m.mode[1] == 'w' && m.offset <= offset &&
                                    offset - m.offset < m.end - m.begin :
                           m.begin <= address && address < m.end) {
                        fclose(f);
                        return m;
                }
        }
        ck_abort_msg("no such mapping");
}

/* Changes a block's word in the daemon's memory, because here it is read-only. */
static void set_word(const struct kvd_block *block, enum kvd_state state) {
        const struct view *view = view_of(block);
        uintptr_t ours = (uintptr_t)&kvd_index_desc(view->ix, block->id)->slot;
        uint64_t word = kvd_slot_make(state, block->generation);
        struct mapping here = mapping_of(getpid(), ours, NULL, 0), there;
        unsigned long offset = here.offset + (ours - here.begin);
        char path[64];
        int fd;

        there = mapping_of(server.pid, 0, &here, offset);
        snprintf(path, sizeof path, "/proc/%d/mem", server.pid);
        fd = open(path, O_RDWR | O_CLOEXEC);
        ck_assert_int_ge(fd, 0);
        ck_assert_int_eq(pwrite(fd, &word, sizeof word,
                                (off_t)(there.begin + (offset - there.offset))),
                         sizeof word);
        close(fd);
        ck_assert_uint_eq(atomic_load(&kvd_index_desc(view->ix, block->id)->slot), word);
}

/*
 * The daemon may look for a block's pins while its client frees it, or be killed then. The block
 * was once taken for one that was not sealed, and its client filled it again, under the old tokens.
 */
START_TEST(a_block_that_is_looked_at_is_not_filled_again) {
        struct kvd_block more[MANY_POSTS], freed;
        struct posted p;
        int n;

        number(&p, 30);
        ck_assert_int_eq(post(&p, space, 1, 7), 1);
        ck_assert_int_eq(kvd_flush(space), 0);
        set_word(&p.blocks[0], KVD_RETIRING);
        freed = p.blocks[0];
        kvd_free(space, 1, &freed);
        kvd_unpin(space, &p.pin);
        set_word(&p.blocks[0], KVD_SEALED);
        n = kvd_alloc(space, MANY_POSTS, more);
        ck_assert_int_ge(n, 1);
        for (int i = 0; i < n; i++)
                ck_assert_uint_ne(more[i].id, p.blocks[0].id);
        kvd_free(space, (uint32_t)n, more);
}
END_TEST

SUITE("post", FIXTURE(set_up, tear_down),
      TESTS(others_find_what_is_posted, a_chain_continues_after_duplicates,
            a_duplicate_that_is_used_again_is_no_duplicate, a_seal_continues_after_posts,
            a_refusal_is_reported_once, posts_may_be_freed_unseen, a_stopped_daemon,
            a_daemon_dies_before_it_sees_posts, a_client_that_dies,
            blocks_released_last_are_evicted_last, threads_post_into_one_ring,
            posts_are_taken_polled_or_notified, posts_of_a_dead_polled_client_are_found),
      WHEN(!emulated("MADV_WIPEONFORK has no effect"), TESTS(a_child_posts_nothing)),
      WHEN(!emulated("there is no io_uring, whose turns are examined"),
           TESTS(one_ring_is_taken_per_turn)),
      WHEN(!emulated("other processes' memory has other addresses"),
           TESTS(a_block_that_is_looked_at_is_not_filled_again)))
