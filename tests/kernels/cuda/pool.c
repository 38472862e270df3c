/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kernels/cuda/pool.h"

#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/kernels/buffers.h"

void pool_make(struct pool *pool, uint32_t n, size_t block_bytes) {
        *pool = (struct pool){.bytes = buffer(n * block_bytes),
                              .n = n,
                              .ids = buffer(n * sizeof(uint32_t))};
        pool->blocks = (struct gpu_blocks){address_of(pool->bytes), block_bytes,
                                           address_of(pool->ids)};
        for (uint32_t i = 0; i < n; i++) {
                uint32_t at = random_u32() % (i + 1);

                pool->ids[i] = pool->ids[at];
                pool->ids[at] = i;
        }
}

uint8_t *pool_block(const struct pool *pool, uint32_t i) {
        return pool->ids[i] == GPU_NO_BLOCK ? NULL :
                                              pool->bytes + pool->ids[i] * pool->blocks.block_bytes;
}

void pool_drop(struct pool *pool, uint32_t i) {
        pool->ids[i] = GPU_NO_BLOCK;
}

void number_put(void *at, enum kvd_number type, float value) {
        if (type == KVD_NUMBER_F32)
                memcpy(at, &value, sizeof value);
        else
                kvd_ops_pick("scalar")->narrow(at, &value, 1, type);
}

float number_get(const void *at, enum kvd_number type) {
        float f;

        if (type == KVD_NUMBER_F32)
                memcpy(&f, at, sizeof f);
        else
                kvd_ops_pick("scalar")->widen(&f, at, 1, type);
        return f;
}

float number_random(float least, float most) {
        return least + (most - least) * (float)((double)random_u32() / 4294967296.0);
}

cu_address room(size_t bytes) {
        size_t size = ALIGN_UP(bytes, 16);

        return address_of(memset(buffer(size), 0xa5, size));
}

cu_address copied(const void *from, size_t bytes) {
        cu_address at = room(bytes);

        memcpy(host_of(at), from, bytes);
        return at;
}

const float *floats_of(cu_address at) {
        fixture_wait();
        return host_of(at);
}

void assert_same_numbers(const float *expected, const float *got, size_t n, const char *what) {
        for (size_t i = 0; i < n; i++)
                if (memcmp(expected + i, got + i, sizeof *got) != 0 &&
                    !(isnan(expected[i]) && isnan(got[i])))
                        ck_abort_msg("%s: number %zu of %zu is %a, expected %a", what, i, n,
                                     (double)got[i], (double)expected[i]);
}
