/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_CACHE_INTERNAL_H
#define KVLM_CACHE_INTERNAL_H

/* cache.c has the connection and private memory; sequence.c has the blocks of a sequence. */

#include "client/kvd_cuda.h"
#include "tools/kvlm/cache.h"

struct cache {
        struct cache_options options;
        kvd *connection;  /* NULL if none */
        kvd_space *space; /* NULL if not attached */
        bool given_up;    /* the daemon refused us: do not retry */
        bool complained;
        uint8_t **spare; /* free private blocks */
        size_t n_spare, room;
};

/*
 * Called before each sequence, since a daemon may have started meanwhile. Once attached, the
 * library reconnects by itself.
 */
bool cache_connected(struct cache *);

/*
 * Whether the pool is where we compute. A restarted daemon may have its pool elsewhere, so this is
 * checked for each block that it gives.
 */
bool cache_is_here(const struct cache *);

/* private memory for block i of a sequence; NULL, with a message, if none */
uint8_t *cache_take(struct sequence *, uint32_t i);
void cache_give(struct cache *, uint8_t *block);

#endif
