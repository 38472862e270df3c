/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_DEVICE_CHUNK_H
#define KVD_STORE_DEVICE_CHUNK_H

/*
 * GPU memory without a context: after cuInit alone, the driver allocates memory and exports
 * descriptors for it. The pool consists of chunks of equal size. A chunk has the same number of
 * bytes on each GPU of the pool, its shards, which are made, cleared and freed together. A chunk is
 * one segment of one space at a time:
 *
 *      MISSING ──make──► DIRTY ──to worker──► CLEARING ──cleared────► CLEAN ──begin──► USED ──let_go──► DRAINING
 *         ▲                ▲                     │                              ▲                          │
 *         │                └───failed, or lost───┘                              └──no client told yet──────┤
 *         ├─────────remade, for any domain───────── RETURNED ◄──no process has it mapped───────────────────┘
 *         │                                             └──begin, in the same domain──► USED
 *         └──(from MISSING) taken over from the previous daemon──► USED
 *
 * A process that once had a chunk's descriptor may have kept it, and could map the memory again. So
 * a chunk never moves to another domain: it is freed and a new one is allocated. The driver frees
 * the old memory only when its last mapping and its last descriptor are gone in all processes;
 * until then there is one chunk less. New memory may contain old data, so it is cleared before it
 * is used.
 */

#include "ipc/base/device.h"
#include "store/cache/cache.h"
#include "store/cache/memory.h"
#include "store/job.h"

enum chunk_state { MISSING, DIRTY, CLEARING, CLEAN, USED, DRAINING, RETURNED, N_STATES };

/* The part of a chunk on one GPU. */
struct shard {
        cu_memory memory;            /* owned; not in MISSING */
        int fd;                      /* owned; -1: not exported yet */
        struct cu_ipc_handle handle; /* legacy, instead of memory and fd: from CLEAN on */
};

struct chunk {
        struct shard *shards; /* one for each GPU of the pool */
        enum chunk_state state;
        uint32_t
                n_cleared; /* DIRTY, CLEARING: the first of them are clear, or made by an exporter */
        struct domain *domain; /* USED to RETURNED: whose clients may have its descriptor */
        struct space *space;   /* USED, DRAINING */
        struct segment *segment;
};

struct device_pool {
        /* NULL: an exporter allocates the memory, and the daemon only has its handles */
        const struct kvd_cuda *cuda;
        const struct store_gpu *gpus;
        uint32_t n_gpus;
        uint64_t bytes;       /* of a chunk, on each of them */
        struct shard *shards; /* owned: of all chunks */
        uint32_t n;
        uint32_t count[N_STATES];
        uint32_t hand;     /* where the next search for a chunk starts */
        bool clear_failed; /* do not clear before store_make_missing */
        struct chunk chunks[];
};

static inline struct device_pool *pool_of(const struct store *store) {
        return store->device_pool;
}

int device_open(struct store *store);
void chunks_lost(struct store *store); /* legacy handles: the exporter is gone */

void chunk_set_state(struct device_pool *pool, struct chunk *chunk, enum chunk_state state);
/* frees it, and allocates another one in its place */
void chunk_remake(struct store *store, struct chunk *chunk);
/* a descriptor of one shard, owned by the chunk */
int chunk_export(struct store *store, struct chunk *chunk, uint32_t shard);
/*
 * Gives a missing chunk the memory of descriptors, one for each GPU. Takes them over if GPUs and
 * sizes are right.
 */
int chunk_import(struct store *store, struct chunk *chunk, int *fds);
void chunk_unmake(struct device_pool *pool, struct chunk *chunk);

/* device_memory.c */
extern const struct memory_ops memory_device;
/* frees a draining segment's chunk if no process has it mapped */
void device_undrain(struct space *space, struct segment *segment);
bool device_draining(const struct segment *segment);

/* drain.c: which clients have which segments mapped */
void drain_handed_out(struct attachment *a, uint32_t segment);
bool drain_mapped(const struct space *space, uint32_t segment); /* by any client */
/* was a client asked to unmap it, and has not replied yet? */
bool drain_told(const struct space *space, uint32_t segment);

#endif
