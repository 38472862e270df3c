/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attention over blocks, in all forms: causal, bidirectional, over chosen positions, over tables
 * with holes, with rotated queries, with mass. The bits do not depend on the variant, on the number
 * of tokens in a call, on the size of a block, or on what is not seen. The values are checked in
 * tests/kernels/methods/test_attention.py.
 */

#include <math.h>
#include <string.h>

#include "ipc/base/format.h"
#include "ipc/base/util.h"
#include "kernels/attend.h"
#include "tests/kernels/buffers.h"
#include "tests/lib/suite.h"

enum { USUAL_KEYS = 200, MOST_KEYS = 1400 };

struct form {
        uint32_t n_keys, first, n, group, dim, block_tokens;
        bool both_ways, sparse, holes, rotated;
        bool capped, sinks;
        uint32_t window;
        uint32_t span, exact; /* of the newest positions, and the first that is given as floats */
        enum kvd_number type;
};

struct scene { /* the memory of one call */
        struct form form;
        struct kvd_attention call;
        float *k, *v, *q;       /* by position and token */
        bool stored[MOST_KEYS]; /* resident and chosen */
        uint32_t n_blocks;
};

/* A K plane and a V plane after 64 bytes of other data. Everything that is not a token is NaN. */
static void make_blocks(struct scene *s) {
        const struct form *f = &s->form;
        size_t plane = (size_t)f->block_tokens * s->call.stride;
        const struct kvd_ops *ops = kvd_ops_pick("scalar");
        uint8_t **blocks = buffer(s->n_blocks * sizeof *blocks);

        for (uint32_t b = 0; b < s->n_blocks; b++) {
                blocks[b] = buffer(64 + 2 * plane);
                memset(blocks[b], 0xff, 64 + 2 * plane);
        }
        for (uint32_t i = 0; i < f->n_keys; i++) {
                uint8_t *slot = blocks[i / f->block_tokens] + 64 +
                                i % f->block_tokens * s->call.stride;

                ops->write_key(slot, s->k + (size_t)i * f->dim, f->dim, f->type);
                ops->write_row(slot + plane, s->v + (size_t)i * f->dim, f->dim, f->type);
        }
        for (uint32_t b = 0; b < s->n_blocks && f->holes; b++)
                if (random_u32() % 3 == 0)
                        blocks[b] = NULL;
        s->call.blocks = (const uint8_t *const *)blocks;
        s->call.v_offset = 64 + plane;
}

static void choose(struct scene *s) {
        uint32_t *chosen = buffer(s->form.n_keys * sizeof *chosen), density = 1 + random_u32() % 7;

        for (uint32_t i = 0; i < s->form.n_keys; i++) {
                s->stored[i] = s->call.blocks[i / s->form.block_tokens];
                if (s->form.sparse && random_u32() % 8 >= density)
                        s->stored[i] = false;
                else if (s->form.sparse) /* a hole may be chosen; it is masked anyway */
                        chosen[s->call.n_chosen++] = i;
        }
        if (s->form.sparse)
                s->call.chosen = chosen;
}

static void make_turns(struct scene *s) {
        uint32_t half = s->form.dim / 2, *rotation = buffer(s->n_blocks * sizeof *rotation);
        float *rotations = buffer((size_t)s->n_blocks * s->form.dim * sizeof *rotations);
        int32_t *deltas = buffer(s->n_blocks * sizeof *deltas);

        for (uint32_t b = 0; b < s->n_blocks; b++)
                deltas[b] = random_u32() % 2 ? 0 : (int32_t)(random_u32() % 5) * 16 - 24;
        kvd_rotations(deltas, s->n_blocks, random_floats(half), half, rotation, rotations,
                      s->n_blocks);
        s->call.rotation = rotation;
        s->call.rotations = rotations;
}

static void give_exact(struct scene *s) {
        const struct form *f = &s->form;

        s->call.exact_k = s->k + (size_t)f->exact * f->dim;
        s->call.exact_v = s->v + (size_t)f->exact * f->dim;
        s->call.exact_ld = f->dim;
        s->call.exact_first = f->exact;
        s->call.exact_span = f->span;
}

