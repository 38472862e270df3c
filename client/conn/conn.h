/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_CONN_CONN_H
#define KVD_CLIENT_CONN_CONN_H

/*
 * A connection to the daemon: one request, one reply. Not for several threads at once: libkvd puts
 * a lock around it, kvctl has one thread. Errors are negative errno with kvd_error() text; the
 * daemon's own refusals come with its words.
 */

#include "client/conn/server_user.h"
#include "ipc/frame.h"
#include "ipc/msg.h"

struct conn;

/*
 * path as in kvd_open; user is whose the server must be; name is what kvctl clients shows. Ends by
 * a deadline (deadline.h). conn_open: the usual one, and server_user_find(NULL).
 */
int conn_open_by(const char *path, const struct server_user *user, const char *name,
                 uint64_t deadline_ns, struct conn **ret);
int conn_open(const char *path, const char *name, struct conn **ret);
struct conn *conn_close(struct conn *conn); /* NULL is fine; returns NULL */

/*
 * Sends a request (struct kvd_msg_X by its number) and decodes the reply into reply (struct
 * kvd_msg_X_reply; NULL: not wanted), whose slices live until the next call. -ECONNRESET: the
 * daemon is gone, and so is the connection: further calls return -ENOTCONN. -ETIMEDOUT: no answer
 * within the deadline; the connection stays, a late answer is undone.
 */
int conn_call(struct conn *conn, uint32_t number, const void *request, void *reply);

/*
 * The same by a deadline of the caller's, taking descriptors that came with the reply: the caller's
 * to close. fds NULL: they are closed.
 */
int conn_call_by(struct conn *conn, uint64_t deadline_ns, uint32_t number, const void *request,
                 void *reply, struct kvd_fds *fds);

/* Sends what has no reply, if there is room for it now. */
void conn_tell(struct conn *conn, uint32_t number);

bool conn_is_open(const struct conn *conn);
/* asks the kernel whether the other end is there still */
bool conn_has_peer(const struct conn *conn);
/* the last call was sent and not answered: it may have been done */
bool conn_in_doubt(const struct conn *conn);
const char *conn_path(const struct conn *conn);
/* path, or if it is NULL or "" what conn_open takes instead of it */
const char *conn_choose_path(const char *path);
/* its strings live as long as conn */
const struct kvd_msg_attach_reply *conn_peer(const struct conn *conn);

#endif
