/* SPDX-License-Identifier: Apache-2.0 */

/* Writing and reading whole rows; compiled once for each instruction set. */

#include "kernels/rows.h"

KERNEL void write_type(void *row, const float *from, uint32_t dim, enum kvd_number type) {
        for (uint32_t d = 0; d < dim; d += row_step(type))
                row_write_part(row, d, from + d, MIN(dim - d, row_step(type)), dim, type);
}

void KVD_VARIANT(kvd_write_row)(void *row, const float *from, uint32_t dim, enum kvd_number type) {
        TYPED(type, write_type, row, from, dim);
}

KERNEL void read_type(float *to, const void *row, uint32_t dim, enum kvd_number type) {
        for (uint32_t d = 0; d < dim; d += KVD_LANES) {
                uint32_t n = MIN(dim - d, KVD_LANES);

                lanes_store_to(to + d, row_widen(row, d, n, dim, type), n);
        }
}

void KVD_VARIANT(kvd_read_row)(float *to, const void *row, uint32_t dim, enum kvd_number type) {
        TYPED(type, read_type, to, row, dim);
}
