/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_CACHE_INSIDE_H
#define KVD_STORE_CACHE_INSIDE_H

/* Functions that only files of this folder call. */

#include "store/cache/cache.h"

/* The last generation of a block. Tests use fewer bits, so that blocks wear out within seconds. */
#ifndef KVD_GENERATION_BITS
#define KVD_GENERATION_BITS 32
#endif
#define KVD_GENERATION_LAST (UINT32_MAX >> (32 - KVD_GENERATION_BITS))

/* index.c: the shared side of a block */
/* before: verified header of the index that this one succeeds; or NULL */
int index_new(struct space *space, const struct space_spec *spec, const struct kvd_index *before);
/* keyed hash of the header's constant part: shows that a daemon wrote it */
uint64_t index_proof(const struct kvd_index *ix);
/* the same for the descriptor of a sealed block */
uint64_t block_proof(const struct kvd_index *ix, kvd_ref block, const struct kvd_desc *desc);
void index_free(struct space *space);
void index_set_state(struct space *space, uint32_t id, enum kvd_state state, uint32_t generation);
void index_write(struct space *space, uint32_t id, const struct kvd_desc *fields,
                 const uint32_t *tokens);
void index_enter(struct space *space, uint32_t id, struct kvd_key root);
/* prefetches what sealing id with that key will touch */
void index_prefetch(const struct space *space, struct kvd_key key, uint32_t id);
/* prefetches what removing it from the tables will touch; its descriptor should be in the cache */
void index_fetch_entry(const struct space *space, uint32_t id);
/* ... and its run's slot; its run should be in the cache */
void index_fetch_run(const struct space *space, uint32_t id);
/* a sealed block with these fields and tokens, or NONE */
uint32_t index_find(const struct space *space, const struct kvd_desc *want, const uint32_t *tokens);

/* segment.c: memory */
uint64_t blocks_with_memory(const struct space *space); /* without worn-out ones */
/* frees a piece of a segment of a deleted space; false: that was all */
bool segment_bury(struct space *space, struct segment *segment);
/* returns the number of blocks that were given memory, or an error */
int space_grow(struct space *space, struct arena *arena, uint64_t bytes);
/* only on the NUMA node of the arena's home; false: it cannot */
bool space_grow_near(struct space *space, struct arena *arena, uint64_t bytes);
/*
 * Gives the memory of a segment whose blocks are all free back to the pool, in pieces; its ids and
 * its address range stay. 1: done; -EAGAIN: there is more, and idle work continues with it. Blocks
 * of the segment are not allocated from the first piece on.
 */
int segment_return(struct space *space, struct segment *segment);
int segment_go_on_returning(struct space *space); /* continues with space->memory.returning */
/*
 * Gives the segment its memory of the previous daemon: its first n_ready blocks have memory, and
 * stay ABSENT until they are adopted. Takes the descriptors, one for each shard, on success.
 */
int segment_adopt(struct space *space, struct segment *segment, uint32_t n_ready, uint32_t version,
                  int *fds);

/* unused.c */
void space_count_unused(struct space *space); /* after it got or lost a segment, or was deleted */

/* take.c: takes memory. 1: a segment's memory is free, 0: none is, -EAGAIN: not known yet */
/* from other spaces: segments colder than the arena's coldest leaf, or of larger spaces */
int space_take_cold(struct space *space, struct arena *arena, uint32_t *reads);
/* from any other space, the coldest first */
int space_take_any(struct space *space, uint32_t *reads);
/* from other arenas of this space that can spare it */
int arena_reclaim(struct space *space, struct arena *arena, uint32_t *reads);
/* could the space use memory of spaces that are being freed? */
bool space_may_inherit(const struct space *space);

/* age.c: the clock of uses */
#define ANY_CLOCK UINT64_MAX
#define ANY_TIME UINT64_C(0) /* the store's clock never has this value */
void space_tick(struct space *space);
bool space_age(struct space *space, uint64_t pins); /* pins: pins_state */
/* the store's clock when the space's clock had that value, or earlier */
uint64_t clock_when(const struct space *space, uint64_t clock);
/*
 * A value of the space's clock: uses before it were before `when` of the store's clock. ANY_CLOCK:
 * all were. used: the space has clients.
 */
uint64_t clock_before(const struct space *space, uint64_t when, bool used);

/* blocks.c: free blocks, and blocks that a client fills */
void block_to_free(struct space *space, uint32_t id);
void block_append_free(struct space *space, uint32_t id); /* to be allocated last */
/* Of that home; or of any, the arena's first. Or NONE. */
uint32_t block_pop_near(struct space *space, struct arena *arena, uint32_t home);
uint32_t block_pop_free(struct space *space, struct arena *arena);
void block_fill_begin(struct space *space, uint32_t id, struct attachment *a);

