/* SPDX-License-Identifier: Apache-2.0 */

/* The checks' kernels, compiled for this processor for the stand-in driver, like those of kernels.def. */

#define KVD_EMULATE 1
#include "tests/gpu/fakecuda/emulate_cuda.h"

#include "tests/gpu/checks.cu"
