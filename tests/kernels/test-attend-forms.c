/* SPDX-License-Identifier: Apache-2.0 */

/*
 * All forms of attention other than plain causal: bidirectional, over chosen positions, over tables
 * with holes, with rotated queries, with mass. Random cases are checked against an oracle in double
 * precision. Every variant gives the same bits, and a plain call over a cache that stores only the
 * visible positions gives the same bits, too.
 */

#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/attend.h"
#include "tests/kernels/buffers.h"
#include "tests/lib/suite.h"

enum { USUAL_KEYS = 200, MOST_KEYS = 1400 };

struct form {
        uint32_t n_keys, first, n, group, dim, block_tokens;
        bool both_ways, sparse, holes, rotated;
        enum kvd_number type;
};

struct scene { /* the memory of one call */
        struct form form;
        struct kvd_attention call;
        float *k, *v, *q; /* by position and token, with the values that the blocks hold */
        int32_t *deltas;
        float *frequencies;
        bool stored[MOST_KEYS]; /* resident and chosen */
        uint32_t n_blocks;
};

static size_t element(enum kvd_number type) {
        return type == KVD_NUMBER_F32 ? 4 : 2;
}

/* Stores a row in the type of the block, and reads it back: the oracle uses the stored values. */
static void put(uint8_t *to, float *row, uint32_t dim, enum kvd_number type) {
        const struct kvd_ops *ops = kvd_ops_pick("scalar");

        if (type == KVD_NUMBER_F32) {
                memcpy(to, row, dim * sizeof *row);
                return;
        }
        ops->narrow((uint16_t *)to, row, dim, type);
        ops->widen(row, (const uint16_t *)to, dim, type);
}

static void make_blocks(struct scene *s) {
        const struct form *f = &s->form;
        size_t plane = (size_t)f->block_tokens * s->call.stride * element(f->type);
        uint8_t **blocks = buffer(s->n_blocks * sizeof *blocks);

        for (uint32_t b = 0; b < s->n_blocks; b++) {
                blocks[b] = buffer(64 + 2 * plane);
                memset(blocks[b], 0xff, 64 + 2 * plane);
        }
        for (uint32_t i = 0; i < f->n_keys; i++) {
                uint8_t *slot = blocks[i / f->block_tokens] + 64 +
                                i % f->block_tokens * s->call.stride * element(f->type);

                put(slot, s->k + (size_t)i * f->dim, f->dim, f->type);
                put(slot + plane, s->v + (size_t)i * f->dim, f->dim, f->type);
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

        s->deltas = buffer(s->n_blocks * sizeof *s->deltas);
        s->frequencies = buffer(half * sizeof *s->frequencies);
        for (uint32_t i = 0; i < half; i++)
                s->frequencies[i] = 1.0f / powf(10000.0f, (float)(2 * i) / (float)s->form.dim);
        for (uint32_t b = 0; b < s->n_blocks && s->form.rotated; b++)
                s->deltas[b] = random_u32() % 2 ? 0 : (int32_t)(random_u32() % 5) * 16 - 24;
        kvd_rotations(s->deltas, s->n_blocks, s->frequencies, half, rotation, rotations,
                      s->n_blocks);
        if (s->form.rotated) {
                s->call.rotation = rotation;
                s->call.rotations = rotations;
        }
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
                .stride = f->dim + random_u32() % 3 * 4,
                .type = f->type,
                .block_tokens = f->block_tokens,
                .dim = f->dim,
                .first = f->both_ways ? 0 : f->first,
                .n_keys = f->both_ways ? f->n_keys : 0,
                .n = f->n,
                .group = f->group,
                .scale = 1.0f / sqrtf((float)f->dim),
                .q = s.q,
                .ldq = width,
                .ldo = width,
        };
        make_blocks(&s);
        choose(&s);
        make_turns(&s);
        return s;
}

/* ---- the oracle ---- */

static bool sees(const struct scene *s, uint32_t token, uint32_t i) {
        return s->stored[i] && (s->form.both_ways || i <= s->form.first + token);
}

