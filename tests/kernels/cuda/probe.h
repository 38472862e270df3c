/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KERNELS_CUDA_PROBE_H
#define KVD_TESTS_KERNELS_CUDA_PROBE_H

/* Kernels that try the emulation itself; probe.cpp. */

#include <stdint.h>

#include "tests/gpu/fakecuda/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

struct probe {
        uint32_t *to;
        const void *a, *b;
        uint32_t n, kind;
};

/* What a kernel does wrong; each ends the process. */
enum {
        WRONG_BARRIER_MISSED, /* a thread has ended */
        WRONG_BARRIER_OTHER,  /* two barriers, half of the threads at each */
        WRONG_LANE_MISSED,
        WRONG_LANE_ELSEWHERE,
        WRONG_LANE_AT_BARRIER,
        WRONG_ALIGNMENT,
        WRONG_SHARED_END, /* a word behind dynamic shared memory */
        N_WRONG
};

extern const struct fake_kernel fake_kernel_probe_barrier, fake_kernel_probe_warp,
        fake_kernel_probe_mma, fake_kernel_probe_copy, fake_kernel_probe_order,
        fake_kernel_probe_atomic, fake_kernel_probe_narrow, fake_kernel_probe_wrong;

#ifdef __cplusplus
}
#endif

#endif
