/* SPDX-License-Identifier: Apache-2.0 */

/* HShare on a device against kernels/hshare.h: labels, scores and choices are equal. */

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/cuda/hshare.h"
#include "kernels/hshare.h"
#include "tests/kernels/cuda/fixture.h"

enum { N = 3, HEADS = 2, BLOCKS = 40 }; /* sequences, KV heads, blocks of a table at most */

static const struct kvd_hshare_ops *reference = &kvd_hshare_scalar;
static const uint32_t froms[N] = {0, 5, 16}, counts[N] = {70, 33, 1};

static uint32_t *words_of(const uint32_t *from, size_t n) {
        return memcpy(buffer(n * sizeof *from), from, n * sizeof *from);
}

static struct gpu_spans spans(void) {
        return (struct gpu_spans){N, 70, address_of(words_of(froms, N)), address_of(words_of(counts, N))};
}

static float number(uint32_t i) {
        float x = (float)((double)random_u32() / 2147483648.0 - 1.0);

        if (i % 97 == 13)
                return i % 2 ? NAN : -INFINITY;
        if (i % 89 == 7)
                return i % 3 ? 7e4f : -1e30f;
        return i % 31 == 3 ? 0.0f : i % 17 == 5 ? -0.0f : x * 3.0f;
}

/* ---- blocks ---- */

struct pool {
        uint32_t *ids;
        uint8_t *at;
        size_t block_bytes, bytes;
};

static struct pool make_pool(size_t block_bytes, uint32_t absent) {
        struct pool p = {buffer(N * BLOCKS * sizeof *p.ids), NULL, block_bytes, N * BLOCKS * block_bytes};

        p.at = buffer(p.bytes);
        for (size_t i = 0; i < p.bytes; i++)
                p.at[i] = (uint8_t)random_u32();
        for (uint32_t i = 0; i < N * BLOCKS; i++)
                p.ids[i] = absent && random_u32() % absent == 0 ? GPU_NO_BLOCK : (i * 7 + 3) % (N * BLOCKS);
        return p;
}

static struct gpu_slots slots(const struct pool *p, uint32_t block_tokens, size_t offset, size_t head, size_t token) {
        return (struct gpu_slots){{address_of(p->at), p->block_bytes, address_of(p->ids)}, BLOCKS, offset, head, token,
                                  block_tokens};
}

static uint8_t *host_slot(const struct pool *p, const struct gpu_slots *s, uint32_t sequence, uint32_t h,
                          uint32_t position, size_t token_stride) {
        uint32_t id = p->ids[sequence * BLOCKS + position / s->block_tokens];

        return id == GPU_NO_BLOCK ? NULL : p->at + id * p->block_bytes + s->offset + h * s->head_stride +
                                                   position % s->block_tokens * token_stride;
}

static void put_number(uint8_t *at, float x, enum kvd_number type) {
        if (type == KVD_NUMBER_F32)
                memcpy(at, &x, sizeof x);
        else
                kvd_ops_pick("scalar")->narrow((uint16_t *)at, &x, 1, type);
}

/* Keys that are the same in all channels, or not finite, are among them. */
static void fill_keys(const struct pool *p, size_t bytes, enum kvd_number type) {
        size_t size = type == KVD_NUMBER_F32 ? 4 : 2;

        for (size_t i = 0; i < p->bytes / size; i++)
                put_number(p->at + i * size, i * size / bytes % 7 == 2 ? 0.75f : number(random_u32() % 9973), type);
}

static uint16_t *make_channels(uint32_t n, uint32_t dim) {
        uint16_t *channels = buffer(HEADS * n * sizeof *channels);

        for (uint32_t i = 0; i < HEADS * n; i++)
                channels[i] = (uint16_t)(random_u32() % dim);
        return channels;
}

/* ---- labels ---- */

