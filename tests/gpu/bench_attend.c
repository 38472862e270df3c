/* SPDX-License-Identifier: Apache-2.0 */
/* Decode over blocks: dense, and over some of the positions; and what chooses them */
#include "kernels/cuda/attend.h"

#include <stdio.h>
#include <stdlib.h>

#include "ipc/base/util.h"
#include "kernels/cuda/hshare.h"
#include "kernels/hshare.h"
#include "kernels/ops.h"
#include "tests/gpu/bench.h"

#define KV_HEADS 8u
#define GROUP 4u
#define DIM 128u
#define PER_BLOCK 16u
#define CHANNELS 32u

struct attending {
        struct gpu_attend a[TURNS];
};

static int decode(struct bench *b, const void *state, unsigned turn) {
        return gpu_attend_decode(&b->gpu, b->stream, &((const struct attending *)state)->a[turn]);
}

static cu_address repeated(struct bench *b, uint32_t value, uint32_t n) {
        uint32_t *words = calloc(n, sizeof *words);
        cu_address at;

        if (!words)
                abort();
        for (uint32_t i = 0; i < n; i++)
                words[i] = value;
        at = bench_copied(b, words, n * sizeof *words);
        free(words);
        return at;
}

/* Each of n sequences has that many tokens, in scattered blocks of one layer: K plane, V plane; HND. */
static struct attending make(struct bench *b, uint32_t n, uint32_t tokens) {
        uint64_t plane = PER_BLOCK * KV_HEADS * DIM * 2, ld = tokens / PER_BLOCK;
        cu_address pool = bench_random(b, n * ld * 2 * plane), lengths = repeated(b, tokens, n);
        cu_address q = bench_random(b, (uint64_t)n * KV_HEADS * GROUP * DIM * 2);
        cu_address out = bench_room(b, (uint64_t)n * KV_HEADS * GROUP * DIM * 2), workspace;
        struct attending s;
        uint64_t bytes;

        for (unsigned i = 0; i < TURNS; i++)
                s.a[i] = (struct gpu_attend){
                        .blocks = {pool, 2 * plane, bench_ids(b, (uint32_t)(n * ld), (uint32_t)(n * ld), NULL)},
                        .ld_blocks = ld, .v_offset = plane, .head_stride = PER_BLOCK * DIM * 2, .token_stride = DIM * 2,
                        .number = KVD_NUMBER_BF16, .block_tokens = PER_BLOCK, .dim = DIM, .kv_heads = KV_HEADS,
                        .group = GROUP, .n_sequences = n, .max_length = tokens, .lengths = lengths,
                        .q_number = KVD_NUMBER_BF16, .out_number = KVD_NUMBER_BF16, .scale = 0.088388f, .q = q,
                        .out = out, .q_token = KV_HEADS * GROUP * DIM, .q_head = DIM,
                        .out_token = KV_HEADS * GROUP * DIM, .out_head = DIM};
        bytes = gpu_attend_workspace(&b->gpu, &s.a[0]);
        workspace = bench_room(b, bytes);
        for (unsigned i = 0; i < TURNS; i++)
                s.a[i].workspace = workspace, s.a[i].workspace_bytes = bytes;
        return s;
}

static struct attending at_least(struct bench *b, const struct attending *of) {
        struct attending least = *of;
        cu_address one = repeated(b, 1, of->a[0].n_sequences);

        for (unsigned i = 0; i < TURNS; i++)
                least.a[i].lengths = one, least.a[i].max_length = 1;
        return least;
}

void bench_attend(struct bench *b) {
        uint32_t n = (uint32_t)bench_size(b, 64, 2), tokens = (uint32_t)bench_size(b, 8192, 64);
        struct attending s = make(b, n, tokens), least = at_least(b, &s);
        uint64_t bytes = gpu_attend_bytes(&s.a[0], (uint64_t)n * tokens, n);

        bench_op(b, &(struct op){"paged decode attention, 64 sequences x 8 k tokens, 32 heads on 8 of 128, bf16",
                                 decode, &s, &least, bytes, OF_READ, 0.8});
}

