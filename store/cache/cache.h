/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_CACHE_CACHE_H
#define KVD_STORE_CACHE_CACHE_H

/*
 * The cache, as the rest of the store sees it. Ownership:
 *
 *      space    index (mapped), segments, a struct block for each id, arenas, leases, sessions,
 *               attachments
 *      arena    free blocks of its segments, and the heap of eviction candidates. With isolation =
 *               arena each client has one; with isolation = shared a space has one.
 *
 * Sizes are in bytes. Functions that can fail return a negative errno; if a request is refused,
 * store_why() has the reason.
 */

#include "ipc/base/enums.h"
#include "store/core.h"

/* ---- lists of blocks ------------------------------------------------------------------------- */

/*
 * A doubly linked list of block ids, through the blocks' prev and next. first and last are valid if
 * n > 0. A block is in at most one list.
 */
struct block_list {
        uint32_t first, last, n;
};

/* ---- segment --------------------------------------------------------------------------------- */

struct before;

struct segment {
        struct shared_file file; /* host memory: owned memfd; SHARED_FILE_NONE until first used */
        struct chunk *chunk;     /* GPU memory: its chunk; NULL if it has no memory */
        bool worker;             /* a worker may have its memory mapped */
        struct kvd_list_node unmap; /* host memory: in store->owed.unmaps */
        /* changes whenever the segment gets different memory; 0 if it never had any */
        uint32_t memory_version;
        uint32_t number;
        uint32_t kept;       /* bytes of its name at the keeper (keep.c); 0 if not kept */
        uint32_t n_ready;    /* blocks with memory: the first n_ready of the segment */
        uint32_t n_worn_out; /* blocks of these that have no generations left (blocks.c) */
        uint32_t n_kept;     /* blocks being filled or in limbo, private or pending */
        /* blocks that are pinned or before a pinned one: by the last round, by the current round */
        uint32_t n_held, n_found;
        /* host memory: bytes from offset 0 that no block uses and that are still to be freed */
        uint64_t stale;
        uint64_t large; /* host memory: bytes from offset 0 for which large pages were wanted */
        struct block_list free;
        struct arena *arena;        /* arena whose writer may write into the segment */
        uint32_t home;              /* NUMA node of its memory, see pages_home */
        struct kvd_list_node avail; /* in arena->avail[home] while there are free blocks */
};

/* Leaves that were found in use. They are at the end of their arena's heap array (leaves.c). */
struct shelf {
        uint32_t n;
        uint32_t hand;    /* leaf to look at next */
        uint32_t in_vain; /* looks since the last one that found an unused leaf */
        uint64_t state;   /* pins_state when the current round of looks began */
};

#define HEAP_CHILDREN 4u

struct arena {
        struct space *space;
        struct attachment *writer; /* NULL: isolation = shared, or its client has ended */
        struct kvd_list avail[1 + STORE_NODES]; /* segments with free blocks, by their homes */
        uint32_t home; /* of the client that asked last: it gets such memory first */
        struct segment *growing[1 + STORE_NODES]; /* begun for a home, and maybe not finished */
        uint64_t n_ready;                         /* blocks with memory, in all of its segments */
        /*
         * owned; capacity ids: a heap of n_heap leaves, coldest first. The children of i begin at
         * HEAP_CHILDREN * i + 1. The shelf is at the end of the array.
         */
        uint32_t *heap;
        uint32_t n_heap;
        struct shelf shelf;
        struct arena *next; /* in space->memory.arenas */
};

/* ---- block ----------------------------------------------------------------------------------- */

