/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_KEYDIFF_H
#define KVD_KERNELS_KEYDIFF_H

/*
 * KeyDiff (Park et al. 2025): which keys point where few others do. The anchor of a KV head is the
 * mean of its keys' directions, m = mean of k / |k| (equation 8); a token's score is -cos(m, k)
 * (equation 10), and the largest stay. No query is needed. Sums of directions add up over blocks,
 * so an anchor is kept per block and summed per sequence.
 *
 * A key is valid if the sum of its squares is a positive finite number; all others (not written
 * yet, NaN, infinite, or so short that the squares vanish) have no direction and score -INFINITY,
 * below every valid key. Sums are fp32: over the elements of a key in lanes, over tokens as chains
 * of about 1024.
 */

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Keys of all KV heads of a layer: head h of token t begins h * head_stride + t % per_block *
 * token_stride elements after offset (bytes) in blocks[t / per_block]. A block may be NULL: none of
 * its tokens is valid.
 */
struct kvd_key_rows {
        const uint8_t *const *blocks;
        size_t offset, head_stride, token_stride;
        uint32_t per_block, heads, dim;
        enum kvd_number type;
};

struct kvd_keydiff_ops {
        /*
         * sums[h * dim + d] += k / max(|k|, 1e-12) of the valid tokens from <= t < to, and
         * counts[h] their number. scratch of anchor and score: kvd_keydiff_scratch() floats.
         */
        void (*anchor)(float *sums, uint32_t *counts, const struct kvd_key_rows *keys,
                       uint32_t from, uint32_t to, float *scratch);

        /*
         * scores[h * stride + t - from] = -(m . k) / max(|m| |k|, 1e-8), m being m[h * dim] and on:
         * mean or sum of directions (the epsilon apart, alike).
         */
        void (*score)(float *scores, size_t stride, const struct kvd_key_rows *keys, uint32_t from,
                      uint32_t to, const float *m, float *scratch);

        /* p = (1 + score) / 2, within 0 and 1; 0 for -INFINITY and NaN. In place if p is scores. */
        void (*priority)(float *p, const float *scores, size_t n);

        /*
         * scores[h * stride + t] of heads, n tokens. best[h * blocks + b] is the largest of block
         * b, blocks being n / per_block rounded up; mean[b] its mean over the heads that have a
         * valid token there, -INFINITY if none has.
         */
        void (*blocks)(float *mean, float *best, const float *scores, size_t stride, uint32_t heads,
                       uint32_t n, uint32_t per_block);
};

static inline size_t kvd_keydiff_scratch(const struct kvd_key_rows *keys) {
        return (size_t)keys->heads * (((size_t)keys->dim + 15) / 16 * 16 + 1);
}

extern const struct kvd_keydiff_ops kvd_keydiff_scalar, kvd_keydiff_avx2, kvd_keydiff_avx512;

#ifdef __cplusplus
}
#endif

#endif
