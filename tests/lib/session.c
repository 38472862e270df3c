/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/session.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "client/conn/error.h"
#include "client/kvd_methods.h"
#include "ipc/base/sys.h"
#include "tests/lib/oracle.h"

#define BT 4u
#define BLOCK_BYTES 16384u
#define POOL_BLOCKS 256u
#define MOST_POLLS 100000u /* per call; with more, the call retries until its deadline */

static const struct kvd_geometry geometry = {.layers = 1,
                                             .kv_heads = 4,
                                             .head_dim = 128,
                                             .block_tokens = BT,
                                             .dtype = KVD_F32,
                                             .vocab = 1000000};

/* ---- every call is watched ------------------------------------------------------------------- */

/* The watched call has waited in vain until its deadline. */
static bool ran_out;
static uint32_t polls;
static const struct kvd_sys *under; /* the wrapped system calls */

static int watched_poll(struct pollfd *fds, unsigned long n, int timeout_ms) {
        int r = under->poll(fds, n, timeout_ms);

        ran_out |= (r == 0 && timeout_ms > 0) || polls++ == MOST_POLLS;
        return r;
}

static int watched_connect(int fd, const struct sockaddr *to, unsigned n) {
        int r = under->connect(fd, to, n);

        ran_out |= r < 0 && errno == EAGAIN;
        return r;
}

static void watch_system(void) {
        static struct kvd_sys table;

        under = sys;
        table = *under;
        table.poll = watched_poll;
        table.connect = watched_connect;
        sys = &table;
}

static void leave_system(void) {
        sys = under;
}

static _Noreturn void wrong(const char *what, const char *more) {
        fprintf(stderr, "session: %s%s\n", what, more);
        fflush(stderr);
        _exit(9);
}

static const char no_words[] = "nothing was said";

static void begin(void) {
        client_fail(0, no_words);
        ran_out = false;
        polls = 0;
}

static void watch(const char *what) {
        if (ran_out)
                wrong("it waited to its deadline: ", what);
}

static int64_t watched(int64_t r, const char *what) {
        watch(what);
        if (r < 0 && (r < -4095 || !kvd_error()[0] || strcmp(kvd_error(), no_words) == 0))
                wrong("a failure without words: ", what);
        return r;
}

#define CALL(call) (begin(), watched(call, #call))

/* ---- one client ------------------------------------------------------------------------------ */

struct user {
        struct kvd *kvd;
        struct kvd_space *space;
};

static struct kvd_space *open_space(struct kvd *handle, const char *name, uint32_t kind) {
        struct kvd_space_options options = {.kind = kind};
        struct kvd_space *space;

        return handle && CALL(kvd_space_open(handle, name, &geometry, &options, &space)) == 0 ?
                       space :
                       NULL;
}

static struct user user_open(const char *socket, const char *name, uint32_t kind) {
        struct user u = {0};

        if (CALL(kvd_open(socket, &u.kvd)) < 0)
                return (struct user){0};
        u.space = open_space(u.kvd, name, kind);
        return u;
}

static void user_close(struct user *u) {
        begin();
        kvd_space_close(u->space);
        kvd_close(u->kvd);
        watch("close");
}

static void make_tokens(uint32_t chain, uint32_t n, uint32_t *ret) {
        for (uint32_t i = 0; i < n; i++)
                ret[i] = chain * 1000 + i;
}

static void fill(struct kvd_block *block, uint32_t chain, uint32_t i) {
        uint32_t key[2] = {chain, i};

        oracle_fill(block->data, BLOCK_BYTES, oracle_seed(1, key, 2));
}

static bool is_right(const uint8_t *data, uint32_t chain, uint32_t i) {
        uint32_t key[2] = {chain, i};

        return oracle_wrong(data, BLOCK_BYTES, oracle_seed(1, key, 2)) == 0;
}

/* Checks the blocks that are found of a chain. Returns how many. */
static uint32_t find(struct user *u, uint32_t chain, uint32_t n) {
        uint32_t tokens[POOL_BLOCKS * BT], ids[POOL_BLOCKS], found;
        struct kvd_pin pin = {0};

        make_tokens(chain, n * BT, tokens);
        if (!u->space)
                return 0;
        CALL(kvd_catch_up(u->space));
        if (CALL(kvd_lookup(u->space, 0, tokens, n * BT, ids, n, &pin)) <= 0)
                return 0;
        found = pin.n_blocks;
        for (uint32_t i = 0; i < found; i++)
                if (!is_right(kvd_pin_block(&pin, ids[i]), chain, i))
                        wrong("wrong bytes", "");
        kvd_unpin(u->space, &pin);
        return found;
}