/* What sealing and evicting look at, in one cache line. */
struct block {
        uint32_t prev, next; /* neighbours in its block_list */
        uint32_t parent;     /* block before it; NONE for the first of a chain */
        uint32_t root;       /* first block of its chain */
        uint32_t child;      /* first of its children; NONE if none */
        uint32_t sib_prev, sib_next;
        uint32_t heap; /* index in its arena's heap plus 1; 0 if not a candidate */
        uint32_t run;  /* id of the run that ends with it, plus 1; 0 if none */
        union {
                uint32_t owner;   /* FILLING, LIMBO: attachment's seat; NONE if a worker fills it */
                uint32_t session; /* SEALED: first chain of sessions that ends here, plus 1; or 0 */
        };
        union {
                uint64_t stamp; /* SEALED: eviction order, see leaves.c */
                kvd_ref twin;   /* FILLING: older block with the content that was posted; or 0 */
        };
        uint32_t refs; /* private: number of sequence entries that name it */
        /* jobs in flight, offers and fetches that need it: it is not evicted meanwhile */
        uint32_t holds;
        uint16_t pinned_by; /* seat that had it pinned when it was last found pinned */
        uint16_t score;     /* of JOB_SCORE, 1 to 65535; 0 if not known */
        uint8_t state;      /* enum kvd_state: the daemon's own copy */
        bool indexed : 1;   /* in the block table */
        bool marked : 1;    /* seal.c: named by the current request */
        /* SEALED, belongs to sequences: in no table and no chain (private_blocks.c) */
        bool private : 1;
        bool summarised : 1; /* its row of the summaries is made */
        bool reviving : 1;   /* FILLING, by a worker: in no attachment's list */
        bool pending : 1;    /* SEALED, its data is not known to be there (unready.c) */
        bool poisoned : 1;   /* SEALED, it or a block before it never got its data */
        bool kept : 1;       /* counted in its segment's n_kept */
};
static_assert(sizeof(struct block) == 64, "a block has one line of memory");

/* The last round that found the block held, and the seat that holds it (NONE: several seats). */
struct block_mark {
        uint32_t round, seat;
};

/* SEALED: where a copy of the block is in the file. */
struct block_record {
        uint32_t place; /* plus 1; 0 if none */
        /*
         * With a place: low half of the record's sequence number. Without one: the clock of its
         * last use when no client had it pinned (below/admit.c), or when its record was evicted; 0
         * if not noted yet.
         */
        uint32_t mark;
};

/* ---- attachment ------------------------------------------------------------------------------ */

/* keep.c: the parts of the names by which its page and its process are kept. */
struct attachment_kept {
        bool is;
        uint32_t life, seat;
        uint64_t process;
};

/* What the current round found out about one client, see available.c. */
struct attachment_look {
        uint64_t held;   /* `held` of its page when the round came to it */
        uint64_t pinned; /* blocks that it pins directly */
        int64_t alone;   /* blocks that no other client holds */
};

enum attachment_state { ATTACHED, ORPHANED, FOLDING };

struct attachment {
        struct space *space;
        void *owner;
        struct tenant *tenant; /* its process */
        void (*gone)(struct attachment *);
        uint32_t seat; /* in space->attachments */
        enum attachment_state state;
        struct shared_file pin_file; /* owned */
        struct kvd_pinpage *page;    /* its mapping */
        struct kvd_pin_words *words; /* inside page */
        shm_u64 *groups;             /* inside page: of those words */
        shm_u32 *use;                /* ... each a struct kvd_use */
        uint64_t posts_taken;        /* number of posts taken so far, see post.c */
        uint32_t posts_left;         /* not ATTACHED: posts that are still to be taken */
        /* owned; one bit for each segment, see drain.c; NULL in host spaces */
        uint64_t *mapped, *told;
        struct block_list filling; /* blocks that it fills */
        uint32_t n_leases;
        uint32_t n_sequences;
        bool stopping;               /* its sequences are being closed */
        bool withholds;              /* blocks that it releases go to limbo */
        uint32_t fold;               /* FOLDING: next block whose time of last use is copied */
        uint64_t given_back;         /* FOLDING: bytes of its pin page that were freed after that */
        uint64_t pinned;             /* blocks that it pinned, by the last round through the pins */
        struct arena *arena;         /* where its new blocks come from */
        uint32_t home;               /* ... of this NUMA node first, see pages_home */
        struct promises *promises;   /* owned; spaces on a GPU (semaphore.c) */
        struct prefix *prefix;       /* owned; below/prefix.c; NULL: none */
        struct kvd_list_node waking; /* in store->wakes.waiting */
        struct attachment_kept kept;
        /*
         * inherit.c: owned; pidfd (or lifeline) of a client of the previous daemon; -1 for a client
         * of this daemon
         */
        int process;
        uint64_t died_ns; /* when that process was found to have ended; 0 if not yet */
        struct attachment_look look;
};

/* ---- lease ----------------------------------------------------------------------------------- */

#define STORE_MAX_LEASES 1024u

