/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_INTERNAL_H
#define KVD_CLIENT_INTERNAL_H

/*
 * What the files of libkvd share.
 *
 *      kvd        one connection under one lock; its epoch moves with every new connection
 *      kvd_space  what the caller opened; points to the view of the current attachment
 *      view       one attachment's mappings: index (read-only), pin page, pool. Views of lost attachments stay mapped
 *                 until the last pin and block in them is let go
 *
 * Locks: kvd.lock for the connection and for making and retiring views, with the deadline of the
 * call; magazine.lock for a view's blocks to fill, never while the daemon is waited for.
 * magazine.lock is taken inside kvd.lock, never the other way round. Lookups take neither.
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
        pthread_cond_t changed; /* with lock: a thread is back from a GPU's driver */
        char *path;           /* owned; as given, or NULL */
        struct server_user server; /* whose every daemon must be */
        struct conn *conn;    /* owned; NULL: lost, or not yet made */
        uint64_t epoch;       /* of the connection */
        uint64_t retry_ns;    /* kvd_catch_up does not try before that */
        _Atomic(struct later *) later; /* owned: what could not be said in time */
        _Atomic bool kick;    /* something was posted while another thread had the lock */
        bool joined;          /* every connection joins the team */
        uint8_t team[16];
        _Atomic uint32_t users; /* the caller, until kvd_close, and spaces */
};

struct view;

/* What a segment is mapped from: a descriptor, or, for pools of legacy CUDA handles, 64 bytes. */
struct segment_source {
        int fd;
        const uint8_t *handle;
};

/*
 * How a pool is mapped: memory_host.c, memory_device.c. All under kvd.lock, with the words of a
 * failure said. map lets go of it while a GPU's driver is at work: what was read under it before is
 * to be read again, and replies are to be copied; the view stays mapped.
 */
struct mapping_kind {
        /* addresses for all segments there can be: view->base */
        int (*reserve)(struct view *view);
        int (*map)(struct view *view, uint32_t number, const struct segment_source *from,
                   bool writable);
        void (*release)(struct view *view);  /* everything, also what was not begun */
};
extern const struct mapping_kind mapping_host, mapping_device;
void mapping_host_end(struct kvd_space *space); /* of a fixed space's addresses */

struct device;

/* Blocks that the daemon gave ahead and nobody has taken yet. */
struct magazine {
        pthread_mutex_t lock; /* of all of it */
        _Atomic uint32_t n;   /* kvd_available reads it without the lock */
        uint32_t room;
        kvd_ref *refs;        /* owned; ids descend: the lowest goes first */
};

/* The lock orders them. */
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
        shm_u64 *asked;              /* ... see asked.c */
        /* owned reservation: segment i at i * segment_bytes; on a GPU: its addresses */
        uint8_t *base;
        uint8_t *sealed;             /* inside it, the same once more, read-only; on a GPU: base */
        uint64_t reserved;           /* bytes of either */
        const struct mapping_kind *mapping; /* NULL: not yet known */
        struct device *device;       /* owned; NULL in host memory (device.h) */

        alignas(64) _Atomic uint64_t refs; /* lookups under way, pins, blocks of the caller */
        _Atomic bool wanted;         /* a lookup found blocks of a segment that is not mapped */
        _Atomic bool noting;         /* a thread is noting a lookup */

        /* under kvd.lock */
        /* segments mapped, from the first on without a hole; read by lookups */
        alignas(64) _Atomic uint32_t n_mapped;
        _Atomic uint32_t memory_epoch; /* of the index, when what is mapped was compared with it */
        uint64_t index_bytes;
        uint32_t handle;             /* of the space in the connection */
        uint64_t epoch;              /* of the connection */
        bool unmapped;
        _Atomic uint32_t fetched;    /* of ix->n_segments, when they were last fetched */
        struct view *older;          /* owned */
        uint64_t writable[KVD_MAX_SEGMENTS / 64];
        /* read by lookups that meet a hole (GPU pools have some) */
        _Atomic uint64_t mapped[KVD_MAX_SEGMENTS / 64];
        /* what kvd_index_memory said when the memory that is mapped was asked for, or given */
        _Atomic uint32_t memory[KVD_MAX_SEGMENTS];

        struct magazine magazine;
};

