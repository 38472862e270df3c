/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_FAKECUDA_EMULATE_H
#define KVD_TESTS_FAKECUDA_EMULATE_H

/*
 * Runs kernels on a processor: every thread of a block is a fiber, blocks run one after the other,
 * one launch of a process at a time. What CUDA C looks like there is emulate_cuda.h; this is the
 * engine below it.
 *
 * Misuse ends the process with one line that says where: a thread that ends or waits elsewhere
 * while others wait at a barrier, a lane that a warp operation misses, more shared memory than a
 * block may have, addresses that 16-byte accesses do not allow. Dynamic shared memory ends at an
 * inaccessible page and holds rubbish when a block begins.
 *
 * EMULATE_SEED=n (n > 0) or emulate_seed(n): blocks, warps and lanes take turns in an order that n
 * decides, so that what depends on the order shows as a difference. 0: ascending.
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
 * Runs body(arguments) as every thread of a launch. most: threads that a block of this kernel may
 * have.
 */
void emulate_run(const char *kernel, unsigned most, const struct fake_launch *launch,
                 void (*body)(const void *), const void *arguments);
void emulate_seed(uint64_t seed);
extern void (*emulate_between)(void); /* called between blocks; NULL */

/* ---- what kernels call; at: the line of the call ---- */

void *emulate_shared(void);

struct emulate_votes {
        unsigned some, count; /* threads for which it is true */
};

/* Until all threads of the block are here. */
struct emulate_votes emulate_barrier(int vote, const char *file, int at);

/*
 * Until all lanes of the warp are here, each with up to EMULATE_SLOT bytes; returns the 32 slots.
 * They stay as they are until this lane has been through the next exchange.
 */
const uint8_t (*emulate_exchange(const void *mine, size_t bytes, const char *what,
                                 int at))[EMULATE_SLOT];
void emulate_warp_barrier(int at);

/* 16 bytes to shared memory: they come while the thread waits for their group, and not before. */
void emulate_copy(void *to, const void *from);
void emulate_commit(void);
void emulate_wait(unsigned pending);

void emulate_aligned(const void *at, size_t to, const char *what); /* or the process ends */

/* ---- for emulate_race.c ---------------------------------------------------------------------- */

/* Where the thread is that runs now. */
struct emulate_where {
        uint64_t launch;                 /* from 1 */
        uint32_t block, thread;          /* numbers in the grid and in the block */
        uint32_t barriers, warp_barriers; /* that it has been through */
};

bool emulate_where(struct emulate_where *to); /* false: no thread of a kernel runs */
bool emulate_is_shared(const void *at);       /* dynamic shared memory */
const char *emulate_kernel(void);
/* told of what emulate_copy does */
extern void (*emulate_touch)(const void *at, size_t bytes, bool writes);

#ifdef __cplusplus
}
#endif

#endif
