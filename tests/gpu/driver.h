/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_GPU_DRIVER_H
#define KVD_TESTS_GPU_DRIVER_H

/*
 * The driver and device under test, examined in a process of its own. A stand-in (a library that
 * replaces the driver in tests) is recognised by its device's name, or by the absence of a GPU's
 * device file. Anything that is not certainly a GPU counts as a stand-in, and its results are never
 * stored among those of GPUs.
 */

#include <stdbool.h>
#include <stdint.h>

struct driver {
        /* branch: as in 580.82.07, if the system reports it */
        char device[96], library[256], branch[32];
        int version; /* of CUDA: 13000 for 13.0 */
        uint32_t capability;
        uint64_t memory, free;
        bool stand_in;
};

/*
 * Examines driver and device, prints a line ("check": "device"), and has all lines name them.
 * False: there is no device, which the line says.
 */
bool driver_say(struct driver *ret);

#endif
