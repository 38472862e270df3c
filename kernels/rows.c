/* SPDX-License-Identifier: Apache-2.0 */

/* Writing and reading whole rows; compiled once for each instruction set. */

#include "kernels/rows.h"

/* n numbers from number d on, a multiple of a group. */
KERNEL void write_type(void *row, uint32_t d, const float *from, uint32_t n, uint32_t dim,
                       enum kvd_number type) {
        for (uint32_t i = 0; i < n; i += row_step(type))
                row_write_part(row, d + i, from + i, MIN(n - i, row_step(type)), dim, type);
}

void KVD_VARIANT(kvd_write_row)(void *row, const float *from, uint32_t dim, enum kvd_number type) {
        TYPED(type, write_type, row, 0, from, dim, dim);
}

KERNEL void read_type(float *to, const void *row, uint32_t dim, enum kvd_number type) {
        for (uint32_t d = 0; d < dim; d += KVD_LANES) {
                uint32_t n = MIN(dim - d, KVD_LANES);

                lanes_store_to(to + d, row_widen(row, d, n, dim, type), n);
        }
}

void KVD_VARIANT(kvd_write_key)(void *row, const float *from, uint32_t dim, enum kvd_number type) {
        float group[KVD_GROUP];

        if (!kvd_is_quantised(type)) {
                KVD_VARIANT(kvd_write_row)(row, from, dim, type);
                return;
        }
        for (uint32_t d = 0, n; d < dim; d += n) {
                n = MIN(dim - d, KVD_GROUP);
                memcpy(group, from + d, n * sizeof *from);
                turn_key(group, n, type);
                TYPED(type, write_type, row, d, group, n, dim);
        }
}

KERNEL void read_key_type(float *to, const void *row, uint32_t dim, enum kvd_number type) {
        for (uint32_t d = 0; d < dim; d += KVD_GROUP)
                key_group(to + d, row, d, dim, type);
}

void KVD_VARIANT(kvd_read_key)(float *to, const void *row, uint32_t dim, enum kvd_number type) {
        TYPED(type, read_key_type, to, row, dim);
}

void KVD_VARIANT(kvd_read_row)(float *to, const void *row, uint32_t dim, enum kvd_number type) {
        TYPED(type, read_type, to, row, dim);
}
