/* SPDX-License-Identifier: Apache-2.0 */

/* The sketch's kernels for GPUs against the scalar reference, bit for bit. */

#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/cuda/sketch.h"
#include "kernels/sketch.h"
#include "tests/kernels/buffers.h"
#include "tests/kernels/cuda/fixture.h"
#include "tests/kernels/cuda/pool.h"

enum { TOKENS = 26 };

static const enum kvd_number types[] = {KVD_NUMBER_F32, KVD_NUMBER_F16, KVD_NUMBER_BF16};

struct form {
        uint32_t rows, columns, layers, heads, dim, per_block;
        enum kvd_number type;
        bool nhd, centred, permuted;
        uint32_t lead, gap; /* elements before a block's first vector, floats behind a cell */
};

struct scene {
        struct form form;
        struct gpu_sketch_parts parts;
        struct pool pool;
        struct kvd_sketch_hash hash;
        struct gpu_sketch_token *tokens;
        uint32_t *places;
        float *cells[2], *mean[2]; /* the reference's */
        size_t n_cells;
};

static size_t plane_elements(const struct form *f) {
        return (size_t)f->heads * f->per_block * f->dim;
}

/* Blocks of K and V planes, the last one not full. */
static void make_blocks(struct scene *s) {
        const struct form *f = &s->form;
        size_t size = number_bytes(f->type), elements = f->lead + 2 * f->layers * plane_elements(f);

        pool_make(&s->pool, DIV_UP((uint32_t)TOKENS, f->per_block), ALIGN_UP(elements * size, f->lead % 8 ? 4 : 16));
        for (uint32_t b = 0; b < s->pool.n; b++)
                for (size_t i = 0; i < elements; i++)
                        number_put(pool_block(&s->pool, b) + i * size, f->type, number_random(-2, 2));
}

static void assert_placed(const struct scene *s, const uint64_t ordinals[TOKENS]) {
        size_t bytes = (size_t)TOKENS * s->form.rows * sizeof *s->places;
        struct gpu_sketch_place a = {s->hash.family, s->hash.rows, s->hash.columns, TOKENS, s->hash.salt,
                                     copied(ordinals, TOKENS * sizeof *ordinals), room(bytes)};

        fixture_ok(gpu_sketch_place(fixture_gpu(), NULL, &a));
        fixture_wait();
        ck_assert_mem_eq(host_of(a.places), s->places, bytes);
}

static void make_places(struct scene *s) {
        uint64_t ordinals[TOKENS];

        s->tokens = buffer(TOKENS * sizeof *s->tokens);
        s->places = buffer((size_t)TOKENS * s->form.rows * sizeof *s->places);
        s->hash = (struct kvd_sketch_hash){s->form.permuted ? KVD_SKETCH_PERMUTATION : KVD_SKETCH_UNIFORM, s->form.rows,
                                           s->form.columns, random_u32() * 77777777ull};
        for (uint32_t i = 0; i < TOKENS; i++) {
                ordinals[i] = i + (random_u32() % 2 ? 0 : (uint64_t)random_u32() << 31);
                s->tokens[i] = (struct gpu_sketch_token){i / s->form.per_block, i % s->form.per_block};
        }
        kvd_sketch_place(&s->hash, ordinals, TOKENS, s->places);
        assert_placed(s, ordinals);
}

static void make_scene(struct scene *s, const struct form *f) {
        size_t plane = plane_elements(f) * number_bytes(f->type), numbers = (size_t)f->layers * f->heads * f->dim;

        *s = (struct scene){.form = *f};
        make_blocks(s);
        make_places(s);
        s->parts = (struct gpu_sketch_parts){
                .blocks = s->pool.blocks, .layer_stride = 2 * plane,
                .head_stride = f->nhd ? f->dim : (uint64_t)f->per_block * f->dim,
                .token_stride = f->nhd ? (uint64_t)f->heads * f->dim : f->dim,
                .cell_stride = numbers + f->gap, .n_planes = 2, .layers = f->layers, .heads = f->heads, .dim = f->dim,
                .number = f->type, .rows = f->rows, .columns = f->columns};
        s->n_cells = (size_t)f->rows * f->columns * s->parts.cell_stride;
        for (uint32_t v = 0; v < 2; v++) {
                s->cells[v] = random_floats(s->n_cells);
                s->mean[v] = random_floats(numbers);
                s->parts.planes[v] = (struct gpu_sketch_plane){
                        copied(s->cells[v], s->n_cells * sizeof(float)),
                        f->centred && v == 0 ? copied(s->mean[v], numbers * sizeof(float)) : 0,
                        f->lead * number_bytes(f->type) + v * plane,
                        v ? KVD_SKETCH_VALUE_SIGN : f->centred ? KVD_SKETCH_KEY_SIGN : 0};
        }
}

