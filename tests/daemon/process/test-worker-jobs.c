/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A worker's results, and the data that it writes, compared with the formulas of each method in
 * double precision.
 */

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

#include "ipc/base/format.h"
#include "ipc/base/sequence.h"
#include "ipc/base/util.h"
#include "kernels/ops.h"
#include "tests/daemon/process/owner.h"
#include "tests/lib/suite.h"

static struct owner o;

static const struct kvd_shape geometries[] = {
        {.layers = 2,
         .kv_heads = 3,
         .head_dim = 40,
         .dtype = KVD_F32,
         .order = KVD_HND,
         .vocab = 1000},
        {.layers = 4,
         .kv_heads = 2,
         .head_dim = 17,
         .dtype = KVD_BF16,
         .order = KVD_NHD,
         .vocab = 1000,
         .block_tokens = 5,
         .layer_groups = 2,
         .state_width = 9},
        {.layers = 3,
         .kv_heads = 1,
         .head_dim = 64,
         .dtype = KVD_F16,
         .order = KVD_NHD,
         .vocab = 1000},
        {.layers = 2,
         .kv_heads = 2,
         .head_dim = 80,
         .dtype = KVD_Q8,
         .order = KVD_NHD,
         .vocab = 1000},
        {.layers = 2,
         .kv_heads = 2,
         .head_dim = 66,
         .dtype = KVD_Q4,
         .order = KVD_HND,
         .vocab = 1000,
         .block_tokens = 5},
        {.layers = 2,
         .kv_heads = 2,
         .head_dim = 33,
         .dtype = KVD_E4M3,
         .order = KVD_HND,
         .vocab = 1000,
         .block_tokens = 5},
};
#define N_GEOMETRIES ((int)ARRAY_SIZE(geometries))

static void start(int which, uint32_t n_blocks) {
        owner_start(&o, &geometries[which], n_blocks);
        for (uint32_t i = 0; i < n_blocks; i++)
                owner_fill(&o, i, i + 1);
}

static struct owner_job *new_job(uint32_t kind, uint32_t n_items) {
        static struct owner_job job;

        job = (struct owner_job){.kind = kind, .n_items = n_items};
        for (uint32_t i = 0; i < n_items; i++)
                job.items[i] = owner_item(&o, i);
        return &job;
}

static void set(enum kvd_setting which, double value) {
        kvd_setting_put(o.ix->settings, which, value);
}

#define NEAR(a, b, tolerance) \
        ck_assert_msg(fabs((double)(a) - (double)(b)) <= (tolerance), "%g, not %g", (double)(a), \
                      (double)(b))

/* ---- SUMMARISE ------------------------------------------------------------------------------- */

static double norm_of_key(const uint8_t *block, uint32_t l, uint32_t h, uint32_t t) {
        double sum = 0;

        for (uint32_t d = 0; d < o.g.head_dim; d++)
                sum += pow(owner_get(&o, block, l, 0, h, t, d), 2);
        return sqrt(sum);
}

static void check_norms(const uint8_t *row, const uint8_t *block, uint32_t l, uint32_t n_tokens) {
        const float *norms = (const float *)(row + o.layout.norms_off) + 2 * l;

        for (int plane = 0; plane < 2; plane++) {
                double sum = 0;

                for (uint32_t h = 0; h < o.g.kv_heads; h++)
                        for (uint32_t t = 0; t < n_tokens; t++)
                                for (uint32_t d = 0; d < o.g.head_dim; d++)
                                        sum += pow(owner_get(&o, block, l, plane, h, t, d), 2);
                NEAR(norms[plane], sqrt(sum), 1e-5 * sqrt(sum));
        }
}

static void check_anchor(const uint8_t *row, const uint8_t *block, uint32_t l, uint32_t h,
                         uint32_t n_tokens) {
        const float *anchor = (const float *)(row + o.layout.anchors_off) +
                              (l * o.g.kv_heads + h) * o.g.head_dim;

        for (uint32_t d = 0; d < o.g.head_dim; d++) {
                double sum = 0;

                for (uint32_t t = 0; t < n_tokens; t++)
                        sum += owner_get(&o, block, l, 0, h, t, d) / norm_of_key(block, l, h, t);
                NEAR(anchor[d], sum, 1e-5 * n_tokens);
        }
}

static float half(const uint8_t *at) {
        uint16_t bits;
        float x;

        memcpy(&bits, at, sizeof bits);
        kvd_ops_pick("scalar")->widen(&x, &bits, 1, KVD_NUMBER_F16);
        return x;
}

/*
 * Four bits per channel: the error is at most a 30th of the key's range, plus that of rounding
 * minimum and step to f16.
 */
static void check_label(const uint8_t *label, const uint16_t *channel, const uint8_t *block,
                        uint32_t l, uint32_t h, uint32_t t) {
        uint32_t n = o.layout.channels;
        double least = half(label + (n + 1) / 2), step = half(label + (n + 1) / 2 + 2);
        double low = INFINITY, high = -INFINITY;

        for (uint32_t c = 0; c < n; c++) {
                low = MIN(low, owner_get(&o, block, l, 0, h, t, channel[c]));
                high = MAX(high, owner_get(&o, block, l, 0, h, t, channel[c]));
        }
        for (uint32_t c = 0; c < n; c++) {
                uint32_t code = label[c / 2] >> (c % 2 * 4) & 15;

                NEAR(least + code * step, owner_get(&o, block, l, 0, h, t, channel[c]),
                     (high - low) / 30 + 0.002 * (fabs(low) + fabs(high)));
        }
}

static void check_labels(const uint8_t *row, const uint8_t *block, uint32_t l, uint32_t h,
                         uint32_t n_tokens) {
        const uint16_t *channel = (const uint16_t *)o.summaries +
                                  (l * o.g.kv_heads + h) * o.layout.channels;
        const uint8_t *label = row + o.layout.labels_off +
                               (size_t)(l * o.g.kv_heads + h) * o.g.block_tokens *
                                       o.layout.label_bytes;

        for (uint32_t t = 0; t < n_tokens; t++)
                check_label(label + t * o.layout.label_bytes, channel, block, l, h, t);
        for (size_t i = n_tokens * o.layout.label_bytes;
             i < (size_t)o.g.block_tokens * o.layout.label_bytes; i++)
                ck_assert_uint_eq(label[i], 0);
}

/* The channels must be those of the largest mean |k|, in ascending order. */
static void check_channels(uint32_t l, uint32_t h, uint32_t n_blocks, uint32_t last_tokens) {
        const uint16_t *channel = (const uint16_t *)o.summaries +
                                  (l * o.g.kv_heads + h) * o.layout.channels;
        double weight[256] = {0}, least = INFINITY, most = 0;
        bool chosen[256] = {false};

        for (uint32_t b = 0; b < n_blocks; b++)
                for (uint32_t t = 0; t < (b + 1 < n_blocks ? o.g.block_tokens : last_tokens); t++)
                        for (uint32_t d = 0; d < o.g.head_dim; d++)
                                weight[d] += fabs(owner_get(&o, owner_block(&o, b), l, 0, h, t, d));
        for (uint32_t c = 0; c < o.layout.channels; c++) {
                ck_assert(channel[c] < o.g.head_dim && (c == 0 || channel[c] > channel[c - 1]));
                chosen[channel[c]] = true;
                least = MIN(least, weight[channel[c]]);
        }
        for (uint32_t d = 0; d < o.g.head_dim; d++)
                most = chosen[d] ? most : MAX(most, weight[d]);
        ck_assert_msg(least >= most * (1 - 1e-5),
                      "a channel of weight %g was chosen, and not one of %g", least, most);
}