static struct scene make_scene(const struct form *f) {
        size_t width = (size_t)f->group * f->dim;
        struct scene s = {.form = *f, .n_blocks = DIV_UP(f->n_keys, f->block_tokens)};

        s.k = random_floats((size_t)f->n_keys * f->dim);
        s.v = random_floats((size_t)f->n_keys * f->dim);
        s.q = random_floats(f->n * width);
        for (size_t i = 0; i < f->n * width; i++)
                s.q[i] *= 4.0f;
        s.call = (struct kvd_attention){
                .k_offset = 64,
                .stride = kvd_row_bytes(f->type, f->dim) + random_u32() % 3 * 8,
                .type = f->type,
                .block_tokens = f->block_tokens,
                .dim = f->dim,
                .first = f->both_ways ? 0 : f->first,
                .n_keys = f->both_ways ? f->n_keys : 0,
                .n = f->n,
                .group = f->group,
                .scale = 1.0f / sqrtf((float)f->dim),
                .window = f->window,
                .cap = f->capped ? 3.0f : 0.0f,
                .sinks = f->sinks ? random_floats(f->group) : NULL,
                .q = s.q,
                .ldq = width,
                .ldo = width,
        };
        if (f->span)
                give_exact(&s);
        make_blocks(&s);
        choose(&s);
        if (f->rotated)
                make_turns(&s);
        return s;
}

/* ---- running ---- */

struct result {
        float *out, *weight, *block_mass, *token_mass;
        size_t n_out;
};

static struct result attend(const struct scene *s, const struct kvd_ops *ops, uint32_t chunk) {
        struct kvd_attention a = s->call;
        struct result r = {.n_out = (size_t)a.n * a.ldo};

        a.ops = ops;
        r.out = buffer(r.n_out * sizeof *r.out);
        r.weight = buffer((size_t)a.n * a.group * sizeof *r.weight);
        a.block_mass = r.block_mass = buffer(s->n_blocks * sizeof *r.block_mass);
        a.token_mass = r.token_mass = buffer(s->form.n_keys * sizeof *r.token_mass);
        for (uint32_t t = 0; t < s->form.n; t += a.n) {
                a.first = s->call.first + t;
                a.n = MIN(chunk, s->form.n - t);
                a.q = s->q + t * a.ldq;
                a.out = r.out + t * a.ldo;
                a.weight = r.weight + (size_t)t * a.group;
                a.scratch = buffer(kvd_attend_scratch(&a) * sizeof *a.scratch);
                memset(a.scratch, 0xff, kvd_attend_scratch(&a) * sizeof *a.scratch);
                kvd_attend(&a);
        }
        return r;
}

/* The positions in blocks of another size. */
static struct scene moved(const struct scene *s, uint32_t block_tokens) {
        struct scene other = *s;

        other.form.block_tokens = other.call.block_tokens = block_tokens;
        other.n_blocks = DIV_UP(s->form.n_keys, block_tokens);
        make_blocks(&other);
        return other;
}

static void check_form(const struct form *f) {
        struct scene s = make_scene(f);
        struct result expected = attend(&s, kvd_ops_pick("scalar"), f->n), got;

        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++)
                for (uint32_t chunk = 1; (*v)->works() && chunk <= f->n;
                     chunk = chunk == 1 ? 3 : chunk * 4) {
                        got = attend(&s, *v, chunk);
                        assert_same_bits(expected.out, got.out, got.n_out, (*v)->name);
                        assert_same_bits(expected.weight, got.weight, (size_t)f->n * f->group,
                                         (*v)->name);
                        assert_same_bits(expected.block_mass, got.block_mass, s.n_blocks,
                                         (*v)->name);
                        assert_same_bits(expected.token_mass, got.token_mass, f->n_keys,
                                         (*v)->name);
                }
        if (!f->holes && !f->rotated) {
                struct scene other = moved(&s, random_u32() % 2 ? 1 + random_u32() % 64 : 16);

                got = attend(&other, kvd_ops_pick(NULL), f->n);
                assert_same_bits(expected.out, got.out, got.n_out, "blocks of another size");
        }
        buffers_free();
}

