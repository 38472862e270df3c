/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/device.cuh"
#include "tests/gpu/checks_cu.h"

#define THREADS 256

KVD_KERNEL(check_fill, struct check_fill, THREADS) {
        uint32_t *to = reinterpret_cast<uint32_t *>(a.at);

        for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < a.n; i += gridDim.x * (uint64_t)blockDim.x)
                to[i] = a.seed + (uint32_t)i;
}

KVD_KERNEL(check_beat, struct check_beat, THREADS) {
        volatile uint64_t *heart = reinterpret_cast<volatile uint64_t *>(a.heart);
        volatile uint64_t *stop = reinterpret_cast<volatile uint64_t *>(a.stop);
        volatile uint32_t *at = reinterpret_cast<volatile uint32_t *>(a.at);

        if (blockIdx.x || threadIdx.x)
                return;
        for (uint64_t i = 1; i <= a.n && !*stop; i++) {
                *at = (uint32_t)i;
                *heart = i;
                __threadfence_system();
        }
}
