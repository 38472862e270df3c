/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_METHODS_ATTEND_H
#define KVD_CLIENT_METHODS_ATTEND_H

/* What the attentions over tables have in common: checks, what is seen, and memory. */

#include "client/gpu/gpu_view.h"
#include "client/kvd_attend.h"
#include "kernels/attend.h"

#define ATTEND_LINE 64u

/* A layer of a call: where its planes are in each block. */
struct attend_layer {
        const struct kvd_shape *geometry;
        const struct kvd_ops *ops;
        struct view *view;
        struct kvd_layer_view at;
        size_t keys, values; /* bytes from a block's start */
};

/* Whether attention can read the space's blocks, and it has that layer. -EINVAL, -ECHILD */
int attend_check_space(const struct kvd_space *space, uint32_t layer);
/* Finds the memory of a table's blocks. -EINVAL: it has none here, or no room for its new tokens. */
int attend_find_table(struct kvd_space *space, const struct kvd_table *t, struct view **ret);
int attend_check_block(const struct view *view, uint32_t id); /* -EINVAL: not mapped */
/* All of that, and the layer's place in host memory. -EINVAL: also the blocks are on a GPU */
int attend_find_layer(struct kvd_space *space, uint32_t number, const struct kvd_table *t,
                      struct attend_layer *ret);
/* Returns the addresses of the first n blocks of a table. -EINVAL: one is not mapped. */
int attend_find_blocks(const struct attend_layer *l, const struct kvd_table *t, uint32_t n,
                       const uint8_t **blocks);
int attend_check_heads(const struct kvd_shape *g, const struct kvd_heads *heads);
/* All but the blocks, what is seen of them, and the rows. */
struct kvd_attention attend_describe(const struct attend_layer *l, const struct kvd_table *t,
                                     const struct kvd_heads *heads);
/* Sets the exact rows, of at most that many positions, the newest ones. a->first and a->n are set. */
void attend_exact(const struct kvd_heads *heads, uint32_t most, struct kvd_attention *a);
/*
 * Lists the slots that are seen of n entries, of which entry i has fill[i] tokens, and then those up
 * to n_slots: a table's. chosen: only these n_chosen slots of the entries; NULL: all. to has room for
 * all of them. Returns how many they are.
 */
uint32_t attend_list(const uint32_t *fill, uint32_t n, uint32_t block_tokens, uint32_t n_slots,
                     const uint32_t *chosen, uint32_t n_chosen, uint32_t *to);

/* A part of an attention, to be merged with others. */
struct attend_part {
        const bool *without; /* [entries] that are not in it; NULL: all are */
        bool behind;         /* whether the table's tokens are in it */
        float *weight;       /* [kv_heads] as in struct kvd_attention */
};

/* kvd_sequence_attention, of a part; NULL: of all. */
int attend_sequence(const struct kvd_seen *seen, uint32_t layer, const struct kvd_table *tail,
                    const struct kvd_heads *heads, const struct attend_part *part, const float *q,
                    size_t ldq, float *out, size_t ldo);
/* One KV head. a describes the call; the rest of it is set. */
void attend_head(const struct attend_layer *l, const struct kvd_heads *heads, uint32_t head,
                 struct kvd_attention a);

/* Memory of a space that calls reuse. */
struct scratch {
        size_t bytes;
        alignas(16) uint8_t data[];
};

struct scratch *scratch_take(struct kvd_space *space, size_t bytes);
void scratch_put(struct kvd_space *space, struct scratch *s);
/* Makes room behind the used bytes, which stay. -ENOMEM; s is unchanged then. */
int scratch_grow(struct scratch **s, size_t used, size_t bytes);

#endif
