/* SPDX-License-Identifier: Apache-2.0 */

/*
 * KeyDiff's anchors and scores. Blocks are processed in order, and within a block one head after
 * the other, 16 tokens at a time: where blocks hold all heads, that reads memory fastest. Widening
 * takes two lanes at once (lanes_widen_2), which permutes the elements, so anchors are converted to
 * that order and back (lanes_place).
 */

#include "kernels/keydiff.h"

#include "kernels/rows.h"

enum { GROUP = KVD_LANES, CHAIN = 1024 };

/*
 * Copies of the code for usual sizes keep sums in registers. The scalar variant gets none: its
 * lanes are not in registers, and the copies would take a minute to compile.
 */
#if defined(KVD_ISA_SCALAR)
enum { SIMD = 0 };
#else
enum { SIMD = 1 };
#endif

/* Up to 16 tokens of one block. */
struct group {
        const uint8_t *keys; /* head 0 of the first token; NULL if the block is not resident */
        uint32_t n;
};

KERNEL struct group group_at(const struct kvd_key_rows *keys, uint32_t t, uint32_t to) {
        uint32_t row = t % keys->per_block;
        const uint8_t *block = keys->blocks[t / keys->per_block];

        return (struct group){block ? block + keys->offset + row * keys->token_stride : NULL,
                              MIN(MIN(to - t, keys->per_block - row), (uint32_t)GROUP)};
}

/* dim, rounded up to whole lanes */
KERNEL uint32_t padded(uint32_t dim) {
        return (dim + KVD_LANES - 1) / KVD_LANES * KVD_LANES;
}

/*
 * What is read after a head of a group: the next head, or head 0 of the next group. Neither can be
 * predicted by the hardware: they are in other blocks, or at least in other pages.
 */
KERNEL const uint8_t *behind(const struct kvd_key_rows *keys, struct group g, const uint8_t *next,
                             uint32_t h) {
        return h + 1 < keys->heads ? g.keys + (h + 1) * keys->head_stride : next;
}

/* ---- one row ---- */

KERNEL lanes squares(const void *row, uint32_t dim, enum kvd_number type) {
        lanes a = lanes_zero(), b = lanes_zero(), x, y;
        uint32_t d = 0;

        for (; d + 32 <= dim; d += 32) {
                row_widen_2(row, d, dim, type, &x, &y);
                a = lanes_fma(x, x, a);
                b = lanes_fma(y, y, b);
        }
        if (d + 16 <= dim) {
                x = row_widen(row, d, KVD_LANES, dim, type);
                a = lanes_fma(x, x, a);
                d += 16;
        }
        if (d < dim) {
                y = row_widen(row, d, dim - d, dim, type);
                b = lanes_fma(y, y, b);
        }
        return lanes_add(a, b);
}

/* m is in the order of lanes_place(), padded with zeros to whole lanes. */
KERNEL lanes products(const void *row, const float *m, uint32_t dim, enum kvd_number type,
                      lanes *ret_squares) {
        lanes a = lanes_zero(), b = lanes_zero(), p = lanes_zero(), q = lanes_zero(), x, y;
        uint32_t d = 0;

        for (; d + 32 <= dim; d += 32) {
                row_widen_2(row, d, dim, type, &x, &y);
                a = lanes_fma(x, x, a);
                b = lanes_fma(y, y, b);
                p = lanes_fma(x, lanes_load(m + d), p);
                q = lanes_fma(y, lanes_load(m + d + 16), q);
        }
        if (d + 16 <= dim) {
                x = row_widen(row, d, KVD_LANES, dim, type);
                a = lanes_fma(x, x, a);
                p = lanes_fma(x, lanes_load(m + d), p);
                d += 16;
        }
        if (d < dim) {
                y = row_widen(row, d, dim - d, dim, type);
                b = lanes_fma(y, y, b);
                q = lanes_fma(y, lanes_load(m + d), q);
        }
        *ret_squares = lanes_add(a, b);
        return lanes_add(p, q);
}

/* ---- the anchor ---- */

