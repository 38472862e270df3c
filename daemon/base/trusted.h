/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_BASE_TRUSTED_H
#define KVD_DAEMON_BASE_TRUSTED_H

/*
 * Opens the configuration and the files that it names. A file that another user could change, or
 * read if it is secret, is refused, since its path does not tell who owns it.
 *
 *      kind           owner            mode                     hard links
 *      CONFIG         root or us       go-w                     1
 *      PUBLIC         root or us       go-w                     1
 *      LIBRARY        root or us       go-w                     any: package managers make them
 *      SECRET         root or us       0600, or root's 0640     1
 *      DATA           us               0600                     1
 *        ... device   root or us       o=                       1
 *
 * All must be regular files, except that DATA may be a block device, and CONFIG a pipe (a shell's
 * <(...)) or /dev/null. A symbolic link is followed if it belongs to root or us.
 */

#include <sys/types.h>

#include "ipc/base/why.h"

enum trust {
        TRUST_CONFIG,
        TRUST_PUBLIC,
        TRUST_LIBRARY, /* these first three: mode go-w */
        TRUST_SECRET,
        TRUST_DATA
};

struct trusted {
        const char *setting, *path; /* both appear in a refusal */
        enum trust trust;
        uid_t user; /* that kvd becomes; counts as us, like the effective user */
};

#define TRUSTED_NOT (-EKEYREJECTED) /* the file exists, and is refused */

/* flags: as for open(2); O_CREAT creates with mode 0600. A descriptor, or a negative errno. */
int trusted_open(const struct trusted *t, int flags, struct kvd_why *why);

/* Checks that only root and we may replace files in the socket's folder, unless it is abstract. */
int trusted_socket(const char *path, uid_t user, struct kvd_why *why);

#endif
