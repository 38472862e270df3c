/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A count sketch of keys and values. Tokens are added with a sign to one cell of each row, and a
 * query takes the median of the rows.
 */

#include "kernels/sketch.h"

#include "ipc/base/util.h"
#include "kernels/lanes.h"

/*
 * How many tokens ahead cells are asked for, and how much of a cell: the processor sees by itself
 * how it goes on.
 */
enum { AHEAD = 2, START = 64 };

KERNEL uint8_t *vector_at(const struct kvd_sketch_vectors *x, uint32_t i, enum kvd_number type) {
        return x->blocks[i / x->per_block] + x->offset +
               (i % x->per_block) * x->stride * number_size(type);
}

/* The cells of a token, and the signs that its vector has in them. */
struct cells {
        float *at[KVD_SKETCH_ROWS_MAX];
        float sign[KVD_SKETCH_ROWS_MAX];
};

KERNEL void find_cells(struct cells *cells, const struct kvd_sketch_part *p, const uint32_t *places,
                       uint32_t rows) {
        for (uint32_t r = 0; r < rows; r++) {
                size_t column = places[r] & KVD_SKETCH_COLUMN;

                cells->at[r] = p->cells + ((size_t)r * p->columns + column) * p->stride;
                cells->sign[r] = places[r] & p->sign ? -1.0f : 1.0f;
        }
}

KERNEL void expect_cells(const struct kvd_sketch_part *p, const uint32_t *places, uint32_t rows) {
        for (uint32_t r = 0; r < rows; r++) {
                const float *at = p->cells +
                                  ((size_t)r * p->columns + (places[r] & KVD_SKETCH_COLUMN)) *
                                          p->stride;

                for (uint32_t d = 0; d < MIN(p->dim, START); d += 16)
                        __builtin_prefetch(at + d);
        }
}

/* ---- insert ---- */

KERNEL void insert_vector(const struct kvd_sketch_part *p, const struct cells *cells,
                          const uint8_t *x, float weight, uint32_t rows, enum kvd_number type) {
        lanes sign[KVD_SKETCH_ROWS_MAX];
        uint32_t d = 0;

        for (uint32_t r = 0; r < rows; r++)
                sign[r] = lanes_set(weight * cells->sign[r]);
        for (; d + 16 <= p->dim; d += 16) {
                lanes v = lanes_widen(x + d * number_size(type), type);

                if (p->mean)
                        v = lanes_sub(v, lanes_load(p->mean + d));
                for (uint32_t r = 0; r < rows; r++)
                        lanes_store(cells->at[r] + d,
                                    lanes_fma(sign[r], v, lanes_load(cells->at[r] + d)));
        }
        if (d < p->dim) {
                uint32_t n = p->dim - d;
                lanes v = lanes_widen_n(x + d * number_size(type), n, type);

                if (p->mean)
                        v = lanes_sub(v, lanes_load_n(p->mean + d, n));
                for (uint32_t r = 0; r < rows; r++)
                        lanes_store_n(cells->at[r] + d,
                                      lanes_fma(sign[r], v, lanes_load_n(cells->at[r] + d, n)), n);
        }
}

KERNEL void insert_all(const struct kvd_sketch_part *p, const uint32_t *places, uint32_t n,
                       const struct kvd_sketch_vectors *x, float weight, uint32_t rows,
                       enum kvd_number type) {
        struct cells cells;

        for (uint32_t i = 0; i < n; i++) {
                if (i + AHEAD < n)
                        expect_cells(p, places + (size_t)(i + AHEAD) * rows, rows);
                find_cells(&cells, p, places + (size_t)i * rows, rows);
                insert_vector(p, &cells, vector_at(x, i, type), weight, rows, type);
        }
}

KERNEL void insert_typed(const struct kvd_sketch_part *p, const uint32_t *places, uint32_t n,
                         const struct kvd_sketch_vectors *x, float weight, enum kvd_number type) {
        if (p->rows == 3)
                insert_all(p, places, n, x, weight, 3, type);
        else
                insert_all(p, places, n, x, weight, p->rows, type);
}

static void insert(const struct kvd_sketch_part *p, const uint32_t *places, uint32_t n,
                   const struct kvd_sketch_vectors *x, float weight) {
        if (x->type == KVD_NUMBER_F32)
                insert_typed(p, places, n, x, weight, KVD_NUMBER_F32);
        else if (x->type == KVD_NUMBER_F16)
                insert_typed(p, places, n, x, weight, KVD_NUMBER_F16);
        else
                insert_typed(p, places, n, x, weight, KVD_NUMBER_BF16);
}

