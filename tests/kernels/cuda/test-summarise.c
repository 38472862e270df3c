/* SPDX-License-Identifier: Apache-2.0 */

/* Summaries by the GPU kernel against those by the worker's CPU kernels, byte for byte. */

#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/format.h"
#include "ipc/base/util.h"
#include "kernels/cuda/summarise.h"
#include "kernels/hshare.h"
#include "kernels/keydiff.h"
#include "kernels/memshare.h"
#include "tests/kernels/buffers.h"
#include "tests/kernels/cuda/fixture.h"
#include "tests/kernels/cuda/pool.h"
#include "tests/lib/suite.h"

enum { BLOCKS = 4, STAMP = 8 };

static const enum kvd_number types[] = {KVD_NUMBER_F32, KVD_NUMBER_F16, KVD_NUMBER_BF16,
                                        KVD_NUMBER_Q8,  KVD_NUMBER_Q4,  KVD_NUMBER_E4M3,
                                        KVD_NUMBER_E5M2};

struct scene {
        struct gpu_summarise a;
        struct pool pool;
        uint32_t *tokens;
        uint16_t *channels;
        size_t row, plane, head_stride, token_stride; /* bytes */
        uint8_t *expected, *got;
};

static float some_number(bool broken) {
        return broken && random_u32() % 97 == 0 ? random_u32() % 2 ? NAN : INFINITY :
               broken && random_u32() % 89 == 0 ? number_random(-1e5f, 1e5f) :
                                                  number_random(-2, 2);
}

static void fill_blocks(struct scene *s, bool broken) {
        const struct kvd_ops *ops = kvd_ops_pick("scalar");
        size_t planes = 2 * s->a.shape.layers, rows = s->plane / s->row;

        for (uint32_t b = 0; b < BLOCKS; b++)
                for (size_t i = 0; i < planes * rows; i++) {
                        float x[GPU_SUMMARISE_DIM];

                        for (uint32_t d = 0; d < s->a.shape.dim; d++)
                                x[d] = some_number(broken);
                        (i / rows % 2 ?
                                 ops->write_row :
                                 ops->write_key)(pool_block(&s->pool, b) + s->a.offset + i * s->row,
                                                 x, s->a.shape.dim,
                                                 (enum kvd_number)s->a.shape.number);
                }
}

static void choose_channels(struct scene *s) {
        uint32_t heads = s->a.shape.layers * s->a.shape.heads, n = s->a.n_channels;

        s->channels = buffer((size_t)heads * n * sizeof *s->channels);
        for (uint32_t i = 0; i < heads * n; i++)
                s->channels[i] = (uint16_t)(random_u32() % s->a.shape.dim);
        s->a.channels = address_of(s->channels);
}

static void make_scene(struct scene *s, const struct gpu_block_shape *shape, uint32_t n_channels,
                       uint32_t lead, bool broken) {
        uint64_t heads = (uint64_t)shape->layers * shape->heads, labels = (n_channels + 1) / 2 + 4;

        *s = (struct scene){.a = {.shape = *shape, .n = BLOCKS, .n_channels = n_channels},
                            .row = kvd_row_bytes((enum kvd_number)shape->number, shape->dim)};
        s->plane = (size_t)shape->heads * shape->tokens * s->row;
        s->head_stride = shape->order == GPU_ORDER_HND ? shape->tokens * s->row : s->row;
        s->token_stride = shape->order == GPU_ORDER_HND ? s->row : shape->heads * s->row;
        s->a.offset = lead * (kvd_is_narrow(shape->number) ?
                                      1 :
                                      number_bytes((enum kvd_number)shape->number));
        pool_make(&s->pool, BLOCKS,
                  ALIGN_UP(s->a.offset + 2 * shape->layers * s->plane, lead % 8 ? 4 : 16));
        fill_blocks(s, broken);
        choose_channels(s);
        s->tokens = buffer(BLOCKS * sizeof *s->tokens);
        for (uint32_t b = 0; b < BLOCKS; b++)
                s->tokens[b] = b < 2 ? shape->tokens : random_u32() % (shape->tokens + 1);
        s->a.blocks = s->pool.blocks;
        s->a.norms_off = STAMP;
        s->a.anchors_off = STAMP + shape->layers * 2 * (uint32_t)sizeof(float);
        s->a.labels_off = s->a.anchors_off + (uint32_t)(heads * shape->dim * sizeof(float));
        s->a.row_bytes = ALIGN_UP(s->a.labels_off + heads * shape->tokens * labels, 64);
        s->a.tokens = address_of(s->tokens);
        s->a.rows = room(BLOCKS * s->a.row_bytes);
        s->got = host_of(s->a.rows);
        s->expected = buffer(BLOCKS * s->a.row_bytes);
        memcpy(s->expected, s->got, BLOCKS * s->a.row_bytes);
}

