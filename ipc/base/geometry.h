/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_GEOMETRY_H
#define KVD_BASE_GEOMETRY_H

/*
 * The shape of a block, as an index and the messages describe it: the internal counterpart of
 * struct kvd_geometry (client/kvd.h).
 */

#include <stdbool.h>
#include <stdint.h>

#include "ipc/base/enums.h"
#include "ipc/base/util.h"

#define KVD_MAX_BLOCK_TOKENS 4096u /* of an opaque block */
/* of a block of planes, which the methods' kernels read; larger blocks have no runs either */
#define KVD_MAX_PLANE_TOKENS 256u

/*
 * The group of objects that are found by key, not by tokens. It is the number of no layer group, so
 * their blocks and those of token chains are never taken for each other. Instead of tokens they
 * have the words of their key.
 */
#define KVD_GROUP_KEYED 65535u
#define KVD_KEY_LEAST 4u /* u32 words of a key */
#define KVD_KEY_MOST 8u

struct kvd_shape {
        uint32_t layers;
        uint32_t kv_heads;
        uint32_t head_dim;
        uint32_t block_tokens;
        uint32_t layer_groups;
        uint32_t dtype; /* KVD_dtype_* (enums.h); order, rope likewise */
        uint32_t order;
        uint32_t rope;
        uint32_t state_width;
        uint32_t vocab;
        uint64_t fingerprint[2];
        uint64_t block_bytes; /* bytes of an opaque block; 0: planes of keys and values */
        char layout[32];
};

/* fills in defaults; -EINVAL: invalid, for the reason *why */
int kvd_shape_normalise(struct kvd_shape *shape, const char **why);
/* bytes of a block; 0: the shape is invalid */
uint64_t kvd_shape_bytes(const struct kvd_shape *shape);
/* name of the first field that differs, or NULL */
const char *kvd_shape_difference(const struct kvd_shape *a, const struct kvd_shape *b);
uint32_t kvd_dtype_bytes(uint32_t dtype); /* of a number; 0: quantised (format.h), or none */

/* Only the users of opaque blocks know the format of their contents. */
static inline bool kvd_shape_is_opaque(const struct kvd_shape *shape) {
        return shape->block_bytes != 0;
}

/* Number of tokens of a full block of the group. */
static inline uint32_t kvd_full_tokens(const struct kvd_shape *shape, uint32_t group) {
        return group == KVD_GROUP_KEYED ? MIN(shape->block_tokens, KVD_KEY_MOST) :
                                          shape->block_tokens;
}

/* Can a space of that kind (KVD_kind_*; 0: causal) hold objects that are found by key? */
static inline bool kvd_has_keys(const struct kvd_shape *shape, uint32_t kind) {
        return kind != KVD_kind_bidirectional && kvd_shape_is_opaque(shape) &&
               shape->block_tokens >= KVD_KEY_LEAST;
}

/* With vocab 0, which only opaque spaces may have, any u32 is a token. */
static inline bool kvd_token_is_valid(const struct kvd_shape *shape, uint32_t token) {
        return token <= shape->vocab - 1;
}

#endif