struct lease {
        struct kvd_key prefix;
        uint32_t prefix_tokens;
        uint32_t holder; /* seat of the attachment; NONE if this entry is unused */
};

/* ---- sessions -------------------------------------------------------------------------------- */

#define STORE_MAX_SESSIONS 1024u
#define STORE_SESSION_CHAINS 16384u /* of all sessions of a space */

/* The deepest block that is left of a chain that a session names. */
struct session_chain {
        uint32_t block;      /* NONE: nothing is left, or the entry is unused */
        uint32_t prev, next; /* other chains that end at the block; NONE: none */
        uint32_t more;       /* next chain of the session, or next unused entry; NONE: none */
        uint16_t session;
};

struct session {
        char name[KVD_NAME_MAX + 1];
        uint32_t user;
        uint32_t keep;  /* enum of enums.h; 0: this entry is unused */
        uint32_t first; /* its chains; NONE: none */
        uint32_t n_chains;
        uint64_t until_ns; /* sys_now_ns */
        uint64_t pinned;   /* bytes that it is charged for */
};

/* ---- space ----------------------------------------------------------------------------------- */

/* A round through the pin pages, see available.c. */
struct look {
        bool under_way;
        uint32_t round; /* its number */
        /* position: client, and block id to look at next; NONE, and a chain of sessions */
        uint32_t seat, id;
        uint32_t up;           /* next block of a pinned block's chain to mark; NONE if none */
        uint32_t pieces, rest; /* calls that it took; calls of available_round to skip after it */
        uint64_t state;        /* pins_state when it began */
        uint64_t found;        /* held blocks found so far */
        uint64_t n_held;       /* held blocks, by the last complete round */
        struct block_mark *marks; /* owned; one for each block id */
};

struct space_memory {             /* segment.c */
        bool left;                /* left to the next daemon: nothing of it changes any more */
        struct before *before;    /* owned; old index whose blocks are being taken over; or NULL */
        struct segment *segments; /* owned; max_segments of them */
        struct arena *arenas;     /* owned */
        bool awaits_pages;        /* memory is filled ahead once large pages have come */
        struct {
                uint32_t ids, runs; /* for whose part of the index large pages were wanted */
        } large;
        uint32_t max_blocks;    /* maximum number of blocks with memory */
        uint32_t n_with_memory; /* segments that have memory */
        uint32_t n_kept;        /* segments with n_kept > 0 */
        uint32_t n_occupied;    /* segments with n_kept > 0 or n_held > 0 */
        /* segment without used blocks whose memory is being given back in pieces; or NULL */
        struct segment *returning;
        uint32_t hand; /* segment that is tried next when memory is to be given away */
        /* at hand: blocks found unused so far; of these, blocks evicted so far */
        uint32_t unused, emptied;
        kvd_ref stopped;   /* block of a subtree where evicting stopped; 0 if in none */
        uint32_t given_up; /* consecutive segments that could not be given away */
        uint64_t allowed;  /* current round: only blocks used before this clock (take.c) */
        /* spaces whose coldest leaf was last used before this (store's clock) need not ask */
        uint64_t warm;
        /* state in which a round over all segments found nothing: not repeated while it is so */
        struct vain {
                uint64_t pins, changes; /* pins_state, audit.changes */
        } vain;
        uint64_t asked_in;        /* id of the last search in which this space was asked */
        struct search {           /* this space's searches for others' memory (take.c) */
                uint64_t id;      /* 0 if none is under way */
                uint32_t n_asked; /* spaces asked so far */
        } cold, any;
        uint32_t tidy;     /* segment whose memory host_memory.c looks at next */
        uint32_t n_buried; /* deleted space: segments freed so far */
        uint64_t let_go;   /* deleted space: bytes of its tables freed so far */
};

#define AGES 32u

/* Pairs of clock values: the space's own, and the store's at that moment (age.c). */
struct ages {
        struct age {
                uint64_t clock, when;
        } at[AGES];       /* in ascending order */
        uint32_t n, step; /* step: ticks of the space's clock between two pairs */
        uint64_t last;    /* store's clock when the space's clock last moved */
        uint64_t coldest; /* last use (space's clock) of the block evicted last */
        uint64_t looked;  /* space's clock at the last call of space_age ... */
        uint64_t pins;    /* ... and pins_state then */
};

