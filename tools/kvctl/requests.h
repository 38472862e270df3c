/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_REQUESTS_H
#define KVCTL_REQUESTS_H

/*
 * What somebody wrote down of a service's requests, in the form of Mooncake's traces: a JSON object
 * a line, whose hash_ids number the blocks of a prompt. Equal numbers are equal prefixes. kvctl
 * trace writes them so; of what else it tells, nothing is read.
 */

#include <stddef.h>

#include "ipc/base/why.h"

struct requests {
        uint64_t *blocks; /* owned: of all of them, one behind the other */
        size_t n_blocks;
        size_t *ends;     /* owned: where each one ends in it */
        size_t n;
        size_t blocks_room, ends_room;
};

#define REQUESTS_NONE ((struct requests){.blocks = NULL})

/* path: "-" is the standard input. -ENOENT, -EINVAL (with the line), -ENOMEM. */
int requests_read(const char *path, struct requests *ret, struct kvd_why *why);

/* One more of n blocks. NULL, or what is wrong with it, to follow its name. */
const char *requests_add(struct requests *requests, const uint64_t *blocks, size_t n);

void requests_clear(struct requests *requests);

#endif
