/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Every variant against the scalar one. The properties of a count sketch are tested in
 * tests/kernels/methods.
 */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/sketch.h"
#include "tests/kernels/buffers.h"
#include "tests/lib/suite.h"

static const struct kvd_ops *scalar;

struct form {
        uint32_t rows, columns, dim, n, per_block;
        size_t gap; /* floats between cells, elements between vectors */
        uint32_t sign;
        bool centred;
        enum kvd_number type;
};

struct scene {
        struct kvd_sketch_part part;
        struct kvd_sketch_vectors in, out;
        uint32_t *places;
        size_t n_cells; /* number of floats of all cells */
};

static size_t element(enum kvd_number type) {
        return type == KVD_NUMBER_F32 ? 4 : 2;
}

static void fill(uint8_t *block, size_t elements, enum kvd_number type) {
        for (size_t i = 0; i < elements; i++) {
                float f = (float)((double)random_u32() / 1073741824.0 - 2.0);

                if (type == KVD_NUMBER_F32)
                        memcpy(block + 4 * i, &f, 4);
                else
                        scalar->narrow((uint16_t *)block + i, &f, 1, type);
        }
}

/* Makes blocks that end with their last vector. */
static struct kvd_sketch_vectors vectors(const struct form *f, bool filled) {
        uint32_t n_blocks = DIV_UP(f->n, f->per_block);
        uint8_t **blocks = buffer(n_blocks * sizeof *blocks);
        size_t stride = f->dim + f->gap, offset = 3;

        for (uint32_t b = 0; b < n_blocks; b++) {
                uint32_t slots = MIN(f->per_block, f->n - b * f->per_block);
                size_t elements = offset + (slots - 1) * stride + f->dim;

                blocks[b] = buffer(elements * element(f->type));
                if (filled)
                        fill(blocks[b], elements, f->type);
        }
        return (struct kvd_sketch_vectors){blocks, offset * element(f->type), stride, f->per_block,
                                           f->type};
}

static void make_scene(struct scene *s, const struct form *f) {
        struct kvd_sketch_hash hash = {KVD_SKETCH_UNIFORM, f->rows, f->columns, random_u32()};
        size_t stride = f->dim + f->gap;
        uint64_t ordinals[64];

        for (uint32_t i = 0; i < f->n; i++)
                ordinals[i] = random_u32();
        *s = (struct scene){.places = buffer(f->n * f->rows * sizeof *s->places)};
        kvd_sketch_place(&hash, ordinals, f->n, s->places);
        s->n_cells = ((size_t)f->rows * f->columns - 1) * stride + f->dim;
        s->part = (struct kvd_sketch_part){random_floats(s->n_cells),
                                           stride,
                                           f->rows,
                                           f->columns,
                                           f->dim,
                                           f->sign,
                                           f->centred ? random_floats(f->dim) : NULL};
        s->in = vectors(f, true);
        s->out = vectors(f, false);
}

static const uint8_t *at(const struct kvd_sketch_vectors *x, uint32_t i) {
        return x->blocks[i / x->per_block] + x->offset +
               (i % x->per_block) * x->stride * element(x->type);
}

static void same_vectors(const struct form *f, const struct kvd_sketch_vectors *a,
                         const struct kvd_sketch_vectors *b, const char *what) {
        for (uint32_t i = 0; i < f->n; i++)
                if (memcmp(at(a, i), at(b, i), f->dim * element(f->type)) != 0)
                        ck_abort_msg("%s: vector %u of %u differs: rows %u, columns %u, dim %u, type %d",
                                     what, i, f->n, f->rows, f->columns, f->dim, (int)f->type);
}

static void variant_case(const struct kvd_ops *v, const struct form *f) {
        struct scene s;
        struct kvd_sketch_vectors out;
        struct kvd_sketch_part part;

        make_scene(&s, f);
        part = s.part;
        part.cells = copy_floats(s.part.cells, s.n_cells);
        out = vectors(f, false);

        scalar->sketch->insert(&s.part, s.places, f->n, &s.in, 1.0f);
        v->sketch->insert(&part, s.places, f->n, &s.in, 1.0f);
        assert_same_bits(s.part.cells, part.cells, s.n_cells, v->name);
        scalar->sketch->insert(&s.part, s.places, f->n / 2, &s.in, -1.0f);
        v->sketch->insert(&part, s.places, f->n / 2, &s.in, -1.0f);
        assert_same_bits(s.part.cells, part.cells, s.n_cells, v->name);
        scalar->sketch->query(&s.part, s.places, f->n, &s.out, 0.75f);
        v->sketch->query(&part, s.places, f->n, &out, 0.75f);
        same_vectors(f, &s.out, &out, v->name);
        buffers_free();
}

static const enum kvd_number types[] = {KVD_NUMBER_F32, KVD_NUMBER_F16, KVD_NUMBER_BF16};

static void variant_cases(const struct kvd_ops *v, uint32_t rows, uint32_t dim) {
        static const uint32_t columns[] = {1, 5, 16}, blocks[] = {1, 3, 16};

        for (size_t i = 0; i < 3 * 3 * 3 * 2; i++) {
                struct form f = {rows,
                                 columns[i % 3],
                                 dim,
                                 1 + random_u32() % 20,
                                 blocks[i / 3 % 3],
                                 i % 5,
                                 0,
                                 i % 2,
                                 types[i / 9 % 3]};

                f.sign = random_u32() % 3 << 30;
                variant_case(v, &f);
        }
}

