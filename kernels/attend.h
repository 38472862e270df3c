/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_ATTEND_H
#define KVD_KERNELS_ATTEND_H

/*
 * Attention over keys and values in blocks, read in place. One call processes the query heads that
 * share one key/value head, for one token (decode) or many (prefill): out = softmax(scale q k) v.
 * Members that are zero are off; with all of them off it is causal attention over all positions.
 *
 * A slot that is not resident (its block is NULL) or not chosen is treated as if it did not exist.
 * The bits of a result depend only on the query and on the keys and values it sees, in their order.
 * They do not depend on n, on the block size, or on what was left out. A query that sees nothing
 * gets zeros.
 *
 * All pointers belong to the caller; kvd_attend writes to out, the masses and scratch only.
 */

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kvd_attention {
        const struct kvd_ops *ops;

        /* keys and values: position i is slot i % block_tokens of blocks[i / block_tokens] */
        const uint8_t *const *blocks; /* NULL: not resident, masked */
        size_t k_offset, v_offset;    /* bytes from a block's start to slot 0 of this head */
        size_t stride;                /* bytes from slot to slot */
        enum kvd_number type;
        uint32_t block_tokens;
        uint32_t dim;

        /*
         * What a query sees. Causal: token i sees the positions up to first + i. Where a head keeps
         * its tokens compacted, "position" means the slot, and first is the number of slots that
         * were filled before the call.
         */
        uint32_t first;  /* position of token 0 */
        uint32_t window; /* causal: a token sees only the last window positions up to its own */
        uint32_t n_keys; /* if not 0, bidirectional: every token sees positions [0, n_keys) */
        /* token-sparse: only these of the positions above; strictly ascending; NULL: all */
        const uint32_t *chosen;
        uint32_t n_chosen;

        /* queries: head g of token i is dim floats at q + i * ldq + g * dim; results likewise */
        uint32_t n;     /* tokens */
        uint32_t group; /* query heads */
        float scale;    /* > 0 */
        float cap;      /* soft cap: cap tanh(scale q k / cap) instead of scale q k */
        /* [group]: a score per query head that takes weight, and has no value; NULL: none */
        const float *sinks;
        const float *q;
        size_t ldq;
        float *out;
        size_t ldo;
        /*
         * [n][group]: the logarithm of the sum of e^score over what a query sees, by which partial
         * results are merged; -inf if it sees nothing. NULL: not computed.
         */
        float *weight;

        /*
         * The newest positions as they were before they were stored: position exact_first + i is dim
         * floats at exact_k + i * exact_ld and at exact_v + i * exact_ld. Causal: the token at
         * position p sees these of the positions from p / exact_span * exact_span on, as far as they
         * are given, and what is stored of those before. NULL: none; exact_span is then 0.
         */
        const float *exact_k, *exact_v;
        size_t exact_ld;
        uint32_t exact_first, exact_span;

        /*
         * For a block whose tokens now stand delta positions after where their keys were made,
         * queries are rotated by -delta.
         */
        /* per block: 0, or 1 + the index of its rotation; see kvd_rotations(). NULL: none */
        const uint32_t *rotation;
        const float *rotations; /* [dim] each: dim / 2 cosines, then dim / 2 sines; dim is even */

        /*
         * Attention mass, summed over the queries and query heads of the call and added to the
         * previous contents (per block: mass_b = l_b exp(m_b - m) / l). A query that sees anything
         * adds 1 in total, less what its sink takes. NULL: not computed.
         */
        float *block_mass; /* per block */
        float *token_mass; /* per position */

        float *scratch; /* kvd_attend_scratch() floats */
};

void kvd_attend(const struct kvd_attention *a);

/*
 * Number of floats of scratch memory that kvd_attend needs. It depends on n, group, dim, first,
 * n_keys, n_chosen, window, exact_span and on whether rotation is set, and is the same for every
 * head. It grows with n, first, n_keys and n_chosen.
 */
size_t kvd_attend_scratch(const struct kvd_attention *a);

/*
 * Computes the rotations of a block table, for all its heads and layers (rotary embedding,
 * half-split: elements i and i + half are a pair with angular frequency frequencies[i] radians per
 * position). deltas: positions, one per block. Fills rotation [n_blocks] and rotations [max][2
 * half] as struct kvd_attention expects them, with one rotation per distinct delta other than 0.
 * Returns the number of rotations, or UINT32_MAX if more than max are needed.
 */
uint32_t kvd_rotations(const int32_t *deltas, uint32_t n_blocks, const float *frequencies,
                       uint32_t half, uint32_t *rotation, float *rotations, uint32_t max);

#ifdef __cplusplus
}
#endif

#endif
