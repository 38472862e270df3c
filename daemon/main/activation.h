/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_MAIN_ACTIVATION_H
#define KVD_DAEMON_MAIN_ACTIVATION_H

/* Descriptors from a service manager: the socket, and those kept for the previous daemon. */

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
 * Takes the descriptors that sd_listen_fds(3) describes. The one named listen is the socket, those
 * with a dot in their names were kept, and all others are closed. They become close-on-exec, and
 * the environment variables are removed. -EINVAL, with the reason in why: the socket is not usable,
 * or there are neither a socket nor kept descriptors.
 */
int activation_take(struct activation *ret, struct kvd_why *why);
void activation_clear(struct activation *activation);

#endif
