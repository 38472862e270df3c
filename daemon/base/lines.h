/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_BASE_LINES_H
#define KVD_DAEMON_BASE_LINES_H

/* Reads the lines of a configuration file. Bytes that an editor does not show are errors. */

#include <stdbool.h>
#include <stdio.h>

#include "ipc/base/why.h"

struct lines {
        const char *path;
        bool optional; /* the file may be missing */
        FILE *all;     /* receives a line for each fault; NULL: reading ends at the first fault */
        /* Called for each line that is neither empty nor a comment, without surrounding blanks. */
        int (*take)(void *data, char *line, unsigned number, struct kvd_why *why);
        void *data;
};

/* Negative: the last fault is in why, with its file and line number. */
int lines_read(const struct lines *lines, struct kvd_why *why);

char *lines_strip(char *s); /* removes surrounding blanks, in place */

#endif
