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

/* Formats the line, truncated if it is too long. */
_printf_(2, 3) void kvd_say_why(struct kvd_why *why, const char *format, ...);

/* Stores the line, and has the value error. A macro, so that compilers see that this is not 0. */
#define kvd_refuse(why, error, ...) \
        ({ \
                int error_ = (error); \
                kvd_say_why(why, __VA_ARGS__); \
                error_; \
        })

#endif