START_TEST(summaries_are_what_they_should_be) {
        const uint32_t n = 4, part = 3;
        struct owner_job *job;

        start(_i, n);
        job = new_job(KVD_JOB_SUMMARISE, n);
        job->items[n - 1].n_tokens = part;
        ck_assert_uint_eq(owner_do(&o, job), 0);
        ck_assert_uint_eq(o.result_size, 0);
        for (uint32_t b = 0; b < n; b++) {
                const uint8_t *row = kvd_summary_row(&o.layout, o.summaries, b),
                              *block = owner_block(&o, b);
                uint32_t tokens = b + 1 < n ? o.g.block_tokens : part;

                ck_assert_uint_eq(*(const uint64_t *)row, UINT64_C(7) << 32 | KVD_SUMMARY_MADE);
                for (uint32_t l = 0; l < o.layout.layers; l++) {
                        check_norms(row, block, l, tokens);
                        for (uint32_t h = 0; h < o.g.kv_heads; h++) {
                                check_anchor(row, block, l, h, tokens);
                                check_labels(row, block, l, h, tokens);
                                check_channels(l, h, n, part);
                        }
                }
        }
        owner_stop(&o);
}
END_TEST

/* A later job does not choose channels again, not even after a worker died while it chose. */
START_TEST(label_channels_stay) {
        size_t bytes;
        uint16_t before[1024];

        start(0, 8);
        bytes = (size_t)o.layout.layers * o.g.kv_heads * o.layout.channels * sizeof(uint16_t);
        ck_assert_uint_eq(owner_do(&o, new_job(KVD_JOB_SUMMARISE, 1)), 0);
        memcpy(before, o.summaries, bytes);
        ck_assert_uint_eq(owner_do(&o, new_job(KVD_JOB_SUMMARISE, 8)), 0);
        ck_assert_mem_eq(before, o.summaries, bytes);
        /* the first head's last channel was not written */
        ((uint16_t *)o.summaries)[o.layout.channels - 1] = 0;
        ck_assert_uint_eq(owner_do(&o, new_job(KVD_JOB_SUMMARISE, 1)), 0);
        ck_assert_mem_eq(before, o.summaries, bytes);
        owner_stop(&o);
}
END_TEST

/* Two jobs; the first chooses channels. One block is of another generation, one has no row. */
static void summarise_twice(int which, uint8_t **ret) {
        struct owner_job *job;

        owner_log_begin();
        start(which, 8);
        for (uint32_t more = 0; more < 2; more++) {
                job = new_job(KVD_JOB_SUMMARISE, 7 + more);
                job->items[1].ref = kvd_ref_make(1, kvd_ref_generation(owner_ref(1)) + 1);
                job->items[2].row = UINT32_MAX;
                job->items[3].row = o.ix->capacity + 3;
                job->items[4].n_tokens = 0;
                job->items[6].n_tokens = 3 + more;
                ck_assert_uint_eq(owner_do(&o, job), 0);
        }
        *ret = malloc(o.layout.size);
        ck_assert_ptr_nonnull(*ret);
        memcpy(*ret, o.summaries, o.layout.size);
        owner_stop(&o);
}

/* By kernels on the GPU, and then on the CPU, as the driver refuses the kernels. */
START_TEST(kernels_make_the_same_bits) {
        bool kernels = !getenv("FAKECUDA_FAIL");
        uint8_t *by_kernels, *staged;

        summarise_twice(_i, &by_kernels);
        ck_assert_uint_eq(owner_calls(&o, "cuLaunch"), kernels ? 2 : 0);
        ck_assert_uint_eq(owner_calls(&o, "cuMemcpyDtoH"), kernels ? 6 + 1 + 1 : 6 + 7);
        setenv("FAKECUDA_FAIL", "cuLibraryLoadData:1=209", 1);
        owner_log_end();
        summarise_twice(_i, &staged);
        ck_assert_uint_eq(owner_calls(&o, "cuLaunch"), 0);
        ck_assert_uint_eq(owner_calls(&o, "cuMemcpyDtoH"), 6 + 7);
        ck_assert_mem_eq(by_kernels, staged, o.layout.size);
        owner_log_end();
        free(by_kernels);
        free(staged);
}
END_TEST

/*
 * The worker reports the time of its kernels, so that the daemon can make it rest, but no other
 * time.
 */
START_TEST(kernels_are_busy) {
        bool kernels = !getenv("FAKECUDA_FAIL");
        uint32_t launches;

        setenv("FAKECUDA_SLOW", "kernel:20,copy:20", 1);
        owner_log_begin();
        start(_i, 8);
        ck_assert_uint_eq(owner_do(&o, new_job(KVD_JOB_SUMMARISE, 7)), 0);
        launches = owner_calls(&o, "cuLaunch");
        ck_assert_uint_eq(owner_do(&o, new_job(KVD_JOB_SUMMARISE, 8)), 0);
        launches = owner_calls(&o, "cuLaunch") - launches;
        ck_assert_uint_eq(launches != 0, kernels);
        ck_assert_uint_ge(o.busy_us, launches * 20000);
        if (!kernels)
                ck_assert_uint_eq(o.busy_us, 0);
        owner_stop(&o);
        owner_log_end();
        unsetenv("FAKECUDA_SLOW");
}
END_TEST

/* More dimensions than the kernels support. */
START_TEST(unsupported_shapes_are_staged) {
        static const struct kvd_shape wide = {.layers = 1,
                                              .kv_heads = 2,
                                              .head_dim = 264,
                                              .dtype = KVD_F16,
                                              .order = KVD_HND,
                                              .vocab = 1000};
        const uint8_t *row;

        owner_log_begin();
        owner_start(&o, &wide, 4);
        for (uint32_t i = 0; i < 4; i++)
                owner_fill(&o, i, i + 1);
        for (uint32_t n = 3; n <= 4; n++)
                ck_assert_uint_eq(owner_do(&o, new_job(KVD_JOB_SUMMARISE, n)), 0);
        ck_assert_uint_eq(owner_calls(&o, "cuLaunch"), 0);
        ck_assert_uint_eq(o.busy_us, 0);
        for (uint32_t b = 0; b < 4; b++) {
                row = kvd_summary_row(&o.layout, o.summaries, b);
                ck_assert_uint_eq(*(const uint64_t *)row, UINT64_C(7) << 32 | KVD_SUMMARY_MADE);
                check_norms(row, owner_block(&o, b), 0, o.g.block_tokens);
                check_anchor(row, owner_block(&o, b), 0, 1, o.g.block_tokens);
                check_labels(row, owner_block(&o, b), 0, 1, o.g.block_tokens);
        }
        owner_stop(&o);
        owner_log_end();
}
END_TEST

/* ---- SCORE ----------------------------------------------------------------------------------- */

static void expected_anchor(uint32_t l, uint32_t h, uint32_t n_blocks, double *ret) {
        memset(ret, 0, o.g.head_dim * sizeof *ret);
        for (uint32_t b = 0; b < n_blocks; b++)
                for (uint32_t t = 0; t < o.g.block_tokens; t++)
                        for (uint32_t d = 0; d < o.g.head_dim; d++)
                                ret[d] += owner_get(&o, owner_block(&o, b), l, 0, h, t, d) /
                                          norm_of_key(owner_block(&o, b), l, h, t);
}

