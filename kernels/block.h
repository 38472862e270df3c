/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_BLOCK_H
#define KVD_KERNELS_BLOCK_H

/*
 * What all methods do with blocks: choose the best tokens, and compact scattered ones. All
 * operations are exact.
 */

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Tokens of one KV head: token i is at blocks[i / per_block] + offset + i % per_block * stride, all
 * in bytes.
 */
struct kvd_slots {
        uint8_t *const *blocks;
        size_t offset, stride;
        uint32_t per_block;
        uint32_t bytes; /* bytes of one token */
};

struct kvd_block_ops {
        /*
         * Stores the indices of the k largest of n scores, ascending, and returns their number,
         * min(k, n). Ties at the cut: later ones (larger indices) are taken if later, else earlier
         * ones. -0 equals 0. NaN is less than every number. scratch: n elements.
         */
        uint32_t (*topk)(uint32_t *indices, const float *scores, uint32_t n, uint32_t k, bool later,
                         uint32_t *scratch);

        /*
         * Copies token index[j] of from to token j of to, j < n; from->bytes and to->bytes are
         * equal. May work in place (to and from the same slots) if the indices ascend.
         */
        void (*compact)(const struct kvd_slots *to, const struct kvd_slots *from,
                        const uint32_t *index, uint32_t n);
};

extern const struct kvd_block_ops kvd_block_scalar, kvd_block_avx2, kvd_block_avx512,
        kvd_block_neon;

#ifdef __cplusplus
}
#endif

#endif
