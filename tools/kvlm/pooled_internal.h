/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_POOLED_INTERNAL_H
#define KVLM_POOLED_INTERNAL_H

/*
 * pooled.c has the table and the steps of reasoning. Each method that needs the engine's help has
 * its own file.
 */

#include "tools/kvlm/pooled.h"

struct selection;
struct residency;

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
        uint32_t decoded;
        bool late;   /* the pool did not answer in time: do not wait until it does */
        float *mass; /* [blocks] attention mass of the current token; see USE_EVERY */
        struct selection *selection; /* NULL if no method needs to know which tokens matter */
        struct residency *residency; /* NULL if blocks stay unless the daemon moves them */
        uint32_t evicts;             /* KeyDiff's budget in tokens; 0 if off */
        struct pooled_stats stats;
};

double pooled_setting(const struct pooled *, const char *name);

/* Waits until requested blocks are there; attention must not be running. */
void pooled_wait(struct pooled *);

/* Number of tokens of the prompt that are computed in chunks. */
static inline uint32_t pooled_dense(const struct pooled *p) {
        return p->setup.prompt - p->setup.tail;
}

/* ---- selection.c ---- */

enum { CALIBRATION = 32 }; /* last queries of a prompt that configure HShare */

int selection_new(struct pooled *, bool hshare);
void selection_free(struct pooled *);
void selection_refresh(struct pooled *, bool all); /* all: entries changed, not only grew */
int selection_begin(struct pooled *);              /* the prompt is in the table; decoding begins */
/* adds, per block [blocks], the tokens that current choices select */
void selection_hits(const struct pooled *, uint32_t *hits);
void selection_stats(const struct pooled *, struct pooled_stats *);

/* ---- residency.c ---- */

int residency_new(struct pooled *);
void residency_free(struct pooled *);
/* share [entries]: the fraction of a query's attention in each, 0 to 1 */
void residency_share(struct pooled *, const float *share);
void residency_fetch(struct pooled *); /* missing blocks needed since the last call */
void residency_settle(struct pooled *);

/* ---- eviction.c ---- */

void eviction_new(struct pooled *);
/* maximum number of tokens of a prompt that are computed at once */
uint32_t eviction_limit(const struct pooled *, uint32_t first);
void eviction_settle(struct pooled *);

#endif
