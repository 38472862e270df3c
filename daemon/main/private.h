/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_MAIN_PRIVATE_H
#define KVD_DAEMON_MAIN_PRIVATE_H

#include <sys/types.h>

#include "ipc/base/why.h"

/*
 * kvd --private: creates the folder if it is missing, refuses one to which others may write, and
 * makes this process end when its parent does. parent: getppid() when the process started.
 */
int private_prepare(const char *folder, pid_t parent, struct kvd_why *why);

#endif