static double expected_score(uint32_t block, uint32_t l, uint32_t h, const double *anchor) {
        double best = -2, length = 0;

        for (uint32_t d = 0; d < o.g.head_dim; d++)
                length += anchor[d] * anchor[d];
        for (uint32_t t = 0; t < o.g.block_tokens; t++) {
                double dot = 0;

                for (uint32_t d = 0; d < o.g.head_dim; d++)
                        dot += anchor[d] * owner_get(&o, owner_block(&o, block), l, 0, h, t, d);
                best = MAX(best,
                           -dot / sqrt(length) / norm_of_key(owner_block(&o, block), l, h, t));
        }
        return best;
}

/* Some blocks have anchors in their summaries, others have no summaries. */
START_TEST(scores_are_keydiffs) {
        const uint32_t n = 6;
        double anchor[256], sum[6] = {0};

        start(_i, n);
        ck_assert_uint_eq(owner_do(&o, new_job(KVD_JOB_SUMMARISE, 3)), 0);
        ck_assert_uint_eq(owner_do(&o, new_job(KVD_JOB_SCORE, n)), 0);
        ck_assert_uint_eq(o.result_size, n * sizeof(float));
        for (uint32_t l = 0; l < o.layout.layers; l++)
                for (uint32_t h = 0; h < o.g.kv_heads; h++) {
                        expected_anchor(l, h, n, anchor);
                        for (uint32_t b = 0; b < n; b++)
                                sum[b] += expected_score(b, l, h, anchor);
                }
        for (uint32_t b = 0; b < n; b++)
                NEAR(((float *)o.result)[b], (1 + sum[b] / (o.layout.layers * o.g.kv_heads)) / 2,
                     1e-5);
        owner_stop(&o);
}
END_TEST

/* ---- COMPACT --------------------------------------------------------------------------------- */

#define SOURCES 5u

struct token {
        double score;
        uint32_t block, slot;
};

static int by_score(const void *a, const void *b) {
        double x = ((const struct token *)a)->score, y = ((const struct token *)b)->score;

        return x < y ? 1 : x > y ? -1 : 0;
}

static int by_place(const void *a, const void *b) {
        const struct token *x = a, *y = b;

        return x->block != y->block ? (x->block < y->block ? -1 : 1) :
               x->slot < y->slot    ? -1 :
                                      x->slot > y->slot;
}

static uint32_t source_tokens(uint32_t block) {
        return block == 1 ? o.g.block_tokens - 2 : o.g.block_tokens; /* one that is not full */
}

static void add_directions(double *anchor, uint32_t block, uint32_t n, uint32_t l, uint32_t h) {
        for (uint32_t t = 0; t < n; t++)
                for (uint32_t d = 0; d < o.g.head_dim; d++)
                        anchor[d] += owner_get(&o, owner_block(&o, block), l, 0, h, t, d) /
                                     norm_of_key(owner_block(&o, block), l, h, t);
}

static double score_of(uint32_t block, uint32_t t, uint32_t l, uint32_t h, const double *anchor) {
        double dot = 0;

        for (uint32_t d = 0; d < o.g.head_dim; d++)
                dot += anchor[d] * owner_get(&o, owner_block(&o, block), l, 0, h, t, d);
        return -dot / norm_of_key(owner_block(&o, block), l, h, t);
}

/* Chooses the `keep` tokens of highest score, in order of position. */
static void choose(struct token *ret, uint32_t keep, uint32_t l, uint32_t h) {
        double anchor[256] = {0};
        uint32_t n = 0;

        for (uint32_t b = 0; b < SOURCES + 2; b++)
                add_directions(anchor, b, b < SOURCES ? source_tokens(b) : o.g.block_tokens, l, h);
        for (uint32_t b = 0; b < SOURCES; b++)
                for (uint32_t t = 0; t < source_tokens(b); t++)
                        ret[n++] = (struct token){score_of(b, t, l, h, anchor), b, t};
        qsort(ret, n, sizeof *ret, by_score);
        qsort(ret, keep, sizeof *ret, by_place);
}

static void check_packed(uint32_t keep, uint32_t first_dest, uint32_t l, uint32_t h) {
        static struct token chosen[SOURCES * 256];

        choose(chosen, keep, l, h);
        for (uint32_t i = 0; i < ALIGN_UP(keep, o.g.block_tokens); i++)
                for (int plane = 0; plane < 2; plane++)
                        for (uint32_t d = 0; d < o.g.head_dim; d++) {
                                double have =
                                        owner_get(&o,
                                                  owner_block(&o,
                                                              first_dest + i / o.g.block_tokens),
                                                  l, plane, h, i % o.g.block_tokens, d);
                                double want = i >= keep ?
                                                      0 :
                                                      owner_get(&o,
                                                                owner_block(&o, chosen[i].block), l,
                                                                plane, h, chosen[i].slot, d);

                                ck_assert_msg(have == want, "layer %u head %u slot %u: %g, not %g",
                                              l, h, i, have, want);
                        }
}

/*
 * Each head's tokens are compared byte for byte. The anchor is that of the whole sequence; some
 * blocks have summaries.
 */
START_TEST(each_head_keeps_the_tokens_of_highest_score) {
        uint32_t bt, keep, n_to;
        struct owner_job *job;

        start(_i / 3, SOURCES + 2 + 4);
        bt = o.g.block_tokens;
        keep = _i % 3 == 0 ? 2 * bt : _i % 3 == 1 ? bt + 1 : 3 * bt - 1;
        n_to = DIV_UP(keep, bt);
        job = new_job(KVD_JOB_SUMMARISE, 4);
        job->items[1].n_tokens = source_tokens(1);
        ck_assert_uint_eq(owner_do(&o, job), 0);
        job = new_job(KVD_JOB_COMPACT, SOURCES + n_to + 2);
        for (uint32_t i = 0; i < SOURCES; i++) {
                job->items[i].flags = KVD_JOB_SOURCE;
                job->items[i].n_tokens = source_tokens(i);
        }
        for (uint32_t i = 0; i < n_to; i++) {
                job->items[SOURCES + i] = owner_item(&o, SOURCES + 2 + i);
                job->items[SOURCES + i].flags = KVD_JOB_DEST;
        }
        for (uint32_t i = 0; i < 2; i++)
                job->items[SOURCES + n_to + i] = owner_item(&o, SOURCES + i);
        job->param[0] = SOURCES;
        job->param[1] = n_to;
        job->param[2] = keep;
        ck_assert_uint_eq(owner_do(&o, job), 0);
        ck_assert_uint_eq(o.result_size, sizeof(uint32_t));
        for (uint32_t l = 0; l < o.layout.layers; l++)
                for (uint32_t h = 0; h < o.g.kv_heads; h++)
                        check_packed(keep, SOURCES + 2, l, h);
        owner_stop(&o);
}
END_TEST

/* ---- COMPACT by the client's scores ---------------------------------------------------------- */

/* The scores of the small ones fill several blocks, whose bounds are inside of rows. */
static const struct kvd_shape scored[] = {
        {.layers = 2,
         .kv_heads = 3,
         .head_dim = 40,
         .dtype = KVD_F32,
         .order = KVD_HND,
         .vocab = 1000},
        {.layers = 4,
         .kv_heads = 2,
         .head_dim = 17,
         .dtype = KVD_BF16,
         .order = KVD_NHD,
         .vocab = 1000,
         .block_tokens = 5,
         .layer_groups = 2,
         .state_width = 9},
        {.layers = 2,
         .kv_heads = 3,
         .head_dim = 4,
         .dtype = KVD_F16,
         .order = KVD_HND,
         .vocab = 1000},
        {.layers = 2,
         .kv_heads = 2,
         .head_dim = 2,
         .dtype = KVD_I8,
         .order = KVD_NHD,
         .vocab = 1000,
         .block_tokens = 5},
        {.layers = 3,
         .kv_heads = 2,
         .head_dim = 1, /* a row is one byte */
         .dtype = KVD_I8,
         .order = KVD_HND,
         .vocab = 1000,
         .block_tokens = 4},
        {.layers = 2,
         .kv_heads = 2,
         .head_dim = 66, /* 41 bytes a row */
         .dtype = KVD_Q4,
         .order = KVD_NHD,
         .vocab = 1000,
         .block_tokens = 5},
};
#define N_SCORED ((int)ARRAY_SIZE(scored))

