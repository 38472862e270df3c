/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_JOB_H
#define KVD_STORE_JOB_H

/*
 * What the store asks of a worker. Who wants something marks it in his own tables and keeps a
 * ticket, which waits in its domain's queue. When the worker is free, the ticket's kind writes as
 * much of it as fits into one job, and is told how that ended. Domains take turns by what their
 * jobs cost, and one that has a guarantee has more of the worker. A job that takes long rests after
 * a piece of it, so that others have their turns; its kind hears nothing of that:
 *
 *      job_ask ──► waiting ──write──► in flight ──settle: JOB_DONE, JOB_FAILED──► (asked for again, if there is more)
 *                     ▲                               │
 *                     └──────── settle: JOB_AGAIN ────┘ once
 *
 * So nothing is allocated and a ticket waits once, however often it is asked for. Who goes away
 * takes his ticket along (job_withdraw); if it is in flight, settle sees job->ticket == NULL and
 * only takes back what the items own.
 */

#include "ipc/base/job.h"
#include "store/cache/cache.h"

struct job;

/* of one answer: what its message has room for (msg.def, work_reply) */
#define JOB_RESULT_BYTES 61440u

enum job_end {
        JOB_DONE,   /* the results are there */
        /* the worker was lost: what was wanted is wanted still, and will be written again */
        JOB_AGAIN,
        JOB_FAILED, /* the worker refused, answered nonsense, or was lost for the second time */
};

struct job_kind {
        enum kvd_job_kind number;
        uint32_t result_bytes; /* of one result */
        bool fewer;            /* the worker may give fewer results than asked for */
        bool urgent;           /* before what its domain wants otherwise: somebody waits for it */
        bool rests;            /* the worker may do it in pieces */
        /*
         * Adds items (and steps, tokens). False: nothing to do (any more). Asks again itself if not
         * all of it fits.
         */
        bool (*write)(struct ticket *ticket, struct job *job);
        /* results: n of them, if end is JOB_DONE. The items' holds end after it. */
        void (*settle)(struct job *job, enum job_end end, const void *results, uint32_t n);
};

/* The store knows this of an item while the worker has it. */
struct job_item {
        kvd_ref held;     /* block that stays in its place; 0: none */
        uint32_t at;    /* the kind's: an entry of the sequence */
        uint32_t place;   /* of a copy, which belongs to the job; KVD_NOWHERE */
        uint32_t ordinal; /* the kind's */
        uint32_t flags;   /* the kind's */
};

struct job { /* one in flight */
        struct job *next;            /* spare */
        struct store *store;
        uint64_t id;                 /* 0: there is none */
        const struct job_kind *kind;
        struct ticket *ticket;       /* NULL: its owner is gone */
        struct space *space;         /* NULL: deleted, with everything that the items name */
        /* number of the sketch that the worker reads or writes; 0: none */
        uint32_t sketch;
        uint32_t n_items, n_results; /* n_results: asked for */
        uint32_t n_pieces;           /* after which it rested */
        /* things looked at to choose the items from: a measure of time */
        uint32_t looks;
        struct job_item *items;      /* owned; KVD_JOB_ITEMS */
        /* owned; KVD_JOB_ITEMS: to gather steps in, before job_steps */
        struct kvd_job_step *steps;

        /* while it is written */
        struct kvd_job *to;          /* the worker's memory: written, never read back */
        uint64_t bytes;
        uint32_t n_tokens;
};

static inline void ticket_init(struct ticket *t, const struct job_kind *kind, struct space *space,
                               void *owner) {
        *t = (struct ticket){.kind = kind, .space = space, .owner = owner};
}

void job_ask(struct ticket *ticket);      /* any number of times */
bool job_pending(const struct ticket *ticket); /* waiting or in flight */
void job_withdraw(struct ticket *ticket); /* before its owner goes; one that never waited is fine */

/* ---- for write ------------------------------------------------------------------------------- */

/*
 * One more item, and the block (0: none) held while the worker has it. Row is the block's, sets
 * place, to_row to none and ordinal to KVD_NO_ORDINAL. NULL: no more room. The record beside it is
 * job->items[job->n_items - 1].
 */
struct kvd_job_item *job_add(struct job *job, kvd_ref block, uint32_t at);

/* After all items: steps; after them: tokens, piece by piece. False: no more room. */
bool job_steps(struct job *job, const struct kvd_job_step *steps, uint32_t n);
bool job_tokens(struct job *job, const uint32_t *tokens, uint32_t n);
/* tokens that fit behind so many steps */
uint64_t job_token_room(const struct job *job, uint32_t n_steps);

/* without it: one for each item; at most JOB_RESULT_BYTES of them */
void job_results(struct job *job, uint32_t n);
void job_param(struct job *job, uint32_t which, uint32_t value);

/*
 * Blocks that one job should look at: an urgent one need not wait long, and the answer is one
 * message. At least 1.
 */
uint32_t job_blocks(const struct job *job);

/* ---- the store's ----------------------------------------------------------------------------- */

int jobs_new(struct store *store);
void jobs_free(struct store *store);
/* there is something for it: a job, or memory to clear */
void jobs_want_worker(struct store *store);
/* it is being deleted: what is in flight is nobody's */
void jobs_forget_space(struct space *space);
/* those in flight of a space, one after the other; NULL: there are no more */
const struct job *job_in_flight(const struct space *space, const struct job *after);

#endif
