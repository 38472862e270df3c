/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_ATTEND_JOIN_CUH
#define KVD_KERNELS_CUDA_ATTEND_JOIN_CUH

/* Merges the sums that the warps of a thread block have of one token. */

#include "kernels/cuda/attend_rows.cuh"

/* Stores a row's result or, if there are several splits, the sum of this one. */
ATTEND void deliver(const struct gpu_attend_launch &r, const struct head &h, uint32_t token,
                    uint32_t g, uint32_t split, uint32_t d, float sum, float largest,
                    float weights) {
        uint64_t row = row_of(r, h, token, g), part = row * r.n_splits + split;

        if (r.n_splits == 1) {
                store_number(r.a.out, result_at(r, h, token, g) + d, r.a.out_number,
                             weights == 0.0f ? 0.0f : sum / weights);
                if (d == 0)
                        store_total(r, row, largest, weights);
                return;
        }
        reinterpret_cast<float *>(r.sums)[part * r.a.dim + d] = sum;
        if (d == 0) {
                reinterpret_cast<float *>(r.stats)[part * 2] = largest;
                reinterpret_cast<float *>(r.stats)[part * 2 + 1] = weights;
        }
}

/* sums[warp][ROWS][DIM], and ends[warp][ROWS]: largest score and weights. */
template <int DIM, int ROWS>
ATTEND void join(const struct gpu_attend_launch &r, const struct head &h, uint32_t token,
                 uint32_t first_head, uint32_t split, const float *sums, const float *ends) {
        uint32_t warps = blockDim.x / 32;

        for (uint32_t i = threadIdx.x; i < ROWS * DIM; i += blockDim.x) {
                uint32_t row = i / DIM, d = i % DIM;
                float largest = -INFINITY, weights = 0.0f, sum = 0.0f;

                if (first_head + row >= r.a.group || d >= r.a.dim)
                        continue;
                for (uint32_t w = 0; w < warps; w++)
                        largest = fmaxf(largest, ends[(w * ROWS + row) * 2]);
                for (uint32_t w = 0; w < warps; w++) {
                        float by = shrink(ends[(w * ROWS + row) * 2], largest);

                        weights = fmaf(ends[(w * ROWS + row) * 2 + 1], by, weights);
                        sum = fmaf(sums[(w * ROWS + row) * DIM + d], by, sum);
                }
                deliver(r, h, token, first_head + row, split, d, sum, largest, weights);
        }
}

#endif
