/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_CORE_H
#define KVD_STORE_CORE_H

/*
 * Shared by all folders of the store: the store, its domains, tickets for jobs, refusals. The
 * folders:
 *
 *      cache      index, blocks, segments, eviction, spaces, attachments, data that is still to come;
 *                 calls the other folders only by hooks (hooks.h)
 *      below      the tiers below the pool: what goes there, and how it comes back; exact copies in
 *                 host memory (place.h), which blocks of a GPU pass through (carry.h)
 *      file       the file tier
 *      remote     the remote tier
 *      sequence   sequences, and the changes that are proposed to clients
 *      methods    one file or more for each method
 *      device     memory of spaces on a GPU
 *      check      invariants of all of them
 *
 * Lists are linked through ids or pointers and end with NONE or NULL. No request's path allocates
 * memory.
 */

#include "ipc/base/cost.h"
#include "ipc/base/key.h"
#include "ipc/base/layout.h"
#include "ipc/base/list.h"
#include "ipc/base/shared_file.h"
#include "ipc/base/why.h"
#include "store/roll.h"
#include "store/store.h"

#define NONE UINT32_MAX

struct hooks;
struct memory_ops;

/* ---- jobs, see job.h ------------------------------------------------------------------------- */

struct ticket {
        const struct job_kind *kind;
        struct space *space;
        void *owner;                  /* for the kind: a sequence, or NULL */
        struct kvd_list_node waiting; /* in its domain's list */
        struct job *job;              /* in flight, running or paused; NULL: none */
        uint32_t losses;              /* number of times that its job was lost in a row */
};

struct domain_jobs {
        struct kvd_list waiting[2]; /* tickets that wait for a worker: urgent, others */
        struct job *resting[2];     /* owned; paused jobs, to be resumed before those begin */
        uint64_t cost;              /* the domain's clock, see job.c */
        struct kvd_list_node node;  /* in jobs.domains, while a ticket or job of it waits */
};

struct jobs {
        struct kvd_list domains; /* ascending by cost */
        uint64_t now;            /* cost of the domain that was served last */
        uint64_t n_waiting, last_id;
        struct job *job;   /* owned; at the worker, or the next to be written */
        struct job *spare; /* owned; list */
        bool at_work;      /* a job is being written or settled */
        /* called when there is work for the worker */
        void (*wanted)(void *data);
        void *data;
};

/* ---- pool ------------------------------------------------------------------------------------ */

#define STORE_RANKS 65536u

struct account {                     /* account.c: by kind of cost */
        uint64_t limit[KVD_N_COSTS]; /* of all domains together */
        uint64_t used[KVD_N_COSTS];
        uint64_t reserved[KVD_N_COSTS]; /* guaranteed to domains, but not used by them yet */
        struct carry *carries;          /* reservations of spill memory (below/carry.c) */
        uint64_t copies_below;          /* bytes of copies that files may hold; 0: none */
        struct short_of {               /* the last refusal: kind of cost, and amount requested */
                enum kvd_cost cost;
                uint64_t n;
        } short_of;
        uint64_t fair_spill; /* each domain's guaranteed part of the memory for copies */
        uint64_t spare;      /* unused pool bytes above the guarantees of all domains */
};

struct owed {
        struct segment *stale;      /* segment whose memory is being freed; or NULL */
        struct shared_file retired; /* owned; memfd that no segment uses any more, being freed */
        uint64_t retired_bytes;     /* its first bytes, which are not freed yet */
        struct kvd_list unmaps;     /* segments whose old memfd a worker has mapped */
};

struct on_close { /* called is NULL: the store closes files itself */
        void (*called)(void *data, int fd);
        void *data;
};

#define STORE_NAMES 1024u /* a power of two */

/* The spaces of all domains. Idle work and timers visit them in turn, in pieces (idle.c). */
struct space_lists {
        struct roll all;      /* by number */
        struct kvd_list busy; /* spaces that may have deferred work, the longest waiting first */
        struct space *named[STORE_NAMES]; /* hash table by name, chained by listed.same */
        struct round { /* of a timer: number of the next space, and work found so far */
                uint32_t next, found;
        } pins, semaphores;
        uint32_t copies;    /* number of the space where the search for copies to drop resumes */
        uint32_t turn;      /* of idle work: alternates between deleted and live spaces */
        uint64_t buried;    /* number of deleted spaces that are freed */
        uint64_t collected; /* number of spaces deleted to make room (cache/collect.c) */
        uint64_t clock;     /* moves with the clock of each space (cache/age.c) */
        uint64_t searches;  /* number of searches for other spaces' memory (cache/take.c) */
};