/* ---- median ---- */

/* -0 where v is a number, NaN where it is not: x + (-0) is x, whatever x. */
KERNEL lanes poison(lanes v) {
        return lanes_select_less(lanes_set(-1.0f), lanes_abs(v), lanes_set(-0.0f), v);
}

KERNEL void order(lanes *a, lanes *b) {
        lanes least = lanes_min(*a, *b);

        *b = lanes_max(*a, *b);
        *a = least;
}

KERNEL lanes median_of_three(lanes a, lanes b, lanes c) {
        return lanes_max(lanes_min(a, b), lanes_min(lanes_max(a, b), c));
}

/* The middle of v[0 .. rows), which is left in order (odd-even transposition). */
KERNEL lanes median_of(lanes *v, uint32_t rows) {
        for (uint32_t pass = 0; pass < rows; pass++)
                for (uint32_t r = pass % 2; r + 1 < rows; r += 2)
                        order(v + r, v + r + 1);
        if (rows % 2)
                return v[rows / 2];
        return lanes_mul(lanes_set(0.5f), lanes_add(v[rows / 2 - 1], v[rows / 2]));
}

KERNEL lanes median_lanes(lanes *v, uint32_t rows) {
        lanes spoilt = poison(v[0]);

        for (uint32_t r = 1; r < rows; r++)
                spoilt = lanes_add(spoilt, poison(v[r]));
        return lanes_add(rows == 3 ? median_of_three(v[0], v[1], v[2]) : median_of(v, rows),
                         spoilt);
}

/* ---- query ---- */

KERNEL void query_vector(const struct kvd_sketch_part *p, const struct cells *cells, uint8_t *x,
                         float shrink, uint32_t rows, enum kvd_number type) {
        lanes v[KVD_SKETCH_ROWS_MAX], sign[KVD_SKETCH_ROWS_MAX], found;
        uint32_t d = 0;

        for (uint32_t r = 0; r < rows; r++)
                sign[r] = lanes_set(cells->sign[r]);
        for (; d + 16 <= p->dim; d += 16) {
                for (uint32_t r = 0; r < rows; r++)
                        v[r] = lanes_mul(sign[r], lanes_load(cells->at[r] + d));
                found = lanes_mul(lanes_set(shrink), median_lanes(v, rows));
                if (p->mean)
                        found = lanes_add(found, lanes_load(p->mean + d));
                lanes_narrow(x + d * number_size(type), found, type);
        }
        if (d < p->dim) {
                uint32_t n = p->dim - d;

                for (uint32_t r = 0; r < rows; r++)
                        v[r] = lanes_mul(sign[r], lanes_load_n(cells->at[r] + d, n));
                found = lanes_mul(lanes_set(shrink), median_lanes(v, rows));
                if (p->mean)
                        found = lanes_add(found, lanes_load_n(p->mean + d, n));
                lanes_narrow_n(x + d * number_size(type), found, n, type);
        }
}

KERNEL void query_all(const struct kvd_sketch_part *p, const uint32_t *places, uint32_t n,
                      const struct kvd_sketch_vectors *x, float shrink, uint32_t rows,
                      enum kvd_number type) {
        struct cells cells;

        for (uint32_t i = 0; i < n; i++) {
                if (i + AHEAD < n)
                        expect_cells(p, places + (size_t)(i + AHEAD) * rows, rows);
                find_cells(&cells, p, places + (size_t)i * rows, rows);
                query_vector(p, &cells, vector_at(x, i, type), shrink, rows, type);
        }
}

KERNEL void query_typed(const struct kvd_sketch_part *p, const uint32_t *places, uint32_t n,
                        const struct kvd_sketch_vectors *x, float shrink, enum kvd_number type) {
        if (p->rows == 3)
                query_all(p, places, n, x, shrink, 3, type);
        else
                query_all(p, places, n, x, shrink, p->rows, type);
}

static void query(const struct kvd_sketch_part *p, const uint32_t *places, uint32_t n,
                  const struct kvd_sketch_vectors *x, float shrink) {
        if (x->type == KVD_NUMBER_F32)
                query_typed(p, places, n, x, shrink, KVD_NUMBER_F32);
        else if (x->type == KVD_NUMBER_F16)
                query_typed(p, places, n, x, shrink, KVD_NUMBER_F16);
        else
                query_typed(p, places, n, x, shrink, KVD_NUMBER_BF16);
}

const struct kvd_sketch_ops KVD_VARIANT(kvd_sketch) = {
        .insert = insert,
        .query = query,
};
