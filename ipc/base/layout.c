/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/base/layout.h"

#include <errno.h>
#include <string.h>

#include "ipc/base/enums.h"
#include "ipc/base/text.h"

uint32_t kvd_dtype_bytes(uint32_t dtype) {
        static const uint32_t bytes[] = {[KVD_dtype_f32] = 4, [KVD_dtype_f16] = 2, [KVD_dtype_bf16] = 2,
                                         [KVD_dtype_i8] = 1};

        return dtype < ARRAY_SIZE(bytes) ? bytes[dtype] : 0;
}

static void geometry_defaults(struct kvd_geometry *g) {
        if (!g->block_tokens)
                g->block_tokens = 16;
        if (!g->layer_groups)
                g->layer_groups = 1;
        if (kvd_geometry_is_opaque(g))
                return;
        if (!g->order)
                g->order = KVD_order_hnd;
        if (!g->rope)
                g->rope = KVD_rope_post;
}

static const char *opaque_why(const struct kvd_geometry *g) {
        return g->layers || g->kv_heads || g->head_dim || g->layer_groups > 1 || g->dtype || g->order || g->rope ||
               g->state_width                         ? "with block_bytes, layers, kv_heads, head_dim, layer_groups, "
                                                        "dtype, order, rope and state_width must be 0" :
               g->block_bytes % 64 != 0               ? "block_bytes must be a multiple of 64" :
               g->block_bytes > UINT64_C(1) << 34     ? "block_bytes must be at most 16 GiB" :
               g->block_tokens > KVD_MAX_BLOCK_TOKENS ? "block_tokens must be 1 to 256" :
               !kvd_is_name(g->layout, sizeof g->layout - 1) ? "layout must be 1 to 31 of " KVD_NAME_LETTERS :
                                                        NULL;
}

/* Every block starts on a cache line. */
static uint64_t planes_bytes(const struct kvd_geometry *g) {
        uint64_t e = kvd_dtype_bytes(g->dtype);
        uint64_t tokens = g->block_tokens ? g->block_tokens : 16;
        uint64_t layers = g->layers / (g->layer_groups ? g->layer_groups : 1);
        uint64_t per_token;

        if (!e || !layers || !g->kv_heads || !g->head_dim || g->kv_heads > 65535 || g->head_dim > 65535 ||
            g->layers > 65535 || tokens > KVD_MAX_BLOCK_TOKENS)
                return 0;
        per_token = layers * 2 * g->kv_heads * g->head_dim + g->state_width;
        return ALIGN_UP(tokens * per_token * e, 64);
}

static const char *planes_why(const struct kvd_geometry *g) {
        return g->layers == 0 || g->layers > 65535         ? "layers must be 1 to 65535" :
               g->kv_heads == 0 || g->kv_heads > 65535     ? "kv_heads must be 1 to 65535" :
               g->head_dim == 0 || g->head_dim > 65535     ? "head_dim must be 1 to 65535" :
               g->block_tokens > KVD_MAX_BLOCK_TOKENS      ? "block_tokens must be 1 to 256" :
               g->layers % g->layer_groups != 0            ? "layer_groups must divide layers" :
               kvd_dtype_bytes(g->dtype) == 0              ? "dtype must be one of " KVD_LIST(dtype) :
               g->order > KVD_order_max                    ? "order must be one of " KVD_LIST(order) :
               g->rope > KVD_rope_max                      ? "rope must be one of " KVD_LIST(rope) :
               g->state_width > 1048576                    ? "state_width must be at most 1048576" :
               g->vocab == 0                               ? "vocab must be given: token ids are below it" :
               g->layout[0]                                ? "layout names opaque blocks: give block_bytes" :
               planes_bytes(g) > UINT64_C(1) << 34         ? "a block would be larger than 16 GiB" :
                                                             NULL;
}

int kvd_geometry_normalise(struct kvd_geometry *g, const char **why) {
        geometry_defaults(g);
        *why = kvd_geometry_is_opaque(g) ? opaque_why(g) : planes_why(g);
        return *why ? -EINVAL : 0;
}

uint64_t kvd_block_bytes(const struct kvd_geometry *g) {
        struct kvd_geometry opaque = *g;
        const char *why;

        if (!kvd_geometry_is_opaque(g))
                return planes_bytes(g);
        return kvd_geometry_normalise(&opaque, &why) < 0 ? 0 : g->block_bytes;
}

