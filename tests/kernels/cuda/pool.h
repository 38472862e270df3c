/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KERNELS_CUDA_POOL_H
#define KVD_TESTS_KERNELS_CUDA_POOL_H

/* Blocks for a method's kernels and for its reference, and numbers in them. */

#include "kernels/ops.h"
#include "tests/kernels/cuda/fixture.h"

struct pool {
        struct gpu_blocks blocks;
        uint8_t *bytes;
        uint32_t *ids;
        uint32_t n;
};

/* zeros, ids in a random order */
void pool_make(struct pool *pool, uint32_t n, size_t block_bytes);
uint8_t *pool_block(const struct pool *pool, uint32_t i);          /* ids[i]; NULL: not resident */
void pool_drop(struct pool *pool, uint32_t i);                     /* now it is not */

static inline size_t number_bytes(enum kvd_number type) {
        return type == KVD_NUMBER_F32 ? 4 : 2;
}

void number_put(void *at, enum kvd_number type, float value);
float number_get(const void *at, enum kvd_number type);
float number_random(float least, float most);

/* Room for a kernel, aligned to 16, with rubbish in it; a copy of something. */
cu_address room(size_t bytes);
cu_address copied(const void *from, size_t bytes);

/* What a kernel wrote. */
const float *floats_of(cu_address at);

/* The same bits, or both no number; else the test ends. */
void assert_same_numbers(const float *expected, const float *got, size_t n, const char *what);

#endif
