/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_NUMA_H
#define KVD_BASE_NUMA_H

/* Memory of hosts with several NUMA nodes: which node is near, and where shared memory is. */

#include <stdint.h>

/*
 * The nodes with processors of which this process may have memory, as a mask of the first 64. 0:
 * only one, or the process has a memory policy already (numactl, NUMAPolicy= of its unit), which
 * decides.
 */
uint64_t numa_nodes(void);

/* The node of all processors that this thread may use; -1: they are of several nodes, or unknown. */
int numa_here(void);

/*
 * Pages that this part of a file gets from now on are of this node while it has memory, in whatever
 * process they are first used. The bounds are multiples of pages. -errno: the kernel or a seccomp
 * filter refuses.
 */
int numa_place(int fd, uint64_t from, uint64_t bytes, uint32_t node);
int numa_node_of(int fd); /* of the beginning of the file; -1: of none in particular */

#endif
