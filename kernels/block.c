/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/block.h"

#include "ipc/base/util.h"
#include "kernels/lanes.h"

/* ---- top-k ---- */

/*
 * A number that grows with the score, unsigned, 0 for NaN: the k-th largest is found by its digits, most significant
 * first, each time counting how often a digit occurs behind the digits that are known.
 */
enum { DIGIT = 11, LAST_DIGIT = 10, DIGITS = 1 << DIGIT };

KERNEL uint32_t order_of(float score) {
        float positive_zero = score + 0.0f;
        uint32_t bits, flip;

        memcpy(&bits, &positive_zero, sizeof bits);
        flip = (uint32_t)((int32_t)bits >> 31) | 0x80000000u;
        return score != score ? 0 : bits ^ flip;
}

/* The digit of the k-th largest (k from 1) of what was counted; *k becomes its rank among those with that digit. */
static uint32_t digit_of(const uint32_t counts[DIGITS], uint32_t *k) {
        uint32_t digit = DIGITS - 1;

        while (counts[digit] < *k)
                *k -= counts[digit--];
        return digit;
}

/* Counts a digit of the numbers that begin with known; two tables, so that equal neighbours do not wait. */
static void count_digits(uint32_t counts[DIGITS], const uint32_t *order, uint32_t n, uint32_t shift, uint32_t mask,
                         uint32_t known_shift, uint32_t known) {
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

static uint32_t topk(uint32_t *indices, const float *scores, uint32_t n, uint32_t k, bool later, uint32_t *scratch) {
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
        for (uint32_t i = 0; taken < k; i++) { /* no room is needed for one too many: the k-th ends it */
                bool same = scratch[i] == cut;

                indices[taken] = i;
                taken += scratch[i] > cut || (same && equal - skip < wanted);
                equal += same;
        }
        return taken;
}

/* ---- blocks ---- */

/* Past this a copy would only drive other things out of the caches. */
#define LARGE ((size_t)4 << 20)

KERNEL void copy_cached(uint8_t *to, const uint8_t *from, size_t bytes) {
        size_t i = 0;

        for (; i + 64 <= bytes; i += 64)
                lanes_store((float *)(to + i), lanes_load((const float *)(from + i)));
        memcpy(to + i, from + i, bytes - i);
}

KERNEL void copy_past(uint8_t *to, const uint8_t *from, size_t bytes) {
        size_t head = MIN(bytes, -(uintptr_t)to & 63), i = head;

        memcpy(to, from, head);
        for (; i + 64 <= bytes; i += 64)
                lanes_stream((float *)(to + i), lanes_load((const float *)(from + i)));
        memcpy(to + i, from + i, bytes - i);
}

KERNEL void copy_part(uint8_t *to, const uint8_t *from, size_t bytes, bool large) {
        if (large)
                copy_past(to, from, bytes);
        else
                copy_cached(to, from, bytes);
}

static void gather(void *to, const uint8_t *const *blocks, uint32_t n, size_t offset, size_t bytes) {
        bool large = n * bytes >= LARGE;

        for (uint32_t i = 0; i < n; i++)
                if (blocks[i])
                        copy_part((uint8_t *)to + i * bytes, blocks[i] + offset, bytes, large);
                else
                        memset((uint8_t *)to + i * bytes, 0, bytes);
        lanes_fence();
}

static void scatter(uint8_t *const *blocks, const void *from, uint32_t n, size_t offset, size_t bytes) {
        bool large = n * bytes >= LARGE;

        for (uint32_t i = 0; i < n; i++)
                if (blocks[i])
                        copy_part(blocks[i] + offset, (const uint8_t *)from + i * bytes, bytes, large);
        lanes_fence();
}

/* Divides 32-bit numbers by one that is not known while this is compiled: a multiplication with 2^64 / d, rounded up. */
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

static void compact(const struct kvd_slots *to, const struct kvd_slots *from, const uint32_t *index, uint32_t n) {
        struct divider of_to = divider_of(to->per_block), of_from = divider_of(from->per_block);

        for (uint32_t j = 0; j < n; j++) {
                uint8_t *target = slot(to, of_to, j);
                const uint8_t *source = slot(from, of_from, index[j]);

                if (target != source)
                        copy_cached(target, source, from->bytes);
        }
}

/* ---- four bits ---- */

#define LARGEST_F16 65504.0f

/* Sixteen groups at a time, so that ranges and steps are computed side by side. */
struct groups {
        const uint8_t *from[KVD_LANES]; /* the numbers; packed, the codes */
        uint8_t *to[KVD_LANES];
        uint32_t length[KVD_LANES];
        size_t range[KVD_LANES]; /* of the packed row, where the group's least number and step are */
        uint32_t n;
};

struct walk {
        uint8_t *wide;   /* the next row */
        uint8_t *packed;
        size_t wide_stride, packed_stride;
        uint32_t rows, dim, group, at; /* rows left; the next group begins with number at, */
        size_t range;                  /* and its range lies so far behind its row's codes */
};

/* Collects the next groups. packing: from wide rows to packed ones. */
KERNEL void next_groups(struct groups *g, struct walk *w, bool packing, enum kvd_number type) {
        for (g->n = 0; g->n < KVD_LANES && w->rows; g->n++) {
                uint8_t *numbers = w->wide + w->at * number_size(type), *codes = w->packed + w->at / 2;

                g->from[g->n] = packing ? numbers : codes;
                g->to[g->n] = packing ? codes : numbers;
                g->length[g->n] = MIN(w->group, w->dim - w->at);
                g->range[g->n] = ((size_t)w->dim + 1) / 2 - w->at / 2 + w->range;
                w->at += w->group;
                w->range += 4;
                if (w->at >= w->dim) {
                        w->at = 0;
                        w->range = 0;
                        w->rows--;
                        w->wide += w->wide_stride;
                        w->packed += w->packed_stride;
                }
        }
}

/* The rest of a group, filled up with its first number so that it does not change the range. */
KERNEL lanes widen_rest(const void *from, uint32_t n, enum kvd_number type) {
        float x[KVD_LANES];

        lanes_store(x, lanes_widen_n(from, n, type));
        for (uint32_t i = n; i < KVD_LANES; i++)
                x[i] = x[0];
        return lanes_load(x);
}

KERNEL lanes widen_some(const void *from, uint32_t n, enum kvd_number type) {
        return n < KVD_LANES ? widen_rest(from, n, type) : lanes_widen(from, type);
}

/* The second operand counts where the first is a NaN: these know no NaN. */
KERNEL void range_of(const uint8_t *from, uint32_t n, enum kvd_number type, lanes *least, lanes *most) {
        *least = lanes_set(INFINITY);
        *most = lanes_set(-INFINITY);
        for (uint32_t i = 0; i < n; i += KVD_LANES) {
                lanes x = widen_some(number_at(from, i, type), n - i, type);

                *least = lanes_min(x, *least);
                *most = lanes_max(x, *most);
        }
}

KERNEL void code_group(uint8_t *to, const uint8_t *from, uint32_t n, float least, float inverse,
                       enum kvd_number type) {
        for (uint32_t i = 0; i < n; i += KVD_LANES) {
                lanes x = widen_some(number_at(from, i, type), n - i, type);
                uint8_t codes[KVD_LANES / 2];

                x = lanes_mul(lanes_sub(x, lanes_set(least)), lanes_set(inverse));
                if (n - i >= KVD_LANES) {
                        lanes_pack_4(to + i / 2, x);
                } else {
                        lanes_pack_4(codes, x);
                        if ((n - i) % 2)
                                codes[(n - i) / 2] &= 15;
                        memcpy(to + i / 2, codes, (n - i + 1) / 2);
                }
        }
}

/* length: of every group, where that is known while this is compiled; else 0. */
KERNEL void pack_groups(const struct groups *g, uint32_t length, enum kvd_number type) {
        lanes low[KVD_LANES], high[KVD_LANES], least, most, step;
        uint16_t least_16[KVD_LANES], step_16[KVD_LANES];
        float least_of[KVD_LANES], inverse_of[KVD_LANES];

        for (uint32_t i = 0; i < g->n; i++)
                range_of(g->from[i], length ? length : g->length[i], type, &low[i], &high[i]);
        for (uint32_t i = g->n; i < KVD_LANES; i++)
                low[i] = high[i] = lanes_zero();
        least = lanes_max(lanes_least_16(low), lanes_set(-LARGEST_F16));
        most = lanes_min(lanes_largest_16(high), lanes_set(LARGEST_F16));
        least = lanes_select_less(most, least, lanes_zero(), least); /* nothing but NaN */
        lanes_narrow(least_16, least, KVD_NUMBER_F16);
        least = lanes_widen(least_16, KVD_NUMBER_F16);
        step = lanes_max(lanes_mul(lanes_sub(most, least), lanes_set(1.0f / 15.0f)), lanes_zero());
        lanes_narrow(step_16, step, KVD_NUMBER_F16);
        step = lanes_widen(step_16, KVD_NUMBER_F16);
        lanes_store(least_of, least);
        lanes_store(inverse_of, lanes_select_less(lanes_zero(), step, lanes_div(lanes_set(1.0f), step), lanes_zero()));
        for (uint32_t i = 0; i < g->n; i++) {
                code_group(g->to[i], g->from[i], length ? length : g->length[i], least_of[i], inverse_of[i], type);
                memcpy(g->to[i] + g->range[i], &least_16[i], 2);
                memcpy(g->to[i] + g->range[i] + 2, &step_16[i], 2);
        }
}

/* A step that was rounded up must not leave fp16. */
KERNEL lanes decode(const uint8_t *codes, float least, float step) {
        return lanes_min(lanes_fma(lanes_unpack_4(codes), lanes_set(step), lanes_set(least)), lanes_set(LARGEST_F16));
}

KERNEL void unpack_group(uint8_t *to, const uint8_t *from, uint32_t n, float least, float step, enum kvd_number type) {
        for (uint32_t i = 0; i < n; i += KVD_LANES) {
                void *numbers = (void *)number_at(to, i, type);
                uint8_t codes[KVD_LANES / 2] = {0};

                if (n - i >= KVD_LANES) {
                        lanes_narrow(numbers, decode(from + i / 2, least, step), type);
                } else {
                        memcpy(codes, from + i / 2, (n - i + 1) / 2);
                        lanes_narrow_n(numbers, decode(codes, least, step), n - i, type);
                }
        }
}

KERNEL void unpack_groups(const struct groups *g, uint32_t length, enum kvd_number type) {
        uint16_t least_16[KVD_LANES] = {0}, step_16[KVD_LANES] = {0};
        float least[KVD_LANES], step[KVD_LANES];

        for (uint32_t i = 0; i < g->n; i++) {
                memcpy(&least_16[i], g->from[i] + g->range[i], 2);
                memcpy(&step_16[i], g->from[i] + g->range[i] + 2, 2);
        }
        lanes_store(least, lanes_widen(least_16, KVD_NUMBER_F16));
        lanes_store(step, lanes_widen(step_16, KVD_NUMBER_F16));
        for (uint32_t i = 0; i < g->n; i++)
                unpack_group(g->to[i], g->from[i], length ? length : g->length[i], least[i], step[i], type);
}

KERNEL void pack_type(struct walk w, bool packing, enum kvd_number type) {
        bool usual = w.group == 32 && w.dim % 32 == 0;
        struct groups g;

        w.wide_stride *= number_size(type);
        for (next_groups(&g, &w, packing, type); g.n; next_groups(&g, &w, packing, type))
                if (packing && usual)
                        pack_groups(&g, 32, type);
                else if (packing)
                        pack_groups(&g, 0, type);
                else if (usual)
                        unpack_groups(&g, 32, type);
                else
                        unpack_groups(&g, 0, type);
}

static struct walk walk_of(void *wide, size_t stride, const uint8_t *packed, uint32_t n, uint32_t dim, uint32_t group) {
        return (struct walk){.wide = wide, .packed = (uint8_t *)packed, .wide_stride = stride, .rows = dim ? n : 0,
                             .packed_stride = kvd_packed_4_bytes(dim, group), .dim = dim, .group = group ? group : dim};
}

static void pack_4(uint8_t *to, const void *rows, size_t stride, uint32_t n, uint32_t dim, uint32_t group,
                   enum kvd_number type) {
        struct walk w = walk_of((void *)rows, stride, to, n, dim, group);

        if (type == KVD_NUMBER_F32)
                pack_type(w, true, KVD_NUMBER_F32);
        else if (type == KVD_NUMBER_F16)
                pack_type(w, true, KVD_NUMBER_F16);
        else
                pack_type(w, true, KVD_NUMBER_BF16);
}

static void unpack_4(void *rows, size_t stride, const uint8_t *from, uint32_t n, uint32_t dim, uint32_t group,
                     enum kvd_number type) {
        struct walk w = walk_of(rows, stride, from, n, dim, group);

        if (type == KVD_NUMBER_F32)
                pack_type(w, false, KVD_NUMBER_F32);
        else if (type == KVD_NUMBER_F16)
                pack_type(w, false, KVD_NUMBER_F16);
        else
                pack_type(w, false, KVD_NUMBER_BF16);
}

const struct kvd_block_ops KVD_VARIANT(kvd_block) = {
        .topk = topk,
        .gather = gather,
        .scatter = scatter,
        .compact = compact,
        .pack_4 = pack_4,
        .unpack_4 = unpack_4,
};
