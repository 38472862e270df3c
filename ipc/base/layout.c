/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Computes the layout of an index, and checks the layout of an index that came from a daemon. A
 * client relies only on header fields that were checked here.
 */

#include "ipc/base/layout.h"

#include <errno.h>
#include <string.h>

#include "ipc/base/device.h"
#include "ipc/base/pack.h"
#include "ipc/base/sys.h"

/* At least eight buckets, so that the keys of a small space spread, too. */
uint32_t kvd_table_slots(uint64_t entries) {
        return (uint32_t)MIN(ALIGN_UP(MAX(64, entries * 3), KVD_BUCKET_SLOTS), UINT64_C(1) << 31);
}

/*
 * A power of two from 1024 to 65536, in between at least capacity: a slow reader has to look at all
 * descriptors after that many changes.
 */
static uint32_t change_slots_for(uint32_t capacity) {
        uint32_t slots = 1024;

        while (slots < capacity && slots < 65536)
                slots *= 2;
        return slots;
}

void kvd_index_lay_out(struct kvd_index *ix) {
        uint64_t tokens_bytes = (uint64_t)ix->geometry.block_tokens * sizeof(uint32_t);

        ix->header_bytes = KVD_INDEX_HEADER_BYTES;
        ix->desc_stride = (uint32_t)ALIGN_UP(sizeof(struct kvd_desc) + tokens_bytes, 64);
        ix->run_words = kvd_has_runs(&ix->geometry, 0) ?
                                kvd_packed_words(&ix->geometry,
                                                 KVD_RUN_BLOCKS * ix->geometry.block_tokens) :
                                0;
        ix->run_stride = (uint32_t)ALIGN_UP(sizeof(struct kvd_run) + ix->run_words * 4, 64);
        ix->table_slots = kvd_table_slots(ix->capacity);
        ix->run_table_slots = kvd_table_slots(ix->run_capacity);

        ix->table_off = KVD_INDEX_HEADER_BYTES;
        ix->run_table_off = ix->table_off + ALIGN_UP((uint64_t)ix->table_slots * 8, 4096);
        ix->desc_off = ix->run_table_off + ALIGN_UP((uint64_t)ix->run_table_slots * 8, 4096);
        ix->run_off = ix->desc_off + ALIGN_UP((uint64_t)ix->capacity * ix->desc_stride, 4096);
        ix->memory_off = ix->run_off + ALIGN_UP((uint64_t)ix->run_capacity * ix->run_stride, 4096);
        ix->change_slots = change_slots_for(ix->capacity);
        ix->change_off = ix->memory_off + ALIGN_UP(ix->max_segments * sizeof(uint32_t), 4096);
        ix->record_off = ix->change_off + ALIGN_UP(ix->change_slots * sizeof(uint32_t), 4096);
        ix->hint_off = ix->record_off +
                       (ix->hint_slots ? ALIGN_UP((uint64_t)ix->capacity * 8, 4096) : 0);
        ix->size = ix->hint_off + (uint64_t)ix->hint_slots * 8;
        ix->proof_off = ix->backend == KVD_BACKEND_VMM ? ALIGN_UP(ix->size, 4096) : 0;
        if (ix->proof_off)
                ix->size = ix->proof_off + (uint64_t)ix->capacity * 8;
        ix->promise_off = ix->n_shards > 1 ? ALIGN_UP(ix->size, 4096) : 0;
        if (ix->promise_off)
                ix->size = ix->promise_off +
                           (uint64_t)ix->capacity * (ix->n_shards - 1) * sizeof(struct kvd_promise);
}

static bool same_layout(const struct kvd_index *a, const struct kvd_index *b) {
        return a->header_bytes == b->header_bytes && a->size == b->size &&
               a->desc_off == b->desc_off && a->table_off == b->table_off &&
               a->run_off == b->run_off && a->run_table_off == b->run_table_off &&
               a->memory_off == b->memory_off && a->change_off == b->change_off &&
               a->change_slots == b->change_slots && a->record_off == b->record_off &&
               a->hint_off == b->hint_off && a->hint_slots % KVD_BUCKET_SLOTS == 0 &&
               a->proof_off == b->proof_off && a->promise_off == b->promise_off &&
               a->desc_stride == b->desc_stride && a->run_stride == b->run_stride &&
               a->run_words == b->run_words && a->table_slots == b->table_slots &&
               a->run_table_slots == b->run_table_slots;
}

/*
 * In host spaces a segment must hold a whole number of blocks; on a GPU it may have any size. The
 * limits ensure that no computation here or in layout.h overflows.
 */
static bool segments_fit(const struct kvd_index *ix) {
        if (ix->max_segments > KVD_MAX_SEGMENTS || !ix->segment_blocks ||
            ix->segment_bytes % sys_page_bytes() != 0 || ix->segment_bytes > UINT64_C(1) << 48 ||
            ix->segment_blocks != ix->segment_bytes / ix->block_bytes ||
            (!ix->backend && ix->segment_bytes % ix->block_bytes != 0))
                return false;
        return ix->max_segments * ix->segment_bytes / ix->block_bytes <= UINT32_MAX / 4 &&
               ix->capacity == kvd_segments_ids(ix, ix->max_segments);
}

static bool shards_fit(const struct kvd_index *ix) {
        return ix->n_shards && ix->n_shards <= (ix->backend ? KVD_SHARDS : 1) &&
               ix->shard_bytes * ix->n_shards == ix->block_bytes &&
               ix->segment_bytes % ix->n_shards == 0;
}

int kvd_index_validate(const struct kvd_index *ix, uint64_t bytes) {
        struct kvd_shape g;
        struct kvd_index own;
        const char *why;

        if (bytes < KVD_INDEX_HEADER_BYTES || ix->magic != KVD_INDEX_MAGIC ||
            ix->version != KVD_LAYOUT_VERSION)
                return -EPROTO;
        g = ix->geometry;
        if (kvd_shape_normalise(&g, &why) < 0 || kvd_shape_difference(&g, &ix->geometry))
                return -EPROTO;
        if (ix->block_bytes != kvd_shape_bytes(&g) || !segments_fit(ix) || !shards_fit(ix))
                return -EPROTO;
        own = (struct kvd_index){.geometry = g,
                                 .capacity = ix->capacity,
                                 .run_capacity = ix->run_capacity,
                                 .max_segments = ix->max_segments,
                                 .backend = ix->backend,
                                 .n_shards = ix->n_shards,
                                 .hint_slots = ix->hint_slots};
        kvd_index_lay_out(&own);
        return same_layout(&own, ix) && ix->size <= bytes ? 0 : -EPROTO;
}