/* Which attachments use which groups of blocks, see users.c. */
struct users {
        shm_u64 **groups;             /* owned; by seat: in the attachment's page ... */
        struct kvd_pin_words **pages; /* owned; ... and its words there */
        uint64_t *present;            /* owned; a bit for each seat that has an attachment */
        uint64_t *pinning;            /* owned; ... whose pins count: it is not FOLDING */
        uint64_t *known;              /* owned; for each group, a bit for each seat that uses it */
        uint32_t words;               /* of 64 seats */
};

struct sessions {                     /* session.c, session_chains.c */
        struct session *at;           /* owned; STORE_MAX_SESSIONS; NULL before the first session */
        struct session_chain *chains; /* owned; STORE_SESSION_CHAINS */
        uint32_t n, n_chains;
        uint32_t unused; /* first entry of chains that is unused again; NONE: none */
        uint32_t n_used; /* entries of chains that were ever used */
        uint32_t hand;   /* session that is looked at next */
        uint64_t moved;  /* moves when sessions pin or unpin blocks */
};

struct leaves { /* leaves.c */
        struct users users;
        uint32_t n;
        uint32_t n_old;      /* lower ids may still have stamps of the previous policy */
        uint64_t seal_clock; /* counts seals: the order of policy fifo */
        kvd_ref chain, at;   /* chain being evicted, and where the last call stopped */
        struct ages ages;
        struct sessions sessions;
};

struct runs {           /* index.c */
        uint32_t *free; /* owned; stack of unused run ids, encoded: see free_run */
        uint32_t n_free;
};

struct leases {           /* lease.c */
        struct lease *at; /* owned; STORE_MAX_LEASES */
        uint32_t n;
};

struct private_blocks {            /* private_blocks.c */
        uint64_t n, n_reviving;    /* private blocks; blocks that workers fill */
        struct block_list garbage; /* blocks without references and holds, oldest first */
};

struct unready { /* blocks whose data is not there yet, or never will be: unready.c */
        uint64_t n_pending;
        struct block_list poisoned; /* poisoned blocks that are no longer pending */
        struct poisoning {          /* poisons a block and its descendants, in pieces */
                bool under_way;
                uint32_t top, at; /* at: current block; not evicted meanwhile */
                bool up;          /* the descendants of `at` are poisoned */
        } poisoning;
};

struct semaphore_page { /* of a previous daemon, while one of its clients exists */
        struct semaphore_page *next;
        struct shared_file file; /* owned */
        uint32_t life;
};

struct semaphores {                    /* of a space on a GPU: semaphore.c */
        struct shared_file page;       /* owned */
        struct semaphore_page *before; /* owned; list */
        bool settled;                  /* all kept clients of these pages have been taken over */
};

struct pressure {       /* methods/relief.c */
        bool starved;   /* an allocation found nothing to evict */
        bool relieving; /* was over the high watermark, not yet below the low one */
};

/* What a walk of store/check has counted so far; see check/walk.c. */
struct audit {
        uint64_t changes; /* moves with every change of what is summed up; never reset */
        uint64_t next;    /* cursor where the walk continues */
        uint64_t began;   /* `changes` when the walk began */
        bool whole;       /* nothing has changed since, and no other walk interfered */
        uint64_t count[KVD_N_STATES], indexed, runs, entries, run_entries, free;
        uint64_t private, garbage, reviving, waiting, pending, poisoned, session_ends;
        /* sums of hashes (check_mixed) that compare two sets, see check/sequence.c */
        uint64_t owners, refs, holds;
        uint64_t places, n_places, moved, below, shared, spilled, vague, leaving, sketches,
                sketch_bytes;
        uint64_t fetches, fetch_bytes;
        struct {                               /* of the current sequence */
                uint64_t listed[16], sketched; /* sums of hashes; listed: by enum entry_busy */
                uint32_t busy[16], own, copies;
        } sequence;
};

/* Each part's state for a space: owned by the part, and defined in its folder. */
struct space_parts {
        uint32_t n_begun; /* number of parts whose space_begins was called */
        bool watched;     /* a part reads summaries */
        struct sequences *sequences;
        struct places *places;
        struct semaphores *semaphores; /* NULL in host memory */
        struct summaries *summaries;
        struct profile *profile; /* samples; NULL until there are any */
        struct chain_scores *chain_scores;
        struct calibration *calibration;
        struct sketches *sketches;
        struct file_space *file;
        struct remote_space *remote;
};