#define DESTS 3u
#define SCORES (SOURCES + DESTS) /* first block with scores */

static uint32_t all_tokens(void) {
        return SOURCES * o.g.block_tokens - 2;
}

static uint32_t n_score_blocks(void) {
        return (uint32_t)DIV_UP(o.layout.layers * o.g.kv_heads * all_tokens() * sizeof(float),
                                o.ix->block_bytes);
}

/* Number of the i-th block of the scores: they are not in the order of memory. */
static uint32_t score_block(uint32_t i) {
        return SCORES + n_score_blocks() - 1 - i;
}

/* The score of token t, as it lies in the blocks. */
static float *given_score(uint32_t l, uint32_t h, uint32_t t) {
        size_t at = (((size_t)l * o.g.kv_heads + h) * all_tokens() + t) * sizeof(float),
               bytes = o.ix->block_bytes;

        return (float *)(owner_block(&o, score_block((uint32_t)(at / bytes))) + at % bytes);
}

/* Few values, so that many are equal, and all that are not numbers. */
static float some_score(uint64_t *seed) {
        static const float special[] = {NAN, -NAN, INFINITY, -INFINITY, -0.0f, 0.0f};
        uint32_t x;

        *seed = *seed * 6364136223846793005u + 1442695040888963407u;
        x = (uint32_t)(*seed >> 33) % 24;
        return x < ARRAY_SIZE(special) ? special[x] : ((float)x - 14) / 4;
}

/* Sources and scores follow from the seed; the rest is bytes that must not be left over. */
static void fill_scored(uint64_t seed) {
        memset(owner_block(&o, 0), 0xee, (SCORES + n_score_blocks()) * o.ix->block_bytes);
        for (uint32_t i = 0; i < SOURCES * o.ix->block_bytes; i++)
                owner_block(&o, 0)[i] = (uint8_t)(i * 2654435761u >> 13);
        for (uint32_t l = 0; l < o.layout.layers; l++)
                for (uint32_t h = 0; h < o.g.kv_heads; h++)
                        for (uint32_t t = 0; t < all_tokens(); t++)
                                *given_score(l, h, t) = some_score(&seed);
}

/* Of equal scores, the later one is better. NaN is less than all others. */
static bool is_better(float a, uint32_t at, float b, uint32_t than) {
        if (isnan(a) || isnan(b))
                return isnan(a) == isnan(b) ? at > than : isnan(b);
        return a > b || (a == b && at > than);
}

static bool is_kept(uint32_t l, uint32_t h, uint32_t t, uint32_t keep) {
        uint32_t better = 0;

        for (uint32_t i = 0; i < all_tokens(); i++)
                better += is_better(*given_score(l, h, i), i, *given_score(l, h, t), t);
        return better < keep;
}

static size_t token_place(uint32_t l, int plane, uint32_t h, uint32_t slot) {
        uint32_t bt = o.g.block_tokens, heads = o.g.kv_heads;
        uint32_t row = o.g.order == KVD_HND ? h * bt + slot : slot * heads + h;

        return ((size_t)(2 * l + (uint32_t)plane) * heads * bt + row) *
               kvd_format_row(o.g.dtype, o.g.head_dim);
}

static const uint8_t *source_token(uint32_t t, uint32_t l, int plane, uint32_t h) {
        uint32_t block = 0;

        while (t >= source_tokens(block))
                t -= source_tokens(block++);
        return owner_block(&o, block) + token_place(l, plane, h, t);
}

static void check_kept(uint32_t keep, uint32_t l, uint32_t h, uint8_t *want) {
        size_t bytes = kvd_format_row(o.g.dtype, o.g.head_dim);
        uint32_t bt = o.g.block_tokens, n = 0;

        for (uint32_t t = 0; t < all_tokens(); t++) {
                if (!is_kept(l, h, t, keep))
                        continue;
                for (int plane = 0; plane < 2; plane++)
                        memcpy(want + n / bt * o.ix->block_bytes + token_place(l, plane, h, n % bt),
                               source_token(t, l, plane, h), bytes);
                n++;
        }
        ck_assert_uint_eq(n, keep);
}

/* All bytes of the destinations. */
static void check_scored(uint32_t keep) {
        size_t bytes = DIV_UP(keep, o.g.block_tokens) * o.ix->block_bytes;
        uint8_t *want = calloc(1, bytes);

        for (uint32_t l = 0; l < o.layout.layers; l++)
                for (uint32_t h = 0; h < o.g.kv_heads; h++)
                        check_kept(keep, l, h, want);
        ck_assert_mem_eq(owner_block(&o, SOURCES), want, bytes);
        free(want);
}

static struct owner_job *scored_job(uint32_t keep) {
        uint32_t n_to = DIV_UP(keep, o.g.block_tokens), n_scores = n_score_blocks();
        struct owner_job *job = new_job(KVD_JOB_COMPACT, SOURCES + n_to + n_scores);

        for (uint32_t i = 0; i < job->n_items; i++) {
                job->items[i].flags = i < SOURCES        ? KVD_JOB_SOURCE :
                                      i < SOURCES + n_to ? KVD_JOB_DEST :
                                                           KVD_JOB_SCORES;
                job->items[i].n_tokens = i < SOURCES ? source_tokens(i) : 0;
        }
        for (uint32_t i = 0; i < n_scores; i++)
                job->items[SOURCES + n_to + i].ref = owner_ref(score_block(i));
        memcpy(job->param, (uint32_t[]){SOURCES, n_to, keep, n_scores}, 4 * sizeof(uint32_t));
        return job;
}

/* _i: geometry, number of tokens to keep, with or without rests. */
START_TEST(each_head_keeps_the_tokens_that_the_client_scored_highest) {
        uint32_t bt, keep[4];

        owner_start(&o, &scored[_i / 8], SCORES + 8);
        bt = o.g.block_tokens;
        memcpy(keep, (uint32_t[]){1, 2 * bt, bt + 1, 3 * bt - 1}, sizeof keep);
        o.piece = _i % 2;
        fill_scored((uint64_t)_i);
        ck_assert_uint_le(n_score_blocks(), 8);
        ck_assert_uint_eq(owner_do(&o, scored_job(keep[_i / 2 % 4])), 0);
        check_scored(keep[_i / 2 % 4]);
        owner_stop(&o);
}
END_TEST

static void give_keydiffs_scores(uint32_t l, uint32_t h) {
        double anchor[256] = {0};
        uint32_t at = 0;

        for (uint32_t b = 0; b < SOURCES; b++)
                add_directions(anchor, b, source_tokens(b), l, h);
        for (uint32_t b = 0; b < SOURCES; b++)
                for (uint32_t t = 0; t < source_tokens(b); t++)
                        *given_score(l, h, at++) = (float)score_of(b, t, l, h, anchor);
}

