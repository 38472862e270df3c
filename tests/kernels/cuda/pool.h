/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KERNELS_CUDA_POOL_H
#define KVD_TESTS_KERNELS_CUDA_POOL_H

/* Blocks for a method's kernels and for its reference, filled with numbers. */

#include "kernels/ops.h"
#include "tests/kernels/cuda/fixture.h"

struct pool {
        struct gpu_blocks blocks;
        uint8_t *bytes;
        uint32_t *ids;
        uint32_t n;
};

/* zeroed blocks, with ids in random order */
void pool_make(struct pool *pool, uint32_t n, size_t block_bytes);
uint8_t *pool_block(const struct pool *pool, uint32_t i); /* block ids[i]; NULL if not resident */
void pool_drop(struct pool *pool, uint32_t i);            /* makes it not resident */

static inline size_t number_bytes(enum kvd_number type) {
        return type == KVD_NUMBER_F32 ? 4 : 2;
}

void number_put(void *at, enum kvd_number type, float value);
float number_get(const void *at, enum kvd_number type);
float number_random(float least, float most);

/* Memory for a kernel, aligned to 16 and filled with garbage; and a copy of existing data. */
cu_address room(size_t bytes);
cu_address copied(const void *from, size_t bytes);

/* The floats that a kernel wrote. */
const float *floats_of(cu_address at);

/* Fails the test unless the bits are equal, or both are NaN. */
void assert_same_numbers(const float *expected, const float *got, size_t n, const char *what);

#endif
