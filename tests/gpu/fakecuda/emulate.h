/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_FAKECUDA_EMULATE_H
#define KVD_TESTS_FAKECUDA_EMULATE_H

/*
 * Runs kernels on a processor: every thread of a block is a fiber, blocks run one after the other,
 * and a process runs one launch at a time. emulate_cuda.h provides CUDA C on top of this engine.
 *
 * Misuse ends the process with a line that says where: a thread that ends or waits elsewhere while
 * others wait at a barrier, a lane that is missing in a warp operation, more shared memory than a
 * block may have, unaligned addresses of 16-byte accesses. Dynamic shared memory ends before an
 * inaccessible page, and contains garbage when a block begins.
 *
 * EMULATE_SEED=n (n > 0) or emulate_seed(n): n decides the order of blocks, warps and lanes, so
 * that results that depend on the order differ. 0: ascending order.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tests/gpu/fakecuda/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
        EMULATE_WARP = 32,
        EMULATE_MOST_THREADS = 1024,
        EMULATE_MOST_SHARED = 227 << 10,
        EMULATE_SLOT = 32
};

struct emulate_index {
        unsigned x, y, z;
};

extern struct emulate_index emulate_thread, emulate_block, emulate_threads, emulate_blocks;

/*
 * Runs body(arguments) as every thread of a launch. most: maximum number of threads per block of
 * this kernel.
 */
void emulate_run(const char *kernel, unsigned most, const struct fake_launch *launch,
                 void (*body)(const void *), const void *arguments);
void emulate_seed(uint64_t seed);
extern void (*emulate_between)(void); /* called between blocks; NULL */

/* ---- what kernels call; at: the line of the call ---- */

void *emulate_shared(void);

struct emulate_votes {
        unsigned some, count; /* is the vote true for any thread; for how many */
};

/* Waits until all threads of the block are here. */
struct emulate_votes emulate_barrier(int vote, const char *file, int at);

/*
 * Waits until all lanes of the warp are here, each with up to EMULATE_SLOT bytes. Returns the 32
 * slots, which stay valid until this lane has passed the next exchange.
 */
const uint8_t (*emulate_exchange(const void *mine, size_t bytes, const char *what,
                                 int at))[EMULATE_SLOT];
void emulate_warp_barrier(int at);

/* Copies 16 bytes to shared memory, but only once the thread waits for their group. */
void emulate_copy(void *to, const void *from);
void emulate_commit(void);
void emulate_wait(unsigned pending);

void emulate_aligned(const void *at, size_t to, const char *what); /* or ends the process */

/* ---- for emulate_race.c ---------------------------------------------------------------------- */

/* The position of the thread that runs now. */
struct emulate_where {
        uint64_t launch;                  /* from 1 */
        uint32_t block, thread;           /* index in the grid, and in the block */
        uint32_t barriers, warp_barriers; /* passed so far */
};

bool emulate_where(struct emulate_where *to); /* false: no thread of a kernel runs */
bool emulate_is_shared(const void *at);       /* dynamic shared memory */
const char *emulate_kernel(void);
/* called for accesses of emulate_copy */
extern void (*emulate_touch)(const void *at, size_t bytes, bool writes);

#ifdef __cplusplus
}
#endif

#endif