static void label_case(uint32_t n_channels, uint32_t dim, uint32_t block_tokens, bool nhd, enum kvd_number type) {
        size_t size = type == KVD_NUMBER_F32 ? 4 : 2, row = dim * size, bytes = kvd_label_bytes(n_channels);
        struct pool keys = make_pool(ALIGN_UP(8 + HEADS * block_tokens * row, 4), 9);
        struct pool labels = make_pool(12 + HEADS * block_tokens * bytes, 11), expected = labels;
        uint16_t *channels = make_channels(n_channels, dim);
        struct gpu_label a = {
                .spans = spans(),
                .keys = slots(&keys, block_tokens, 8, nhd ? row : block_tokens * row, nhd ? HEADS * row : row),
                .labels = slots(&labels, block_tokens, 12, block_tokens * bytes, 0),
                .channels = {address_of(channels), n_channels, n_channels},
                .number = type,
                .kv_heads = HEADS,
        };

        fill_keys(&keys, row, type);
        expected.at = memcpy(buffer(labels.bytes), labels.at, labels.bytes);
        for (uint32_t s = 0; s < N; s++)
                for (uint32_t i = froms[s] * HEADS; i < (froms[s] + counts[s]) * HEADS; i++) {
                        uint8_t *key = host_slot(&keys, &a.keys, s, i % HEADS, i / HEADS, a.keys.token_stride);
                        uint8_t *to = host_slot(&expected, &a.labels, s, i % HEADS, i / HEADS, bytes);

                        if (key && to)
                                reference->label(to, key, dim, type, 1, channels + i % HEADS * n_channels, n_channels);
                }
        fixture_ok(gpu_label(fixture_gpu(), NULL, &a));
        fixture_wait();
        ck_assert(memcmp(labels.at, expected.at, labels.bytes) == 0);
        buffers_free();
}

START_TEST(labels_are_equal) {
        static const uint32_t channels[] = {1, 2, 7, 31, 32, 33, 128, 256};

        for (size_t c = 0; c < ARRAY_SIZE(channels); c++)
                for (enum kvd_number type = KVD_NUMBER_F32; type <= KVD_NUMBER_BF16; type++)
                        label_case(channels[c], c % 2 ? 128 : 37, c % 3 ? 16 : 5, (c + type) % 2, type);
}
END_TEST

static struct kvd_label_query *make_queries(uint32_t rows, uint32_t group, uint32_t n_channels, enum kvd_number type,
                                            bool check) {
        enum { DIM = 64 };
        uint32_t heads = HEADS * group, n = rows * heads * DIM;
        size_t size = type == KVD_NUMBER_F32 ? 4 : 2;
        struct kvd_label_query *to = buffer(rows * heads * sizeof *to), *expected = buffer(rows * heads * sizeof *to);
        uint16_t *channels = make_channels(n_channels, DIM);
        uint8_t *typed = buffer(n * size);
        float *q = buffer(n * sizeof *q);
        struct gpu_label_query a = {.channels = {address_of(channels), n_channels, n_channels}, .rows = rows,
                                    .kv_heads = HEADS, .group = group, .q_number = type, .q = address_of(typed),
                                    .q_row = heads * DIM, .q_head = DIM, .to = address_of(to)};

        for (uint32_t i = 0; i < n; i++) {
                q[i] = check ? number(i / 3) : (float)((double)random_u32() / 2147483648.0 - 1.0);
                put_number(typed + i * size, q[i], type);
        }
        if (type != KVD_NUMBER_F32)
                kvd_ops_pick("scalar")->widen(q, (const uint16_t *)typed, n, type);
        for (uint32_t i = 0; i < rows * heads; i++)
                reference->query(expected + i, q + i * DIM, channels + i % heads / group * n_channels, n_channels);
        fixture_ok(gpu_label_query(fixture_gpu(), NULL, &a));
        fixture_wait();
        for (uint32_t i = 0; i < rows * heads; i++)
                ck_assert(memcmp(to + i, expected + i, sizeof *to) == 0);
        return to;
}

START_TEST(labels_of_queries_are_equal) {
        static const uint32_t channels[] = {1, 3, 32, 63, 256};

        for (size_t c = 0; c < ARRAY_SIZE(channels); c++)
                for (enum kvd_number type = KVD_NUMBER_F32; type <= KVD_NUMBER_BF16; type++) {
                        make_queries(3, 1 + (uint32_t)c, channels[c], type, true);
                        buffers_free();
                }
}
END_TEST

/* ---- scores ---- */

