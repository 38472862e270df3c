/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One client that does everything at random: looks up, holds, checks every byte it may read, fills,
 * seals, releases, computes bidirectional prefixes under a lease, and dies in between. A universe
 * of chains with common trunks determines what it may find, and the oracle determines the bytes.
 */

#include "tests/daemon/soak/worker.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "ipc/base/util.h"
#include "tests/lib/oracle.h"

#define BT 4u
#define CHAINS 48u
#define MAX_BLOCKS 40u
#define MAX_TOKENS (MAX_BLOCKS * BT)
#define HOLDS 6u

const struct kvd_geometry soak_geometry = {.layers = 2,
                                           .kv_heads = 2,
                                           .head_dim = 16,
                                           .block_tokens = BT,
                                           .dtype = KVD_F32,
                                           .vocab = 5000};

static const struct kvd_geometry keyed_geometry = {.block_tokens = 8,
                                                   .block_bytes = 2048,
                                                   .layout = "soak"};

enum { CAUSAL, WHOLE, KEYED, N_SPACES };

struct hold { /* a pin and the blocks that it must pin */
        struct kvd_pin pin;
        uint32_t space;
        uint32_t chain;
        uint32_t prefix_tokens; /* WHOLE */
        uint64_t salt;          /* CAUSAL */
        uint32_t ids[MAX_BLOCKS];
};

struct worker {
        const struct worker_options *o;
        struct random random;
        struct kvd *kvd;
        struct kvd_space *spaces[N_SPACES];
        struct hold holds[HOLDS];
        bool failed;
};