static const enum kvd_number types[] = {KVD_NUMBER_F32, KVD_NUMBER_F16, KVD_NUMBER_BF16,
                                        KVD_NUMBER_Q8,  KVD_NUMBER_Q4,  KVD_NUMBER_E4M3,
                                        KVD_NUMBER_E5M2};

static bool is_even(const struct form *f) {
        return f->rotated || kvd_is_quantised(f->type);
}

static struct form random_form(uint32_t options) {
        static const uint32_t dims[] = {1, 2, 13, 16, 18, 31, 32, 40, 64, 80, 96, 127, 128, 160},
                              blocks[] = {1, 5, 16, 24, 64};
        struct form f = {
                .n = 1 + random_u32() % 20,
                .group = 1 + random_u32() % 9,
                .dim = dims[random_u32() % ARRAY_SIZE(dims)],
                .block_tokens = blocks[random_u32() % ARRAY_SIZE(blocks)],
                .both_ways = options & 1,
                .sparse = options & 2,
                .holes = options & 4,
                .rotated = options & 8,
                .capped = random_u32() % 4 == 0,
                .sinks = random_u32() % 3 == 0,
                .window = random_u32() % 2 ? 1 + random_u32() % 90 : 0,
                .type = types[random_u32() % ARRAY_SIZE(types)],
        };

        f.dim = is_even(&f) ? ALIGN_UP(f.dim, 2) : f.dim;
        f.first = random_u32() % (USUAL_KEYS - f.n);
        f.n_keys = f.first + f.n;
        if (options & 16 && !f.both_ways) {
                f.span = 1 + random_u32() % 70;
                f.exact = f.first / f.span * f.span + random_u32() % 2 * (random_u32() % 9);
        }
        return f;
}

START_TEST(every_form_is_the_same_in_every_variant) {
        random_seed((uint32_t)_i + 1);
        for (int round = 0; round < 12; round++) {
                struct form f = random_form((uint32_t)_i);

                check_form(&f);
                f.n = 1; /* decode */
                f.n_keys = f.first + 1;
                check_form(&f);
        }
}
END_TEST

/*
 * A single token takes a different code path than many. Tests contexts longer than one step of that
 * path.
 */
START_TEST(a_token_alone_has_the_bits_of_one_among_others) {
        static const uint32_t dims[] = {1, 3, 17, 32, 33, 47, 64, 80, 96, 112, 127, 128, 160};

        random_seed((uint32_t)_i + 100);
        for (size_t i = 0; i < ARRAY_SIZE(dims); i++) {
                struct form f = random_form((uint32_t)_i);

                f.dim = is_even(&f) ? ALIGN_UP(dims[i], 2) : dims[i];
                f.group = 1 + (uint32_t)(_i + i) % 9;
                f.n = 2;
                f.first = 900 + random_u32() % 400;
                f.n_keys = f.first + f.n;
                f.exact = f.span ? f.first / f.span * f.span : 0;
                for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++) {
                        struct scene s = make_scene(&f);
                        struct result many, alone;

                        if (!(*v)->works())
                                continue;
                        many = attend(&s, *v, 2);
                        alone = attend(&s, *v, 1);
                        assert_same_bits(many.out, alone.out, many.n_out, (*v)->name);
                        assert_same_bits(many.block_mass, alone.block_mass, s.n_blocks, (*v)->name);
                        assert_same_bits(many.token_mass, alone.token_mass, f.n_keys, (*v)->name);
                        buffers_free();
                }
        }
}
END_TEST

/* ---- the newest positions as they were ---- */