/* ---- the worker's way: daemon/process/worker/job_summarise.c ----------------------------------------- */

/* Tokens after a block's last one count as zeros. */
static const uint8_t *whole_layer(const struct scene *s, const uint8_t *planes, uint32_t tokens) {
        uint8_t *to = buffer(2 * s->plane);

        for (uint32_t v = 0; v < 2; v++)
                for (uint32_t h = 0; h < s->a.shape.heads; h++)
                        for (uint32_t t = 0; t < tokens; t++) {
                                size_t at = v * s->plane + h * s->head_stride + t * s->token_stride;

                                memcpy(to + at, planes + at, s->row);
                        }
        return to;
}

static void put_layer(const struct scene *s, const uint8_t *planes, uint32_t layer, uint32_t tokens,
                      uint8_t *row) {
        const struct gpu_block_shape *shape = &s->a.shape;
        const struct kvd_ops *ops = kvd_ops_pick("scalar");
        enum kvd_number type = (enum kvd_number)shape->number;
        struct kvd_memshare_shape one = {1, shape->heads, shape->tokens, shape->dim, type};
        struct kvd_key_rows keys = {&planes,        0,
                                    s->head_stride, s->token_stride,
                                    shape->tokens,  shape->heads,
                                    shape->dim,     type};
        size_t label = kvd_label_bytes(s->a.n_channels), first = (size_t)layer * shape->heads;
        float *anchors = (float *)(row + s->a.anchors_off) + first * shape->dim;

        ops->memshare->norms(&one, whole_layer(s, planes, tokens),
                             (float *)(row + s->a.norms_off) + 2 * layer);
        memset(anchors, 0, (size_t)shape->heads * shape->dim * sizeof *anchors);
        ops->keydiff->anchor(anchors, buffer(shape->heads * sizeof(uint32_t)), &keys, 0, tokens,
                             buffer(kvd_keydiff_scratch(&keys) * sizeof(float)));
        for (uint32_t h = 0; h < shape->heads; h++) {
                uint8_t *labels = row + s->a.labels_off + (first + h) * shape->tokens * label;

                ops->hshare->label(labels, planes + h * s->head_stride, s->token_stride, type,
                                   tokens, shape->dim, s->channels + (first + h) * s->a.n_channels,
                                   s->a.n_channels);
                memset(labels + tokens * label, 0, (shape->tokens - tokens) * label);
        }
}

static void reference(const struct scene *s) {
        for (uint32_t b = 0; b < BLOCKS; b++)
                for (uint32_t l = 0; l < s->a.shape.layers && pool_block(&s->pool, b); l++)
                        put_layer(s, pool_block(&s->pool, b) + s->a.offset + 2 * l * s->plane, l,
                                  s->a.tokens ? MIN(s->tokens[b], s->a.shape.tokens) :
                                                s->a.shape.tokens,
                                  s->expected + b * s->a.row_bytes);
}

