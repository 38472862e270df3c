/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Random events of three spaces, with each kind of tier below the pool (random_tiers.h): chains are
 * sealed, fetched and evicted, clients die, spaces are deleted, and processes fail. Afterwards, when
 * everything works again, every fetch has ended, nothing is asked any more, and a new chain can be
 * written and read.
 *
 *      test-below-random [--seed N] [--rounds N]
 *
 * A round plays each kind of tier once. Each play prints its seed, and what it has done.
 */

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/key.h"
#include "store/below/bring.h"
#include "store/file_tier.h"
#include "store/remote_tier.h"
#include "tests/lib/amount.h"
#include "tests/lib/suite.h"
#include "tests/store/random_tiers.h"

#define BLOCKS 300u /* of the pool */
#define SPACES 3u
#define WHOLE 1u /* number of the bidirectional space */
#define CLIENTS 2u
#define CHAINS 12u
#define SALTS 2u
#define LONGEST TIERS_LONGEST
#define STEPS 2500u
#define ROUNDS 3000u /* after the last event, if the tier is ever quiet */
#define QUIET 40u    /* of these rounds, without a request */

struct party {
        struct space *space; /* NULL: deleted */
        struct attachment *clients[CLIENTS];
};

static struct random chance;
static struct party parties[SPACES];
static int waiting[4096]; /* eventfds of fetches */
static uint32_t n_waiting, n_ended, n_requests, n_compared;
static uint32_t tokens[LONGEST * BT];

static uint32_t below(uint32_t n) {
        return random_below(&chance, n);
}

static bool is_whole(const struct party *p) {
        return p == &parties[WHOLE];
}

/* ---- spaces and clients ---------------------------------------------------------------------- */

/* Not while a file still has blocks of a deleted space of that name. */
static void open_party(struct party *p) {
        char name[] = "s0";

        name[1] = (char)('0' + (p - parties));
        if (store_disk_erasing(store, "d", name))
                return;
        p->space = is_whole(p) ? fixture_whole_space(name) : fixture_space(name, 0);
        for (uint32_t i = 0; i < CLIENTS; i++)
                p->clients[i] = fixture_attach(p->space);
}

/* One whose space is there. */
static struct party *some_party(void) {
        struct party *p = &parties[below(SPACES)];

        if (!p->space)
                open_party(p);
        return p->space ? p : NULL;
}

static struct attachment *some_client(struct party *p) {
        return p->clients[below(CLIENTS)];
}

static void client_dies(void) {
        struct party *p = some_party();
        uint32_t i = below(CLIENTS);

        if (!p)
                return;
        attachment_free(p->clients[i], below(2));
        p->clients[i] = fixture_attach(p->space);
}

static void delete_space(void) {
        struct party *p = some_party();

        if (!p || below(2))
                return;
        tiers_bury(p->space);
        ck_assert_int_eq(space_delete(p->space, true), 0);
        for (uint32_t i = 0; i < CLIENTS; i++)
                attachment_free(p->clients[i], false);
        p->space = NULL;
}

/* ---- chains ---------------------------------------------------------------------------------- */

/* Some chain, or its first blocks. Prefixes have few lengths, so that they are met again. */
static uint32_t make_tokens(const struct party *p) {
        uint32_t chain = below(CHAINS);

        for (uint32_t i = 0; i < LONGEST * BT; i++)
                tokens[i] = tiers_token(is_whole(p), chain, i);
        return is_whole(p) ? (1 + below(LONGEST / 10)) * 10 * BT - chain % BT :
                             (1 + below(LONGEST)) * BT;
}

static bool allocate(struct attachment *a, kvd_ref *refs, uint32_t n) {
        uint32_t made = 0;

        while (made < n) {
                int r = space_allocate(a, n - made, refs + made);

                if (r <= 0) {
                        space_release(a, refs, made);
                        return false;
                }
                made += (uint32_t)r;
        }
        return true;
}

static void fill(struct space *space, const struct seal_request *q) {
        for (uint32_t i = 0; i < q->n_blocks; i++) {
                uint32_t n = MIN(BT, q->n_tokens - i * BT);
                uint8_t bytes[BLOCK_BYTES];

                oracle_fill(bytes, sizeof bytes, tiers_content(space, q->root, tokens + i * BT, n));
                fixture_write(space, q->blocks[i], bytes);
        }
}

static struct kvd_key prefix_key(const struct party *p, uint32_t n_tokens) {
        return is_whole(p) ? kvd_key_prefix(space_index(p->space), tokens, n_tokens) :
                             (struct kvd_key){0};
}

static void seal_tokens(struct party *p, uint32_t n_tokens, uint64_t salt) {
        struct attachment *a = some_client(p);
        kvd_ref refs[LONGEST];
        struct seal_request q = {.n_blocks = DIV_UP(n_tokens, BT),
                                 .blocks = refs,
                                 .n_tokens = n_tokens,
                                 .tokens = tokens,
                                 .root = is_whole(p) ? n_tokens : salt,
                                 .prefix_key = prefix_key(p, n_tokens)};

        if (!allocate(a, refs, q.n_blocks))
                return;
        fill(p->space, &q);
        if (space_seal(a, &q, refs) < 0)
                space_release(a, refs, q.n_blocks);
}