/* The scene of one token over floats: those that were stored, as they are read, then those that were given. */
static struct scene read_back(const struct scene *s, uint32_t exact) {
        struct form f = s->form;
        struct scene c;

        f.type = KVD_NUMBER_F32;
        f.span = 0;
        f.sinks = false;
        c = make_scene(&f);
        memcpy(c.q, s->q, f.group * f.dim * sizeof *c.q);
        c.call.sinks = s->call.sinks;
        for (uint32_t i = 0; i < f.n_keys; i++) {
                const uint8_t *slot = s->call.blocks[i / f.block_tokens] + s->call.k_offset +
                                      i % f.block_tokens * s->call.stride;
                float *k = c.k + (size_t)i * f.dim, *v = c.v + (size_t)i * f.dim;

                memcpy(k, s->k + (size_t)i * f.dim, f.dim * sizeof *k);
                memcpy(v, s->v + (size_t)i * f.dim, f.dim * sizeof *v);
                if (i >= exact)
                        continue;
                kvd_ops_pick(NULL)->read_key(k, slot, f.dim, s->form.type);
                kvd_ops_pick(NULL)->read_row(v, slot - s->call.k_offset + s->call.v_offset, f.dim,
                                             s->form.type);
        }
        make_blocks(&c);
        return c;
}

/* Fills what is stored of the positions from exact on with NaN, since they are given. */
static void spoil(const struct scene *s, uint32_t exact) {
        for (uint32_t i = exact; i < s->form.n_keys; i++) {
                uint8_t *slot = (uint8_t *)s->call.blocks[i / s->form.block_tokens] +
                                i % s->form.block_tokens * s->call.stride;

                memset(slot + s->call.k_offset, 0xff, kvd_row_bytes(s->form.type, s->form.dim));
                memset(slot + s->call.v_offset, 0xff, kvd_row_bytes(s->form.type, s->form.dim));
        }
}

START_TEST(the_newest_positions_are_seen_as_they_were) {
        random_seed((uint32_t)_i + 500);
        for (int round = 0; round < 40; round++) {
                struct form f = random_form(16);
                struct scene s, c;
                struct result got, expected;
                uint32_t exact;

                f.n = 1;
                f.n_keys = f.first + 1;
                f.exact = MIN(f.exact, f.first);
                exact = MAX(f.exact, f.first / f.span * f.span);
                s = make_scene(&f);
                c = read_back(&s, exact);
                spoil(&s, exact);
                got = attend(&s, kvd_ops_pick(NULL), 1);
                expected = attend(&c, kvd_ops_pick(NULL), 1);
                for (size_t i = 0; i < got.n_out; i++)
                        ck_assert_float_eq_tol(got.out[i], expected.out[i], 4e-6f);
                buffers_free();
        }
}
END_TEST

/* ---- slots that are not seen, as if they did not exist ---- */

/* Makes a scene that holds only what the last token of s sees, one block after the other. */
static struct scene compacted(const struct scene *s, uint32_t *n) {
        uint32_t window = s->call.n_keys ? 0 : s->form.window;
        struct form f = s->form;
        struct scene c;

        f.sparse = f.holes = f.rotated = f.both_ways = false;
        f.window = 0;
        c = make_scene(&f);
        *n = 0;
        for (uint32_t i = 0; i < f.n_keys; i++) {
                if (!s->stored[i] || (window && i + window < f.n_keys))
                        continue;
                memcpy(c.k + (size_t)*n * f.dim, s->k + (size_t)i * f.dim, f.dim * sizeof *c.k);
                memcpy(c.v + (size_t)*n * f.dim, s->v + (size_t)i * f.dim, f.dim * sizeof *c.v);
                ++*n;
        }
        make_blocks(&c);
        return c;
}