struct listed {
        struct kvd_list_node busy; /* in store->spaces.busy */
        struct space *same;        /* next space with the same name hash */
        uint32_t place;            /* its number in domain->spaces */
        bool in;                   /* false once it is deleted */
        bool collected;            /* deleted to make room: its blocks in the tiers below stay */
        /*
         * quiet: a change does not schedule idle work; that waits for the next available_round, or
         * for a call of space_wants_idle. changed: something changed while quiet.
         */
        bool quiet, changed;
};

/* What one process has of a space, over all of its attachments. */
struct tenant {
        struct tenant *next;
        uint64_t process;
        uint32_t n_attachments; /* attachments that are not freed yet */
        uint32_t n_live;        /* attachments that have not ended */
        uint32_t n_filling, n_sequences, n_leases;
};

struct space_account {
        uint64_t used[KVD_N_COSTS]; /* store/account.c */
        uint64_t unused;            /* bytes of segments that other spaces could take */
        struct tenant *tenants;     /* owned: tenant.c */
        struct inherited {          /* clients of the previous daemon: inherit.c */
                uint32_t n, hand;   /* hand: seat to look at next */
        } inherited;
        uint64_t past_counters[KVD_CLIENT_WORDS]; /* of ended attachments, and of fetches */
};

struct space {
        struct domain *domain;
        struct space *next; /* in store->deleted */
        struct listed listed;
        uint32_t number; /* in store->spaces.all */
        char name[KVD_NAME_MAX + 1];

        struct shared_file index; /* owned; the daemon is its only writer */
        struct kvd_index *ix;     /* its mapping */

        struct space_account account;
        struct space_memory memory;
        struct block *blocks;         /* owned; capacity of them, one cache line each */
        struct block_record *records; /* owned; capacity of them, unused if no tier is below */
        uint64_t count[KVD_N_STATES]; /* blocks in each state */
        uint64_t clock;               /* ticks, see age.c; ix->clock has the low half */
        struct leaves leaves;
        struct runs runs;
        struct leases leases;
        struct private_blocks private;
        struct unready unready;
        struct pressure pressure;
        struct audit audit;

        struct attachment **attachments; /* owned; by seat */
        uint32_t n_attachments;          /* seats */
        struct look look;

        struct space_parts parts;
};

/* What a space is charged (store/account.c). check/account.c adds it up again. */
#define SPACE_FILES 6u /* descriptors: index and summaries, two each; spill; semaphores */
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

/* What its blocks hold: layers, layout, tokens. */
static inline const struct kvd_shape *space_geometry(const struct space *s) {
        return &s->ix->geometry;
}

static inline uint32_t space_block_tokens(const struct space *s) {
        return s->ix->geometry.block_tokens;
}

/* Number of tokens of a full block of a chain in that group. */
static inline uint32_t space_full_tokens(const struct space *s, uint32_t group) {
        return kvd_full_tokens(&s->ix->geometry, group);
}

static inline uint64_t space_block_bytes(const struct space *s) {
        return s->ix->block_bytes;
}

/* Are prefixes found either whole or not at all? */
static inline bool space_finds_whole(const struct space *s) {
        return s->ix->kind == KVD_kind_bidirectional;
}

/* Number of tokens of a chain's block at that depth; 0: the prefix ends before it. */
static inline uint32_t tokens_at(const struct space *s, uint32_t group, uint64_t root,
                                 uint32_t depth) {
        uint32_t bt = space_full_tokens(s, group);
        uint64_t before = (uint64_t)depth * bt;

        return !space_finds_whole(s) ? bt : (uint32_t)MIN(bt, root - MIN(root, before));
}

/* Number of block ids in all existing segments. */
static inline uint32_t space_ids(const struct space *s) {
        return kvd_segments_ids(s->ix,
                                atomic_load_explicit(&s->ix->n_segments, memory_order_relaxed));
}

static inline struct segment *space_segment(const struct space *s, uint32_t number) {
        return &s->memory.segments[number];
}

static inline struct segment *block_segment(const struct space *s, uint32_t id) {
        return space_segment(s, kvd_segment_of(s->ix, id));
}