static void score_case(uint32_t n_channels, uint32_t group, uint32_t block_tokens, size_t offset) {
        size_t bytes = kvd_label_bytes(n_channels), ld = 75;
        struct pool labels = make_pool(ALIGN_UP(offset + HEADS * block_tokens * bytes, 4), 7);
        struct kvd_label_query *queries = make_queries(N, group, n_channels, KVD_NUMBER_F32, false);
        float *to = random_floats(N * HEADS * group * ld), *expected = copy_floats(to, N * HEADS * group * ld);
        struct gpu_label_scores a = {.spans = spans(),
                                     .labels = slots(&labels, block_tokens, offset, block_tokens * bytes, 0),
                                     .n_channels = n_channels, .kv_heads = HEADS, .group = group,
                                     .queries = address_of(queries), .to = address_of(to), .ld = ld};

        for (size_t i = 0; i < labels.bytes / 2; i++) /* no halves that are not finite */
                labels.at[2 * i + 1] &= 0xbb;
        for (uint32_t s = 0; s < N; s++) {
                const uint8_t *blocks[BLOCKS];

                for (uint32_t b = 0; b < BLOCKS; b++)
                        blocks[b] = host_slot(&labels, &a.labels, s, 0, b * block_tokens, bytes);
                for (uint32_t b = 0; b < BLOCKS; b++)
                        blocks[b] = blocks[b] ? blocks[b] - offset : NULL;
                for (uint32_t h = 0; h < HEADS; h++)
                        reference->scores(expected + (s * HEADS + h) * group * ld, ld, blocks,
                                          offset + h * block_tokens * bytes, block_tokens, n_channels,
                                          queries + (s * HEADS + h) * group, group, froms[s], counts[s]);
        }
        fixture_ok(gpu_label_scores(fixture_gpu(), NULL, &a));
        fixture_wait();
        assert_same_bits(expected, to, N * HEADS * group * ld, "score");
        buffers_free();
}

START_TEST(scores_are_equal) {
        static const uint32_t channels[] = {1, 7, 31, 32, 33, 64, 256};

        for (size_t c = 0; c < ARRAY_SIZE(channels); c++)
                for (uint32_t group = 1; group <= 20; group += 1 + group / 2)
                        score_case(channels[c], group, group % 3 ? 16 : 5, group % 2 ? 64 : 33);
}
END_TEST

static void aggregate_case(uint32_t most, uint32_t group, bool largest) {
        uint32_t n[N] = {most, most / 2, 1};
        size_t ld = most + 3;
        float *scores = random_floats(N * HEADS * group * ld), *scratch;
        float *to = buffer(N * HEADS * ld * sizeof *to), *expected = buffer(N * HEADS * ld * sizeof *to);
        struct gpu_aggregate a = {.spans = {N, most, 0, address_of(words_of(n, N))}, .kv_heads = HEADS,
                                  .group = group, .largest = largest, .scale = 0.7f, .scores = address_of(scores),
                                  .to = address_of(to), .ld = ld, .ld_to = ld};

        for (size_t i = 0; i < N * HEADS * group * ld; i++)
                scores[i] = i % ld % 50 - 1 < 6 ? -INFINITY : scores[i] * 9.0f;
        a.workspace_bytes = gpu_aggregate_workspace(&a);
        a.workspace = address_of(buffer(ALIGN_UP(a.workspace_bytes, 256)));
        fixture_ok(gpu_aggregate(fixture_gpu(), NULL, &a));
        fixture_wait();
        scratch = copy_floats(scores, N * HEADS * group * ld);
        for (uint32_t row = 0; row < N * HEADS; row++) {
                reference->aggregate(expected + row * ld, scratch + row * group * ld, ld, n[row / HEADS], group,
                                     a.scale, largest ? KVD_AGGREGATE_MAX : KVD_AGGREGATE_SUM);
                for (uint32_t i = 0; i < n[row / HEADS]; i++) {
                        float got = to[row * ld + i], want = expected[row * ld + i];

                        if (!(got == want || fabs((double)got - (double)want) <= 1e-5 * fabs((double)want) + 1e-9))
                                ck_abort_msg("aggregate %u of %u: %g, expected %g", i, most, (double)got, (double)want);
                }
        }
        buffers_free();
}

START_TEST(aggregates_agree) {
        for (uint32_t group = 1; group <= 9; group += 4)
                for (uint32_t most = 2; most < 10000; most = most * 7 + 3)
                        for (int largest = 0; largest < 2; largest++)
                                aggregate_case(most, group, largest);
}
END_TEST

/* ---- the top ---- */

enum { MIXED, TIED, TOGETHER, SAME, NOTHING, FEW, SIGNED_ZEROS, FORMS };