static void seal(void) {
        struct party *p = some_party();

        if (p)
                seal_tokens(p, make_tokens(p), below(SALTS));
}

/* ---- fetches --------------------------------------------------------------------------------- */

static void ask(struct attachment *a, const struct fetch_request *q) {
        int fd;
        int64_t r = space_fetch(a, q, &fd);

        ck_assert_msg(r >= 0 || r == -EBUSY, "%lld: %s", (long long)r, store_why(store));
        if (fd < 0)
                return;
        ck_assert_uint_lt(n_waiting, ARRAY_SIZE(waiting));
        waiting[n_waiting++] = dup(fd);
}

/* Names some of the chain's resident blocks, instead of sending their tokens. */
static void name_before(const struct space *space, struct fetch_request *q) {
        struct fetch_request part = *q;
        struct chain_at at;

        part.n_tokens = below(q->n_tokens / BT) * BT;
        at = bring_walk(space, &part);
        q->behind = at.leaf;
        q->tokens += at.depth * BT;
        q->n_tokens -= at.depth * BT;
}

/* The tokens of a prefix, in two requests. */
static void ask_in_parts(struct attachment *a, const struct fetch_request *q) {
        uint32_t half = q->n_tokens / 2;
        struct fetch_request first = *q, second = *q;

        first.n_tokens = half;
        first.more = true;
        second.before = half;
        second.tokens += half;
        second.n_tokens -= half;
        ask(a, &first);
        ask(a, &second);
}

static void fetch_tokens_of(struct party *p, uint32_t n_tokens, uint64_t salt) {
        struct attachment *a = some_client(p);
        struct fetch_request q = {.tokens = tokens,
                                  .n_tokens = n_tokens,
                                  .salt = is_whole(p) ? 0 : salt};

        if (!is_whole(p) && below(2))
                name_before(p->space, &q);
        if (is_whole(p) && below(4) == 0)
                ask_in_parts(a, &q);
        else
                ask(a, &q);
}

static void fetch(void) {
        struct party *p = some_party();

        if (p)
                fetch_tokens_of(p, make_tokens(p), below(SALTS));
}

static void see_ends(void) {
        for (uint32_t i = 0; i < n_waiting;) {
                struct pollfd p = {.fd = waiting[i], .events = POLLIN};

                if (poll(&p, 1, 0) != 1) {
                        i++;
                        continue;
                }
                close(waiting[i]);
                waiting[i] = waiting[--n_waiting];
                n_ended++;
        }
}

/* ---- events ---------------------------------------------------------------------------------- */

static void evict(void) {
        struct party *p = some_party();
        bool more;

        if (p)
                space_evict(p->space, 1 + below(150), KVD_ROOT, &more);
}

static void demote(void) {
        struct party *p = some_party();

        if (p && tiers_are_files())
                space_demote(p->space);
}

static void trouble(void) {
        if (!tiers_trouble())
                return;
        see_ends();
        ck_assert_msg(n_waiting == 0, "%u fetches wait for a tier that is gone", n_waiting);
}

static void request(void) {
        bool later;

        n_requests += tiers_ask(&later);
}

static void worker_works(void) {
        if (below(2))
                work();
        else if (worker_take())
                (below(8) ? worker_do() : below(2) ? worker_die() : worker_fail(EIO));
}

static const struct event {
        uint32_t often;
        void (*happens)(void);
} events[] = {{12, seal},         {18, fetch},       {6, evict},  {2, client_dies},
              {1, delete_space},  {1, trouble},      {1, demote}, {26, request},
              {19, tiers_answer}, {8, worker_works}, {6, idle}};

static void step(void) {
        const struct event *e = events;
        uint32_t at = 0, n;

        for (uint32_t i = 0; i < ARRAY_SIZE(events); i++)
                at += events[i].often;
        for (n = below(at); n >= e->often; e++)
                n -= e->often;
        e->happens();
        tiers_pass_time(100000000);
}

/* ---- checks ---------------------------------------------------------------------------------- */

/* Is it behind the block that its tokens say? */
static bool has_place(const struct party *p, uint32_t id) {
        uint32_t before = tiers_token_before(is_whole(p), block_desc(p->space, id)->tokens[0]);
        uint32_t parent = block_of(p->space, id)->parent;

        return (parent == NONE ? 0 : block_desc(p->space, parent)->tokens[BT - 1]) == before;
}

static bool has_bytes(const struct party *p, uint32_t id) {
        const struct kvd_desc *desc = block_desc(p->space, id);
        uint64_t content = tiers_content(p->space, desc->root, desc->tokens, desc->n_tokens);
        float floats[BLOCK_BYTES / 4];

        block_floats(p->space, block_ref(p->space, id), floats);
        return !oracle_wrong((const uint8_t *)floats, sizeof floats, content);
}

