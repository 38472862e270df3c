/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_DIFFUSE_PASS_H
#define KVLM_DIFFUSE_PASS_H

/*
 * The arithmetic of a model with bidirectional attention: some rows through some layers. Rows are the residual stream,
 * one a position, and stay between calls, so that a caller can put a stored hidden state in the place of the layers
 * that made it (BiCache: the restart from o_b). Bits do not depend on threads, on the kernels'
 * variant, or on whose memory the keys and values lie in.
 */

#include "tools/kvlm/forward.h"

/*
 * One layer's keys and values in blocks of one layer each (client/kvd.h with layer_groups = layers): K plane, V plane,
 * and in blocks that keep it the state plane [slot][hidden], the rows behind the layer.
 */
struct plane_shape {
        uint32_t tokens;
        enum kvd_number type;
        size_t number_bytes;
        size_t head_bytes, plane_bytes;
        size_t plain_bytes; /* of a block without a state plane */
        size_t block_bytes; /* with it */
};

struct plane_shape plane_shape(const struct config *, uint32_t block_tokens, enum kvd_number type);

/*
 * Where keys and values of a request lie: of layer l in blocks[l * n_blocks] and up. The prefix fills the first
 * blocks, what follows it begins in a block of its own: nothing is appended to a block that others may share.
 */
struct context {
        uint32_t n_prefix, n_tokens; /* n_prefix of n_tokens */
        uint32_t n_blocks;           /* of a layer */
        uint8_t **blocks;
        uint32_t *slots; /* [n_tokens]: of each position */
};

int context_new(const struct config *, const struct plane_shape *, uint32_t n_prefix, uint32_t n_tokens,
                struct context *ret);
void context_release(struct context *); /* not the blocks */

struct band {
        uint32_t layer, end_layer;
        uint32_t from, to;    /* positions whose rows go through */
        bool prefix_only;     /* they see the prefix, not everything */
        bool keep_states;     /* the state planes are written, and what comes behind sees what was written */
};

struct pass;

int pass_new(const struct model *, const struct kvd_ops *, const struct plane_shape *, uint32_t threads,
             struct pass **ret);
struct pass *pass_free(struct pass *);

int pass_room(struct pass *, uint32_t n_tokens); /* rows for so many positions; their contents are lost. -ENOMEM */
void pass_embed(struct pass *, const uint32_t *tokens, uint32_t from, uint32_t to);
void pass_restore(struct pass *, const struct context *, uint32_t layer); /* prefix rows, from layer's state planes */
int pass_run(struct pass *, const struct context *, const struct band *); /* -ENOMEM */

/* [n][vocab], of the rows at some positions; to has room for it. */
void pass_logits(struct pass *, const uint32_t *positions, uint32_t n, float *to);

#endif
