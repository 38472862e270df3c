/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_CORE_H
#define KVD_STORE_CORE_H

/*
 * What all rooms of the store know: the store, its domains, tickets for workers, and how to refuse.
 * The rooms:
 *
 *      cache      index, blocks, segments, eviction, spaces, attachments; knows no other room (hooks.h)
 *      tier       where exact copies are
 *      file       blocks of the cache that are in a file, or were
 *      remote     ... that are on servers
 *      sequence   clients' own tables, and the changes that are offered to them
 *      methods    one file a method
 *      device     spaces on a GPU: its memory, and data that is still to come
 *      check      what must always be true of all of them
 *
 * Lists are linked through ids or pointers; NONE or NULL ends them. Nothing on a request's way
 * allocates.
 */

#include "ipc/base/cost.h"
#include "ipc/base/file.h"
#include "ipc/base/key.h"
#include "ipc/base/layout.h"
#include "ipc/base/list.h"
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
        void *owner;           /* the kind's: a sequence, or nothing */
        struct kvd_list_node waiting; /* in its domain's */
        struct job *job;       /* in flight, at the worker or resting; NULL */
        uint32_t losses;       /* of its job, one after the other */
};

struct domain_jobs {
        struct kvd_list waiting[2]; /* tickets, for a worker: urgent, others */
        struct job *resting[2];     /* owned; begun, and to be gone on with before those */
        uint64_t cost;              /* on the clock of all domains, see job.c */
        struct kvd_list_node node;  /* in jobs.domains, while one of its tickets or jobs waits */
};

struct jobs {
        struct kvd_list domains; /* who have cost least first */
        uint64_t now;            /* what those whose jobs are done have cost */
        uint64_t n_waiting, last_id;
        struct job *job;       /* owned; the worker's, or to be written */
        struct job *spare;     /* owned; list */
        bool at_work;          /* one is being written or settled */
        /* tells whoever runs the worker that there is something for it */
        void (*wanted)(void *data);
        void *data;
};

/* ---- pool ------------------------------------------------------------------------------------ */

#define STORE_RANKS 65536u

struct account { /* account.c: by kind of cost */
        uint64_t limit[KVD_N_COSTS];    /* of all domains together */
        uint64_t used[KVD_N_COSTS];
        uint64_t reserved[KVD_N_COSTS]; /* what domains with a guarantee have not got yet */
        struct carry *carries;          /* for whom some of the spill is kept (tier/carry.c) */
        uint64_t copies_below;          /* bytes of copies that files take; 0: none go there */
        struct short_of {               /* of what the last refusal was, and how much was asked for */
                enum kvd_cost cost;
                uint64_t n;
        } short_of;
        uint64_t fair_spill;            /* of the memory for copies, each domain's */
        uint64_t spare;                 /* bytes that domains could give to others: sum of account.c */
};

struct owed {
        struct segment *stale;      /* whose memory is being freed; or NULL */
        struct shared_file retired; /* owned; no segment's any more, being freed */
        uint64_t retired_bytes;     /* ... from the first on */
        struct kvd_list unmaps;     /* segments whose old memfd a worker has mapped */
};

struct on_close { /* NULL: the store closes itself */
        void (*called)(void *data, int fd);
        void *data;
};

#define STORE_NAMES 1024u /* a power of two */

/* Of all domains. Idle work and timers go round them, a piece of one at a time (idle.c). */
struct space_lists {
        struct roll all;       /* by their numbers */
        struct kvd_list busy;  /* those that may have something to do, which waits longest first */
        struct space *named[STORE_NAMES]; /* chains by names' hashes: listed.same */
        struct round {         /* of a timer: the number it goes on at, and what it found so far */
                uint32_t next, found;
        } pins, semaphores;
        uint32_t copies;       /* the number where the search for copies to give up goes on */
        uint32_t turn;         /* of idle work: what is deleted, and what lives */
        uint64_t buried;       /* deleted ones that are freed */
        uint64_t collected;    /* ... of which so many made way (cache/collect.c) */
        uint64_t clock;        /* moves with that of each space: cache/age.c */
        uint64_t searches;     /* for memory of others that were begun: cache/take.c */
};

struct store_wakes { /* semaphore.c */
        bool on;                 /* somebody writes semaphores by a stream when we ask */
        struct kvd_list waiting; /* promises whose semaphores are to be written, the first to ask first */
};

struct store {
        struct store_config config;
        bool huge;             /* segments are made of reserved 2 MiB pages */
        bool too_few_pages;    /* it would be so if there were more of these */
        uint64_t page_bytes;   /* the kernel's, or 2 MiB: the unit of a segment */
        struct account account;
        struct space_lists spaces;
        struct domain *domains; /* owned */
        struct space *deleted;  /* owned; their memory is being freed */
        const struct memory_ops *memory;
        const struct hooks *const *hooks; /* of all parts; NULL ends it */
        struct owed owed;       /* host memory that is given back: cache/memory.c */
        struct on_close on_close;
        struct device_pool *device_pool; /* owned; a GPU's memory, or NULL */
        bool exporter_gone;      /* legacy handles: memory is gone that clients have mapped */

        struct jobs jobs;
        uint32_t *ranks;       /* owned; scratch, a count for each 16-bit value */
        struct store_wakes wakes;
        struct file *file;     /* owned; the file tier, or NULL */
        struct remote *remote; /* owned; the remote tier, or NULL */
        struct kvd_why why;
};

struct domain {
        struct store *store;
        struct domain *next;
        struct domain_config config;
        uint64_t used[KVD_N_COSTS];
        uint64_t unused;       /* bytes of its segments in which nobody uses a block */
        uint64_t largest;      /* bytes of its largest segment so far */
        struct domain_jobs jobs;
        struct roll spaces;    /* owned; by their places among them */
};

/* Those that pages = auto leaves, whatever is free. Before there is a space. */
void store_take_small_pages(struct store *store);

/* In reserved 2 MiB pages that nobody uses yet; 0 where there are none. */
uint64_t store_free_huge_bytes(void);

/* Returns the error, and keeps the words for store_why. */
#define store_refuse(store, error, ...) kvd_refuse(&(store)->why, error, __VA_ARGS__)

/* Of a file that may be large; it is SHARED_FILE_NONE afterwards. */
void store_close_file(struct store *store, struct shared_file *file);

/* -EOPNOTSUPP, with what there is not, if the space has opaque blocks. */
int space_refuse_opaque(const struct space *space, const char *what);

/* setting.c */
/* of a key in its label, or head_dim if that is less: fixed when a space is made */
#define SETTING_LABEL_CHANNELS 32u
void settings_init(struct kvd_index *ix); /* once its geometry is there */

#endif
