/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_BASE_LINES_H
#define KVD_DAEMON_BASE_LINES_H

/* Reads the lines of a configuration file. Bytes that an editor does not show are errors. */

#include <stdbool.h>
#include <stdio.h>

#include "ipc/base/why.h"

struct lines {
        const char *path;
        bool optional; /* a file that is missing is fine */
        FILE *all;     /* a line goes there for each fault; NULL: the first one ends the reading */
        /* Of each line that is neither empty nor a comment, without blanks around it. */
        int (*take)(void *data, char *line, unsigned number, struct kvd_why *why);
        void *data;
};

/* Negative: one line in why, of the last fault, with its file and number. */
int lines_read(const struct lines *lines, struct kvd_why *why);

char *lines_strip(char *s); /* cuts blanks around it */

#endif
