/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_SUMMARY_H
#define KVD_BASE_SUMMARY_H

/*
 * Summaries of blocks, made by the worker when a block is sealed and kept when it leaves the pool:
 * the block's labels, the sum of its normalised keys, and the norms of its planes. One memfd per space, written by the worker only, mapped read-only by clients.
 * The row of a resident block is its id, that of an exact copy kvd_copy_row of its place.
 *
 *      +---------------------+ 0
 *      | channels            |   layers x kv_heads x label_channels x u16: ascending
 *      +---------------------+ rows_off
 *      | rows                |   (capacity + places) x row_bytes
 *      +---------------------+ size
 *
 *      row:  stamp           8: generation << 32 | KVD_SUMMARY_MADE; 0 while it is rewritten. The version word: a
 *                               reader compares it with the block's generation before and after (shm.h)
 *            norms           layers x 2 x f32: Frobenius norm of the K plane and of the V plane
 *            anchors         layers x kv_heads x head_dim x f32: sum of k / |k| over the block's tokens
 *            labels          layers x kv_heads x block_tokens x label_bytes: (channels + 1) / 2 bytes of 4-bit numbers,
 *                            low half first, then minimum and scale as two f16
 *
 * In a space with layer groups, layers is the number in one group.
 */

#include "ipc/base/place.h"

#define KVD_SUMMARY_MADE 1u

struct kvd_summary {
        uint64_t rows_off, row_bytes, size;
        uint32_t norms_off, anchors_off, labels_off; /* inside a row */
        uint32_t label_bytes;
        uint32_t layers; /* layers of a block */
        uint32_t channels;
};

static inline struct kvd_summary kvd_summary_of(const struct kvd_index *ix) {
        const struct kvd_shape *g = &ix->geometry;
        struct kvd_summary s = {.layers = g->layers / g->layer_groups,
                                .channels = ix->label_channels};
        uint64_t heads = (uint64_t)s.layers * g->kv_heads;

        s.label_bytes = (s.channels + 1) / 2 + 4;
        s.norms_off = 8;
        s.anchors_off = s.norms_off + s.layers * 2 * (uint32_t)sizeof(float);
        s.labels_off = s.anchors_off + (uint32_t)(heads * g->head_dim * sizeof(float));
        s.row_bytes = ALIGN_UP(s.labels_off + heads * g->block_tokens * s.label_bytes, 64);
        s.rows_off = ALIGN_UP(heads * s.channels * sizeof(uint16_t), 4096);
        s.size = ALIGN_UP(s.rows_off + ((uint64_t)ix->capacity + kvd_places(ix)) * s.row_bytes,
                          4096);
        return s;
}

static inline uint8_t *kvd_summary_row(const struct kvd_summary *s, void *at, uint64_t row) {
        return (uint8_t *)at + s->rows_off + row * s->row_bytes;
}

#endif
