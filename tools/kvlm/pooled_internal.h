/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_POOLED_INTERNAL_H
#define KVLM_POOLED_INTERNAL_H

/*
 * pooled.c has the table and the steps of reasoning; each method that needs an engine's help has
 * its file.
 */

#include "tools/kvlm/pooled.h"

struct selection;
struct residency;

struct pooled {
        struct pooled_setup setup;
        struct sequence *s;
        kvd_space *space;
        kvd_sequence *table; /* NULL: the daemon has none for us */
        uint32_t bt, half;
        uint32_t room, capacity; /* blocks, slots */

        uint32_t n, n_slots; /* tokens computed, and where the next one's slot is */
        /* slots that hold something, ascending, with those of the step at hand behind them */
        uint32_t *used;
        uint32_t n_used;     /* without those */
        bool gaps;           /* used is not 0, 1, 2, ... */
        uint32_t renumbered; /* times that slots went out of use */
        uint32_t *first;     /* [blocks + 1] token that a block began with */
        uint32_t *fill;      /* [blocks] slots of an entry that hold something */

        uint32_t n_entries;  /* blocks that are complete */
        bool stuck;          /* a private block: no more can follow in the pool's table */
        uint8_t **blocks;    /* what attention reads; NULL: missing */
        uint32_t *flags;     /* enum kvd_entry_flags */
        int32_t *deltas;
        uint32_t *rotation;
        float *rotations;
        bool rotated;         /* some delta is not 0 */

        /* token that the step at hand begins with, blocks of the one before */
        uint32_t step_first, last_step;
        uint32_t decoded;
        bool late;           /* the pool did not answer in time: not waited for until it does */
        float *mass;         /* [blocks] of the token at hand; see use_every */
        struct selection *selection; /* NULL: nobody wants to know which tokens matter */
        struct residency *residency; /* NULL: blocks stay, unless the daemon says otherwise */
        uint32_t evicts;     /* KeyDiff's budget in tokens; 0: none */
        struct pooled_stats stats;
};

double pooled_setting(const struct pooled *, const char *name);

/* Waits until what was asked for is there; attention does not run now. */
void pooled_wait(struct pooled *);

/* Tokens of the prompt that are computed in chunks. */
static inline uint32_t pooled_dense(const struct pooled *p) {
        return p->setup.prompt - p->setup.tail;
}

/* ---- selection.c ---- */

enum { CALIBRATION = 32 }; /* last queries of a prompt that HShare's configuration is made from */

int selection_new(struct pooled *, bool hshare);
void selection_free(struct pooled *);
void selection_refresh(struct pooled *, bool all); /* labels; all: entries changed, not only grew */
int selection_begin(struct pooled *); /* the prompt is in the table, and decoding begins */
/* [blocks] adds what choices in force name */
void selection_hits(const struct pooled *, uint32_t *hits);
void selection_stats(const struct pooled *, struct pooled_stats *);

/* ---- residency.c ---- */

int residency_new(struct pooled *);
void residency_free(struct pooled *);
/* [entries] what a query wants of each, 0 to 1 */
void residency_share(struct pooled *, const float *share);
void residency_fetch(struct pooled *); /* what is missing of what was wanted since the last time */
void residency_settle(struct pooled *);

/* ---- eviction.c ---- */

void eviction_new(struct pooled *);
/* tokens of a prompt that are computed at once */
uint32_t eviction_limit(const struct pooled *, uint32_t first);
void eviction_settle(struct pooled *);

#endif
