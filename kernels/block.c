/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Choosing the best of many scores, and compacting scattered tokens. Both are exact: ties are
 * broken by index, and bytes are copied unchanged.
 */

#include "kernels/block.h"

#include "ipc/base/util.h"
#include "kernels/lanes.h"
#include "kernels/select.h"

/* ---- top-k ---- */

/* How many scores equal to the k-th largest are skipped if the latest ones are preferred. */
static uint32_t earlier_equals(const uint32_t *order, uint32_t n, struct cut cut) {
        uint32_t equal = 0;

        for (uint32_t i = 0; i < n; i++)
                equal += order[i] == cut.from;
        return equal - cut.some;
}

static uint32_t topk(uint32_t *indices, const float *scores, uint32_t n, uint32_t k, bool later,
                     uint32_t *scratch) {
        struct cut cut;

        if (k == 0 || n == 0)
                return 0;
        k = MIN(k, n);
        memcpy(scratch, scores, n * sizeof *scratch);
        for (uint32_t i = 0; i < n; i++)
                scratch[i] = order_of(scratch[i]);
        cut = cut_of(scratch, n, k, 0);
        if (cut.some == 0)
                return collect(indices, k, scores, n, score_of(cut.from));
        choose(indices, scratch, k, cut, later ? earlier_equals(scratch, n, cut) : 0);
        return k;
}

/* ---- blocks ---- */

/*
 * Compacted tokens are not read again soon. Whole cache lines are written past the caches, so that
 * they are not read before they are written.
 */
KERNEL void copy_lines(uint8_t *to, const uint8_t *from, size_t bytes) {
        for (size_t i = 0; i < bytes; i += 64)
                lanes_stream((float *)(to + i), lanes_load((const float *)(from + i)));
}

KERNEL void copy_token(uint8_t *to, const uint8_t *from, size_t bytes) {
        if (bytes % 64 == 0 && (uintptr_t)to % 64 == 0)
                copy_lines(to, from, bytes);
        else
                memcpy(to, from, bytes);
}

/*
 * Divides 32-bit numbers by a divisor that is known only at run time: multiplies by 2^64 / d,
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

enum { AHEAD = 32 }; /* tokens */

static void compact(const struct kvd_slots *to, const struct kvd_slots *from, const uint32_t *index,
                    uint32_t n) {
        struct divider of_to = divider_of(to->per_block), of_from = divider_of(from->per_block);

        for (uint32_t j = 0; j < n; j++) {
                uint8_t *target = slot(to, of_to, j);
                const uint8_t *source = slot(from, of_from, index[j]);

                if (j + AHEAD < n)
                        lanes_expect(slot(from, of_from, index[j + AHEAD]), from->bytes);
                if (target != source)
                        copy_token(target, source, from->bytes);
        }
        lanes_fence();
}

const struct kvd_block_ops KVD_VARIANT(kvd_block) = {
        .topk = topk,
        .compact = compact,
};
