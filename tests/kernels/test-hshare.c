/* SPDX-License-Identifier: Apache-2.0 */

/*
 * HShare's kernels: every variant gives the same bytes as the scalar one, over every size that
 * affects an address, and touches nothing outside its arrays (the buffers end at guard pages). Most
 * values are checked in tests/kernels/methods; those that are easiest to check here are here.
 */

#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/hshare.h"
#include "tests/kernels/buffers.h"
#include "tests/lib/suite.h"

static const struct kvd_hshare_ops *scalar(void) {
        return kvd_ops_pick("scalar")->hshare;
}

static void assert_same_bytes(const void *a, const void *b, size_t bytes, const char *what) {
        if (memcmp(a, b, bytes) != 0)
                ck_abort_msg("%s differs", what);
}

static void *keys_of(const float *from, size_t n, enum kvd_number type) {
        void *k = buffer(n * (type == KVD_NUMBER_F32 ? 4 : 2));

        if (type == KVD_NUMBER_F32)
                memcpy(k, from, n * sizeof *from);
        else
                kvd_ops_pick("scalar")->narrow(k, from, n, type);
        return k;
}

/* Every other dimension or, if there are not enough, the last n. */
static uint16_t *some_channels(uint32_t dim, uint32_t n) {
        uint16_t *channels = buffer(n * sizeof *channels);

        for (uint32_t i = 0; i < n; i++)
                channels[i] = (uint16_t)(2 * n <= dim ? 2 * i : dim - n + i);
        return channels;
}

static const uint32_t channel_counts[] = {1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 64, 80, 127, 256};

/* ---- labels ---- */

static void label_case(uint32_t dim, uint32_t n_channels, enum kvd_number type, uint32_t n) {
        size_t stride = dim + 3, bytes = kvd_label_bytes(n_channels);
        float *x = random_floats(n > 0 ? (n - 1) * stride + dim : 0);
        uint16_t *channels = some_channels(dim, n_channels);
        uint8_t *expected = buffer(n * bytes);
        struct kvd_label_query query;
        void *k;

        for (uint32_t i = 0; i < n; i++) { /* equal, non-finite, and far apart */
                if (i % 5 == 1)
                        memset(x + i * stride, 0, dim * sizeof *x);
                if (i % 5 == 2)
                        x[i * stride + channels[n_channels - 1]] = i % 2 ? NAN : -INFINITY;
                if (i % 5 == 3)
                        x[i * stride + channels[0]] = 3e38f;
                /* the least is 0, of either sign */
                for (uint32_t d = 0; d < dim && i % 5 == 4; d++)
                        x[i * stride + d] = d % 3 == i % 3 ? -0.0f :
                                            d % 3 == 0     ? 0.0f :
                                                             fabsf(x[i * stride + d]);
        }
        k = keys_of(x, n > 0 ? (n - 1) * stride + dim : 0, type);
        scalar()->label(expected, k, stride, type, n, channels, n_channels);
        scalar()->query(&query, x, channels, n_channels);
        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++) {
                uint8_t *labels = buffer(n * bytes);
                struct kvd_label_query other;

                if (!(*v)->works())
                        continue;
                (*v)->hshare->label(labels, k, stride, type, n, channels, n_channels);
                assert_same_bytes(expected, labels, n * bytes, (*v)->name);
                (*v)->hshare->query(&other, x, channels, n_channels);
                assert_same_bytes(&query, &other, sizeof query, (*v)->name);
        }
        buffers_free();
}

START_TEST(labels_are_the_same_in_every_variant) {
        for (size_t c = 0; c < ARRAY_SIZE(channel_counts); c++)
                for (uint32_t dim = channel_counts[c]; dim <= 2 * channel_counts[c] + 1;
                     dim += channel_counts[c] + 1)
                        for (uint32_t n = 1; n <= 21; n += 4)
                                label_case(dim, channel_counts[c], KVD_NUMBER_F32 + n % 3, n);
}
END_TEST

/* Labels of 32 channels are made 16 at a time. */
START_TEST(labels_of_32_channels_are_the_same_for_any_number_of_keys) {
        static const uint32_t dims[] = {32, 63, 64, 80, 96, 127, 128, 129, 160, 256};

        for (size_t d = 0; d < ARRAY_SIZE(dims); d++)
                for (uint32_t n = 15; n <= 49; n += 6 + n % 5)
                        for (enum kvd_number type = KVD_NUMBER_F32; type <= KVD_NUMBER_BF16; type++)
                                label_case(dims[d], 32, type, n);
}
END_TEST

