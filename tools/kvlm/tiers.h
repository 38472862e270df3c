/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_TIERS_H
#define KVLM_TIERS_H

/*
 * KVReviver, and 4-bit quantisation in its frame: per layer, the recent and candidate tokens have slots, of the others
 * there is an approximation (vague.h), or nothing.
 *
 * What a query sees of the tokens without a slot:
 *   - approximations, all of them, as long as the sketch answers (its load is at most max_load);
 *   - with spill, the `revive` of them with the largest label scores exactly: instead of a sketch's approximation,
 *     and also of those that have none. In a block of a prompt, `revive` for every 16 queries, by their largest score
 *     for any of its queries;
 *   - with HShare, when decoding, only those that were selected: exactly if they are spilled, else approximately;
 *   - nothing of the rest: they are masked.
 * The attention that they draw counts for their scores, and so for their way back among the candidates.
 */

#include "tools/kvlm/parts.h"
#include "tools/kvlm/vague.h"

struct tiers {
        uint32_t resident; /* slots to which a layer's tokens are brought down */
        struct parts **parts; /* [layer] */
        struct vague *vague;
        struct tiers_desk { /* of a head */
                float *keys, *values; /* [capacity][dim], behind each other: what a query sees, if not just slots */
                float *mass;          /* [capacity]: of those */
                uint32_t *tokens;     /* [capacity]: which those are */
                uint32_t *places;     /* [capacity][rows] */
                float *scores;        /* [capacity] */
                uint32_t *numbers;    /* [3 capacity] */
                uint32_t *hits;       /* [capacity]: tokens that come back exactly, ascending */
        } *desks;
};

int tiers_new(const struct relief *, struct tiers **ret);
struct tiers *tiers_free(struct tiers *, const struct relief *);

/* Floats of scratch memory that tiers_attend needs. */
size_t tiers_scratch(const struct tiers *, const struct relief *, const struct kvd_attention *a);

/* positions: what HShare selected, ascending; NULL: nothing was. a's scratch memory suffices; its mass is not used. */
void tiers_attend(struct tiers *, struct relief *, uint32_t layer, uint32_t head, struct kvd_attention *a,
                  const uint32_t *positions, uint32_t n);

int tiers_compress(struct tiers *, struct relief *, struct sequence *); /* -ENOMEM */
uint64_t tiers_spilled_bytes(const struct tiers *, const struct relief *);

#endif
