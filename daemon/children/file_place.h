/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CHILDREN_FILE_PLACE_H
#define KVD_DAEMON_CHILDREN_FILE_PLACE_H

/*
 * Whether an open file is still where it was opened. The kernel knows its path (/proc/self/fd), so
 * no request goes to the file system, which may hang.
 */

#include <stdbool.h>

struct file_place {
        char path[1024]; /* truncated if it is longer; "": unknown */
};

void file_place_note(struct file_place *place, int fd);
/* False: the file, or a folder that it is in, was deleted, moved or replaced. */
bool file_place_holds(const struct file_place *place, int fd);

#endif
