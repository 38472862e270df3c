/* SPDX-License-Identifier: Apache-2.0 */
#define KVD_EMULATE 1
#include "tests/gpu/fakecuda/emulate_cuda.h"

#include "kernels/cuda/device.cuh"
#include "tests/kernels/cuda/race_probe.h"

/* Two words of memory per thread, in shared memory of either kind or in global memory. */
static __device__ void between_threads(uint32_t *words, uint32_t kind) {
        uint32_t i = threadIdx.x, other = (i + 1) % blockDim.x, of_warp = i / 32 * 32 + (i + 1) % 32;

        words[i] = i;
        if (kind == ORDER_BARRIER || kind == RACE_READ_BARRIER)
                __syncthreads();
        if (kind == ORDER_WARP || kind == RACE_WARP_ELSEWHERE)
                __syncwarp();
        if (kind == RACE_SHUFFLE)
                words[i] = warp_from(i, (int)lane_id());
        words[blockDim.x + i] = words[kind == ORDER_WARP || kind == RACE_SHUFFLE ? of_warp : other];
        if (kind == RACE_READ_BARRIER) /* others may still be reading it */
                words[i] = 0;
}

static __device__ void between_blocks(uint32_t *words, uint32_t kind) {
        if (kind == ORDER_ATOMIC)
                atomicAdd(words, 1u);
        else if (kind == RACE_ATOMIC && blockIdx.x == 0)
                words[0] = 1;
        else if (kind == RACE_ATOMIC)
                atomicAdd(words, 1u);
        else if (kind == ORDER_BYTES)
                reinterpret_cast<uint8_t *>(words)[blockIdx.x * blockDim.x + threadIdx.x] = 1;
        else if (kind == ORDER_FENCE) {
                words[blockIdx.x * blockDim.x + threadIdx.x] = 1;
                __threadfence();
                words[(2 + blockIdx.x) * blockDim.x + threadIdx.x] = words[(1 - blockIdx.x) * blockDim.x + threadIdx.x];
        } else if (kind == RACE_BLOCKS) {
                words[threadIdx.x] = 1;
        }
}

static __device__ void with_copies(uint32_t *words, uint32_t kind) {
        KVD_SHARED(uint4, shared);
        uint32_t i = threadIdx.x;

        copy_16(shared + i, reinterpret_cast<uint4 *>(words) + i);
        copy_commit();
        if (kind == ORDER_COPY)
                copy_wait<0>();
        if (kind == ORDER_COPY || kind == RACE_COPY_WAITS_LATE)
                __syncthreads();
        copy_wait<0>();
        words[(4 + blockIdx.x) * blockDim.x + i] = shared[(i + 1) % blockDim.x].x;
        if (kind == RACE_COPY_OVER) /* others may still be reading it */
                copy_16(shared + i, reinterpret_cast<uint4 *>(words) + i);
}

KVD_KERNEL(probe_race, struct race_probe, 64) {
        __shared__ uint32_t fixed[128];
        KVD_SHARED(uint32_t, words);

        if (a.kind >= FIRST_OF_COPIES)
                with_copies(a.words, a.kind);
        else if (a.kind >= FIRST_BETWEEN_BLOCKS)
                between_blocks(a.words, a.kind);
        else
                between_threads(a.memory == 0 ? fixed : a.memory == 1 ? words : a.words + 128 * blockIdx.x, a.kind);
}
