/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_DEVICE_CHUNK_H
#define KVD_STORE_DEVICE_CHUNK_H

/*
 * A GPU's memory, without a context: the driver makes it and gives descriptors for it after cuInit
 * alone. The pool is cut into chunks of one size, each of which becomes one segment of one space at
 * a time:
 *
 *      MISSING ──made──► DIRTY ──a worker──► CLEARING ──it says so──► CLEAN ──begin──► USED ──let_go──► DRAINING
 *         ▲                ▲                     │                              ▲                          │
 *         │                └───it fails, or dies─┘                              └──nobody was told yet─────┤
 *         ├─────────made anew, for any domain────── RETURNED ◄──nobody has it mapped any more──────────────┘
 *         │                                             └──begin, in the same domain──► USED
 *         └──the daemon before had it in this segment──► USED
 *
 * Who once had a chunk's descriptor could have kept it, and could map it again, whatever it says:
 * so a chunk never changes domains. It is given up and another is made, which the driver does when
 * the last mapping and the last descriptor of the old one are gone, anywhere; until then there is
 * one chunk less. What the driver makes is not known to be empty, and is cleared before anybody
 * gets it.
 */

#include "ipc/base/device.h"
#include "store/cache/cache.h"
#include "store/device/device.h"
#include "store/job.h"

enum chunk_state { MISSING, DIRTY, CLEARING, CLEAN, USED, DRAINING, RETURNED, N_STATES };

struct chunk {
        cu_memory memory;        /* owned; not in MISSING */
        int fd;                  /* owned; -1: not handed out yet */
        struct cu_ipc_handle handle; /* legacy, instead of these: from CLEAN on */
        enum chunk_state state;
        struct domain *domain;   /* USED to RETURNED: of whoever may have its descriptor */
        struct space *space;     /* USED, DRAINING: where it is */
        struct segment *segment;
};

struct device_pool {
        /* NULL: an exporter makes the memory, and this process only keeps its handles */
        const struct kvd_cuda *cuda;
        struct cu_allocation what;
        uint64_t bytes;          /* of a chunk */
        uint32_t n;
        uint32_t count[N_STATES];
        uint32_t hand;           /* where to look first for a clean one */
        bool clear_failed;       /* wait until somebody says to try again */
        struct chunk chunks[];
};

static inline struct device_pool *pool_of(const struct store *store) {
        return store->device_pool;
}

void chunk_set_state(struct device_pool *pool, struct chunk *chunk, enum chunk_state state);
/* gives it up, and makes another in its place */
void chunk_remake(struct store *store, struct chunk *chunk);
int chunk_export(struct store *store, struct chunk *chunk);  /* a descriptor, the chunk's */
/* one that is missing is the memory behind *fd, which is taken if it is this GPU's, and as large */
int chunk_import(struct store *store, struct chunk *chunk, int *fd);
void chunk_unmake(struct device_pool *pool, struct chunk *chunk);

/* memory.c */
/* frees its chunk if nobody has it mapped */
void device_undrain(struct space *space, struct segment *segment);
bool device_draining(const struct segment *segment);

/* drain.c: which clients have which segments mapped */
void drain_handed_out(struct attachment *a, uint32_t segment);
bool drain_mapped(const struct space *space, uint32_t segment);  /* by anybody */
/* has anybody been asked, and not answered yet? */
bool drain_told(const struct space *space, uint32_t segment);

#endif
