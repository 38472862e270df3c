/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_BASE_MEMORY_LIMIT_H
#define KVD_DAEMON_BASE_MEMORY_LIMIT_H

/*
 * How much memory this process may use: the machine's, or less if its cgroup, or one above that,
 * has a limit. Versions 1 and 2 of cgroups are known. root is where the folders proc and sys are:
 * "", or a test's own.
 */

#include <stdbool.h>
#include <stdint.h>

#include "ipc/base/why.h"

struct memory_limit {
        uint64_t bytes;  /* UINT64_MAX: none */
        bool soft;       /* memory.high: who exceeds it is slowed down, not ended */
        char group[256]; /* the cgroup that has it, as a path in its hierarchy, or its beginning */
};

/* The least of the limits of the process's own cgroup and of all above it. */
void memory_limit_read(const char *root, struct memory_limit *ret);

/* Bytes: the least of that and of what the machine has. */
uint64_t memory_usable(const char *root);

/* Processes that the kernel has killed for want of memory, in any cgroup. */
uint64_t memory_oom_kills(const char *root);

/* Whether a pool of host memory is more than the limit; then one line says so in why. */
bool memory_limit_exceeded(const struct memory_limit *limit, uint64_t pool, struct kvd_why *why);

#endif
