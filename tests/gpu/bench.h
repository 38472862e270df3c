/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_GPU_BENCH_H
#define KVD_TESTS_GPU_BENCH_H

/*
 * Measures operations on this device, relative to the memory bandwidth in the same run. A case
 * makes several sets of random data larger than the L2, which are used in turn, and states how many
 * bytes the operation must move. The frame launches it, measures with events, and takes the median
 * of many.
 *
 *      share     bytes / time, as a part of the bandwidth that was measured first (reading, or copying: read + written)
 *      rest      time - bytes / bandwidth; part of it is fixed: the time of the same operation at a tiny size
 *
 * On a stand-in sizes are tiny and nothing is judged: this only shows that the cases run.
 */

#include <stdbool.h>

#include "kernels/cuda/gpu.h"
#include "tests/gpu/line.h"

#define KIB (1ull << 10)
#define MIB (1ull << 20)
#define GIB (1ull << 30)
#define TURNS 3u /* sets of inputs, used in turn */

#define TINY "ran (tiny, on a stand-in: nothing to judge)"

enum bandwidth { OF_READ, OF_COPY, OF_HOST, OF_NOTHING };

struct bench {
        struct gpu gpu;
        cu_stream stream;
        cu_event from, to;
        bool tiny;
        uint64_t free;  /* free bytes of the device at the beginning */
        double gb_s[3]; /* indexed by enum bandwidth */
        cu_address rooms[64], noise;
        void *pinned[8];
        unsigned n_rooms, n_pinned;
        const char *only;
};

typedef int launch_fn(struct bench *b, const void *state, unsigned turn);

struct op {
        const char *name; /* "KeyDiff anchor and score, 128 k tokens, ..." */
        launch_fn *launch;
        const void *state; /* arguments at the size that is judged */
        const void *least; /* arguments at a tiny size; may be NULL */
        uint64_t bytes;    /* bytes that it must move; 0: report only the time */
        enum bandwidth of;
        double aim; /* share to reach; 0: no aim */
};

/* Microseconds of one launch; negative if it failed (b->gpu.why). */
double bench_time(struct bench *b, launch_fn *launch, const void *state);

/* Measures, and prints a line. Returns microseconds. */
double bench_op(struct bench *b, const struct op *op);

/* Prints the ratio of two operations that do the same. */
void bench_ratio(struct bench *b, const char *name, double slower_us, double faster_us, double aim);

/*
 * Device memory, which is freed after the case. bench_random: numbers of 2^-6 to 2 as bf16, which
 * are finite as fp16, too.
 */
cu_address bench_room(struct bench *b, uint64_t bytes);
cu_address bench_random(struct bench *b, uint64_t bytes);
cu_address bench_copied(struct bench *b, const void *from, uint64_t bytes);
/* n different ids below `of`, scattered */
cu_address bench_ids(struct bench *b, uint32_t n, uint32_t of, uint32_t *copy);
void *bench_pinned(struct bench *b, uint64_t bytes);
void bench_floats(struct bench *b, cu_address at, uint64_t n); /* fp32 numbers */

void bench_free(struct bench *b); /* frees all */

/* n, or on a stand-in n / 1024 but at least `least`. */
uint64_t bench_size(const struct bench *b, uint64_t n, uint64_t least);

void bench_memory(struct bench *b); /* the device's bandwidths; must run first */
void bench_keydiff(struct bench *b);
void bench_attend(struct bench *b);
void bench_memshare(struct bench *b);

#endif
