/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_PROFILE_H
#define KVCTL_PROFILE_H

/* A space's table of how many layers of a prefix are reused, as a file. */

#include <stdint.h>

#include "ipc/base/why.h"

#define PROFILE_RATIOS 101u /* 0 to 100 percent */

/* The table as one line, owned by the caller; NULL: out of memory. def: 1 or 2, as in ipc/msg.def. */
char *profile_line(const uint8_t depth[PROFILE_RATIOS], uint32_t def);
/* -EINVAL, with a line in why: the file is not such a table. */
int profile_read(const char *path, uint8_t depth[PROFILE_RATIOS], uint32_t *def,
                 struct kvd_why *why);

#endif
