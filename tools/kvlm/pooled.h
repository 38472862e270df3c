/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_POOLED_H
#define KVLM_POOLED_H

/*
 * A request whose blocks the daemon's methods work on (client/kvd_methods.h): what it computes after its prompt becomes
 * a sequence of the pool, in which similar steps share blocks (MemShare) and blocks of little use leave and come back
 * (KVReviver). Attention reads through this table: blocks that stand in for others have a delta, missing ones are left
 * out. A step of reasoning ends with an empty line, and long ones begin in a fresh block, because only steps that lie
 * alike in their blocks can be found alike; slots that stay empty for that are left out, too.
 */

#include "client/kvd_methods.h"
#include "tools/kvlm/cache.h"
#include "tools/kvlm/pooled_options.h"
#include "tools/kvlm/tokenizer.h"

struct pooled_setup {
        const struct pooled_options *options;
        const struct tokenizer *tokenizer;
        const float *frequencies; /* of the rotary embedding: [head_dim / 2] */
        bool align;               /* steps may begin in a fresh block */
        uint32_t prompt;          /* tokens */
};

struct pooled_stats {
        bool used;
        struct kvd_sequence_stats table;
        uint32_t steps, changes;
        uint32_t empty_slots;   /* of steps that begin in a fresh block */
        uint32_t random_shared; /* blocks */
        uint32_t waits;         /* for room in the pool */
        uint32_t misses;        /* selected blocks that were not there */
        double sync_ms;
};

struct pooled;

/* Whether options or the space's settings ask for it. */
bool pooled_wanted(const struct pooled_options *, struct cache *);

/* Slots that a sequence of so many tokens may need. */
uint32_t pooled_capacity(uint32_t n_tokens, uint32_t block_tokens);

int pooled_new(const struct pooled_setup *, struct sequence *, uint32_t capacity, struct pooled **ret);
struct pooled *pooled_free(struct pooled *); /* before the sequence */

/* How many tokens from first on may be computed at once: up to the end of a step. */
uint32_t pooled_step_limit(const struct pooled *, uint32_t first);
int pooled_prepare(struct pooled *, struct step *); /* -ENOMEM: gives tokens their slots, and the step its table */
uint32_t *pooled_hits(struct pooled *); /* [blocks], zeroed: to be filled with the step's selections before settling */
bool pooled_publishes(const struct pooled *, uint32_t n_computed);
int pooled_settle(struct pooled *, uint32_t n_computed);
struct pooled_stats pooled_stats(const struct pooled *);

#endif
