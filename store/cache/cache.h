/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_CACHE_CACHE_H
#define KVD_STORE_CACHE_CACHE_H

/*
 * The cache room, from outside. Who owns what:
 *
 *      space    index (mapped), segments, struct block of every block id, arenas, leases, attachments
 *      arena    a writer's segments: free blocks and the heap of eviction candidates (one arena if isolation = shared)
 */

#include "ipc/base/file.h"
#include "store/core.h"

/* ---- lists of blocks ------------------------------------------------------------------------- */

/*
 * Blocks in a row, by their prev and next; first and last count while n is not 0. Each is in one
 * such list at most.
 */
struct block_list {
        uint32_t first, last, n;
};

static inline uint32_t block_list_first(const struct block_list *list) {
        return list->n ? list->first : NONE;
}

/* ---- segment --------------------------------------------------------------------------------- */

struct segment {
        struct shared_file file; /* host memory: owned; none until first used */
        struct chunk *chunk;   /* a GPU's: what it has; or NULL */
        bool worker;           /* ... and a worker has mapped that */
        /* moves when it gets other memory than before; 0: it never had any */
        uint32_t memory_version;
        uint32_t number;
        uint32_t n_ready;      /* blocks that have memory, from the first on */
        /* host memory: bytes from the first on that have no blocks any more: to be freed */
        uint64_t stale;
        struct block_list free;
        struct arena *arena;   /* who may write it */
        struct kvd_list_node avail; /* in arena->avail while there are free blocks */
};

struct arena {
        struct space *space;
        struct attachment *writer; /* NULL: everybody (shared), or nobody any more (orphan) */
        struct kvd_list avail;     /* segments with free blocks */
        uint64_t n_ready;      /* blocks that have memory, of all its segments */
        uint32_t *heap;        /* owned; leaves, coldest first */
        uint32_t n_heap;
        struct arena *next;    /* in space->memory.arenas */
};

/* ---- block ----------------------------------------------------------------------------------- */

struct block {
        uint32_t prev, next;   /* in the list that it is in */
        uint32_t parent;       /* block before it, NONE for the first */
        uint32_t child;        /* first of its children */
        uint32_t sib_prev, sib_next;
        uint32_t heap;         /* place in its arena's heap plus 1; 0: not a candidate */
        uint32_t run;          /* run that ends with it plus 1; 0: none */
        uint64_t stamp;        /* eviction order: see evict.c */
        uint32_t owner;        /* seat of the attachment that fills it; NONE */
        /* available.c: when it was last found to be held, and by whom; NONE: by several */
        uint32_t round, seat;
        uint32_t refs;         /* private: entries of sequences that name it */
        /* jobs in flight and changes offered that name it: it stays what it is, where it is */
        uint32_t holds;
        uint16_t score;        /* KeyDiff's, 1 to 65535; 0: not known */
        uint8_t state;         /* enum kvd_state: the daemon's own copy */
        bool indexed;          /* in the block table */
        bool marked;           /* seal.c: named by the request at hand */
        /* SEALED, belongs to sequences: in no table and no chain (private.c) */
        bool private;
        bool summarised;       /* its row of the summaries is made */
        bool reviving;         /* FILLING, by a worker: in nobody's list */
        bool pending;          /* SEALED, its data is not known to be there (semaphore.c) */
        bool poisoned;         /* SEALED, it or a block before it never got its data */
};

/* ---- attachment ------------------------------------------------------------------------------ */

/* The round under way found this of one client, see available.c. */
struct attachment_look {
        uint64_t held;         /* as it said when the round came to it */
        int64_t alone;         /* blocks that nobody else holds */
};

enum attachment_state { ATTACHED, ORPHANED, FOLDING };