struct kvd_space {
        struct kvd *handle;
        char name[KVD_NAME_MAX + 1];
        struct kvd_shape geometry;
        struct kvd_space_options options;
        _Atomic uint32_t reserve;    /* kvd_reserve's n */
        _Atomic(struct view *) view; /* owned, and the older ones behind it */
        bool attaching;              /* a thread makes the next one; under kvd.lock */
        struct {                     /* posts of which the caller was not told, see post.c */
                _Atomic uint64_t lost; /* with daemons that ended */
                _Atomic uint64_t told; /* of posts_refused in the page of the current view */
        } posts;
        /* of ended views, and our own */
        _Atomic uint64_t counters[sizeof(struct kvd_counters) / sizeof(uint64_t)];
        struct {                  /* KVD_SPACE_FIXED: what all views have in turn; under kvd.lock */
                uint8_t *base;    /* owned reservation; NULL: not yet made */
                uint64_t reserved; /* as view->reserved */
                uint32_t blocks;
        } fixed;
        /* owned: what calls of attention have left for the next ones */
        _Atomic(struct scratch *) scratch[4];
        /* the caller, until kvd_space_close, and tensors that are not deleted yet */
        _Atomic uint32_t users;
};

/*
 * Places in struct kvd_counters: what libkvd counts, and what the pin page of a view has counted
 * for it.
 */
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

static inline bool forked(const struct kvd *handle) {
        return unlikely(*handle->not_forked == 0);
}

/*
 * A call begins. 0; in a child of the process that opened it, -ECHILD, with the words said.
 */
static inline int handle_check(const struct kvd *handle) {
        deadline_begin();
        return forked(handle) ?
                       client_fail(-ECHILD,
                                   "this process was forked from the one that connected; open a "
                                   "connection of its own") :
                       0;
}

static inline int space_check(const struct kvd_space *space) {
        deadline_begin();
        return forked(space->handle) ?
                       client_fail(-ECHILD, "this process was forked from the one that opened the "
                                            "space; open it anew") :
                       0;
}

/* name.c: of this process, for people */
void own_name(char to[KVD_NAME_MAX + 1]);

/* latency.c */
void latency_prepare(void); /* before the first lookup */
/* now, in ns; 0: looking at the clock is a system call */
uint64_t latency_begin(void);
void latency_count(struct view *view, enum kvd_latency which, uint64_t begun_ns);

/* below.c: n_tokens behind a chain's last block (KVD_ROOT: none). As kvd_pin.n_below */
struct lookup_end {
        kvd_ref leaf;
        uint64_t root;
        uint32_t group, depth, n_tokens; /* depth: blocks before them */
        const uint32_t *tokens;
};
uint32_t lookup_below(const struct kvd_index *ix, const struct lookup_end *end);

/* asked.c: for who follows the space */
struct lookup_note {
        const uint32_t *tokens;
        uint32_t n_tokens, group, found;
        uint64_t salt;
};
void lookup_noted(struct view *view, const struct lookup_note *note);

/* handle.c */
int handle_lock(struct kvd *handle); /* by the call's deadline; 0 or -ETIMEDOUT */
void handle_unlock(struct kvd *handle);
/* without the lock: the daemon is told that something was posted, by us or by who has the lock */
void handle_kick(struct kvd *handle);
/* for who let go of it within a call that has it: whatever the deadline, its caller counts on it */
void handle_lock_again(struct kvd *handle);
/* until handle_changed, without it; 0 or -ETIMEDOUT */
int handle_wait(struct kvd *handle);
void handle_changed(struct kvd *handle);
/* the others: under kvd.lock */
int handle_connect(struct kvd *handle); /* 0 if there is a connection now */
int handle_call(struct kvd *handle, uint32_t number, const void *request, void *reply,
                struct kvd_fds *fds);