static float score_for(int form, uint32_t i, uint32_t n) {
        float x = (float)((double)random_u32() / 2147483648.0 - 1.0);

        switch (form) {
        case MIXED:
                return i % 41 == 3 ? NAN : i % 43 == 5 ? -INFINITY : i % 1001 == 1000 ? INFINITY : x * x * x;
        case TIED:
                return (float)(int)(x * 5.0f);
        case TOGETHER: /* where the sample does not look, or in one tile */
                return i > n / 2 && i < n / 2 + 3000 ? 2.0f + x : x;
        case SAME:
                return -3.5f;
        case NOTHING:
                return i % 2 ? NAN : -INFINITY;
        case FEW:
                return i % 500 == 77 ? x : -INFINITY;
        default:
                return i % 3 ? 0.0f : i % 2 ? -0.0f : -1.0f;
        }
}

static void top_case(uint32_t most, uint32_t z, int form) {
        uint32_t n[N] = {most, most - most / 3, most > 50 ? 50 : 0};
        size_t ld = most + 1, rows = N * HEADS;
        float *scores = buffer(rows * ld * sizeof *scores);
        uint32_t *to = buffer(rows * (z + 2) * sizeof *to), *found = buffer(rows * sizeof *found);
        uint32_t *expected = buffer(most * sizeof *expected), *scratch = buffer(3 * most * sizeof *scratch);
        struct gpu_top a = {.spans = {N, most, address_of(words_of(froms, N)), address_of(words_of(n, N))},
                            .rows = HEADS, .z = z, .scores = address_of(scores), .ld = ld, .to = address_of(to),
                            .found = address_of(found), .ld_to = z + 2};
        uint8_t *workspace;

        for (size_t i = 0; i < rows * ld; i++)
                scores[i] = score_for(form, (uint32_t)(i % ld), most);
        memset(to, 0xab, rows * (z + 2) * sizeof *to);
        a.workspace_bytes = gpu_top_workspace(&a);
        workspace = buffer(a.workspace_bytes);
        memset(workspace, 0xcd, a.workspace_bytes);
        a.workspace = address_of(workspace);
        fixture_ok(gpu_top(fixture_gpu(), NULL, &a));
        fixture_wait();
        for (uint32_t row = 0; row < rows; row++) {
                uint32_t m = reference->top(expected, scores + row * ld, n[row / HEADS], z, froms[row / HEADS],
                                            scratch);

                if (found[row] != m || memcmp(to + row * (z + 2), expected, m * sizeof *to) != 0)
                        ck_abort_msg("the %u largest of %u, form %d: %u, expected %u", z, n[row / HEADS], form,
                                     found[row], m);
                for (uint32_t i = m; i < z + 2; i++)
                        ck_assert_uint_eq(to[row * (z + 2) + i], 0xabababab);
        }
        buffers_free();
}

START_TEST(tops_are_equal) {
        static const uint32_t sizes[] = {1, 31, 512, 513, 5000, 17000, 40000};

        fixture_seed((uint64_t)_i);
        for (size_t i = 0; i < ARRAY_SIZE(sizes); i++)
                for (int form = 0; form < FORMS; form++) {
                        top_case(sizes[i], 1 + sizes[i] / 40, form);
                        if (i < 4 || form == MIXED || form == TIED)
                                top_case(sizes[i], sizes[i] / 2 + 1, form);
                }
        top_case(40000, 6000, TOGETHER); /* sampled, and a tile has no room */
        top_case(100, 300, MIXED);
}
END_TEST

/* ---- sets and calibration ---- */

START_TEST(overlaps_are_equal) {
        for (uint32_t words = 1; words < 400; words = words * 3 + 1) {
                uint32_t rows = 21, *to = buffer(rows * sizeof *to), *expected = buffer(rows * sizeof *to);
                uint64_t *a = buffer(rows * words * sizeof *a), *b = buffer(rows * words * sizeof *b);
                struct gpu_overlap o = {address_of(to), address_of(a), address_of(b), rows, words};

                for (uint32_t i = 0; i < rows * words; i++) {
                        a[i] = (uint64_t)random_u32() << 32 | random_u32();
                        b[i] = (uint64_t)random_u32() << 32 | random_u32();
                }
                reference->overlap(expected, a, b, rows, words);
                fixture_ok(gpu_overlap(fixture_gpu(), NULL, &o));
                fixture_wait();
                ck_assert(memcmp(to, expected, rows * sizeof *to) == 0);
                buffers_free();
        }
}
END_TEST

