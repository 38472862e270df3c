/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The paper has a heap of candidates; scores of all tokens change with every query, so the order is looked up when it
 * is needed, once per so many tokens. The swaps of one call end: each of them raises the sum of the candidates'
 * scores, because the replace rate is at least 1 and no score is negative. A token that was demoted does not return
 * in the same call: it was the worst candidate, and those that are left are better.
 */

#include "tools/kvlm/parts.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvlm/note.h"

int parts_new(const struct parts_limits *limits, uint32_t capacity, struct parts **ret) {
        struct parts *p = calloc(1, sizeof *p);

        if (p)
                p->part = calloc(MAX(capacity, 1), sizeof *p->part);
        if (p)
                p->order = calloc(MAX(capacity, 1), sizeof *p->order);
        if (!p || !p->part || !p->order) {
                parts_free(p);
                return note(-ENOMEM, "out of memory for a sequence of %u tokens", capacity);
        }
        p->limits = *limits;
        p->capacity = capacity;
        *ret = p;
        return 0;
}

struct parts *parts_free(struct parts *p) {
        if (!p)
                return NULL;
        free(p->order);
        free(p->part);
        free(p);
        return NULL;
}

void parts_push(struct parts *p, uint32_t n) {
        n = MIN(n, p->capacity - p->n);
        memset(p->part + p->n, PART_RECENT, n);
        p->n += n;
        p->size[PART_RECENT] += n;
}

static void move(struct parts *p, uint32_t token, enum part to) {
        p->size[p->part[token]]--;
        p->size[to]++;
        p->part[token] = (uint8_t)to;
}

/* UINT32_MAX: the part is empty. */
static uint32_t worst(const struct parts *p, enum part part, const float *scores) {
        uint32_t found = UINT32_MAX;

        for (uint32_t i = 0; i < p->oldest_recent && p->size[part] > 0; i++)
                if (p->part[i] == part && (found == UINT32_MAX || scores[i] < scores[found]))
                        found = i;
        return found;
}

static uint32_t best(const struct parts *p, enum part part, const float *scores) {
        uint32_t found = UINT32_MAX;

        for (uint32_t i = 0; i < p->oldest_recent && p->size[part] > 0; i++)
                if (p->part[i] == part && (found == UINT32_MAX || scores[i] > scores[found]))
                        found = i;
        return found;
}

static void age(struct parts *p) {
        while (p->size[PART_RECENT] > p->limits.recent)
                move(p, p->oldest_recent++, PART_CANDIDATE);
}

static int ascending(const void *a, const void *b) {
        uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

        return x < y ? -1 : x > y;
}

/* By score, then by age: scores are not negative, so that their bits are in order. */
static uint32_t sort(struct parts *p, enum part part, const float *scores) {
        uint32_t n = 0, bits;

        for (uint32_t i = 0; i < p->oldest_recent && n < p->size[part]; i++) {
                float score = scores[i] + 0.0f; /* of -0, too */

                memcpy(&bits, &score, sizeof bits);
                if (p->part[i] == part)
                        p->order[n++] = (uint64_t)bits << 32 | i;
        }
        qsort(p->order, n, sizeof *p->order, ascending);
        return n;
}

static void overflow(struct parts *p, enum part from, enum part to, uint32_t limit, const float *scores,
                     void (*tell)(void *data, uint32_t token), void *data) {
        uint32_t n = p->size[from] > limit ? sort(p, from, scores) : 0;

        for (uint32_t i = 0; i < n && p->size[from] > limit; i++) {
                move(p, (uint32_t)p->order[i], to);
                tell(data, (uint32_t)p->order[i]);
        }
}

static void swap(struct parts *p, const float *scores, const struct parts_moves *moves) {
        for (uint32_t swaps = 0; swaps < p->limits.swaps; swaps++) {
                uint32_t out = worst(p, PART_CANDIDATE, scores), in = best(p, PART_VAGUE, scores);

                if (out == UINT32_MAX || in == UINT32_MAX || !(scores[out] * p->limits.replace_rate < scores[in]) ||
                    !moves->promote(moves->data, in))
                        return;
                move(p, in, PART_CANDIDATE);
                move(p, out, PART_VAGUE);
                moves->demote(moves->data, out);
        }
}

int parts_compress(struct parts *p, const float *scores, const struct parts_moves *moves) {
        for (uint32_t i = 0; i < p->n; i++)
                if (!(scores[i] >= 0.0f))
                        return note(-EINVAL, "the score of token %u is %g: scores are 0 or more", i,
                                    (double)scores[i]);
        age(p);
        overflow(p, PART_CANDIDATE, PART_VAGUE, p->limits.candidate, scores, moves->demote, moves->data);
        swap(p, scores, moves);
        overflow(p, PART_VAGUE, PART_GONE, p->limits.vague, scores, moves->bury, moves->data);
        return 0;
}
