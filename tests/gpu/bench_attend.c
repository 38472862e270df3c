/* SPDX-License-Identifier: Apache-2.0 */
/* Decode attention over blocks, dense and over chosen positions, and the choice of positions */
#include "kernels/cuda/attend.h"

#include <stdio.h>
#include <stdlib.h>

#include "ipc/base/util.h"
#include "kernels/hshare.h"
#include "kernels/ops.h"
#include "tests/gpu/bench.h"

#define KV_HEADS 8u
#define GROUP 4u
#define DIM 128u
#define PER_BLOCK 16u

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

/*
 * n sequences with so many tokens each, in scattered blocks of one layer: K plane, V plane, each in
 * HND order.
 */
static struct attending make(struct bench *b, uint32_t n, uint32_t tokens) {
        uint64_t plane = PER_BLOCK * KV_HEADS * DIM * 2, ld = tokens / PER_BLOCK;
        cu_address pool = bench_random(b, n * ld * 2 * plane), lengths = repeated(b, tokens, n);
        cu_address q = bench_random(b, (uint64_t)n * KV_HEADS * GROUP * DIM * 2);
        cu_address out = bench_room(b, (uint64_t)n * KV_HEADS * GROUP * DIM * 2), workspace;
        struct attending s;
        uint64_t bytes;

        for (unsigned i = 0; i < TURNS; i++)
                s.a[i] = (struct gpu_attend){.blocks = {pool, 2 * plane,
                                                        bench_ids(b, (uint32_t)(n * ld),
                                                                  (uint32_t)(n * ld), NULL)},
                                             .ld_blocks = ld,
                                             .v_offset = plane,
                                             .head_stride = PER_BLOCK * DIM * 2,
                                             .token_stride = DIM * 2,
                                             .number = KVD_NUMBER_BF16,
                                             .block_tokens = PER_BLOCK,
                                             .dim = DIM,
                                             .kv_heads = KV_HEADS,
                                             .group = GROUP,
                                             .n_sequences = n,
                                             .max_length = tokens,
                                             .lengths = lengths,
                                             .q_number = KVD_NUMBER_BF16,
                                             .out_number = KVD_NUMBER_BF16,
                                             .scale = 0.088388f,
                                             .q = q,
                                             .out = out,
                                             .q_token = KV_HEADS * GROUP * DIM,
                                             .q_head = DIM,
                                             .out_token = KV_HEADS * GROUP * DIM,
                                             .out_head = DIM};
        bytes = gpu_attend_workspace(&b->gpu, &s.a[0]);
        workspace = bench_room(b, bytes);
        for (unsigned i = 0; i < TURNS; i++)
                s.a[i].workspace = workspace, s.a[i].workspace_bytes = bytes;
        return s;
}

/* The bytes that a call must read and write. positions: attended ones, summed over sequences. */
static uint64_t attend_bytes(const struct gpu_attend *a, uint64_t positions, uint64_t tokens) {
        uint64_t size = a->number == 1 ? 4 : 2, q = a->q_number == 1 ? 4 : 2,
                 out = a->out_number == 1 ? 4 : 2;

        return a->kv_heads *
               (positions * 2 * a->dim * size + tokens * a->group * a->dim * (q + out));
}

static struct attending at_least(struct bench *b, const struct attending *of) {
        struct attending least = *of;
        cu_address one = repeated(b, 1, of->a[0].n_sequences);

        for (unsigned i = 0; i < TURNS; i++)
                least.a[i].lengths = one, least.a[i].max_length = 1;
        return least;
}

/* ---- some of the positions ------------------------------------------------------------------- */

/* Chooses z positions per sequence and KV head, ascending, one in each run of tokens / z. */
static cu_address make_chosen(struct bench *b, uint32_t rows, uint32_t tokens, uint32_t z) {
        uint32_t *chosen = malloc((uint64_t)rows * z * sizeof *chosen);
        cu_address at;

        if (!chosen)
                abort();
        srand(5);
        for (uint32_t r = 0; r < rows; r++)
                for (uint32_t i = 0; i < z; i++)
                        chosen[(uint64_t)r * z + i] = i * (tokens / z) +
                                                      (uint32_t)rand() % (tokens / z);
        at = bench_copied(b, chosen, (uint64_t)rows * z * sizeof *chosen);
        free(chosen);
        return at;
}

/* 16 sequences of 32 k tokens, which attend to an eighth of the positions. */
static void sparse(struct bench *b) {
        uint32_t n = (uint32_t)bench_size(b, 16, 1),
                 tokens = (uint32_t)bench_size(b, 32 * 1024, 256), z = tokens / 8;
        struct attending dense = make(b, n, tokens), few = dense;
        cu_address chosen = make_chosen(b, n * KV_HEADS, tokens, z),
                   counts = repeated(b, z, n * KV_HEADS);
        double whole, part;
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
        whole = bench_op(b, &(struct op){"decode attention, 16 sequences x 32 k tokens, dense",
                                         decode, &dense, NULL,
                                         attend_bytes(&dense.a[0], (uint64_t)n * tokens, n),
                                         OF_READ, 0});
        part = bench_op(b,
                        &(struct op){"the same over an eighth of the positions", decode, &few, NULL,
                                     attend_bytes(&few.a[0], (uint64_t)n * z, n), OF_READ, 0});
        bench_ratio(b, "token-sparse attention at 1/8: how many times faster than dense", whole,
                    part, 4);
}

void bench_attend(struct bench *b) {
        uint32_t n = (uint32_t)bench_size(b, 64, 2), tokens = (uint32_t)bench_size(b, 8192, 64);
        struct attending s = make(b, n, tokens), least = at_least(b, &s);
        uint64_t bytes = attend_bytes(&s.a[0], (uint64_t)n * tokens, n);

        bench_op(b, &(struct op){"paged decode attention, 64 sequences x 8 k tokens, 32 heads on 8 "
                                 "of 128, bf16",
                                 decode, &s, &least, bytes, OF_READ, 0.8});
        bench_free(b);
        sparse(b);
}
