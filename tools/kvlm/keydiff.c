/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/keydiff.h"

#include <string.h>

#include "kernels/keydiff.h"

static struct kvd_key_rows keys_of(const struct block_shape *s, uint8_t *const *blocks, uint32_t layer) {
        return (struct kvd_key_rows){
                .blocks = (const uint8_t *const *)blocks,
                .offset = 2 * layer * s->plane_bytes,
                .head_stride = (size_t)s->tokens * s->head_dim,
                .token_stride = s->head_dim,
                .per_block = s->tokens,
                .heads = s->kv_heads,
                .dim = s->head_dim,
                .type = s->type,
        };
}

/* A layer's anchors, then the kernels' own. Counts are as large as floats. */
size_t keydiff_scratch(const struct block_shape *s) {
        const struct kvd_key_rows keys = keys_of(s, NULL, 0);

        return (size_t)s->kv_heads * (s->head_dim + 1) + kvd_keydiff_scratch(&keys);
}

void keydiff_scores(const struct kvd_ops *ops, const struct block_shape *s, uint8_t *const *blocks, uint32_t layer,
                    uint32_t n, float *scores, float *scratch) {
        const struct kvd_key_rows keys = keys_of(s, blocks, layer);
        float *sums = scratch;
        uint32_t *counts = (uint32_t *)(sums + (size_t)s->kv_heads * s->head_dim);

        scratch += (size_t)s->kv_heads * (s->head_dim + 1);
        memset(sums, 0, (size_t)s->kv_heads * s->head_dim * sizeof *sums);
        memset(counts, 0, s->kv_heads * sizeof *counts);
        ops->keydiff->anchor(sums, counts, &keys, 0, n, scratch);
        ops->keydiff->score(scores, n, &keys, 0, n, sums, scratch);
}