/* Finds the valid rows of a group of one head, and 1 / max(|k|, 1e-12) of each. */
KERNEL uint32_t directions(const void *rows[GROUP], float inverse[GROUP], const uint8_t *keys,
                           const uint8_t *next, size_t stride, uint32_t n, uint32_t dim,
                           enum kvd_number type) {
        lanes sums[GROUP];
        float square[GROUP], norm[GROUP];
        uint32_t valid = 0;

        for (uint32_t i = 0; i < n; i++) {
                if (next)
                        lanes_expect(next + i * stride, kvd_format_row(type, dim));
                sums[i] = squares(keys + i * stride, dim, type);
        }
        for (uint32_t i = n; i < GROUP; i++)
                sums[i] = lanes_zero();
        lanes_store(square, lanes_sum_16(sums));
        lanes_store(norm, lanes_div(lanes_set(1.0f),
                                    lanes_max(lanes_sqrt(lanes_load(square)), lanes_set(1e-12f))));
        for (uint32_t i = 0; i < n; i++)
                if (square[i] > 0.0f && square[i] < INFINITY) {
                        rows[valid] = keys + i * stride;
                        inverse[valid++] = norm[i];
                }
        return valid;
}

/* Adds 64 elements of each of n rows: one reciprocal serves four sums. */
KERNEL void add_64(float *sum, const void *rows[GROUP], const float inverse[GROUP], uint32_t n,
                   uint32_t d, uint32_t dim, enum kvd_number type) {
        lanes a = lanes_load(sum), b = lanes_load(sum + 16), c = lanes_load(sum + 32),
              e = lanes_load(sum + 48);

        for (uint32_t i = 0; i < n; i++) {
                lanes scale = lanes_set(inverse[i]), x, y, z, w;

                row_widen_2(rows[i], d, dim, type, &x, &y);
                row_widen_2(rows[i], d + 32, dim, type, &z, &w);
                a = lanes_fma(x, scale, a);
                b = lanes_fma(y, scale, b);
                c = lanes_fma(z, scale, c);
                e = lanes_fma(w, scale, e);
        }
        lanes_store(sum, a);
        lanes_store(sum + 16, b);
        lanes_store(sum + 32, c);
        lanes_store(sum + 48, e);
}

KERNEL void add_directions(float *sum, const void *rows[GROUP], const float inverse[GROUP],
                           uint32_t n, uint32_t dim, enum kvd_number type) {
        uint32_t d = 0;

        for (; d + 64 <= dim; d += 64)
                add_64(sum + d, rows, inverse, n, d, dim, type);
        for (; d + 32 <= dim; d += 32) {
                lanes a = lanes_load(sum + d), b = lanes_load(sum + d + 16), x, y;

                for (uint32_t i = 0; i < n; i++) {
                        row_widen_2(rows[i], d, dim, type, &x, &y);
                        a = lanes_fma(x, lanes_set(inverse[i]), a);
                        b = lanes_fma(y, lanes_set(inverse[i]), b);
                }
                lanes_store(sum + d, a);
                lanes_store(sum + d + 16, b);
        }
        for (; d < dim; d += 16) {
                lanes a = lanes_load(sum + d);

                for (uint32_t i = 0; i < n; i++) {
                        lanes x = row_widen(rows[i], d, MIN(dim - d, KVD_LANES), dim, type);

                        a = lanes_fma(x, lanes_set(inverse[i]), a);
                }
                lanes_store(sum + d, a);
        }
}

/* Adds the partial sums, which are in the order of lanes_place(), to the sums, and resets them. */
KERNEL void flush(float *sums, float *part, const struct kvd_key_rows *keys, uint32_t dim,
                  enum kvd_number type) {
        float group[KVD_GROUP];

        for (uint32_t h = 0; h < keys->heads; h++)
                for (uint32_t d = 0, n; d < dim; d += n) {
                        n = MIN(dim - d, KVD_GROUP);
                        for (uint32_t i = 0; i < n; i++)
                                group[i] = part[(size_t)h * padded(dim) +
                                                lanes_place(d + i, dim, type)];
                        turn_key(group, n, type);
                        for (uint32_t i = 0; i < n; i++)
                                sums[(size_t)h * dim + d + i] += group[i];
                }
        memset(part, 0, (size_t)keys->heads * padded(dim) * sizeof *part);
}

