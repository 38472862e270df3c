/* SPDX-License-Identifier: Apache-2.0 */
/* KeyDiff over a long cache */
#include "kernels/cuda/keydiff.h"

#include "ipc/base/util.h"
#include "kernels/ops.h"
#include "tests/gpu/bench.h"

#define HEADS 8u
#define DIM 128u
#define PER_BLOCK 16u

struct state {
        struct gpu_scores a[TURNS];
};

static int anchor(struct bench *b, const void *state, unsigned turn) {
        return gpu_anchor(&b->gpu, b->stream, &((const struct state *)state)->a[turn]);
}

static int score(struct bench *b, const void *state, unsigned turn) {
        return gpu_score(&b->gpu, b->stream, &((const struct state *)state)->a[turn]);
}

static int both(struct bench *b, const void *state, unsigned turn) {
        int r = anchor(b, state, turn);

        return r < 0 ? r : score(b, state, turn);
}

/* Blocks of one layer, scattered over the pool: K plane, then V plane, as [head, token, dim]. */
static struct gpu_scores make(struct bench *b, uint32_t tokens) {
        uint32_t blocks = tokens / PER_BLOCK;
        uint64_t plane = PER_BLOCK * HEADS * DIM * 2;
        struct gpu_scores a = {.keys = {.blocks = {.block_bytes = 2 * plane},
                                        .head_stride = PER_BLOCK * DIM,
                                        .token_stride = DIM,
                                        .layers = 1,
                                        .heads = HEADS,
                                        .dim = DIM,
                                        .per_block = PER_BLOCK,
                                        .number = KVD_NUMBER_BF16},
                               .to = tokens,
                               .stride = tokens};

        a.keys.blocks.base = bench_random(b, blocks * 2 * plane);
        a.keys.blocks.ids = bench_ids(b, blocks, blocks, NULL);
        a.sums = bench_room(b, HEADS * DIM * 4);
        a.counts = bench_room(b, HEADS * 4);
        a.scores = bench_room(b, (uint64_t)HEADS * tokens * 4);
        a.scratch = bench_room(b, gpu_score_scratch(&a));
        return a;
}

void bench_keydiff(struct bench *b) {
        uint32_t tokens = (uint32_t)bench_size(b, 128 * 1024, 128);
        struct state whole, least;
        uint64_t bytes;

        for (unsigned i = 0; i < TURNS; i++) {
                whole.a[i] = make(b, tokens);
                least.a[i] = whole.a[i];
                least.a[i].to = PER_BLOCK;
        }
        bytes = (uint64_t)tokens * HEADS * DIM * 2;
        bench_op(b, &(struct op){"KeyDiff anchor and score, 128 k tokens, 8 heads of 128, bf16 "
                                 "(keys read twice)",
                                 both, &whole, &least, 2 * bytes, OF_READ, 0.8});
        bench_op(b,
                 &(struct op){"KeyDiff anchor alone", anchor, &whole, &least, bytes, OF_READ, 0});
        bench_op(b, &(struct op){"KeyDiff score alone, anchors known", score, &whole, &least, bytes,
                                 OF_READ, 0});
}
