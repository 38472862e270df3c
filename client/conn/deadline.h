/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_CONN_DEADLINE_H
#define KVD_CLIENT_CONN_DEADLINE_H

/* The time limit of a call, for all of its waits. Times are CLOCK_MONOTONIC. */

#include <pthread.h>
#include <stdint.h>

#define DEADLINE_MS 5000u

/* DEADLINE_MS; tests that may run on a busy machine set a longer one */
extern uint32_t deadline_ms;

/* deadline of this thread's current call, in ns; 0 if it has not had to wait yet */
extern _Thread_local uint64_t deadline_of_call;

/* Begins a call of this thread. */
static inline void deadline_begin(void) {
        deadline_of_call = 0;
}

/* Deadline of this thread's call; the first use sets it. */
uint64_t deadline_ns(void);
uint64_t deadline_from_now(void);

/* 0, or -ETIMEDOUT with kvd_error() text: another thread's call holds the lock. */
int deadline_lock(pthread_mutex_t *lock);

/* Initialises a condition for deadline_wait. */
void deadline_cond_init(pthread_cond_t *changed);
/* As pthread_cond_wait. 0, or -ETIMEDOUT with kvd_error() text: a GPU's driver is still busy. */
int deadline_wait(pthread_cond_t *changed, pthread_mutex_t *lock);

/*
 * Waits until fd is ready for one of events (poll(2)), or has failed. 0; -ETIMEDOUT; another
 * negative errno. A descriptor that is ready now counts even after the deadline.
 */
int deadline_poll(int fd, short events, uint64_t deadline_ns);

#endif
