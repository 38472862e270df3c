/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_BASE_IDENTITY_H
#define KVD_DAEMON_BASE_IDENTITY_H

/* The user that the daemon becomes if root starts it by hand. */

#include <stdbool.h>
#include <sys/types.h>

#include "daemon/base/config.h"

struct identity {
        bool stays; /* the user does not change; no other field is set */
        uid_t uid;
        gid_t gid;
        char name[64]; /* the number if the user has no passwd entry */
        bool has_entry;
};

/*
 * Chooses the user of option user. For root without that option: the user kvd, or, if there is
 * none, root, with a warning. private: kvd --private, which keeps its user. -EINVAL: the option
 * cannot be followed.
 */
int identity_choose(const struct config *config, bool private, struct identity *ret,
                    struct kvd_why *why);

/* Makes the process, and all its children, that user, for good and without capabilities. */
int identity_take(const struct identity *identity, struct kvd_why *why);

#endif
