/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_CONN_SERVER_USER_H
#define KVD_CLIENT_CONN_SERVER_USER_H

/* The user that the server must run as. kvd_open documents the rule. */

#include <stdbool.h>
#include <sys/types.h>

struct server_user {
        bool stated; /* the caller named uid: only that user and root are trusted */
        uid_t uid;
};

/*
 * name: name or number of a user; NULL or "": $KVD_SERVER_USER, and if that is not set, no user is
 * stated. -EINVAL, with kvd_error() text: there is no such user.
 */
int server_user_find(const char *name, struct server_user *ret);

/* Checks a socket that is connected to path. -EPERM, with kvd_error() text: another user. */
int server_user_check(const struct server_user *expected, int socket, const char *path);

#endif