START_TEST(what_is_left_out_leaves_no_trace) {
        random_seed(77);
        for (int round = 0; round < 60; round++) {
                struct form f = random_form(2 | (round % 2 ? 4 : 0) | (round % 3 ? 1 : 0));
                struct scene s, c;
                struct result r, plain;
                uint32_t n;

                f.n = 1;
                f.n_keys = f.first + 1;
                s = make_scene(&f);
                c = compacted(&s, &n);
                if (n == 0)
                        continue;
                memcpy(c.q, s.q, f.group * f.dim * sizeof *s.q);
                c.call.sinks = s.call.sinks;
                c.call.first = n - 1; /* everything stored is visible to the token */
                r = attend(&s, kvd_ops_pick(NULL), 1);
                plain = attend(&c, kvd_ops_pick(NULL), 1);
                assert_same_bits(plain.out, r.out, r.n_out, "compacted");
                buffers_free();
        }
}
END_TEST

/* What a call in a window costs does not depend on how long the context before it is. */
START_TEST(what_is_before_a_window_is_not_touched) {
        struct form f = {.n_keys = 180,
                         .first = 175,
                         .n = 5,
                         .group = 2,
                         .dim = 64,
                         .block_tokens = 16,
                         .window = 40,
                         .type = KVD_NUMBER_F32};
        struct scene s = make_scene(&f);
        struct result whole = attend(&s, kvd_ops_pick(NULL), f.n), rest;
        struct kvd_attention far = s.call;
        const uint8_t *blocks[12];

        memcpy(blocks, s.call.blocks, s.n_blocks * sizeof *blocks);
        for (uint32_t b = 0; b < (f.first + 1 - f.window) / f.block_tokens; b++)
                blocks[b] = (const uint8_t *)1; /* a fault, if it is read */
        s.call.blocks = blocks;
        rest = attend(&s, kvd_ops_pick(NULL), f.n);
        assert_same_bits(whole.out, rest.out, whole.n_out, "the window alone");
        far.first = 1000000;
        ck_assert_uint_eq(kvd_attend_scratch(&far), kvd_attend_scratch(&s.call));
        buffers_free();
}
END_TEST

/*
 * A delta of 0 does not change bits: a table with rotations, none of them used, gives the plain
 * result.
 */
START_TEST(no_turn_changes_no_bits) {
        struct form f = {.n_keys = 100,
                         .first = 80,
                         .n = 20,
                         .group = 2,
                         .dim = 64,
                         .block_tokens = 16,
                         .type = KVD_NUMBER_F32};
        struct scene s = make_scene(&f);
        uint32_t rotation[7] = {0};
        struct result plain = attend(&s, kvd_ops_pick(NULL), 20), rotated;

        s.call.rotation = rotation;
        rotated = attend(&s, kvd_ops_pick(NULL), 20);
        assert_same_bits(plain.out, rotated.out, plain.n_out, "no rotation");
        buffers_free();
}
END_TEST

START_TEST(turns_are_numbered_once) {
        static const int32_t deltas[] = {0, 5, -3, 5, 0, -3, 7};
        static const uint32_t expected[] = {0, 1, 2, 1, 0, 2, 3};
        float frequencies[] = {1.0f, 0.25f}, rotations[12];
        uint32_t rotation[7];

        ck_assert_uint_eq(kvd_rotations(deltas, 7, frequencies, 2, rotation, rotations, 3), 3);
        ck_assert_mem_eq(rotation, expected, sizeof rotation);
        ck_assert_float_eq_tol(rotations[4 + 1], cosf(0.75f), 1e-7f);
        ck_assert_float_eq_tol(rotations[4 + 3], sinf(0.75f), 1e-7f);
        ck_assert_uint_eq(kvd_rotations(deltas, 7, frequencies, 2, rotation, rotations, 2),
                          UINT32_MAX);
}
END_TEST

SUITE("kernels: attention",
      LOOPS(32, every_form_is_the_same_in_every_variant,
            a_token_alone_has_the_bits_of_one_among_others),
      LOOPS(4, the_newest_positions_are_seen_as_they_were),
      TESTS(what_is_left_out_leaves_no_trace, what_is_before_a_window_is_not_touched,
            no_turn_changes_no_bits, turns_are_numbered_once))
