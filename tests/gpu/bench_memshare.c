/* SPDX-License-Identifier: Apache-2.0 */
/* MemShare's distances of whole blocks */
#include "kernels/cuda/memshare.h"

#include <math.h>
#include <stdlib.h>

#include "ipc/base/util.h"
#include "kernels/memshare.h"
#include "tests/gpu/bench.h"

#define HALF 64u
#define ANGLES 16u

struct state {
        struct gpu_distances a[TURNS];
        struct gpu_norms norms[TURNS];
};

static int distances(struct bench *b, const void *state, unsigned turn) {
        return gpu_distances(&b->gpu, b->stream, &((const struct state *)state)->a[turn]);
}

static int norms(struct bench *b, const void *state, unsigned turn) {
        return gpu_norms(&b->gpu, b->stream, &((const struct state *)state)->norms[turn]);
}

static cu_address make_pairs(struct bench *b, uint32_t n, uint32_t blocks, uint32_t seed) {
        struct gpu_distance_pair *pairs = malloc(n * sizeof *pairs);
        cu_address at;

        if (!pairs)
                abort();
        srand(seed);
        for (uint32_t i = 0; i < n; i++)
                pairs[i] = (struct gpu_distance_pair){(uint32_t)rand() % blocks,
                                                      (uint32_t)rand() % blocks,
                                                      (uint32_t)rand() % ANGLES};
        at = bench_copied(b, pairs, n * sizeof *pairs);
        free(pairs);
        return at;
}

/* Blocks of 2 MiB: 32 layers, 8 heads of 128, 16 tokens, bf16. The limit INFINITY rejects none. */
void bench_memshare(struct bench *b) {
        uint32_t layers = (uint32_t)bench_size(b, 32, 1), blocks = (uint32_t)bench_size(b, 4096, 8);
        uint32_t n = (uint32_t)bench_size(b, 10000, 4);
        uint64_t bytes = layers * 2ull * 8 * 16 * 128 * 2;
        struct gpu_block_shape shape = {layers, 8, 16, 128, GPU_ORDER_HND, KVD_NUMBER_BF16};
        cu_address pool, angles, to, kept;
        struct state s, least;

        while (blocks > 64 && blocks * bytes > b->free / 2)
                blocks /= 2;
        pool = bench_random(b, blocks * bytes);
        angles = bench_room(b, ANGLES * 2 * HALF * 4);
        bench_floats(b, angles, ANGLES * 2 * HALF);
        to = bench_room(b, n * sizeof(double));
        kept = bench_room(b, blocks * layers * 2ull * 4);
        for (unsigned i = 0; i < TURNS; i++) {
                struct gpu_blocks of = {pool, bytes, bench_ids(b, blocks, blocks, NULL)};

                s.a[i] = (struct gpu_distances){.blocks = of,
                                                .shape = shape,
                                                .metric = KVD_MEMSHARE_FRO_NORM,
                                                .limit = INFINITY,
                                                .pairs = make_pairs(b, n, blocks, i),
                                                .n = n,
                                                .angles = angles,
                                                .distances = to};
                s.norms[i] =
                        (struct gpu_norms){.blocks = of, .shape = shape, .n = blocks, .to = kept};
        }
        least = s;
        for (unsigned i = 0; i < TURNS; i++)
                least.a[i].n = least.norms[i].n = 1;
        bench_op(b, &(struct op){
                            "MemShare distances of 10,000 pairs of blocks of 2 MiB, none given up",
                            distances, &s, &least, n * 2 * bytes, OF_READ, 0.8});
        for (unsigned i = 0; i < TURNS; i++)
                s.a[i].half = least.a[i].half = HALF;
        bench_op(b, &(struct op){"MemShare distances, one block's keys rotated", distances, &s,
                                 &least, n * 2 * bytes, OF_READ, 0});
        for (unsigned i = 0; i < TURNS; i++)
                s.a[i].metric = least.a[i].metric = KVD_MEMSHARE_MEAN_L2;
        bench_op(b, &(struct op){"MemShare distances, rotated, a norm for each row", distances, &s,
                                 &least, n * 2 * bytes, OF_READ, 0});
        bench_op(b, &(struct op){"MemShare norms of blocks", norms, &s, &least, blocks * bytes,
                                 OF_READ, 0});
}
