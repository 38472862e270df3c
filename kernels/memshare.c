/* SPDX-License-Identifier: Apache-2.0 */

/*
 * MemShare's distances between blocks. The keys of one block are rotated to the other's positions
 * while they are read; nothing is written back.
 */

#include "kernels/memshare.h"

#include <assert.h>

#include "kernels/rows.h"

enum { CHUNK = 1024 /* elements whose squares are summed in fp32 */, CHAINS = 4 };

/* What fp32 rounding may have added to a bound, as a fraction of both norms, with a margin. */
#define SLACK 2e-5

/* Elements i to i + 15 of n; zeros beyond the end. */
KERNEL lanes widen_at(const uint8_t *x, size_t i, size_t n, enum kvd_number type) {
        if (i + 16 <= n)
                return lanes_widen(x + i * number_size(type), type);
        return i < n ? lanes_widen_n(x + i * number_size(type), (uint32_t)(n - i), type) :
                       lanes_zero();
}

KERNEL lanes load_at(const float *x, size_t i, size_t n) {
        if (i + 16 <= n)
                return lanes_load(x + i);
        return i < n ? lanes_load_n(x + i, (uint32_t)(n - i)) : lanes_zero();
}

static size_t plane_elements(const struct kvd_memshare_shape *s) {
        return (size_t)s->heads * s->tokens * s->dim;
}

static const uint8_t *plane(const struct kvd_memshare_shape *s, const void *block, uint32_t layer,
                            uint32_t value) {
        size_t bytes = (size_t)s->heads * s->tokens * kvd_format_row(s->type, s->dim);

        return (const uint8_t *)block + (2 * (size_t)layer + value) * bytes;
}

/* ---- sums of squares of whole planes ---- */

KERNEL float chunk_squares(const uint8_t *a, const uint8_t *b, size_t n, bool pair,
                           enum kvd_number type) {
        lanes sum[CHAINS];
        size_t i = 0;

        for (int k = 0; k < CHAINS; k++)
                sum[k] = lanes_zero();
        for (; i + CHAINS * 16 <= n; i += CHAINS * 16)
                for (int k = 0; k < CHAINS; k++) {
                        lanes d = lanes_widen(a + (i + k * 16) * number_size(type), type);

                        if (pair)
                                d = lanes_sub(d, lanes_widen(b + (i + k * 16) * number_size(type),
                                                             type));
                        sum[k] = lanes_fma(d, d, sum[k]);
                }
        for (int k = 0; k < CHAINS && i < n; k++, i += 16) {
                lanes d = widen_at(a, i, n, type);

                if (pair)
                        d = lanes_sub(d, widen_at(b, i, n, type));
                sum[k] = lanes_fma(d, d, sum[k]);
        }
        return lanes_sum(lanes_add(lanes_add(sum[0], sum[1]), lanes_add(sum[2], sum[3])));
}

KERNEL double plane_squares(const uint8_t *a, const uint8_t *b, size_t n, bool pair,
                            enum kvd_number type) {
        double total = 0.0;

        for (size_t from = 0; from < n; from += CHUNK) {
                size_t at = from * number_size(type);

                total += (double)chunk_squares(a + at, pair ? b + at : NULL, MIN(CHUNK, n - from),
                                               pair, type);
        }
        return total;
}

/* ---- row by row: if rows are rotated, or each row counts by its norm ------------------------- */

/* b: NULL for the squares of a alone. The transform of quantised keys keeps them. */
KERNEL void row_squares(lanes sum[2], const uint8_t *a, const uint8_t *b, uint32_t dim,
                        enum kvd_number type) {
        for (uint32_t i = 0; i < dim; i += 32)
                for (uint32_t k = 0; k < 2; k++) {
                        lanes d = row_part(a, i + k * 16, dim, type);

                        if (b)
                                d = lanes_sub(d, row_part(b, i + k * 16, dim, type));
                        sum[k] = lanes_fma(d, d, sum[k]);
                }
}

enum { ROOM = 2 * KVD_GROUP };