START_TEST(variants_equal_the_reference) {
        static const uint32_t dims[] = {1, 3, 15, 16, 17, 31, 32, 33, 80, 127, 128};

        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++)
                for (uint32_t rows = 1; rows <= KVD_SKETCH_ROWS_MAX && (*v)->works(); rows++)
                        for (size_t d = 0; d < ARRAY_SIZE(dims); d++)
                                variant_cases(*v, rows, dims[d]);
}
END_TEST

/* ---- the reference itself ---- */

START_TEST(deletion_is_exact_where_sums_are) {
        struct form f = {3, 5, 33, 48, 16, 0, KVD_SKETCH_VALUE_SIGN, false, KVD_NUMBER_F32};
        struct scene s;

        make_scene(&s, &f);
        memset(s.part.cells, 0, s.n_cells * sizeof(float));
        for (uint32_t i = 0; i < f.n; i++) /* multiples of 1/64 below 4: all sums are exact */
                for (uint32_t d = 0; d < f.dim; d++)
                        ((float *)at(&s.in, i))[d] = (float)(random_u32() % 512) / 64.0f - 4.0f;
        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++) {
                if (!(*v)->works())
                        continue;
                (*v)->sketch->insert(&s.part, s.places, f.n, &s.in, 1.0f);
                (*v)->sketch->insert(&s.part, s.places, f.n, &s.in, -1.0f);
                for (size_t i = 0; i < s.n_cells; i++)
                        ck_assert(s.part.cells[i] == 0.0f);
        }
        buffers_free();
}
END_TEST

START_TEST(nan_stays_where_it_is) {
        struct form f = {3, 1, 40, 4, 16, 0, KVD_SKETCH_VALUE_SIGN, false, KVD_NUMBER_F32};

        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++) {
                struct scene s;

                if (!(*v)->works())
                        continue;
                make_scene(&s, &f);
                ((float *)at(&s.in, 1))[17] = NAN;
                ((float *)at(&s.in, 1))[39] = INFINITY;
                (*v)->sketch->insert(&s.part, s.places, f.n, &s.in, 1.0f);
                (*v)->sketch->query(&s.part, s.places, f.n, &s.out, 1.0f);
                for (uint32_t i = 0; i < f.n; i++)
                        for (uint32_t d = 0; d < f.dim; d++)
                                ck_assert_int_eq(d == 17, isnan(((const float *)at(&s.out, i))[d]));
                (*v)->sketch->insert(&s.part, s.places, f.n, &s.in, -1.0f);
                (*v)->sketch->query(&s.part, s.places, f.n, &s.out, 1.0f);
                ck_assert(isnan(((const float *)at(&s.out, 0))[17]) &&
                          isnan(((const float *)at(&s.out, 0))[39]));
                buffers_free();
        }
}
END_TEST

/* ---- places ---- */

/*
 * Rounds, rows and salts are independent: two tokens of different rounds collide with probability 1
 * / columns.
 */
static void collisions_case(enum kvd_sketch_family family, uint32_t columns) {
        enum { SALTS = 6000, ROWS = 3 };
        double meet = 0, both = 0, signs = 0, expected = SALTS * ROWS / (double)columns;
        double pairs = SALTS * ROWS / ((double)columns * columns);

        for (uint32_t s = 0; s < SALTS; s++) {
                struct kvd_sketch_hash hash = {family, ROWS, columns, s};
                uint64_t ordinals[2] = {s % columns, columns + s % 7};
                uint32_t places[2 * ROWS], column[2 * ROWS];

                kvd_sketch_place(&hash, ordinals, 2, places);
                for (uint32_t i = 0; i < 2 * ROWS; i++) {
                        column[i] = places[i] & KVD_SKETCH_COLUMN;
                        signs += places[i] & KVD_SKETCH_KEY_SIGN ? 1 : -1;
                        signs += (places[i] & KVD_SKETCH_KEY_SIGN) << 1 ==
                                                 (places[i] & KVD_SKETCH_VALUE_SIGN) ?
                                         1 :
                                         -1;
                }
                for (uint32_t r = 0; r < ROWS; r++) {
                        uint32_t next = (r + 1) % ROWS;

                        meet += column[r] == column[ROWS + r];
                        both += column[r] == column[ROWS + r] &&
                                column[next] == column[ROWS + next];
                }
        }
        if (fabs(meet - expected) > 4.5 * sqrt(expected) ||
            fabs(both - pairs) > 4.5 * sqrt(pairs) + 5)
                ck_abort_msg("%u columns: %g meetings, %g expected; %g in two rows, %g expected",
                             columns, meet, expected, both, pairs);
        if (fabs(signs) > 4.5 * sqrt(4.0 * ROWS * SALTS))
                ck_abort_msg("%u columns: signs lean by %g", columns, signs);
}

START_TEST(tokens_meet_as_often_as_chance_has_it) {
        for (uint32_t columns = 1; columns < 40; columns += columns < 9 ? 1 : 5) {
                collisions_case(KVD_SKETCH_PERMUTATION, columns);
                collisions_case(KVD_SKETCH_UNIFORM, columns);
        }
}
END_TEST

SUITE("kernels: sketch",
      scalar = kvd_ops_pick("scalar"),
      TESTS(variants_equal_the_reference, deletion_is_exact_where_sums_are, nan_stays_where_it_is,
            tokens_meet_as_often_as_chance_has_it))
