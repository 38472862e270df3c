/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_GEOMETRY_H
#define KVD_BASE_GEOMETRY_H

/*
 * What a block looks like, as an index and the messages say it: struct kvd_geometry of
 * client/kvd.h, below the library.
 */

#include <stdbool.h>
#include <stdint.h>

#include "ipc/base/enums.h"

#define KVD_MAX_BLOCK_TOKENS 256u

struct kvd_shape {
        uint32_t layers;
        uint32_t kv_heads;
        uint32_t head_dim;
        uint32_t block_tokens;
        uint32_t layer_groups;
        uint32_t dtype; /* KVD_dtype_* (enums.h), and so on */
        uint32_t order;
        uint32_t rope;
        uint32_t state_width;
        uint32_t vocab;
        uint64_t fingerprint[2];
        uint64_t block_bytes; /* of an opaque block; 0: planes of keys and values */
        char layout[32];
};

/* fills in defaults; -EINVAL: *why it cannot be */
int kvd_shape_normalise(struct kvd_shape *shape, const char **why);
/* of one block; 0: the shape is impossible */
uint64_t kvd_shape_bytes(const struct kvd_shape *shape);
/* first such field, or NULL */
const char *kvd_shape_difference(const struct kvd_shape *a, const struct kvd_shape *b);
uint32_t kvd_dtype_bytes(uint32_t dtype);

/* Blocks whose contents only their users know. */
static inline bool kvd_shape_is_opaque(const struct kvd_shape *shape) {
        return shape->block_bytes != 0;
}

/* vocab 0, which opaque spaces may have: any word is a token. */
static inline bool kvd_token_is_valid(const struct kvd_shape *shape, uint32_t token) {
        return token <= shape->vocab - 1;
}

#endif