static uint32_t take(struct user *u, uint32_t n, struct kvd_block *blocks) {
        uint32_t got = 0;
        int64_t r;

        while (got < n) {
                r = CALL(kvd_alloc(u->space, n - got, blocks + got));
                if (r == 0)
                        wrong("kvd_alloc returned 0", "");
                if (r < 0)
                        break;
                got += (uint32_t)r;
        }
        return got;
}

/* Fills and seals up to n blocks, or frees them if the seal fails. Returns how many are sealed. */
static uint32_t publish(struct user *u, uint32_t chain, uint32_t n) {
        struct kvd_block blocks[POOL_BLOCKS];
        uint32_t tokens[POOL_BLOCKS * BT], got;
        struct kvd_pin pin = {0};
        int64_t r;

        if (!u->space)
                return 0;
        got = take(u, n, blocks);
        for (uint32_t i = 0; i < got; i++)
                fill(&blocks[i], chain, i);
        if (got == 0)
                return 0;
        make_tokens(chain, got * BT, tokens);
        r = CALL(kvd_seal(u->space, &pin, got, blocks, tokens, got * BT));
        if (r < 0)
                kvd_free(u->space, got, blocks);
        kvd_unpin(u->space, &pin);
        watch("let go");
        return r < 0 ? 0 : got;
}

/* ---- parts of the session -------------------------------------------------------------------- */

static void request(struct conn *conn, uint32_t number, const void *body, void *reply) {
        if (conn && conn_is_open(conn))
                CALL(conn_call(conn, number, body, reply));
}

/*
 * Every resident entry has the right bytes: first the borrowed blocks of chain 1, then those of
 * chain 77.
 */
static void expect_entries(const struct kvd_sequence *q, uint32_t borrowed) {
        const struct kvd_entry *entries;
        uint32_t n;

        entries = kvd_sequence_entries(q, &n);
        for (uint32_t i = 0; i < n; i++)
                if (entries[i].data && !is_right(entries[i].data, i < borrowed ? 1 : 77,
                                                 i < borrowed ? i : i - borrowed))
                        wrong("wrong bytes in a sequence", "");
}

static uint32_t borrow(struct user *u, struct kvd_sequence *q, struct kvd_pin *pin) {
        uint32_t tokens[3 * BT], ids[3];

        make_tokens(1, 3 * BT, tokens);
        if (CALL(kvd_lookup(u->space, 0, tokens, 3 * BT, ids, 3, pin)) <= 0)
                return 0;
        return CALL(kvd_sequence_borrow(q, pin, pin->n_blocks, ids, tokens)) < 0 ? 0 :
                                                                                   pin->n_blocks;
}

static void append(struct user *u, struct kvd_sequence *q) {
        struct kvd_block blocks[5];
        uint32_t tokens[5 * BT], got = take(u, 5, blocks);

        for (uint32_t i = 0; i < got; i++)
                fill(&blocks[i], 77, i);
        make_tokens(77, 5 * BT, tokens);
        if (got && CALL(kvd_sequence_append(q, got, blocks, tokens, got * BT)) < 0)
                kvd_free(u->space, got, blocks);
}

/* A request's own table: drops and compacts entries, and reports attention in shared memory. */
static void sequence(struct user *u) {
        static const uint32_t slots[2] = {4, 5};
        struct kvd_sequence *q = NULL;
        struct kvd_label_shape shape;
        struct kvd_pin pin = {0};
        uint32_t borrowed, n;

        if (!u->space || CALL(kvd_sequence_open(u->space, 16, &q)) < 0)
                return;
        borrowed = borrow(u, q, &pin);
        append(u, q);
        kvd_sequence_entries(q, &n);
        if (n > 5) {
                CALL(kvd_sequence_step(q, 0, n * BT));
                CALL(kvd_sequence_cool(q, 2, slots, KVD_COOL_DROP));
                CALL(kvd_sequence_compact(q, 5, 2, BT, NULL));
                CALL(kvd_sequence_wait(q, 1));
                kvd_sequence_labels(q, 5, &shape);
                kvd_sequence_use(q, 5, 1, 1);
                CALL(kvd_sequence_sync(q));
        }
        expect_entries(q, borrowed);
        begin();
        kvd_sequence_close(q);
        kvd_unpin(u->space, &pin);
        watch("close of a sequence");
}

