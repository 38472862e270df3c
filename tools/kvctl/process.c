/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Asks the kernel about a client's process. The daemon does not know: a client that only looks up
 * sends it nothing, stopped or not.
 */

#include "tools/kvctl/process.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/base/util.h"

bool process_is_stopped(uint32_t pid, uint32_t uid) {
        _cleanup_(closep) int fd = -1;
        char text[512] = "";
        const char *end;
        struct stat st;

        snprintf(text, sizeof text, "/proc/%u/stat", pid);
        fd = open(text, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || fstat(fd, &st) < 0 || st.st_uid != uid)
                return false;
        text[MAX(read(fd, text, sizeof text - 1), 0)] = 0;
        end = strrchr(text, ')'); /* ends the program's name, which may contain anything */
        return end && strlen(end) > 2 && (end[2] == 'T' || end[2] == 't');
}
