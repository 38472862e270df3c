/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_USER_H
#define KVD_BASE_USER_H

/* Kernel uids. */

#include <sys/types.h>

/* The uid that stands for all users without one in this namespace; UINT32_MAX: there are none. */
uid_t user_overflow(void);

#endif
