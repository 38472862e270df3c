/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_CACHE_INSIDE_H
#define KVD_STORE_CACHE_INSIDE_H

/* What only the files of the cache call of each other. */

#include "store/cache/cache.h"

/* The last incarnation of a block; fewer bits wear blocks out within seconds, for tests. */
#ifndef KVD_GENERATION_BITS
#define KVD_GENERATION_BITS 32
#endif
#define KVD_GENERATION_LAST (UINT32_MAX >> (32 - KVD_GENERATION_BITS))

/* index.c: the shared side of a block */
/* before: header of the one that this one succeeds, verified; or NULL */
int index_new(struct space *space, const struct space_spec *spec, const struct kvd_index *before);
/* nobody but a daemon has written this, at least what does not change of it */
uint64_t index_proof(const struct kvd_index *ix);
/* ... and this descriptor of a sealed block */
uint64_t block_proof(const struct kvd_index *ix, kvd_ref block, const struct kvd_desc *desc);
void index_free(struct space *space);
void index_set_state(struct space *space, uint32_t id, enum kvd_state state, uint32_t generation);
void index_write(struct space *space, uint32_t id, const struct kvd_desc *fields,
                 const uint32_t *tokens);
void index_enter(struct space *space, uint32_t id, struct kvd_key root);
/* what sealing id will touch */
void index_prefetch(const struct space *space, struct kvd_key key, uint32_t id);
/* what taking it out of the tables will touch, once its descriptor is there */
void index_fetch_entry(const struct space *space, uint32_t id);
/* ... and its run, once that is there */
void index_fetch_run(const struct space *space, uint32_t id);
/* or NONE */
uint32_t index_find(const struct space *space, const struct kvd_desc *want, const uint32_t *tokens);

/* segment.c: memory */
uint64_t blocks_with_memory(const struct space *space); /* those that wore out aside */
/* a piece of its end; false: that was all */
bool segment_bury(struct space *space, struct segment *segment);
/* blocks made ready, or an error */
int space_grow(struct space *space, struct arena *arena, uint64_t bytes);
/*
 * Gives the memory of a segment whose blocks are all free back to the pool; its ids and its address
 * space stay. A piece a call: 1: that was the last one, -EAGAIN: there are more, which are also done
 * when there is time. Nobody gets blocks of it from the first piece on.
 */
int segment_return(struct space *space, struct segment *segment);
int segment_go_on_returning(struct space *space); /* with space->memory.returning */
/*
 * Its first n_ready blocks have memory from the daemon before, and are neither free nor anything else
 * yet. *fd is taken if that works.
 */
int segment_adopt(struct space *space, struct segment *segment, uint32_t n_ready, uint32_t version,
                  int *fd);

/* unused.c */
void space_count_unused(struct space *space); /* it has more or fewer segments, or was deleted */

/* take.c: memory of others. 1: a segment's came free, 0: there is none, -EAGAIN: there may be one */
/* from spaces that have not been used for longer than the arena's coldest leaf, or are larger */
int space_take_cold(struct space *space, struct arena *arena, uint32_t *reads);
/* from any, the coldest first */
int space_take_any(struct space *space, uint32_t *reads);
/* from arenas of this space that can spare it */
int arena_reclaim(struct space *space, struct arena *arena, uint32_t *reads);
/* would memory of a space that was deleted be its? */
bool space_may_inherit(const struct space *space);

/* age.c: the clock of uses */
#define ANY_CLOCK UINT64_MAX
#define ANY_TIME UINT64_C(0) /* never one of the store's clock */
void space_tick(struct space *space);
bool space_age(struct space *space, uint64_t pins); /* pins: pins_state */
/* when, on the store's clock, the space's clock had that value, or before */
uint64_t clock_when(const struct space *space, uint64_t clock);
/* uses before that clock of the space were before that time; ANY_CLOCK: all. used: it still is */
uint64_t clock_before(const struct space *space, uint64_t when, bool used);

/* blocks.c: free blocks, and blocks that a client fills */
void block_to_free(struct space *space, uint32_t id);
void block_append_free(struct space *space, uint32_t id); /* ... to be allocated last */
uint32_t block_pop_free(struct space *space, struct arena *arena); /* or NONE */
void block_fill_begin(struct space *space, uint32_t id, struct attachment *a);