START_TEST(keydiffs_scores_from_the_client_give_keydiffs_blocks) {
        uint32_t keep;
        struct owner_job *job;
        size_t bytes;
        uint8_t *own;

        start(_i, SCORES + 8);
        keep = 2 * o.g.block_tokens + 1;
        job = scored_job(keep);
        job->n_items = SOURCES + DESTS;
        job->param[3] = 0;
        ck_assert_uint_eq(owner_do(&o, job), 0);
        bytes = DESTS * o.ix->block_bytes;
        own = malloc(bytes);
        memcpy(own, owner_block(&o, SOURCES), bytes);
        memset(owner_block(&o, SOURCES), 0xee, bytes);
        for (uint32_t l = 0; l < o.layout.layers; l++)
                for (uint32_t h = 0; h < o.g.kv_heads; h++)
                        give_keydiffs_scores(l, h);
        ck_assert_uint_eq(owner_do(&o, scored_job(keep)), 0);
        ck_assert_mem_eq(owner_block(&o, SOURCES), own, bytes);
        free(own);
        owner_stop(&o);
}
END_TEST

START_TEST(scores_that_are_not_there_are_refused) {
        uint32_t keep, last;
        struct owner_job *job;

        owner_start(&o, &scored[4], SCORES + 8);
        fill_scored(1);
        keep = o.g.block_tokens;
        ck_assert_uint_gt(n_score_blocks(), 1);
        job = scored_job(keep);
        job->param[3]--; /* one block too few */
        ck_assert_uint_eq(owner_do(&o, job), EPROTO);
        job = scored_job(keep);
        job->param[3]++; /* beyond the items */
        ck_assert_uint_eq(owner_do(&o, job), EPROTO);
        job->param[3] = UINT32_MAX;
        ck_assert_uint_eq(owner_do(&o, job), EPROTO);
        job = scored_job(keep);
        last = job->n_items - 1;
        job->items[last].ref += UINT64_C(1) << 32; /* another generation */
        ck_assert_uint_eq(owner_do(&o, job), ESTALE);
        job = scored_job(keep);
        job->n_items = SOURCES + 1;
        job->param[3] = 0; /* KeyDiff does not read 8-bit keys */
        ck_assert_uint_eq(owner_do(&o, job), EOPNOTSUPP);
        ck_assert_uint_eq(owner_do(&o, scored_job(keep)), 0);
        check_scored(keep);
        owner_stop(&o);
}
END_TEST

/* The client writes other scores all the time: no byte is written outside of the destinations. */
START_TEST(scores_that_change_meanwhile_harm_nobody) {
        uint8_t *before;
        size_t bytes;
        pid_t client;

        owner_start(&o, &scored[2], SCORES + 8);
        fill_scored(1);
        bytes = SOURCES * o.ix->block_bytes;
        before = malloc(bytes);
        memcpy(before, owner_block(&o, 0), bytes);
        client = fork();
        if (client == 0)
                for (uint64_t seed = 1;; seed++)
                        for (uint32_t t = 0; t < all_tokens(); t++)
                                *given_score(seed / 3 % 2, seed % 3, t) = some_score(&seed);
        for (int i = 0; i < 50; i++) {
                ck_assert_uint_eq(owner_do(&o, scored_job(o.g.block_tokens + 3)), 0);
                ck_assert_mem_eq(owner_block(&o, 0), before, bytes);
                for (size_t k = 0; k < o.ix->block_bytes; k++)
                        ck_assert_uint_eq(owner_block(&o, SOURCES + 2)[k], 0xee);
        }
        ck_assert_int_eq(kill(client, SIGKILL), 0);
        waitpid(client, NULL, 0);
        free(before);
        owner_stop(&o);
}
END_TEST

START_TEST(a_compaction_that_makes_no_sense_is_refused) {
        static const uint32_t params[][3] = {{3, 1, 0},  {3, 1, 49}, {3, 2, 16},         {3, 0, 16},
                                             {3, 9, 48}, {9, 1, 16}, {UINT32_MAX, 1, 16}};
        struct owner_job *job;

        start(0, 8);
        for (uint32_t i = 0; i < ARRAY_SIZE(params); i++) {
                job = new_job(KVD_JOB_COMPACT, 4);
                memcpy(job->param, params[i], sizeof params[i]);
                ck_assert_msg(owner_do(&o, job) == EPROTO, "case %u", i);
        }
        job = new_job(KVD_JOB_COMPACT, 4);
        memcpy(job->param, (uint32_t[]){3, 1, 16}, 3 * sizeof(uint32_t));
        job->items[2].ref++;
        job->items[2].ref += UINT64_C(1) << 32; /* another generation */
        ck_assert_uint_eq(owner_do(&o, job), ESTALE);
        owner_stop(&o);
}
END_TEST

/* ---- COMPARE --------------------------------------------------------------------------------- */

/* Rotates keys as a model with half-split RoPE would, from position p to position p + delta. */
static void copy_rotated(uint32_t to, uint32_t from, int delta, double noise) {
        uint32_t half_dim = o.g.head_dim / 2;
        uint64_t seed = 5;

        for (uint32_t l = 0; l < o.layout.layers; l++)
                for (uint32_t h = 0; h < o.g.kv_heads; h++)
                        for (uint32_t t = 0; t < o.g.block_tokens; t++)
                                for (uint32_t d = 0; d < o.g.head_dim; d++) {
                                        const uint8_t *src = owner_block(&o, from);
                                        double angle = delta * pow(10000, -(double)(d % half_dim) /
                                                                                  half_dim);
                                        double x = owner_get(&o, src, l, 0, h, t, d % half_dim);
                                        double y = owner_get(&o, src, l, 0, h, t,
                                                             d % half_dim + half_dim);
                                        double k = d < half_dim ? x * cos(angle) - y * sin(angle) :
                                                                  y * cos(angle) + x * sin(angle);

                                        double v = owner_get(&o, src, l, 1, h, t, d);

                                        k += noise * owner_random(&seed);
                                        v += noise * owner_random(&seed);
                                        owner_put(&o, owner_block(&o, to), l, 0, h, t, d, k);
                                        owner_put(&o, owner_block(&o, to), l, 1, h, t, d, v);
                                }
}

/*
 * Two blocks per step: step 1 has other words than step 0; step 2 has the words of step 0, and
 * repeats its blocks.
 */
static struct owner_job *steps_job(void) {
        struct owner_job *job = new_job(KVD_JOB_COMPARE, 6);
        uint32_t bt = o.g.block_tokens;

        job->n_steps = 3;
        job->n_tokens = 6 * bt;
        for (uint32_t s = 0; s < 3; s++)
                job->steps[s] = (struct kvd_job_step){2 * s, 2, 2 * s * bt, 2 * bt};
        for (uint32_t i = 0; i < 6 * bt; i++)
                job->tokens[i] = i / (2 * bt) == 1 ? 500 + i : i % (2 * bt);
        for (uint32_t i = 0; i < 6; i++) {
                job->items[i].flags = i < 2 ? KVD_JOB_TARGET : KVD_JOB_SOURCE;
                job->items[i].position = (int32_t)(i < 2 ? 1000 + i * bt : (i - 2) * bt);
                job->items[i].slot = i;
        }
        return job;
}

static double frobenius(const uint8_t *a, const uint8_t *b, uint32_t l, int plane) {
        double sum = 0;

        for (uint32_t h = 0; h < o.g.kv_heads; h++)
                for (uint32_t t = 0; t < o.g.block_tokens; t++)
                        for (uint32_t d = 0; d < o.g.head_dim; d++)
                                sum += pow(owner_get(&o, a, l, plane, h, t, d) -
                                                   (b ? owner_get(&o, b, l, plane, h, t, d) : 0),
                                           2);
        return sqrt(sum);
}

