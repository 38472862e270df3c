/* SPDX-License-Identifier: Apache-2.0 */
/* KVReviver's sketch: tokens go in, and their medians come out */
#include "kernels/cuda/sketch.h"

#include <stdlib.h>

#include "ipc/base/util.h"
#include "kernels/ops.h"
#include "kernels/sketch.h"
#include "tests/gpu/bench.h"

#define HEADS 8u
#define DIM 128u
#define PER_BLOCK 16u
#define ROWS 3u

struct state {
        struct gpu_sketch_insert in[TURNS];
        struct gpu_sketch_query out[TURNS];
};

static int insert(struct bench *b, const void *state, unsigned turn) {
        return gpu_sketch_insert(&b->gpu, b->stream, &((const struct state *)state)->in[turn]);
}

static int query(struct bench *b, const void *state, unsigned turn) {
        return gpu_sketch_query(&b->gpu, b->stream, &((const struct state *)state)->out[turn]);
}

static void *room(size_t n, size_t size) {
        void *at = calloc(n, size);

        if (!at)
                abort();
        return at;
}

/* n tokens, four to a cell of each row, where chance puts them. */
static void plan(struct bench *b, struct state *s, unsigned i, uint32_t n, uint32_t columns) {
        struct kvd_sketch_hash hash = {KVD_SKETCH_UNIFORM, ROWS, columns, 4711 + i};
        struct gpu_sketch_token *tokens = room(n, sizeof *tokens), *planned = room((size_t)n * ROWS, sizeof *planned);
        struct gpu_sketch_run *runs = room((size_t)n * ROWS + 1, sizeof *runs);
        uint32_t *places = room((size_t)n * ROWS, sizeof *places);
        uint32_t *counts = room((size_t)ROWS * columns, sizeof *counts);
        uint64_t *ordinals = room(n, sizeof *ordinals);

        for (uint32_t t = 0; t < n; t++) {
                tokens[t] = (struct gpu_sketch_token){t / PER_BLOCK, t % PER_BLOCK};
                ordinals[t] = t;
        }
        kvd_sketch_place(&hash, ordinals, n, places);
        s->in[i].n_runs = gpu_sketch_plan(places, tokens, n, ROWS, columns, runs, planned, counts);
        s->in[i].runs = bench_copied(b, runs, (s->in[i].n_runs + 1) * sizeof *runs);
        s->in[i].planned = bench_copied(b, planned, (uint64_t)n * ROWS * sizeof *planned);
        s->in[i].weight = 1;
        s->out[i].tokens = bench_copied(b, tokens, n * sizeof *tokens);
        s->out[i].places = bench_copied(b, places, (uint64_t)n * ROWS * sizeof *places);
        s->out[i].n = n;
        s->out[i].shrink = 1;
        free(tokens);
        free(planned);
        free(runs);
        free(places);
        free(counts);
        free(ordinals);
}

void bench_sketch(struct bench *b) {
        uint32_t n = (uint32_t)bench_size(b, 4096, 32), columns = n / 4, layers = (uint32_t)bench_size(b, 32, 1);
        uint64_t plane = PER_BLOCK * HEADS * DIM * 2, block = layers * 2 * plane;
        uint64_t cell = (uint64_t)layers * HEADS * DIM, cells = ROWS * columns * cell * 4;
        cu_address pool = bench_random(b, n / PER_BLOCK * block);
        cu_address keys = bench_room(b, cells), values = bench_room(b, cells);
        struct state s;

        b->gpu.cuda->cuMemsetD8Async(keys, 0, cells, b->stream);
        b->gpu.cuda->cuMemsetD8Async(values, 0, cells, b->stream);
        for (unsigned i = 0; i < TURNS; i++) {
                struct gpu_sketch_parts parts = {
                        .blocks = {pool, block, bench_ids(b, n / PER_BLOCK, n / PER_BLOCK, NULL)},
                        .layer_stride = 2 * plane, .head_stride = PER_BLOCK * DIM, .token_stride = DIM,
                        .cell_stride = cell,
                        .planes = {{.cells = keys, .sign = KVD_SKETCH_KEY_SIGN},
                                   {.cells = values, .offset = plane, .sign = KVD_SKETCH_VALUE_SIGN}},
                        .n_planes = 2, .layers = layers, .heads = HEADS, .dim = DIM, .number = KVD_NUMBER_BF16,
                        .rows = ROWS, .columns = columns};

                s.in[i].parts = s.out[i].parts = parts;
                plan(b, &s, i, n, columns);
        }
        bench_op(b, &(struct op){"sketch insert, 4,096 tokens of 32 layers and 8 heads of 128, 3 rows", insert, &s,
                                 NULL, gpu_sketch_insert_bytes(&s.in[0].parts, n, s.in[0].n_runs), OF_COPY, 0.7});
        bench_op(b, &(struct op){"sketch median query of the same", query, &s, NULL,
                                 gpu_sketch_query_bytes(&s.out[0].parts, n), OF_COPY, 0.7});
}