struct attachment {
        struct space *space;
        void *owner;
        void (*gone)(struct attachment *);
        uint32_t seat;         /* in space->attachments */
        enum attachment_state state;
        struct shared_file pin_file; /* owned */
        struct kvd_pinpage *page; /* its mapping */
        shm_u32 *pins, *touch; /* inside page */
        shm_u32 *use;          /* ... each a struct kvd_use */
        /* owned; a bit for each segment, see drain.c; NULL in host spaces */
        uint64_t *mapped, *told;
        struct block_list filling; /* blocks that it fills */
        uint32_t n_leases;
        uint32_t n_sequences;
        uint32_t fold;         /* FOLDING: next block whose touch is taken over */
        struct arena *arena;   /* where its new blocks come from */
        struct promises *promises; /* owned; spaces on a GPU (semaphore.c) */
        struct attachment_look look;
};

/* ---- lease ----------------------------------------------------------------------------------- */

#define STORE_MAX_LEASES 1024u

struct lease {
        struct kvd_key prefix;
        uint32_t prefix_tokens;
        uint32_t holder;       /* an attachment's seat; NONE: this entry is unused */
};

/* ---- space ----------------------------------------------------------------------------------- */

/* A round through the pin pages, see available.c. */
struct look {
        bool under_way;
        uint32_t round;        /* its number */
        uint32_t seat, id;     /* where it stands */
        uint32_t pieces, rest; /* calls that it took; times to pass over before the next one */
        uint64_t state;        /* of all pins when it began */
        uint64_t found;        /* blocks that are held */
        uint64_t n_held;       /* ... of the round before */
};

struct space_memory { /* segment.c */
        struct segment *segments; /* owned; max_segments of them */
        struct arena *arenas;     /* owned */
        uint32_t max_blocks;      /* blocks that may have memory */
        uint32_t n_with_memory;   /* segments that have memory */
        uint32_t hand;            /* segment to look at next for memory to give back */
        uint32_t n_buried;        /* segments freed, once the space was deleted */
};

struct leaves { /* evict.c */
        uint32_t n;
        uint64_t seal_clock;      /* counts seals: the order of policy fifo */
};

struct runs { /* index.c */
        uint32_t *free;           /* owned; stack of unused run ids, see free_run */
        uint32_t n_free;
};

struct leases { /* lease.c */
        struct lease *at;         /* owned; STORE_MAX_LEASES */
        uint32_t n;
};

struct private_blocks { /* private.c */
        uint64_t n, n_reviving;
        struct block_list garbage; /* without references and holds, oldest first */
};

struct unready { /* blocks whose data is not there, or never will be: device/semaphore.c */
        uint64_t n_pending;
        struct block_list poisoned; /* those that are not pending any more */
};

struct pressure { /* methods/relief.c */
        bool starved;             /* an allocation found nothing to evict */
        bool relieving;           /* over the high watermark, and not yet under the low one */
};

/* What parts keep for a space. Each is the part's own, and defined where it lives. */
struct space_parts {
        struct sequences *sequences;
        struct tiers *tiers;
        struct semaphores *semaphores; /* NULL in host memory */
        struct summaries *summaries;
        struct profile *profile;       /* BiCache's samples; NULL until there are any */
        struct chain_scores *chain_scores;
        struct memshare *memshare;
        struct sketches *sketches;
};

struct space {
        struct domain *domain;
        struct space *next;       /* in domain->spaces */
        uint32_t number;
        char name[KVD_NAME_MAX + 1];

        struct shared_file index; /* owned; written here alone */
        struct kvd_index *ix;     /* its mapping */

        struct space_memory memory;
        struct block *blocks;     /* owned; capacity of them */
        uint64_t count[KVD_N_STATES];
        uint64_t clock;           /* its low half is ix->clock */
        struct leaves leaves;
        struct runs runs;
        struct leases leases;
        struct private_blocks private;
        struct unready unready;
        struct pressure pressure;

        struct attachment **attachments; /* owned; by seat */
        uint32_t n_attachments;
        struct look look;
        uint64_t past_counters[KVD_N_CLIENT_COUNTERS]; /* of attachments that ended */

        /* a part wants to be told of readable blocks: one load on the way of a seal */
        bool watched;
        uint32_t n_begun;         /* parts whose space_begins was called */
        struct space_parts parts;
};

static inline struct store *space_store(const struct space *s) {
        return s->domain->store;
}

