/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_SPACES_H
#define KVD_DAEMON_PROCESS_WORKER_SPACES_H

/*
 * Mappings of what the owner has sent: spaces, one sketch, and the jobs' arguments. Every file is
 * checked to be as large as announced before it is used.
 */

#include "daemon/process/worker/gpu_context.h"
#include "ipc/base/job.h"
#include "ipc/base/summary.h"
#include "ipc/base/why.h"
#include "ipc/frame.h"
#include "ipc/msg.h"

struct worker_space {
        struct worker_space *next;
        uint32_t number;
        const struct kvd_index *ix; /* owned mappings, here and below */
        uint64_t index_bytes;
        struct kvd_summary summary; /* layout of summaries */
        uint8_t *summaries;
        uint64_t summary_bytes;
        uint8_t *copies; /* exact ones, by place */
        uint64_t copy_bytes;
        /* of the pool: block b is at base + b * block_bytes; NULL if the pool is on the GPU */
        uint8_t *base;
        cu_address device_base; /* of the pool on the GPU; 0 if it is not there */
        struct worker_device *device;
        uint64_t reserved;                      /* bytes of addresses for the pool */
        uint64_t mapped[KVD_MAX_SEGMENTS / 64]; /* one bit for each segment */
};

static inline bool space_has_segment(const struct worker_space *w, uint32_t segment) {
        return w->mapped[segment / 64] >> segment % 64 & 1;
}

struct worker_sketch {
        uint32_t users; /* references: struct spaces, and tasks */
        uint32_t space, number;
        struct kvd_sketch_header *at;
        uint64_t bytes;
};

struct spaces {
        struct worker_space *first;
        struct worker_sketch *sketch;    /* the last one that was sent; NULL if none */
        const struct kvd_job *arguments; /* KVD_JOB_BYTES; NULL until the first space */
        struct worker_device device;     /* opened for the first space or memory on a GPU */
        struct worker_device
                others[KVD_SHARDS - 1]; /* of a pool on several: memory is cleared there */
        struct kvd_why why;             /* of the last failure */
};

/* 0 or a negative errno. Descriptors stay the caller's. */
int spaces_map(struct spaces *spaces, const struct kvd_msg_work_space *msg,
               const struct kvd_fds *fds);
int spaces_map_segments(struct spaces *spaces, const struct kvd_msg_work_segments *msg,
                        const struct kvd_fds *fds);
int spaces_map_sketch(struct spaces *spaces, const struct kvd_msg_work_sketch *msg,
                      const struct kvd_fds *fds);
/* A task's reference: it may be paused while another sketch is sent. sketch_drop accepts NULL. */
struct worker_sketch *sketch_take(struct worker_sketch *sketch);
void sketch_drop(struct worker_sketch *sketch);
int spaces_unmap_segment(struct spaces *spaces, const struct kvd_msg_work_unmap *msg);
int spaces_forget(struct spaces *spaces, uint32_t number);

int spaces_wake(struct spaces *spaces, const struct kvd_msg_work_wake *msg,
                const struct kvd_fds *fds);

/* Zeros GPU memory that belongs to no space. */
int spaces_clear(struct spaces *spaces, const struct kvd_msg_work_clear *msg,
                 const struct kvd_fds *fds);

/* A GPU whose context has failed; NULL: none. */
const struct worker_device *spaces_broken(const struct spaces *spaces);

struct worker_space *spaces_find(const struct spaces *spaces, uint32_t number);

#endif
