/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_JOB_H
#define KVD_STORE_JOB_H

/*
 * Jobs of the store for a worker. A part of the store that needs work done marks it in its own
 * tables and queues a ticket, which waits in its domain's queue. When the worker is free, the
 * ticket's kind writes as much of the work as fits in one job, and later settles its result.
 * Domains take turns by the cost of their jobs; a guarantee gives a domain a larger share of the
 * worker. A long job pauses after a piece of it, so that others get their turns; its kind does not
 * notice:
 *
 *      job_ask ──► waiting ──write──► in flight ──settle: JOB_DONE, JOB_FAILED──► (job_ask again, if there is more)
 *                     ▲                               │
 *                     └──────── settle: JOB_AGAIN ────┘ once
 *
 * So nothing is allocated, and a ticket waits only once, however often job_ask is called. When its
 * owner ends, the owner withdraws the ticket (job_withdraw); if a job is in flight then, settle
 * sees job->ticket == NULL and only releases what the items own.
 */

#include "ipc/base/job.h"
#include "store/cache/cache.h"

struct job;

/* maximum bytes of a result: what the reply has room for (msg.def, work_reply) */
#define JOB_RESULT_BYTES 61440u

enum job_end {
        JOB_DONE,   /* there are results */
        JOB_AGAIN,  /* the worker was lost; the job will be written again */
        JOB_FAILED, /* the worker refused, sent an invalid reply, or was lost for the second time */
};

struct job_kind {
        enum kvd_job_kind number;
        uint32_t result_bytes; /* bytes of one result */
        bool fewer;            /* the worker may return fewer results than requested */
        bool urgent;           /* before other jobs of its domain, since a client waits for it */
        bool rests;            /* the worker may pause it */
        /*
         * Adds items (and steps, tokens). False: there is nothing to do. Calls job_ask again if not
         * all work fits in the job.
         */
        bool (*write)(struct ticket *ticket, struct job *job);
        /*
         * results: n of them, if end is JOB_DONE. The items' blocks are released after this call.
         */
        void (*settle)(struct job *job, enum job_end end, const void *results, uint32_t n);
};

/* The store's record of an item while the worker has it. */
struct job_item {
        kvd_ref held;     /* block that is held, so that it is not evicted; 0: none */
        uint32_t at;      /* for the kind: an entry of the sequence */
        uint32_t place;   /* of an exact copy that the job owns; KVD_NOWHERE: none */
        uint32_t ordinal; /* for the kind */
        uint32_t flags;   /* for the kind */
};

struct job {              /* in flight, or spare */
        struct job *next; /* in the list of spare jobs */
        struct store *store;
        uint64_t id; /* 0: not in flight */
        const struct job_kind *kind;
        struct ticket *ticket;       /* NULL: its owner is gone */
        struct space *space;         /* NULL: deleted, with all that the items name */
        uint32_t sketch;             /* number of the sketch that the worker uses; 0: none */
        uint32_t n_items, n_results; /* n_results: number requested */
        uint32_t n_pieces;           /* number of times that it paused */
        uint32_t looks;              /* candidates looked at to choose items: a measure of time */
        struct job_item *items;      /* owned; KVD_JOB_ITEMS */
        struct kvd_job_step *steps;  /* owned; KVD_JOB_ITEMS; scratch to collect steps in */

        /* while it is written */
        struct kvd_job *to; /* memory that the worker reads: written, never read back */
        uint64_t bytes;
        uint32_t n_tokens;
};

static inline void ticket_init(struct ticket *t, const struct job_kind *kind, struct space *space,
                               void *owner) {
        *t = (struct ticket){.kind = kind, .space = space, .owner = owner};
}

void job_ask(struct ticket *ticket);           /* queues it, unless it waits already */
bool job_pending(const struct ticket *ticket); /* waiting or in flight */
void job_withdraw(struct ticket *ticket);      /* before its owner ends, whether it waits or not */

/* ---- for write ------------------------------------------------------------------------------- */

/*
 * Adds an item, and holds the block (0: none) while the worker has it. Sets row to the block's row,
 * and place, to_row and ordinal to none. NULL: no more room. The store's record of the item is
 * job->items[job->n_items - 1].
 */
struct kvd_job_item *job_add(struct job *job, kvd_ref block, uint32_t at);

/*
 * Call job_steps after all items, and job_tokens, any number of times, after that. False: no room.
 */
bool job_steps(struct job *job, const struct kvd_job_step *steps, uint32_t n);
bool job_tokens(struct job *job, const uint32_t *tokens, uint32_t n);
/* number of tokens that fit after n_steps steps */
uint64_t job_token_room(const struct job *job, uint32_t n_steps);

/* sets the number of results; default: one for each item. JOB_RESULT_BYTES in total, at most */
void job_results(struct job *job, uint32_t n);
void job_param(struct job *job, uint32_t which, uint32_t value);

/*
 * The number of blocks that one job should read, at least 1: urgent jobs must not wait long for
 * others, and the results must fit in one reply.
 */
uint32_t job_blocks(const struct job *job);

/* ---- for the store --------------------------------------------------------------------------- */

int jobs_new(struct store *store);
void jobs_free(struct store *store);
/* there is work for the worker: a job, or memory to clear */
void jobs_want_worker(struct store *store);
/* the space is being deleted: results of its jobs in flight will be ignored */
void jobs_forget_space(struct space *space);
/* the next job of a space in flight; after NULL, the first one. NULL: there are no more */
const struct job *job_in_flight(const struct space *space, const struct job *after);

#endif
