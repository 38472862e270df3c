/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_COPIES_H
#define KVD_DAEMON_PROCESS_WORKER_COPIES_H

/*
 * Exact copies of blocks, written and read wherever their tier keeps them (ipc/base/tier.h). A tier
 * is handed all copies of a job at once, so that one whose device is slow can begin all before it
 * waits for the first.
 */

#include "ipc/base/tier.h"

struct task;
struct worker_space;

struct copy {
        uint32_t place;        /* KVD_NOWHERE: this one is passed over */
        uint8_t *block;        /* put: is read; get: is written; read: set to where the copy lies */
        uint64_t checksum;     /* XXH3-64. put: set; get, read: what it must be */
        /*
         * 0, or errno: ENODATA there is no such place, EBADMSG other bytes; as it was: passed over
         */
        uint32_t error;
};

void copies_put(struct task *task, struct copy *copies, uint32_t n);
void copies_get(struct task *task, struct copy *copies, uint32_t n);
/* in place, until the job's end */
void copies_read(struct task *task, struct copy *copies, uint32_t n);

/* The copies of one space in one tier, as its descriptor gave them. */
struct worker_copies {
        uint8_t *at;           /* owned mapping, if the tier has one */
        uint64_t bytes;
};

struct worker_tier {
        /* 0 or -errno; fd stays the caller's */
        int (*map)(struct worker_copies *copies, int fd, uint64_t bytes);
        void (*unmap)(struct worker_copies *copies);
        /*
         * They handle the copies whose place is in tier number self; the others are another tier's.
         */
        void (*put)(struct task *task, uint32_t self, struct copy *copies, uint32_t n);
        void (*get)(struct task *task, uint32_t self, struct copy *copies, uint32_t n);
        void (*read)(struct task *task, uint32_t self, struct copy *copies, uint32_t n);
};

#define KVD_TIER(id, what) extern const struct worker_tier worker_tier_##id;
#include "ipc/base/tiers.def"

/* Maps what came with a space: one descriptor for each tier. 0 or -errno. */
int copies_map(struct worker_space *space, const int fds[KVD_N_TIERS],
               const uint64_t bytes[KVD_N_TIERS]);
void copies_unmap(struct worker_space *space);

#endif
