/* SPDX-License-Identifier: Apache-2.0 */
#define KVD_EMULATE 1
#include "tests/gpu/fakecuda/emulate_cuda.h"

#include "kernels/cuda/device.cuh"
#include "tests/kernels/cuda/probe.h"

/*
 * Sums n numbers of b in a tree, with many barriers. to[block]: the sum, and how often the votes
 * were right.
 */
KVD_KERNEL(probe_barrier, struct probe, 1024) {
        KVD_SHARED(uint32_t, sum);
        const uint32_t *b = static_cast<const uint32_t *>(a.b);
        uint32_t i = threadIdx.x, right = 0;

        sum[i] = i < a.n ? b[i] : 0;
        __syncthreads();
        for (uint32_t half = blockDim.x / 2; half; half /= 2) {
                uint32_t other = i < half ? sum[i + half] : 0;

                right += __syncthreads_or(i == half) == 1;
                right += __syncthreads_and(i < half) == 0;
                right += __syncthreads_count(i < half) == (int)half;
                if (i < half)
                        sum[i] += other;
                __syncthreads();
        }
        atomicAdd(&a.to[2 * blockIdx.x + 1], right);
        if (i == 0)
                a.to[2 * blockIdx.x] = sum[0];
}

KVD_KERNEL(probe_warp, struct probe, 256) {
        uint32_t lane = lane_id(), warp = threadIdx.x / 32, *to = a.to + threadIdx.x * 6;

        to[0] = warp_xor(lane, 5);
        to[1] = warp_from(lane * 10 + warp, 7);
        to[2] = warp_up(lane, 3);
        to[3] = warp_ballot(lane % 3 == 0);
        to[4] = (uint32_t)warp_sum((float)threadIdx.x);
        __syncwarp();
        to[5] = (uint32_t)(warp_from((uint64_t)lane << 33, (int)(lane + 1)) >> 33);
}

/* a: 16 x 16, b: 16 x 8, both as rows of 16-bit numbers; to: 16 x 8 floats. */
KVD_KERNEL(probe_mma, struct probe, 32) {
        const uint16_t *x = static_cast<const uint16_t *>(a.a), *y = static_cast<const uint16_t *>(a.b);
        uint32_t g = lane_id() / 4, t = lane_id() % 4, left[4], right[2];
        float d[4] = {1.0f, 1.0f, 1.0f, 1.0f};

        for (uint32_t i = 0; i < 4; i++) {
                const uint16_t *at = x + (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8;

                left[i] = (uint32_t)at[1] << 16 | at[0];
        }
        for (uint32_t i = 0; i < 2; i++)
                right[i] = (uint32_t)y[(2 * t + 8 * i + 1) * 8 + g] << 16 | y[(2 * t + 8 * i) * 8 + g];
        if (a.kind == NUMBER_F16)
                mma_f16(d, left, right);
        else
                mma_bf16(d, left, right);
        for (uint32_t i = 0; i < 4; i++)
                a.to[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = __float_as_uint(d[i]);
}

/*
 * to: the contents of shared memory after n groups, of which PENDING may be in flight; a: 16 bytes
 * per thread and group.
 */
template <int PENDING> static __device__ void copy_groups(const struct probe &a, uint4 *shared) {
        for (uint32_t group = 0; group < a.n; group++) {
                copy_16(shared + group * blockDim.x + threadIdx.x,
                        static_cast<const uint4 *>(a.a) + group * blockDim.x + threadIdx.x);
                copy_commit();
        }
        copy_wait<PENDING>();
        __syncthreads();
        for (uint32_t group = 0; group < a.n; group++)
                a.to[group * blockDim.x + threadIdx.x] =
                        shared[group * blockDim.x + (threadIdx.x + 1) % blockDim.x].x;
}

KVD_KERNEL(probe_copy, struct probe, 64) {
        KVD_SHARED(uint4, shared);

        if (a.kind == 0)
                copy_groups<0>(a, shared);
        else
                copy_groups<2>(a, shared);
}

/* Intentional races: the last thread to write is visible. */
KVD_KERNEL(probe_order, struct probe, 256) {
        a.to[0] = blockIdx.x;
        a.to[1] = threadIdx.x;
        a.to[2] = a.to[2] * 31 + threadIdx.x + blockIdx.x * 7;
}

KVD_KERNEL(probe_atomic, struct probe, 256) {
        uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;

        atomicAdd(a.to, 1u);
        atomicMax(a.to + 1, i);
        atomicMin(a.to + 2, i);
        atomicOr(a.to + 3, 1u << i % 32);
        atomicAdd(reinterpret_cast<float *>(a.to + 4), 0.5f);
        atomicCAS(a.to + 5, i, i + 1);
}

/* to[i]: fp16 and bf16 of the float whose bits are kind + 977 i. */
KVD_KERNEL(probe_narrow, struct probe, 256) {
        for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < a.n; i += gridDim.x * blockDim.x) {
                float x = __uint_as_float(a.kind + i * 977);

                a.to[i] = (uint32_t)float_to_f16(x) << 16 | float_to_bf16(x);
        }
}

KVD_KERNEL(probe_wrong, struct probe, 64) {
        KVD_SHARED(uint32_t, shared);
        uint32_t i = threadIdx.x;

        if (a.kind == WRONG_BARRIER_MISSED && i != 40)
                __syncthreads();
        if (a.kind == WRONG_BARRIER_OTHER) {
                if (i < 32)
                        __syncthreads();
                else
                        __syncthreads();
        }
        if (a.kind == WRONG_LANE_MISSED && i != 3)
                a.to[i] = warp_xor(i, 1);
        if (a.kind == WRONG_LANE_ELSEWHERE)
                a.to[i] = i < 16 ? warp_xor(i, 1) :
                                   warp_xor(i, 2);
        if (a.kind == WRONG_LANE_AT_BARRIER) {
                if (i % 32)
                        __syncwarp();
                __syncthreads();
        }
        if (a.kind == WRONG_ALIGNMENT)
                a.to[0] = load_16(a.to + 1).x;
        if (a.kind == WRONG_SHARED_END)
                shared[i] = i; /* half as much was requested */
}
