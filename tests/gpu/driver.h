/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_GPU_DRIVER_H
#define KVD_TESTS_GPU_DRIVER_H

/*
 * What answers: a driver and its device, found out by a process of its own. A stand-in (a library
 * that takes the driver's place in tests) is told by its device's name, and by the absence of any
 * device file of a GPU's driver: what is not certainly a GPU counts as a stand-in, and its results
 * are never kept among a GPU's.
 */

#include <stdbool.h>
#include <stdint.h>

struct driver {
        /* branch: as in 580.82.07, if the system says it */
        char device[96], library[256], branch[32];
        int version;                               /* 13000: CUDA 13.0 */
        uint32_t capability;
        uint64_t memory, free;
        bool stand_in;
};

/*
 * Finds out, says it in a line ("check": "device"), and has all lines name it. False: there is none
 * (it said so).
 */
bool driver_say(struct driver *ret);

#endif
