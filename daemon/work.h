/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_WORK_H
#define KVD_DAEMON_WORK_H

/*
 * The owner's side of the worker: a process of the same program (kvd --worker) that runs the methods' kernels, so that
 * the loop never computes. It is started when the store has the first job, gets descriptors of what a job needs, one
 * job at a time, and is replaced when it dies, answers nonsense, or does not answer. Its death costs the job in flight,
 * which is done again.
 */

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "daemon/config.h"
#include "daemon/loop.h"

struct work;

#define WORK_SOURCES 2u /* descriptors that the loop watches for it */

int work_new(const struct config *config, struct loop *loop, struct store *store, struct work **ret);
struct work *work_free(struct work *work);

/* Ends the worker, and starts no more. */
void work_stop(struct work *work);

/* Looks soon whether there is something to do: a space was deleted. (For new jobs the store calls by itself.) */
void work_look(struct work *work);

/* False: worker = off, or the program that runs us is not kvd. Jobs fail then, at once. */
bool work_is_on(const struct work *work);

/* Attempts at clearing GPU memory that the worker refused since the last that worked, and what it said. */
uint32_t work_clear_failures(const struct work *work);
const char *work_clear_why(const struct work *work);

/* Has a worker a space mapped that is deleted, and was it not heard to have unmapped it? */
bool work_forgetting(const struct work *work);

pid_t work_pid(const struct work *work); /* 0: none is needed yet, or it is being started */
uint64_t work_starts(const struct work *work);
uint64_t work_done(const struct work *work); /* jobs */

#endif
