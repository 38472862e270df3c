/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_CACHE_INSIDE_H
#define KVD_STORE_CACHE_INSIDE_H

/* What only the files of the cache call of each other. */

#include "store/cache/cache.h"

/* index.c: the shared side of a block */
int index_new(struct space *space, const struct space_spec *spec);
void index_free(struct space *space);
void index_set_state(struct space *space, uint32_t id, enum kvd_state state, uint32_t generation);
void index_write(struct space *space, uint32_t id, const struct kvd_desc *fields,
                 const uint32_t *tokens);
void index_enter(struct space *space, uint32_t id, struct kvd_key root);
/* what sealing id will touch */
void index_prefetch(const struct space *space, struct kvd_key key, uint32_t id);
/* or NONE */
uint32_t index_find(const struct space *space, const struct kvd_desc *want, const uint32_t *tokens);

/* segment.c: memory */
/* a piece of its end; false: that was all */
bool segment_bury(struct space *space, struct segment *segment);
/* blocks made ready, or an error */
int space_grow(struct space *space, struct arena *arena, uint64_t bytes);
/* takes a segment's memory from a larger space */
bool space_reclaim(struct space *space);
/* ... from arenas of this space that can spare it */
bool arena_reclaim(struct space *space, struct arena *arena);

/* blocks.c: free blocks, and blocks that a client fills */
void block_to_free(struct space *space, uint32_t id);
void block_append_free(struct space *space, uint32_t id); /* ... to be allocated last */
uint32_t block_pop_free(struct space *space, struct arena *arena); /* or NONE */
void block_fill_begin(struct space *space, uint32_t id, struct attachment *a);

/* available.c */
uint32_t fill_limit(const struct space *space); /* blocks that a client may be filling at once */
void available_tell(struct attachment *a);

/* evict.c: chains, candidates, victims */
void leaf_add(struct space *space, uint32_t id);
/* sealed behind parent, or NONE */
void block_link(struct space *space, uint32_t id, uint32_t parent);
bool block_pinned(const struct space *space, uint32_t id, uint32_t *n_clients);
uint64_t block_last_use(const struct space *space, uint32_t id);
void block_warm(struct space *space, uint32_t id); /* takes over when clients used it last */
uint32_t evict_coldest(struct space *space, struct arena *arena, uint32_t n);
bool evict_subtree(struct space *space, uint32_t id, uint32_t *budget, uint32_t *evicted);

/* attachment.c */
int arena_new(struct space *space, struct attachment *writer, struct arena **ret);

/* epoch.c: wakes clients that sleep on a word of the index */
void epoch_move(shm_u32 *epoch);

/* lease.c */
void leases_drop(struct attachment *attachment, bool died);

#endif