static double expected_relative(uint32_t a, uint32_t b) {
        double sum = 0;

        for (uint32_t l = 0; l < o.layout.layers; l++)
                for (int plane = 0; plane < 2; plane++)
                        sum += frobenius(owner_block(&o, a), owner_block(&o, b), l, plane) / 2 /
                               sqrt(frobenius(owner_block(&o, a), NULL, l, plane) *
                                    frobenius(owner_block(&o, b), NULL, l, plane));
        return sum / o.layout.layers;
}

START_TEST(a_repeated_step_is_found_where_it_is) {
        const struct kvd_match *match = (const void *)o.result;
        struct owner_job *job;

        start(0, 8);
        for (uint32_t i = 0; i < 2; i++) {
                int delta = (int)(1000 - 2 * o.g.block_tokens);

                copy_rotated(i, 4 + i, delta, 0.05);
                copy_rotated(6 + i, 4 + i, delta, 0); /* what the worker should compare with */
        }
        job = steps_job();
        ck_assert_uint_eq(owner_do(&o, job), 0);
        ck_assert_uint_eq(o.result_size, 2 * sizeof *match);
        for (uint32_t i = 0; i < 2; i++) {
                ck_assert_uint_eq(match[i].target, i);
                ck_assert_uint_eq(match[i].source, 4 + i);
                NEAR(match[i].similarity, 1, 1e-6);
                NEAR(match[i].distance, expected_relative(i, 6 + i), 1e-3);
                ck_assert(match[i].distance < 0.2);
        }
        set(KVD_memshare_align, 0); /* the paper's: other positions look different */
        ck_assert_uint_eq(owner_do(&o, job), 0);
        ck_assert_uint_eq(o.result_size, 0);
        owner_stop(&o);
}
END_TEST

START_TEST(unsuitable_blocks_are_not_shared) {
        struct owner_job *job;

        start(0, 8);
        for (uint32_t i = 0; i < 2; i++)
                copy_rotated(i, 4 + i, (int)(1000 - 2 * o.g.block_tokens), 0);
        job = steps_job();
        job->items[0].flags = 0;
        job->items[5].flags = 0;
        ck_assert_uint_eq(owner_do(&o, job), 0);
        ck_assert_uint_eq(o.result_size, 0);
        job = steps_job();
        job->items[4].n_tokens = o.g.block_tokens - 1; /* part filled */
        job->items[5].ref = kvd_ref_make(5, 6);        /* another generation */
        ck_assert_uint_eq(owner_do(&o, job), 0);
        ck_assert_uint_eq(o.result_size, 0);
        job = steps_job();
        set(KVD_memshare_tau_step, 1); /* no similarity exceeds it */
        ck_assert_uint_eq(owner_do(&o, job), 0);
        ck_assert_uint_eq(o.result_size, 0);
        job->steps[2].n_items = 7;
        ck_assert_uint_eq(owner_do(&o, job), EPROTO);
        owner_stop(&o);
}
END_TEST

/* ---- CONFIG ---------------------------------------------------------------------------------- */

/*
 * Layers 0, 1 dense; layer 3 selects like 2, layer 5 like 4; in all of them head 1 is like head 0.
 */
START_TEST(a_configuration_shares_what_is_alike) {
        const struct kvd_shape g = {.layers = 6,
                                    .kv_heads = 2,
                                    .head_dim = 16,
                                    .dtype = KVD_I8,
                                    .vocab = 10};
        const uint32_t queries = 4, words = 9;
        struct owner_job *job;
        uint8_t *bits;

        owner_start(&o, &g, 2);
        bits = owner_block(&o, 0);
        for (uint32_t l = 0; l < 6; l++)
                for (uint32_t h = 0; h < 2; h++)
                        for (uint32_t q = 0; q < queries; q++)
                                for (uint32_t k = 0; k < 40; k++) {
                                        uint32_t token = (l / 2 * 100 + q * 7 + k * 3 +
                                                          (l < 2 ? l * 50 : 0)) %
                                                         576;
                                        size_t row = (l * 2 + h) * queries + q;

                                        bits[row * words * 8 + token / 8] |=
                                                (uint8_t)(1 << token % 8);
                                }
        job = new_job(KVD_JOB_CONFIG, 2);
        memcpy(job->param, (uint32_t[]){6, 2, queries, words, 40}, 5 * sizeof(uint32_t));
        set(KVD_hshare_layer_ratio, 0.5);
        set(KVD_hshare_head_ratio, 0.5);
        for (int algo = 0; algo < 2; algo++) {
                const uint8_t layers[] = {0, 1, 2, 2, 4, 4};

                set(KVD_hshare_algo, algo);
                ck_assert_uint_eq(owner_do(&o, job), 0);
                ck_assert_uint_eq(o.result_size, 6 + 12);
                ck_assert_mem_eq(o.result, layers, 6);
                for (uint32_t l = 0; l < 6; l++) {
                        ck_assert_uint_eq(o.result[6 + 2 * l], 0);
                        ck_assert_uint_eq(o.result[6 + 2 * l + 1], l < 2 ? 1 : 0);
                }
        }
        job->param[3] = 4000; /* more than the blocks hold */
        ck_assert_uint_eq(owner_do(&o, job), EINVAL);
        owner_stop(&o);
}
END_TEST

/* ---- PROFILE --------------------------------------------------------------------------------- */

struct sums {
        double ab, aa, bb;
};

static struct sums product(const uint8_t *a, const uint8_t *b, uint32_t l, int plane, uint32_t t) {
        struct sums s = {0};

        for (uint32_t h = 0; h < o.g.kv_heads; h++)
                for (uint32_t d = 0; d < o.g.head_dim; d++) {
                        double x = owner_get(&o, a, l, plane, h, t, d),
                               y = owner_get(&o, b, l, plane, h, t, d);

                        s.ab += x * y;
                        s.aa += x * x;
                        s.bb += y * y;
                }
        return s;
}

/* In group g, blocks 4 g and 4 g + 1 were computed alone, the next two with their prefix. */
START_TEST(a_sample_is_two_similarities_a_layer) {
        uint32_t groups, n_tokens;
        struct owner_job *job;

        start(_i, 8);
        groups = o.g.layer_groups;
        n_tokens = 2 * o.g.block_tokens - 2;
        job = new_job(KVD_JOB_PROFILE, 4 * groups);
        job->param[0] = n_tokens;
        ck_assert_uint_eq(owner_do(&o, job), 0);
        ck_assert_uint_eq(o.result_size, o.g.layers * 2 * sizeof(float));
        for (uint32_t at = 0; at < o.g.layers; at++) {
                uint32_t group = at / o.layout.layers, l = at % o.layout.layers;
                double mean = 0;
                struct sums all = {0};

                for (uint32_t t = 0; t < n_tokens; t++)
                        for (int plane = 0; plane < 2; plane++) {
                                uint32_t b = 4 * group + t / o.g.block_tokens;
                                struct sums s = product(owner_block(&o, b), owner_block(&o, b + 2),
                                                        l, plane, t % o.g.block_tokens);

                                mean += s.ab / sqrt(s.aa * s.bb) / 2 / n_tokens;
                                all = (struct sums){all.ab + s.ab, all.aa + s.aa, all.bb + s.bb};
                        }
                NEAR(((float *)o.result)[2 * at], mean, 1e-5);
                NEAR(((float *)o.result)[2 * at + 1], all.ab / sqrt(all.aa * all.bb), 1e-5);
        }
        job->param[0] = 2 * o.g.block_tokens + 1;
        ck_assert_uint_eq(owner_do(&o, job), EINVAL);
        owner_stop(&o);
}
END_TEST

