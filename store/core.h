/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_CORE_H
#define KVD_STORE_CORE_H

/*
 * What all rooms of the store know: the store, its domains, tickets for workers, and how to refuse.
 * The rooms:
 *
 *      cache      index, blocks, segments, eviction, spaces, attachments; knows no other room (hooks.h)
 *      tier       where exact copies are
 *      sequence   clients' own tables, and the changes that are offered to them
 *      methods    one file a method
 *      device     spaces on a GPU: its memory, and data that is still to come
 *      check      what must always be true of all of them
 *
 * Lists are linked through ids or pointers; NONE or NULL ends them. Nothing on a request's way
 * allocates.
 */

#include "ipc/base/key.h"
#include "ipc/base/layout.h"
#include "ipc/base/list.h"
#include "ipc/base/why.h"
#include "store/store.h"

#define NONE UINT32_MAX

struct hooks;
struct memory_ops;

/* ---- jobs, see job.h ------------------------------------------------------------------------- */

struct ticket {
        const struct job_kind *kind;
        struct space *space;
        void *owner;           /* the kind's: a sequence, or nothing */
        struct kvd_list_node waiting; /* in jobs.waiting */
        uint32_t losses;       /* of its job, one after the other */
};

struct jobs {
        struct kvd_list waiting[2]; /* tickets, for a worker: urgent, others */
        uint64_t n_waiting, last_id;
        struct job *job;       /* owned; the one in flight */
        /* tells whoever runs the worker that there is something for it */
        void (*wanted)(void *data);
        void *data;
};

/* ---- pool ------------------------------------------------------------------------------------ */

#define STORE_RANKS 65536u

struct store {
        struct store_config config;
        bool huge;             /* segments are made of reserved 2 MiB pages */
        uint64_t page_bytes;   /* 4 KiB or 2 MiB: the unit of a segment */
        uint64_t used;         /* bytes of segments that have memory */
        uint64_t spill_used;   /* bytes of copies in memory and of sketches */
        uint32_t n_sketches;
        uint32_t next_number;  /* of spaces */
        struct domain *domains; /* owned */
        struct space *deleted;  /* owned; their memory is being freed */
        const struct memory_ops *memory;
        const struct hooks *const *hooks; /* of all parts; NULL ends it */
        struct segment *stale;  /* host memory: the one whose memory is being freed; or NULL */
        struct device_pool *device_pool; /* owned; a GPU's memory, or NULL */
        bool exporter_gone;      /* legacy handles: memory is gone that clients have mapped */

        struct jobs jobs;
        uint32_t *ranks;       /* owned; scratch, a count for each 16-bit value */
        /* somebody writes semaphores by a stream when we ask (semaphore.c) */
        bool wakes;
        struct kvd_why why;
};

struct domain {
        struct store *store;
        struct domain *next;
        struct domain_config config;
        uint64_t used;         /* bytes of segments that have memory */
        struct space *spaces;  /* owned */
};

/* Returns the error, and keeps the words for store_why. */
#define store_refuse(store, error, ...) kvd_refuse(&(store)->why, error, __VA_ARGS__)

/* -EOPNOTSUPP, with what there is not, if the space has opaque blocks. */
int space_refuse_opaque(const struct space *space, const char *what);

/* setting.c */
/* of a key in its label, or head_dim if that is less: fixed when a space is made */
#define SETTING_LABEL_CHANNELS 32u
void settings_init(struct kvd_index *ix); /* once its geometry is there */

#endif