/*
 * private.c: frees up to `most` blocks of the list that no client pins. Pinned ones go to its end,
 * so that a call looks at each once. True: some were freed.
 */
bool block_list_sweep(struct space *space, struct block_list *list, uint32_t most);

/* available.c */
uint32_t fill_limit(const struct space *space); /* blocks that a process may be filling at once */
void available_tell(struct attachment *a);
uint64_t segments_to_come(const struct space *space); /* segments that it could get at once */
/* segments that it could get beyond those, from other spaces */
uint64_t segments_to_take(const struct space *space);
/* changes when clients pin or unpin, as far as they report it in their pages */
uint64_t pins_state(const struct space *space);

/*
 * seal.c: space_seal without available_tell, which the caller calls once for several seals. ahead:
 * a key computed early for a single block, valid if the key before it is ahead->before; or NULL
 */
struct key_ahead {
        struct kvd_key before, key;
};
int blocks_seal(struct attachment *a, const struct seal_request *q, const struct key_ahead *ahead,
                kvd_ref *ret);

/* A posted block whose content was cached already stands for the older block (twin). */
kvd_ref content_of(const struct attachment *a, kvd_ref ref);

/* leaves.c: chains, and the order of eviction */
void leaf_add(struct space *space, uint32_t id);
/* the block was sealed behind parent (NONE: at the beginning of a chain) */
void block_link(struct space *space, uint32_t id, uint32_t parent);
/* When the client last used the block, by the space's clock; 0 if it did not. */
static inline uint64_t time_of_touch(const struct space *space, const struct kvd_pin_words *words) {
        uint32_t touch = atomic_load_explicit(&words->touch, memory_order_relaxed);
        uint64_t when = space->clock - (uint32_t)((uint32_t)space->clock - touch);

        return touch && when <= space->clock ? when : 0;
}

/* users.c */
int users_open(struct space *space, uint32_t seats);
void users_close(struct space *space);
void users_enter(const struct attachment *a);
void users_fold(const struct attachment *a); /* its pins do not count any more */
void users_leave(const struct attachment *a);
/* notes which clients use the block's group; true if there are new ones since the last look */
bool users_look(const struct space *space, uint32_t id);
/*
 * Among the clients that the last look found: does one pin the block? The client *seat, which had it
 * pinned the last time, comes first, which usually suffices. *reads is less by the words read.
 */
bool users_pin(const struct space *space, uint32_t id, uint16_t *seat, uint32_t *reads);
uint32_t users_pins(const struct space *space, uint32_t id); /* how many of them pin it */
/* the last time that one of them used it, or `last` if that is later */
uint64_t users_last_touch(const struct space *space, uint32_t id, uint64_t last);
uint32_t users_fetch(const struct space *space, uint32_t id); /* prefetches their words; how many */
/* the next one that it found after a, or the first one if a is NULL; NULL after the last one */
struct attachment *users_next(const struct space *space, uint32_t id, const struct attachment *a);

/* leaves.c */
uint64_t block_last_use(const struct space *space, uint32_t id);
/* the same, or now if the policy does not go by uses */
uint64_t block_used(const struct space *space, uint32_t id);
/* the space's clock at the last use of the leaf that is evicted next, or earlier */
uint64_t leaves_coldest(const struct space *space);
/* the same for one arena, on the store's clock; now, if it has no leaf to evict */
uint64_t leaf_age(const struct space *space, const struct arena *arena);
/* copies that client's time of last use into the block's stamp, if it is later */
void block_warm(const struct attachment *a, uint32_t id);
/* cost of computing a stamp beyond one move in the heap, in such moves */
uint32_t evict_effort(const struct space *space);

/* evict.c: candidates, victims */
bool block_pinned(const struct space *space, uint32_t id, uint32_t *n_clients);
/* is it pinned, referenced, held or pending, or is it being poisoned? */
bool block_in_use(struct space *space, uint32_t id, uint32_t *reads);
/* evicts up to n blocks of an arena, while there are reads left */
uint32_t evict_coldest(struct space *space, struct arena *arena, uint32_t n, uint32_t *reads);
/* might it have a leaf to evict? False: each was looked at since pins last changed */
bool arena_worth_looking(const struct arena *arena);
bool evict_subtree(struct space *space, uint32_t id, uint32_t *at, uint32_t *reads,
                   uint32_t *evicted);

/* worth.c: 0 to 1 */
double block_worth(const struct space *space, uint32_t id);

