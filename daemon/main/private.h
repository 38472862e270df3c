/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_MAIN_PRIVATE_H
#define KVD_DAEMON_MAIN_PRIVATE_H

#include <sys/types.h>

#include "ipc/base/why.h"

/*
 * kvd --private: makes the folder if it is missing, refuses one where others may write, and has
 * this process end with the one that started it, which was parent when we began.
 */
int private_prepare(const char *folder, pid_t parent, struct kvd_why *why);

#endif
