/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Which shapes a block can have. The library, the daemon and all readers of an index apply the same
 * rules.
 */

#include "ipc/base/geometry.h"

#include <errno.h>
#include <string.h>

#include "ipc/base/format.h"
#include "ipc/base/text.h"
#include "ipc/base/util.h"

uint32_t kvd_dtype_bytes(uint32_t dtype) {
        return kvd_is_quantised(dtype) ? 0 : (uint32_t)kvd_code_bytes(dtype, 1);
}

static void set_defaults(struct kvd_shape *g) {
        if (!g->block_tokens)
                g->block_tokens = 16;
        if (!g->layer_groups)
                g->layer_groups = 1;
        if (kvd_shape_is_opaque(g))
                return;
        if (!g->order)
                g->order = KVD_order_hnd;
        if (!g->rope)
                g->rope = KVD_rope_post;
}

static const char *opaque_why(const struct kvd_shape *g) {
        return g->layers || g->kv_heads || g->head_dim || g->layer_groups > 1 || g->dtype ||
                               g->order || g->rope || g->state_width ?
                       "with block_bytes, layers, kv_heads, head_dim, layer_groups, "
                       "dtype, order, rope and state_width must be 0" :
               g->block_bytes % 64 != 0           ? "block_bytes must be a multiple of 64" :
               g->block_bytes > UINT64_C(1) << 34 ? "block_bytes must be at most 16 GiB" :
               g->block_tokens > KVD_MAX_BLOCK_TOKENS ?
                                                    "block_tokens must be 1 to 4096" :
               !kvd_is_name(g->layout, sizeof g->layout - 1) ?
                                                    "layout must be 1 to 31 of " KVD_NAME_LETTERS :
                                                    NULL;
}

/* Rounded up, so that every block starts on a cache line. */
static uint64_t planes_bytes(const struct kvd_shape *g) {
        uint64_t row = kvd_format_row(g->dtype, g->head_dim);
        uint64_t tokens = g->block_tokens ? g->block_tokens : 16;
        uint64_t layers = g->layers / (g->layer_groups ? g->layer_groups : 1);
        uint64_t per_token;

        if (!row || !layers || !g->kv_heads || !g->head_dim || g->kv_heads > 65535 ||
            g->head_dim > 65535 || g->layers > 65535 || tokens > KVD_MAX_PLANE_TOKENS)
                return 0;
        per_token = layers * 2 * g->kv_heads * row + kvd_format_row(g->dtype, g->state_width);
        return ALIGN_UP(tokens * per_token, 64);
}

static const char *planes_why(const struct kvd_shape *g) {
        return g->layers == 0 || g->layers > 65535     ? "layers must be 1 to 65535" :
               g->kv_heads == 0 || g->kv_heads > 65535 ? "kv_heads must be 1 to 65535" :
               g->head_dim == 0 || g->head_dim > 65535 ? "head_dim must be 1 to 65535" :
               g->block_tokens > KVD_MAX_PLANE_TOKENS  ? "block_tokens must be 1 to 256" :
               g->layers % g->layer_groups != 0        ? "layer_groups must divide layers" :
               kvd_format(g->dtype).bits == 0          ? "dtype must be one of " KVD_LIST(dtype) :
               g->order > KVD_order_max                ? "order must be one of " KVD_LIST(order) :
               g->rope > KVD_rope_max                  ? "rope must be one of " KVD_LIST(rope) :
               g->state_width > 1048576                ? "state_width must be at most 1048576" :
               kvd_is_quantised(g->dtype) && g->head_dim % 2 != 0 ?
                                          "head_dim must be even with dtype q8 or q4" :
               kvd_is_quantised(g->dtype) && g->state_width > 0 ?
                                          "state_width must be 0 with dtype q8 or q4" :
               g->vocab == 0 ? "vocab must be given: token ids are below it" :
               g->layout[0]  ? "layout names opaque blocks: give block_bytes" :
               planes_bytes(g) > UINT64_C(1) << 34 ? "a block would be larger than 16 GiB" :
                                                     NULL;
}

int kvd_shape_normalise(struct kvd_shape *g, const char **why) {
        set_defaults(g);
        *why = kvd_shape_is_opaque(g) ? opaque_why(g) : planes_why(g);
        return *why ? -EINVAL : 0;
}

uint64_t kvd_shape_bytes(const struct kvd_shape *g) {
        struct kvd_shape opaque = *g;
        const char *why;

        if (!kvd_shape_is_opaque(g))
                return planes_bytes(g);
        return kvd_shape_normalise(&opaque, &why) < 0 ? 0 : g->block_bytes;
}

const char *kvd_shape_difference(const struct kvd_shape *a, const struct kvd_shape *b) {
        return a->block_bytes != b->block_bytes                     ? "block_bytes" :
               a->layers != b->layers                               ? "layers" :
               a->kv_heads != b->kv_heads                           ? "kv_heads" :
               a->head_dim != b->head_dim                           ? "head_dim" :
               a->block_tokens != b->block_tokens                   ? "block_tokens" :
               a->layer_groups != b->layer_groups                   ? "layer_groups" :
               a->dtype != b->dtype                                 ? "dtype" :
               a->order != b->order                                 ? "order" :
               a->rope != b->rope                                   ? "rope" :
               a->state_width != b->state_width                     ? "state_width" :
               a->vocab != b->vocab                                 ? "vocab" :
               strncmp(a->layout, b->layout, sizeof a->layout) != 0 ? "layout" :
               a->fingerprint[0] != b->fingerprint[0] || a->fingerprint[1] != b->fingerprint[1] ?
                                                                      "fingerprint" :
                                                                      NULL;
}
