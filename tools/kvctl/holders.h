/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_HOLDERS_H
#define KVCTL_HOLDERS_H

/* What clients keep from eviction: blocks that they write or pin, and those before pinned ones. */

#include "tools/kvctl/map.h"

struct holder {
        uint32_t client, pid;
        char name[64], domain[64];
        uint64_t pinned_bytes, filling_bytes;
};

struct holders {
        struct holder *holders; /* owned */
        size_t n;
};

/* The clients that hold anything, the largest first. */
int holders_read(struct kvctl *kvctl, struct maps *maps, struct holders *ret);
void holders_clear(struct holders *holders);
/* 0 if the client holds nothing */
uint64_t holders_bytes(const struct holders *holders, const struct kvd_msg_client_info_reply *info);

/* If nearly all of the pool is held, adds a sentence that names the largest holders. */
void holders_say(struct answer *answer, const struct holders *holders, uint64_t held,
                 uint64_t pool_bytes);
/* The same, but reads the holders itself if they are needed. */
int holders_say_full(struct kvctl *kvctl, struct answer *answer, struct maps *maps,
                     uint64_t pool_bytes);

#endif
