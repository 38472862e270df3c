/* SPDX-License-Identifier: Apache-2.0 */

/*
 * In a user namespace, all users that the namespace does not map share one uid, the overflow uid.
 * It identifies nobody, neither as a client nor as a daemon.
 */

#include "ipc/base/user.h"

#include <stdint.h>
#include <stdio.h>

/* Returns the nth number in a file. */
static uint32_t number_of(const char *path, int nth, uint32_t otherwise) {
        uint32_t number = otherwise;
        FILE *f = fopen(path, "re");

        if (!f)
                return otherwise;
        while (nth-- > 0)
                if (fscanf(f, "%u", &number) != 1)
                        number = otherwise;
        fclose(f);
        return number;
}

/* The initial namespace maps all 2^32 - 1 uids. Any other one may leave some, or all, unmapped. */
uid_t user_overflow(void) {
        if (number_of("/proc/self/uid_map", 3, 0) == UINT32_MAX)
                return UINT32_MAX;
        return number_of("/proc/sys/fs/overflowuid", 1, 65534);
}