/* Block ids of all segments there are. */
static inline uint32_t space_ids(const struct space *s) {
        return kvd_segments_ids(s->ix,
                                atomic_load_explicit(&s->ix->n_segments, memory_order_relaxed));
}

static inline struct segment *block_segment(const struct space *s, uint32_t id) {
        return &s->memory.segments[kvd_segment_of(s->ix, id)];
}

static inline struct arena *block_arena(struct space *s, uint32_t id) {
        return block_segment(s, id)->arena;
}

static inline uint32_t block_generation(const struct space *s, uint32_t id) {
        return kvd_slot_generation(shm_load(&kvd_index_desc(s->ix, id)->slot));
}

static inline kvd_ref block_ref(const struct space *s, uint32_t id) {
        return kvd_ref_make(id, block_generation(s, id));
}

static inline void space_count(struct space *s, enum kvd_space_counter which, uint64_t n) {
        shm_u64 *counter = &s->ix->counters[which];

        atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + n,
                              memory_order_relaxed);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

/* blocks.c: states and lists */
void block_set_state(struct space *space, uint32_t id, enum kvd_state state, uint32_t generation);
void block_list_append(struct space *space, struct block_list *list, uint32_t id);
void block_list_push(struct space *space, struct block_list *list, uint32_t id);
void block_list_remove(struct space *space, struct block_list *list, uint32_t id);
void block_fill_end(struct space *space, uint32_t id); /* takes it off its owner's list */
bool block_filled_by(const struct attachment *a, kvd_ref ref);
/* all, and none twice? */
bool blocks_filled_by(const struct attachment *a, const kvd_ref *refs, uint32_t n);

/* private.c: blocks of sequences, and blocks that must stay where they are */
void block_seal_private(struct space *space, uint32_t id, const struct kvd_desc *fields,
                        const uint32_t *tokens);
void block_ref_up(struct space *space, uint32_t id);   /* private blocks only */
void block_ref_down(struct space *space, uint32_t id); /* the last one makes it garbage */
void block_hold(struct space *space, uint32_t id);     /* any block */
void block_let_go(struct space *space, uint32_t id);
/* in nobody's list any more: free as soon as it is not held */
void block_discard(struct space *space, uint32_t id);
bool block_current(const struct space *space, kvd_ref ref); /* sealed, and that very incarnation? */
/* of its first token, when it was written */
uint32_t block_position(const struct space *space, uint32_t id);
bool block_is_garbage(const struct block *b);

/* allocate.c */
/* a block for a worker to fill, in no list; 0: none */
kvd_ref room_take(struct space *space, struct arena *arena);

/* index.c: the shared side of a block */
void index_leave(struct space *space, uint32_t id);
bool index_holds(const struct space *space, uint32_t id);     /* is the block found by its key? */
bool index_holds_run(const struct space *space, uint32_t id); /* ... and its run? */

/* ---- eviction -------------------------------------------------------------------------------- */

bool policy_goes_by_worth(uint32_t policy); /* what the methods think of a block decides */
void evict_policy_changed(struct space *space);
void block_restamp(struct space *space, uint32_t id); /* a leaf's place in its heap, by now */
void block_condemn(struct space *space, uint32_t id); /* to go before all others */
bool evict_leaf(struct space *space, uint32_t id);    /* false: somebody uses it */

/* ---- clients that sleep on a word of the index: epoch.c -------------------------------------- */

void sync_news(struct space *space); /* after offers */
/* after a job's end: for those that wait until nothing is under way */
void job_news(struct space *space);

/* ---- idle work: each does a piece, and says whether there may be more ------------------------ */

bool store_bury(struct store *store);                     /* of the memory of deleted spaces */
bool garbage_sweep(struct space *space, uint32_t budget); /* frees what nobody pins */
/* takes over when ended clients used blocks */
bool attachment_fold(struct space *space);
/* gives a segment back if the space is over max_blocks */
bool space_trim(struct space *space);
/* has memory ready before it is asked for */
bool space_fill_ahead(struct space *space);
/* a round through the pins, if one is under way */
bool available_look(struct space *space);

#endif
