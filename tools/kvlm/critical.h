/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_CRITICAL_H
#define KVLM_CRITICAL_H

/*
 * HShare: a decoding query attends to critical tokens only, and what one layer, head and query chose
 * is used by those that resemble it. Prompts are attended to densely; their last queries tell who resembles whom.
 */

#include "tools/kvlm/labels.h"

struct critical {
        struct kvd_window window;
        uint32_t every;   /* queries of a group: the first chooses */
        uint32_t dense;   /* first layers that see all */
        bool ready;       /* the prompt is done */
        uint32_t *layers; /* [layer]: whose choice it uses, itself or an earlier one */
        uint32_t *heads;  /* [layer][head] */
        struct choice {
                uint32_t *middle; /* [window.middle] positions */
                uint32_t n_middle, n_then;
        } *choices;          /* [layer][head] */
        uint32_t **lists;    /* [head][capacity]: positions that the step in progress attends to, */
        uint32_t **slots;    /* and those of them that have slots */
};

int critical_new(const struct relief *, struct critical **ret);
struct critical *critical_free(struct critical *, const struct relief *);

/* At the prompt's end, with labels ready: the sharing configuration. -ENOMEM */
int critical_plan(struct critical *, struct relief *);

/*
 * For one query: the positions that it attends to, ascending, the newest among them; NULL: all of them. a->first + 1
 * slots are filled.
 */
const uint32_t *critical_choose(struct critical *, struct relief *, uint32_t layer, uint32_t head,
                                const struct kvd_attention *a, uint32_t *n);

/* Adds, for each block of so many positions, how often the choices in force name one of its positions. */
void critical_count(const struct critical *, const struct relief *, uint32_t block_tokens, uint32_t *hits);

/* Of positions, ascending, those that have slots, as slots. Returns how many. */
uint32_t critical_slots(const struct relief *, uint32_t layer, uint32_t head, const uint32_t *positions, uint32_t n,
                        uint32_t *slots);

#endif
