/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_ERROR_H
#define KVD_CLIENT_ERROR_H

#include "ipc/base/util.h"

/* Keeps one line for kvd_error() of this thread and returns the error. */
_printf_(2, 3) int client_fail(int error, const char *format, ...);

#endif
