/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The promises of --private: the folder belongs to the user, and kvd ends with the process that
 * started it. Daemon and keeper call this before they open the socket.
 */

#include "daemon/main/private.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

/*
 * Asks for SIGTERM when the parent ends (on Linux: the thread that started us). -ESRCH: it has
 * already ended.
 */
static int bind_to_parent(pid_t parent) {
        if (prctl(PR_SET_PDEATHSIG, SIGTERM) < 0)
                return negative_errno();
        return getppid() == parent ? 0 : -ESRCH;
}

/* Does not follow a link. A trailing slash would make the kernel follow it, so that is removed. */
static int open_folder(const char *name) {
        _cleanup_(freep) char *bare = strdup(name);

        if (!bare)
                return -1;
        for (size_t n = strlen(bare); n > 1 && bare[n - 1] == '/'; n--)
                bare[n - 1] = 0;
        return open(bare, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/*
 * A user that may write to the folder could put its own socket there, and receive our clients'
 * requests. The folder may be /tmp, so the refusal does not advise to change its mode.
 */
static int check_private(const char *folder, struct kvd_why *why) {
        _cleanup_(closep) int fd = open_folder(folder);
        struct stat st;

        if (fd < 0 || fstat(fd, &st) < 0)
                return kvd_refuse(why, -EINVAL,
                                  "--private %s: %s; give a folder of your own, not a link to one",
                                  folder, strerror(errno));
        if (st.st_uid != geteuid())
                return kvd_refuse(why, -EINVAL,
                                  "--private %s: the folder is user %u's; give one of your own",
                                  folder, st.st_uid);
        if (st.st_mode & (S_IWGRP | S_IWOTH))
                return kvd_refuse(why, -EINVAL,
                                  "--private %s: others may write to the folder; give one of your "
                                  "own, such as %s/kvd-%u, which kvd makes",
                                  folder, folder, geteuid());
        return 0;
}

int private_prepare(const char *folder, pid_t parent, struct kvd_why *why) {
        int r;

        if (mkdir(folder, 0700) < 0 && errno != EEXIST)
                return kvd_refuse(why, -EINVAL,
                                  "--private %s: %s; give a folder that exists or can be made",
                                  folder, strerror(errno));
        r = check_private(folder, why);
        if (r < 0)
                return r;
        r = bind_to_parent(parent);
        if (r == -ESRCH)
                return kvd_refuse(why, r, "--private: the process that started kvd has ended");
        return r < 0 ? kvd_refuse(why, r, "--private: kvd would outlive its parent: %s",
                                  strerror(-r)) :
                       0;
}