/* The same of the elements behind the rotated ones, as numbers. */
KERNEL void rest_squares(lanes sum[2], const uint8_t *a, const uint8_t *b, uint32_t from,
                         uint32_t dim, enum kvd_number type) {
        for (uint32_t n; from < dim; from += n) {
                float room[2][ROOM];
                const uint8_t *x, *y;

                n = MIN(dim - from, KVD_GROUP);
                x = key_plain(room[0], a, from, n, dim, type);
                y = key_plain(room[1], b, from, n, dim, type);
                for (uint32_t i = 0; i < n; i += 16) {
                        lanes d = lanes_sub(widen_at(x, i, n, plain_type(type)),
                                            widen_at(y, i, n, plain_type(type)));

                        sum[i / 16 % 2] = lanes_fma(d, d, sum[i / 16 % 2]);
                }
        }
}

/* Rotates pairs (low, high) by (cosine, sine): the same steps as the rope of ops.h. */
KERNEL void rotate(lanes *low, lanes *high, lanes cosine, lanes sine) {
        lanes l = *low, h = *high;

        *low = lanes_fma(lanes_mul(lanes_set(-1.0f), h), sine, lanes_mul(l, cosine));
        *high = lanes_fma(l, sine, lanes_mul(h, cosine));
}

/* Elements that are rotated with each other. */
struct halves {
        const uint8_t *low, *high;
};

KERNEL struct halves halves_of(float room[2][ROOM], const uint8_t *row, uint32_t at, uint32_t n,
                               uint32_t half, uint32_t dim, enum kvd_number type) {
        return (struct halves){key_plain(room[0], row, at, n, dim, type),
                               key_plain(room[1], row, half + at, n, dim, type)};
}

KERNEL void rotated_row_squares(lanes sum[2], const uint8_t *a, const uint8_t *b,
                                const struct kvd_memshare_query *q, uint32_t dim,
                                enum kvd_number type) {
        for (uint32_t n, at = 0; at < q->half; at += n) {
                float room[4][ROOM];
                struct halves x, y;

                n = MIN(q->half - at, KVD_GROUP);
                x = halves_of(room, a, at, n, q->half, dim, type);
                y = halves_of(room + 2, b, at, n, q->half, dim, type);
                for (uint32_t i = 0; i < n; i += 16) {
                        lanes low = widen_at(y.low, i, n, plain_type(type)),
                              high = widen_at(y.high, i, n, plain_type(type));

                        rotate(&low, &high, load_at(q->cosine + at, i, n),
                               load_at(q->sine + at, i, n));
                        low = lanes_sub(widen_at(x.low, i, n, plain_type(type)), low);
                        high = lanes_sub(widen_at(x.high, i, n, plain_type(type)), high);
                        sum[0] = lanes_fma(low, low, sum[0]);
                        sum[1] = lanes_fma(high, high, sum[1]);
                }
        }
        rest_squares(sum, a, b, 2 * q->half, dim, type);
}

/* The sum over rows of the squares, or of the norms, of the rows' differences. */
KERNEL double rows_sum(const struct kvd_memshare_shape *s, const uint8_t *a, const uint8_t *b,
                       const struct kvd_memshare_query *rotated, bool norms, enum kvd_number type) {
        uint32_t dim = s->dim, rows = s->heads * s->tokens;
        uint32_t together = norms || dim >= CHUNK ? 1 : CHUNK / dim;
        size_t row = kvd_format_row(type, dim);
        double total = 0.0;

        for (uint32_t r = 0; r < rows;) {
                lanes sum[2] = {lanes_zero(), lanes_zero()};
                float squares;

                for (uint32_t end = MIN(rows, r + together); r < end; r++, a += row) {
                        if (rotated)
                                rotated_row_squares(sum, a, b, rotated, dim, type);
                        else
                                row_squares(sum, a, b, dim, type);
                        b = b ? b + row : NULL;
                }
                squares = lanes_sum(lanes_add(sum[0], sum[1]));
                total += norms ? (double)sqrtf(squares) : (double)squares;
        }
        return total;
}

static double rotated_squares(const struct kvd_memshare_query *q, const uint8_t *a,
                              const uint8_t *b) {
        return TYPED(q->shape->type, rows_sum, q->shape, a, b, q, false);
}

static double rotated_norms(const struct kvd_memshare_query *q, const uint8_t *a,
                            const uint8_t *b) {
        return TYPED(q->shape->type, rows_sum, q->shape, a, b, q, true);
}

static double plain_norms(const struct kvd_memshare_query *q, const uint8_t *a, const uint8_t *b) {
        return TYPED(q->shape->type, rows_sum, q->shape, a, b, NULL, true);
}

