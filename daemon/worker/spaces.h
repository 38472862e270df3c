/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_WORKER_SPACES_H
#define KVD_DAEMON_WORKER_SPACES_H

/*
 * What the owner has sent: mappings of spaces, one sketch, the jobs' arguments. Everything is checked to be as large as
 * announced before it is used.
 */

#include "ipc/base/job.h"
#include "ipc/base/summary.h"
#include "ipc/frame.h"
#include "ipc/msg.h"

struct worker_space {
        struct worker_space *next;
        uint32_t number;
        const struct kvd_index *ix;  /* owned mappings, here and below */
        uint64_t index_bytes;
        struct kvd_summary summary;  /* layout of summaries */
        uint8_t *summaries;
        uint64_t summary_bytes;
        uint8_t *spill;
        uint64_t spill_bytes;
        uint8_t *base;               /* of the pool: block b at base + b * block_bytes */
        uint64_t reserved;
        uint32_t n_segments;         /* mapped, from the first on */
};

struct worker_sketch {
        uint32_t space, number;      /* number 0: none */
        struct kvd_sketch_header *at;
        uint64_t bytes;
};

struct spaces {
        struct worker_space *first;
        struct worker_sketch sketch;
        const struct kvd_job *arguments; /* KVD_JOB_BYTES; NULL until the first space */
        char why[160];               /* of the last failure */
};

/* 0 or a negative errno. Descriptors stay the caller's. */
int spaces_map(struct spaces *spaces, const struct kvd_msg_work_space *msg, const struct kvd_fds *fds);
int spaces_map_segments(struct spaces *spaces, const struct kvd_msg_work_segments *msg, const struct kvd_fds *fds);
int spaces_map_sketch(struct spaces *spaces, const struct kvd_msg_work_sketch *msg, const struct kvd_fds *fds);
int spaces_forget(struct spaces *spaces, uint32_t number);

struct worker_space *spaces_find(const struct spaces *spaces, uint32_t number);

#endif
