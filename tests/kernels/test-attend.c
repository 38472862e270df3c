/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attention over blocks: compared with an oracle in double precision; the bits do not depend on the
 * variant, on the number of tokens in a call, or on the size of a block.
 */

#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/attend.h"
#include "tests/kernels/buffers.h"
#include "tests/lib/suite.h"

enum { N = 61 }; /* tokens of the sequence under test */

struct head { /* one key/value head's data by position, and its queries */
        uint32_t dim, group;
        float *k, *v, *q;
};

static struct head random_head(uint32_t dim, uint32_t group) {
        struct head h = {dim, group, random_floats(N * dim), random_floats(N * dim),
                         random_floats(N * group * dim)};

        for (uint32_t i = 0; i < N * group * dim; i++)
                h.q[i] *= 4.0f; /* some weights near 1, some near 0 */
        return h;
}

static void store(uint8_t *to, const float *from, uint32_t dim, enum kvd_number type) {
        if (type == KVD_NUMBER_F32)
                memcpy(to, from, dim * sizeof *from);
        else
                kvd_ops_pick("scalar")->narrow((uint16_t *)to, from, dim, type);
}

/*
 * Blocks with a K plane and a V plane after 64 bytes of other data. Everything that is not a token
 * is NaN.
 */
static const uint8_t **blocks_of(const struct head *h, uint32_t block_tokens, size_t stride,
                                 enum kvd_number type) {
        size_t element = type == KVD_NUMBER_F32 ? 4 : 2, plane = block_tokens * stride * element;
        uint32_t n_blocks = DIV_UP(N, block_tokens);
        uint8_t **blocks = buffer(n_blocks * sizeof *blocks);

        for (uint32_t b = 0; b < n_blocks; b++) {
                blocks[b] = buffer(64 + 2 * plane);
                memset(blocks[b], 0xff, 64 + 2 * plane);
        }
        for (uint32_t i = 0; i < N; i++) {
                uint8_t *slot = blocks[i / block_tokens] + 64 + i % block_tokens * stride * element;

                store(slot, h->k + i * h->dim, h->dim, type);
                store(slot + plane, h->v + i * h->dim, h->dim, type);
        }
        return (const uint8_t **)blocks;
}

/* Processes the whole sequence, chunk tokens per call. */
static float *attend(const struct kvd_ops *ops, const struct head *h, const uint8_t **blocks,
                     uint32_t block_tokens, size_t stride, enum kvd_number type, uint32_t chunk) {
        size_t width = h->group * h->dim;
        struct kvd_attention a = {
                .ops = ops,
                .blocks = blocks,
                .k_offset = 64,
                .v_offset = 64 + block_tokens * stride * (type == KVD_NUMBER_F32 ? 4 : 2),
                .stride = stride,
                .type = type,
                .block_tokens = block_tokens,
                .dim = h->dim,
                .n = N,
                .group = h->group,
                .scale = 1.0f / sqrtf((float)h->dim),
                .ldq = width,
                .ldo = width,
        };
        float *out = buffer(N * width * sizeof *out);

        /* enough for every call */
        a.scratch = buffer(kvd_attend_scratch(&a) * sizeof *a.scratch);
        for (a.first = 0; a.first < N; a.first += a.n) {
                a.n = MIN(chunk, N - a.first);
                a.q = h->q + a.first * width;
                a.out = out + a.first * width;
                kvd_attend(&a);
        }
        return out;
}

static double oracle(const struct head *h, uint32_t token, uint32_t g, uint32_t d) {
        const float *q = h->q + (token * h->group + g) * h->dim;
        double score[N], most = -INFINITY, total = 0.0, sum = 0.0;

        for (uint32_t i = 0; i <= token; i++) {
                score[i] = 0.0;
                for (uint32_t e = 0; e < h->dim; e++)
                        score[i] += (double)q[e] * (double)h->k[i * h->dim + e];
                score[i] /= sqrt(h->dim);
                most = fmax(most, score[i]);
        }
        for (uint32_t i = 0; i <= token; i++) {
                total += exp(score[i] - most);
                sum += exp(score[i] - most) * (double)h->v[i * h->dim + d];
        }
        return sum / total;
}

START_TEST(attention_is_right) {
        static const uint32_t dims[] = {1, 8, 31, 32, 64, 80};

        for (size_t i = 0; i < ARRAY_SIZE(dims); i++)
                for (uint32_t group = 1; group <= 3; group++) {
                        struct head h = random_head(dims[i], group);
                        const uint8_t **blocks = blocks_of(&h, 16, dims[i], KVD_NUMBER_F32);
                        float *out = attend(kvd_ops_pick(NULL), &h, blocks, 16, dims[i],
                                            KVD_NUMBER_F32, 16);
                        double worst = 0.0;

                        for (uint32_t j = 0; j < N * group * dims[i]; j++)
                                worst = fmax(worst, fabs((double)out[j] -
                                                         oracle(&h, j / (group * dims[i]),
                                                                j / dims[i] % group, j % dims[i])));
                        ck_assert_double_lt(worst, 2e-6);
                        buffers_free();
                }
}
END_TEST

static void same_bits_case(uint32_t dim, uint32_t group, enum kvd_number type) {
        static const uint32_t chunks[] = {1, 3, 7, 16, N}, block_sizes[] = {1, 5, 16, 24, 64};
        struct head h = random_head(dim, group);
        float *expected = attend(kvd_ops_pick("scalar"), &h, blocks_of(&h, 16, dim, type), 16, dim,
                                 type, N);

        for (size_t b = 0; b < ARRAY_SIZE(block_sizes); b++) {
                size_t stride = dim + b * 4;
                const uint8_t **blocks = blocks_of(&h, block_sizes[b], stride, type);

                for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++)
                        for (size_t c = 0; c < ARRAY_SIZE(chunks) && (*v)->works(); c++)
                                assert_same_bits(expected,
                                                 attend(*v, &h, blocks, block_sizes[b], stride,
                                                        type, chunks[c]),
                                                 N * group * dim, (*v)->name);
        }
        buffers_free();
}

START_TEST(bits_do_not_depend_on_variant_chunk_or_block_size) {
        static const uint32_t dims[] = {1, 13, 16, 32, 40};

        for (size_t i = 0; i < ARRAY_SIZE(dims); i++)
                for (uint32_t group = 1; group <= 9; group += group < 3 ? 1 : 6)
                        same_bits_case(dims[i], group, KVD_NUMBER_F32);
        for (enum kvd_number type = KVD_NUMBER_F32; type <= KVD_NUMBER_BF16; type++) {
                same_bits_case(128, 4, type);
                same_bits_case(80, 1, type);
                same_bits_case(127, 5, type);
        }
        same_bits_case(32, 2, KVD_NUMBER_F16);
        same_bits_case(13, 3, KVD_NUMBER_F16);
        same_bits_case(32, 2, KVD_NUMBER_BF16);
        same_bits_case(13, 3, KVD_NUMBER_BF16);
}
END_TEST

SUITE("kernels: attention",
      TESTS(attention_is_right, bits_do_not_depend_on_variant_chunk_or_block_size))
