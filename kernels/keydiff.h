/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_KEYDIFF_H
#define KVD_KERNELS_KEYDIFF_H

/*
 * KeyDiff (Park et al. 2025, arXiv 2504.15364) finds the keys whose direction few others share. The
 * anchor of a KV head is the mean of its keys' directions, m = mean of k / |k|, and the score of a
 * token is -cos(m, k) (equation 8, which solves equation 10); the tokens with the largest scores
 * are kept. No query is needed. Sums of directions add up over blocks, so an anchor is kept per
 * block and summed per sequence.
 *
 * A key is valid if the sum of its squares is positive and finite. All others (not yet written,
 * NaN, infinite, or so short that the squares underflow) have no direction and score -INFINITY,
 * below every valid key. Sums are fp32: over the elements of a key in lanes, over tokens in chains
 * of about 1024.
 */

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * The keys of all KV heads of a layer. Head h of token t begins offset + h * head_stride + t %
 * per_block * token_stride bytes after blocks[t / per_block]. A block may be NULL: its tokens
 * are then not valid.
 */
struct kvd_key_rows {
        const uint8_t *const *blocks;
        size_t offset, head_stride, token_stride;
        uint32_t per_block, heads, dim;
        enum kvd_number type;
};

struct kvd_keydiff_ops {
        /*
         * sums[h * dim + d] += k / max(|k|, 1e-12) for the valid tokens from <= t < to; counts[h]
         * += their number. scratch of anchor and score: kvd_keydiff_scratch() floats.
         */
        void (*anchor)(float *sums, uint32_t *counts, const struct kvd_key_rows *keys,
                       uint32_t from, uint32_t to, float *scratch);

        /*
         * scores[h * stride + t - from] = -(m . k) / max(|m| |k|, 1e-8), -INFINITY if not valid.
         * The anchor of head h is m[h * dim ...]: the mean or the sum of directions, which give
         * equal scores (apart from the epsilon).
         */
        void (*score)(float *scores, size_t stride, const struct kvd_key_rows *keys, uint32_t from,
                      uint32_t to, const float *m, float *scratch);

        /* p = (1 + score) / 2, clamped to 0..1; 0 for -INFINITY and NaN. p may equal scores. */
        void (*priority)(float *p, const float *scores, size_t n);

        /*
         * Scores of blocks, from scores[h * stride + t] of heads heads and n tokens. best[h *
         * blocks + b] is the largest score in block b, where blocks is n / per_block rounded up.
         * mean[b] is the mean of best over the heads with a valid token in the block, -INFINITY if
         * there is none.
         */
        void (*blocks)(float *mean, float *best, const float *scores, size_t stride, uint32_t heads,
                       uint32_t n, uint32_t per_block);
};

static inline size_t kvd_keydiff_scratch(const struct kvd_key_rows *keys) {
        return (size_t)keys->heads * (((size_t)keys->dim + 15) / 16 * 16 + 1);
}

extern const struct kvd_keydiff_ops kvd_keydiff_scalar, kvd_keydiff_avx2, kvd_keydiff_avx512,
        kvd_keydiff_neon;

#ifdef __cplusplus
}
#endif

#endif
