/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_GPU_CHECKS_CU_H
#define KVD_TESTS_GPU_CHECKS_CU_H

/* Arguments of the kernels in checks.cu, which takes them by value. */

#include <stdint.h>

struct check_fill { /* kvd_check_fill: word i := seed + i, of n words */
        uint64_t at, n;
        uint32_t seed;
};

/*
 * kvd_check_beat: one thread counts to n in both words as fast as it can write them, and ends early
 * if *stop is not 0.
 */
struct check_beat {
        uint64_t heart; /* u64 in host memory */
        uint64_t at;    /* u32 in device memory */
        uint64_t stop;  /* u64 in host memory */
        uint64_t n;
};

/* kvd_check_read: sums n pieces of 16 bytes; writes the sum only if it has one certain value */
struct check_read {
        uint64_t at, n, sink;
};

#endif
