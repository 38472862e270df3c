/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_INTERNAL_H
#define KVD_CLIENT_INTERNAL_H

/*
 * Shared by the files of libkvd.
 *
 *      kvd        one connection under one lock; its epoch increases with each new connection
 *      kvd_space  what the caller opened; points to the view of the current attachment
 *      view       one attachment's mappings: index (read-only), pin page, pool. Views of lost
 *                 attachments stay mapped until the last pin and block in them is released
 *
 * Locks: kvd.lock protects the connection, and making and retiring views. A call waits for it until
 * its deadline. magazine.lock protects a view's blocks to fill and its posts, and is never held
 * during a request to the daemon. magazine.lock is taken inside kvd.lock, never the other way
 * round. Lookups take neither.
 */

#include <errno.h>
#include <pthread.h>

#include "client/conn/conn.h"
#include "client/conn/deadline.h"
#include "client/conn/error.h"
#include "client/kvd.h"
#include "client/kvd_methods.h"
#include "ipc/base/sequence.h"

struct kvd_ops;
struct later;
struct scratch;

struct kvd {
        const uint32_t *not_forked; /* owned page, wiped in children: 1 here, 0 there */
        pthread_mutex_t lock;
        pthread_cond_t changed;    /* with lock: a thread has left a GPU's driver, or attached */
        char *path;                /* owned; as passed to kvd_open, or NULL */
        struct server_user server; /* user that every daemon must run as */
        struct conn *conn;         /* owned; NULL if lost, or not yet made */
        uint64_t epoch;            /* number of the connection */
        uint64_t retry_ns;         /* time before which kvd_catch_up does not retry */
        _Atomic(struct later *) later; /* owned: messages not sent by their deadline */
        _Atomic bool kick;             /* the daemon must be told of posts; handle_unlock does it */
        bool joined;                   /* each new connection joins the team */
        uint8_t team[16];
        _Atomic uint32_t users; /* number of spaces, plus 1 until kvd_close */
};

struct view;

/* Source of a segment's mapping: a descriptor, or 64 bytes of a legacy CUDA handle. */
struct segment_source {
        int fd;
        const uint8_t *handle;
};

/*
 * How a pool is mapped: memory_host.c, memory_device.c, memory_none.c. Failures set the error message. map is
 * called under kvd.lock and releases it while a GPU's driver is at work: its caller must copy
 * replies before the call, and afterwards read again what the lock protects. The view stays mapped.
 * reserve is called under kvd.lock in host memory, and without it on a GPU.
 */
struct mapping_kind {
        /* reserves addresses for the maximum number of segments: view->base */
        int (*reserve)(struct view *view);
        int (*map)(struct view *view, uint32_t number, const struct segment_source *from,
                   bool writable);
        void (*release)(struct view *view); /* unmaps everything, also after a failure */
};
extern const struct mapping_kind mapping_host, mapping_device, mapping_none;
/* memory_none.c: counts all segments from first on as mapped; returns their number */
uint32_t mapping_none_note(struct view *view, uint32_t first);
void mapping_host_end(struct kvd_space *space); /* unmaps the addresses of a fixed space */

struct device;

/* Blocks that the daemon handed out in advance, not yet taken by the caller. */
struct magazine {
        pthread_mutex_t lock; /* protects all fields */
        _Atomic uint32_t n;   /* kvd_available reads it without the lock */
        uint32_t room;        /* maximum number of refs */
        kvd_ref *refs;        /* owned; in descending order of ids: the lowest is taken first */
};

/* Relaxed: the lock orders all writes. */
static inline uint32_t magazine_n(const struct magazine *magazine) {
        return atomic_load_explicit(&magazine->n, memory_order_relaxed);
}

static inline void magazine_set_n(struct magazine *magazine, uint32_t n) {
        atomic_store_explicit(&magazine->n, n, memory_order_relaxed);
}

