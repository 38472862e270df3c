/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_LISTENER_H
#define KVD_DAEMON_LISTENER_H

/* The socket that clients connect to: ours at a path, or one that the service manager keeps. */

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "ipc/base/why.h"

struct listener {
        int fd;         /* owned; -1: none */
        char path[108]; /* removed at the end; "": not ours to remove */
};

#define LISTENER_NONE ((struct listener){.fd = -1})

/*
 * Binds path. A socket that a dead daemon left behind is replaced; a living one's is refused with
 * -EADDRINUSE. group UINT32_MAX: leave it. The reason of a failure is in why, in one line.
 */
int listener_open(struct listener *listener, const char *path, mode_t mode, gid_t group,
                  struct kvd_why *why);
void listener_close(struct listener *listener);

#endif