/* ---- the reference, part by part --------------------------------------------------------------------------------- */

struct part {
        struct kvd_sketch_part part;
        struct kvd_sketch_vectors x;
};

static struct part part_of(struct scene *s, uint32_t i, uint8_t *const *block) {
        const struct gpu_sketch_parts *p = &s->parts;
        uint32_t v = i % 2, head = i / 2 % p->heads, layer = i / 2 / p->heads;
        size_t at = ((size_t)layer * p->heads + head) * p->dim;

        return (struct part){
                {s->cells[v] + at, p->cell_stride, p->rows, p->columns, p->dim, p->planes[v].sign,
                 p->planes[v].mean ? s->mean[v] + at : NULL},
                {block, p->planes[v].offset + layer * p->layer_stride +
                                head * p->head_stride * number_bytes(s->form.type),
                 p->token_stride, s->form.per_block, s->form.type}};
}

/* Token by token, as far as its block is there. */
static void reference(struct scene *s, bool query, float weight_or_shrink) {
        const struct kvd_sketch_ops *ops = kvd_ops_pick("scalar")->sketch;

        for (uint32_t i = 0; i < 2 * s->parts.layers * s->parts.heads; i++)
                for (uint32_t t = 0; t < TOKENS; t++) {
                        uint8_t *block = pool_block(&s->pool, s->tokens[t].block);
                        struct part p = part_of(s, i, &block);
                        const uint32_t *places = s->places + (size_t)t * s->parts.rows;

                        if (!block)
                                continue;
                        p.x.offset += s->tokens[t].slot * p.x.stride * number_bytes(s->form.type);
                        if (query)
                                ops->query(&p.part, places, 1, &p.x, weight_or_shrink);
                        else
                                ops->insert(&p.part, places, 1, &p.x, weight_or_shrink);
                }
}

/* ---- tests ------------------------------------------------------------------------------------------------------- */

static void insert(struct scene *s, float weight) {
        size_t places = (size_t)TOKENS * s->parts.rows;
        struct gpu_sketch_insert a = {.parts = s->parts, .weight = weight};
        struct gpu_sketch_run *runs = buffer((places + 1) * sizeof *runs);
        struct gpu_sketch_token *planned = buffer(places * sizeof *planned);

        a.n_runs = gpu_sketch_plan(s->places, s->tokens, TOKENS, s->parts.rows, s->parts.columns, runs, planned,
                                   buffer((size_t)s->parts.rows * s->parts.columns * sizeof(uint32_t)));
        ck_assert_uint_le(a.n_runs, places);
        ck_assert_uint_eq(runs[a.n_runs].first, places);
        a.runs = copied(runs, (a.n_runs + 1) * sizeof *runs);
        a.planned = copied(planned, places * sizeof *planned);
        fixture_ok(gpu_sketch_insert(fixture_gpu(), NULL, &a));
        reference(s, false, weight);
        for (uint32_t v = 0; v < 2; v++)
                assert_same_numbers(s->cells[v], floats_of(s->parts.planes[v].cells), s->n_cells, "cells");
}

static void query(struct scene *s, float shrink) {
        struct gpu_sketch_query a = {s->parts, address_of(s->tokens), address_of(s->places), TOKENS, shrink};
        size_t bytes = s->pool.n * s->parts.blocks.block_bytes, size = number_bytes(s->form.type);
        uint8_t *got = buffer(bytes);

        memcpy(got, s->pool.bytes, bytes);
        a.parts.blocks.base = copied(got, bytes);
        fixture_ok(gpu_sketch_query(fixture_gpu(), NULL, &a));
        fixture_wait();
        reference(s, true, shrink);
        for (size_t i = 0; i < bytes / size; i++) {
                const uint8_t *mine = (const uint8_t *)host_of(a.parts.blocks.base) + i * size, *its = s->pool.bytes + i * size;

                if (memcmp(mine, its, size) != 0 &&
                    !(isnan(number_get(mine, s->form.type)) && isnan(number_get(its, s->form.type))))
                        ck_abort_msg("rows %u, dim %u, type %d: number %zu is %g, expected %g", s->form.rows,
                                     s->form.dim, (int)s->form.type, i, (double)number_get(mine, s->form.type),
                                     (double)number_get(its, s->form.type));
        }
}

static void form_case(const struct form *f, bool holes) {
        struct scene s;

        make_scene(&s, f);
        if (holes)
                pool_drop(&s.pool, s.pool.n / 2);
        insert(&s, 1.0f);
        insert(&s, -1.0f);
        insert(&s, 1.0f);
        query(&s, f->centred ? 0.75f : 1.0f);
        buffers_free();
}