static void ask_everything(const char *socket) {
        struct kvd_slice one = kvd_slice_of("one");
        struct conn *conn = NULL;
        union {
                struct kvd_msg m;
                uint8_t room[4096];
        } reply;

        if (CALL(conn_open(socket, "asks", &conn)) < 0)
                return;
        request(conn, KVD_MSG_daemon_info, NULL, &reply);
        request(conn, KVD_MSG_space_info, &(struct kvd_msg_space_info){0}, &reply);
        request(conn, KVD_MSG_client_info, &(struct kvd_msg_client_info){0}, &reply);
        request(conn, KVD_MSG_block_map, &(struct kvd_msg_block_map){.space = one}, &reply);
        request(conn, KVD_MSG_chain_info, &(struct kvd_msg_chain_info){.space = one}, &reply);
        request(conn, KVD_MSG_check, &(struct kvd_msg_check){.space = one}, &reply);
        request(conn, KVD_MSG_evict, &(struct kvd_msg_evict){.space = one, .blocks = 2}, &reply);
        request(conn, KVD_MSG_space_set,
                &(struct kvd_msg_space_set){.space = one,
                                            .key = kvd_slice_of("policy"),
                                            .value = kvd_slice_of("fifo")},
                &reply);
        conn_close(conn);
}

/* Pins, fills, and kills itself. */
static void dying_client(const char *socket) {
        pid_t pid = fork();

        if (pid == 0) {
                struct user u = user_open(socket, "one", KVD_CAUSAL);
                uint32_t tokens[4 * BT], ids[4];
                struct kvd_block blocks[3];
                struct kvd_pin pin = {0};

                make_tokens(1, 4 * BT, tokens);
                if (u.space && kvd_lookup(u.space, 0, tokens, 4 * BT, ids, 4, &pin) >= 0)
                        kvd_alloc(u.space, 3, blocks);
                kill(getpid(), SIGKILL);
        }
        waitpid(pid, NULL, 0);
}

static void single_flight(const char *socket) {
        struct user u = user_open(socket, "whole", KVD_BIDIRECTIONAL);
        uint32_t tokens[10];

        make_tokens(9, 10, tokens);
        if (u.space && CALL(kvd_lease(u.space, tokens, 10, 0)) == 1)
                CALL(kvd_lease_end(u.space, tokens, 10));
        user_close(&u);
}

static void delete_space(const char *socket, const char *name) {
        struct kvd_msg_space_delete m = {.space = kvd_slice_of(name), .force = 1};
        struct conn *conn = NULL;

        if (CALL(conn_open(socket, "deletes", &conn)) < 0)
                return;
        request(conn, KVD_MSG_space_delete, &m, NULL);
        conn_close(conn);
}

void session_run(const char *socket) {
        struct user a, b, c;

        watch_system();
        a = user_open(socket, "one", KVD_CAUSAL);
        publish(&a, 1, 4);
        b = user_open(socket, "one", KVD_CAUSAL);
        find(&b, 1, 4);
        publish(&b, 1, 6); /* the first four are duplicates */
        find(&a, 1, 6);
        sequence(&a);
        dying_client(socket);
        sequence(&b);
        single_flight(socket);
        publish(&a, 2, POOL_BLOCKS / 2); /* the pool grows */
        publish(&a, 3, 40);
        c = user_open(socket, "two", KVD_CAUSAL);
        publish(&c, 5, 90); /* and is shared */
        find(&b, 1, 6);
        find(&a, 2, POOL_BLOCKS / 2);
        find(&c, 5, 90);
        ask_everything(socket);
        user_close(&b);
        delete_space(socket, "two");
        publish(&c, 5, 2); /* starts again */
        find(&a, 3, 40);
        user_close(&c);
        user_close(&a);
        leave_system();
}

/* ---- afterwards ------------------------------------------------------------------------------ */

void session_expect_service(const char *socket) {
        uint32_t published, found;
        struct user u, v;

        watch_system();
        delete_space(socket, "one");
        delete_space(socket, "two");
        delete_space(socket, "whole");
        u = user_open(socket, "fresh", KVD_CAUSAL);
        v = user_open(socket, "fresh", KVD_CAUSAL);
        if (!u.space || !v.space)
                wrong("no service afterwards: ", kvd_error());
        published = publish(&u, 7, 100);
        found = find(&v, 7, 100);
        if (published != 100 || found != 100) {
                fprintf(stderr, "session: of 100 blocks %u were published and %u found: %s\n",
                        published, found, kvd_error());
                wrong("a fresh client cannot use the cache", "");
        }
        user_close(&u);
        user_close(&v);
        delete_space(socket, "fresh");
        leave_system();
}
