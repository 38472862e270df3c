/* SPDX-License-Identifier: Apache-2.0 */

/* A ring of items behind a mutex. An item stays in the ring until the thread has done it. */

#include "daemon/base/chores.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

struct chores {
        void (*work)(void *data, const void *item);
        void *data;
        pthread_t thread;
        bool runs, stop, busy; /* busy: the thread works on an item that has left the ring */
        pthread_mutex_t mutex;
        pthread_cond_t changed;
        uint32_t room, first, n; /* the ring in items */
        size_t size;
        char items[]; /* owned; room + 1, of which the last is the one in work */
};

static void *item_at(struct chores *c, uint32_t i) {
        return c->items + (c->first + i) % c->room * c->size;
}

static void *in_work(struct chores *c) {
        return c->items + c->room * c->size;
}

static bool take(struct chores *c, void *item) {
        if (!c->n)
                return false;
        memcpy(item, item_at(c, 0), c->size);
        c->first = (c->first + 1) % c->room;
        c->n--;
        return true;
}

static bool next(struct chores *c) {
        bool more;

        pthread_mutex_lock(&c->mutex);
        c->busy = false;
        while (!c->n && !c->stop)
                pthread_cond_wait(&c->changed, &c->mutex);
        more = c->busy = take(c, in_work(c));
        pthread_mutex_unlock(&c->mutex);
        return more;
}

static void *run(void *data) {
        struct chores *c = data;
        sigset_t all;

        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, NULL);
        while (next(c))
                c->work(c->data, in_work(c));
        return NULL;
}

int chores_new(uint32_t room, size_t size, void (*work)(void *data, const void *item), void *data,
               struct chores **ret) {
        struct chores *c = sys->calloc(1, sizeof *c + (room + 1) * size);

        if (!c)
                return -ENOMEM;
        c->room = room;
        c->size = size;
        c->work = work;
        c->data = data;
        pthread_mutex_init(&c->mutex, NULL);
        pthread_cond_init(&c->changed, NULL);
        *ret = c;
        return 0;
}

struct chores *chores_free(struct chores *c) {
        if (!c)
                return NULL;
        if (c->runs) {
                pthread_mutex_lock(&c->mutex);
                c->stop = true;
                pthread_cond_signal(&c->changed);
                pthread_mutex_unlock(&c->mutex);
                pthread_join(c->thread, NULL);
        }
        pthread_cond_destroy(&c->changed);
        pthread_mutex_destroy(&c->mutex);
        free(c);
        return NULL;
}

int chores_add(struct chores *c, const void *item) {
        int r = c->runs ? 0 : pthread_create(&c->thread, NULL, run, c);

        if (r != 0)
                return r == EAGAIN ? -ENOMEM : -r;
        c->runs = true;
        pthread_mutex_lock(&c->mutex);
        if (c->n < c->room)
                memcpy(item_at(c, c->n++), item, c->size);
        else
                r = -EAGAIN;
        pthread_cond_signal(&c->changed);
        pthread_mutex_unlock(&c->mutex);
        return r;
}

bool chores_take_back(struct chores *c, void *item) {
        bool taken;

        pthread_mutex_lock(&c->mutex);
        taken = take(c, item);
        pthread_mutex_unlock(&c->mutex);
        return taken;
}

uint32_t chores_left(struct chores *c) {
        uint32_t n;

        pthread_mutex_lock(&c->mutex);
        n = c->n + c->busy;
        pthread_mutex_unlock(&c->mutex);
        return n;
}