/*
 * later.c: what a call that cannot fail did not get through before its deadline; later_send, under
 * kvd.lock, when there is a connection.
 */
void later_release(const struct view *view, const kvd_ref *refs, uint32_t n);
void later_detach(struct kvd *handle, uint64_t epoch, uint32_t space);
void later_close(const struct view *view, uint32_t sequence);
void later_send(struct kvd *handle);

/* view.c: mappings of one attachment, and who still uses them */
struct view *view_get(struct kvd_space *space); /* the current one, with a reference */
void view_put_some(struct view *view, uint32_t n); /* lets go of n references */
static inline void view_put(struct view *view) {
        view_put_some(view, 1);
}
void view_leave(struct view *view); /* as view_put, but makes no system call */
bool view_hold(struct view *view);  /* a reference to any view; false: it is not mapped any more */
bool view_is_current(const struct view *view);
bool view_is_connected(const struct view *view); /* under kvd.lock: it is of today's connection */
/*
 * Under kvd.lock, which they let go of while a GPU's driver is at work: unmaps it, if nobody uses
 * it; unmaps those before it that nobody uses (true: that is all of them).
 */
void view_unmap(struct view *view);
bool view_is_last(struct view *view);
struct view *view_new(struct kvd_space *space);
void view_free(struct view *view); /* nobody else knows it; not under kvd.lock if it is mapped */
void view_count(const struct view *view, uint64_t counters[COUNTERS]); /* adds what its page says */
void view_forget_mappings(struct kvd_space *space);
void view_free_all(struct kvd_space *space);
int view_map_file(int fd, uint64_t bytes, int prot, void **ret); /* refuses one that is shorter */
bool view_has(const struct view *view, uint32_t segment); /* mapped, and with today's memory */
/* has no segment got other memory since what is mapped was last looked at? */
bool view_is_fresh(const struct view *view);
/*
 * C5, its other word (lookup.c): an index whose daemon was replaced says SEALED for ever. Partner:
 * D11 (store/cache/inherit.c).
 */
static inline bool view_is_served(const struct view *view) {
        return atomic_load_explicit(&view->page->epoch, memory_order_seq_cst) == view->ix->life;
}
bool view_has_any(const struct view *view);
bool view_may_write(const struct view *view, uint32_t segment);
void view_set_segment(struct view *view, uint32_t segment, bool mapped, bool writable);
void view_lose_segment(struct view *view, uint32_t segment); /* it is about to be unmapped */

/* segments.c: under kvd.lock, which they let go of as map does; but for view_map_blocks */
int view_catch_up(struct view *view); /* what the pool has grown by, and what lookups wanted */
int view_map_segments(struct view *view, uint32_t at_least); /* those below it that have memory */
int view_map_block(struct view *view, uint32_t id, bool write);
/* segments of blocks that others sealed */
int view_map_blocks(struct view *view, const kvd_ref *refs, uint32_t n);

/* attach.c */
/*
 * Under kvd.lock: current and connected, or error. Lets go of the lock for a while where a GPU's
 * memory is mapped, or wanted back: what was read under it before is to be read again.
 */
int view_attach(struct kvd_space *space, struct view **ret);

/* geometry.c */
struct kvd_shape shape_of(const struct kvd_geometry *geometry);

/* space.c */
void view_memory(struct view *view, struct kvd_space_memory *ret);
void space_put(struct kvd_space *space); /* a tensor is gone, or the caller: the last one closes */

/* lookup.c */

/*
 * Before n lookups: what they will read of their first blocks, whose tokens these are, comes to us
 * all at once.
 */
#define LOOKUP_AHEAD 16u
void lookup_ahead(struct kvd_space *space, const uint32_t *tokens, const struct kvd_pin *pins,
                  uint32_t n);

