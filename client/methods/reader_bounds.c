/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Bounds of scores, as in Quest (ICML 2024, arXiv:2406.10774, algorithm 1). For each dimension of a
 * block's keys the least and the largest value are known. The larger of q[d] * least[d] and q[d] *
 * most[d], summed over d, is at least the score of every key of the block. These extremes are
 * computed when a layer is first asked for, and kept while the block stays the same, or has left.
 */

#include <errno.h>
#include <math.h>
#include <string.h>

#include "client/gpu/gpu_view.h"
#include "client/methods/reader.h"
#include "ipc/base/sys.h"
#include "kernels/attend_inner.h"

struct bounds {
        /* scores [group][max_blocks], total, numbers [2][max_blocks], queries; a key, before */
        float *scratch;
        /* of a layer: [max_blocks] the block whose extremes are known, 0: none; then extremes_of */
        kvd_ref *known[];
};

void bounds_free(struct kvd_reader *r) {
        for (uint32_t l = 0; r->bounds && l < r->geometry->layers; l++)
                free(r->bounds->known[l]);
        if (r->bounds)
                free(r->bounds->scratch);
        free(r->bounds);
}

static bool make(struct kvd_reader *r, uint32_t layer) {
        size_t dim = r->geometry->head_dim, floats = 2 * dim * r->geometry->kv_heads;
        struct bounds *b = r->bounds;

        if (!b)
                b = r->bounds = sys->calloc(1, sizeof *b + r->geometry->layers * sizeof *b->known);
        if (b && !b->scratch)
                b->scratch = sys->calloc((r->group + 3) * (size_t)r->max_blocks + r->group * dim,
                                         sizeof *b->scratch);
        if (b && !b->known[layer])
                b->known[layer] = sys->calloc(r->max_blocks,
                                              sizeof **b->known + floats * sizeof(float));
        return b && b->scratch && b->known[layer];
}

/* [2][head_dim]: the least, the largest */
static float *extremes_of(const struct kvd_reader *r, uint32_t layer, uint32_t head, uint32_t i) {
        size_t row = (size_t)head * r->max_blocks + i;

        return (float *)(r->bounds->known[layer] + r->max_blocks) + row * 2 * r->geometry->head_dim;
}

/* All keys of a block. key: scratch for one. */
static void measure(const struct kvd_reader *r, float *least, float *most, const uint8_t *keys,
                    uint64_t stride, uint32_t n_keys, float *key) {
        uint32_t dim = r->geometry->head_dim;

        for (uint32_t t = 0; t < n_keys; t++, keys += stride) {
                r->ops->read_key(key, keys, dim, (enum kvd_number)r->geometry->dtype);
                for (uint32_t d = 0; d < dim; d++) {
                        least[d] = t ? fminf(least[d], key[d]) : key[d];
                        most[d] = t ? fmaxf(most[d], key[d]) : key[d];
                }
        }
}

static void measure_head(const struct kvd_reader *r, uint32_t layer, uint32_t head, uint32_t i,
                         const struct kvd_layer_view *at) {
        const uint8_t *keys = r->entries[i].data + (uintptr_t)at->keys + head * at->head_stride;
        float *least = extremes_of(r, layer, head, i);

        measure(r, least, least + r->geometry->head_dim, keys, at->token_stride, r->fill[i],
                r->bounds->scratch);
}

int bounds_prepare(struct kvd_reader *r, uint32_t layer) {
        const struct view *view = r->sequence->view;
        struct kvd_layer_view at;

        if (view->device || r->geometry->dtype == KVD_I8)
                return client_fail(-EINVAL, "blocks are on a GPU, or of i8");
        if (!make(r, layer))
                return client_fail(-ENOMEM, "out of memory for bounds of layer %u", layer);
        layer_lay_out(view->ix, NULL, layer, &at);
        for (uint32_t i = 0; i < r->n_entries; i++) {
                const struct kvd_entry *e = r->entries + i;
                kvd_ref block = kvd_ref_make(e->block, e->generation);

                if (!e->data || r->bounds->known[layer][i] == block)
                        continue;
                for (uint32_t h = 0; h < r->geometry->kv_heads; h++)
                        measure_head(r, layer, h, i, &at);
                r->bounds->known[layer][i] = block;
        }
        return 0;
}

static float bound(const float *q, const float *least, uint32_t dim) {
        float sum = 0;

        for (uint32_t d = 0; d < dim; d++)
                sum += fmaxf(q[d] * least[d], q[d] * least[dim + d]);
        return sum;
}

/* The queries as keys need them that were made at another position. */
static const float *turned(const struct kvd_reader *r, const float *q, uint32_t i, float *to) {
        const struct kvd_attention a = {.ops = r->ops,
                                        .dim = r->geometry->head_dim,
                                        .rotations = r->rotations};

        if (!r->rotated || !r->rotation[i])
                return q;
        kvd_attend_rotate(&a, to, q, r->rotation[i], r->group);
        return to;
}

uint32_t bounds_top(struct kvd_reader *r, uint32_t layer, uint32_t head, const float *q, uint32_t z,
                    uint32_t *to) {
        float *scores = r->bounds->scratch, *total = scores + r->group * (size_t)r->max_blocks;
        uint32_t dim = r->geometry->head_dim, *numbers = (uint32_t *)(total + r->max_blocks);

        for (uint32_t i = 0; i < r->n_entries; i++) {
                const float *rows = turned(r, q, i, total + 3 * (size_t)r->max_blocks);
                bool known = r->fill[i] > 0 && r->bounds->known[layer][i];

                for (uint32_t g = 0; g < r->group; g++)
                        scores[g * (size_t)r->max_blocks + i] =
                                known ? bound(rows + g * dim, extremes_of(r, layer, head, i), dim) :
                                        -INFINITY;
        }
        r->ops->hshare->aggregate(total, scores, r->max_blocks, r->n_entries, r->group, r->scale,
                                  KVD_AGGREGATE_SUM);
        return r->ops->hshare->top(to, total, r->n_entries, z, 0, numbers);
}
