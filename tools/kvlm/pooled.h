/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_POOLED_H
#define KVLM_POOLED_H

/*
 * A request whose blocks the daemon's methods work on (client/kvd_methods.h), according to the
 * settings of the space. Its blocks are a sequence of the pool, and attention reads through the
 * sequence's table.
 *
 * After each chunk of the prompt, tokens leave that the space's budget has no room for (eviction.c).
 * Decoded tokens see what a reader says (client/reader.h). A step of reasoning ends with an empty
 * line; the text after a long step begins in a fresh block, because only steps with the same
 * alignment are recognised as similar.
 *
 * Slots are numbered through the table: slot s is in block s / block_tokens. Not every slot holds a
 * token.
 */

#include "client/kvd_attend.h"
#include "client/kvd_methods.h"
#include "kernels/attend.h"
#include "tools/kvlm/cache.h"
#include "tools/kvlm/tokenizer.h"

enum pooled_use { POOLED_AUTO, POOLED_OFF, POOLED_ON };

struct pooled_options {
        enum pooled_use use;
        bool own_prompt;  /* the prompt belongs to the sequence as well, and is not published */
        bool align;       /* long steps of reasoning begin in a fresh block */
        uint32_t wait_ms; /* maximum time to wait for the pool */
};

struct pooled_setup {
        const struct pooled_options *options;
        const struct tokenizer *tokenizer;
        const struct kvd_ops *ops;
        const float *frequencies;         /* of the rotary embedding: [head_dim / 2] */
        uint32_t layers, kv_heads, group; /* group: query heads per KV head */
        /* tokens of the prompt, and how many of them are decoded (computed one by one) */
        uint32_t prompt, tail;
};

struct pooled_stats {
        bool used;
        struct kvd_sequence_stats table;
        uint32_t steps, changes;
        uint32_t empty_slots; /* slots skipped so that steps begin in a fresh block */
        uint32_t waits;       /* waits for room in the pool */
        uint32_t evictions;   /* number of evictions of tokens */
        uint32_t late;        /* number of timeouts of other waits than the reader's */
        double wait_ms;
        struct kvd_reader_stats reader;
};

struct pooled;

/* Whether the options or the space's settings ask for it. */
bool pooled_wanted(const struct pooled_options *, struct cache *);

/*
 * Whether the prompt must be the sequence's own: blocks of other clients must not be evicted from.
 */
bool pooled_owns_prompt(const struct pooled_options *, struct cache *);

/* Number of last tokens of a prompt that must be computed even if they are stored. */
uint32_t pooled_not_found(const struct pooled_options *, struct cache *, uint32_t tail);

/* Number of slots that a sequence of n_tokens tokens may need. */
uint32_t pooled_capacity(uint32_t n_tokens, uint32_t block_tokens);

int pooled_new(const struct pooled_setup *, struct sequence *, uint32_t capacity,
               struct pooled **ret);
struct pooled *pooled_free(struct pooled *); /* to be called before the sequence is freed */

/* Maximum number of tokens from first on that may be computed at once. */
uint32_t pooled_step_limit(const struct pooled *, uint32_t first);
/* assigns slots to the tokens, and sets the step's table; -ENOMEM */
int pooled_prepare(struct pooled *, struct step *);
bool pooled_publishes(const struct pooled *, uint32_t n_computed);
int pooled_settle(struct pooled *, uint32_t n_computed);
struct pooled_stats pooled_stats(const struct pooled *);

/*
 * Called during a step, in each layer: pooled_look for each head, by one thread each, scores what
 * the head needs. Then pooled_fetch, by one thread while no other uses the table, fetches what is
 * missing. Then pooled_choose tells each head's attention what to attend to.
 */
void pooled_look(struct pooled *, uint32_t layer, uint32_t head, const struct kvd_attention *a);
void pooled_fetch(struct pooled *, uint32_t layer);
void pooled_choose(struct pooled *, uint32_t head, struct kvd_attention *a);

#endif
