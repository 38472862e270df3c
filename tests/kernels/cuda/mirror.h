/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KERNELS_CUDA_MIRROR_H
#define KVD_TESTS_KERNELS_CUDA_MIRROR_H

/*
 * On a GPU, tests' buffers (buffers.h) have a copy each in its memory, and kernels get the copy's
 * address. Before a launch the copies get what the test has written since, after it the buffers get
 * what kernels have written.
 */

#include "kernels/cuda/gpu.h"

/* A buffer; it gets its copy now, or when the device is opened. */
void mirror_add(void *at, size_t bytes);

/* Launches of gpu go through here from now on. 0, or negative and gpu->why. */
int mirror_begin(struct gpu *gpu);

cu_address mirror_of(const void *at);   /* 0: in no buffer */
void *mirror_host(cu_address at);       /* NULL: likewise */

/* Waits for what was launched, and brings the buffers up to date. */
int mirror_pull(void);

#endif
