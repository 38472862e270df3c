/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_LISTEN_H
#define KVCTL_LISTEN_H

/* A listening socket, at a path or a port. */

#include <stdbool.h>

#include "ipc/base/why.h"

struct listener {
        int fd;         /* owned; -1 if none */
        char path[108]; /* of a Unix socket, removed when it is closed; "" for a port */
        char name[160]; /* path or URL, for people */
};

#define LISTENER_NONE ((struct listener){.fd = -1})

/*
 * address: /a/path, PORT or ADDRESS:PORT. Addresses that other machines can reach are refused
 * unless everybody is true. 0; negative, with the reason in why.
 */
int listener_open(const char *address, bool everybody, struct listener *ret, struct kvd_why *why);
void listener_close(struct listener *listener);

#endif
