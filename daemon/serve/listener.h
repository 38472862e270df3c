/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SERVE_LISTENER_H
#define KVD_DAEMON_SERVE_LISTENER_H

/* The socket that clients connect to: ours at a path, or one that the service manager keeps. */

#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "ipc/base/why.h"

struct config;
struct identity;

struct listener {
        int fd;           /* owned; -1: none */
        char path[108];   /* removed at the end, if file is still there; "": not ours to remove */
        struct stat file; /* what we made at path */
};

#define LISTENER_NONE ((struct listener){.fd = -1})

/*
 * Binds the configured path for that user, whom this process then becomes; what is started from
 * there on, and whoever looks at the socket, sees him. A socket that a dead daemon left behind is
 * replaced; a living one's is refused with -EADDRINUSE. The reason of a failure is in why, in one
 * line.
 */
int listener_open_as(struct listener *listener, const struct config *config,
                     const struct identity *who, struct kvd_why *why);
/* A socket in a folder where we may not write stays, and the next listener_open_as removes it. */
void listener_close(struct listener *listener);

#endif