/* q . k, with the key rotated to its block's current position. */
static double score(const struct scene *s, const float *q, uint32_t i) {
        const float *k = s->k + (size_t)i * s->form.dim;
        uint32_t half = s->form.dim / 2;
        double sum = 0.0;

        if (!s->form.rotated || s->deltas[i / s->form.block_tokens] == 0) {
                for (uint32_t d = 0; d < s->form.dim; d++)
                        sum += (double)q[d] * (double)k[d];
                return sum * (double)s->call.scale;
        }
        for (uint32_t d = 0; d < half; d++) {
                double angle = (double)s->deltas[i / s->form.block_tokens] *
                               (double)s->frequencies[d];
                double low = (double)k[d], high = (double)k[d + half];

                sum += (double)q[d] * (low * cos(angle) - high * sin(angle)) +
                       (double)q[d + half] * (high * cos(angle) + low * sin(angle));
        }
        return sum * (double)s->call.scale;
}

/* Computes one query head's result, and its contribution to the masses. */
static void oracle(const struct scene *s, uint32_t token, uint32_t g, double *out,
                   double *block_mass, double *token_mass) {
        const float *q = s->q + (size_t)(token * s->form.group + g) * s->form.dim;
        double weight[MOST_KEYS] = {0}, most = -INFINITY, total = 0.0;

        for (uint32_t i = 0; i < s->form.n_keys; i++)
                most = sees(s, token, i) ? fmax(most, score(s, q, i)) : most;
        for (uint32_t i = 0; i < s->form.n_keys; i++) {
                weight[i] = sees(s, token, i) ? exp(score(s, q, i) - most) : 0.0;
                total += weight[i];
        }
        memset(out, 0, s->form.dim * sizeof *out);
        for (uint32_t i = 0; i < s->form.n_keys && total > 0.0; i++) {
                token_mass[i] += weight[i] / total;
                block_mass[i / s->form.block_tokens] += weight[i] / total;
                for (uint32_t d = 0; d < s->form.dim; d++)
                        out[d] += weight[i] / total * (double)s->v[(size_t)i * s->form.dim + d];
        }
}

/* ---- running ---- */

struct result {
        float *out, *block_mass, *token_mass;
        size_t n_out;
};

static struct result attend(const struct scene *s, const struct kvd_ops *ops, uint32_t chunk) {
        struct kvd_attention a = s->call;
        struct result r = {.n_out = (size_t)a.n * a.ldo};

        a.ops = ops;
        r.out = buffer(r.n_out * sizeof *r.out);
        a.block_mass = r.block_mass = buffer(s->n_blocks * sizeof *r.block_mass);
        a.token_mass = r.token_mass = buffer(s->form.n_keys * sizeof *r.token_mass);
        for (uint32_t t = 0; t < s->form.n; t += a.n) {
                a.first = s->call.first + t;
                a.n = MIN(chunk, s->form.n - t);
                a.q = s->q + t * a.ldq;
                a.out = r.out + t * a.ldo;
                a.scratch = buffer(kvd_attend_scratch(&a) * sizeof *a.scratch);
                memset(a.scratch, 0xff, kvd_attend_scratch(&a) * sizeof *a.scratch);
                kvd_attend(&a);
        }
        return r;
}

static void assert_near(const float *got, const double *expected, size_t n, double tolerance,
                        const char *what) {
        for (size_t i = 0; i < n; i++)
                if (!(fabs((double)got[i] - expected[i]) <= tolerance))
                        ck_abort_msg("%s %zu of %zu is %.9g, expected %.9g", what, i, n,
                                     (double)got[i], expected[i]);
}

static void check_form(const struct form *f) {
        struct scene s = make_scene(f);
        struct result r = attend(&s, kvd_ops_pick("scalar"), f->n);
        double block_mass[MOST_KEYS] = {0}, token_mass[MOST_KEYS] = {0}, out[256];
        double tolerance = f->rotated ? 1e-5 : 3e-6;

        for (uint32_t row = 0; row < f->n * f->group; row++) {
                oracle(&s, row / f->group, row % f->group, out, block_mass, token_mass);
                assert_near(r.out + (size_t)row * f->dim, out, f->dim, tolerance, "result");
        }
        assert_near(r.block_mass, block_mass, s.n_blocks, tolerance * f->n * f->group,
                    "mass of block");
        assert_near(r.token_mass, token_mass, f->n_keys, tolerance * f->n * f->group,
                    "mass of token");
        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++)
                for (uint32_t chunk = 1; (*v)->works() && chunk <= f->n;
                     chunk = chunk == 1 ? 3 : chunk * 4) {
                        struct result other = attend(&s, *v, chunk);

                        assert_same_bits(r.out, other.out, r.n_out, (*v)->name);
                        assert_same_bits(r.block_mass, other.block_mass, s.n_blocks, (*v)->name);
                        assert_same_bits(r.token_mass, other.token_mass, f->n_keys, (*v)->name);
                }
        buffers_free();
}

