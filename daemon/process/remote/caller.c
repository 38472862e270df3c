/* SPDX-License-Identifier: Apache-2.0 */

/*
 * From caller_begin until caller_wait returns true, everything that the call reads and writes
 * belongs to the thread. Then its results can be read.
 */

#include "daemon/process/remote/caller.h"

#include <errno.h>
#include <pthread.h>
#include <time.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

struct caller {
        pthread_t thread;
        pthread_mutex_t mutex;
        pthread_cond_t changed;
        void (*call)(void *data); /* NULL: none is under way */
        void *data;
};

static void *make_calls(void *data) {
        struct caller *c = data;

        pthread_mutex_lock(&c->mutex);
        for (;;) {
                while (!c->call)
                        pthread_cond_wait(&c->changed, &c->mutex);
                pthread_mutex_unlock(&c->mutex);
                c->call(c->data);
                pthread_mutex_lock(&c->mutex);
                c->call = NULL;
                pthread_cond_broadcast(&c->changed);
        }
        return NULL;
}

int caller_new(struct caller **ret) {
        struct caller *c = sys->calloc(1, sizeof *c);
        pthread_condattr_t clock;

        *ret = NULL;
        if (!c)
                return -ENOMEM;
        pthread_condattr_init(&clock);
        pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
        pthread_mutex_init(&c->mutex, NULL);
        pthread_cond_init(&c->changed, &clock);
        pthread_condattr_destroy(&clock);
        if (pthread_create(&c->thread, NULL, make_calls, c) != 0) {
                free(c);
                return -ENOMEM;
        }
        *ret = c;
        return 0;
}

void caller_begin(struct caller *c, void (*call)(void *data), void *data) {
        pthread_mutex_lock(&c->mutex);
        c->call = call;
        c->data = data;
        pthread_cond_broadcast(&c->changed);
        pthread_mutex_unlock(&c->mutex);
}

bool caller_wait(struct caller *c, uint64_t until_ns) {
        const struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000),
                                       .tv_nsec = (long)(until_ns % 1000000000)};
        bool returned;
        int r = 0;

        pthread_mutex_lock(&c->mutex);
        while (c->call && r == 0)
                r = pthread_cond_timedwait(&c->changed, &c->mutex, &until);
        returned = !c->call;
        pthread_mutex_unlock(&c->mutex);
        return returned;
}