/* ---- scores ---- */

struct labelled { /* positions of one head in blocks, some of which have no labels */
        const uint8_t **blocks;
        float *k;
        uint16_t *channels;
        uint32_t n, block_tokens, n_channels;
};

static struct labelled label_blocks(uint32_t n, uint32_t block_tokens, uint32_t n_channels,
                                    bool holes) {
        size_t bytes = kvd_label_bytes(n_channels);
        uint32_t n_blocks = DIV_UP(n, block_tokens);
        struct labelled l = {.n = n, .block_tokens = block_tokens, .n_channels = n_channels};
        uint8_t **blocks = buffer(n_blocks * sizeof *blocks);

        l.k = random_floats((size_t)n * n_channels);
        l.channels = some_channels(n_channels, n_channels);
        for (uint32_t b = 0; b < n_blocks; b++) {
                uint32_t count = MIN(block_tokens, n - b * block_tokens);

                if (holes && b % 3 == 1)
                        continue;
                blocks[b] = buffer(8 + count * bytes); /* without a spare byte */
                scalar()->label(blocks[b] + 8, l.k + (size_t)b * block_tokens * n_channels,
                                n_channels, KVD_NUMBER_F32, count, l.channels, n_channels);
        }
        l.blocks = (const uint8_t **)blocks;
        return l;
}

static void score_case(uint32_t n, uint32_t block_tokens, uint32_t n_channels, uint32_t n_queries,
                       uint32_t first) {
        struct labelled l = label_blocks(n, block_tokens, n_channels, n % 2);
        struct kvd_label_query *queries = buffer(n_queries * sizeof *queries);
        float *q = random_floats((size_t)n_queries * n_channels), *expected;
        size_t ld = n - first, count = ld * n_queries;

        for (uint32_t g = 0; g < n_queries; g++)
                scalar()->query(queries + g, q + (size_t)g * n_channels, l.channels, n_channels);
        expected = buffer(count * sizeof *expected);
        scalar()->scores(expected, ld, l.blocks, 8, block_tokens, n_channels, queries, n_queries,
                         first, n - first);
        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++) {
                float *got = buffer(count * sizeof *got);

                if (!(*v)->works())
                        continue;
                (*v)->hshare->scores(got, ld, l.blocks, 8, block_tokens, n_channels, queries,
                                     n_queries, first, n - first);
                assert_same_bits(expected, got, count, (*v)->name);
        }
        buffers_free();
}

START_TEST(scores_are_the_same_in_every_variant) {
        static const uint32_t block_sizes[] = {1, 5, 16, 24, 64};

        for (size_t b = 0; b < ARRAY_SIZE(block_sizes); b++)
                for (size_t c = 0; c < ARRAY_SIZE(channel_counts); c++)
                        for (uint32_t n = 1; n < 120; n = n * 2 + 1)
                                score_case(n, block_sizes[b], channel_counts[c], 1 + n % 9,
                                           n % 4 ? 0 : n / 2);
        for (uint32_t n = 1; n < 100; n++)
                for (uint32_t first = 0; first < n; first += 7)
                        score_case(n, 16, 32, 1 + n % 5, first);
}
END_TEST

START_TEST(aggregates_are_the_same_in_every_variant) {
        for (uint32_t n = 1; n < 80; n += n < 40 ? 1 : 13)
                for (uint32_t group = 1; group <= 5; group++) {
                        float *x = random_floats((size_t)group * (n + 1)),
                              *expected = buffer(n * sizeof *expected);
                        enum kvd_aggregate how = n % 2;

                        for (uint32_t g = 0; g < group && n > 3; g++)
                                x[g * (n + 1) + n / 2] = -INFINITY;
                        scalar()->aggregate(expected, copy_floats(x, (size_t)group * (n + 1)),
                                            n + 1, n, group, 9.0f, how);
                        ck_assert(n <= 3 || expected[n / 2] == -INFINITY);
                        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++) {
                                float *got = buffer(n * sizeof *got);

                                if (!(*v)->works())
                                        continue;
                                (*v)->hshare->aggregate(got,
                                                        copy_floats(x, (size_t)group * (n + 1)),
                                                        n + 1, n, group, 9.0f, how);
                                assert_same_bits(expected, got, n, (*v)->name);
                        }
                        buffers_free();
                }
}
END_TEST

/* ---- the top ---- */

static const float *ranked;

static int by_score(const void *a, const void *b) {
        uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;

        return ranked[i] > ranked[j] ? -1 : ranked[i] < ranked[j] ? 1 : i < j ? -1 : 1;
}

