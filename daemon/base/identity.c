/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A daemon that root starts by hand becomes another user before it accepts clients. A service
 * manager starts it as that user, and then this file does nothing.
 */

#include "daemon/base/identity.h"

#include <errno.h>
#include <grp.h>
#include <linux/capability.h>
#include <pwd.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/base/degraded.h"
#include "daemon/base/log.h"
#include "ipc/base/util.h"

#define USUAL_USER "kvd"

/* A user without a passwd entry gets the group of the same number, and no other groups. */
static void describe(const struct passwd *entry, uid_t uid, struct identity *ret) {
        *ret = (struct identity){.uid = uid, .gid = uid, .has_entry = entry};
        if (entry) {
                ret->gid = entry->pw_gid;
                snprintf(ret->name, sizeof ret->name, "%s", entry->pw_name);
        } else {
                snprintf(ret->name, sizeof ret->name, "%u", uid);
        }
}

static void choose_usual(struct identity *ret) {
        const struct passwd *entry = getpwnam(USUAL_USER);

        if (entry)
                describe(entry, entry->pw_uid, ret);
        else
                log_warning("started by root, and there is no user " USUAL_USER ": kvd goes on as "
                            "root; give it another user with --user");
        degraded_set(as_root, !entry);
}

int identity_choose(const struct config *config, bool private, struct identity *ret,
                    struct kvd_why *why) {
        uid_t own = geteuid();

        *ret = (struct identity){.stays = true};
        if (config->user == UINT32_MAX) {
                if (own == 0 && !private)
                        choose_usual(ret);
                return 0;
        }
        if (config->user == own)
                return 0;
        if (private)
                return kvd_refuse(
                        why, -EINVAL,
                        "--private serves the user who starts it; leave out the option user, or start it as that user");
        if (own != 0)
                return kvd_refuse(
                        why, -EINVAL,
                        "only root can become user %u; leave out the option user, or start kvd as root or as that user",
                        config->user);
        describe(getpwuid(config->user), config->user, ret);
        return 0;
}

/* setresuid has dropped them already, unless securebits (capabilities(7)) prevent that. */
static int drop_capabilities(void) {
        struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
        struct __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = {{0}};

        return (int)syscall(SYS_capset, &header, none);
}

int identity_take(const struct identity *i, struct kvd_why *why) {
        int r;

        if (i->stays)
                return 0;
        r = i->has_entry ? initgroups(i->name, i->gid) : setgroups(0, NULL);
        if (r < 0 || setresgid(i->gid, i->gid, i->gid) < 0 ||
            setresuid(i->uid, i->uid, i->uid) < 0 || drop_capabilities() < 0 ||
            prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
                return kvd_refuse(why, negative_errno(),
                                  "cannot become user %s: %s; with --user root kvd stays root",
                                  i->name, strerror(errno));
        log_info("goes on as user %s", i->name);
        return 0;
}
