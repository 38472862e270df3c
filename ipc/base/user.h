/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_USER_H
#define KVD_BASE_USER_H

/* Users, as the kernel numbers them. */

#include <sys/types.h>

/*
 * The number that the kernel gives users who have none here; UINT32_MAX: all of them have one.
 */
uid_t user_overflow(void);

#endif