static inline struct arena *block_arena(struct space *s, uint32_t id) {
        return s->ix->arena ? block_segment(s, id)->arena : s->memory.arenas;
}

/* What the daemon knows of the block, and what clients read of it. */
static inline const struct block *block_of(const struct space *s, uint32_t id) {
        return &s->blocks[id];
}

static inline const struct kvd_desc *block_desc(const struct space *s, uint32_t id) {
        return kvd_index_desc(s->ix, id);
}

static inline uint32_t block_generation(const struct space *s, uint32_t id) {
        return kvd_slot_generation(shm_load(&kvd_index_desc(s->ix, id)->slot));
}

static inline kvd_ref block_ref(const struct space *s, uint32_t id) {
        return kvd_ref_make(id, block_generation(s, id));
}

/* Are its blocks still being taken over (adopt.c)? Nothing else changes the space then. */
static inline bool space_is_incomplete(const struct space *s) {
        return s->memory.before != NULL;
}

/* Are there blocks whose data is still to come? */
static inline bool space_awaits_data(const struct space *s) {
        return s->unready.n_pending;
}

/* Left to the next daemon: nothing of it changes any more. */
static inline bool space_is_left(const struct space *s) {
        return s->memory.left;
}

/* False: it was deleted, and is being freed in pieces. */
static inline bool space_lives(const struct space *s) {
        return s->listed.in;
}

/* Schedules idle work for the space. */
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

/* For the tiers below, which say what is in it. */
static inline struct block_record *block_record(const struct space *s, uint32_t id) {
        return &s->records[id];
}

/* place: in the file, plus 1; handle: the clients' name for the record. All 0: no record. */
static inline void block_set_record(struct space *s, uint32_t id, uint32_t place, uint32_t mark,
                                    uint64_t handle) {
        if (s->parts.file || s->parts.remote)
                s->records[id] = (struct block_record){place, mark};
        if (s->ix->hint_slots)
                atomic_store_explicit(&kvd_index_records(s->ix)[id], handle, memory_order_relaxed);
}

/* Tells clients whether that tier below the space works. */
static inline void space_set_below(struct space *s, enum kvd_below which, bool on) {
        uint32_t now = atomic_load_explicit(&s->ix->below, memory_order_relaxed);

        atomic_store_explicit(&s->ix->below, on ? now | which : now & ~(uint32_t)which,
                              memory_order_relaxed);
}

/* counters.c: adds a call to the histogram that the clients' own calls are counted in */
void space_count_latency(struct space *space, enum kvd_latency which, uint64_t ns);

static inline void space_count(struct space *s, enum kvd_space_counter which, uint64_t n) {
        shm_u64 *counter = &s->ix->counters[which];

        atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + n,
                              memory_order_relaxed);
}

/* Maximum number of attachments so far: a look at a block may read a pin page of each. */
static inline uint32_t space_seats(const struct space *s) {
        return s->n_attachments;
}

/* The attachment after that one, by seat; after NULL, the first one. NULL: there are no more. */
static inline struct attachment *space_next_attachment(const struct space *s,
                                                       const struct attachment *a) {
        for (uint32_t i = a ? a->seat + 1 : 0; i < s->n_attachments; i++)
                if (s->attachments[i])
                        return s->attachments[i];
        return NULL;
}

/* ---- blocks ---------------------------------------------------------------------------------- */

/* blocks.c: states and lists */
void block_set_state(struct space *space, uint32_t id, enum kvd_state state, uint32_t generation);
/* updates the segment's n_kept; for callers that changed `pending` (block_set_state calls it) */
void block_count_kept(struct space *space, uint32_t id);
void block_list_append(struct space *space, struct block_list *list, uint32_t id);
void block_list_push(struct space *space, struct block_list *list, uint32_t id);
void block_list_remove(struct space *space, struct block_list *list, uint32_t id);
void block_fill_end(struct space *space, uint32_t id); /* takes it off its owner's list */
bool block_filled_by(const struct attachment *a, kvd_ref ref);
/* block_filled_by for all of them; false also if one is named twice */
bool blocks_filled_by(const struct attachment *a, const kvd_ref *refs, uint32_t n);

/* private_blocks.c: blocks of sequences, references and holds */
void block_seal_private(struct space *space, uint32_t id, const struct kvd_desc *fields,
                        const uint32_t *tokens);
