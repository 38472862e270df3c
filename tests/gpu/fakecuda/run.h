/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_FAKECUDA_RUN_H
#define KVD_TESTS_FAKECUDA_RUN_H

/*
 * What the stand-in driver offers to the libraries that stand on it, beside CUDA's own functions.
 */

#include <stdbool.h>

#include "ipc/base/cuda.h"

#pragma GCC visibility push(default)

/*
 * Runs run(data) on the stream, as a kernel would run; what it returns but CU_OK breaks the
 * context. data is freed when it is done or dropped. On failure nothing is queued, and data is the
 * caller's.
 */
cu_result fakecuda_run(cu_stream stream, cu_result (*run)(void *data), void *data);

/* May the device do this (CU_ACCESS_READ, CU_ACCESS_READ_WRITE) with all these bytes? */
bool fakecuda_allows(cu_address at, size_t bytes, int access);

#pragma GCC visibility pop

#endif
