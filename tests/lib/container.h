/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_CONTAINER_H
#define KVD_TESTS_CONTAINER_H

/* Containers as kvd sees them, which are namespaces, and the older kernels that they may run on. */

#include <stdbool.h>
#include <sys/types.h>

/* Says on standard error why namespaces cannot be made here. */
bool container_is_possible(void);

/*
 * fork(), with new user, pid, mount and net namespaces. The child is process 1 and, in its user
 * namespace, root. Its /proc shows only its own processes, if a new /proc may be mounted.
 */
pid_t container_fork(void);

/*
 * From here on, getsockopt and setsockopt fail for this option of SOL_SOCKET with ENOPROTOOPT, as
 * on a kernel that does not know it, in this process and its children.
 */
void forget_socket_option(int option);

#endif
