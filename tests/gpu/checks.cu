/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/device.cuh"
#include "tests/gpu/checks_cu.h"

#define THREADS 256

KVD_KERNEL(check_fill, struct check_fill, THREADS) {
        uint32_t *to = reinterpret_cast<uint32_t *>(a.at);

        uint64_t step = gridDim.x * (uint64_t)blockDim.x;

        for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < a.n; i += step)
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

/* Eight loads in flight per thread. */
KVD_KERNEL(check_read, struct check_read, THREADS) {
        uint64_t step = gridDim.x * (uint64_t)THREADS,
                 i = blockIdx.x * (uint64_t)THREADS + threadIdx.x;
        const uint8_t *from = reinterpret_cast<const uint8_t *>(a.at);
        uint32_t sum = 0;
        uint4 v[8];

        for (; i + 7 * step < a.n; i += 8 * step) {
#pragma unroll
                for (int k = 0; k < 8; k++)
                        v[k] = load_16(from + (i + k * step) * 16);
#pragma unroll
                for (int k = 0; k < 8; k++)
                        sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
        }
        for (; i < a.n; i += step) {
                v[0] = load_16(from + i * 16);
                sum += v[0].x ^ v[0].y ^ v[0].z ^ v[0].w;
        }
        if (sum == 0x12345678)
                *reinterpret_cast<uint32_t *>(a.sink) = sum;
}
