/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels that kernels.h measures. */
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/attend.h"
#include "kernels/bicache.h"
#include "kernels/block.h"
#include "kernels/hshare.h"
#include "kernels/keydiff.h"
#include "kernels/memshare.h"
#include "kernels/sketch.h"
#include "tests/bench/kernels.h"

#define PLANE ((size_t)KERNEL_BLOCK * KERNEL_DIM) /* elements of a head in a block */
#define ROW_BYTES ((size_t)KERNEL_DIM * 2)

static void moved(struct kernels *k, size_t read, size_t written, double operations_per_number) {
        k->read = read;
        k->written = written;
        k->operations = operations_per_number * (double)(window_bytes(k) / 2);
}

/* ---- KeyDiff --------------------------------------------------------------------------------- */

static struct kvd_key_rows keys_in(const uint8_t **table) {
        return (struct kvd_key_rows){.blocks = table,
                                     .head_stride = PLANE,
                                     .token_stride = KERNEL_DIM,
                                     .per_block = KERNEL_BLOCK,
                                     .heads = KERNEL_HEADS,
                                     .dim = KERNEL_DIM,
                                     .type = KVD_NUMBER_BF16};
}

static void anchor(struct kernels *k) {
        struct kvd_key_rows keys = keys_in(window_table(k));
        uint32_t counts[KERNEL_HEADS] = {0};

        memset(k->anchors, 0, KERNEL_HEADS * KERNEL_DIM * sizeof *k->anchors);
        k->ops->keydiff->anchor(k->anchors, counts, &keys, 0, window_tokens(k), k->scratch);
        moved(k, window_bytes(k), 0, 4);
}

static void score_in(struct kernels *k, const uint8_t **table) {
        struct kvd_key_rows keys = keys_in(table);

        k->ops->keydiff->score(k->scores, window_tokens(k), &keys, 0, window_tokens(k), k->anchors,
                               k->scratch);
        moved(k, window_bytes(k), 0, 4);
}

static void score(struct kernels *k) {
        score_in(k, window_table(k));
}

static void score_shuffled(struct kernels *k) {
        score_in(k, window_in_other_order(k));
}

static uint64_t read_shuffled(const struct kernels *k) {
        uint64_t sum = 0;

        for (uint32_t i = 0; i < window_blocks(k); i++)
                sum += sum_fast(window_in_other_order(k)[i], KERNEL_BLOCK_BYTES);
        return sum;
}

/* ---- blocks ---------------------------------------------------------------------------------- */

/* Chooses about every second token of each head. */
static void every_second(struct kernels *k) {
        for (uint32_t i = 0; i < window_tokens(k) / 2; i++)
                k->indices[i] = 2 * i + i % 2;
}

static void compact(struct kernels *k) {
        uint8_t *dense = window_other(k);
        uint32_t kept = window_tokens(k) / 2;
        struct kvd_slots from = {(uint8_t *const *)window_table(k), 0, ROW_BYTES, KERNEL_BLOCK,
                                 ROW_BYTES};
        struct kvd_slots to = {&dense, 0, ROW_BYTES, kept, ROW_BYTES};

        for (uint32_t h = 0; h < KERNEL_HEADS; h++) {
                from.offset = h * PLANE * 2;
                to.offset = h * kept * ROW_BYTES;
                k->ops->block->compact(&to, &from, k->indices, kept);
        }
        moved(k, window_bytes(k) / 2, window_bytes(k) / 2, 0);
}

static void topk(struct kernels *k) {
        uint32_t n = window_tokens(k);

        for (uint32_t h = 0; h < KERNEL_HEADS; h++)
                k->ops->block->topk(k->indices, k->scores + (size_t)h * n, n, n / 16, true,
                                    (uint32_t *)k->scratch);
        moved(k, (size_t)KERNEL_HEADS * n * sizeof *k->scores, 0, 0);
}

/* ---- sketches -------------------------------------------------------------------------------- */

enum { SKETCH_ROWS = 3, SKETCH_COLUMNS = 1024 };
_Static_assert(KERNEL_CELLS == SKETCH_ROWS * SKETCH_COLUMNS * KERNEL_DIM,
               "the cells are one sketch");

/* 1.5 MiB of cells, which stay in the cache; the vectors are all rows of a window, in order. */
static struct kvd_sketch_part part_of(const struct kernels *k) {
        return (struct kvd_sketch_part){.cells = k->cells,
                                        .stride = KERNEL_DIM,
                                        .rows = SKETCH_ROWS,
                                        .columns = SKETCH_COLUMNS,
                                        .dim = KERNEL_DIM,
                                        .sign = KVD_SKETCH_KEY_SIGN};
}