/* Private blocks are of no chain: a worker copies to them. */
static void check_contents(const struct party *p) {
        for (uint32_t id = 0; p->space && id < space_ids(p->space); id++) {
                const struct block *b = block_of(p->space, id);

                if (b->state != KVD_SEALED || b->private)
                        continue;
                if (!has_place(p, id) || !has_bytes(p, id))
                        ck_abort_msg("space %s: block %u is wrong", space_name(p->space), id);
                n_compared++;
        }
}

static void check_all(void) {
        for (uint32_t i = 0; i < SPACES; i++) {
                if (parties[i].space)
                        check_clean(parties[i].space);
                check_contents(&parties[i]);
        }
        tiers_check();
}

/* ---- the end --------------------------------------------------------------------------------- */

/* Serves the tier until it is quiet. */
static void settle(void) {
        uint32_t quiet = 0;

        for (uint32_t i = 0; quiet < QUIET; i++) {
                bool busy, later;

                ck_assert_msg(i < ROUNDS, "requests do not end");
                idle();
                busy = work();
                busy |= tiers_ask(&later);
                tiers_answer();
                quiet = busy || later ? 0 : quiet + 1;
                tiers_pass_time(1000000000);
        }
}

static void evict_all(struct party *p) {
        bool more = true;

        while (more)
                space_evict(p->space, BLOCKS, KVD_ROOT, &more);
}

static void new_chain_comes_back(struct party *p) {
        uint32_t n = 5 * BT;

        for (uint32_t i = 0; i < n; i++)
                tokens[i] = tiers_token(is_whole(p), CHAINS * 3 + (uint32_t)(p - parties), i);
        evict_all(p);
        seal_tokens(p, n, 0);
        settle();
        ck_assert_uint_eq(usage_of(p->space).sealed, n / BT);
        evict_all(p);
        ck_assert_uint_eq(usage_of(p->space).sealed, 0);
        fetch_tokens_of(p, n, 0);
        settle();
        ck_assert_uint_eq(usage_of(p->space).sealed, n / BT);
}

/* A tier that is too small for all blocks must not write them for ever. */
static void fill_pool(void) {
        for (uint32_t i = 0; i < 12; i++)
                seal();
}

static void expect_end(void) {
        settle();
        check_all();
        see_ends();
        ck_assert_msg(n_waiting == 0, "%u fetches have not ended", n_waiting);
        ck_assert_uint_eq(store->below->queue, 0);
}

static void end_play(void) {
        tiers_calm();
        fill_pool();
        expect_end();
        for (uint32_t i = 0; i < SPACES; i++) {
                if (!parties[i].space)
                        open_party(&parties[i]);
                if (!tiers_are_off())
                        new_chain_comes_back(&parties[i]);
        }
        expect_end();
        fprintf(stderr, "%u requests, %u fetches, %u blocks compared\n", n_requests, n_ended,
                n_compared);
        fixture_close();
}

/* ---- plays ----------------------------------------------------------------------------------- */

static struct { uint32_t seed, rounds; } chosen = {.seed = 1};

static void begin_play(enum tiers_kind kind, uint32_t seed) {
        static const char *const names[N_TIERS] = {"file", "servers", "file below a GPU",
                                                   "host memory", "servers below a GPU"};

        fprintf(stderr, "%s, seed %u: ", names[kind], seed);
        chance = (struct random){seed};
        n_waiting = n_ended = n_requests = n_compared = 0;
        tiers_open(kind, BLOCKS, &chance);
        for (uint32_t i = 0; i < SPACES; i++)
                open_party(&parties[i]);
}

static void play(void) {
        for (uint32_t i = 0; i < STEPS; i++) {
                step();
                see_ends();
                tiers_check();
                if (i % 100 == 0)
                        check_all();
        }
}

START_TEST(random_events_harm_nothing) {
        begin_play((enum tiers_kind)(_i % N_TIERS), chosen.seed + (uint32_t)_i / N_TIERS);
        play();
        end_play();
}
END_TEST

/* Its first part evicted other blocks, which then did the same to it. */
START_TEST(a_prefix_without_room_is_not_written_for_ever) {
        begin_play(TIERS_FILE, 1049);
        play();
        end_play();
}
END_TEST

static void choose(int argc, char **argv) {
        chosen.rounds = AMOUNT(30, 10);
        for (int i = 1; i + 1 < argc; i += 2) {
                if (strcmp(argv[i], "--seed") == 0)
                        chosen.seed = (uint32_t)strtoul(argv[i + 1], NULL, 10);
                if (strcmp(argv[i], "--rounds") == 0)
                        chosen.rounds = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        }
}

SUITE("below-random", choose(argc, argv), LOOPS(chosen.rounds *N_TIERS, random_events_harm_nothing),
      TESTS(a_prefix_without_room_is_not_written_for_ever))
