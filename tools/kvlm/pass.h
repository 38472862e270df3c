/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_PASS_H
#define KVLM_PASS_H

/*
 * The model's arithmetic on the CPU: takes some rows through some layers. Rows are the residual
 * stream, one per position. They persist between calls, so that a caller can substitute a stored
 * hidden state for the layers that produced it (diffuse.h). Keys and values are
 * written to and read from the caller's blocks, whose kind of memory makes no difference. Bits do
 * not depend on how a text is cut into chunks, on the number of threads, or on the kernels'
 * variant.
 */

#include "tools/kvlm/model.h"

/*
 * Layout of a block: for each of its layers the K plane, then the V plane, each [head][slot][dim]
 * (client/kvd.h, KVD_HND). In blocks of one layer that keep it, the state plane [slot][hidden]
 * follows: the rows after the layer.
 */
struct block_shape {
        uint32_t tokens;
        enum kvd_number type;
        uint32_t layers, kv_heads, head_dim;
        size_t row_bytes, state_bytes; /* of a token: a head's keys or values; the state */
        size_t head_bytes, plane_bytes;
        size_t plain_bytes; /* size without a state plane */
        size_t block_bytes; /* size with the state plane, if there is one */
};

struct block_shape block_shape(const struct config *, uint32_t block_tokens, enum kvd_number type);
struct block_shape block_shape_of_layer(const struct config *, uint32_t block_tokens,
                                        enum kvd_number type);

struct pooled;

/*
 * Where keys and values are, and what queries see of them. Members that are 0 are off: causal
 * attention over all slots.
 */
struct view {
        uint8_t *const *blocks;
        /* blocks per layer: those of layer l begin at l * n_blocks. 0: a block has all layers */
        uint32_t n_blocks;
        /*
         * slot of each position; NULL: position - gone, modulo 2^32, since there may be more slots
         */
        const uint32_t *slots;
        uint32_t gone;
        uint32_t n_keys;        /* bidirectional: every query sees the first n_keys slots */
        const uint32_t *chosen; /* only these slots; ascending */
        uint32_t n_chosen;
        /*
         * of blocks that are at other positions than they were made at, and the rotations; see
         * kernels/attend.h
         */
        const uint32_t *rotation;
        const float *rotations;
        float *block_mass; /* attention mass is added here, per block; only for runs of one token */
        struct pooled *pooled; /* if not NULL, queries select what they attend to */
        /* keys and values below this position are already in the blocks: only read */
        uint32_t stored;
        /* write the state planes; later layers continue from what was written */
        bool keep_states;
};

struct pass;

int pass_new(const struct model *, const struct kvd_ops *, const struct block_shape *,
             uint32_t threads, struct pass **ret);
struct pass *pass_free(struct pass *);

/*
 * Makes rows for positions [first, first + n). If there are more rows than before, the contents of
 * all rows are lost. -ENOMEM
 */
int pass_rows(struct pass *, uint32_t first, uint32_t n);
/* tokens: [to - from] */
void pass_embed(struct pass *, const uint32_t *tokens, uint32_t from, uint32_t to);
/* Loads rows [0, to) from a layer's state planes. */
void pass_restore(struct pass *, const struct view *, uint32_t layer, uint32_t to);
int pass_run(struct pass *, const struct view *, uint32_t layer, uint32_t end_layer, uint32_t from,
             uint32_t to);

/*
 * Logits of rows from to to - 1, [to - from][vocab], or of the rows at some positions, [n][vocab].
 */
void pass_logits(struct pass *, uint32_t from, uint32_t to, float *ret);
void pass_logits_at(struct pass *, const uint32_t *positions, uint32_t n, float *ret);

const float *pass_frequencies(const struct pass *); /* of the rotary embedding: [head_dim / 2] */
/* time that the first thread has spent in attention so far */
double pass_attention_ms(const struct pass *);

#endif
