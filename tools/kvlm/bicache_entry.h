/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_BICACHE_ENTRY_H
#define KVLM_BICACHE_ENTRY_H

/*
 * BiCache's prefix entry: keys, values and hidden states of a prefix that sees only itself, layer
 * by layer. In the pool a layer is a layer group, its chain is found whole or not at all, and it is
 * used where it lies. Who misses takes a lease and computes; others wait for it. Without a daemon,
 * without room, or when nobody answers, the entry is private memory, and the same to the last bit.
 */

#include "tools/kvlm/cache.h"
#include "tools/kvlm/context.h"

struct entry_maker {
        const struct config *config;
        const struct block_shape *shape;
        struct pass *pass; /* its rows are overwritten by making an entry */
        struct cache *cache;
};

enum entry_kind {
        ENTRY_ABSENT,
        ENTRY_PRIVATE,
        ENTRY_FILLING, /* of the pool, ours; never published, because the daemon let us down */
        ENTRY_SEALED,  /* of the pool, written and published by us */
        ENTRY_REUSED,  /* of the pool, written by somebody else or before */
};

struct entry {
        const struct entry_maker *maker;
        kvd_space *space; /* NULL: not shared */
        const uint32_t *tokens;
        struct context context; /* n_prefix = n_tokens; of layers that are not absent */
        uint32_t n_layers;      /* the first so many are there */
        /* of them were there before we came, or were made while we waited */
        uint32_t n_found;
        uint32_t n_made;        /* and so many computed here */
        uint8_t *kinds;         /* [layers] enum entry_kind */
        struct kvd_pin *pins;   /* [layers] */
        struct kvd_block *pool; /* [layers][n_blocks] of those we fill */
        uint8_t **memory;       /* [layers] private */
        bool refused;           /* the pool or the daemon let us down */
};

/*
 * At least `need` layers of the prefix tokens[0..n_tokens), n_tokens > 0, need > 0; where they are
 * missing, `make` layers are made (make >= need), for others who need more. tokens must stay.
 * -ENOMEM
 */
int entry_open(const struct entry_maker *, const uint32_t *tokens, uint32_t n_tokens, uint32_t need,
               uint32_t make, struct entry **ret);
int entry_open_private(const struct entry_maker *, const uint32_t *tokens, uint32_t n_tokens,
                       uint32_t n_layers, struct entry **ret);
struct entry *entry_close(struct entry *);

uint8_t *entry_block(const struct entry *, uint32_t layer, uint32_t i);
/* of its first layers; in the pool? */
uint64_t entry_bytes(const struct entry *, uint32_t n_layers, bool shared);

#endif
