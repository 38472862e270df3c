/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Checks the server's user, which the kernel reports: a path that others can write to proves
 * nothing. Only root and our own user can listen as such, and only root and the owner can listen in
 * a folder that root gave to a user. Any other user must be stated.
 */

#include "client/conn/server_user.h"

#include <ctype.h>
#include <errno.h>
#include <pwd.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/conn/error.h"
#include "ipc/base/sys.h"
#include "ipc/base/user.h"
#include "ipc/base/util.h"

/* ---- the stated user ------------------------------------------------------------------------- */

static bool is_number(const char *text, uid_t *ret) {
        unsigned long long number;
        char *end;

        if (!isdigit((unsigned char)*text))
                return false;
        number = strtoull(text, &end, 10);
        *ret = (uid_t)number;
        return !*end && number < UINT32_MAX;
}

static bool is_known(const char *name, uid_t *ret) {
        struct passwd entry, *found = NULL;
        char room[16384];

        if (getpwnam_r(name, &entry, room, sizeof room, &found) != 0 || !found)
                return false;
        *ret = found->pw_uid;
        return true;
}

int server_user_find(const char *name, struct server_user *ret) {
        const char *stated = name && *name ? name : secure_getenv("KVD_SERVER_USER");

        *ret = (struct server_user){.stated = stated && *stated};
        if (!stated || !*stated || is_number(stated, &ret->uid) || is_known(stated, &ret->uid))
                return 0;
        return client_fail(-EINVAL,
                           "no user is called \"%s\": name the kvd's user or give its number",
                           stated);
}

/* ---- the server's user ----------------------------------------------------------------------- */

/* Can only root and this user create or rename files in it? Links are not followed. */
static bool is_closed(const char *folder, uid_t user) {
        struct stat st;

        return lstat(folder, &st) == 0 && S_ISDIR(st.st_mode) &&
               !(st.st_mode & (S_IWGRP | S_IWOTH)) && (st.st_uid == 0 || st.st_uid == user);
}

/* Only root can change the folders above the socket's, so root gave that one to the user. */
static bool is_given_to(const char *path, uid_t user) {
        char folder[sizeof((struct sockaddr_un *)0)->sun_path] = "/";
        const char *slash = path[0] == '/' ? path : NULL, *next;

        for (; slash; slash = next) {
                size_t n = (size_t)(slash - path);

                if (n >= sizeof folder)
                        return false;
                memcpy(folder, path, n);
                folder[n ? n : 1] = 0;
                next = strchr(slash + 1, '/');
                if (!is_closed(folder, next ? 0 : user))
                        return false;
        }
        return path[0] == '/';
}

static bool is_expected(const struct server_user *expected, uid_t server, const char *path) {
        if (server == 0)
                return true;
        if (expected->stated)
                return server == expected->uid;
        if (server == user_overflow()) /* any user that this user namespace does not map */
                return false;
        return server == geteuid() || is_given_to(path, server);
}

int server_user_check(const struct server_user *expected, int socket, const char *path) {
        struct ucred server;
        unsigned n = sizeof server;

        if (sys->getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &server, &n) < 0)
                return client_fail(negative_errno(),
                                   "cannot determine the user of the kvd at %s: %s", path,
                                   strerror(errno));
        if (is_expected(expected, server.uid, path))
                return 0;
        if (expected->stated)
                return client_fail(
                        -EPERM, "the kvd at %s runs as user %u, but user %u (or root) was expected",
                        path, server.uid, expected->uid);
        return client_fail(-EPERM,
                           "the kvd at %s runs as user %u, neither as root nor as user %u like "
                           "this process: if you trust user %u, set KVD_SERVER_USER=%u",
                           path, server.uid, geteuid(), server.uid, server.uid);
}