static void place(struct kernels *k) {
        struct kvd_sketch_hash hash = {KVD_SKETCH_PERMUTATION, SKETCH_ROWS, SKETCH_COLUMNS, 1};

        for (uint32_t i = 0; i < window_rows(k); i++) {
                uint64_t ordinal = i;

                kvd_sketch_place(&hash, &ordinal, 1,
                                 (uint32_t *)k->scratch + (size_t)i * SKETCH_ROWS);
        }
        memset(k->cells, 0, KERNEL_CELLS * sizeof *k->cells);
}

/* Bytes of all vectors' cells, which are floats, while vectors are BF16. */
static size_t cell_bytes(const struct kernels *k) {
        return SKETCH_ROWS * 2 * window_bytes(k);
}

/* Reads all vectors and their cells once; insertion also writes the cells. */
static uint64_t read_cells(const struct kernels *k) {
        const uint32_t *places = (const uint32_t *)k->scratch;
        uint64_t sum = 0;

        for (uint32_t i = 0; i < window_rows(k); i++) {
                sum += sum_fast(window_keys(k) + i * ROW_BYTES, ROW_BYTES);
                for (uint32_t r = 0; r < SKETCH_ROWS; r++, places++) {
                        size_t column = *places & KVD_SKETCH_COLUMN;

                        sum += sum_fast((const uint8_t *)(k->cells + (r * SKETCH_COLUMNS + column) *
                                                                             KERNEL_DIM),
                                        2 * ROW_BYTES);
                }
        }
        return sum;
}

static void insert(struct kernels *k) {
        struct kvd_sketch_part part = part_of(k);
        uint8_t *keys = window_keys(k);
        struct kvd_sketch_vectors x = {&keys, 0, KERNEL_DIM, window_rows(k), KVD_NUMBER_BF16};

        k->ops->sketch->insert(&part, (const uint32_t *)k->scratch, window_rows(k), &x, 1.0f);
        moved(k, window_bytes(k) + cell_bytes(k), cell_bytes(k), 2 * SKETCH_ROWS);
}

static void query(struct kernels *k) {
        struct kvd_sketch_part part = part_of(k);
        uint8_t *found = window_other(k);
        struct kvd_sketch_vectors x = {&found, 0, KERNEL_DIM, window_rows(k), KVD_NUMBER_BF16};

        k->ops->sketch->query(&part, (const uint32_t *)k->scratch, window_rows(k), &x, 1.0f);
        moved(k, cell_bytes(k), window_bytes(k), 4 + SKETCH_ROWS);
}

/* ---- MemShare -------------------------------------------------------------------------------- */

/* Blocks of 8 layers, keys and values: 512 KiB; the smallest window has two. */
static const struct kvd_memshare_shape shape = {.layers = 8,
                                                .heads = KERNEL_HEADS,
                                                .tokens = KERNEL_BLOCK,
                                                .dim = KERNEL_DIM,
                                                .type = KVD_NUMBER_BF16};
#define WHOLE_BLOCK ((size_t)16 * KERNEL_BLOCK_BYTES)

/* Each block with its neighbour, all layers. */
static void distance(struct kernels *k) {
        struct kvd_memshare_query q = {
                .shape = &shape, .metric = KVD_MEMSHARE_FRO_NORM, .limit = 1e30};
        const uint8_t *keys = window_keys(k);
        size_t bytes = MAX(window_bytes(k), 2 * WHOLE_BLOCK);

        for (size_t at = 0; at < bytes; at += 2 * WHOLE_BLOCK) {
                struct kvd_memshare_block a = {.data = keys + at},
                                          b = {.data = keys + at + WHOLE_BLOCK};

                k->scores[0] += (float)k->ops->memshare->distance(&q, &a, &b);
        }
        moved(k, bytes, 0, 1.5);
}

static void norms(struct kernels *k) {
        size_t bytes = MAX(window_bytes(k), WHOLE_BLOCK);

        for (size_t at = 0; at < bytes; at += WHOLE_BLOCK)
                k->ops->memshare->norms(&shape, window_keys(k) + at, k->scratch);
        moved(k, bytes, 0, 2);
}

/* ---- HShare ---------------------------------------------------------------------------------- */

enum { CHANNELS = 32, POSITIONS = 4096, CRITICAL_SCORES = 16384 };

