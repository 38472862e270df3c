/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_WORK_INTERNAL_H
#define KVD_DAEMON_WORK_INTERNAL_H

/*
 * What the files of the worker's supervision share.
 *
 *      work.c        its process: started, watched, replaced
 *      work_tell.c   what it knows of spaces, segments and sketches, and the questions that tell it
 *      work_talk.c   what there is to do for it, and its answers
 */

#include "daemon/work.h"
#include "ipc/base/util.h"
#include "ipc/frame.h"
#include "ipc/msg.h"

/* A space that the worker has mapped. */
struct known {
        struct known *next;
        uint32_t number, n_segments;
        uint32_t turns[];    /* of each segment, when it was sent; 0: not mapped */
};

struct work {
        const struct config *config;
        struct loop *loop;
        struct store *store;
        bool on, stopped;

        int arguments_fd;             /* owned; -1; read-only */
        void *arguments;              /* owned mapping of KVD_JOB_BYTES; NULL */
        struct kvd_decoder *decoder;  /* owned */
        uint8_t *frame, *result;      /* owned; KVD_FRAME_MAX bytes each; result: where it is aligned */

        pid_t pid;                    /* 0: none */
        struct loop_source socket;    /* its fd is owned; -1 */
        struct loop_source process;   /* its pidfd is owned; -1 */
        struct loop_timer look, retry, deadline;
        uint64_t backoff_ns;          /* before the next start */

        struct known *known;          /* owned */
        uint32_t sketch_space, sketch; /* that it has mapped; 0: none */
        uint32_t asked;               /* number of the message that an answer is awaited to; 0: none */
        uint64_t serial;
        uint32_t unmapping[2];        /* space and segment that it was asked to unmap */
        uint32_t clear_failures;
        char clear_why[160];
        bool has_job, job_lost;
        uint32_t job_space;           /* number: the space itself may be deleted meanwhile */
        struct store_job job;
        uint64_t starts, done;
};

/* work.c */
void work_end(struct work *w, const char *why); /* kills it; what it had is lost when the kernel says that it is gone */

/* work_tell.c; numbers are of spaces */
int work_ask(struct work *w, struct kvd_msg *msg, const struct kvd_fds *fds);
struct space *work_find_space(const struct work *w, uint32_t number);
struct known *work_find_known(const struct work *w, uint32_t number);
void work_forget_known(struct work *w, uint32_t number);
void work_forget_all(struct work *w);
int work_tell_next(struct work *w, struct space *space); /* what the job needs first, then the job */

/* work_talk.c */
void work_go_on(struct work *w); /* asks the next question; a job that nothing can be asked about has failed */
void work_answer_came(struct loop_source *source, short revents);

#endif