/* ---- some of the positions -------------------------------------------------------------------------------------- */

/* Every sequence and KV head has z of them, ascending, one in each run of tokens / z. */
static cu_address make_chosen(struct bench *b, uint32_t rows, uint32_t tokens, uint32_t z) {
        uint32_t *chosen = malloc((uint64_t)rows * z * sizeof *chosen);
        cu_address at;

        if (!chosen)
                abort();
        srand(5);
        for (uint32_t r = 0; r < rows; r++)
                for (uint32_t i = 0; i < z; i++)
                        chosen[(uint64_t)r * z + i] = i * (tokens / z) + (uint32_t)rand() % (tokens / z);
        at = bench_copied(b, chosen, (uint64_t)rows * z * sizeof *chosen);
        free(chosen);
        return at;
}

struct choosing {
        struct gpu_label_scores scores[TURNS];
        struct gpu_aggregate aggregate[TURNS];
        struct gpu_top top[TURNS];
};

static int label_scores(struct bench *b, const void *state, unsigned turn) {
        return gpu_label_scores(&b->gpu, b->stream, &((const struct choosing *)state)->scores[turn]);
}

static int aggregate(struct bench *b, const void *state, unsigned turn) {
        return gpu_aggregate(&b->gpu, b->stream, &((const struct choosing *)state)->aggregate[turn]);
}

static int top(struct bench *b, const void *state, unsigned turn) {
        return gpu_top(&b->gpu, b->stream, &((const struct choosing *)state)->top[turn]);
}

static int scores_and_top(struct bench *b, const void *state, unsigned turn) {
        int r = label_scores(b, state, turn);

        r = r < 0 ? r : aggregate(b, state, turn);
        return r < 0 ? r : top(b, state, turn);
}

/* Labels in blocks of their own, one layer's; queries' labels are random, as everything. */
static struct choosing make_choosing(struct bench *b, uint32_t n, uint32_t tokens, uint32_t z) {
        uint64_t label = kvd_label_bytes(CHANNELS), ld = tokens / PER_BLOCK, rows = (uint64_t)n * KV_HEADS;
        uint64_t block = ALIGN_UP(KV_HEADS * PER_BLOCK * label, 16), bytes;
        struct gpu_spans spans = {n, tokens, repeated(b, 0, n), repeated(b, tokens, n)};
        cu_address pool = bench_random(b, n * ld * block);
        cu_address queries = bench_random(b, rows * GROUP * sizeof(struct kvd_label_query));
        cu_address scores = bench_room(b, rows * GROUP * tokens * 4), sums = bench_room(b, rows * tokens * 4);
        cu_address to = bench_room(b, rows * z * 4), found = bench_room(b, rows * 4);
        struct choosing c;

        for (unsigned i = 0; i < TURNS; i++) {
                c.scores[i] = (struct gpu_label_scores){
                        .spans = spans, .n_channels = CHANNELS, .kv_heads = KV_HEADS, .group = GROUP,
                        .queries = queries, .to = scores, .ld = tokens,
                        .labels = {{pool, block, bench_ids(b, (uint32_t)(n * ld), (uint32_t)(n * ld), NULL)}, ld, 0,
                                   PER_BLOCK * label, 0, PER_BLOCK}};
                c.aggregate[i] = (struct gpu_aggregate){.spans = spans, .kv_heads = KV_HEADS, .group = GROUP,
                                                        .scale = 1e-4f, .scores = scores, .to = sums, .ld = tokens,
                                                        .ld_to = tokens};
                c.top[i] = (struct gpu_top){.spans = spans, .rows = KV_HEADS, .z = z, .scores = sums, .ld = tokens,
                                            .to = to, .found = found, .ld_to = z};
        }
        bytes = MAX(gpu_aggregate_workspace(&c.aggregate[0]), gpu_top_workspace(&c.top[0]));
        cu_address workspace = bench_room(b, bytes);