static struct form random_form(uint32_t options) {
        static const uint32_t dims[] = {2, 16, 18, 32, 64, 80, 128}, blocks[] = {1, 5, 16, 24, 64};
        struct form f = {
                .n = 1 + random_u32() % 20,
                .group = 1 + random_u32() % 5,
                .dim = dims[random_u32() % ARRAY_SIZE(dims)],
                .block_tokens = blocks[random_u32() % ARRAY_SIZE(blocks)],
                .both_ways = options & 1,
                .sparse = options & 2,
                .holes = options & 4,
                .rotated = options & 8,
                .type = random_u32() % 3 + KVD_NUMBER_F32,
        };

        f.first = random_u32() % (USUAL_KEYS - f.n);
        f.n_keys = f.first + f.n;
        return f;
}

START_TEST(every_form_is_right_and_the_same_in_every_variant) {
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

                f.dim = f.rotated ? ALIGN_UP(dims[i], 2) : dims[i];
                f.group = 1 + (uint32_t)(_i + i) % 9;
                f.n = 2;
                f.first = 900 + random_u32() % 400;
                f.n_keys = f.first + f.n;
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

/* ---- slots that are not seen, as if they did not exist ---- */

/* Makes a scene that holds only what the last token of s sees, one block after the other. */
static struct scene compacted(const struct scene *s, uint32_t *n) {
        struct form f = s->form;
        struct scene c;

        f.sparse = f.holes = f.rotated = f.both_ways = false;
        c = make_scene(&f);
        *n = 0;
        for (uint32_t i = 0; i < f.n_keys; i++) {
                if (!s->stored[i])
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
                c.call.first = n - 1; /* everything stored is visible to the token */
                r = attend(&s, kvd_ops_pick(NULL), 1);
                plain = attend(&c, kvd_ops_pick(NULL), 1);
                assert_same_bits(plain.out, r.out, r.n_out, "compacted");
                buffers_free();
        }
}
END_TEST

START_TEST(nothing_to_see_is_zero) {
        struct form f = {.n_keys = 40,
                         .first = 32,
                         .n = 8,
                         .group = 2,
                         .dim = 32,
                         .block_tokens = 16,
                         .type = KVD_NUMBER_F32};
        struct scene s = make_scene(&f);
        const uint8_t *none[3] = {NULL, NULL, NULL};
        uint32_t late = 39;
        struct result r;

        s.call.blocks = none;
        r = attend(&s, kvd_ops_pick(NULL), 8);
        for (size_t i = 0; i < r.n_out; i++)
                ck_assert(r.out[i] == 0.0f);
        s = make_scene(&f);
        s.call.chosen = &late; /* only the last token sees this position */
        s.call.n_chosen = 1;
        r = attend(&s, kvd_ops_pick(NULL), 8);
        for (size_t i = 0; i < r.n_out; i++)
                ck_assert(i < 7 * s.call.ldo ? r.out[i] == 0.0f :
                                               r.out[i] == s.v[39 * 32 + i % 32]);
        ck_assert(r.token_mass[39] == 2.0f && r.block_mass[2] == 2.0f && r.block_mass[0] == 0.0f);
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

SUITE("kernels: forms of attention",
      LOOPS(16, every_form_is_right_and_the_same_in_every_variant,
            a_token_alone_has_the_bits_of_one_among_others),
      TESTS(what_is_left_out_leaves_no_trace, nothing_to_see_is_zero, no_turn_changes_no_bits,
            turns_are_numbered_once))
