/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_POOLED_H
#define KVLM_POOLED_H

/*
 * A request whose blocks the daemon's methods work on (client/kvd_methods.h), as the settings of
 * the space say: its blocks are a sequence of the pool, and attention reads through the sequence's
 * table.
 *
 *      MemShare    blocks stand in for others: they have a delta. A step of reasoning ends with an empty line, and what
 *                  follows a long one begins in a fresh block, because only steps that lie alike are found alike
 *      HShare      tokens that are decoded attend to a selection, made from the daemon's labels      (selection.c)
 *      KVReviver   a share of the blocks stays; one that a query misses is waited for                (residency.c)
 *      KeyDiff     a number of tokens stays for each layer and head, after each chunk of the prompt  (eviction.c)
 *
 * Slots are numbered through the table: slot s is in block s / block_tokens. Not every slot holds a
 * token.
 */

#include "client/kvd_methods.h"
#include "kernels/attend.h"
#include "tools/kvlm/cache.h"
#include "tools/kvlm/tokenizer.h"

enum pooled_use { POOLED_AUTO, POOLED_OFF, POOLED_ON };

struct pooled_options {
        enum pooled_use use;
        bool own_prompt;  /* the prompt is the sequence's, too, and not published */
        bool align;       /* long steps of reasoning begin in a fresh block */
        uint32_t wait_ms; /* for the pool, at most */
};

struct pooled_setup {
        const struct pooled_options *options;
        const struct tokenizer *tokenizer;
        const struct kvd_ops *ops;
        const float *frequencies;       /* of the rotary embedding: [head_dim / 2] */
        uint32_t layers, kv_heads, group; /* group: query heads per KV head */
        /* tokens, and how many of them are decoded: computed one by one */
        uint32_t prompt, tail;
};

struct pooled_stats {
        bool used;
        struct kvd_sequence_stats table;
        uint32_t steps, changes;
        uint32_t empty_slots;  /* of steps that begin in a fresh block */
        uint32_t waits;        /* for room in the pool */
        uint32_t misses;       /* blocks that a query missed */
        uint32_t evictions;    /* times that tokens were evicted */
        uint32_t late;         /* times that what was waited for did not come in time */
        uint64_t selections;   /* of a layer and head */
        double selection_ms, fetch_ms, wait_ms; /* fetch: of the waiting, that between layers */
        uint64_t most_resident; /* blocks, since the prompt's end */
};

struct pooled;

/* Whether options or the space's settings ask for it. */
bool pooled_wanted(const struct pooled_options *, struct cache *);

/* Whether the prompt must be the sequence's own: what is evicted must not be somebody else's. */
bool pooled_owns_prompt(const struct pooled_options *, struct cache *);

/* Last tokens of a prompt that must be computed, stored or not. */
uint32_t pooled_not_found(const struct pooled_options *, struct cache *, uint32_t tail);

/* Slots that a sequence of so many tokens may need. */
uint32_t pooled_capacity(uint32_t n_tokens, uint32_t block_tokens);

int pooled_new(const struct pooled_setup *, struct sequence *, uint32_t capacity,
               struct pooled **ret);
struct pooled *pooled_free(struct pooled *); /* before the sequence */

/* How many tokens from first on may be computed at once. */
uint32_t pooled_step_limit(const struct pooled *, uint32_t first);
/* -ENOMEM: gives tokens their slots, and the step its table */
int pooled_prepare(struct pooled *, struct step *);
bool pooled_publishes(const struct pooled *, uint32_t n_computed);
int pooled_settle(struct pooled *, uint32_t n_computed);
struct pooled_stats pooled_stats(const struct pooled *);

/*
 * During a step, in each layer: every head looks what it wants of what (each by one thread), then
 * what is missing is fetched by one thread while no other uses the table, then each head's
 * attention is told what to attend to.
 */
void pooled_look(struct pooled *, uint32_t layer, uint32_t head, const struct kvd_attention *a);
void pooled_fetch(struct pooled *, uint32_t layer);
void pooled_choose(struct pooled *, uint32_t layer, uint32_t head, struct kvd_attention *a);

#endif
