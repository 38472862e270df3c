/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BENCH_KERNELS_H
#define KVD_BENCH_KERNELS_H

/*
 * Compares kernels on uncached memory with what one thread can read in the same round, and with
 * numpy. A new kernel is a row of kernel_rows[], and a function of the same name in case_kernels.py
 * if numpy can do it.
 *
 * All work on one uncached pool of keys: 256 MiB, in blocks of 8 heads, 16 tokens, 128 numbers of
 * bf16. A call works on one window of 4 MiB, another one each time. Calls are short, so that on a
 * busy processor half of them are not interrupted, and the median is one of those. --quick: 4 MiB
 * and 1 MiB, which tests that everything runs, but measures nothing.
 */

#include "kernels/ops.h"

enum {
        KERNEL_HEADS = 8,
        KERNEL_DIM = 128,
        KERNEL_BLOCK = 16,
        KERNEL_QUERIES = 4,
        KERNEL_BLOCK_BYTES = 32768
};

struct kernels {
        const struct kvd_ops *ops;
        uint8_t *pool;            /* random numbers from -2 to 2 */
        uint8_t *other;           /* as large as the pool */
        const uint8_t **blocks;   /* of the pool, in their order, */
        const uint8_t **in_other_order;
        size_t pool_bytes;
        uint32_t windows, window; /* number of windows, and the one of this call */
        float *anchors;           /* [KERNEL_HEADS][KERNEL_DIM] */
        float *scores;            /* [KERNEL_HEADS][tokens of a window] */
        float *cells;             /* of a sketch: KERNEL_CELLS floats */
        float *scratch;           /* 1 MiB, and 3 numbers per score */
        uint32_t *indices;        /* one per token of the pool */

        /* bytes that a call moves between processor and memory, and the operations that it makes */
        size_t read, written;
        double operations;
};

enum { KERNEL_CELLS = 3 * 1024 * KERNEL_DIM };

struct kernel_row {
        const char *name; /* of the contest: "kernels-..." */
        void (*prepare)(struct kernels *k); /* once for each window, not timed; NULL: nothing */
        void (*run)(struct kernels *k);
        /*
         * The function to compare the kernel with, and its name: it reads the same bytes in place,
         * in the kernel's order. NULL: as many bytes, one after the other.
         */
        uint64_t (*beside)(const struct kernels *k);
        const char *beside_name;
};

/* ---- the window ---- */

static inline size_t window_bytes(const struct kernels *k) {
        return k->pool_bytes / k->windows;
}

static inline uint32_t window_blocks(const struct kernels *k) {
        return (uint32_t)(window_bytes(k) / KERNEL_BLOCK_BYTES);
}

static inline uint32_t window_tokens(const struct kernels *k) {
        return window_blocks(k) * KERNEL_BLOCK;
}

static inline uint32_t window_rows(const struct kernels *k) {
        return window_tokens(k) * KERNEL_HEADS;
}

static inline uint8_t *window_keys(const struct kernels *k) {
        return k->pool + k->window * window_bytes(k);
}

static inline uint8_t *window_other(const struct kernels *k) {
        return k->other + k->window * window_bytes(k);
}

static inline const uint8_t **window_table(const struct kernels *k) {
        return k->blocks + (size_t)k->window * window_blocks(k);
}

static inline const uint8_t **window_in_other_order(const struct kernels *k) {
        return k->in_other_order + (size_t)k->window * window_blocks(k);
}

extern const struct kernel_row kernel_rows[];

/* Reads, as fast as one thread can; bytes: a multiple of 256. */
uint64_t sum_fast(const uint8_t *data, size_t bytes);

#endif
