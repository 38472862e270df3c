/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_CONN_CONN_H
#define KVD_CLIENT_CONN_CONN_H

/*
 * A connection to the daemon: one request, one reply. Not thread-safe: libkvd puts a lock around
 * it, kvctl has one thread. Errors are negative errno with kvd_error() text; if the daemon refuses
 * a request, the text is the daemon's.
 */

#include "client/conn/server_user.h"
#include "ipc/frame.h"
#include "ipc/msg.h"

struct conn;

/*
 * path is as in kvd_open; user is the expected user of the server; kvctl clients shows name.
 * Returns by the deadline (deadline.h). conn_open uses the default deadline and
 * server_user_find(NULL).
 */
int conn_open_by(const char *path, const struct server_user *user, const char *name,
                 uint64_t deadline_ns, struct conn **ret);
int conn_open(const char *path, const char *name, struct conn **ret);
struct conn *conn_close(struct conn *conn); /* NULL is fine; returns NULL */

/*
 * Sends a request (struct kvd_msg_X by its number) and decodes the reply into reply (struct
 * kvd_msg_X_reply; NULL: not wanted), whose slices live until the next call. -ECONNRESET: the
 * connection has ended, and further calls return -ENOTCONN. -ETIMEDOUT: no reply within the
 * deadline; the connection stays open, and a late reply is undone.
 */
int conn_call(struct conn *conn, uint32_t number, const void *request, void *reply);

/*
 * The same with a deadline of the caller. fds receives the descriptors of the reply, which the
 * caller closes; if fds is NULL, they are closed here.
 */
int conn_call_by(struct conn *conn, uint64_t deadline_ns, uint32_t number, const void *request,
                 void *reply, struct kvd_fds *fds);

/* Sends a message that has no reply, if there is room for it now. */
void conn_tell(struct conn *conn, uint32_t number);

bool conn_is_open(const struct conn *conn);
/* asks the kernel whether the other end is still open */
bool conn_has_peer(const struct conn *conn);
/* the last request was sent and not answered: the daemon may have executed it */
bool conn_in_doubt(const struct conn *conn);
const char *conn_path(const struct conn *conn);
/* path, or if it is NULL or "" the one that conn_open uses instead */
const char *conn_choose_path(const char *path);
/* its strings are valid as long as conn */
const struct kvd_msg_attach_reply *conn_peer(const struct conn *conn);

#endif
