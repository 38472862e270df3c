/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_ASKED_H
#define KVD_DAEMON_PROCESS_ASKED_H

/*
 * The other end of a child (child.h): a process that answers one question after the other on the
 * descriptor SYS_SPAWN_FD, and ends with its owner.
 */

#include "ipc/base/why.h"
#include "ipc/frame.h"
#include "ipc/msg.h"

/*
 * reply has its number and serial already. Negative: the answer is an error, with the words of
 * why, or the errno's if it has none. Positive: it cannot go on, and the process ends with this
 * errno. Descriptors that are left in fds are closed afterwards.
 */
typedef int asked_answer(const struct kvd_msg *question, struct kvd_fds *fds,
                         struct kvd_msg *reply, struct kvd_why *why);

/*
 * Ends with the owner from now on, and leaves a terminal's signals to it. name: of the process;
 * option: how it was started; what: in the log. Returns 0, or the exit status of a process that
 * nobody, or nobody any more, has started so.
 */
int asked_begin(const char *name, const char *option, const char *what);

/* Answers until the owner is gone. Returns an exit status. */
int asked_serve(asked_answer *answer);

#endif
