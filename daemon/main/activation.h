/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_MAIN_ACTIVATION_H
#define KVD_DAEMON_MAIN_ACTIVATION_H

/* What a service manager has handed over: the socket, and what the daemon before had it keep. */

#include <stddef.h>

#include "ipc/base/why.h"
#include "store/keep.h"

struct activation {
        int listen;              /* owned; -1: none */
        struct kept_file *files; /* owned, and so are their descriptors */
        size_t n;
};

#define ACTIVATION_NONE ((struct activation){.listen = -1})

/*
 * Takes what sd_listen_fds(3) describes: LISTEN_FDNAMES=listen is the socket, and names with a dot
 * are what was kept; the rest is closed. All are close-on-exec, and the variables are gone
 * afterwards. -EINVAL: the socket is not usable, or is not among them; in why.
 */
int activation_take(struct activation *ret, struct kvd_why *why);
void activation_clear(struct activation *activation);

#endif
