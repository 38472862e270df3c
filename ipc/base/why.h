/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_WHY_H
#define KVD_BASE_WHY_H

/*
 * A failure is a negative errno that travels up, and one line for people that waits where it was
 * said: what is wrong, and what to do. Whatever can be refused has a struct kvd_why, or is handed
 * one.
 *
 *      return kvd_refuse(&store->why, -ENOENT, "there is no space '%s'", name);
 */

#include "ipc/base/util.h"

struct kvd_why {
        char line[512]; /* "" as long as nothing was refused */
};

/* Writes the line, cut if it is too long. Returns the error. */
_printf_(3, 4) int kvd_refuse(struct kvd_why *why, int error, const char *format, ...);

#endif
