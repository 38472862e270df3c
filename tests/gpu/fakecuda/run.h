/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_FAKECUDA_RUN_H
#define KVD_TESTS_FAKECUDA_RUN_H

/* Functions of the stand-in driver for libraries on top of it, in addition to CUDA's own. */

#include <stdbool.h>

#include "ipc/base/cuda.h"

#pragma GCC visibility push(default)

/*
 * Runs run(data) on the stream like a kernel. An error that it returns breaks the context. data is
 * freed when it is done or dropped. If this call fails, nothing is queued, and the caller keeps
 * data.
 */
cu_result fakecuda_run(cu_stream stream, cu_result (*run)(void *data), void *data);

/* May the device do this (CU_ACCESS_READ, CU_ACCESS_READ_WRITE) with all these bytes? */
bool fakecuda_allows(cu_address at, size_t bytes, int access);

#pragma GCC visibility pop

#endif
