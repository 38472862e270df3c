/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_ASKED_H
#define KVD_DAEMON_ASKED_H

/*
 * The other end of a child (child.h) that does one thing after the other: it answers questions, and
 * ends with its owner.
 */

#include "ipc/base/why.h"
#include "ipc/frame.h"
#include "ipc/msg.h"

/*
 * reply has its number and serial already. Negative: the answer is an error, with the words of
 * why, or the errno's if it has none. Descriptors that are left in fds are closed afterwards.
 */
typedef int asked_answer(const struct kvd_msg *question, struct kvd_fds *fds,
                         struct kvd_msg *reply, struct kvd_why *why);

/* name: of the process; option: how it was started; what: in the log. Returns an exit status. */
int asked_main(const char *name, const char *option, const char *what, asked_answer *answer);

#endif
