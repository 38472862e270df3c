/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_ATTEND_H
#define KVD_KERNELS_ATTEND_H

/*
 * Causal attention over keys and values that lie in blocks, read where they are. One call does the query heads that
 * share one key/value head, for one token (decode) or many (prefill). The bits of a result depend on the query and
 * on the keys and values at its own and earlier positions, and on nothing else: not on n, not on the block size.
 */

#include "kernels/ops.h"

struct kvd_attention {
        const struct kvd_ops *ops;

        /* keys and values: position i is slot i % block_tokens of blocks[i / block_tokens] */
        const uint8_t *const *blocks;
        size_t k_offset, v_offset; /* bytes from a block's start to slot 0 of this head */
        size_t stride;             /* elements from slot to slot */
        enum kvd_number type;
        uint32_t block_tokens;
        uint32_t dim;

        /* queries: head g of token i is q + i * ldq + g * dim; results lie likewise */
        uint32_t first; /* position of token 0 */
        uint32_t n;     /* tokens */
        uint32_t group; /* query heads */
        float scale;
        const float *q;
        size_t ldq;
        float *out;
        size_t ldo;

        float *scratch; /* kvd_attend_scratch() floats */
};

void kvd_attend(const struct kvd_attention *a);

/* Floats of scratch memory that kvd_attend needs; grows with first + n. */
size_t kvd_attend_scratch(const struct kvd_attention *a);

#endif
