/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_THREADS_H
#define KVD_BASE_THREADS_H

/*
 * Threads that do one thing at a time together; the caller is number 0. Between two things they
 * sleep.
 */

#include <stdint.h>

struct threads;

/* wanted: the caller included. Where threads cannot be started there are fewer. 0 or -ENOMEM. */
int threads_new(uint32_t wanted, struct threads **ret);
struct threads *threads_free(struct threads *threads); /* returns NULL */
uint32_t threads_count(const struct threads *threads);

/* Each of these returns when all are done. */
typedef void threads_piece(void *data, uint32_t i, uint32_t thread);
/* each i below n, once */
void threads_share(struct threads *threads, uint32_t n, threads_piece *piece, void *data);

typedef void threads_work(void *data, uint32_t thread);
void threads_all(struct threads *threads, threads_work *work, void *data); /* each thread, once */
/* inside threads_all: waits until every thread is here */
void threads_meet(struct threads *threads);

#endif