static void weigh_case(uint32_t dim, uint32_t group, enum kvd_number type) {
        enum { TOKENS = 61, PER_BLOCK = 7 };
        size_t size = type == KVD_NUMBER_F32 ? 4 : 2, row = dim * size;
        struct pool keys = make_pool(ALIGN_UP(HEADS * PER_BLOCK * row, 4), 5);
        float *weights = random_floats(HEADS * dim), *expected = copy_floats(weights, HEADS * dim);
        float *q = random_floats(TOKENS * HEADS * group * dim);
        struct gpu_weigh a = {.keys = slots(&keys, PER_BLOCK, 0, PER_BLOCK * row, row), .number = type, .dim = dim,
                              .kv_heads = HEADS, .group = group, .n = TOKENS, .q_number = KVD_NUMBER_F32,
                              .q = address_of(q), .q_row = HEADS * group * dim, .q_head = dim,
                              .weights = address_of(weights)};

        for (size_t i = 0; i < keys.bytes / size; i++)
                put_number(keys.at + i * size, (float)((double)random_u32() / 2147483648.0 - 1.0), type);
        for (uint32_t h = 0; h < HEADS; h++)
                for (uint32_t i = 0; i < TOKENS; i++) {
                        const uint8_t *key = host_slot(&keys, &a.keys, 0, h, i, row);

                        if (key)
                                reference->weigh(expected + h * dim, q + (i * HEADS + h) * group * dim, 0, group, key,
                                                 dim, type, 1, dim);
                }
        fixture_ok(gpu_weigh(fixture_gpu(), NULL, &a));
        fixture_wait();
        for (uint32_t i = 0; i < HEADS * dim; i++)
                ck_assert_double_le(fabs((double)weights[i] - (double)expected[i]), 1e-5 * (1.0 + (double)expected[i]));
        buffers_free();
}

START_TEST(calibration_agrees) {
        for (enum kvd_number type = KVD_NUMBER_F32; type <= KVD_NUMBER_BF16; type++)
                for (uint32_t dim = 1; dim <= 128; dim = dim * 5 + 1)
                        weigh_case(dim, 1 + dim % 3, type);
}
END_TEST

START_TEST(wrong_arguments_are_refused) {
        struct gpu *gpu = fixture_gpu();
        uint32_t n = 5;
        struct gpu_top top = {.spans = {1, 5, 0, 256}, .rows = 1, .z = 2, .scores = 256, .ld = 5, .to = 256,
                              .found = 256, .ld_to = 2};
        struct gpu_aggregate aggregate = {.spans = {1, n, 0, 256}, .kv_heads = 1, .group = 200, .scale = 1.0f,
                                          .scores = 256, .to = 256, .ld = n, .ld_to = n};
        struct gpu_label label = {.spans = {1, n, 0, 256}, .number = 1, .kv_heads = 1,
                                  .channels = {256, 0, 257}};
        struct gpu_label_scores scores = {.spans = {1, n, 0, 256}, .n_channels = 32, .kv_heads = 1, .group = 1,
                                          .queries = 256, .to = 256, .ld = 4,
                                          .labels = {.blocks.ids = 256, .block_tokens = 16}};
        struct gpu_overlap overlap = {.to = 256, .a = 256, .b = 260, .rows = 1, .words = 1};

        ck_assert_int_eq(gpu_top(gpu, NULL, &top), -ENOBUFS);
        top.z = 3;
        ck_assert_int_eq(gpu_top(gpu, NULL, &top), -EINVAL);
        ck_assert_int_eq(gpu_aggregate(gpu, NULL, &aggregate), -EINVAL);
        ck_assert_int_eq(gpu_label(gpu, NULL, &label), -EINVAL);
        ck_assert_int_eq(gpu_label_scores(gpu, NULL, &scores), -EINVAL);
        ck_assert_int_eq(gpu_overlap(gpu, NULL, &overlap), -EINVAL);
}
END_TEST

int main(void) {
        const struct fixture_test tests[] = {
                {labels_are_equal, -1},     {labels_of_queries_are_equal, -1}, {scores_are_equal, -1},
                {aggregates_agree, -1},     {tops_are_equal, 3},               {overlaps_are_equal, -1},
                {calibration_agrees, -1},   {wrong_arguments_are_refused, -1},
        };

        return fixture_main("cuda: hshare", 100, tests, ARRAY_SIZE(tests));
}
