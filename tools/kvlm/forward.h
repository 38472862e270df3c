/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_FORWARD_H
#define KVLM_FORWARD_H

/*
 * The model's arithmetic over a chunk of tokens. Keys and values go to the blocks of the caller's table and are read
 * from there; whose memory that is makes no difference. Bits do not depend on how a text is cut into chunks, on
 * threads, or on the kernels' variant.
 */

#include "tools/kvlm/model.h"

/* Inside a block: for each layer the K plane, then the V plane, each [head][slot][dim] (client/kvd.h, KVD_HND). */
struct block_shape {
        uint32_t tokens;
        enum kvd_number type;
        uint32_t kv_heads, head_dim;
        size_t head_bytes, plane_bytes, block_bytes;
};

struct block_shape block_shape(const struct config *, uint32_t block_tokens, enum kvd_number type);

struct pooled;

struct step {
        uint8_t *const *blocks; /* of the whole sequence */
        const uint32_t *tokens; /* [n], at positions first and up */
        uint32_t first, n;
        uint32_t gone; /* the token at first has slot first - gone (modulo 2^32: slots may be more than tokens) */
        const uint32_t *chosen; /* slots in use, ascending, those of the step among them; NULL: all are */
        uint32_t n_chosen;
        const uint32_t *turn; /* of blocks that stand elsewhere than they were made, and the turns: kernels/attend.h */
        const float *turns;
        float *block_mass; /* attention that each block draws is added here; one token a step only. NULL: not wanted */
        struct pooled *pooled; /* whose queries say what they attend to; NULL: to all of the above */
        bool decoding;   /* these tokens were generated: device_forward.h */
        uint32_t stored; /* keys and values below this position are in the blocks already: read, not written */
        float *logits;   /* NULL: none */
        bool all_logits; /* of every token [n][vocab], not of the last one [vocab] */
};

struct forward;

int forward_new(const struct model *, const struct kvd_ops *, const struct block_shape *, uint32_t chunk,
                uint32_t threads, struct forward **ret);
struct forward *forward_free(struct forward *);
int forward_step(struct forward *, const struct step *); /* at most chunk tokens; -ENOMEM */
const float *forward_frequencies(const struct forward *); /* of the rotary embedding: [head_dim / 2] */
double forward_attention_ms(const struct forward *); /* spent in attention by the first thread, since the start */

#endif
