/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_REQUESTS_H
#define KVCTL_REQUESTS_H

/*
 * Recorded requests of a service, in the form of Mooncake's traces: a JSON object per line, whose
 * hash_ids number the blocks of a prompt. Equal numbers mean equal prefixes. kvctl trace writes
 * lookups in this form; its other events are skipped.
 */

#include <stddef.h>

#include "ipc/base/why.h"

struct requests {
        uint64_t *blocks; /* owned; of all requests, one after the other */
        size_t n_blocks;
        size_t *ends; /* owned; index in blocks at which each request ends */
        size_t n;
        size_t blocks_room, ends_room;
};

#define REQUESTS_NONE ((struct requests){.blocks = NULL})

/* path: "-" is the standard input. 0, -EINVAL or -EIO, with the reason (and the line) in why. */
int requests_read(const char *path, struct requests *ret, struct kvd_why *why);

/* Adds a request of n blocks. NULL, or what is wrong, as text to follow the request's name. */
const char *requests_add(struct requests *requests, const uint64_t *blocks, size_t n);

void requests_clear(struct requests *requests);

#endif
