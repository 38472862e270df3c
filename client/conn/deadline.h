/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_CONN_DEADLINE_H
#define KVD_CLIENT_CONN_DEADLINE_H

/* How long a call may wait, for whatever it waits. Times are of CLOCK_MONOTONIC. */

#include <pthread.h>
#include <stdint.h>

#define DEADLINE_MS 5000u

extern uint32_t deadline_ms; /* DEADLINE_MS; tests that may run on a busy machine set a longer one */

/* Of the call that this thread is in; 0: it has not had to wait yet. */
extern _Thread_local uint64_t deadline_of_call;

/* A call of this thread begins. */
static inline void deadline_begin(void) {
        deadline_of_call = 0;
}

/* The end of this thread's call, which is set when it is asked for the first time. */
uint64_t deadline_ns(void);
uint64_t deadline_from_now(void);

/* 0, or -ETIMEDOUT, with the words said: another thread's call has had it all the while. */
int deadline_lock(pthread_mutex_t *lock);

/* A condition that deadline_wait waits for. */
void deadline_cond_init(pthread_cond_t *changed);
/* As pthread_cond_wait; 0, or -ETIMEDOUT, with the words said: a GPU's driver has not come back. */
int deadline_wait(pthread_cond_t *changed, pthread_mutex_t *lock);

/*
 * Waits until fd is ready for one of events (poll(2)), or has failed. 0; -ETIMEDOUT; another
 * negative errno. What is ready by now is so at any deadline.
 */
int deadline_poll(int fd, short events, uint64_t deadline_ns);

#endif