static void label(struct kernels *k) {
        uint16_t channels[CHANNELS];

        for (uint16_t i = 0; i < CHANNELS; i++)
                channels[i] = (uint16_t)(i * 4 + i % 3);
        k->ops->hshare->label(window_other(k), window_keys(k), KERNEL_DIM, KVD_NUMBER_BF16,
                              window_rows(k), channels, CHANNELS);
        moved(k, window_bytes(k), window_rows(k) * kvd_label_bytes(CHANNELS),
              4.0 * CHANNELS / KERNEL_DIM);
}

/* Fills the window with repeated labels. */
static void fill_with_labels(struct kernels *k) {
        size_t bytes = window_rows(k) * kvd_label_bytes(CHANNELS);

        label(k);
        for (size_t at = bytes; at < window_bytes(k); at += bytes)
                memcpy(window_other(k) + at, window_other(k), MIN(bytes, window_bytes(k) - at));
}

static void label_scores(struct kernels *k) {
        uint32_t n = (uint32_t)(window_bytes(k) / kvd_label_bytes(CHANNELS)) / POSITIONS *
                     POSITIONS;
        struct kvd_label_query queries[KERNEL_QUERIES] = {0};
        uint16_t channels[CHANNELS];

        for (uint16_t i = 0; i < CHANNELS; i++)
                channels[i] = i;
        for (uint32_t g = 0; g < KERNEL_QUERIES; g++)
                k->ops->hshare->query(&queries[g], k->anchors + g * KERNEL_DIM, channels, CHANNELS);
        for (uint32_t i = 0; i < n; i += POSITIONS) {
                const uint8_t *block = window_other(k) + i * kvd_label_bytes(CHANNELS);

                k->ops->hshare->scores(k->scratch, POSITIONS, &block, 0, POSITIONS, CHANNELS,
                                       queries, KERNEL_QUERIES, 0, POSITIONS);
        }
        moved(k, n * kvd_label_bytes(CHANNELS), 0, 0);
        k->operations = 2.0 * CHANNELS * KERNEL_QUERIES * n;
}

/* Takes the pool's bits as scores, since any numbers will do. */
static void critical_top(struct kernels *k) {
        uint32_t n = CRITICAL_SCORES;

        for (size_t at = 0; at + n * sizeof(float) <= window_bytes(k); at += n * sizeof(float))
                k->ops->hshare->top(k->indices, (const float *)(window_keys(k) + at), n, 432, 0,
                                    (uint32_t *)k->scratch);
        moved(k, window_bytes(k), 0, 0);
}

/* Compares the halves of the window, as sets of 4,096 tokens. */
static void overlap(struct kernels *k) {
        size_t half = window_bytes(k) / 2;

        k->ops->hshare->overlap(k->indices, (const uint64_t *)window_keys(k),
                                (const uint64_t *)(window_keys(k) + half), (uint32_t)(half / 512),
                                64);
        moved(k, window_bytes(k), 0, 0);
}

/* ---- BiCache --------------------------------------------------------------------------------- */

/* Compares the halves of the window; a row is a token of a head. */
static void similarity(struct kernels *k) {
        struct kvd_products products[KERNEL_BLOCK] = {0};
        const uint8_t *alone = window_keys(k), *whole = alone + window_bytes(k) / 2;

        for (size_t at = 0; at < window_bytes(k) / 2; at += PLANE * 2)
                k->ops->bicache->products(products, alone + at, KERNEL_DIM, whole + at, KERNEL_DIM,
                                          KVD_NUMBER_BF16, KERNEL_BLOCK, KERNEL_DIM);
        k->scores[0] = (float)products[0].ab;
        moved(k, window_bytes(k), 0, 3);
}

/* ---- attention ------------------------------------------------------------------------------- */

/*
 * Blocks of four heads of keys and four of values; each KV head has four query heads, as in Llama
 * 3.
 */
