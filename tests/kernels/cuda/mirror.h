/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KERNELS_CUDA_MIRROR_H
#define KVD_TESTS_KERNELS_CUDA_MIRROR_H

/*
 * On a GPU, each of the tests' buffers (buffers.h) has a copy in GPU memory, and kernels get the
 * copy's address. Before a launch, the buffers that the test has written are copied to the GPU;
 * afterwards, the buffers that kernels have written are copied back.
 */

#include "kernels/cuda/gpu.h"

/* Adds a buffer. It gets its copy now, or when the device is opened. */
void mirror_add(void *at, size_t bytes);

/*
 * From now on launches of gpu go through this file. 0, or a negative errno with the reason in
 * gpu->why.
 */
int mirror_begin(struct gpu *gpu);

cu_address mirror_of(const void *at); /* 0 if in no buffer */
void *mirror_host(cu_address at);     /* NULL if in no buffer */

/* Waits for all launches, and updates the buffers. */
int mirror_pull(void);

#endif
