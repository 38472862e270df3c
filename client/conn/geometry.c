/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The geometry of kvd.h is the shape of ipc/base, which must not include public headers. This file
 * asserts that the two declarations agree, field by field and constant by constant.
 */

#include <assert.h>
#include <string.h>

#include "client/internal.h"
#include "ipc/base/enums.h"

#define WORD_AGREES(name, number, word, constant) \
        static_assert((int)constant == number, "kvd.h and ipc/base/enums.h differ");
#define WORDS_AGREE(name) KVD_WORDS_##name(WORD_AGREES, WORD_AGREES)
KVD_ENUMS(WORDS_AGREE)

#define FIELD_AGREES(field) \
        static_assert(offsetof(struct kvd_geometry, field) == offsetof(struct kvd_shape, field), \
                      #field);
FIELD_AGREES(layers)
FIELD_AGREES(kv_heads)
FIELD_AGREES(head_dim)
FIELD_AGREES(block_tokens)
FIELD_AGREES(layer_groups)
FIELD_AGREES(dtype)
FIELD_AGREES(order)
FIELD_AGREES(rope)
FIELD_AGREES(state_width)
FIELD_AGREES(vocab)
FIELD_AGREES(fingerprint)
FIELD_AGREES(block_bytes)
FIELD_AGREES(layout)
static_assert(sizeof(struct kvd_geometry) == sizeof(struct kvd_shape),
              "all of its fields are above");

struct kvd_shape shape_of(const struct kvd_geometry *geometry) {
        struct kvd_shape shape;

        memcpy(&shape, geometry, sizeof shape);
        return shape;
}

uint64_t kvd_block_bytes(const struct kvd_geometry *geometry) {
        struct kvd_shape shape = shape_of(geometry);

        return kvd_shape_bytes(&shape);
}
