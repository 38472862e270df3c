/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_BASE_IDENTITY_H
#define KVD_DAEMON_BASE_IDENTITY_H

/* As whom the daemon serves, if root has started it by hand. */

#include <stdbool.h>
#include <sys/types.h>

#include "daemon/base/config.h"

struct identity {
        bool stays; /* as it was started; nothing else is set */
        uid_t uid;
        gid_t gid;
        char name[64]; /* a number if the user has no entry */
        bool has_entry;
};

/*
 * The option user, or, for root without it, the user kvd if there is one; without one a line in the
 * log says what to do. private: of kvd --private, which stays what it is. -EINVAL: that cannot be.
 */
int identity_choose(const struct config *config, bool private, struct identity *ret,
                    struct kvd_why *why);

/* From here on the process and all its children are that user's, for good, without a capability. */
int identity_take(const struct identity *identity, struct kvd_why *why);

#endif
