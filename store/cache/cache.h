/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_CACHE_CACHE_H
#define KVD_STORE_CACHE_CACHE_H

/*
 * The cache room, from outside. Who owns what:
 *
 *      space    index (mapped), segments, struct block of every block id, arenas, leases, attachments
 *      arena    a writer's segments: free blocks and the heap of eviction candidates (one arena if isolation = shared)
 */

#include "ipc/base/enums.h"
#include "store/core.h"

/* ---- lists of blocks ------------------------------------------------------------------------- */

/*
 * Blocks in a row, by their prev and next; first and last count while n is not 0. Each is in one
 * such list at most.
 */
struct block_list {
        uint32_t first, last, n;
};

/* ---- segment --------------------------------------------------------------------------------- */

struct before;

struct segment {
        struct shared_file file; /* host memory: owned; none until first used */
        struct chunk *chunk;   /* a GPU's: what it has; or NULL */
        bool worker;           /* a worker has mapped its memory */
        struct kvd_list_node unmap; /* host memory: in store->owed.unmaps */
        /* moves when it gets other memory than before; 0: it never had any */
        uint32_t memory_version;
        uint32_t number;
        uint32_t kept;         /* bytes of its name at the keeper (keep.c); 0: it is not kept */
        uint32_t n_ready;      /* blocks that have memory, from the first on */
        uint32_t n_worn_out;   /* ... and are not used any more: blocks.c */
        uint32_t n_kept;       /* ... and are filled, private or pending: they stay where they are */
        /* ... and are pinned, or lie before a pinned block: by the last look at pins, and by this one */
        uint32_t n_held, n_found;
        /* host memory: bytes from the first on that have no blocks any more: to be freed */
        uint64_t stale;
        struct block_list free;
        struct arena *arena;   /* who may write it */
        struct kvd_list_node avail; /* in arena->avail while there are free blocks */
};

/* Leaves that were found in use: at the end of their arena's heap (evict.c). */
struct shelf {
        uint32_t n;
        uint32_t hand;         /* which is looked at next */
        uint32_t in_vain;      /* looks since one was found to be in nobody's use */
        uint64_t state;        /* of all pins when the round of looks began */
};

#define HEAP_CHILDREN 4u

struct arena {
        struct space *space;
        struct attachment *writer; /* NULL: everybody (shared), or nobody any more (orphan) */
        struct kvd_list avail;     /* segments with free blocks */
        uint64_t n_ready;      /* blocks that have memory, of all its segments */
        uint32_t *heap;        /* owned; leaves, coldest first: the one at i is above HEAP_CHILDREN i + 1 and on */
        uint32_t n_heap;
        struct shelf shelf;
        struct arena *next;    /* in space->memory.arenas */
};

/* ---- block ----------------------------------------------------------------------------------- */

/* One line of memory: what sealing and evicting look at. */
struct block {
        uint32_t prev, next;   /* in the list that it is in */
        uint32_t parent;       /* block before it, NONE for the first */
        uint32_t root;         /* the first one of its chain */
        uint32_t child;        /* first of its children */
        uint32_t sib_prev, sib_next;
        uint32_t heap;         /* place in its arena's heap plus 1; 0: not a candidate */
        uint32_t run;          /* run that ends with it plus 1; 0: none */
        uint32_t owner;        /* FILLING: seat of the attachment that does; NONE: a job */
        union {
                uint64_t stamp; /* SEALED: eviction order, see evict.c */
                kvd_ref twin;   /* FILLING: it was posted, and this had its content already; or 0 */
        };
        uint32_t refs;         /* private: entries of sequences that name it */
        /* jobs in flight and changes offered that name it: it stays what it is, where it is */
        uint32_t holds;
        uint16_t pinned_by;    /* seat that had it pinned when it was last found pinned */
        uint16_t score;        /* KeyDiff's, 1 to 65535; 0: not known */
        uint8_t state;         /* enum kvd_state: the daemon's own copy */
        bool indexed : 1;      /* in the block table */
        bool marked : 1;       /* seal.c: named by the request at hand */
        /* SEALED, belongs to sequences: in no table and no chain (private.c) */
        bool private : 1;
        bool summarised : 1;   /* its row of the summaries is made */
        bool reviving : 1;     /* FILLING, by a worker: in nobody's list */
        bool pending : 1;      /* SEALED, its data is not known to be there (semaphore.c) */
        bool poisoned : 1;     /* SEALED, it or a block before it never got its data */
        bool kept : 1;         /* counted in its segment's n_kept */
};
static_assert(sizeof(struct block) == 64, "a block has one line of memory");

