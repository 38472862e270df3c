/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_SAMPLE_H
#define KVCTL_SAMPLE_H

/* All counters at one moment, for top to compare. */

#include "ipc/base/layout.h"
#include "tools/kvctl/holders.h"

struct space_sample {
        struct space_name name;
        uint64_t total, sealed, clients;
        uint64_t of[KVD_N_SPACE_COUNTERS];
        uint64_t by[KVD_N_CLIENT_COUNTERS];
};

struct client_sample {
        char name[64], domain[64];
        uint32_t client, pid;
        bool stopped;
        uint64_t requests, filling, pinned, held_bytes;
        uint64_t by[KVD_N_CLIENT_COUNTERS];
};

struct sample {
        bool told; /* the user is an administrator, and sees the work of all domains */
        uint64_t at_ns, requests, pool_bytes, pool_used, turn_recent_us;
        struct map_sums bytes;
        uint64_t ages[MAP_AGES];
        struct holders holders;        /* owned */
        struct space_sample *spaces;   /* owned */
        struct client_sample *clients; /* owned */
        size_t n_spaces, n_clients;
};

int sample_take(struct kvctl *kvctl, struct sample **ret);
struct sample *sample_free(struct sample *sample); /* NULL is fine; returns NULL */

/* The same space or client in another sample, or one whose counters are 0. */
const struct space_sample *sample_space(const struct sample *sample, const struct space_sample *as);
const struct client_sample *sample_client(const struct sample *sample,
                                          const struct client_sample *as);

#endif