struct view {
        /* read by every lookup, written before the view is published */
        struct kvd_space *space;
        const struct kvd_index *ix;  /* owned mapping, read-only */
        struct kvd_pinpage *page;    /* owned mapping */
        struct kvd_pin_words *words; /* inside page */
        shm_u64 *groups;             /* inside page: of those words */
        shm_u64 *asked;              /* inside page: notes of lookups, see asked.c */
        /* owned reservation: segment i at i * segment_bytes; device addresses on a GPU */
        uint8_t *base;
        uint8_t *sealed;   /* inside it: a second, read-only mapping; on a GPU: base */
        uint64_t reserved; /* bytes of each of the two mappings */
        const struct mapping_kind *mapping; /* NULL if not yet known */
        struct device *device;              /* owned; NULL in host memory (gpu_view.h) */
        uint32_t shard; /* which part of each block is mapped: of which of the pool's GPUs */

        alignas(64) _Atomic uint64_t refs; /* number of lookups, pins, caller's blocks and so on */
        _Atomic bool wanted; /* a lookup found blocks of a segment that is not mapped */
        _Atomic bool noting; /* a thread is writing the note of a lookup */

        /* under kvd.lock */
        /* number of mapped segments before the first hole; read by lookups */
        alignas(64) _Atomic uint32_t n_mapped;
        _Atomic uint32_t memory_epoch; /* ix->memory_epoch when mappings were last checked */
        uint64_t index_bytes;
        uint32_t handle; /* number of the space in the connection */
        uint64_t epoch;  /* number of the connection */
        bool unmapped;
        _Atomic uint32_t fetched; /* ix->n_segments when segments were last fetched */
        struct view *older;       /* owned */
        uint64_t writable[KVD_MAX_SEGMENTS / 64];
        /* read by lookups that meet a hole (GPU pools have holes) */
        _Atomic uint64_t mapped[KVD_MAX_SEGMENTS / 64];
        /* kvd_index_memory of the memory that is mapped, see map_segment */
        _Atomic uint32_t memory[KVD_MAX_SEGMENTS];

        struct magazine magazine;
};

struct kvd_space {
        struct kvd *handle;
        char name[KVD_NAME_MAX + 1];
        struct kvd_shape geometry;
        struct kvd_space_options options;
        _Atomic uint32_t reserve;      /* n of kvd_reserve */
        _Atomic(struct view *) view;   /* owned, as are the older ones behind it */
        bool attaching;                /* a thread is making the next view; under kvd.lock */
        struct {                       /* failed posts, see post.c */
                _Atomic uint64_t lost; /* number lost with earlier daemons, not yet reported */
                _Atomic uint64_t told; /* number reported, of the current view's posts_refused */
        } posts;
        /* counted by libkvd itself, or in the pages of unmapped views */
        _Atomic uint64_t counters[sizeof(struct kvd_counters) / sizeof(uint64_t)];
        struct {                   /* KVD_SPACE_FIXED: used by one view after the other */
                uint8_t *base;     /* owned reservation; NULL if not yet made */
                uint64_t reserved; /* as view->reserved */
                uint32_t blocks;   /* capacity of the first view */
        } fixed;
        /* owned: buffers that calls of attention left for later calls */
        _Atomic(struct scratch *) scratch[4];
        /* number of tensors not deleted yet, plus 1 until kvd_space_close */
        _Atomic uint32_t users;
};

/* Places in struct kvd_counters: counted by libkvd itself, or in the pin pages of views. */
enum counter {
#define COUNTER(member) (offsetof(struct kvd_counters, member) / sizeof(uint64_t))
        COUNT_LOOKUPS = COUNTER(lookups),
        COUNT_HITS = COUNTER(lookup_hits),
        COUNT_TOKENS_ASKED = COUNTER(tokens_asked),
        COUNT_TOKENS_FOUND = COUNTER(tokens_found),
        COUNT_RETRIES = COUNTER(retries),
        COUNT_ALLOCATED = COUNTER(blocks_allocated),
        COUNT_SEALED = COUNTER(blocks_sealed),
        COUNT_DUPLICATE = COUNTER(blocks_duplicate),
        COUNT_REFUSED = COUNTER(refused),
        COUNT_RECONNECTS = COUNTER(reconnects),
#undef COUNTER
};
#define COUNTERS (sizeof(struct kvd_counters) / sizeof(uint64_t))

static inline void count(struct kvd_space *space, enum counter which, uint64_t n) {
        atomic_fetch_add_explicit(&space->counters[which], n, memory_order_relaxed);
}

