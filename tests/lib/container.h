/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_CONTAINER_H
#define KVD_TESTS_CONTAINER_H

/* Containers, as far as kvd sees them: namespaces; and the kernels on which they run. */

#include <stdbool.h>
#include <sys/types.h>

/* Says on standard error why namespaces cannot be made here. */
bool container_is_possible(void);

/*
 * fork(), with user, pid, mount and net namespaces of its own: the child is process 1, and root if
 * its user namespace is asked. Only its own processes are in its /proc.
 */
pid_t container_fork(void);

/*
 * From here on, this process and its children run on a kernel that does not know this option of
 * sockets (SOL_SOCKET).
 */
void forget_socket_option(int option);

#endif