/* ---- where the blocks are -------------------------------------------------------------------- */

struct answer {
        uint32_t size, launches, copies; /* from the GPU to the processor */
        uint64_t blocks;                 /* their checksum */
        uint8_t result[sizeof o.result];
};

/* piece: work between two rests; 0: no rests. */
static void answer(struct answer *ret, const struct kvd_shape *g, struct owner_job *(*make)(void),
                   uint64_t piece) {
        owner_log_begin();
        owner_start(&o, g, 10);
        for (uint32_t i = 0; i < 10 && g->dtype != KVD_I8; i++)
                owner_fill(&o, i, i + 1);
        o.piece = piece;
        ck_assert_uint_eq(owner_do(&o, make()), 0);
        ret->size = o.result_size;
        memcpy(ret->result, o.result, o.result_size);
        ret->blocks = XXH3_64bits(o.pool, 10 * o.ix->block_bytes);
        owner_stop(&o);
        ret->launches = owner_calls(&o, "cuLaunch");
        ret->copies = owner_calls(&o, "cuMemcpyDtoH");
        owner_log_end();
}

/* Kernels, kernels with a rest after each launch, and staging for the CPU give the same bits. */
static void same_where_the_blocks_are(const struct kvd_shape *g, struct owner_job *(*make)(void),
                                      uint32_t launches, uint32_t copies, uint32_t staged_copies) {
        static struct answer kernels, pieces, staged;
        bool there = !getenv("FAKECUDA_FAIL");

        answer(&kernels, g, make, 0);
        answer(&pieces, g, make, 1);
        setenv("FAKECUDA_FAIL", "cuLibraryLoadData:1=209", 1);
        answer(&staged, g, make, 0);
        ck_assert_uint_eq(kernels.launches, there ? launches : 0);
        ck_assert_uint_eq(kernels.copies, there ? copies : staged_copies);
        if (there)
                ck_assert_uint_gt(pieces.launches, kernels.launches);
        ck_assert_uint_eq(staged.launches, 0);
        ck_assert_uint_eq(staged.copies, staged_copies);
        ck_assert(kernels.size == staged.size && pieces.size == staged.size);
        ck_assert_mem_eq(kernels.result, staged.result, staged.size);
        ck_assert_mem_eq(pieces.result, staged.result, staged.size);
        ck_assert(kernels.blocks == staged.blocks && pieces.blocks == staged.blocks);
}

static struct owner_job *sample(void) {
        struct owner_job *job = new_job(KVD_JOB_PROFILE, 8);

        job->param[0] = 8 / (2 * o.g.layer_groups) * o.g.block_tokens - 2;
        return job;
}

START_TEST(a_sample_has_the_bits_of_the_processor) {
        same_where_the_blocks_are(&geometries[_i], sample, geometries[_i].layers,
                                  2 * geometries[_i].layers, 8);
}
END_TEST

/* Pairs at several distances, one of them 0; one block is stale, and one is not full. */
static struct owner_job *pairs_job(void) {
        struct owner_job *job = new_job(KVD_JOB_CALIBRATE, 10);

        for (uint32_t i = 0; i < 10; i++)
                job->items[i].position = (int32_t)(i / 2 * 7 * (i % 2));
        job->items[5].ref = kvd_ref_make(5, 6);
        job->items[6].n_tokens--;
        return job;
}

START_TEST(distances_of_pairs_have_the_bits_of_the_processor) {
        same_where_the_blocks_are(&geometries[_i], pairs_job, 2, 1, 9);
}
END_TEST

/* With the kernel's own shared memory, there is not enough, so the CPU does all the work. */
START_TEST(distances_on_a_device_with_less_shared_memory) {
        static struct answer kernels, less;

        answer(&kernels, &geometries[_i], pairs_job, 0);
        setenv("FAKECUDA_SHARED", "100", 1);
        answer(&less, &geometries[_i], pairs_job, 0);
        unsetenv("FAKECUDA_SHARED");
        ck_assert_uint_eq(less.copies, 9u);
        ck_assert_uint_eq(less.size, kernels.size);
        ck_assert_mem_eq(less.result, kernels.result, kernels.size);
}
END_TEST

/* Packs five blocks, one of them not full, into three; two more belong to the same sequence. */
static struct owner_job *packing(void) {
        struct owner_job *job = new_job(KVD_JOB_COMPACT, 10);

        for (uint32_t i = 0; i < 8; i++)
                job->items[i].flags = i < 5 ? KVD_JOB_SOURCE : KVD_JOB_DEST;
        job->items[1].n_tokens -= 2;
        memcpy(job->param, (uint32_t[]){5, 3, 2 * o.g.block_tokens + 2}, 3 * sizeof(uint32_t));
        return job;
}

/* Launches: two runs of keys for the anchor, then scores, then moves of tokens. */
START_TEST(a_compaction_moves_the_bytes_of_the_processor) {
        same_where_the_blocks_are(&geometries[_i], packing, 2 * 2 + 1 + 1, 1, 7);
}
END_TEST

/* As before; the scores are in the last two blocks, of which only the first is needed. */
static struct owner_job *packing_by_scores(void) {
        struct owner_job *job = packing();

        job->items[8].flags = job->items[9].flags = KVD_JOB_SCORES;
        job->param[3] = 2;
        return job;
}

/* Nothing is launched but the moves of tokens. */
START_TEST(given_scores_are_copied_from_the_gpu) {
        same_where_the_blocks_are(&geometries[_i], packing_by_scores, 1, 1, 7);
}
END_TEST

/* ---- on a GPU that an engine uses ------------------------------------------------------------ */

#define OK(call) ck_assert_int_eq(cuda->call, CU_OK)

/* Runs one kernel at a time, for ever. */
static _Noreturn void be_an_engine(_Atomic uint32_t *steps) {
        static const uint32_t fatbin = 0xba55ed50u;
        struct {
                cu_address to;
                uint64_t value, n;
        } none = {0};
        void *parameters[] = {&none};
        const char *why;
        const struct kvd_cuda *cuda = kvd_cuda_load(&why);
        cu_context context;
        cu_library library;
        cu_kernel kernel;
        cu_function f;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        OK(cuInit(0));
        OK(cuDevicePrimaryCtxRetain(&context, 0));
        OK(cuCtxPushCurrent(context));
        OK(cuLibraryLoadData(&library, &fatbin, NULL, NULL, 0, NULL, NULL, 0));
        OK(cuLibraryGetKernel(&kernel, library, "fakecuda_store"));
        OK(cuKernelGetFunction(&f, kernel));
        for (;; ++*steps) {
                OK(cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL));
                OK(cuStreamSynchronize(NULL));
        }
}

/*
 * Without MPS, a GPU ignores priorities, and a worker with many queued launches would keep it for a
 * whole time slice. The worker queues one launch at a time, so the engine gets its turn in between.
 */