static inline bool is_fixed(const struct kvd_space *space) {
        return space->options.flags & KVD_SPACE_FIXED;
}

static inline bool is_index_only(const struct kvd_space *space) {
        return space->options.flags & KVD_SPACE_INDEX_ONLY;
}

static inline bool forked(const struct kvd *handle) {
        return unlikely(*handle->not_forked == 0);
}

/*
 * Begins a call, and its deadline. Returns 0, or -ECHILD with the error message set if this process
 * is a child of the one that opened the connection.
 */
static inline int handle_check(const struct kvd *handle) {
        deadline_begin();
        return forked(handle) ?
                       client_fail(
                               -ECHILD,
                               "this process was forked from the one that connected; open a connection of its own") :
                       0;
}

static inline int space_check(const struct kvd_space *space) {
        deadline_begin();
        return forked(space->handle) ?
                       client_fail(
                               -ECHILD,
                               "this process was forked from the one that opened the space; open it again") :
                       0;
}

/* name.c: a name of this process, for people */
void own_name(char to[KVD_NAME_MAX + 1]);

/* latency.c */
void latency_prepare(void); /* before the first lookup */
/* the current time in ns; 0 if reading the clock needs a system call */
uint64_t latency_begin(void);
void latency_count(struct view *view, enum kvd_latency which, uint64_t begun_ns);

/* below.c: the n_tokens tokens behind leaf, a chain's last block (KVD_ROOT if none) */
struct lookup_end {
        kvd_ref leaf;
        uint64_t root;
        uint32_t group, depth, n_tokens; /* depth: number of blocks before the tokens */
        const uint32_t *tokens;
};
/* returns kvd_pin.n_below */
uint32_t lookup_below(const struct kvd_index *ix, const struct lookup_end *end);

/* asked.c: for clients that follow the space */
struct lookup_note {
        const uint32_t *tokens;
        uint32_t n_tokens, group, found;
        uint64_t salt;
};
void lookup_noted(struct view *view, const struct lookup_note *note);

/* handle.c */
int handle_lock(struct kvd *handle); /* waits until the call's deadline; 0 or -ETIMEDOUT */
void handle_unlock(struct kvd *handle);
/* without the lock: tells the daemon of posts, or leaves that to the thread that has the lock */
void handle_kick(struct kvd *handle);
/* for a call that released the lock in between: takes it back, whatever the deadline */
void handle_lock_again(struct kvd *handle);
/* waits for handle_changed, without the lock; 0 or -ETIMEDOUT */
int handle_wait(struct kvd *handle);
void handle_changed(struct kvd *handle);
/* the following are called under kvd.lock */
int handle_connect(struct kvd *handle); /* 0 if connected now */
int handle_call(struct kvd *handle, uint32_t number, const void *request, void *reply,
                struct kvd_fds *fds);

/*
 * later.c: keeps messages of calls that cannot fail but did not get the lock before their deadline.
 * later_send, under kvd.lock, sends those of the current connection and drops the others.
 */
void later_release(const struct view *view, const kvd_ref *refs, uint32_t n);
void later_detach(struct kvd *handle, uint64_t epoch, uint32_t space);
void later_close(const struct view *view, uint32_t sequence);
void later_send(struct kvd *handle);

/* view.c: mappings of one attachment, and references to them */
struct view *view_get(struct kvd_space *space);    /* the current one, with a reference */
void view_put_some(struct view *view, uint32_t n); /* releases n references */
static inline void view_put(struct view *view) {
        view_put_some(view, 1);
}
void view_leave(struct view *view); /* as view_put, but makes no system call */
bool view_hold(struct view *view);  /* takes a reference to any view; false: it is unmapped */
bool view_is_current(const struct view *view);
bool view_is_connected(const struct view *view); /* under kvd.lock: by the current connection */
/*
 * Called under kvd.lock, which they release while a GPU's driver is at work. view_unmap unmaps a
 * view without references. view_is_last unmaps older views without references, and returns whether
 * all older views are unmapped.
 */
