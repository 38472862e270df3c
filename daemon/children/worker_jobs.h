/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CHILDREN_WORKER_JOBS_H
#define KVD_DAEMON_CHILDREN_WORKER_JOBS_H

/*
 * The owner's side of the worker: a process of the same program (kvd --worker) that runs the
 * methods' kernels, so that the loop never computes. It is started when the store first needs it,
 * and gets one job at a time, after the descriptors that the job needs. If it dies, the job in
 * flight is run again.
 */

#include "daemon/base/config.h"
#include "daemon/children/child.h"
#include "store/store.h"

struct worker;

int worker_new(const struct config *config, struct loop *loop, struct store *store,
               struct worker **ret);
struct worker *worker_free(struct worker *worker);

/* Ends the worker, and starts no other. */
void worker_stop(struct worker *worker);

/* Checks soon for work, after a space was deleted. (The store itself reports new jobs.) */
void worker_look(struct worker *worker);

/* False: worker = off, or there is no program to start as a worker. Jobs then fail immediately. */
bool worker_is_on(const struct worker *worker);

/* True: the worker has a deleted space mapped, or has not confirmed that it unmapped it. */
bool worker_is_forgetting(const struct worker *worker);

/* Its process: whether it runs, how often it was started, and failures to clear GPU memory. */
struct child *worker_child(struct worker *worker);
uint64_t worker_jobs_done(const struct worker *worker);

#endif
