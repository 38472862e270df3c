/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Inside a user namespace, users whom it does not map have one number together. Who has it is
 * nobody in particular, whether he is a client or a daemon.
 */

#include "ipc/base/user.h"

#include <stdint.h>
#include <stdio.h>

/* The nth number of a file. */
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

/*
 * The first namespace maps all 2^32 - 1 of them; in others somebody may be without, and in one that
 * maps nobody yet, everybody is.
 */
uid_t user_overflow(void) {
        if (number_of("/proc/self/uid_map", 3, 0) == UINT32_MAX)
                return UINT32_MAX;
        return number_of("/proc/sys/fs/overflowuid", 1, 65534);
}
