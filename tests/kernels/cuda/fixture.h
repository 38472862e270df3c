/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KERNELS_CUDA_FIXTURE_H
#define KVD_TESTS_KERNELS_CUDA_FIXTURE_H

/*
 * Kernels under test, called as everybody calls them: gpu_OPERATION(device(), NULL, &arguments). Each test is built
 * twice from one source:
 *
 *      fixture_emulate.c   without a driver: launches run here and at once (tests/fakecuda), as functions of this
 *                          processor; memory ends at inaccessible pages
 *      fixture_driver.c    through the driver that there is: a GPU's, or the stand-in. Words around each piece of memory
 *                          are looked at in the end
 *
 * Failures end the test. Nothing of it may be called before Check has forked: a driver does not survive that.
 */

#include <check.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/cuda/gpu.h"

struct gpu *device(void);      /* opened at the first call */
const char *device_kind(void); /* "emulation", or what the driver calls its device */

/* Memory of the device, aligned to 256; there until device_done. */
cu_address device_room(size_t bytes);                    /* rubbish in it */
cu_address device_of(const void *from, size_t bytes);    /* a copy */
void device_put(cu_address to, const void *from, size_t bytes);
void device_get(void *to, cu_address from, size_t bytes); /* when what was launched has passed */

void device_wait(void);  /* until what was launched has passed, without an error */
void device_done(void);  /* waits, looks for stores beside the memory, frees all of it */

/* Emulation: blocks and warps take turns in another order (emulate.h). On a device nothing: its order is its own. */
void device_order(uint64_t seed);

/* The error of a call, with the reason in gpu->why, ends the test. */
#define device_call(call) \
        do { \
                int device_r_ = (call); \
                if (device_r_ < 0) \
                        ck_abort_msg(#call ": %d: %s", device_r_, device()->why); \
        } while (0)

/* The whole of main: runs the suite, prints where. */
int device_suite(Suite *suite);

#endif
