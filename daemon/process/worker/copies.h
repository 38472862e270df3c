/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_COPIES_H
#define KVD_DAEMON_PROCESS_WORKER_COPIES_H

/*
 * Exact copies of blocks, written to and read from their tiers (ipc/base/tier.h). A tier gets all
 * copies of a job at once, so that a tier with a slow device can begin all before it waits for the
 * first.
 */

#include "ipc/base/tier.h"

struct task;
struct worker_space;

struct copy {
        uint32_t place;    /* KVD_NOWHERE: this copy is skipped */
        uint8_t *block;    /* put: source; get: destination; read: set to the copy's address */
        uint64_t checksum; /* XXH3-64. put: set; get, read: expected value */
        /*
         * An errno: ENODATA: no such place; EBADMSG: the checksum differs. get and read
         * set it to 0 on success. It is unchanged if the copy was put or skipped.
         */
        uint32_t error;
};

void copies_put(struct task *task, struct copy *copies, uint32_t n);
void copies_get(struct task *task, struct copy *copies, uint32_t n);
/* sets block to the copy itself, which stays valid until the job's end */
void copies_read(struct task *task, struct copy *copies, uint32_t n);

/* The copies of one space in one tier. */
struct worker_copies {
        uint8_t *at; /* owned mapping, if the tier has one */
        uint64_t bytes;
};

struct worker_tier {
        /* 0 or -errno; fd stays the caller's */
        int (*map)(struct worker_copies *copies, int fd, uint64_t bytes);
        void (*unmap)(struct worker_copies *copies);
        /* These handle the copies whose place is in tier number self, and skip the others. */
        void (*put)(struct task *task, uint32_t self, struct copy *copies, uint32_t n);
        void (*get)(struct task *task, uint32_t self, struct copy *copies, uint32_t n);
        void (*read)(struct task *task, uint32_t self, struct copy *copies, uint32_t n);
};

#define KVD_TIER(id, what) extern const struct worker_tier worker_tier_##id;
#include "ipc/base/tiers.def"

/* Maps the descriptors that came with a space, one for each tier. 0 or -errno. */
int copies_map(struct worker_space *space, const int fds[KVD_N_TIERS],
               const uint64_t bytes[KVD_N_TIERS]);
void copies_unmap(struct worker_space *space);

#endif
