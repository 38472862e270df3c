/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_BASE_TRUSTED_H
#define KVD_DAEMON_BASE_TRUSTED_H

/*
 * Opens whatever the configuration names, and the configuration itself. A file that another user
 * could read or change is refused by name: its path alone says nothing about its owner.
 *
 *      kind           owner            mode                     hard links
 *      CONFIG         root or us       go-w                     1
 *      PUBLIC         root or us       go-w                     1
 *      LIBRARY        root or us       go-w                     any: package managers make them
 *      SECRET         root or us       0600, or root's 0640     1
 *      DATA           us               0600                     1
 *        ... device   root or us       o=                       1
 *
 * All are regular files, but DATA may be a block device, and CONFIG a pipe (a shell's <(...)) or
 * /dev/null. A link is followed if it belongs to root or us.
 */

#include <sys/types.h>

#include "ipc/base/why.h"

enum trust {
        TRUST_CONFIG,
        TRUST_PUBLIC,
        TRUST_LIBRARY, /* the mode of these three: go-w */
        TRUST_SECRET,
        TRUST_DATA
};

struct trusted {
        const char *setting, *path; /* as in the refusal */
        enum trust trust;
        uid_t user; /* counts as us, in addition to the effective user: kvd becomes it */
};

#define TRUSTED_NOT (-EKEYREJECTED) /* the file was opened, and is refused */

/* flags: as for open(2); a file that O_CREAT makes has mode 0600. A descriptor, or an errno. */
int trusted_open(const struct trusted *t, int flags, struct kvd_why *why);

/* The folder of a socket, unless that is abstract: only root and we may replace what is in it. */
int trusted_socket(const char *path, uid_t user, struct kvd_why *why);

#endif
