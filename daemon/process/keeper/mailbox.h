/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_KEEPER_MAILBOX_H
#define KVD_DAEMON_PROCESS_KEEPER_MAILBOX_H

/*
 * The socket for messages of a daemon to its keeper: its state, and descriptors to keep. It is the
 * $NOTIFY_SOCKET of sd_notify(3).
 */

#include <stdbool.h>
#include <sys/types.h>

struct mailbox {
        int fd;                    /* owned; -1: closed */
        char folder[64], path[80]; /* removed at the daemon's first message; "": removed */
};

#define MAILBOX_CLOSED ((struct mailbox){.fd = -1})
#define MAIL_MAX 1024u

struct mail {
        char text[MAIL_MAX]; /* lines, NUL-terminated */
        int fd;              /* owned by the receiver; -1: none */
};

int mailbox_open(struct mailbox *box);
void mailbox_close(struct mailbox *box);

/*
 * Receives the next message of process from. Returns 0; -EAGAIN: none has come; -EPERM: a message
 * was invalid, or from another process, and was dropped.
 */
int mailbox_receive(struct mailbox *box, pid_t from, struct mail *ret);

/* Does the message contain this line? */
bool mail_has(const struct mail *mail, const char *line);
/* Copies the value after KEY=, truncated to size; "" if there is no such key. */
void mail_value(const struct mail *mail, const char *key, char *to, size_t size);

#endif