KERNEL void anchor_body(float *sums, uint32_t *counts, const struct kvd_key_rows *keys,
                        uint32_t from, uint32_t to, float *part, uint32_t dim,
                        enum kvd_number type) {
        size_t stride = keys->token_stride;
        uint32_t since = 0;

        memset(part, 0, (size_t)keys->heads * padded(dim) * sizeof *part);
        for (uint32_t t = from; t < to;) {
                struct group g = group_at(keys, t, to);
                const uint8_t *next = t + g.n < to ? group_at(keys, t + g.n, to).keys : NULL;

                for (uint32_t h = 0; h < keys->heads && g.keys; h++) {
                        const uint8_t *head = g.keys + h * keys->head_stride;
                        const void *rows[GROUP];
                        float inverse[GROUP];
                        uint32_t n = SIMD && g.n == GROUP ? directions(rows, inverse, head,
                                                                       behind(keys, g, next, h),
                                                                       stride, GROUP, dim, type) :
                                                            directions(rows, inverse, head, NULL,
                                                                       stride, g.n, dim, type);

                        if (SIMD && n == GROUP)
                                add_directions(part + (size_t)h * padded(dim), rows, inverse, GROUP,
                                               dim, type);
                        else
                                add_directions(part + (size_t)h * padded(dim), rows, inverse, n,
                                               dim, type);
                        counts[h] += n;
                }
                t += g.n;
                since += g.n;
                if (since >= CHAIN || t == to) {
                        flush(sums, part, keys, dim, type);
                        since = 0;
                }
        }
}

/* ---- scores ---- */

KERNEL lanes score_group(const uint8_t *keys, const uint8_t *next, size_t stride, uint32_t n,
                         const float *m, float length, uint32_t dim, enum kvd_number type) {
        lanes dots[GROUP], sums[GROUP], square, score;

        for (uint32_t i = 0; i < n; i++) {
                if (next)
                        lanes_expect(next + i * stride, kvd_format_row(type, dim));
                dots[i] = products(keys + i * stride, m, dim, type, &sums[i]);
        }
        for (uint32_t i = n; i < GROUP; i++)
                sums[i] = dots[i] = lanes_zero();
        square = lanes_sum_16(sums);
        score = lanes_max(lanes_mul(lanes_sqrt(square), lanes_set(length)), lanes_set(1e-8f));
        score = lanes_div(lanes_sub(lanes_zero(), lanes_sum_16(dots)), score);
        score = lanes_select_less(square, lanes_set(INFINITY), score, lanes_set(-INFINITY));
        return lanes_select_less(lanes_zero(), square, score, lanes_set(-INFINITY));
}

KERNEL float length_of(const float *m, uint32_t dim) {
        lanes sum = lanes_zero();

        for (uint32_t d = 0; d < dim; d += KVD_LANES)
                sum = lanes_fma(lanes_load(m + d), lanes_load(m + d), sum);
        return sqrtf(lanes_sum(sum));
}

/* Converts the anchors to the order of lanes_place(); lengths gets their lengths. */
KERNEL void place_anchors(float *placed, float *lengths, const float *m,
                          const struct kvd_key_rows *keys, uint32_t dim, enum kvd_number type) {
        memset(placed, 0, (size_t)keys->heads * padded(dim) * sizeof *placed);
        for (uint32_t h = 0; h < keys->heads; h++) {
                float *head = placed + (size_t)h * padded(dim);

                for (uint32_t d = 0, n; d < dim; d += n) {
                        float group[KVD_GROUP];

                        n = MIN(dim - d, KVD_GROUP);
                        memcpy(group, m + (size_t)h * dim + d, n * sizeof *m);
                        turn_key(group, n, type);
                        for (uint32_t i = 0; i < n; i++)
                                head[lanes_place(d + i, dim, type)] = group[i];
                }
                lengths[h] = length_of(head, dim);
        }
}

