/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_WHY_H
#define KVD_BASE_WHY_H

/*
 * An error is a negative errno, which is returned, and one line of text for people, which is
 * stored: what is wrong, and what to do. A module whose functions can fail has a struct kvd_why, or
 * is passed one.
 *
 *      return kvd_refuse(&store->why, -ENOENT, "there is no space '%s'", name);
 */

#include "ipc/base/util.h"

struct kvd_why {
        char line[512]; /* "" if nothing was refused yet */
};

/* Formats the line, truncated if it is too long. Returns error. */
_printf_(3, 4) int kvd_refuse(struct kvd_why *why, int error, const char *format, ...);

#endif
