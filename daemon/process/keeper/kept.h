/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_KEEPER_KEPT_H
#define KVD_DAEMON_PROCESS_KEEPER_KEPT_H

/* Descriptors by name, which outlive the process that sent them. */

#include <stddef.h>
#include <stdint.h>

#define KEPT_FIRST 64 /* number of the first one; all others of the keeper are below */
#define KEPT_NAME_MAX 96u

struct kept {
        char (*names)[KEPT_NAME_MAX + 1]; /* owned; names[i] belongs to descriptor KEPT_FIRST + i */
        uint32_t n, max;
        size_t bytes; /* size of the names, with a colon each */
};

/* Closes all descriptors from KEPT_FIRST on. RLIMIT_NOFILE limits how many are kept. */
int kept_init(struct kept *kept);
void kept_clear(struct kept *kept);

/*
 * Takes ownership of fd, even on failure. Several descriptors may have the same name. -ENOSPC: no
 * more can be kept; -EINVAL: invalid name.
 */
int kept_add(struct kept *kept, const char *name, int fd);
void kept_remove(struct kept *kept, const char *name);
/* Removes all but the first n. */
void kept_cut(struct kept *kept, uint32_t n);

/*
 * Call it in a child, before it runs another program. Moves the descriptors to 3 and up, as in
 * sd_listen_fds(3), closes all others but the standard ones, and sets the environment for them.
 */
int kept_hand_over(const struct kept *kept);

#endif
