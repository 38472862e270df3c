/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A lifeline is a pipe, not a socket: no descriptors can be sent through it, and its reading end
 * can be opened again through /proc, for a service manager that keeps each open file only once.
 */

#include "ipc/base/lifeline.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

/* Destroying the context of a process that maps a whole GPU takes a second or two. */
#define DELAY_NS UINT64_C(10000000000)

int lifeline_new(int *reading, int *writing) {
        int ends[2];

        if (sys->pipe(ends, O_CLOEXEC | O_NONBLOCK) < 0)
                return negative_errno();
        *reading = ends[0];
        *writing = ends[1];
        return 0;
}

int lifeline_reopen(int reading) {
        char path[32];
        int fd;

        snprintf(path, sizeof path, "/proc/self/fd/%d", reading);
        fd = sys->open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
        return fd < 0 ? negative_errno() : fd;
}

uint64_t lifeline_delay_ns(int fd) {
        struct stat st;

        return fstat(fd, &st) == 0 && S_ISFIFO(st.st_mode) ? DELAY_NS : 0;
}