static void attend(struct kernels *k, uint32_t windows, const uint32_t *chosen, uint32_t n_chosen) {
        uint32_t n = windows * window_tokens(k), seen = chosen ? n_chosen : n;
        float out[KERNEL_QUERIES * KERNEL_DIM];
        struct kvd_attention a = {.ops = k->ops,
                                  .blocks = k->blocks + (size_t)(k->window / windows * windows) *
                                                                window_blocks(k),
                                  .stride = KERNEL_DIM,
                                  .type = KVD_NUMBER_BF16,
                                  .block_tokens = KERNEL_BLOCK,
                                  .dim = KERNEL_DIM,
                                  .first = n - 1,
                                  .n_keys = n,
                                  .chosen = chosen,
                                  .n_chosen = n_chosen,
                                  .n = 1,
                                  .group = KERNEL_QUERIES,
                                  .scale = 0.088388f,
                                  .q = k->anchors,
                                  .out = out,
                                  .ldq = KERNEL_QUERIES * KERNEL_DIM,
                                  .ldo = KERNEL_QUERIES * KERNEL_DIM,
                                  .scratch = (float *)window_other(k)};

        for (uint32_t h = 0; h < KERNEL_HEADS / 2; h++) {
                a.k_offset = h * PLANE * 2;
                a.v_offset = (h + KERNEL_HEADS / 2) * PLANE * 2;
                kvd_attend(&a);
        }
        moved(k, seen * KERNEL_HEADS * ROW_BYTES, 0, 0);
        k->operations = 2.0 * KERNEL_QUERIES * seen * KERNEL_HEADS * KERNEL_DIM;
}

static void dense(struct kernels *k) {
        attend(k, 1, NULL, 0);
}

/* Chooses one position in eight. */
static void choose_some(struct kernels *k, uint32_t tokens) {
        for (uint32_t i = 0; i < tokens / 8; i++)
                k->indices[i] = i * 8 + i % 7;
}

static void choose(struct kernels *k) {
        choose_some(k, window_tokens(k));
}

static void sparse(struct kernels *k) {
        attend(k, 1, k->indices, window_tokens(k) / 8);
}

static const uint8_t *chosen_row(const struct kernels *k, uint32_t i) {
        return window_table(k)[k->indices[i] / KERNEL_BLOCK] +
               k->indices[i] % KERNEL_BLOCK * ROW_BYTES;
}

/* Reads the chosen rows of each head with prefetching: as fast as 256-byte pieces can be read. */
static uint64_t read_chosen(const struct kernels *k) {
        enum { AHEAD = 32 };
        uint32_t n = window_tokens(k) / 8;
        uint64_t sum = 0;

        for (size_t plane = 0; plane < KERNEL_BLOCK_BYTES; plane += PLANE * 2)
                for (uint32_t i = 0; i < n; i++) {
                        const uint8_t *ahead = chosen_row(k, MIN(i + AHEAD, n - 1)) + plane;

                        for (size_t at = 0; at < ROW_BYTES; at += 64)
                                __builtin_prefetch(ahead + at, 0, 2);
                        sum += sum_fast(chosen_row(k, i) + plane, ROW_BYTES);
                }
        return sum;
}

/* 16 k tokens: eight windows. */
static uint32_t long_windows(const struct kernels *k) {
        return MIN(8, k->windows);
}

static void choose_long(struct kernels *k) {
        choose_some(k, long_windows(k) * window_tokens(k));
}

static void sparse_long(struct kernels *k) {
        attend(k, long_windows(k), k->indices, long_windows(k) * window_tokens(k) / 8);
}

static uint64_t dense_long(const struct kernels *k) {
        struct kernels copy = *k; /* only what sparse_long() moves counts */

        attend(&copy, long_windows(k), NULL, 0);
        return copy.read;
}

const struct kernel_row kernel_rows[] = {
        {"kernels-keydiff-anchor", NULL, anchor, NULL, NULL},
        {"kernels-keydiff-score", anchor, score, NULL, NULL},
        {"kernels-keydiff-shuffled", anchor, score_shuffled, read_shuffled, NULL},
        {"kernels-topk", score, topk, NULL, NULL},
        {"kernels-compact", every_second, compact, NULL, NULL},
        {"kernels-sketch-insert", place, insert, read_cells, NULL},
        {"kernels-sketch-query", place, query, read_cells, NULL},
        {"kernels-memshare-norms", NULL, norms, NULL, NULL},
        {"kernels-memshare-distance", NULL, distance, NULL, NULL},
        {"kernels-hshare-label", NULL, label, NULL, NULL},
        {"kernels-hshare-scores", fill_with_labels, label_scores, NULL, NULL},
        {"kernels-hshare-top", NULL, critical_top, NULL, NULL},
        {"kernels-hshare-overlap", NULL, overlap, NULL, NULL},
        {"kernels-bicache-similarity", NULL, similarity, NULL, NULL},
        {"kernels-attend-dense", anchor, dense, NULL, NULL},
        {"kernels-attend-sparse", choose, sparse, NULL, NULL},
        {"kernels-attend-pieces", choose, sparse, read_chosen, NULL},
        {"kernels-attend-16k", choose_long, sparse_long, dense_long, "dense"},
        {NULL, NULL, NULL, NULL, NULL},
};
