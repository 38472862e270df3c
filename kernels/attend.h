/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_ATTEND_H
#define KVD_KERNELS_ATTEND_H

/*
 * Attention over keys and values that lie in blocks, read where they are. One call does the query
 * heads that share one key/value head, for one token (decode) or many (prefill). Members that are
 * zero are off: what is left is causal attention over all positions.
 *
 * A slot that is not resident (its block is NULL), or not chosen, is as if it had never been: the
 * bits of a result depend on the query and on the keys and values that it sees, in order, and on
 * nothing else: not on n, not on the block size, not on what was left out. A query that sees
 * nothing gets zeros.
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
        size_t stride;                /* elements from slot to slot */
        enum kvd_number type;
        uint32_t block_tokens;
        uint32_t dim;

        /*
         * What a query may see. Causal: token i sees the positions up to first + i. Where a head
         * keeps its tokens compacted, "position" is the slot, and first the number of slots that
         * were filled before the call.
         */
        uint32_t first;         /* position of token 0 */
        uint32_t n_keys;        /* bidirectional: every token sees positions [0, n_keys) */
        /* token-sparse: of those, only these positions; ascending, none twice */
        const uint32_t *chosen;
        uint32_t n_chosen;

        /* queries: head g of token i is q + i * ldq + g * dim; results lie likewise */
        uint32_t n;     /* tokens */
        uint32_t group; /* query heads */
        float scale;    /* > 0 */
        const float *q;
        size_t ldq;
        float *out;
        size_t ldo;

        /*
         * Queries are rotated by -delta for the keys of a block that stand delta positions from
         * where they were made.
         */
        /* per block: 0, or 1 + the number of its rotation; see kvd_rotations() */
        const uint32_t *rotation;
        const float *rotations;   /* [dim] each; dim is even */

        /*
         * Attention mass, summed over the queries and query heads of the call, added to what is
         * there (per block: mass_b = l_b exp(m_b - m) / l). A query that sees anything adds 1 in
         * all.
         */
        float *block_mass; /* per block */
        float *token_mass; /* per position */

        float *scratch; /* kvd_attend_scratch() floats */
};

void kvd_attend(const struct kvd_attention *a);

/*
 * Floats of scratch memory that kvd_attend needs. It depends on n, group, first, n_keys and
 * n_chosen, not on the head; it grows with first, n, n_keys and n_chosen.
 */
size_t kvd_attend_scratch(const struct kvd_attention *a);

/*
 * The rotations of a block table, for all its heads and layers (rotary embedding, half-split:
 * elements i and i + half are a pair of angular frequency frequencies[i]). rotation and rotations
 * are filled as kvd_attention wants them; one rotation per distinct delta that is not 0. Returns
 * their number; at most max are made, then it returns UINT32_MAX.
 */
uint32_t kvd_rotations(const int32_t *deltas, uint32_t n_blocks, const float *frequencies,
                       uint32_t half, uint32_t *rotation, float *rotations, uint32_t max);

#ifdef __cplusplus
}
#endif

#endif