void block_ref_up(struct space *space, uint32_t id);   /* private blocks only */
void block_ref_down(struct space *space, uint32_t id); /* with the last one it becomes garbage */
void block_hold(struct space *space, uint32_t id);     /* any block */
void block_let_go(struct space *space, uint32_t id);
/* frees a FILLING block that is in no list, as soon as it is not held */
void block_discard(struct space *space, uint32_t id);
bool block_current(const struct space *space, kvd_ref ref); /* sealed, with that generation? */
/* position of its first token when it was written, in tokens */
uint32_t block_position(const struct space *space, uint32_t id);
bool block_is_garbage(const struct block *b);
/* blocks that cannot simply be evicted: private ones but for garbage, and those being filled */
uint64_t blocks_committed(const struct space *space);

/* unready.c: blocks whose data is still to come (pending), or never will (poisoned) */
/* The block waits for its data, in that list. */
void block_awaits(struct space *space, struct block_list *list, uint32_t id);
/* It leaves the list. If poisoned, it is freed once no client pins it. */
void block_awaits_no_more(struct space *space, struct block_list *list, uint32_t id);
/* Poisons a block and all blocks behind it. False: *budget ran out; poison_goes_on continues. */
bool block_poison(struct space *space, uint32_t id, uint32_t *budget);
bool poison_goes_on(struct space *space, uint32_t *budget);
/* frees poisoned blocks that are not pinned any more. True: some are left */
bool poisoned_sweep(struct space *space);

/*
 * Maximum number of words of pin pages that one turn of the loop reads. This bounds the time that
 * eviction takes: a read takes about 10 ns, and ten times that where the page was never touched, so
 * a turn takes less than a millisecond. Functions subtract their reads from *reads, and stop at 0.
 */
#define KVD_PIN_READS 8192u

/* unused.c: adds `more` to the segment's n_kept, and sets its n_held */
void segment_keeps(struct space *space, struct segment *segment, int more, uint32_t n_held);

/* allocate.c */
/*
 * Returns a FILLING block that is in no list, for a worker to fill. All calls of one turn share
 * *reads, which begins as KVD_PIN_READS. 0: no block; if *reads is 0 then, retry in a later turn.
 */
kvd_ref room_take(struct space *space, struct arena *arena, uint32_t *reads);

/* seal.c */
/*
 * Publishes a block that a worker has filled (room_take) behind parent, or at the beginning of a
 * chain. The caller must drop its hold before. Returns the block that has the content now: the new
 * one, or an older one, and then the new one is freed. 0: parent is poisoned or no longer cached,
 * and the block is freed.
 */
struct arrival {
        kvd_ref block, parent;
        const struct chain_at *chain; /* the beginning of its chain */
        const uint32_t *tokens;
};
kvd_ref block_arrives(struct space *space, const struct arrival *arrival);

struct chain_at {
        kvd_ref leaf;          /* last block so far; KVD_ROOT at the beginning */
        struct kvd_key key;    /* of leaf, or of the root */
        uint32_t group, depth; /* depth: of the next block */
        uint64_t root;         /* salt; bidirectional: number of tokens of the whole prefix */
};
/* The beginning of the chain of a salt; bidirectional: of the prefix that has all these tokens. */
struct chain_at chain_begin(const struct space *space, uint32_t group, uint64_t salt,
                            const uint32_t *tokens, uint32_t n_tokens);
/* Moves to the next block if one with these tokens is cached. False: *at is unchanged. */
bool chain_step(const struct space *space, struct chain_at *at, const uint32_t *tokens);

/* index.c: the shared side of a block */
void index_leave(struct space *space, uint32_t id);
/* which further streams write its shards; n_shards - 1 */
void index_promise(struct space *space, uint32_t id, const struct kvd_promise *promises);
void index_arrived(struct space *space, uint32_t id); /* its data has come: clears its semaphore */
bool index_holds(const struct space *space, uint32_t id);     /* is the block found by its key? */
bool index_holds_run(const struct space *space, uint32_t id); /* is the run that ends with it? */