/* When a block was last found to be held, and by which seat; NONE: by several (available.c). */
struct block_mark {
        uint32_t round, seat;
};

/* SEALED: a block's place in the file plus 1, 0: none; and which record that is. */
struct block_record {
        uint32_t place;
        uint32_t mark; /* ... or, without one, its last use when nobody had it pinned */
};

/* ---- attachment ------------------------------------------------------------------------------ */

/* keep.c: by which names its page and its process are kept. */
struct attachment_kept {
        bool is;
        uint32_t life, seat;
        uint64_t process;
};

/* The round under way found this of one client, see available.c. */
struct attachment_look {
        uint64_t held;         /* as it said when the round came to it */
        uint64_t pinned;       /* blocks, directly */
        int64_t alone;         /* blocks that nobody else holds */
};

enum attachment_state { ATTACHED, ORPHANED, FOLDING };

struct attachment {
        struct space *space;
        void *owner;
        struct tenant *tenant; /* its process */
        void (*gone)(struct attachment *);
        uint32_t seat;         /* in space->attachments */
        enum attachment_state state;
        struct shared_file pin_file; /* owned */
        struct kvd_pinpage *page; /* its mapping */
        struct kvd_pin_words *words; /* inside page */
        shm_u32 *use;          /* ... each a struct kvd_use */
        uint64_t posts_taken;  /* see post.c */
        uint32_t posts_left;   /* not ATTACHED: posts that are still to be taken */
        /* owned; a bit for each segment, see drain.c; NULL in host spaces */
        uint64_t *mapped, *told;
        struct block_list filling; /* blocks that it fills */
        uint32_t n_leases;
        uint32_t n_sequences;
        bool stopping;         /* its sequences are being closed */
        uint32_t fold;         /* FOLDING: next block whose touch is taken over */
        uint64_t given_back;   /* ... and bytes of its pin page, behind that */
        uint64_t pinned;       /* blocks that it pinned, when pins were last looked at */
        struct arena *arena;   /* where its new blocks come from */
        struct promises *promises; /* owned; spaces on a GPU (semaphore.c) */
        struct attachment_kept kept;
        /* inherit.c: owned; the pidfd of a client of the daemon before; -1: this daemon's client */
        int process;
        uint64_t died_ns;        /* ... when it was found to have ended; 0: not yet */
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
        uint32_t up;           /* ... in the chain of a pinned block; NONE: in none */
        uint32_t pieces, rest; /* calls that it took; times to pass over before the next one */
        uint64_t state;        /* of all pins when it began */
        uint64_t found;        /* blocks that are held */
        uint64_t n_held;       /* ... of the round before */
        struct block_mark *marks; /* owned; what was found of each block */
};

struct space_memory { /* segment.c */
        bool left;                /* it stays as it is, for the next daemon */
        struct before *before;    /* owned; blocks are still taken over from it: adopt.c; or NULL */
        struct segment *segments; /* owned; max_segments of them */
        struct arena *arenas;     /* owned */
        uint32_t max_blocks;      /* blocks that may have memory */
        uint32_t n_with_memory;   /* segments that have memory */
        /* one of them, whose blocks were all free and go a piece at a time; or NULL */
        struct segment *returning;
        uint32_t hand;            /* segment to look at next for memory to give back */
        /* blocks of it that were found unused, and of these, blocks that were emptied */
        uint32_t unused, emptied;
        kvd_ref stopped;          /* ... and where that is in a chain; 0: in none */
        uint32_t given_up;        /* segments in a row that could not be given back */
        uint64_t allowed;         /* uses before that clock, in the round under way: take.c */
        uint32_t n_kept;          /* segments with a block that is kept ... */
        uint32_t n_occupied;      /* ... or held */
        uint64_t warm;            /* not asked for cold segments by anyone whose leaves are older */
        struct vain {             /* a round over all segments found nothing, ... */
                uint64_t pins, changes; /* ... and has nothing to look at until these move */
        } vain;
        uint64_t asked_in;        /* the search of another space in which it was asked last */
        struct search {           /* of its own, for others' memory: take.c */
                uint64_t id;      /* 0: none is under way */
                uint32_t n_asked; /* spaces */
        } cold, any;
        uint32_t tidy;            /* segment without memory to look at next: memory.c */
        uint32_t n_buried;        /* segments freed, once the space was deleted */
        uint64_t let_go;          /* ... and bytes of what the daemon keeps for its blocks */
};

#define AGES 32u