struct store_wakes {             /* cache/semaphore.c */
        bool on;                 /* a worker can write semaphores by a stream */
        struct kvd_list waiting; /* attachments whose semaphores must be written, in order */
};

#define STORE_NODES 16u

struct pages {          /* of segments */
        bool huge;      /* reserved 2 MiB pages */
        bool too_few;   /* not so, as there are some such pages, but too few */
        bool large;     /* the kernel is asked for 2 MiB pages of other memory */
        uint64_t bytes; /* page size of segments: the kernel's, or 2 MiB */
        struct store_large maker;
        uint32_t n_nodes; /* NUMA nodes of the pool; 0: the kernel decides */
        uint8_t nodes[STORE_NODES];
};

struct store {
        struct store_config config;
        struct pages pages;
        struct account account;
        struct space_lists spaces;
        struct domain *domains; /* owned */
        struct space *deleted;  /* owned; list of spaces whose memory is being freed */
        const struct memory_ops *memory;
        const struct hooks *const *hooks; /* of all parts; ends with NULL */
        struct owed owed;                 /* host memory to be freed: cache/host_memory.c */
        struct on_close on_close;
        struct device_pool *device_pool; /* owned; GPU memory, or NULL */
        bool exporter_gone; /* legacy handles: memory that clients have mapped is gone */

        struct jobs jobs;
        uint32_t *ranks; /* owned; scratch: a counter for each 16-bit value */
        struct store_wakes wakes;
        struct below *below;   /* the tiers below the pool: list */
        struct file *file;     /* owned; the file tier, or NULL */
        struct remote *remote; /* owned; the remote tier, or NULL */
        struct kvd_why why;
};

struct domain {
        struct store *store;
        struct domain *next;
        struct domain_config config;
        uint64_t used[KVD_N_COSTS];
        uint64_t unused;  /* bytes of its segments that have no block in use */
        uint64_t largest; /* bytes of its largest segment so far */
        struct domain_jobs jobs;
        struct roll spaces; /* owned; by place */
};

/* a - b, but not less than 0 */
static inline uint64_t less(uint64_t a, uint64_t b) {
        return a - MIN(a, b);
}

/* The space created after that one; after NULL, the first one. NULL: there are no more. */
struct space *store_space_after(struct store *store, const struct space *space);
/* The space whose turn it is, after which *turn is the next one's. Not if there are no spaces. */
struct space *store_space_in_turn(struct store *store, uint32_t *turn);

/*
 * cache/pages.c: chooses the pages of host memory. Again, before there is a space: segments of the previous
 * daemon are worth more than large pages that are free by now, so that it has pages as they have.
 * reserved_before: bytes in their reserved 2 MiB pages.
 */
void pages_choose(struct store *store);
void pages_choose_again(struct store *store, uint64_t reserved_before);
uint64_t pages_reserved_in(
        int fd); /* bytes of reserved 2 MiB pages that the file has; fd may be -1 */
uint64_t store_free_huge_bytes(void);
/* 1 + the place of a NUMA node in pages.nodes; 0: none of them. node: 1 + the node, or 0. */
uint32_t pages_home(const struct store *store, uint32_t node);
/* From now on, the file's pages are of that home's node; 0: of all nodes in turn, 2 MiB each. */
int pages_place(const struct store *store, int fd, uint64_t bytes, uint32_t home);
/* Asks for large pages for the part of the index that these first ids use, once for each. */
void pages_want_index(struct space *space, uint32_t ids);

/* Returns the error, and stores the text for store_why. */
#define store_refuse(store, error, ...) kvd_refuse(&(store)->why, error, __VA_ARGS__)

/* Closes a file that may be large, see store_on_close, and sets it to SHARED_FILE_NONE. */
void store_close_file(struct store *store, struct shared_file *file);

/*
 * -EOPNOTSUPP if the space has opaque blocks. what: the feature that is unavailable, for the text.
 */
int space_refuse_opaque(const struct space *space, const char *what);

/* space_setting.c */
/* channels of a key in its label, or head_dim if that is less; fixed when a space is created */
#define SETTING_LABEL_CHANNELS 32u
void settings_init(struct kvd_index *ix); /* after its geometry was set */

#endif