/* ahead.c: prefetches for the next n evictions; returns for how many it did so, at least 1 */
uint32_t evict_ahead(const struct space *space, const struct arena *arena, uint32_t n);

/* counters.c: adds the client's counters to sums[KVD_CLIENT_WORDS] */
void counters_add(const struct attachment *a, uint64_t *sums);

/* attachment.c */
/* leaves a block to a client of the previous daemon, which may still write it; false: none left */
bool block_inherit(struct space *space, uint32_t id);
bool attachment_is_inherited(const struct attachment *a);
void attachment_map(struct attachment *a);   /* sets its pointers into its mapped page */
void attachment_charge(struct space *space); /* charges an attachment, even beyond the limit */
void attachment_enter(struct attachment *a);
void attachment_unmake(struct attachment *a);
uint32_t space_users(const struct space *space); /* attachments that have not ended */
/* The first block at or after id whose words may be other than 0; capacity if none. */
uint32_t attachment_words_from(const struct attachment *a, uint32_t id);
void attachments_end(struct space *space); /* the space is deleted, or left to the next daemon */
/* frees some blocks that clients were filling when they ended; false: there are none */
bool attachments_give(struct space *space);
int arena_new(struct space *space, struct attachment *writer, struct arena **ret);

/* space.c */
/* makes a space that succeeds the one of a verified old index; the keeper does not have it yet */
int space_succeed(struct domain *domain, const struct kvd_index *before, struct space **ret);

/* adopt.c: stops taking over; what was not taken over stays with the keeper */
void adopt_leave(struct space *space);

/* semaphore.c */
/*
 * Sets the semaphore words of a request's blocks, to 0 if their data is there. -EINVAL: *why is
 * set.
 */
int semaphores_promise(struct attachment *a, const struct seal_request *q, struct kvd_desc *fields,
                       const char **why);
/*
 * The same for one block, right before it becomes SEALED: it waits for its data. joint: the request
 * has promises.
 */
void semaphores_promised(struct attachment *a, uint32_t id, const struct kvd_desc *fields,
                         bool joint);
/*
 * The same for a request with promises: the first that is not kept yet is set in fields, the others in
 * rest.
 */
int semaphores_promise_all(struct attachment *a, const struct seal_request *q,
                           struct kvd_desc *fields, struct kvd_promise rest[static KVD_SHARDS - 1],
                           const char **why);
/* takes the page of a previous daemon from *fd, if it succeeds */
int semaphores_inherit(struct space *space, uint32_t life, int *fd);
/* did the semaphore of that life reach the value? */
bool semaphores_reached(const struct space *space, uint32_t life, uint32_t semaphore,
                        uint64_t value);
void semaphores_settle(struct space *space); /* clients and blocks have been taken over */

/* attachment.c: the block is no longer one that it fills, but stays its own */
void block_to_limbo(struct attachment *a, uint32_t id);
/* inherit.c: clients of the previous daemon */
/* takes *page and *process on success */
int attachment_inherit(struct space *space, const struct attachment_kept *kept, int *page,
                       int *process);
/* on a GPU: stands for the previous worker, whose last work may still run there */
int worker_inherit(struct space *space);

/* tenant.c */
struct tenant *tenant_join(struct space *space, uint64_t process); /* NULL: out of memory */
void tenant_leave(struct space *space, struct tenant *tenant);

/* epoch.c: wakes clients that sleep on a word of the index */
void epoch_move(shm_u32 *epoch);

/* leaves.c: updates its place after a session has begun or ended there */
void block_rank(struct space *space, uint32_t id);

/* session.c */
void sessions_close(struct space *space);
/* of its chain */
static inline uint64_t blocks_up_to(const struct space *space, uint32_t id) {
        return id == NONE ? 0 : block_desc(space, id)->depth + UINT64_C(1);
}

/* session_chains.c */
/*
 * For a session that is beginning; no other one begins meanwhile. False: it has named the block
 * already.
 */
bool session_add_chain(struct space *space, struct session *session, uint32_t id);
/* takes one of its chains away, and returns the block at which it ended; NONE: nothing was left */
uint32_t session_take_chain(struct space *space, struct session *session);

/*
 * Sessions that end at a block end at `to`, a block before it, or nowhere if that is NONE: the block
 * is about to leave. Calls `moves`, if any, for each of them. Returns how many sessions it looked
 * at. A leaf that is evicted is not pinned.
 */
typedef void (*session_moves)(struct space *, struct session *, uint32_t id, uint32_t to);
uint32_t sessions_move(struct space *space, uint32_t id, uint32_t to, session_moves moves);

/* lease.c */
void leases_drop(struct attachment *attachment, bool died);

#endif