/* When, on the clock of all spaces, the space's own clock had that value: age.c. */
struct ages {
        struct age {
                uint64_t clock, when;
        } at[AGES];               /* in ascending order */
        uint32_t n, step;         /* step: of the space's clock, from one to the next */
        uint64_t last;            /* when the clock moved last */
        uint64_t coldest;         /* the last use of what was evicted last */
        uint64_t looked;          /* the clock at the last round through the pins ... */
        uint64_t pins;            /* ... and their state */
};

struct leaves { /* evict.c */
        uint32_t n;
        uint32_t n_old;           /* ids below it may have stamps of the policy before this one */
        uint64_t seal_clock;      /* counts seals: the order of policy fifo */
        kvd_ref chain, at;        /* that is being evicted, and where the last call stopped */
        struct ages ages;
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
        struct poisoning {       /* of a block and all behind it, a piece at a time */
                bool under_way;
                uint32_t top, at; /* at: it stays in its place */
                bool up;         /* what is behind `at` is poisoned */
        } poisoning;
};

struct pressure { /* methods/relief.c */
        bool starved;             /* an allocation found nothing to evict */
        bool relieving;           /* over the high watermark, and not yet under the low one */
};

/* What a walk of store/check has counted so far; see walk.c there. */
struct audit {
        uint64_t changes;      /* moves with whatever is summed up; the rest is of one walk */
        uint64_t next;         /* where it goes on */
        uint64_t began;        /* changes, when it began */
        bool whole;            /* nothing has changed since, and no other walk came between */
        uint64_t count[KVD_N_STATES], indexed, runs, entries, run_entries, free;
        uint64_t private, garbage, reviving, waiting, pending, poisoned;
        /* sums of mixed numbers: what blocks say less what others do */
        uint64_t owners, refs, holds;
        uint64_t places, n_places, moved, below, shared, spilled, vague, leaving, sketches, sketch_bytes;
        uint64_t fetches, fetch_bytes;
        struct { /* of the sequence under way */
                uint64_t listed[16], sketched; /* mixed numbers of entries, by enum entry_busy */
                uint32_t busy[16], own, copies;
        } sequence;
};

/* What parts keep for a space. Each is the part's own, and defined where it lives. */
struct space_parts {
        uint32_t n_begun;              /* parts whose space_begins was called */
        /* one wants to be told of readable blocks: one load on the way of a seal */
        bool watched;
        struct sequences *sequences;
        struct tiers *tiers;
        struct semaphores *semaphores; /* NULL in host memory */
        struct summaries *summaries;
        struct profile *profile;       /* BiCache's samples; NULL until there are any */
        struct chain_scores *chain_scores;
        struct memshare *memshare;
        struct sketches *sketches;
        struct file_space *file;
        struct remote_space *remote;
};

struct listed { /* while it lives */
        struct kvd_list_node busy; /* in the store's spaces */
        struct space *same;       /* next of the same hash there */
        uint32_t place;           /* its number in domain->spaces */
        bool in;
        bool collected;           /* it made way: what tiers below have of it stays */
        /* what changes can wait for the next look at pins, or for somebody who asks for more; some has */
        bool quiet, changed;
};

/* What one process has of a space, by all its attachments. */
struct tenant {
        struct tenant *next;
        uint64_t process;
        uint32_t n_attachments;  /* that are not buried yet */
        uint32_t n_live;         /* ... that did not end */
        uint32_t n_filling, n_sequences, n_leases;
};

struct space_account {
        uint64_t used[KVD_N_COSTS];      /* store/account.c */
        uint64_t unused;                 /* ... and bytes of segments that others could have */
        struct tenant *tenants;          /* owned: tenant.c */
        struct inherited {               /* clients of the daemon before: inherit.c */
                uint32_t n, hand;        /* hand: seat to look at next */
        } inherited;
        uint64_t past_counters[KVD_CLIENT_WORDS]; /* of attachments that ended, and of fetches */
};

struct space {
        struct domain *domain;
        struct space *next;       /* in the store's deleted */
        struct listed listed;
        uint32_t number;          /* in the store's spaces */
        char name[KVD_NAME_MAX + 1];

        struct shared_file index; /* owned; written here alone */
        struct kvd_index *ix;     /* its mapping */

        struct space_account account;
        struct space_memory memory;
        struct block *blocks;     /* owned; capacity of them, each on a line of its own */
        struct block_record *records; /* owned; as many, untouched where no tier is below */
        uint64_t count[KVD_N_STATES];
        uint64_t clock;           /* its low half is ix->clock */
        struct leaves leaves;
        struct runs runs;
        struct leases leases;
        struct private_blocks private;
        struct unready unready;
        struct pressure pressure;
        struct audit audit;