START_TEST(cells_and_answers_have_the_bits_of_the_reference) {
        static const uint32_t dims[] = {1, 4, 7, 16, 33, 64, 80, 128};

        fixture_seed((uint64_t)_i);
        for (uint32_t d = 0; d < ARRAY_SIZE(dims); d++)
                for (uint32_t i = 0; i < 6; i++) {
                        struct form f = {i < 3 ? 3 : 1 + (d + i) % 8, 1 + (d * 3 + i * 5) % 11, 1 + i % 2,
                                         1 + (d + i) % 3, dims[d], i % 2 ? 16 : 5, types[(i + (uint32_t)_i) % 3],
                                         i & 1, i & 2, d % 2, i == 4 ? 3 : 8, i % 3 == 1 ? 1 : 4};

                        form_case(&f, i == 5);
                }
}
END_TEST

START_TEST(nan_and_infinity_stay_where_they_are) {
        for (uint32_t rows = 1; rows <= 8; rows++)
                for (uint32_t t = 0; t < ARRAY_SIZE(types); t++) {
                        struct form f = {rows, 3, 1, 2, 24, 16, types[t], false, rows % 2, true, 8, 0};
                        struct scene s;

                        make_scene(&s, &f);
                        number_put(pool_block(&s.pool, 0) + (8 + 30) * number_bytes(types[t]), types[t], NAN);
                        number_put(pool_block(&s.pool, 0) + (8 + 71) * number_bytes(types[t]), types[t], INFINITY);
                        insert(&s, 1.0f);
                        query(&s, 0.5f);
                        insert(&s, -1.0f);
                        buffers_free();
                }
}
END_TEST

START_TEST(medians_have_the_bits_of_the_reference) {
        static const float few[] = {-1.0f, -0.0f, 0.0f, 1.0f, 2.0f, INFINITY, -INFINITY, NAN};

        for (uint32_t rows = 1; rows <= KVD_SKETCH_ROWS_MAX; rows++)
                for (size_t n = 1; n < 600; n = 3 * n + 1) {
                        size_t ld = n + 3, all = (rows - 1) * ld + n;
                        float *x = random_floats(all), *expected = buffer(n * sizeof *expected);
                        struct gpu_sketch_median a = {room(n * sizeof *x), address_of(x), ld, n, rows};

                        for (size_t i = 0; i < all && n % 2; i++)
                                x[i] = few[random_u32() % (n % 3 ? 5 : ARRAY_SIZE(few))];
                        fixture_ok(gpu_sketch_median(fixture_gpu(), NULL, &a));
                        kvd_ops_pick("scalar")->sketch->median(expected, x, ld, rows, n);
                        assert_same_numbers(expected, floats_of(a.out), n, "median");
                        buffers_free();
                }
}
END_TEST

START_TEST(what_no_kernel_takes_is_refused) {
        struct form f = {3, 4, 1, 1, 16, 16, KVD_NUMBER_F32, false, false, false, 8, 0};
        struct gpu_sketch_query a, bad;
        struct scene s;

        make_scene(&s, &f);
        a = (struct gpu_sketch_query){s.parts, address_of(s.tokens), address_of(s.places), TOKENS, 1.0f};
        bad = a, bad.parts.rows = 9;
        ck_assert_int_eq(gpu_sketch_query(fixture_gpu(), NULL, &bad), -EINVAL);
        bad = a, bad.parts.number = 4;
        ck_assert_int_eq(gpu_sketch_query(fixture_gpu(), NULL, &bad), -EINVAL);
        bad = a, bad.parts.cell_stride = 15;
        ck_assert_int_eq(gpu_sketch_query(fixture_gpu(), NULL, &bad), -EINVAL);
        bad = a, bad.parts.planes[1].cells = 0;
        ck_assert_int_eq(gpu_sketch_query(fixture_gpu(), NULL, &bad), -EINVAL);
        bad = a, bad.places = 0;
        ck_assert_int_eq(gpu_sketch_query(fixture_gpu(), NULL, &bad), -EINVAL);
        bad = a, bad.n = 0;
        ck_assert_int_eq(gpu_sketch_query(fixture_gpu(), NULL, &bad), 0);
        buffers_free();
}
END_TEST

int main(void) {
        const struct fixture_test tests[] = {
                {cells_and_answers_have_the_bits_of_the_reference, 3},
                {nan_and_infinity_stay_where_they_are, -1},
                {medians_have_the_bits_of_the_reference, -1},
                {what_no_kernel_takes_is_refused, -1},
        };

        return fixture_main("cuda: sketch", 60, tests, ARRAY_SIZE(tests));
}
