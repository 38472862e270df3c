/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Choosing the best of many scores, and bringing scattered tokens together. Both are exact: equal
 * scores are told apart by their index, and bytes are moved as they are.
 */

#include "kernels/block.h"

#include "ipc/base/util.h"
#include "kernels/lanes.h"

/* ---- top-k ---- */

/*
 * A number that grows with the score, unsigned, 0 for NaN: the k-th largest is found by its digits,
 * most significant first, each time counting how often a digit occurs behind the digits that are
 * known.
 */
enum { DIGIT = 11, LAST_DIGIT = 10, DIGITS = 1 << DIGIT };

KERNEL uint32_t order_of(float score) {
        float positive_zero = score + 0.0f;
        uint32_t bits, flip;

        memcpy(&bits, &positive_zero, sizeof bits);
        flip = (uint32_t)((int32_t)bits >> 31) | 0x80000000u;
        return score != score ? 0 : bits ^ flip;
}

/*
 * The digit of the k-th largest (k from 1) of what was counted; *k becomes its rank among those
 * with that digit.
 */
static uint32_t digit_of(const uint32_t counts[DIGITS], uint32_t *k) {
        uint32_t digit = DIGITS - 1;

        while (counts[digit] < *k)
                *k -= counts[digit--];
        return digit;
}

/*
 * Counts a digit of the numbers that begin with known; two tables, so that equal neighbours do not
 * wait.
 */
static void count_digits(uint32_t counts[DIGITS], const uint32_t *order, uint32_t n, uint32_t shift,
                         uint32_t mask, uint32_t known_shift, uint32_t known) {
        for (uint32_t i = 0; i < n; i++)
                if (order[i] >> known_shift == known)
                        counts[order[i] >> shift & mask]++;
}

static void count_first_digits(uint32_t counts[DIGITS], const uint32_t *order, uint32_t n) {
        uint32_t other[DIGITS] = {0}, i = 0;

        for (; i + 2 <= n; i += 2) {
                counts[order[i] >> (32 - DIGIT)]++;
                other[order[i + 1] >> (32 - DIGIT)]++;
        }
        if (i < n)
                counts[order[i] >> (32 - DIGIT)]++;
        for (uint32_t d = 0; d < DIGITS; d++)
                counts[d] += other[d];
}

/* The k-th largest, k from 1 to n; *rank: how many of its equals are among the first k. */
static uint32_t order_at(const uint32_t *order, uint32_t n, uint32_t k, uint32_t *rank) {
        uint32_t counts[DIGITS] = {0}, known;

        count_first_digits(counts, order, n);
        known = digit_of(counts, &k);
        memset(counts, 0, sizeof counts);
        count_digits(counts, order, n, LAST_DIGIT, DIGITS - 1, 32 - DIGIT, known);
        known = known << DIGIT | digit_of(counts, &k);
        memset(counts, 0, sizeof counts);
        count_digits(counts, order, n, 0, (1u << LAST_DIGIT) - 1, LAST_DIGIT, known);
        known = known << LAST_DIGIT | digit_of(counts, &k);
        *rank = k;
        return known;
}

static uint32_t topk(uint32_t *indices, const float *scores, uint32_t n, uint32_t k, bool later,
                     uint32_t *scratch) {
        uint32_t cut, wanted, skip = 0, taken = 0, equal = 0;

        if (k == 0 || n == 0)
                return 0;
        k = MIN(k, n);
        for (uint32_t i = 0; i < n; i++)
                scratch[i] = order_of(scores[i]);
        cut = order_at(scratch, n, k, &wanted);
        if (later) {
                for (uint32_t i = 0; i < n; i++)
                        skip += scratch[i] == cut;
                skip -= wanted;
        }
        /* no room is needed for one too many: the k-th ends it */
        for (uint32_t i = 0; taken < k; i++) {
                bool same = scratch[i] == cut;

                indices[taken] = i;
                taken += scratch[i] > cut || (same && equal - skip < wanted);
                equal += same;
        }
        return taken;
}

/* ---- blocks ---- */

KERNEL void copy_cached(uint8_t *to, const uint8_t *from, size_t bytes) {
        size_t i = 0;

        for (; i + 64 <= bytes; i += 64)
                lanes_store((float *)(to + i), lanes_load((const float *)(from + i)));
        memcpy(to + i, from + i, bytes - i);
}

/*
 * Divides 32-bit numbers by one that is not known while this is compiled: multiplies with 2^64 / d,
 * rounded up.
 */
struct divider {
        uint64_t reciprocal; /* 0: d is 1 */
        uint32_t d;
};

static struct divider divider_of(uint32_t d) {
        return (struct divider){d > 1 ? UINT64_MAX / d + 1 : 0, d};
}

KERNEL uint32_t quotient(struct divider by, uint32_t i) {
        return by.reciprocal ? (uint32_t)((unsigned __int128)by.reciprocal * i >> 64) : i;
}

KERNEL uint8_t *slot(const struct kvd_slots *s, struct divider per_block, uint32_t i) {
        uint32_t block = quotient(per_block, i);

        return s->blocks[block] + s->offset + (size_t)(i - block * per_block.d) * s->stride;
}

static void compact(const struct kvd_slots *to, const struct kvd_slots *from, const uint32_t *index,
                    uint32_t n) {
        struct divider of_to = divider_of(to->per_block), of_from = divider_of(from->per_block);

        for (uint32_t j = 0; j < n; j++) {
                uint8_t *target = slot(to, of_to, j);
                const uint8_t *source = slot(from, of_from, index[j]);

                if (target != source)
                        copy_cached(target, source, from->bytes);
        }
}

const struct kvd_block_ops KVD_VARIANT(kvd_block) = {
        .topk = topk,
        .compact = compact,
};
