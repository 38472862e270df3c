/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_HOLDERS_H
#define KVCTL_HOLDERS_H

/* Who keeps what from eviction: what clients write, what they pin, and what lies before that. */

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

/* Those that hold anything, the largest first. */
int holders_read(struct kvctl *kvctl, struct maps *maps, struct holders *ret);
void holders_clear(struct holders *holders);
/* 0: it holds nothing */
uint64_t holders_bytes(const struct holders *holders,
                       const struct kvd_msg_client_info_reply *info);

/* Says so if nearly all of the pool is held, and by whom most of it. */
void holders_say(struct answer *answer, const struct holders *holders, uint64_t held,
                 uint64_t pool_bytes);
/* The same, with holders read if need be. */
int holders_say_full(struct kvctl *kvctl, struct answer *answer, struct maps *maps,
                     uint64_t pool_bytes);

#endif
