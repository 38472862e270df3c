/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_BASE_MEMORY_LIMIT_H
#define KVD_DAEMON_BASE_MEMORY_LIMIT_H

/*
 * How much memory this process may use: the machine's, or less if its cgroup or a parent of that
 * has a limit. Supports versions 1 and 2 of cgroups. root is put before /proc and /sys: "", or a
 * folder of a test.
 */

#include <stdbool.h>
#include <stdint.h>

#include "ipc/base/why.h"

struct memory_limit {
        uint64_t bytes;  /* UINT64_MAX: none */
        bool soft;       /* memory.high: beyond it, processes are slowed down, not killed */
        char group[256]; /* path of the cgroup with this limit; may be cut */
};

/* The lowest limit of the process's cgroup and all its parents. */
void memory_limit_read(const char *root, struct memory_limit *ret);

/* Bytes: that limit, or the machine's memory if that is less. */
uint64_t memory_usable(const char *root);

/* Number of processes that the kernel has killed for lack of memory, in any cgroup. */
uint64_t memory_oom_kills(const char *root);

/* Is a pool of host memory larger than the limit? If so, why has a line about it. */
bool memory_limit_exceeded(const struct memory_limit *limit, uint64_t pool, struct kvd_why *why);

#endif
