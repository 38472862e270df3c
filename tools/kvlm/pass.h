/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_PASS_H
#define KVLM_PASS_H

/*
 * The model's arithmetic on the processor: some rows through some layers. Rows are the residual
 * stream, one a position, and stay between calls, so that a caller can put a stored hidden state in
 * the place of the layers that made it (BiCache: the restart from o_b). Keys and values go to
 * blocks of the caller and are read from there; whose memory that is makes no difference. Bits do
 * not depend on how a text is cut into chunks, on threads, or on the kernels' variant.
 */

#include "tools/kvlm/model.h"

/*
 * Inside a block: for each of its layers the K plane, then the V plane, each [head][slot][dim]
 * (client/kvd.h, KVD_HND); in blocks of one layer that keep it then the state plane [slot][hidden],
 * the rows behind the layer.
 */
struct block_shape {
        uint32_t tokens;
        enum kvd_number type;
        uint32_t layers, kv_heads, head_dim;
        size_t number_bytes, head_bytes, plane_bytes;
        size_t plain_bytes; /* without a state plane */
        size_t block_bytes; /* with it, if it has one */
};

struct block_shape block_shape(const struct config *, uint32_t block_tokens, enum kvd_number type);
struct block_shape block_shape_of_layer(const struct config *, uint32_t block_tokens,
                                        enum kvd_number type);

struct pooled;

/*
 * Where keys and values lie, and what queries see of them. Members that are 0 are off: causal, all
 * slots in use.
 */
struct view {
        uint8_t *const *blocks;
        /* of a layer: those of layer l begin at l * n_blocks. 0: a block has all layers */
        uint32_t n_blocks;
        /* of each position; NULL: position - gone, modulo 2^32 as slots may be more */
        const uint32_t *slots;
        uint32_t gone;
        uint32_t n_keys; /* bidirectional: every query sees so many slots */
        const uint32_t *chosen; /* of slots, only these; ascending */
        uint32_t n_chosen;
        /*
         * of blocks that stand elsewhere than they were made, and the rotations: kernels/attend.h
         */
        const uint32_t *rotation;
        const float *rotations;
        float *block_mass; /* attention that each block draws is added here; one token a run only */
        struct pooled *pooled; /* whose queries say what they attend to */
        /* keys and values below this position are in the blocks already: read, not written */
        uint32_t stored;
        /* the state planes are written, and what comes behind sees what was written */
        bool keep_states;
};

struct pass;

int pass_new(const struct model *, const struct kvd_ops *, const struct block_shape *,
             uint32_t threads, struct pass **ret);
struct pass *pass_free(struct pass *);

/*
 * Rows for positions [first, first + n); what others held is lost, if there are more rows than
 * before. -ENOMEM
 */
int pass_rows(struct pass *, uint32_t first, uint32_t n);
/* [to - from] */
void pass_embed(struct pass *, const uint32_t *tokens, uint32_t from, uint32_t to);
/* Rows [0, to), from a layer's state planes. */
void pass_restore(struct pass *, const struct view *, uint32_t layer, uint32_t to);
int pass_run(struct pass *, const struct view *, uint32_t layer, uint32_t end_layer, uint32_t from,
             uint32_t to);

/* [to - from][vocab]; or, of the rows at some positions, [n][vocab]. */
void pass_logits(struct pass *, uint32_t from, uint32_t to, float *ret);
void pass_logits_at(struct pass *, const uint32_t *positions, uint32_t n, float *ret);

const float *pass_frequencies(const struct pass *); /* of the rotary embedding: [head_dim / 2] */
/* spent in attention by the first thread, since the start */
double pass_attention_ms(const struct pass *);

#endif
