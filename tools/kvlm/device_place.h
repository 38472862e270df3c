/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_DEVICE_PLACE_H
#define KVLM_DEVICE_PLACE_H

/*
 * Where a daemon has its pool. This must be known before a space is opened, because the space's
 * fingerprint depends on how keys and values are computed, and that depends on where.
 *
 * Returns 1 if it is on the GPU with the ordinal *ordinal in this process; 0 if it is in host
 * memory or there is no daemon; -ENODEV, with a message, if it is on a GPU that this process cannot
 * see. socket is as in kvd_open.
 */

#include <stdbool.h>

#include "ipc/base/cuda.h"

int device_of_pool(const char *socket, int *ordinal);

/*
 * Finds the first UUID in a text ("... GPU-01234567-89ab-cdef-0123-456789abcdef"). False if there
 * is none.
 */
bool device_find_uuid(const char *text, struct cu_uuid *ret);

#endif
