/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_ENTRY_H
#define KVLM_ENTRY_H

/*
 * A prefix's entry: keys, values and hidden states of a prefix that sees only itself, layer
 * by layer. In the pool, each layer is a layer group; its chain is found as a whole or not at all,
 * and is used in place. On a miss, one client takes a lease and computes; the others wait for it.
 * Without a daemon, without room, or if the daemon does not answer, the entry is in private memory,
 * with the same bits.
 */

#include "tools/kvlm/cache.h"
#include "tools/kvlm/context.h"

struct entry_maker {
        const struct config *config;
        const struct block_shape *shape;
        struct pass *pass; /* making an entry overwrites its rows */
        struct cache *cache;
};

enum entry_kind {
        ENTRY_ABSENT,
        ENTRY_PRIVATE,
        ENTRY_FILLING, /* pool blocks that we write; never published if the daemon fails */
        ENTRY_SEALED,  /* pool blocks that we wrote and published */
        ENTRY_REUSED,  /* pool blocks written by another client, or earlier */
};

struct entry {
        const struct entry_maker *maker;
        kvd_space *space; /* NULL: not shared */
        const uint32_t *tokens;
        struct context context; /* n_prefix = n_tokens; blocks of layers that are not absent */
        uint32_t n_layers;      /* number of leading layers that are present */
        /* of those, layers that were found, or that others made while we waited */
        uint32_t n_found;
        uint32_t n_made;        /* number of layers computed here */
        uint8_t *kinds;         /* [layers] enum entry_kind */
        struct kvd_pin *pins;   /* [layers] */
        struct kvd_block *pool; /* [layers][n_blocks]: blocks that we fill */
        uint8_t **memory;       /* [layers]: private memory */
        bool refused;           /* the pool or the daemon failed us */
};

/*
 * Finds or makes at least `need` layers of the prefix tokens[0..n_tokens), n_tokens > 0, need > 0.
 * If some are missing, `make` layers (make >= need) are made, for others that need more. tokens
 * must outlive the entry. -ENOMEM
 */
int entry_open(const struct entry_maker *, const uint32_t *tokens, uint32_t n_tokens, uint32_t need,
               uint32_t make, struct entry **ret);
int entry_open_private(const struct entry_maker *, const uint32_t *tokens, uint32_t n_tokens,
                       uint32_t n_layers, struct entry **ret);
struct entry *entry_close(struct entry *);

uint8_t *entry_block(const struct entry *, uint32_t layer, uint32_t i);
/* bytes of the first n_layers layers that are in the pool (shared) or private */
uint64_t entry_bytes(const struct entry *, uint32_t n_layers, bool shared);

#endif