/* As kvd_lookup in group 0, but all of it or nothing. blocks has room for all. */
int64_t lookup_whole(struct kvd_space *space, const uint32_t *tokens, uint32_t n_tokens,
                     uint32_t *blocks, struct kvd_pin *pin);
/* true: it is sealed in this incarnation, and pinned */
bool pin_block(struct view *view, kvd_ref ref);
static inline void unpin_block(struct view *view, uint32_t id) {
        atomic_fetch_sub_explicit(&view->words[id].pins, 1, memory_order_release);
}

/* sequence.c */

/* One request's table: the caller's thread only, but for the view. */
struct kvd_sequence {
        struct kvd_space *space;
        struct view *view;          /* with a reference */
        uint32_t number;            /* in the space */
        /* nobody knows what the daemon's table says: only good for closing */
        bool lost;
        struct kvd_entry *entries;  /* owned; max_blocks of them */
        uint32_t n, max_blocks;
        uint32_t n_tokens;
        uint32_t seen;              /* sync_epoch at the last sync that found nothing more */
        uint64_t arrived[2];        /* blocks that came back: exactly, approximately */
        uint64_t copy_bytes, sketch_bytes; /* as the daemon last said */
        void *summaries;            /* owned mapping, read-only; NULL: not yet needed */
        uint64_t summary_bytes;
};

/*
 * A request about the sequence. take copies what is wanted of the reply, whose slices live until
 * the next call. -ESTALE: its daemon is gone.
 */
int sequence_ask(struct kvd_sequence *sequence, uint32_t number, const void *request, void *reply,
                 void (*take)(const void *reply, void *to), void *to);
/* ... which is all of a call. */
int sequence_call(struct kvd_sequence *sequence, uint32_t number, const void *request, void *reply,
                  void (*take)(const void *reply, void *to), void *to);

/* use.c */
/* whatever was said of it before */
void use_begin(struct kvd_sequence *sequence, uint32_t block, struct kvd_use use);

/* copy.c */
const struct kvd_ops *client_ops(void);

/* attend.c */
void attend_free_scratch(struct kvd_space *space);

/* post.c */
/* Of a block that was posted, and not freed yet, the lowest bit of kvd_block.view is set. */
static inline bool is_posted(const struct kvd_block *block) {
        return (uintptr_t)block->view & 1;
}
static inline struct view *view_of(const struct kvd_block *block) {
        return (struct view *)((uint8_t *)block->view - is_posted(block));
}
/* Where the chain ends that the pin holds, and what was posted behind it. */
static inline kvd_ref chain_end(const struct kvd_pin *pin) {
        if (pin->n_posted)
                return kvd_ref_make(pin->posted, pin->posted_generation);
        return pin->view ? kvd_ref_make(pin->leaf, pin->generation) : KVD_ROOT;
}
/* Posts that the daemon has not seen. */
static inline uint64_t posts_untaken(const struct view *view) {
        return atomic_load_explicit(&view->page->posted, memory_order_relaxed) -
               atomic_load_explicit(&view->page->posts_taken, memory_order_acquire);
}
void post_free(struct view *view, kvd_ref *refs, uint32_t n); /* refs: overwritten */

/* magazine.c */
/* another daemon's view has taken the place of this one: look at that */
#define MAGAZINE_REPLACED (-ERESTART)

int magazine_take(struct view *view, uint32_t n, kvd_ref *to); /* how many, n at most */
/* what kvd_reserve asked for, no less and not much more; how many it holds */
int magazine_keep(struct view *view);
/* how many to ask for in a request that seals n blocks, 0: it has enough; under kvd.lock, what the
 * reply brought of them */
uint32_t magazine_lacks(struct view *view, uint32_t n);
void magazine_bring(struct view *view, struct kvd_slice fresh, uint32_t asked);
/* nobody wants them; some go to the daemon */
void magazine_put(struct view *view, const kvd_ref *refs, uint32_t n);
/* all go to the daemon */
void magazine_send_back(struct view *view, const kvd_ref *refs, uint32_t n);

#endif
