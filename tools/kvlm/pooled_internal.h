/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_POOLED_INTERNAL_H
#define KVLM_POOLED_INTERNAL_H

/*
 * pooled.c has the table and the steps of reasoning, eviction.c has the budget of tokens. What a query needs is
 * decided by libkvd (client/reader.h).
 */

#include "client/reader.h"
#include "tools/kvlm/pooled.h"

struct pooled {
        struct pooled_setup setup;
        struct sequence *s;
        kvd_space *space;
        kvd_sequence *table; /* NULL if the daemon has none for us */
        uint32_t bt, half;
        uint32_t room, capacity; /* maximum number of blocks, of slots */

        uint32_t n, n_slots; /* tokens computed; slot of the next one */
        /* slots that hold tokens, ascending, followed by those of the step in progress */
        uint32_t *used;
        uint32_t n_used;     /* without those of the step in progress */
        uint32_t in_step;    /* tokens of the step in progress */
        bool gaps;           /* used is not 0, 1, 2, ... */
        uint32_t renumbered; /* number of times that slots went out of use */
        uint32_t *first;     /* [blocks + 1] first token of a block */
        uint32_t *fill;      /* [blocks] slots of an entry that hold tokens */

        uint32_t n_entries; /* complete blocks */
        bool stuck;       /* there is a private block, so no more can follow in the pool's table */
        uint8_t **blocks; /* addresses that attention reads; NULL if missing */
        uint32_t *flags;  /* enum kvd_entry_flags */
        int32_t *deltas;
        uint32_t *rotation;
        float *rotations;
        bool rotated; /* some delta is not 0 */

        /* first token of the current step of reasoning, blocks of the previous one */
        uint32_t step_first, last_step;
        bool late;                 /* the pool did not answer in time: do not wait until it does */
        struct kvd_reader *reader; /* NULL without a table */
        struct kvd_seen seen;      /* of the current layer */
        uint32_t behind;           /* tokens behind the table's entries, before the step */
        uint32_t *lists;           /* [kv_heads][capacity] slots that a head attends to */
        uint32_t evicts;           /* budget in tokens; 0 if off */
        struct pooled_stats stats;
};

double pooled_setting(const struct pooled *, const char *name);

/* Waits until requested blocks are there; attention must not be running. */
void pooled_wait(struct pooled *);

/* Number of tokens of the prompt that are computed in chunks. */
static inline uint32_t pooled_dense(const struct pooled *p) {
        return p->setup.prompt - p->setup.tail;
}

/* ---- eviction.c ---- */

uint32_t eviction_budget(kvd_space *); /* tokens; 0 if off */
/* maximum number of tokens of a prompt that are computed at once */
uint32_t eviction_limit(const struct pooled *, uint32_t first);
void eviction_settle(struct pooled *);

#endif
