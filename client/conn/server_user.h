/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_CONN_SERVER_USER_H
#define KVD_CLIENT_CONN_SERVER_USER_H

/* Whose the server at the other end must be. What it means to users stands at kvd_open. */

#include <stdbool.h>
#include <sys/types.h>

struct server_user {
        bool stated; /* by the caller: only this one, and root */
        uid_t uid;
};

/*
 * name: of a user, or his number; NULL or "": $KVD_SERVER_USER, and if that is not set, nobody is
 * stated. -EINVAL, with the words said: there is no such user.
 */
int server_user_find(const char *name, struct server_user *ret);

/* Of a connected socket, and the path that it was found at. -EPERM, with the words said. */
int server_user_check(const struct server_user *expected, int socket, const char *path);

#endif