/* The hash tables, for checks. */
enum index_table { INDEX_BLOCKS, INDEX_RUNS };
enum index_slot { INDEX_EMPTY, INDEX_RIGHT, INDEX_WRONG };
uint32_t index_slots(const struct space *space, enum index_table table);
/* the first slot at or after `from` in a page that was ever written; or index_slots */
uint32_t index_written(const struct space *space, enum index_table table, uint32_t from);
/* INDEX_RIGHT: it names an indexed block or run, and is the first slot that its key leads to */
enum index_slot index_slot(const struct space *space, enum index_table table, uint32_t at);

/* tenant.c: how many of `of` one process may have */
uint32_t tenant_most(uint32_t of);

/* worth.c: attention that the client reports for the block */
struct kvd_use block_use(const struct attachment *a, uint32_t id);

/* ---- eviction -------------------------------------------------------------------------------- */

bool policy_goes_by_worth(uint32_t policy); /* does it go by what a block is worth? */
void evict_set_policy(struct space *space, uint32_t policy);
void block_restamp(struct space *space, uint32_t id); /* updates a leaf's place in its heap */
void block_condemn(struct space *space, uint32_t id); /* it is evicted before all others */
/* false: it is in use */
bool evict_leaf(struct space *space, uint32_t id, uint32_t *reads);

/* ---- sessions: session.c --------------------------------------------------------------------- */

static inline const struct session_chain *session_chain(const struct space *s, uint32_t at) {
        return &s->leaves.sessions.chains[at];
}

static inline const struct session *chain_session(const struct space *s,
                                                  const struct session_chain *c) {
        return &s->leaves.sessions.at[c->session];
}

/* Ends sessions whose time is over, a bounded number. Called by a timer. */
void sessions_expire(struct space *space);
uint64_t sessions_bytes(const struct space *space); /* of their tables */
/* bytes of blocks that a session must be charged for */
uint64_t session_pins(const struct space *space, const struct session *session);

/* ---- clients that sleep on a word of the index: epoch.c -------------------------------------- */

void sync_news(struct space *space); /* changes were offered */
/* a job has ended: wakes clients that wait for a sequence's work to finish */
void job_news(struct space *space);

/* ---- the daemon after this one: space.c ------------------------------------------------------ */

/* Leaves the space unchanged to the next daemon, or deletes it if it is not kept there. */
void space_leave(struct space *space);

/* ---- idle work: each does a piece, and says whether there may be more ------------------------ */

bool store_bury(struct store *store);                     /* frees memory of deleted spaces */
bool garbage_sweep(struct space *space, uint32_t budget); /* frees garbage that no client pins */
/* cleans up after clients that ended, and copies their times of last use */
bool attachment_fold(struct space *space);
/* takes posts of clients that ended; false: there are none left */
bool posts_take_left(struct space *space);
/* computes stamps again after a change of policy */
bool evict_restamp(struct space *space);
/* Sets memory.max_blocks by quota, pool and ix->max_blocks. False: there are too few ids. */
bool space_fit(struct space *space);
/* does it have more blocks than max_blocks, or more memory than a pool that was made smaller? */
bool space_has_too_much(const struct space *space);
bool space_trim(struct space *space); /* if it has too much: gives a segment's memory back */
bool space_tidy(struct space *space); /* frees what segments without blocks still use */
/* prepares memory for the next allocations */
bool space_fill_ahead(struct space *space);
/* continues the round through the pins that is under way, if any */
bool available_look(struct space *space);

/* ---- what timers do for a space, a bounded piece --------------------------------------------- */

/* ends attachments of the previous daemon whose clients have left or died; returns how many */
uint32_t inherited_look(struct space *space);
/*
 * Tells clients how many blocks they could get, and begins a round through the pins if these have
 * changed. Returns the number of clients, plus 1 if the space needs further calls without them.
 */
uint32_t available_round(struct space *space);

/* ---- blocks whose data is still to come: semaphore.c ----------------------------------------- */

int semaphores_new(struct space *space); /* creates the page, if the space is on a GPU */
uint64_t semaphores_bytes(const struct space *space);  /* bytes of all its pages, for its account */
uint32_t semaphores_before(const struct space *space); /* number of pages of previous daemons */
/*
 * Finds blocks whose data has arrived, and frees poisoned blocks, a bounded number. True: look
 * again. Called by a timer, and before blocks are evicted or borrowed.
 */
bool semaphores_look(struct space *space);

#endif
