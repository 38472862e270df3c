/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Each round begins and ends with a barrier: after the first one all threads see what the caller
 * wrote before, and after the second one the caller sees what they wrote. Threads take pieces by a
 * shared counter, so that a slow thread takes fewer.
 */

#include "ipc/base/threads.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

struct member {
        struct threads *all;
        uint32_t number;
        pthread_t thread;
};

struct threads {
        pthread_mutex_t gate; /* held until all threads have started and the barrier exists */
        pthread_barrier_t barrier;
        uint32_t n;
        struct member *members; /* owned */

        /* written by the caller before a round begins, read by the other threads in the round */
        threads_work *work; /* NULL: threads end */
        void *data;
};

static void *follow(void *data) {
        struct member *m = data;

        pthread_mutex_lock(&m->all->gate);
        pthread_mutex_unlock(&m->all->gate);
        for (;;) {
                threads_meet(m->all);
                if (!m->all->work)
                        return NULL;
                m->all->work(m->all->data, m->number);
                threads_meet(m->all);
        }
}

void threads_meet(struct threads *t) {
        if (t->n > 1)
                pthread_barrier_wait(&t->barrier);
}

void threads_all(struct threads *t, threads_work *work, void *data) {
        t->work = work;
        t->data = data;
        threads_meet(t);
        work(data, 0);
        threads_meet(t);
}

/* ---- pieces ---------------------------------------------------------------------------------- */

struct pieces {
        atomic_uint next;
        uint32_t n;
        threads_piece *piece;
        void *data;
};

static void take_pieces(void *data, uint32_t thread) {
        struct pieces *p = data;
        uint32_t i;

        while ((i = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed)) < p->n)
                p->piece(p->data, i, thread);
}

void threads_share(struct threads *t, uint32_t n, threads_piece *piece, void *data) {
        struct pieces pieces = {.n = n, .piece = piece, .data = data};

        if (n > 1)
                threads_all(t, take_pieces, &pieces);
        else
                take_pieces(&pieces, 0);
}

/* ---- beginning and end ----------------------------------------------------------------------- */

static void start(struct threads *t, uint32_t wanted) {
        pthread_mutex_lock(&t->gate);
        for (t->n = 1; t->n < wanted; t->n++) {
                struct member *m = &t->members[t->n];

                *m = (struct member){.all = t, .number = t->n};
                if (pthread_create(&m->thread, NULL, follow, m) != 0)
                        break;
        }
        pthread_barrier_init(&t->barrier, NULL, t->n);
        pthread_mutex_unlock(&t->gate);
}

int threads_new(uint32_t wanted, struct threads **ret) {
        struct threads *t = sys->calloc(1, sizeof *t);
        struct member *members = sys->calloc(MAX(wanted, 1), sizeof *members);

        if (!t || !members) {
                free(t);
                free(members);
                return -ENOMEM;
        }
        t->members = members;
        pthread_mutex_init(&t->gate, NULL);
        start(t, wanted);
        *ret = t;
        return 0;
}

uint32_t threads_count(const struct threads *t) {
        return t->n;
}

struct threads *threads_free(struct threads *t) {
        if (!t)
                return NULL;
        t->work = NULL;
        threads_meet(t);
        for (uint32_t i = 1; i < t->n; i++)
                pthread_join(t->members[i].thread, NULL);
        pthread_barrier_destroy(&t->barrier);
        pthread_mutex_destroy(&t->gate);
        free(t->members);
        free(t);
        return NULL;
}
