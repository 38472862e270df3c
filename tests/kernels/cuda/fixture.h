/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KERNELS_CUDA_FIXTURE_H
#define KVD_TESTS_KERNELS_CUDA_FIXTURE_H

/*
 * A GPU for tests of kernels: gpu_OPERATION(fixture_gpu(), NULL, ...) as any caller does it.
 * Usually it is this processor (tests/gpu/fakecuda/emulate.h), and a launch is done when it
 * returns; with KVD_TEST_GPU=1 it is device 0 of the driver (or KVD_GPU). Memory for kernels comes
 * from tests/kernels/buffers.h; in the emulation its end faults. A result may be looked at after
 * fixture_wait().
 */

#include "kernels/cuda/gpu.h"
#include "tests/kernels/buffers.h"
#include "tests/lib/mark.h"

struct gpu *fixture_gpu(void);  /* the same for the life of this process */
/* a GPU: sizes may be larger, and bits of exp and the like differ */
bool fixture_is_real(void);
void fixture_wait(void);        /* aborts the test if what was launched failed */
/* the order in which blocks and threads run (EMULATE_SEED), where there is a choice */
void fixture_seed(uint64_t n);

/* 0, or the test fails with the GPU's reason. */
#define fixture_ok(launch) fixture_ok_at(launch, #launch)
void fixture_ok_at(int r, const char *what);

/*
 * A buffer as kernels see it, and back. Elsewhere than in the emulation, these are not the same
 * number (mirror.h).
 */
cu_address address_of(const void *at);
void *host_of(cu_address at);

void fixture_begin(void);       /* before the first test */

#endif
