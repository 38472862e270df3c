/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_FAKECUDA_KERNELS_H
#define KVD_TESTS_FAKECUDA_KERNELS_H

/* The kernels of kernels/cuda/kernels.def as functions of this processor (emulate.h). */

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct fake_launch {
        unsigned grid[3], block[3];
        size_t shared; /* bytes of dynamic shared memory */
};

struct fake_kernel {
        const char *name;      /* "kvd_gather" */
        size_t argument_bytes; /* of the struct that it takes */
        unsigned threads;      /* the most that a block may have */
        /* returns when the last block is done */
        void (*run)(const struct fake_launch *launch, const void *argument);
};

/* By the driver's name ("kvd_gather"); NULL: there is none. */
const struct fake_kernel *fake_kernel_find(const char *name);

/* Bytes of shared memory that it has itself, on the target where it has most of it. */
size_t fake_kernel_own_shared(const char *name);

struct fake_own {
        const char *name; /* NULL: the last one */
        size_t bytes;
};
extern const struct fake_own fake_own[]; /* of RESOURCES.txt */

#ifdef __cplusplus
}
#endif

#endif
