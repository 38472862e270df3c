/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_CHILD_END_H
#define KVD_DAEMON_PROCESS_CHILD_END_H

/*
 * The other end of a child (daemon/children/child.h): a process that serves requests on the
 * descriptor SYS_SPAWN_FD, one at a time, and ends with its owner.
 */

#include "ipc/base/why.h"
#include "ipc/frame.h"
#include "ipc/msg.h"

/*
 * Serves a request. reply has its number and serial already. Negative: the reply is an error, with
 * the text of why, or of the errno if why is empty. Positive: the process cannot continue, and ends
 * with this errno. Descriptors that are left in fds are closed afterwards.
 */
typedef int asked_answer(const struct kvd_msg *question, struct kvd_fds *fds, struct kvd_msg *reply,
                         struct kvd_why *why);

/*
 * From now on the process ends with its owner, and ignores a terminal's signals. name: of the
 * process; option: that it was started with; what: its name in the log. Returns 0, or an exit
 * status if no owner started the process, or the owner is gone.
 */
int asked_begin(const char *name, const char *option, const char *what);

/* Serves requests until the owner is gone. Returns an exit status. */
int asked_serve(asked_answer *answer);

#endif