        struct attachment **attachments; /* owned; by seat */
        uint32_t n_attachments;   /* seats */
        struct look look;

        struct space_parts parts;
};

/* What is charged for a space's things (store/account.c); check/account.c adds it up. */
#define SPACE_FILES 6u /* index and summaries, twice each; spill; semaphores */
uint64_t space_table_bytes(const struct kvd_index *ix);

static inline uint64_t arena_bytes(const struct kvd_index *ix) {
        return (uint64_t)ix->capacity * sizeof(uint32_t);
}

static inline uint32_t segment_files(const struct kvd_index *ix) {
        return ix->arena ? 2 : 1;
}

static inline struct store *space_store(const struct space *s) {
        return s->domain->store;
}

/* Are prefixes found whole, or not at all? */
static inline bool space_finds_whole(const struct space *s) {
        return s->ix->kind == KVD_kind_bidirectional;
}

/* Tokens of a chain's block at that depth; 0: the prefix ends before. */
static inline uint32_t tokens_at(const struct space *s, uint64_t root, uint32_t depth) {
        uint32_t bt = s->ix->geometry.block_tokens;
        uint64_t before = (uint64_t)depth * bt;

        return !space_finds_whole(s) ? bt : (uint32_t)MIN(bt, root - MIN(root, before));
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
        return s->ix->arena ? block_segment(s, id)->arena : s->memory.arenas;
}

static inline uint32_t block_generation(const struct space *s, uint32_t id) {
        return kvd_slot_generation(shm_load(&kvd_index_desc(s->ix, id)->slot));
}

static inline kvd_ref block_ref(const struct space *s, uint32_t id) {
        return kvd_ref_make(id, block_generation(s, id));
}

/* Are blocks still to be taken over from the previous daemon? Nothing else changes it then: adopt.c. */
static inline bool space_is_incomplete(const struct space *s) {
        return s->memory.before != NULL;
}

/* Or is it deleted, and buried a piece at a time? */
static inline bool space_lives(const struct space *s) {
        return s->listed.in;
}

/* It may have something to do when there is time. */
static inline void space_is_busy(struct space *s) {
        if (!s->listed.busy.in && s->listed.in)
                kvd_list_insert(&space_store(s)->spaces.busy, NULL, &s->listed.busy);
}

static inline void space_changes(struct space *s) {
        s->audit.changes++;
        if (s->listed.quiet)
                s->listed.changed = true;
        else
                space_is_busy(s);
}

/* place: in the file plus 1; handle: what clients call the record. All 0: it has none. */
static inline void block_set_record(struct space *s, uint32_t id, uint32_t place, uint32_t mark,
                                    uint64_t handle) {
        if (s->parts.file || s->parts.remote)
                s->records[id] = (struct block_record){place, mark};
        if (s->ix->hint_slots)
                atomic_store_explicit(&kvd_index_records(s->ix)[id], handle, memory_order_relaxed);
}

/* That a tier is below the space, and works. */
static inline void space_set_below(struct space *s, enum kvd_below which, bool on) {
        uint32_t now = atomic_load_explicit(&s->ix->below, memory_order_relaxed);

        atomic_store_explicit(&s->ix->below, on ? now | which : now & ~(uint32_t)which,
                              memory_order_relaxed);
}

static inline void space_count(struct space *s, enum kvd_space_counter which, uint64_t n) {
        shm_u64 *counter = &s->ix->counters[which];

        atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + n,
                              memory_order_relaxed);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

/* blocks.c: states and lists */
void block_set_state(struct space *space, uint32_t id, enum kvd_state state, uint32_t generation);
/* after it has become pending, or is so no more; block_set_state does it, too */
void block_count_kept(struct space *space, uint32_t id);
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

/*
 * Pin pages' words that one turn may read, which is what eviction costs: some 10 ns each, and ten
 * times that where the page was never touched, so less than a millisecond.
 */
#define KVD_PIN_READS 8192u

/* unused.c: the segment has so many more blocks that are kept, and that many that are held */
void segment_keeps(struct space *space, struct segment *segment, int more, uint32_t n_held);

/* allocate.c */
/*
 * A block for a worker to fill, in no list; 0: none, or none yet if that left nothing of *reads,
 * which begins as KVD_PIN_READS and is what all blocks of one turn may cost.
 */
