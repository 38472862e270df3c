/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SERVE_LISTENER_H
#define KVD_DAEMON_SERVE_LISTENER_H

/* The socket that clients connect to: bound to a path here, or kept by the service manager. */

#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "ipc/base/why.h"

struct config;
struct identity;

struct listener {
        int fd;           /* owned; -1: none */
        char path[108];   /* removed at the end, if it is still that file; "": nothing to remove */
        struct stat file; /* the socket file created at path */
};

#define LISTENER_NONE ((struct listener){.fd = -1})

/*
 * Binds the configured path, and makes this process continue as user `who`. Clients see that user
 * as the socket's. Replaces a socket that a dead daemon left behind; -EADDRINUSE: a running daemon
 * serves it. why: the reason of an error, one line.
 */
int listener_open_as(struct listener *listener, const struct config *config,
                     const struct identity *who, struct kvd_why *why);
/*
 * A socket file in a folder without write permission stays; the next listener_open_as removes it.
 */
void listener_close(struct listener *listener);

#endif