void view_unmap(struct view *view);
bool view_is_last(struct view *view);
struct view *view_new(struct kvd_space *space);
void view_free(struct view *view); /* no other thread has it; not under kvd.lock if mapped */
void view_count(const struct view *view, uint64_t counters[COUNTERS]); /* adds its page's */
void view_forget_mappings(struct kvd_space *space);
void view_free_all(struct kvd_space *space);
int view_map_file(int fd, uint64_t bytes, int prot, void **ret); /* refuses a shorter file */
bool view_has(const struct view *view, uint32_t segment); /* mapped, with its current memory */
/* no segment got other memory since the mappings were last checked */
bool view_is_fresh(const struct view *view);
/*
 * The second half of C5 (lookup.c): in the index of a daemon that was replaced, slot words stay
 * SEALED for ever. Partner: D11 (store/cache/inherit.c).
 */
static inline bool view_is_served(const struct view *view) {
        return atomic_load_explicit(&view->page->epoch, memory_order_seq_cst) == view->ix->life;
}
bool view_has_any(const struct view *view);
bool view_may_write(const struct view *view, uint32_t segment);
void view_set_segment(struct view *view, uint32_t segment, bool mapped, bool writable);
void view_lose_segment(struct view *view, uint32_t segment); /* before unmapping it */

/* segments.c: under kvd.lock, which they release as map does; view_map_blocks takes it itself */
int view_catch_up(struct view *view); /* maps new segments, and those that lookups missed */
int view_map_segments(struct view *view, uint32_t at_least); /* all below it that have memory */
int view_map_block(struct view *view, uint32_t id, bool write);
/* maps the segments of blocks that other clients sealed */
int view_map_blocks(struct view *view, const kvd_ref *refs, uint32_t n);

/* attach.c */
/*
 * Called under kvd.lock. Returns a view that is current and connected, or an error. On a GPU it may
 * release the lock for a while, to map memory or to give it back: read again what the lock
 * protects.
 */
int view_attach(struct kvd_space *space, struct view **ret);

/* geometry.c */
struct kvd_shape shape_of(const struct kvd_geometry *geometry);

/* space.c */
void view_memory(struct view *view, struct kvd_space_memory *ret);
void space_put(struct kvd_space *space); /* for a tensor or the caller; the last one closes it */

/* lookup.c */

/* Before n lookups of objects: prefetches what they read of the first blocks with these words. */
#define LOOKUP_AHEAD 16u
void lookup_ahead(struct kvd_space *space, const uint32_t *words, const struct kvd_pin *pins,
                  uint32_t n);

/* As kvd_lookup, but finds an object by key, whole or not at all. blocks has room for all. */
int64_t lookup_object(struct kvd_space *space, const uint32_t *words, uint32_t n_words,
                      uint32_t *blocks, struct kvd_pin *pin);

/*
 * Pins the resident full blocks of a causal chain, of pin's group and salt, mapped or not; counts
 * no lookup. False: there are none.
 */
bool lookup_hold(struct kvd_space *space, const uint32_t *tokens, uint32_t n_tokens,
                 struct kvd_pin *pin);
/* fetch.c: as kvd_fetch, of a chain of any group that is short enough for one request */
int64_t fetch_chain(struct kvd_space *space, uint32_t group, uint64_t salt, const uint32_t *tokens,
                    uint32_t n_tokens, int *fd);

/* Is the block sealed? Its contents do not change while the daemon looks for pins (RETIRING). */
static inline bool slot_stands(uint64_t slot) {
        return kvd_slot_state(slot) == KVD_SEALED || kvd_slot_state(slot) == KVD_RETIRING;
}
/* true: the block is still sealed with this generation, and now pinned */
bool pin_block(struct view *view, kvd_ref ref);
/*
 * Counts a pin (C2b to C4), and returns the number of pins before it. The caller holds the block in
 * another way, or looks at its slot word again.
 */
static inline uint32_t count_pin(struct view *view, uint32_t id) {
        kvd_group_use(view->groups, id);
        return atomic_fetch_add(&view->words[id].pins, 1);
}
static inline void unpin_block(struct view *view, uint32_t id) {
        atomic_fetch_sub_explicit(&view->words[id].pins, 1, memory_order_release);
}
/*
 * Tells the daemon, after the fact, that pins which `held` does not count have changed. The release
 * pairs with the acquire in pins_state: a round that sees it sees the pins.
 */
