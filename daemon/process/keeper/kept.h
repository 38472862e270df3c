/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_KEEPER_KEPT_H
#define KVD_DAEMON_PROCESS_KEEPER_KEPT_H

/* Descriptors by name, which outlive the process that sent them. */

#include <stddef.h>
#include <stdint.h>

#define KEPT_FIRST 64 /* the first one's number; whatever else the keeper has is below */
#define KEPT_NAME_MAX 96u

struct kept {
        char (*names)[KEPT_NAME_MAX + 1]; /* owned; the i-th is of descriptor KEPT_FIRST + i */
        uint32_t n, max;
        size_t bytes;                     /* of the names, with a colon each */
};

/* Closes whatever is open from KEPT_FIRST on. As many are kept as may be open. */
int kept_init(struct kept *kept);
void kept_clear(struct kept *kept);

/*
 * Takes fd over, also where it fails: -ENOSPC: no more are kept; -EINVAL: that is no name. Several
 * may have the same.
 */
int kept_add(struct kept *kept, const char *name, int fd);
void kept_remove(struct kept *kept, const char *name);
/* All but the first n. */
void kept_cut(struct kept *kept, uint32_t n);

/*
 * In a child, before it runs another program: they are its descriptors from 3 on, as of
 * sd_listen_fds(3), it has no others but the standard ones, and its environment says so.
 */
int kept_hand_over(const struct kept *kept);

#endif
