/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_PARTS_H
#define KVLM_PARTS_H

/*
 * Which part of the cache each token of a sequence is in (KVReviver, Algorithm 3). Tokens are
 * numbered as they come. Nothing here knows of keys and values: what has to be moved is told to the caller.
 */

#include <stdbool.h>
#include <stdint.h>

enum part {
        PART_RECENT,    /* the newest: a queue */
        PART_CANDIDATE, /* the best of the others */
        PART_VAGUE,     /* of which an approximation is kept */
        PART_GONE,      /* of which nothing is kept: a tombstone */
};

struct parts_limits {
        uint32_t recent, candidate, vague; /* tokens; vague: UINT32_MAX if there is no limit */
        float replace_rate; /* a vague token comes back if it is so many times better than the worst candidate */
        uint32_t swaps;     /* at most, in one go */
};

struct parts {
        struct parts_limits limits;
        uint8_t *part; /* [capacity] enum part */
        uint64_t *order; /* [capacity] scratch memory */
        uint32_t capacity, n;
        uint32_t oldest_recent; /* tokens from here on are recent, and no others */
        uint32_t size[4];       /* of each part */
};

struct parts_moves {
        void (*demote)(void *data, uint32_t token);  /* recent or candidate becomes vague */
        void (*bury)(void *data, uint32_t token);    /* vague becomes gone */
        bool (*promote)(void *data, uint32_t token); /* vague becomes candidate; false: it cannot */
        void *data;
};

int parts_new(const struct parts_limits *, uint32_t capacity, struct parts **ret);
struct parts *parts_free(struct parts *);

void parts_push(struct parts *, uint32_t n); /* new tokens are recent */

/*
 * Brings all parts to their limits, then swaps. scores[n], of all tokens: -EINVAL, and nothing has changed, if one
 * is negative or no number, because a factor would then not mean better. Of equal ones the older leaves first and
 * returns first.
 */
int parts_compress(struct parts *, const float *scores, const struct parts_moves *);

static inline bool parts_resident(const struct parts *p, uint32_t token) {
        return p->part[token] <= PART_CANDIDATE;
}

#endif
