/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_GPU_BENCH_H
#define KVD_TESTS_GPU_BENCH_H

/*
 * How fast operations are on this device, beside what its memory can do in the same run. A case
 * makes random data larger than the L2, several sets of it that take turns, and says what bytes the
 * operation must move; the frame launches, takes times by events, and the median of many.
 *
 *      share     bytes / time, as a part of the bandwidth that was measured first (reading, or copying: read + written)
 *      rest      time - bytes / bandwidth; of it, fixed is what the same operation takes at a size of next to nothing
 *
 * On a stand-in sizes are tiny and nothing is judged: it shows that the cases run.
 */

#include <stdbool.h>

#include "kernels/cuda/gpu.h"
#include "tests/gpu/line.h"

#define KIB (1ull << 10)
#define MIB (1ull << 20)
#define GIB (1ull << 30)
#define TURNS 3u          /* of inputs, in turn */

#define TINY "ran (tiny, on a stand-in: nothing to judge)"

enum bandwidth { OF_READ, OF_COPY, OF_HOST, OF_NOTHING };

struct bench {
        struct gpu gpu;
        cu_stream stream;
        cu_event from, to;
        bool tiny;
        uint64_t free;          /* bytes of the device when it began */
        double gb_s[3];   /* by enum bandwidth */
        cu_address rooms[64], noise;
        void *pinned[8];
        unsigned n_rooms, n_pinned;
        const char *only;
};

typedef int launch_fn(struct bench *b, const void *state, unsigned turn);

struct op {
        const char *name;       /* "KeyDiff anchor and score, 128 k tokens, ..." */
        launch_fn *launch;
        const void *state;      /* of the size that is judged */
        const void *least;      /* the same at next to nothing; NULL: no such */
        uint64_t bytes;         /* that it must move; 0: none, time alone */
        enum bandwidth of;
        double aim;             /* share to reach; 0: none was set */
};

/* Microseconds of one launch; below 0: it failed, b->gpu.why. */
double bench_time(struct bench *b, launch_fn *launch, const void *state);

/* Measures, and says it in a line. Returns microseconds. */
double bench_op(struct bench *b, const struct op *op);

/* Two operations that do the same. */
void bench_ratio(struct bench *b, const char *name, double slower_us, double faster_us, double aim);

/*
 * Memory of the device until the case is over; random: numbers, as bf16 of 2^-6 to 2, and as fp16
 * finite, too.
 */
cu_address bench_room(struct bench *b, uint64_t bytes);
cu_address bench_random(struct bench *b, uint64_t bytes);
cu_address bench_copied(struct bench *b, const void *from, uint64_t bytes);
/* n of them, scattered, none twice */
cu_address bench_ids(struct bench *b, uint32_t n, uint32_t of, uint32_t *copy);
void *bench_pinned(struct bench *b, uint64_t bytes);
void bench_floats(struct bench *b, cu_address at, uint64_t n);                  /* fp32 instead */

void bench_free(struct bench *b); /* all of it */

/* n, or on a stand-in a thousandth of it, at least `least`. */
uint64_t bench_size(const struct bench *b, uint64_t n, uint64_t least);

void bench_memory(struct bench *b);   /* the device's bandwidths; before all others */
void bench_keydiff(struct bench *b);
void bench_attend(struct bench *b);
void bench_memshare(struct bench *b);

#endif