KERNEL lanes score_head(const struct kvd_key_rows *keys, struct group g, const uint8_t *next,
                        uint32_t h, const float *m, float length, uint32_t dim,
                        enum kvd_number type) {
        const uint8_t *head = g.keys + h * keys->head_stride;

        if (SIMD && g.n == GROUP)
                return score_group(head, behind(keys, g, next, h), keys->token_stride, GROUP, m,
                                   length, dim, type);
        return score_group(head, NULL, keys->token_stride, g.n, m, length, dim, type);
}

KERNEL void score_body(float *scores, size_t stride, const struct kvd_key_rows *keys, uint32_t from,
                       uint32_t to, const float *m, float *placed, uint32_t dim,
                       enum kvd_number type) {
        float *lengths = placed + (size_t)keys->heads * padded(dim);

        place_anchors(placed, lengths, m, keys, dim, type);
        for (uint32_t t = from; t < to;) {
                struct group g = group_at(keys, t, to);
                const uint8_t *next = t + g.n < to ? group_at(keys, t + g.n, to).keys : NULL;

                for (uint32_t h = 0; h < keys->heads; h++) {
                        const float *anchor = placed + (size_t)h * padded(dim);
                        lanes score = lanes_set(-INFINITY);

                        if (g.keys)
                                score = score_head(keys, g, next, h, anchor, lengths[h], dim, type);
                        lanes_store_to(scores + h * stride + (t - from), score, g.n);
                }
                t += g.n;
        }
}

/* ---- a copy for each type; and for the usual size, whose sums then stay in registers --------- */

#define EACH_DIM(body, ...) \
        (SIMD && keys->dim == 128 ? body(__VA_ARGS__, 128, type) : \
                                    body(__VA_ARGS__, keys->dim, type))

KERNEL void anchor_type(float *sums, uint32_t *counts, const struct kvd_key_rows *keys,
                        uint32_t from, uint32_t to, float *part, enum kvd_number type) {
        EACH_DIM(anchor_body, sums, counts, keys, from, to, part);
}

KERNEL void score_type(float *scores, size_t stride, const struct kvd_key_rows *keys, uint32_t from,
                       uint32_t to, const float *m, float *placed, enum kvd_number type) {
        EACH_DIM(score_body, scores, stride, keys, from, to, m, placed);
}

static void anchor(float *sums, uint32_t *counts, const struct kvd_key_rows *keys, uint32_t from,
                   uint32_t to, float *scratch) {
        TYPED(keys->type, anchor_type, sums, counts, keys, from, to, scratch);
}

static void score(float *scores, size_t stride, const struct kvd_key_rows *keys, uint32_t from,
                  uint32_t to, const float *m, float *scratch) {
        TYPED(keys->type, score_type, scores, stride, keys, from, to, m, scratch);
}

/* ---- from scores to choices ---- */

static void priority(float *p, const float *scores, size_t n) {
        for (size_t i = 0; i < n; i++) {
                float half = 0.5f * scores[i] + 0.5f;

                p[i] = half > 0.0f ? (half < 1.0f ? half : 1.0f) : 0.0f;
        }
}

static void blocks(float *mean, float *best, const float *scores, size_t stride, uint32_t heads,
                   uint32_t n, uint32_t per_block) {
        uint32_t n_blocks = DIV_UP(n, per_block);

        for (uint32_t b = 0; b < n_blocks; b++) {
                uint32_t end = MIN(n, (b + 1) * per_block), valid = 0;
                float sum = 0.0f;

                for (uint32_t h = 0; h < heads; h++) {
                        float *largest = &best[(size_t)h * n_blocks + b];

                        *largest = -INFINITY;
                        for (uint32_t t = b * per_block; t < end; t++)
                                *largest = scores[h * stride + t] > *largest ?
                                                   scores[h * stride + t] :
                                                   *largest;
                        valid += *largest > -INFINITY;
                        sum += *largest > -INFINITY ? *largest : 0.0f;
                }
                mean[b] = valid ? sum / (float)valid : -INFINITY;
        }
}

const struct kvd_keydiff_ops KVD_VARIANT(kvd_keydiff) = {
        .anchor = anchor,
        .score = score,
        .priority = priority,
        .blocks = blocks,
};
