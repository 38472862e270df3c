/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_THREADS_H
#define KVD_BASE_THREADS_H

/*
 * A pool of threads that work on one task at a time together and sleep in between. The caller is
 * thread 0.
 */

#include <stdint.h>

struct threads;

/* wanted: number of threads with the caller; fewer if some cannot be started. 0 or -ENOMEM. */
int threads_new(uint32_t wanted, struct threads **ret);
struct threads *threads_free(struct threads *threads); /* returns NULL */
uint32_t threads_count(const struct threads *threads);

/* threads_share and threads_all return when all threads are done. */
typedef void threads_piece(void *data, uint32_t i, uint32_t thread);
/* calls piece once for each i < n, on any thread */
void threads_share(struct threads *threads, uint32_t n, threads_piece *piece, void *data);

typedef void threads_work(void *data, uint32_t thread);
/* calls work once on each thread */
void threads_all(struct threads *threads, threads_work *work, void *data);
/* a barrier for use inside threads_all */
void threads_meet(struct threads *threads);

#endif
