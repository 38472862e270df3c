/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_DAEMON_PROCESS_OWNER_H
#define KVD_TESTS_DAEMON_PROCESS_OWNER_H

/*
 * The test as a worker's owner: starts $KVD --worker, gives it memory, and sends it jobs. So its
 * results are compared with the test's own, without a daemon. Every failure fails the test.
 */

#include "client/kvd_methods.h"
#include "ipc/base/device.h"
#include "ipc/base/job.h"
#include "ipc/base/summary.h"
#include "ipc/msg.h"

#define OWNER_ITEMS 64u
#define OWNER_SPILLS 32u
#define OWNER_DIM 320u /* the largest head_dim */

struct owner {
        pid_t pid;
        int socket;
        uint64_t serial, jobs;
        struct kvd_decoder *decoder;
        struct kvd_shape g;
        struct kvd_index *ix;
        struct kvd_device device; /* if the pool is on a GPU */
        struct kvd_summary layout;
        uint8_t *summaries, *spill, *pool;
        struct kvd_sketch_header *sketch; /* sketch number 1; NULL if not sent */
        void *arguments;
        uint32_t n_blocks;
        int fds[6];
        uint8_t frame[65536];

        uint64_t piece; /* work of a job between two rests; 0: no rests */
        uint32_t rests; /* of the last job */

        /* the last reply */
        uint32_t error, result_size;
        bool more;
        uint32_t busy_us;
        _Alignas(16) uint8_t result[61440];
};

/* Sends the worker a space of n_blocks sealed blocks, all of generation 7. */
void owner_start(struct owner *o, const struct kvd_shape *g, uint32_t n_blocks);
void owner_stop(struct owner *o); /* closes the socket; the worker must end with 0 */
void owner_sketch(struct owner *o, uint32_t rows, uint32_t columns);

/*
 * Sends a message and waits for its reply, which must match it or be an error. Returns the error's
 * code or 0.
 */
uint32_t owner_ask(struct owner *o, struct kvd_msg msg, const int *fds, uint32_t n_fds);

struct owner_job {
        uint32_t kind, n_items, n_steps, n_tokens, sketch;
        uint32_t param[8];
        struct kvd_job_item items[OWNER_ITEMS];
        struct kvd_job_step steps[8];
        uint32_t tokens[1024];
};
/* Returns work_reply.error; the result is in o->result. Continues a job that rests to its end. */
uint32_t owner_do(struct owner *o, const struct owner_job *job);
uint32_t owner_begin(struct owner *o, const struct owner_job *job); /* o->more: it rests */
uint32_t owner_turn(struct owner *o, uint64_t id, uint32_t turn);   /* of the job with this id */
/* An item with row = block and no other places. */
struct kvd_job_item owner_item(const struct owner *o, uint32_t block);
kvd_ref owner_ref(uint32_t block);

/* ---- the worker's driver calls, as the stand-in logs them ------------------------------------ */

void owner_log_begin(void);                                        /* before owner_start */
uint32_t owner_calls(const struct owner *o, const char *function); /* function: a prefix of names */
void owner_log_end(void);

/* ---- numbers in blocks ----------------------------------------------------------------------- */

uint8_t *owner_block(const struct owner *o, uint32_t block);
/* plane 0: keys, 1: values */
void owner_put(const struct owner *o, uint8_t *block, uint32_t layer, int plane, uint32_t head,
               uint32_t token, uint32_t d, double x);
/* What is stored of a number: of a quantised key, a number of its transform. */
double owner_stored(const struct owner *o, const uint8_t *block, uint32_t layer, int plane,
                    uint32_t head, uint32_t token, uint32_t d);
/* What is between two codes of a quantised row; 0 if rows are not quantised. */
double owner_step(const struct owner *o, const uint8_t *block, uint32_t layer, int plane,
                  uint32_t head, uint32_t token);
double owner_get(const struct owner *o, const uint8_t *block, uint32_t layer, int plane,
                 uint32_t head, uint32_t token, uint32_t d);
/* Fills a block with approximately normally distributed numbers; the mean key is not 0. */
void owner_fill(const struct owner *o, uint32_t block, uint64_t seed);
double owner_random(uint64_t *seed); /* approximately normally distributed */

#endif
