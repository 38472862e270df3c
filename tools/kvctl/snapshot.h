/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_SNAPSHOT_H
#define KVCTL_SNAPSHOT_H

/* A copy of all figures of the daemon; a reply itself lives only until the next request. */

#include "ipc/base/cost.h"
#include "ipc/base/layout.h"
#include "tools/kvctl/degraded.h"
#include "tools/kvctl/map.h"

enum snapshot_value {
#define DAEMON(type, name, unit, factor, member, help) SNAPSHOT_##member,
#define WORK(type, name, unit, factor, member, help) SNAPSHOT_##member,
#include "tools/kvctl/metrics.def"
#undef DAEMON
#undef WORK
        N_SNAPSHOT
};

enum snapshot_space_value {
#define SPACE(type, name, unit, factor, member, help) SNAPSHOT_SPACE_##member,
#define BLOCKS(kind, member) SNAPSHOT_SPACE_##member,
#include "tools/kvctl/metrics.def"
#undef SPACE
#undef BLOCKS
        N_SNAPSHOT_SPACE
};

enum snapshot_tier_value {
#define TIER(type, name, unit, factor, member, help) SNAPSHOT_TIER_##member,
#include "tools/kvctl/metrics.def"
#undef TIER
        N_SNAPSHOT_TIER
};

struct snapshot_space {
        struct space_name name;
        uint64_t value[N_SNAPSHOT_SPACE], free, filling, limbo;
        uint64_t of[KVD_N_SPACE_COUNTERS], by[KVD_CLIENT_WORDS], degraded[KVD_N_DEGRADED];
        struct map_sums sums; /* blocks */
};

struct snapshot_domain {
        char name[64];
        uint64_t used[KVD_N_COSTS], guaranteed[KVD_N_COSTS], most[KVD_N_COSTS];
        uint64_t near_limit[KVD_N_COSTS];
        uint64_t clients, disconnected, filling_bytes, pinned;
};

struct snapshot_tier {
        char name[64], state[64];
        uint64_t value[N_SNAPSHOT_TIER];
};

struct snapshot {
        bool told; /* the user is an administrator, and sees the work of all domains */
        char version[64], backend[64], loop[64];
        uint64_t value[N_SNAPSHOT], degraded[KVD_N_DEGRADED];
        struct map_sums bytes;
        struct snapshot_space *spaces;   /* owned */
        struct snapshot_domain *domains; /* owned */
        struct snapshot_tier *tiers;     /* owned */
        size_t n_spaces, n_domains, n_tiers;
};

/* 0, or negative, noted with kvctl_fail. */
int snapshot_take(struct kvctl *kvctl, struct snapshot *ret);
void snapshot_clear(struct snapshot *snapshot);

#endif
