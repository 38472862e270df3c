/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_KEEPER_MAILBOX_H
#define KVD_DAEMON_PROCESS_KEEPER_MAILBOX_H

/* Where one daemon tells its keeper how it is, and what to keep: $NOTIFY_SOCKET of sd_notify(3). */

#include <stdbool.h>
#include <sys/types.h>

struct mailbox {
        int fd;                    /* owned; -1: closed */
        char folder[64], path[80]; /* removed as soon as the daemon has connected; "": is so */
};

#define MAILBOX_CLOSED ((struct mailbox){.fd = -1})
#define MAIL_MAX 1024u

struct mail {
        char text[MAIL_MAX]; /* lines, without the last newline's */
        int fd;              /* owned by whoever received it; -1: none came */
};

int mailbox_open(struct mailbox *box);
void mailbox_close(struct mailbox *box);

/*
 * The next message of that process. 0; -EAGAIN: there is none; -EPERM: it was another's, or what is
 * no message, and is gone.
 */
int mailbox_receive(struct mailbox *box, pid_t from, struct mail *ret);

/* Is there that line? */
bool mail_has(const struct mail *mail, const char *line);
/* What is behind KEY=, cut to size; "": there is none. */
void mail_value(const struct mail *mail, const char *key, char *to, size_t size);

#endif
