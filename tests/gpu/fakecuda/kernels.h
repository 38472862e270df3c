/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_FAKECUDA_KERNELS_H
#define KVD_TESTS_FAKECUDA_KERNELS_H

/* The kernels of kernels/cuda/kernels.def as functions that run on the processor (emulate.h). */

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
        size_t argument_bytes; /* size of its argument struct */
        unsigned threads;      /* maximum number of threads per block */
        /* returns when the last block is done */
        void (*run)(const struct fake_launch *launch, const void *argument);
};

/* Finds a kernel by its name ("kvd_gather"); NULL if none. */
const struct fake_kernel *fake_kernel_find(const char *name);

/* Bytes of its static shared memory, on the target where it is largest. */
size_t fake_kernel_own_shared(const char *name);

struct fake_own {
        const char *name; /* NULL: the last one */
        size_t bytes;
};
extern const struct fake_own fake_own[]; /* from RESOURCES.txt */

#ifdef __cplusplus
}
#endif

#endif
