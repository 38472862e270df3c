/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_CACHE_INTERNAL_H
#define KVLM_CACHE_INTERNAL_H

/* cache.c has the connection and private memory; sequence.c what becomes of a sequence's blocks. */

#include "client/kvd_cuda.h"
#include "tools/kvlm/cache.h"

struct cache {
        struct cache_options options;
        kvd *connection;   /* NULL: none */
        kvd_space *space;  /* NULL: not attached */
        bool given_up;     /* the daemon refuses us: do not ask again */
        bool complained;
        uint8_t **spare;   /* private blocks that nobody uses */
        size_t n_spare, room;
};

/*
 * Before each sequence: a daemon may have come since. Once attached, the library reconnects by
 * itself.
 */
bool cache_connected(struct cache *);

/*
 * Is the pool where we compute? A daemon that comes back may have it elsewhere: ask for each block
 * that it gives.
 */
bool cache_is_here(const struct cache *);

/* private memory for its block i; NULL, with a line */
uint8_t *cache_take(struct sequence *, uint32_t i);
void cache_give(struct cache *, uint8_t *block);

#endif