static inline void pins_moved(struct view *view) {
        atomic_fetch_add_explicit(&view->page->moved, 1, memory_order_release);
}

/* lookup.c: as kvd_unpin, but does not count as a use */
void unpin_unused(struct kvd_space *space, struct kvd_pin *pin);

static inline void unpin_moved(struct view *view, uint32_t id) {
        unpin_block(view, id);
        pins_moved(view);
}

/* sequence.c */

/* One request's block table. Only the caller's thread uses it, except for the view. */
struct kvd_sequence {
        struct kvd_space *space;
        struct view *view; /* with a reference */
        uint32_t number;   /* of the sequence in the space */
        /* the contents of the daemon's table are unknown: it can only be closed */
        bool lost;
        struct kvd_entry *entries; /* owned; max_blocks of them */
        uint32_t n, max_blocks;
        uint32_t n_tokens;
        uint32_t seen;                     /* sync_epoch at the start of the last complete sync */
        uint64_t arrived[2];               /* number of blocks that came back: exact, approximate */
        uint64_t copy_bytes, sketch_bytes; /* as of the last sync */
        void *summaries;                   /* owned mapping, read-only; NULL until needed */
        uint64_t summary_bytes;
};

/*
 * Sends a request about the sequence. take copies what is needed of the reply, whose slices are
 * valid until the next call. -ESTALE: the sequence's daemon is gone.
 */
int sequence_ask(struct kvd_sequence *sequence, uint32_t number, const void *request, void *reply,
                 void (*take)(const void *reply, void *to), void *to);
/* Does the same as a call of its own, with a new deadline. */
int sequence_call(struct kvd_sequence *sequence, uint32_t number, const void *request, void *reply,
                  void (*take)(const void *reply, void *to), void *to);

/* methods.c */
/* Stores the references of blocks that the caller is filling. -ESTALE: one is not. */
int filling_refs(const struct view *view, uint32_t n, const struct kvd_block *blocks, kvd_ref *ret);

/* use.c */
/* sets the use of a block, ignoring the old value */
void use_begin(struct kvd_sequence *sequence, uint32_t block, struct kvd_use use);

/* copy.c */
const struct kvd_ops *client_ops(void);

/* attend.c */
void attend_free_scratch(struct kvd_space *space);

/* post.c */
/* The lowest bit of kvd_block.view is set while a block is posted and not yet freed. */
static inline bool is_posted(const struct kvd_block *block) {
        return (uintptr_t)block->view & 1;
}
static inline struct view *view_of(const struct kvd_block *block) {
        return (struct view *)((uint8_t *)block->view - is_posted(block));
}
/* The last block of the pin's chain, including blocks posted behind it. */
static inline kvd_ref chain_end(const struct kvd_pin *pin) {
        if (pin->n_posted)
                return kvd_ref_make(pin->posted, pin->posted_generation);
        return pin->view ? kvd_ref_make(pin->leaf, pin->generation) : KVD_ROOT;
}
/* Number of posts that the daemon has not taken. */
static inline uint64_t posts_untaken(const struct view *view) {
        return atomic_load_explicit(&view->page->posted, memory_order_relaxed) -
               atomic_load_explicit(&view->page->posts_taken, memory_order_acquire);
}
void post_free(struct view *view, kvd_ref *refs, uint32_t n); /* overwrites refs */

/* magazine.c */
/* another view has replaced this one: retry with that */
#define MAGAZINE_REPLACED (-ERESTART)

int magazine_take(struct view *view, uint32_t n, kvd_ref *to); /* returns how many */
/*
 * Refills it to kvd_reserve's n, or returns to the daemon what exceeds that by more than a batch.
 * Returns how many blocks it holds, or an error.
 */
int magazine_keep(struct view *view);
/* how many to request along with sealing n blocks; 0 if none */
uint32_t magazine_lacks(struct view *view, uint32_t n);
/* under kvd.lock: adds those that the reply brought */
void magazine_bring(struct view *view, struct kvd_slice fresh, uint32_t asked);
/* puts back unused blocks, or returns them to the daemon if there is no room */
void magazine_put(struct view *view, const kvd_ref *refs, uint32_t n);
/* returns all of them to the daemon */
void magazine_send_back(struct view *view, const kvd_ref *refs, uint32_t n);

#endif
