/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Objects by key beside chains of tokens, in blocks of 1 to 4,096 tokens: random seals, evictions,
 * deaths and restarts. Each object has a twin, a chain whose tokens begin with the words of its
 * key, under the same salt. The bytes of a block follow from all that names it, so that a block
 * that is taken for its twin's is noticed.
 */

#include <errno.h>
#include <string.h>

#include "store/below/bring.h"
#include "tests/lib/oracle.h"
#include "tests/lib/suite.h"
#include "tests/store/adopting.h"

#define LONGEST 20u /* blocks; more than a run has */
#define KINDS 2u
#define SALTS 2u
#define SEEDS 6u

/* What a block is found by: a key or tokens, which both follow from the seed. */
struct name {
        bool keyed;
        uint32_t salt, seed;
};

struct walk {
        struct random dice;
        struct space *space;
        struct attachment *a;
        uint32_t found; /* blocks found and compared */
};

static const struct kvd_shape shapes[] = {
        {.block_tokens = 1},    {.block_tokens = 3},
        {.block_tokens = 4},    {.block_tokens = 8},
        {.block_tokens = 9},    {.block_tokens = 16, .vocab = 1000},
        {.block_tokens = 255},  {.block_tokens = 256, .vocab = 70000},
        {.block_tokens = 257},  {.block_tokens = 1600, .vocab = 200000},
        {.block_tokens = 4096},
};
#define SHAPES (sizeof shapes / sizeof *shapes)

static uint32_t group_of(const struct name *name) {
        return name->keyed ? KVD_GROUP_KEYED : 0;
}

static uint32_t full(const struct space *space, const struct name *name) {
        return kvd_full_tokens(space_geometry(space), group_of(name));
}

static uint32_t length_of(const struct name *name) {
        return name->keyed ? 1 + name->seed % 3 : LONGEST - name->seed % 4;
}

/*
 * The same words for an object and its twin; a vocabulary has all of them. The first word of each
 * block of a chain is its number: the 8-bit keys of equal blocks soon repeat, in buckets of 16.
 */
static const uint32_t *words_of(const struct space *space, const struct name *name) {
        static uint32_t words[LONGEST * KVD_MAX_BLOCK_TOKENS];
        uint32_t n = full(space, name);

        for (uint32_t i = 0; i < LONGEST * n; i++)
                words[i] = name->seed * 100 + (name->keyed ? i % n : i) % KVD_KEY_MOST +
                           (name->keyed || i % n ? 0 : i / n);
        return words;
}

static void bytes_of(const struct name *name, uint32_t block, uint8_t ret[BLOCK_BYTES]) {
        const uint32_t all[] = {name->keyed, name->salt, name->seed, block};

        oracle_fill(ret, BLOCK_BYTES, oracle_seed(1, all, ARRAY_SIZE(all)));
}

static struct name draw(struct walk *w) {
        bool keys = kvd_has_keys(space_geometry(w->space), KVD_kind_causal);

