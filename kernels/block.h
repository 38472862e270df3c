/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_BLOCK_H
#define KVD_KERNELS_BLOCK_H

/*
 * What all methods do with blocks: choose the best, bring scattered tokens together, keep a short copy. All of it is
 * exact, or rounded in one defined way, so that every variant gives the same bytes.
 */

#include "kernels/ops.h"

/* Tokens of one KV head: token i is at blocks[i / per_block] + offset + i % per_block * stride, all in bytes. */
struct kvd_slots {
        uint8_t *const *blocks;
        size_t offset, stride;
        uint32_t per_block;
        uint32_t bytes; /* of a token */
};

struct kvd_block_ops {
        /*
         * Indices of the k largest of n scores, ascending; returns how many, min(k, n). Of equal scores at the cut the
         * ones with larger indices are taken if later, else those with lower ones. -0 equals 0. A NaN is less than
         * every number. scratch: n numbers.
         */
        uint32_t (*topk)(uint32_t *indices, const float *scores, uint32_t n, uint32_t k, bool later, uint32_t *scratch);

        /*
         * bytes at offset of each of n blocks, to or from one array, packed. No block (NULL): gather writes zeros,
         * scatter passes over its part. What is too large for the caches goes past them.
         */
        void (*gather)(void *to, const uint8_t *const *blocks, uint32_t n, size_t offset, size_t bytes);
        void (*scatter)(uint8_t *const *blocks, const void *from, uint32_t n, size_t offset, size_t bytes);

        /*
         * Token index[j] of from becomes token j of to, j < n, token sizes being equal. In place if to is from and the
         * indices ascend.
         */
        void (*compact)(const struct kvd_slots *to, const struct kvd_slots *from, const uint32_t *index, uint32_t n);

        /*
         * n rows of dim numbers, stride elements apart, in 4 bits each, and back. A row becomes kvd_packed_4_bytes():
         * codes, number 2 j in the low half of byte j, then for each group its least number and its step, in fp16; a
         * number is least + code * step. Groups are of group numbers, an even count, or of the whole row for 0. What is
         * beyond fp16 counts as its largest number, and a NaN as the least of its group.
         */
        void (*pack_4)(uint8_t *to, const void *rows, size_t stride, uint32_t n, uint32_t dim, uint32_t group,
                       enum kvd_number type);
        void (*unpack_4)(void *rows, size_t stride, const uint8_t *from, uint32_t n, uint32_t dim, uint32_t group,
                         enum kvd_number type);
};

static inline size_t kvd_packed_4_bytes(uint32_t dim, uint32_t group) {
        uint32_t groups = group ? (dim + group - 1) / group : 1;

        return ((size_t)dim + 1) / 2 + groups * (size_t)4;
}

extern const struct kvd_block_ops kvd_block_scalar, kvd_block_avx2, kvd_block_avx512;

#endif