        for (unsigned i = 0; i < TURNS; i++) {
                c.aggregate[i].workspace = c.top[i].workspace = workspace;
                c.aggregate[i].workspace_bytes = c.top[i].workspace_bytes = bytes;
        }
        return c;
}

/* 128 k tokens; 16 sequences, so that what is read does not stay in the L2. */
static void choose(struct bench *b) {
        uint32_t n = (uint32_t)bench_size(b, 16, 1), tokens = (uint32_t)bench_size(b, 128 * 1024, 128), z = tokens / 64;
        struct choosing c = make_choosing(b, n, tokens, z);
        uint64_t all = (uint64_t)n * tokens, scores = gpu_label_scores_bytes(&c.scores[0], all),
                 sums = gpu_aggregate_bytes(&c.aggregate[0], all), tops = gpu_top_bytes(&c.top[0], all);

        bench_op(b, &(struct op){"HShare label scores, 16 sequences x 128 k tokens, 8 KV heads, 4 queries, 32 channels",
                                 label_scores, &c, NULL, scores, OF_READ, 0.7});
        bench_op(b, &(struct op){"HShare aggregate of 4 queries' scores", aggregate, &c, NULL, sums, OF_READ, 0});
        bench_op(b, &(struct op){"HShare top-z, z = 2,048 of 128 k", top, &c, NULL, tops, OF_READ, 0.7});
        bench_op(b, &(struct op){"HShare label scores, aggregate and top-z together", scores_and_top, &c, NULL,
                                 scores + sums + tops, OF_READ, 0.7});
}

/*
 * 32 k tokens, 16 sequences, and the selected eighth of the positions attended. With sharing of 1/8, one in eight of
 * the calls selects: its cost is counted to an eighth.
 */
static void sparse(struct bench *b) {
        uint32_t n = (uint32_t)bench_size(b, 16, 1), tokens = (uint32_t)bench_size(b, 32 * 1024, 256), z = tokens / 8;
        struct attending dense = make(b, n, tokens), few = dense;
        struct choosing c = make_choosing(b, n, tokens, z);
        cu_address chosen = make_chosen(b, n * KV_HEADS, tokens, z), counts = repeated(b, z, n * KV_HEADS);
        double whole, part, selection;
        uint64_t bytes;

        for (unsigned i = 0; i < TURNS; i++) {
                few.a[i].chosen = chosen;
                few.a[i].n_chosen = counts;
                few.a[i].ld_chosen = few.a[i].max_chosen = z;
        }
        bytes = gpu_attend_workspace(&b->gpu, &few.a[0]);
        cu_address workspace = bench_room(b, bytes);

        for (unsigned i = 0; i < TURNS; i++)
                few.a[i].workspace = workspace, few.a[i].workspace_bytes = bytes;
        whole = bench_op(b, &(struct op){"decode attention, 16 sequences x 32 k tokens, dense", decode, &dense, NULL,
                                         gpu_attend_bytes(&dense.a[0], (uint64_t)n * tokens, n), OF_READ, 0});
        part = bench_op(b, &(struct op){"the same over an eighth of the positions", decode, &few, NULL,
                                        gpu_attend_bytes(&few.a[0], (uint64_t)n * z, n), OF_READ, 0});
        selection = bench_time(b, scores_and_top, &c);
        bench_ratio(b, "token-sparse attention at 1/8, selection counted to an eighth: how many times faster "
                       "than dense",
                    whole, part < 0 || selection < 0 ? -1 : part + selection / 8, 4);
        bench_ratio(b, "the same with selection in every call", whole,
                    part < 0 || selection < 0 ? -1 : part + selection, 0);
}

void bench_hshare(struct bench *b) {
        choose(b);
        bench_free(b);
        sparse(b);
}
