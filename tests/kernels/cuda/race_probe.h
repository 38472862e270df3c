/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KERNELS_CUDA_RACE_PROBE_H
#define KVD_TESTS_KERNELS_CUDA_RACE_PROBE_H

/* A kernel with and without races; race_probe.cpp. */

#include <stdint.h>

#include "tests/gpu/fakecuda/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
        ORDER_BARRIER,
        ORDER_WARP,
        RACE_NOTHING,        /* neither */
        RACE_WARP_ELSEWHERE, /* a barrier of the warp, but the other thread is in another warp */
        RACE_SHUFFLE,        /* a shuffle is not a barrier */
        RACE_READ_BARRIER,   /* overwrites data that others are reading */
        FIRST_BETWEEN_BLOCKS,
        ORDER_ATOMIC = FIRST_BETWEEN_BLOCKS,
        ORDER_BYTES, /* bytes of one word, each written by a different thread */
        ORDER_FENCE,
        RACE_ATOMIC, /* an atomic and a plain store */
        RACE_BLOCKS,
        FIRST_OF_COPIES,
        ORDER_COPY = FIRST_OF_COPIES,
        RACE_COPY_BARRIER,    /* only the thread that copies waits */
        RACE_COPY_WAITS_LATE, /* the barrier precedes the wait */
        RACE_COPY_OVER,
};

struct race_probe {
        uint32_t *words;
        uint32_t kind, memory; /* 0: static shared, 1: dynamic shared, 2: global */
};

extern const struct fake_kernel fake_kernel_probe_race;

#ifdef __cplusplus
}
#endif

#endif