START_TEST(an_engine_has_its_turn_between_launches) {
        static struct answer pieces;
        _Atomic uint32_t *steps = mmap(NULL, 4096, PROT_READ | PROT_WRITE,
                                       MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        uint32_t before;
        pid_t engine;

        ck_assert_ptr_ne(steps, MAP_FAILED);
        if (getenv("FAKECUDA_FAIL"))
                return; /* there are no launches */
        setenv("FAKECUDA_SLICE", "100000", 1);
        setenv("FAKECUDA_SLOW", "kernel:20", 1);
        engine = fork();
        if (engine == 0)
                be_an_engine(steps);
        while (*steps == 0)
                usleep(1000);
        before = *steps;
        answer(&pieces, &geometries[1], sample, 1);
        ck_assert_uint_ge(pieces.launches, 8);
        ck_assert_uint_ge(*steps - before, pieces.launches / 2);
        kill(engine, SIGKILL);
        ck_assert_int_eq(waitpid(engine, NULL, 0), engine);
        unsetenv("FAKECUDA_SLICE");
        unsetenv("FAKECUDA_SLOW");
}
END_TEST

/* ---- in pieces ------------------------------------------------------------------------------- */

/* The result has the same bits without rests and with as many rests as possible. */
static void same_in_pieces(const struct owner_job *job, uint32_t rests) {
        static uint8_t whole[sizeof o.result];
        uint32_t size;

        o.piece = 0;
        ck_assert_uint_eq(owner_do(&o, job), 0);
        ck_assert_uint_eq(o.rests, 0);
        size = o.result_size;
        memcpy(whole, o.result, size);
        o.piece = 1;
        ck_assert_uint_eq(owner_do(&o, job), 0);
        ck_assert_uint_ge(o.rests, rests);
        ck_assert_uint_eq(o.result_size, size);
        ck_assert_mem_eq(o.result, whole, size);
}

/* Random bits, in rows that are larger than a block. */
static struct owner_job *random_config(void) {
        const uint32_t params[] = {6, 2, 5, 107, 40};
        struct owner_job *job;
        uint64_t seed = 3;

        for (uint32_t i = 0; i < 10; i++)
                for (uint64_t k = 0; k < o.ix->block_bytes; k++)
                        owner_block(&o, i)[k] = (uint8_t)(owner_random(&seed) * 50);
        job = new_job(KVD_JOB_CONFIG, 10);
        memcpy(job->param, params, sizeof params);
        set(KVD_hshare_layer_ratio, 0.5);
        set(KVD_hshare_head_ratio, 0.5);
        return job;
}

static const struct kvd_shape of_bits = {.layers = 6,
                                         .kv_heads = 2,
                                         .head_dim = 16,
                                         .dtype = KVD_I8,
                                         .vocab = 10};

/* Launches: bits in each row, pairs of heads in six layers, pairs of layers but the dense ones. */
START_TEST(a_configuration_has_the_bits_of_the_processor) {
        same_where_the_blocks_are(&of_bits, random_config, 1 + 6 + 1, 1 + 6 + 1, 10);
}
END_TEST

START_TEST(a_configuration_in_pieces_has_the_same_bits) {
        owner_start(&o, &of_bits, 10);
        for (int algo = 0; algo < 2; algo++) {
                set(KVD_hshare_algo, algo);
                same_in_pieces(random_config(), 6 + 6);
        }
        owner_stop(&o);
}
END_TEST

START_TEST(scores_and_samples_in_pieces_have_the_same_bits) {
        struct owner_job *job;

        start(_i, 8);
        same_in_pieces(new_job(KVD_JOB_SCORE, 8), 8);
        job = new_job(KVD_JOB_PROFILE, 8 / (2 * o.g.layer_groups) * 2 * o.g.layer_groups);
        job->param[0] = 2 * o.g.block_tokens;
        same_in_pieces(job, o.g.layers);
        same_in_pieces(new_job(KVD_JOB_CALIBRATE, 8), 4);
        owner_stop(&o);
}
END_TEST

START_TEST(comparisons_in_pieces_have_the_same_bits) {
        start(0, 8);
        for (uint32_t i = 0; i < 2; i++)
                copy_rotated(i, 4 + i, (int)(1000 - 2 * o.g.block_tokens), 0.05);
        same_in_pieces(steps_job(), 2);
        ck_assert_uint_eq(o.result_size, 2 * sizeof(struct kvd_match));
        owner_stop(&o);
}
END_TEST

/* Another job runs in between, one is cancelled, and one ends because its space is forgotten. */
START_TEST(a_job_that_rests_leaves_room_for_others) {
        struct kvd_msg forget = {.number = KVD_MSG_work_forget, .work_forget.space = 5};
        uint8_t expected[18];
        uint64_t first;

        owner_start(&o, &of_bits, 10);
        ck_assert_uint_eq(owner_do(&o, random_config()), 0);
        memcpy(expected, o.result, sizeof expected);
        o.piece = 1;
        ck_assert_uint_eq(owner_begin(&o, random_config()), 0);
        ck_assert(o.more);
        first = o.jobs++;
        ck_assert_uint_eq(owner_do(&o, random_config()), 0);
        ck_assert_mem_eq(o.result, expected, sizeof expected);
        for (o.more = true; o.more;)
                ck_assert_uint_eq(owner_turn(&o, first, KVD_JOB_GO_ON), 0);
        ck_assert_mem_eq(o.result, expected, sizeof expected);
        ck_assert_uint_eq(owner_turn(&o, first, KVD_JOB_GO_ON), ESTALE);

        o.jobs = 100;
        ck_assert_uint_eq(owner_begin(&o, random_config()), 0);
        ck_assert_uint_eq(owner_turn(&o, 101, KVD_JOB_END), ECANCELED);
        ck_assert_uint_eq(owner_turn(&o, 101, KVD_JOB_GO_ON), ESTALE);
        ck_assert_uint_eq(owner_begin(&o, random_config()), 0);
        ck_assert(o.more);
        ck_assert_uint_eq(owner_ask(&o, forget, NULL, 0), 0);
        ck_assert_uint_eq(owner_turn(&o, 102, KVD_JOB_GO_ON), ESTALE);
        owner_stop(&o);
}
END_TEST

SUITE("worker-jobs", LOOPS(N_GEOMETRIES, summaries_are_what_they_should_be),
      TESTS(label_channels_stay),
      WHEN(getenv("KVD_TEST_BACKEND"), LOOPS(N_GEOMETRIES, kernels_make_the_same_bits),
           TESTS(kernels_are_busy, an_engine_has_its_turn_between_launches,
                 unsupported_shapes_are_staged, a_configuration_has_the_bits_of_the_processor),
           LOOPS(N_GEOMETRIES, a_sample_has_the_bits_of_the_processor,
                 distances_of_pairs_have_the_bits_of_the_processor,
                 distances_on_a_device_with_less_shared_memory,
                 a_compaction_moves_the_bytes_of_the_processor,
                 given_scores_are_copied_from_the_gpu)),
      LOOPS(8 * N_SCORED, each_head_keeps_the_tokens_that_the_client_scored_highest),
      LOOPS(N_GEOMETRIES, keydiffs_scores_from_the_client_give_keydiffs_blocks),
      TESTS(scores_that_are_not_there_are_refused),
      WHEN(!getenv("KVD_TEST_BACKEND"), TESTS(scores_that_change_meanwhile_harm_nobody)),
      LOOPS(N_GEOMETRIES, scores_are_keydiffs),
      LOOPS(3 * N_GEOMETRIES, each_head_keeps_the_tokens_of_highest_score),
      TESTS(a_compaction_that_makes_no_sense_is_refused, a_repeated_step_is_found_where_it_is,
            unsuitable_blocks_are_not_shared, a_configuration_shares_what_is_alike),
      LOOPS(N_GEOMETRIES, a_sample_is_two_similarities_a_layer),
      LOOPS(N_GEOMETRIES, scores_and_samples_in_pieces_have_the_same_bits),
      TESTS(a_configuration_in_pieces_has_the_same_bits, comparisons_in_pieces_have_the_same_bits,
            a_job_that_rests_leaves_room_for_others))
