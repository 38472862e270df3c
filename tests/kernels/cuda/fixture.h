/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KERNELS_CUDA_FIXTURE_H
#define KVD_TESTS_KERNELS_CUDA_FIXTURE_H

/*
 * A GPU for tests of kernels: gpu_OPERATION(fixture_gpu(), NULL, ...), as any caller uses it.
 * Usually it is emulated on this CPU (tests/gpu/fakecuda/emulate.h), and a launch is complete when
 * it returns; with KVD_TEST_GPU=1 it is device 0 of the driver (or KVD_GPU). Memory for kernels
 * comes from tests/kernels/buffers.h; in the emulation, accesses past its end fault. Call
 * fixture_wait() before reading results.
 */

#include "kernels/cuda/gpu.h"
#include "tests/kernels/buffers.h"
#include "tests/lib/mark.h"

struct gpu *fixture_gpu(void); /* the same for the life of this process */
/* true on a GPU: sizes may be larger, and bits of exp and similar functions differ */
bool fixture_is_real(void);
void fixture_wait(void); /* aborts the test if a launch failed */
/* sets the order in which blocks and threads run (EMULATE_SEED), where it is not fixed */
void fixture_seed(uint64_t n);

/* 0, or the test fails with the GPU's reason. */
#define fixture_ok(launch) fixture_ok_at(launch, #launch)
void fixture_ok_at(int r, const char *what);

/* The device address of a buffer, and the inverse. On a GPU the two differ (mirror.h). */
cu_address address_of(const void *at);
void *host_of(cu_address at);

void fixture_begin(void); /* before the first test */

#endif