static int by_number(const void *a, const void *b) {
        uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;

        return i < j ? -1 : i > j;
}

/* Finds the top z by sorting all scores. */
static uint32_t top_by_sorting(uint32_t *to, const float *x, uint32_t n, uint32_t z) {
        uint32_t *all = buffer(n * sizeof *all), m = 0;

        for (uint32_t i = 0; i < n; i++)
                if (x[i] > -INFINITY)
                        all[m++] = i;
        ranked = x;
        qsort(all, m, sizeof *all, by_score);
        m = MIN(m, z);
        qsort(all, m, sizeof *all, by_number);
        for (uint32_t i = 0; i < m; i++)
                to[i] = 7 + all[i];
        return m;
}

static void top_case(float *x, uint32_t n, uint32_t z) {
        uint32_t *expected = buffer(MAX(1, MIN(n, z)) * sizeof *expected), count;

        count = top_by_sorting(expected, x, n, z);
        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++) {
                uint32_t *got = buffer(MAX(1, MIN(n, z)) * sizeof *got);

                if (!(*v)->works())
                        continue;
                ck_assert_uint_eq((*v)->hshare->top(got, x, n, z, 7,
                                                    buffer(2 * (size_t)n * sizeof *got)),
                                  count);
                assert_same_bytes(expected, got, count * sizeof *got, (*v)->name);
        }
        buffers_free();
}

static float *scores_of(uint32_t n, uint32_t kind) {
        float *x = random_floats(n);

        for (uint32_t i = 0; i < n; i++) {
                if (kind == 1) /* ties, zeros of both signs, and scores that must not be taken */
                        x[i] = i % 11 == 3 ? -INFINITY :
                               i % 13 == 5 ? NAN :
                                             (float)((int)(x[i] * 4.0f)) * 0.5f;
                if (kind == 2) /* large ones at the same places of every vector */
                        x[i] = i % 8 == 0 ? x[i] + 3.0f : x[i];
                if (kind == 3)
                        x[i] = i % 8 == 0 ? x[i] - 3.0f : x[i];
                if (kind == 4)
                        x[i] = i % 8 == 0 ? NAN : -(float)i;
                if (kind == 5) /* the sample suggests too high or too low a bound */
                        x[i] += i % 512 < 32 ? 9.0f : 0.0f;
                if (kind == 6)
                        x[i] -= i % 512 < 32 ? 9.0f : 0.0f;
                if (kind == 7)
                        x[i] = (float)(i / 600);
        }
        return x;
}

START_TEST(the_top_is_what_sorting_says) {
        static const uint32_t sizes[] = {1, 2, 7, 8, 15, 16, 17, 100, 777, 8192, 8199, 20000};

        for (size_t s = 0; s < ARRAY_SIZE(sizes); s++)
                for (uint32_t kind = 0; kind < 8; kind++)
                        for (uint32_t z = 1; z <= sizes[s] + 1; z = z * 3 + 1)
                                top_case(scores_of(sizes[s], kind), sizes[s], z);
}
END_TEST

/* ---- calibration ---- */

START_TEST(weights_are_the_same_in_every_variant) {
        static const uint32_t dims[] = {1, 3, 8, 17, 80, 127, 128};

        for (size_t i = 0; i < ARRAY_SIZE(dims); i++)
                for (uint32_t type = KVD_NUMBER_F32; type <= KVD_NUMBER_BF16; type++) {
                        uint32_t dim = dims[i], n = 9, group = 1 + type;
                        float *q = random_floats((size_t)n * group * dim),
                              *expected = random_floats(dim);
                        float *before = copy_floats(expected, dim);
                        void *k = keys_of(random_floats((size_t)n * dim), (size_t)n * dim, type);

                        scalar()->weigh(expected, q, group * dim, group, k, dim, type, n, dim);
                        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++) {
                                float *got = copy_floats(before, dim);

                                if (!(*v)->works())
                                        continue;
                                (*v)->hshare->weigh(got, q, group * dim, group, k, dim, type, n,
                                                    dim);
                                assert_same_bits(expected, got, dim, (*v)->name);
                        }
                        buffers_free();
                }
}
END_TEST

SUITE("kernels: hshare",
      TESTS(labels_are_the_same_in_every_variant,
            labels_of_32_channels_are_the_same_for_any_number_of_keys,
            scores_are_the_same_in_every_variant, aggregates_are_the_same_in_every_variant,
            the_top_is_what_sorting_says, weights_are_the_same_in_every_variant))
