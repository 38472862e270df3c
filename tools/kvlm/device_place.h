/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_DEVICE_PLACE_H
#define KVLM_DEVICE_PLACE_H

/*
 * Where a daemon has its pool: known before a space is opened, because the space's fingerprint says
 * how keys and values are computed, and that depends on where.
 *
 * 1: on the GPU with that ordinal in this process; 0: in host memory, or there is no daemon;
 * -ENODEV, with a line: on a GPU that this process does not see. socket as in kvd_open.
 */

#include <stdbool.h>

#include "ipc/base/cuda.h"

int device_of_pool(const char *socket, int *ordinal);

/*
 * The first UUID in a text ("... GPU-01234567-89ab-cdef-0123-456789abcdef"); false: there is none.
 */
bool device_find_uuid(const char *text, struct cu_uuid *ret);

#endif
