/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_LISTEN_H
#define KVCTL_LISTEN_H

/* Where to be asked: a Unix socket, or a port. */

#include <stdbool.h>

#include "ipc/base/why.h"

struct listener {
        int fd;         /* owned; -1 */
        char path[108]; /* of a Unix socket, which goes with it; "": it is a port */
        char name[160]; /* as people write it */
};

#define LISTENER_NONE ((struct listener){.fd = -1})

/*
 * address: /a/path, PORT or ADDRESS:PORT. Ports that other machines reach are refused, unless
 * everybody says that this is meant. 0; negative, with the reason in why.
 */
int listener_open(const char *address, bool everybody, struct listener *ret, struct kvd_why *why);
void listener_close(struct listener *listener);

#endif
