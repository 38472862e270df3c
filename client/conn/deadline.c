/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Every call has one deadline, which all waits inside it share: for another thread's call, for a
 * connection, for room for a request, for its reply. It is a point in time and not a duration, so
 * that neither signals nor a long first wait prolong the call. It belongs to the thread, so that k
 * threads that wait for a stopped daemon all time out after one deadline, not after k of them.
 */

#include "client/conn/deadline.h"

#include <errno.h>
#include <poll.h>
#include <time.h>

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ /* as gcc defines it */
#endif
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

#include "client/conn/error.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

uint32_t deadline_ms = DEADLINE_MS;
_Thread_local uint64_t deadline_of_call;

uint64_t deadline_from_now(void) {
        return sys_now_ns() + deadline_ms * UINT64_C(1000000);
}

uint64_t deadline_ns(void) {
        if (!deadline_of_call)
                deadline_of_call = deadline_from_now();
        return deadline_of_call;
}

/*
 * ThreadSanitizer before LLVM 17 does not know pthread_mutex_clocklock(), and would report races on
 * data that the lock protects.
 */
#ifdef __SANITIZE_THREAD__
static int lock_by(pthread_mutex_t *lock, const struct timespec *until) {
        int r;

        __tsan_mutex_pre_lock(lock, __tsan_mutex_try_lock);
        r = pthread_mutex_clocklock(lock, CLOCK_MONOTONIC, until);
        __tsan_mutex_post_lock(lock, __tsan_mutex_try_lock | (r ? __tsan_mutex_try_lock_failed : 0),
                               0);
        return r;
}
#else
static int lock_by(pthread_mutex_t *lock, const struct timespec *until) {
        return pthread_mutex_clocklock(lock, CLOCK_MONOTONIC, until);
}
#endif

static struct timespec when(void) {
        uint64_t ns = deadline_ns();

        return (struct timespec){(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
}

int deadline_lock(pthread_mutex_t *lock) {
        struct timespec until;

        if (likely(pthread_mutex_trylock(lock) == 0))
                return 0;
        until = when();
        if (lock_by(lock, &until) == 0)
                return 0;
        return client_fail(-ETIMEDOUT, "another thread's call is still waiting for the daemon");
}

void deadline_cond_init(pthread_cond_t *changed) {
        pthread_condattr_t attributes;

        pthread_condattr_init(&attributes);
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        pthread_cond_init(changed, &attributes);
        pthread_condattr_destroy(&attributes);
}

int deadline_wait(pthread_cond_t *changed, pthread_mutex_t *lock) {
        struct timespec until = when();

        if (pthread_cond_timedwait(changed, lock, &until) == 0)
                return 0;
        return client_fail(-ETIMEDOUT, "another thread's call is still waiting for the GPU");
}

int deadline_poll(int fd, short events, uint64_t deadline_ns) {
        for (;;) {
                struct pollfd p = {.fd = fd, .events = events};
                uint64_t now = sys_now_ns();
                uint64_t left = now < deadline_ns ? deadline_ns - now : 0;
                int r = sys->poll(&p, 1, (int)DIV_UP(left, UINT64_C(1000000)));

                if (r > 0)
                        return 0;
                if (r < 0 && errno != EINTR)
                        return negative_errno();
                if (!left)
                        return -ETIMEDOUT;
        }
}