/* Norms may be NaN; everything else is numbers or bytes. */
static void compare(const struct scene *s, const char *what) {
        fixture_ok(gpu_summarise(fixture_gpu(), NULL, &s->a));
        fixture_wait();
        reference(s);
        for (uint32_t b = 0; b < BLOCKS; b++) {
                const uint8_t *expected = s->expected + b * s->a.row_bytes,
                              *got = s->got + b * s->a.row_bytes;

                ck_assert_int_eq(memcmp(expected, got, STAMP), 0);
                assert_same_numbers((const float *)(expected + STAMP), (const float *)(got + STAMP),
                                    (s->a.labels_off - STAMP) / sizeof(float), what);
                for (size_t i = s->a.labels_off; i < s->a.row_bytes; i++)
                        if (expected[i] != got[i])
                                ck_abort_msg(
                                        "%s: block %u, dim %u, type %u, %u channels: byte %zu of labels is %02x, expected %02x",
                                        what, b, s->a.shape.dim, s->a.shape.number, s->a.n_channels,
                                        i - s->a.labels_off, got[i], expected[i]);
        }
}

START_TEST(rows_are_those_of_the_reference) {
        static const uint32_t dims[] = {1, 3, 16, 17, 33, 48, 64, 80, 127, 128, 256};
        static const uint32_t channels[] = {32, 1, 7, 64, 256};

        fixture_seed((uint64_t)_i);
        for (uint32_t d = 0; d < ARRAY_SIZE(dims); d++)
                for (uint32_t i = 0; i < 14; i++) {
                        struct gpu_block_shape shape =
                                {1 + i % 2,
                                 1 + (d + i) % 10,
                                 1 + (d * 7 + i * 5) % 20,
                                 dims[d],
                                 1 + i / 3 % 2,
                                 types[(i + (uint32_t)_i) % ARRAY_SIZE(types)]};
                        struct scene s;

                        if (kvd_is_quantised(shape.number) && shape.dim % 2)
                                continue;
                        if (i % 6 < 3)
                                shape.tokens = 16;
                        make_scene(&s, &shape, channels[(d + i) % ARRAY_SIZE(channels)],
                                   i % 6 == 4 ? 5 : 8, i % 4 > 1);
                        if (i == 5)
                                pool_drop(&s.pool, 2);
                        if (i == 3)
                                s.a.tokens = 0;
                        compare(&s, "rows");
                        buffers_free();
                }
}
END_TEST

/* More tokens than a tile, and more than one chunk per head. */
START_TEST(long_blocks_are_summarised) {
        for (uint32_t i = 0; i < 14; i++) {
                struct gpu_block_shape shape = {1,   2,         i % 2 ? 64 : 37,
                                                128, 1 + i % 2, types[i % ARRAY_SIZE(types)]};
                struct scene s;

                make_scene(&s, &shape, 32, 8, i > 6);
                compare(&s, "long");
                buffers_free();
        }
}
END_TEST

START_TEST(what_no_kernel_takes_is_refused) {
        struct gpu_block_shape shape = {1, 1, 16, 32, GPU_ORDER_HND, KVD_NUMBER_BF16};
        struct gpu *gpu = fixture_gpu();
        struct gpu_summarise bad;
        struct scene s;

        make_scene(&s, &shape, 32, 8, false);
        bad = s.a, bad.shape.dim = GPU_SUMMARISE_DIM + 1;
        ck_assert_int_eq(gpu_summarise(gpu, NULL, &bad), -EINVAL);
        bad = s.a, bad.shape.number = 4;
        ck_assert_int_eq(gpu_summarise(gpu, NULL, &bad), -EINVAL);
        bad = s.a, bad.shape.number = KVD_NUMBER_Q8, bad.shape.dim = 31;
        ck_assert_int_eq(gpu_summarise(gpu, NULL, &bad), -EINVAL);
        bad = s.a, bad.n_channels = 257;
        ck_assert_int_eq(gpu_summarise(gpu, NULL, &bad), -EINVAL);
        bad = s.a, bad.labels_off++;
        ck_assert_int_eq(gpu_summarise(gpu, NULL, &bad), -EINVAL);
        bad = s.a, bad.rows = 0;
        ck_assert_int_eq(gpu_summarise(gpu, NULL, &bad), -EINVAL);
        bad = s.a, bad.n = 0;
        ck_assert_int_eq(gpu_summarise(gpu, NULL, &bad), 0);
        buffers_free();
}
END_TEST

SUITE("cuda: summaries", fixture_begin(), LOOPS(3, rows_are_those_of_the_reference),
      TESTS(long_blocks_are_summarised, what_no_kernel_takes_is_refused))