/* available.c */
uint32_t fill_limit(const struct space *space); /* blocks that a process may be filling at once */
void available_tell(struct attachment *a);
uint64_t segments_to_come(const struct space *space); /* that its domain could have now */
/* ... and that others could be made to give it */
uint64_t segments_to_take(const struct space *space);
/* moves when clients pin or let go, if they say so */
uint64_t pins_state(const struct space *space);

/*
 * seal.c: space_seal, of which the caller tells the client's page (available_tell), once for several.
 * ahead: the key of a single block if the one before it has that key; or NULL
 */
struct key_ahead {
        struct kvd_key before, key;
};
int blocks_seal(struct attachment *a, const struct seal_request *q, const struct key_ahead *ahead,
                kvd_ref *ret);

/* evict.c: chains, candidates, victims */
void leaf_add(struct space *space, uint32_t id);
/* sealed behind parent, or NONE */
void block_link(struct space *space, uint32_t id, uint32_t parent);
bool block_pinned(const struct space *space, uint32_t id, uint32_t *n_clients);
/* pinned, or something else keeps it where it is */
bool block_in_use(struct space *space, uint32_t id, uint32_t *reads);
uint64_t block_last_use(const struct space *space, uint32_t id);
uint64_t block_used(const struct space *space, uint32_t id); /* ... as far as the policy cares */
/* the clock of the last use of the leaf that goes first, or before */
uint64_t leaves_coldest(const struct space *space);
/* ... of an arena's, on the store's clock; now, if it has none to evict */
uint64_t leaf_age(const struct space *space, const struct arena *arena);
/* takes over when that client used it last */
void block_warm(const struct attachment *a, uint32_t id);
/* how much more than the heap's work a stamp costs, which every client is asked for */
uint32_t evict_effort(const struct space *space);
/* evicts up to n blocks of an arena, while there are reads left */
uint32_t evict_coldest(struct space *space, struct arena *arena, uint32_t n, uint32_t *reads);
/* nothing evicted: did it only run out of reads? */
bool evict_goes_on(const struct arena *arena, uint32_t reads);
bool evict_subtree(struct space *space, uint32_t id, uint32_t *at, uint32_t *reads,
                   uint32_t *evicted);

/* ahead.c: fetches what evicting up to n blocks will look at; says for how many it did, at least 1 */
uint32_t evict_ahead(const struct space *space, const struct arena *arena, uint32_t n);

/* counters.c: what the client counted, to sums of KVD_CLIENT_WORDS */
void counters_add(const struct attachment *a, uint64_t *sums);

/* attachment.c */
/* a block that a client of the daemon before may still write; false: there is none */
bool block_inherit(struct space *space, uint32_t id);
bool attachment_is_inherited(const struct attachment *a);
void attachment_map(struct attachment *a); /* its words, once its page is there */
void attachment_charge(struct space *space); /* whether it may be or not */
void attachment_enter(struct attachment *a);
void attachment_unmake(struct attachment *a);
uint32_t space_users(const struct space *space); /* attachments that did not end */
/* The first block at or behind id whose words may be other than 0; capacity: there is none. */
uint32_t attachment_words_from(const struct attachment *a, uint32_t id);
void attachments_end(struct space *space); /* of one that is deleted */
/* frees some blocks of clients that ended. True: it did */
bool attachments_give(struct space *space);
int arena_new(struct space *space, struct attachment *writer, struct arena **ret);

/* space.c */
/* as space_open makes it, over an index that was verified; nobody has it kept yet */
int space_succeed(struct domain *domain, const struct kvd_index *before, struct space **ret);

/* adopt.c: what the daemon before had and was not taken over stays with the keeper */
void adopt_leave(struct space *space);

/* inherit.c: clients of the daemon before */
/* *page and *process are taken if that works */
int attachment_inherit(struct space *space, const struct attachment_kept *kept, int *page,
                       int *process);
/* on a GPU: the worker of before, whose last work there may still run */
int worker_inherit(struct space *space);

/* tenant.c */
struct tenant *tenant_join(struct space *space, uint64_t process); /* NULL: out of memory */
void tenant_leave(struct space *space, struct tenant *tenant);

/* epoch.c: wakes clients that sleep on a word of the index */
void epoch_move(shm_u32 *epoch);

/* lease.c */
void leases_drop(struct attachment *attachment, bool died);

#endif