        return (struct name){.keyed = random_below(&w->dice, KINDS) && keys,
                             .salt = random_below(&w->dice, SALTS),
                             .seed = random_below(&w->dice, SEEDS)};
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* Seals the first n blocks. False: there was no room. */
static bool seal(struct walk *w, const struct name *name, uint32_t n) {
        kvd_ref blocks[LONGEST], now[LONGEST];
        const struct seal_request q = {.group = group_of(name),
                                       .root = name->salt,
                                       .n_blocks = n,
                                       .blocks = blocks,
                                       .n_tokens = n * full(w->space, name),
                                       .tokens = words_of(w->space, name)};
        uint8_t bytes[BLOCK_BYTES];
        uint32_t got = 0;
        int r = 1;

        for (; got < n && r > 0; got += r > 0)
                r = space_allocate(w->a, 1, &blocks[got]);
        for (uint32_t i = 0; i < got; i++) {
                bytes_of(name, i, bytes);
                fixture_write(w->space, blocks[i], bytes);
        }
        if (got == n)
                ck_assert_msg(space_seal(w->a, &q, now) == 0, "%s", store_why(store));
        space_release(w->a, blocks, got);
        return got == n;
}

/* Compares the bytes of all blocks that are there. Returns how many. */
static uint32_t find(struct walk *w, const struct name *name) {
        const struct fetch_request q = {.group = group_of(name),
                                        .salt = name->salt,
                                        .tokens = words_of(w->space, name),
                                        .n_tokens = length_of(name) * full(w->space, name)};
        struct chain_at at = bring_walk(w->space, &q);
        uint32_t id = kvd_ref_id(at.leaf);
        uint8_t want[BLOCK_BYTES];
        float have[BLOCK_BYTES / 4];

        for (uint32_t i = at.depth; i-- > 0; id = block_of(w->space, id)->parent) {
                bytes_of(name, i, want);
                block_floats(w->space, block_ref(w->space, id), have);
                ck_assert_msg(memcmp(have, want, sizeof want) == 0,
                              "block %u of %s %u, salt %u, has the bytes of another", i,
                              name->keyed ? "object" : "chain", name->seed, name->salt);
        }
        w->found += at.depth;
        return at.depth;
}

/* Both buckets of a block may be full, often with 8-bit keys. It is then not found again. */
static bool all_are_indexed(const struct walk *w) {
        return counter(w->space, KVD_SPACE_UNINDEXED) == 0;
}

/* Its producer may die between two blocks. */
static void seal_some(struct walk *w) {
        struct name name = draw(w);
        uint32_t n = length_of(&name);
        bool dies = random_below(&w->dice, 4) == 0;

        if (dies)
                n = random_below(&w->dice, n + 1);
        if (n && seal(w, &name, n) && all_are_indexed(w))
                ck_assert_uint_ge(find(w, &name), n);
        if (!dies)
                return;
        attachment_orphan(w->a);
        attachment_free(w->a, true);
        w->a = attach_kept(w->space, getpid());
}

static void evict_some(struct walk *w) {
        bool again;

        space_evict(w->space, 1 + random_below(&w->dice, 20), KVD_ROOT, &again);
}

static void go_on(struct walk *w) {
        w->space = space_again("s");
        ck_assert_msg(w->space != NULL, "%s", last_said);
        w->a = attach_kept(w->space, getpid());
}

static void step(struct walk *w) {
        struct name name = draw(w);

        switch (random_below(&w->dice, 16)) {
        case 0: evict_some(w); break;
        case 1: store_idle(store); break;
        default: seal_some(w); break;
        }
        find(w, &name);
        check_clean(w->space);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void open_space(struct walk *w, const struct kvd_shape *shape) {
        struct space_spec spec = {.name = "s", .geometry = *shape};
        const char *why;
        bool created;

        spec.geometry.block_bytes = BLOCK_BYTES;
        strcpy(spec.geometry.layout, "test.v1");
        ck_assert_msg(kvd_shape_normalise(&spec.geometry, &why) == 0, "%s", why);
        ck_assert_msg(space_open(domain, &spec, true, &w->space, &created) == 0, "%s",
                      store_why(store));
        w->a = attach_kept(w->space, getpid());
}

START_TEST(what_is_found_has_that_name) {
        struct walk w = {.dice = {(uint64_t)_i + 1}};

        open_space(&w, &shapes[_i]);
        for (uint32_t i = 1; i <= 400; i++) {
                step(&w);
                if (i % 50 == 0) {
                        restart(random_below(&w.dice, 2) != 0);
                        go_on(&w);
                }
        }
        ck_assert_uint_gt(w.found, 1000);
}
END_TEST

/* The words of a key need not be in the vocabulary; tokens must, also beside keys. */
START_TEST(only_keys_are_free_of_the_vocabulary) {
        const struct kvd_shape shape = {.block_tokens = 16, .vocab = 10};
        const struct name object = {.keyed = true, .seed = 4}, chain = {.seed = 4};
        struct walk w = {.dice = {1}};
        kvd_ref block;
        struct seal_request q = {.n_blocks = 1, .blocks = &block, .n_tokens = 16};

        open_space(&w, &shape);
        ck_assert(seal(&w, &object, length_of(&object)));
        restart(_i);
        go_on(&w);
        ck_assert_uint_eq(find(&w, &object), length_of(&object));
        ck_assert_uint_eq(find(&w, &chain), 0);
        q.tokens = words_of(w.space, &chain);
        ck_assert_int_eq(space_allocate(w.a, 1, &block), 1);
        ck_assert_int_eq(space_seal(w.a, &q, &(kvd_ref){0}), -EINVAL);
        check_clean(w.space);
}
END_TEST

START_TEST(an_object_needs_whole_keys_and_a_space_for_keys) {
        struct walk w = {.dice = {1}};
        uint32_t words[16] = {0};
        kvd_ref block, now;
        struct seal_request q = {.group = KVD_GROUP_KEYED,
                                 .n_blocks = 1,
                                 .blocks = &block,
                                 .n_tokens = 8,
                                 .tokens = words};

        open_space(&w, &(struct kvd_shape){.block_tokens = _i ? 16 : 3});
        ck_assert_int_eq(space_allocate(w.a, 1, &block), 1);
        q.n_tokens = _i ? 16 : 3;
        ck_assert_int_eq(space_seal(w.a, &q, &now), -EINVAL);
        q.group = KVD_GROUP_KEYED - 1;
        ck_assert_int_eq(space_seal(w.a, &q, &now), -EINVAL);
        q.group = KVD_GROUP_KEYED;
        q.n_tokens = 8;
        ck_assert_int_eq(space_seal(w.a, &q, &now), _i ? 0 : -EINVAL);
        check_clean(w.space);
}
END_TEST

/*
 * Descriptors of 16 KiB are taken over a few at a time, which is counted, not timed. The pool is
 * larger than one piece of small blocks.
 */
START_TEST(large_blocks_are_taken_over_in_smaller_pieces) {
        const struct name name = {.seed = 4};
        struct walk w = {.dice = {1}};
        uint32_t pieces = 1;

        tear_down();
        pool = 4096;
        all_at_once = false;
        open_daemon();
        make_memory();
        open_space(&w, &(struct kvd_shape){.block_tokens = _i ? 4096 : 16});
        for (uint32_t i = 0; i < pool; i++)
                ck_assert_int_eq(space_allocate(w.a, 1, &(kvd_ref){0}), 1);
        attachment_orphan(w.a);
        attachment_free(w.a, true);
        w.a = attach_kept(w.space, getpid());
        ck_assert(seal(&w, &name, length_of(&name)));
        restart(0);
        w.space = space_again("s");
        while (!space_take_over(w.space))
                pieces++;
        ck_assert_uint_eq(find(&w, &name), length_of(&name));
        if (_i)
                ck_assert_uint_ge(pieces, 2 * pool / 256);
        else
                ck_assert_uint_le(pieces, 16);
}
END_TEST

SUITE("objects", FIXTURE(set_up, tear_down), LOOPS(SHAPES, what_is_found_has_that_name),
      LOOPS(2, only_keys_are_free_of_the_vocabulary,
            an_object_needs_whole_keys_and_a_space_for_keys,
            large_blocks_are_taken_over_in_smaller_pieces))
