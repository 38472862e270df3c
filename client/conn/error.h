/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_CONN_ERROR_H
#define KVD_CLIENT_CONN_ERROR_H

#include "ipc/base/why.h"

extern _Thread_local struct kvd_why client_why;

/* Keeps one line for kvd_error() of this thread and returns the error. */
#define client_fail(...) kvd_refuse(&client_why, __VA_ARGS__)
#define daemon_fail(error, ...) client_fail(error, "the daemon sent unusable data: " __VA_ARGS__)

#endif
