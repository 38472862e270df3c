/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A count sketch of keys and values. Each token is added, with a sign, to one cell of each row, and
 * a query takes the median over the rows.
 */

#include "kernels/sketch.h"

#include "kernels/rows.h"

/*
 * How many tokens ahead cells are prefetched, and how many floats of each; the hardware prefetches
 * the rest.
 */
enum { AHEAD = 3, START = 64 };

KERNEL uint8_t *vector_at(const struct kvd_sketch_vectors *x, uint32_t i) {
        return x->blocks[i / x->per_block] + x->offset + i % x->per_block * x->stride;
}

/* The cells of a token, and the sign of its vector in each. */
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

/* ---- insert: n of 16 elements from number d on ---- */

KERNEL void insert_lanes(const struct kvd_sketch_part *p, const struct cells *cells,
                         const lanes *sign, const uint8_t *x, uint32_t d, uint32_t n, uint32_t rows,
                         uint32_t dim, enum kvd_number type) {
        lanes v = row_widen(x, d, n, dim, type);

        if (p->mean)
                v = lanes_sub(v, lanes_load_to(p->mean + d, n));
        for (uint32_t r = 0; r < rows; r++)
                lanes_store_to(cells->at[r] + d,
                               lanes_fma(sign[r], v, lanes_load_to(cells->at[r] + d, n)), n);
}

/* ---- query ---- */

KERNEL void order(lanes *a, lanes *b) {
        lanes least = lanes_min(*a, *b);

        *b = lanes_max(*a, *b);
        *a = least;
}

KERNEL lanes median_of_three(lanes a, lanes b, lanes c) {
        return lanes_max(lanes_min(a, b), lanes_min(lanes_max(a, b), c));
}

/* The median of v[0 .. rows), which is sorted (odd-even transposition). */
KERNEL lanes median_of(lanes *v, uint32_t rows) {
        for (uint32_t pass = 0; pass < rows; pass++)
                for (uint32_t r = pass % 2; r + 1 < rows; r += 2)
                        order(v + r, v + r + 1);
        if (rows % 2)
                return v[rows / 2];
        return lanes_mul(lanes_set(0.5f), lanes_add(v[rows / 2 - 1], v[rows / 2]));
}

/* The median, or NaN where any of the rows is NaN. */
KERNEL lanes median_lanes(const lanes *v, uint32_t rows) {
        lanes ordered[KVD_SKETCH_ROWS_MAX], found;

        for (uint32_t r = 0; r < rows; r++)
                ordered[r] = v[r];
        found = rows == 3 ? median_of_three(v[0], v[1], v[2]) : median_of(ordered, rows);
        for (uint32_t r = 0; r < rows; r += 2)
                found = lanes_spoil(found, v[r], v[MIN(r + 1, rows - 1)]);
        return found;
}

KERNEL lanes query_lanes(const struct kvd_sketch_part *p, const struct cells *cells,
                         const lanes *sign, float shrink, uint32_t d, uint32_t n, uint32_t rows) {
        lanes v[KVD_SKETCH_ROWS_MAX], found;

        for (uint32_t r = 0; r < rows; r++)
                v[r] = lanes_mul(sign[r], lanes_load_to(cells->at[r] + d, n));
        found = lanes_mul(lanes_set(shrink), median_lanes(v, rows));
        if (p->mean)
                found = lanes_add(found, lanes_load_to(p->mean + d, n));
        return found;
}

/* A row is written in parts that have a scale of their own, if they have any. */
KERNEL void query_part(const struct kvd_sketch_part *p, const struct cells *cells,
                       const lanes *sign, uint8_t *x, float shrink, uint32_t d, uint32_t n,
                       uint32_t rows, uint32_t dim, enum kvd_number type) {
        float found[KVD_GROUP];

        for (uint32_t i = 0; i < n; i += KVD_LANES) {
                uint32_t here = MIN(n - i, KVD_LANES);

                lanes_store_to(found + i, query_lanes(p, cells, sign, shrink, d + i, here, rows),
                               here);
        }
        row_write_part(x, d, found, n, dim, type);
}

/* ---- vectors ---- */

enum what { INSERT, QUERY };

/* factor: the weight of an insertion, or the shrink factor of a query. */
KERNEL void do_vector(enum what what, const struct kvd_sketch_part *p, const struct cells *cells,
                      uint8_t *x, float factor, uint32_t rows, uint32_t dim, enum kvd_number type) {
        lanes sign[KVD_SKETCH_ROWS_MAX];

        for (uint32_t r = 0; r < rows; r++)
                sign[r] = lanes_set(what == INSERT ? factor * cells->sign[r] : cells->sign[r]);
        for (uint32_t d = 0; what == INSERT && d < dim; d += KVD_LANES)
                insert_lanes(p, cells, sign, x, d, MIN(dim - d, KVD_LANES), rows, dim, type);
        for (uint32_t d = 0; what == QUERY && d < dim; d += row_step(type))
                query_part(p, cells, sign, x, factor, d, MIN(dim - d, row_step(type)), rows, dim,
                           type);
}

KERNEL void do_rows(enum what what, const struct kvd_sketch_part *p, const uint32_t *places,
                    uint32_t n, const struct kvd_sketch_vectors *x, float factor, uint32_t rows,
                    uint32_t dim, enum kvd_number type) {
        struct cells cells;

        for (uint32_t i = 0; i < n; i++) {
                if (i + AHEAD < n)
                        expect_cells(p, places + (size_t)(i + AHEAD) * rows, rows);
                find_cells(&cells, p, places + (size_t)i * rows, rows);
                do_vector(what, p, &cells, vector_at(x, i), factor, rows, dim, type);
        }
}

KERNEL void do_type(enum what what, const struct kvd_sketch_part *p, const uint32_t *places,
                    uint32_t n, const struct kvd_sketch_vectors *x, float factor,
                    enum kvd_number type) {
        if (p->rows == 3 && p->dim == 128)
                do_rows(what, p, places, n, x, factor, 3, 128, type);
        else
                do_rows(what, p, places, n, x, factor, p->rows, p->dim, type);
}

KERNEL void do_all(enum what what, const struct kvd_sketch_part *p, const uint32_t *places,
                   uint32_t n, const struct kvd_sketch_vectors *x, float factor) {
        TYPED(x->type, do_type, what, p, places, n, x, factor);
}

static void insert(const struct kvd_sketch_part *p, const uint32_t *places, uint32_t n,
                   const struct kvd_sketch_vectors *x, float weight) {
        do_all(INSERT, p, places, n, x, weight);
}

static void query(const struct kvd_sketch_part *p, const uint32_t *places, uint32_t n,
                  const struct kvd_sketch_vectors *x, float shrink) {
        do_all(QUERY, p, places, n, x, shrink);
}

const struct kvd_sketch_ops KVD_VARIANT(kvd_sketch) = {
        .insert = insert,
        .query = query,
};