static void count(_Atomic uint64_t *counter, uint64_t n) {
        atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

static void complain(struct worker *w, const char *what) {
        fprintf(stderr, "worker: %s: %s\n", what, kvd_error());
        w->failed = true;
}

static void maybe_die(struct worker *w) {
        if (w->o->may_die && !w->o->threads && random_below(&w->random, 400) == 0) {
                count(&w->o->tally->deaths, 1);
                kill(getpid(), SIGKILL);
        }
}

/* ---- the universe ---------------------------------------------------------------------------- */

/* Token ids of a chain: 16 chains share a trunk, 4 a bough. */
static void chain_tokens(uint32_t chain, uint32_t n, uint32_t *ret) {
        for (uint32_t i = 0; i < n; i++) {
                uint32_t block = i / BT, owner = block < 17 ? chain / 16 :
                                                 block < 24 ? chain / 4 :
                                                              chain;

                ret[i] = (i * 37 + owner * 101 +
                          (block < 17 ? 0 :
                           block < 24 ? 1000 :
                                        2000)) %
                         5000;
        }
}

static uint64_t seed_of(const struct hold *h, const uint32_t *tokens, uint32_t block,
                        uint32_t n_tokens) {
        uint32_t end = MIN((block + 1) * BT, n_tokens);

        /*
         * A bidirectional block depends on the whole prefix, so the prefix selects the space whose
         * seed the oracle uses.
         */
        return h->space == WHOLE ?
                       oracle_seed(oracle_seed(7, tokens, h->prefix_tokens) + block, tokens, end) :
                       oracle_seed(3 + h->salt, tokens, end);
}

static uint32_t bytes_of(uint32_t space) {
        return space == KEYED ? (uint32_t)keyed_geometry.block_bytes :
                                (uint32_t)kvd_block_bytes(&soak_geometry);
}

/* 32 bytes, most of them 0xff. */
static void make_key(uint32_t object, uint32_t key[8]) {
        memset(key, 0xff, 8 * sizeof *key);
        key[object % 8] = object * 7;
}

/* ---- checking -------------------------------------------------------------------------------- */

static void check_hold(struct worker *w, const struct hold *h) {
        uint32_t tokens[MAX_TOKENS];
        size_t wrong = 0;

        chain_tokens(h->chain, MAX_TOKENS, tokens);
        for (uint32_t i = 0; i < h->pin.n_blocks; i++)
                wrong += oracle_wrong(kvd_pin_block(&h->pin, h->ids[i]), h->pin.block_bytes,
                                      seed_of(h, tokens, i, h->pin.n_tokens));
        count(&w->o->tally->bytes_checked, h->pin.n_blocks * h->pin.block_bytes);
        count(&w->o->tally->bytes_wrong, wrong);
        if (wrong)
                w->failed = true;
}

static void let_go(struct worker *w, struct hold *h) {
        if (!h->pin.view)
                return;
        check_hold(w, h);
        kvd_unpin(w->spaces[h->space], &h->pin);
}

static struct hold *empty_hold(struct worker *w) {
        struct hold *h = &w->holds[random_below(&w->random, HOLDS)];

        let_go(w, h);
        return h;
}

/* ---- publishing ------------------------------------------------------------------------------ */

static bool harmless(struct worker *w, int r) {
        if (r == -ENOBUFS || r == -EDQUOT) {
                count(&w->o->tally->refusals, 1);
                return true;
        }
        if (w->o->daemon_may_die &&
            (r == -ECONNRESET || r == -ECONNREFUSED || r == -ESTALE || r == -ENOENT ||
             r == -ENOTCONN || r == -ETIMEDOUT || r == -EPIPE)) {
                count(&w->o->tally->daemon_lost, 1);
                usleep(2000);
                return true;
        }
        return false;
}

static uint32_t take_blocks(struct worker *w, struct kvd_space *space, uint32_t n,
                            struct kvd_block *blocks) {
        uint32_t got = 0;
        int r;

        while (got < n) {
                r = kvd_alloc(space, n - got, blocks + got);
                if (r < 0) {
                        if (!harmless(w, r))
                                complain(w, "kvd_alloc");
                        break;
                }
                got += (uint32_t)r;
                maybe_die(w);
        }
        return got;
}

static void fill(struct worker *w, const struct hold *h, const uint32_t *tokens, uint32_t first,
                 uint32_t n, struct kvd_block *blocks, uint32_t end) {
        size_t bytes = kvd_block_bytes(&soak_geometry);

        for (uint32_t i = 0; i < n; i++) {
                oracle_fill(blocks[i].data, bytes, seed_of(h, tokens, first + i, end));
                maybe_die(w);
        }
}

/* A client may read its posted blocks whatever happened to the posts. */
static void check_posted(struct worker *w, const struct hold *h, const uint32_t *tokens,
                         uint32_t first, uint32_t n, const struct kvd_block *blocks, uint32_t end) {
        size_t bytes = kvd_block_bytes(&soak_geometry), wrong = 0;

        for (uint32_t i = 0; i < n; i++)
                wrong += oracle_wrong(blocks[i].data, bytes, seed_of(h, tokens, first + i, end));
        count(&w->o->tally->bytes_checked, n * bytes);
        count(&w->o->tally->bytes_wrong, wrong);
        if (wrong)
                w->failed = true;
}

/*
 * If another worker's block with the same content was first, and has been evicted since, the chain
 * is broken.
 */
static bool may_be_refused(struct worker *w, int r) {
        return r == -ECANCELED || r == -ESTALE || harmless(w, r);
}

/*
 * Posts full blocks one by one, and sometimes seals the last one after them. The chain is then
 * found like any other.
 */
static void post(struct worker *w, struct hold *h, const uint32_t *tokens, uint32_t n,
                 struct kvd_block *blocks, uint32_t end) {
        uint32_t first = h->pin.n_blocks, posted = 0;
        struct kvd_space *space = w->spaces[h->space];
        int r = 1;

        while (posted + 1 < n && r == 1) {
                r = kvd_post(space, &h->pin, 1, blocks + posted, tokens + (first + posted) * BT,
                             BT);
                posted += r == 1;
                maybe_die(w);
        }
        if (r == 1)
                r = kvd_seal(space, &h->pin, 1, blocks + posted, tokens + (first + posted) * BT,
                             end - (first + posted) * BT);
        if (r < 0 && !may_be_refused(w, r))
                complain(w, "kvd_post");
        check_posted(w, h, tokens, first, posted, blocks, end);
        maybe_die(w);
        kvd_free(space, r < 0 ? n : posted, blocks);
        kvd_unpin(space, &h->pin);
        h->pin.salt = h->salt;
}

static int64_t look_up(struct worker *w, struct hold *h, uint32_t n_tokens);

/* Computes the missing blocks after h->pin up to token `end`, and seals or posts them. */
static void extend(struct worker *w, struct hold *h, uint32_t end) {
        struct kvd_space *space = w->spaces[h->space];
        uint32_t tokens[MAX_TOKENS], first = h->pin.n_blocks, want = DIV_UP(end, BT) - first, n;
        struct kvd_block blocks[MAX_BLOCKS];
        int r;

        chain_tokens(h->chain, MAX_TOKENS, tokens);
        n = take_blocks(w, space, want, blocks);
        if (n < want && (h->space == WHOLE || n == 0)) {
                kvd_free(space, n, blocks);
                return;
        }
        end = MIN(end, (first + n) * BT);
        fill(w, h, tokens, first, n, blocks, end);
        if (h->space == CAUSAL && random_below(&w->random, 2)) {
                post(w, h, tokens, n, blocks, end);
                look_up(w, h, end);
                return;
        }
        r = kvd_seal(space, &h->pin, n, blocks, tokens + first * BT, end - first * BT);
        if (r < 0) {
                if (!harmless(w, r))
                        complain(w, "kvd_seal");
                kvd_free(space, n, blocks);
                return;
        }
        count(&w->o->tally->blocks_sealed, n);
        for (uint32_t i = 0; i < n; i++)
                h->ids[first + i] = blocks[i].id;
        maybe_die(w);
}

static void check_object(struct worker *w, const struct kvd_pin *pin, const uint32_t *key,
                         uint32_t n, const uint32_t *blocks) {
        size_t wrong = pin->n_blocks != n;

        for (uint32_t i = 0; i < n; i++)
                wrong += oracle_wrong(kvd_pin_block(pin, blocks[i]), bytes_of(KEYED),
                                      oracle_seed(100 + i, key, 8));
        count(&w->o->tally->bytes_checked, n * pin->block_bytes);
        count(&w->o->tally->bytes_wrong, wrong);
        if (wrong)
                w->failed = true;
}

static void seal_object(struct worker *w, const uint32_t *key, uint32_t n) {
        struct kvd_space *space = w->spaces[KEYED];
        struct kvd_block blocks[4];
        struct kvd_pin pin = {0};
        uint32_t got = take_blocks(w, space, n, blocks), ids[4];
        int r = 0;

        for (uint32_t i = 0; i < got; i++)
                oracle_fill(blocks[i].data, bytes_of(KEYED), oracle_seed(100 + i, key, 8));
        maybe_die(w);
        if (got == n)
                r = kvd_seal_key(space, key, n, blocks, &pin);
        if (r < 0 && !harmless(w, r))
                complain(w, "kvd_seal_key");
        if (r <= 0) {
                kvd_free(space, got, blocks);
                return;
        }
        count(&w->o->tally->blocks_sealed, n);
        for (uint32_t i = 0; i < n; i++)
                ids[i] = blocks[i].id;
        check_object(w, &pin, key, n, ids);
        kvd_unpin(space, &pin);
}

/* ---- operations ------------------------------------------------------------------------------ */

static int64_t look_up(struct worker *w, struct hold *h, uint32_t n_tokens) {
        uint32_t tokens[MAX_TOKENS];
        int64_t n;

        chain_tokens(h->chain, MAX_TOKENS, tokens);
        n = kvd_lookup(w->spaces[h->space], 0, tokens, n_tokens, h->ids, MAX_BLOCKS, &h->pin);
        if (n < 0)
                complain(w, "kvd_lookup");
        if (n > 0) {
                count(&w->o->tally->tokens_found, (uint64_t)n);
                check_hold(w, h);
        }
        maybe_die(w);
        return n;
}

/* Zero half of the time. */
static uint64_t random_salt(struct worker *w) {
        static const uint64_t salts[] = {0, 0, 1, UINT64_C(1) << 40};

        return salts[random_below(&w->random, 4)];
}

static void causal_operation(struct worker *w) {
        struct hold *h = empty_hold(w);
        uint32_t n_tokens = 1 + random_below(&w->random, MAX_TOKENS);
        int64_t n;

        *h = (struct hold){.space = CAUSAL,
                           .chain = random_below(&w->random, CHAINS),
                           .salt = random_salt(w)};
        h->pin.salt = h->salt;
        n = look_up(w, h, n_tokens);
        if (n >= 0 && n < n_tokens && n % BT == 0 && random_below(&w->random, 4))
                extend(w, h, n_tokens);
        if (h->pin.view)
                check_hold(w, h);
        if (random_below(&w->random, 2))
                let_go(w, h);
}

static void whole_operation(struct worker *w) {
        struct hold *h = empty_hold(w);
        uint32_t chain = random_below(&w->random, 6), n_tokens = 10 + chain * 13,
                 tokens[MAX_TOKENS];
        int r;

        *h = (struct hold){.space = WHOLE, .chain = chain, .prefix_tokens = n_tokens};
        chain_tokens(chain, MAX_TOKENS, tokens);
        for (int i = 0; i < 3 && look_up(w, h, n_tokens) == 0; i++) {
                r = kvd_lease(w->spaces[WHOLE], tokens, n_tokens, random_below(&w->random, 20));
                maybe_die(w);
                if (r < 0 && r != -EBUSY && !harmless(w, r))
                        complain(w, "kvd_lease");
                if (r != 1)
                        continue;
                count(&w->o->tally->leases, 1);
                extend(w, h, n_tokens);
                r = kvd_lease_end(w->spaces[WHOLE], tokens, n_tokens);
                if (r < 0 && !harmless(w, r))
                        complain(w, "kvd_lease_end");
                break;
        }
        if (h->pin.view)
                check_hold(w, h);
        if (random_below(&w->random, 2))
                let_go(w, h);
}

/* Looks for three objects, checks those that are there, and seals the first if it is not. */
static void keyed_operation(struct worker *w) {
        uint32_t object = random_below(&w->random, 40), n = 1 + object % 4, keys[3][8],
                 blocks[3 * 4];
        struct kvd_pin pins[3] = {{0}};
        int64_t found;

        for (uint32_t i = 0; i < 3; i++) /* each has n blocks, too */
                make_key(object + 4 * i, keys[i]);
        found = kvd_lookup_keys(w->spaces[KEYED], keys, 3, n, blocks, pins);
        if (found < 0)
                complain(w, "kvd_lookup_keys");
        for (uint32_t i = 0; i < 3; i++)
                if (pins[i].view)
                        check_object(w, &pins[i], keys[i], n, blocks + i * n);
        if (found >= 0 && !pins[0].view)
                seal_object(w, keys[0], n);
        for (uint32_t i = 0; i < 3; i++)
                kvd_unpin(w->spaces[KEYED], &pins[i]);
}

/* Takes blocks, scribbles on them, and gives them back. No reader may ever see the scribble. */
static void scribble(struct worker *w) {
        uint32_t space = random_below(&w->random, N_SPACES), n;
        struct kvd_block blocks[8];

        n = take_blocks(w, w->spaces[space], 1 + random_below(&w->random, 8), blocks);

        for (uint32_t i = 0; i < n; i++)
                memset(blocks[i].data, 0xee, bytes_of(space));
        kvd_free(w->spaces[space], n, blocks);
}

static void evict_some(struct worker *w) {
        struct kvd_msg_evict request = {.space = kvd_slice_of("causal"),
                                        .blocks = 1 + random_below(&w->random, 16)};
        struct conn *conn;

        if (conn_open(w->o->socket, "evictor", &conn) < 0) {
                if (!w->o->daemon_may_die)
                        complain(w, "conn_open");
                return;
        }
        if (conn_call(conn, KVD_MSG_evict, &request, NULL) < 0 && !w->o->daemon_may_die)
                complain(w, "evict");
        conn_close(conn);
}

static void operation(struct worker *w) {
        uint32_t dice = random_below(&w->random, 100);

        if (dice < 70)
                causal_operation(w);
        else if (dice < 86)
                whole_operation(w);
        else if (dice < 94)
                keyed_operation(w);
        else if (dice < 98)
                scribble(w);
        else
                evict_some(w);
        let_go(w, &w->holds[random_below(&w->random, HOLDS)]);
        count(&w->o->tally->operations, 1);
}

/* ---- the worker ------------------------------------------------------------------------------ */

static int open_spaces(struct worker *w) {
        static const struct kvd_space_options options[N_SPACES] =
                {/* a fraction of the universe, so that the daemon always evicts */
                 [CAUSAL] = {.kind = KVD_CAUSAL, .max_blocks = 400},
                 [WHOLE] = {.kind = KVD_BIDIRECTIONAL, .max_blocks = 48},
                 [KEYED] = {.max_blocks = 64}};
        static const char *const names[N_SPACES] = {"causal", "whole", "keyed"};
        int r = kvd_open(w->o->socket, &w->kvd);

        for (uint32_t i = 0; r == 0 && i < N_SPACES; i++) {
                struct kvd_space_options o = options[i];

                o.flags = random_below(&w->random, 2) ? KVD_SPACE_FIXED : 0;
                r = kvd_space_open(w->kvd, names[i], i == KEYED ? &keyed_geometry : &soak_geometry,
                                   &o, &w->spaces[i]);
        }
        return r;
}

static void close_all(struct worker *w) {
        for (uint32_t i = 0; i < HOLDS; i++)
                let_go(w, &w->holds[i]);
        for (uint32_t i = 0; i < N_SPACES; i++)
                w->spaces[i] = kvd_space_close(w->spaces[i]);
        w->kvd = kvd_close(w->kvd);
}

int worker_idle(const struct worker_options *options, uint32_t n) {
        struct worker *all = calloc(n, sizeof *all);
        int r = 0;

        for (uint32_t i = 0; i < n && r == 0; i++) {
                all[i].o = options;
                all[i].random.state = options->seed + i;
                r = open_spaces(&all[i]);
        }
        if (r < 0)
                complain(&all[0], "open an idle client");
        for (uint32_t i = 0; r == 0 && !options->tally->stop; i = (i + 1) % n) {
                for (uint32_t j = 0; j < N_SPACES; j++)
                        kvd_catch_up(all[i].spaces[j]); /* to a new daemon */
                usleep(2000);
        }
        for (uint32_t i = 0; i < n; i++)
                close_all(&all[i]);
        free(all);
        return r < 0;
}

int worker_run(const struct worker_options *options) {
        struct worker w = {.o = options, .random = {options->seed}};
        int r;

        while ((r = open_spaces(&w)) < 0 && options->daemon_may_die && !options->tally->stop) {
                close_all(&w);
                usleep(5000);
        }
        if (r < 0 && !options->daemon_may_die)
                complain(&w, "open");
        while (r == 0 && !w.failed && !options->tally->stop)
                operation(&w);
        close_all(&w);
        return w.failed;
}