kvd_ref room_take(struct space *space, struct arena *arena, uint32_t *reads);

/* seal.c */
/*
 * Publishes a block that a worker has filled (room_take) behind parent, or at the beginning of a
 * chain; the caller lets go of it first. Returns the block that has the content now: it may have
 * been there. 0: the chain cannot go on there (any more), and the block is freed.
 */
struct arrival {
        kvd_ref block, parent;
        const struct chain_at *chain; /* its beginning */
        const uint32_t *tokens;
};
kvd_ref block_arrives(struct space *space, const struct arrival *arrival);

struct chain_at {
        kvd_ref leaf;          /* the last block of it; 0: the root */
        struct kvd_key key;
        uint32_t group, depth; /* depth: of the next one */
        uint64_t root;         /* as in blocks */
};
/* That of a salt; bidirectional: of the whole prefix of these tokens. */
struct chain_at chain_begin(const struct space *space, uint32_t group, uint64_t salt,
                            const uint32_t *tokens, uint32_t n_tokens);
/* Goes on to the next block, which has these tokens. False: it is not there. */
bool chain_step(const struct space *space, struct chain_at *at, const uint32_t *tokens);

/* index.c: the shared side of a block */
void index_leave(struct space *space, uint32_t id);
void index_arrived(struct space *space, uint32_t id); /* the data that its semaphore stands for */
bool index_holds(const struct space *space, uint32_t id);     /* is the block found by its key? */
bool index_holds_run(const struct space *space, uint32_t id); /* ... and its run? */

/* Their tables, for checks. */
enum index_table { INDEX_BLOCKS, INDEX_RUNS };
enum index_slot { INDEX_EMPTY, INDEX_RIGHT, INDEX_WRONG };
uint32_t index_slots(const struct space *space, enum index_table table);
/* the first slot from there on that was ever written, about, or index_slots */
uint32_t index_written(const struct space *space, enum index_table table, uint32_t from);
/* does it name what is indexed, and is that found by its key there and nowhere before? */
enum index_slot index_slot(const struct space *space, enum index_table table, uint32_t at);

/* tenant.c: of so many that there are, one process may have */
uint32_t tenant_most(uint32_t of);

/* ---- eviction -------------------------------------------------------------------------------- */

bool policy_goes_by_worth(uint32_t policy); /* what the methods think of a block decides */
void evict_policy_changed(struct space *space);
void block_restamp(struct space *space, uint32_t id); /* a leaf's place in its heap, by now */
void block_condemn(struct space *space, uint32_t id); /* to go before all others */
/* false: somebody uses it */
bool evict_leaf(struct space *space, uint32_t id, uint32_t *reads);

/* ---- clients that sleep on a word of the index: epoch.c -------------------------------------- */

void sync_news(struct space *space); /* after offers */
/* after a job's end: for those that wait until nothing is under way */
void job_news(struct space *space);

/* ---- the daemon after this one: space.c ------------------------------------------------------ */

/* Lets go of all that it has, of which nothing changes. Where nobody keeps it, it is deleted. */
void space_leave(struct space *space);

/* ---- idle work: each does a piece, and says whether there may be more ------------------------ */

bool store_bury(struct store *store);                     /* of the memory of deleted spaces */
bool garbage_sweep(struct space *space, uint32_t budget); /* frees what nobody pins */
/* clears up behind clients that ended, and takes over when they used blocks */
bool attachment_fold(struct space *space);
/* some that clients posted before they ended; false: there are none */
bool posts_take_left(struct space *space);
/* of a policy that changed */
bool evict_restamp(struct space *space);
/*
 * Sets max_blocks by quota, pool, and what was asked for. False: the index has no room for all of
 * them.
 */
bool space_fit(struct space *space);
/* more than max_blocks allows, or than a pool that was made smaller has for it */
bool space_has_too_much(const struct space *space);
bool space_trim(struct space *space); /* gives a segment back if that is so */
bool space_tidy(struct space *space); /* frees what segments without memory still cost */
/* has memory ready before it is asked for */
bool space_fill_ahead(struct space *space);
/* a round through the pins, if one is under way */
bool available_look(struct space *space);

/* ---- what timers do for a space, a bounded piece --------------------------------------------- */

/* ends some whose clients, of the daemon before, have gone; returns how many */
uint32_t inherited_look(struct space *space);
/* tells its clients, and how many there are; begins such a round if pins changed */
uint32_t available_round(struct space *space);
/* finds out whose data has come, and frees what is poisoned. True: look again */
bool semaphores_look(struct space *space);

#endif
