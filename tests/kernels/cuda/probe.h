/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KERNELS_CUDA_PROBE_H
#define KVD_TESTS_KERNELS_CUDA_PROBE_H

/* Kernels that test the emulation itself; probe.cpp. */

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

/* Errors that a kernel makes on purpose; each terminates the process. */
enum {
        WRONG_BARRIER_MISSED, /* a thread has already exited */
        WRONG_BARRIER_OTHER,  /* two barriers, half of the threads at each */
        WRONG_LANE_MISSED,
        WRONG_LANE_ELSEWHERE,
        WRONG_LANE_AT_BARRIER,
        WRONG_ALIGNMENT,
        WRONG_SHARED_END, /* a word past the end of dynamic shared memory */
        N_WRONG
};

extern const struct fake_kernel fake_kernel_probe_barrier, fake_kernel_probe_warp,
        fake_kernel_probe_mma, fake_kernel_probe_copy, fake_kernel_probe_order,
        fake_kernel_probe_atomic, fake_kernel_probe_narrow, fake_kernel_probe_wrong;

#ifdef __cplusplus
}
#endif

#endif