const char *kvd_geometry_difference(const struct kvd_geometry *a, const struct kvd_geometry *b) {
        return a->block_bytes != b->block_bytes   ? "block_bytes" :
               a->layers != b->layers             ? "layers" :
               a->kv_heads != b->kv_heads         ? "kv_heads" :
               a->head_dim != b->head_dim         ? "head_dim" :
               a->block_tokens != b->block_tokens ? "block_tokens" :
               a->layer_groups != b->layer_groups ? "layer_groups" :
               a->dtype != b->dtype               ? "dtype" :
               a->order != b->order               ? "order" :
               a->rope != b->rope                 ? "rope" :
               a->state_width != b->state_width   ? "state_width" :
               a->vocab != b->vocab               ? "vocab" :
               strncmp(a->layout, b->layout, sizeof a->layout) != 0 ? "layout" :
               a->fingerprint[0] != b->fingerprint[0] || a->fingerprint[1] != b->fingerprint[1] ? "fingerprint" :
                                                                                                  NULL;
}

void kvd_index_lay_out(struct kvd_index *ix) {
        uint64_t tokens_bytes = (uint64_t)ix->geometry.block_tokens * sizeof(uint32_t);
        uint64_t run_tokens_bytes = KVD_RUN_BLOCKS * tokens_bytes;

        ix->header_bytes = KVD_INDEX_HEADER_BYTES;
        ix->desc_stride = (uint32_t)ALIGN_UP(sizeof(struct kvd_desc) + tokens_bytes, 64);
        ix->run_stride = (uint32_t)ALIGN_UP(sizeof(struct kvd_run) + run_tokens_bytes, 64);
        ix->table_slots = (uint32_t)pow2_up(MAX(64, (uint64_t)ix->capacity * 3 / 2));
        ix->run_table_slots = (uint32_t)pow2_up(MAX(64, (uint64_t)ix->run_capacity * 3 / 2));

        ix->table_off = KVD_INDEX_HEADER_BYTES;
        ix->run_table_off = ix->table_off + ALIGN_UP((uint64_t)ix->table_slots * 8, 4096);
        ix->desc_off = ix->run_table_off + ALIGN_UP((uint64_t)ix->run_table_slots * 8, 4096);
        ix->run_off = ix->desc_off + ALIGN_UP((uint64_t)ix->capacity * ix->desc_stride, 4096);
        ix->size = ix->run_off + ALIGN_UP((uint64_t)ix->run_capacity * ix->run_stride, 4096);
}

static bool same_layout(const struct kvd_index *a, const struct kvd_index *b) {
        return a->header_bytes == b->header_bytes && a->size == b->size && a->desc_off == b->desc_off &&
               a->table_off == b->table_off && a->run_off == b->run_off && a->run_table_off == b->run_table_off &&
               a->desc_stride == b->desc_stride && a->run_stride == b->run_stride &&
               a->table_slots == b->table_slots && a->run_table_slots == b->run_table_slots;
}

/* Whole blocks in every segment, or, on a GPU, segments of any one size. Nothing here or in layout.h overflows. */
static bool segments_fit(const struct kvd_index *ix) {
        if (ix->max_segments > KVD_MAX_SEGMENTS || !ix->segment_blocks || ix->segment_bytes % 4096 != 0 ||
            ix->segment_bytes > UINT64_C(1) << 48 || ix->segment_blocks != ix->segment_bytes / ix->block_bytes ||
            (!ix->backend && ix->segment_bytes % ix->block_bytes != 0))
                return false;
        return ix->max_segments * ix->segment_bytes / ix->block_bytes <= UINT32_MAX / 4 &&
               ix->capacity == kvd_segments_ids(ix, ix->max_segments);
}

int kvd_index_validate(const struct kvd_index *ix, uint64_t bytes) {
        struct kvd_geometry g;
        struct kvd_index own;
        const char *why;

        if (bytes < KVD_INDEX_HEADER_BYTES || ix->magic != KVD_INDEX_MAGIC || ix->version != KVD_LAYOUT_VERSION)
                return -EPROTO;
        g = ix->geometry;
        if (kvd_geometry_normalise(&g, &why) < 0 || kvd_geometry_difference(&g, &ix->geometry))
                return -EPROTO;
        if (ix->block_bytes != kvd_block_bytes(&g) || !segments_fit(ix))
                return -EPROTO;
        own = (struct kvd_index){.geometry = g, .capacity = ix->capacity, .run_capacity = ix->run_capacity};
        kvd_index_lay_out(&own);
        return same_layout(&own, ix) && ix->size <= bytes ? 0 : -EPROTO;
}
