/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CHILDREN_WORKER_JOBS_H
#define KVD_DAEMON_CHILDREN_WORKER_JOBS_H

/*
 * The owner's side of the worker: a process of the same program (kvd --worker) that runs the
 * methods' kernels, so that the loop never computes. It is started when the store has the first
 * job, gets descriptors of what a job needs, and one job at a time. Its death costs the job in
 * flight, which is done again.
 */

#include "daemon/base/config.h"
#include "daemon/children/child.h"
#include "store/store.h"

struct worker;

int worker_new(const struct config *config, struct loop *loop, struct store *store,
               struct worker **ret);
struct worker *worker_free(struct worker *worker);

/* Ends the worker, and starts no more. */
void worker_stop(struct worker *worker);

/*
 * Looks soon whether there is something to do: a space was deleted. (For new jobs the store calls
 * by itself.)
 */
void worker_look(struct worker *worker);

/* False: worker = off, or the program that runs us is not kvd. Jobs fail then, at once. */
bool worker_is_on(const struct worker *worker);

/* Has a worker a space mapped that is deleted, and was it not heard to have unmapped it? */
bool worker_is_forgetting(const struct worker *worker);

/*
 * Its process: whether it runs, how often it was started, and what it says about clearing GPU
 * memory.
 */
struct child *worker_child(struct worker *worker);
uint64_t worker_jobs_done(const struct worker *worker);

#endif