/* Plain numbers are summed without regard to rows. b: NULL for the squares of a alone. */
KERNEL double squares_type(const struct kvd_memshare_shape *s, const uint8_t *a, const uint8_t *b,
                           bool pair, enum kvd_number type) {
        if (kvd_is_quantised(type))
                return rows_sum(s, a, b, NULL, false, type);
        return plane_squares(a, b, plane_elements(s), pair, type);
}

static double squares_of(const struct kvd_memshare_shape *s, const uint8_t *a) {
        return TYPED(s->type, squares_type, s, a, NULL, false);
}

static double squares_of_difference(const struct kvd_memshare_shape *s, const uint8_t *a,
                                    const uint8_t *b) {
        return TYPED(s->type, squares_type, s, a, b, true);
}

/* ---- distance ---- */

/*
 * The contribution of a plane to the distance of its layer, given the norm of the difference (for
 * MEAN_L2: the sum of norms).
 */
static double weigh(const struct kvd_memshare_query *q, double difference, const float *norm_a,
                    const float *norm_b) {
        if (q->metric != KVD_MEMSHARE_RELATIVE)
                return difference / (2.0 * q->shape->tokens * q->shape->heads);
        assert(norm_a && norm_b);
        return difference == 0.0 ? 0.0 : 0.5 * difference / sqrt((double)*norm_a * (double)*norm_b);
}

static double plane_distance(const struct kvd_memshare_query *q, const struct kvd_memshare_block *a,
                             const struct kvd_memshare_block *b, uint32_t layer, uint32_t value) {
        const uint8_t *x = plane(q->shape, a->data, layer, value),
                      *y = plane(q->shape, b->data, layer, value);
        const float *norm_a = a->norms ? a->norms + 2 * layer + value : NULL;
        const float *norm_b = b->norms ? b->norms + 2 * layer + value : NULL;
        bool rotated = !value && q->half > 0;

        if (q->metric == KVD_MEMSHARE_MEAN_L2)
                return weigh(q, rotated ? rotated_norms(q, x, y) : plain_norms(q, x, y), norm_a,
                             norm_b);
        return weigh(q,
                     sqrt(rotated ? rotated_squares(q, x, y) :
                                    squares_of_difference(q->shape, x, y)),
                     norm_a, norm_b);
}

static double plane_bound(const struct kvd_memshare_query *q, const struct kvd_memshare_block *a,
                          const struct kvd_memshare_block *b, uint32_t layer, uint32_t value) {
        const struct kvd_memshare_shape *s = q->shape;
        size_t at = 2 * (size_t)layer + value;
        double norm_a = (double)a->norms[at], norm_b = (double)b->norms[at],
               least = fabs(norm_a - norm_b);
        double slack = SLACK * (norm_a + norm_b);

        if (q->metric == KVD_MEMSHARE_MEAN_L2)
                slack *= sqrt((double)s->heads * s->tokens);
        return weigh(q, MAX(0.0, least - slack), a->norms + at, b->norms + at);
}

static double bound(const struct kvd_memshare_query *q, const struct kvd_memshare_block *a,
                    const struct kvd_memshare_block *b) {
        double sum = 0.0;

        if (!a->norms || !b->norms)
                return 0.0;
        for (uint32_t l = 0; l < q->shape->layers; l++)
                sum += plane_bound(q, a, b, l, 0) + plane_bound(q, a, b, l, 1);
        return sum / q->shape->layers;
}

/* Comparisons are written so that a NaN rejects. */
static double distance(const struct kvd_memshare_query *q, const struct kvd_memshare_block *a,
                       const struct kvd_memshare_block *b) {
        uint32_t n = q->shape->layers;
        double sum = 0.0;

        if (q->limit < (double)INFINITY && !(bound(q, a, b) <= q->limit))
                return (double)INFINITY;
        for (uint32_t l = 0; l < n; l++) {
                sum += plane_distance(q, a, b, l, 0) + plane_distance(q, a, b, l, 1);
                if (!(sum <= q->limit * n))
                        return (double)INFINITY;
        }
        return sum / n;
}

/* ---- norms of a sealed block ---- */

static void norms(const struct kvd_memshare_shape *s, const void *block, float *out) {
        for (uint32_t i = 0; i < 2 * s->layers; i++)
                out[i] = (float)sqrt(squares_of(s, plane(s, block, i / 2, i % 2)));
}

const struct kvd_memshare_ops KVD_VARIANT(kvd_memshare) = {
        .distance = distance,
        .norms = norms,
};
