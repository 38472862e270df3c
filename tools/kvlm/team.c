/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/team.h"

#include <errno.h>
#include <pthread.h>

#include "ipc/base/util.h"
#include "tools/kvlm/refuse.h"

struct member {
        struct team *team;
        uint32_t index;
        pthread_t thread;
};

struct team {
        pthread_mutex_t gate; /* held until the size of the team, and so the barrier, is known */
        pthread_barrier_t barrier;
        uint32_t size;
        struct member *members;

        /* written by member 0 before the barrier that starts a run, read by the others behind it */
        void (*work)(void *data, uint32_t member); /* NULL: go home */
        void *data;
};

static void *follow(void *data) {
        struct member *m = data;

        pthread_mutex_lock(&m->team->gate);
        pthread_mutex_unlock(&m->team->gate);
        for (;;) {
                team_meet(m->team);
                if (!m->team->work)
                        return NULL;
                m->team->work(m->team->data, m->index);
                team_meet(m->team);
        }
}

void team_meet(struct team *t) {
        pthread_barrier_wait(&t->barrier);
}

void team_run(struct team *t, void (*work)(void *data, uint32_t member), void *data) {
        t->work = work;
        t->data = data;
        team_meet(t);
        work(data, 0);
        team_meet(t);
}

/* A thread that cannot be started makes the team smaller. */
static void start(struct team *t, uint32_t members) {
        pthread_mutex_lock(&t->gate);
        for (t->size = 1; t->size < members; t->size++) {
                struct member *m = t->members + t->size;

                *m = (struct member){.team = t, .index = t->size};
                if (pthread_create(&m->thread, NULL, follow, m) != 0)
                        break;
        }
        pthread_barrier_init(&t->barrier, NULL, t->size);
        pthread_mutex_unlock(&t->gate);
}

int team_new(uint32_t members, struct team **ret) {
        struct team *t = calloc(1, sizeof *t);

        if (!t)
                return refuse(-ENOMEM, "out of memory");
        t->members = calloc(members, sizeof *t->members);
        if (!t->members) {
                free(t);
                return refuse(-ENOMEM, "out of memory for %u threads", members);
        }
        pthread_mutex_init(&t->gate, NULL);
        start(t, members);
        *ret = t;
        return 0;
}

uint32_t team_size(const struct team *t) {
        return t->size;
}

struct team *team_free(struct team *t) {
        if (!t)
                return NULL;
        t->work = NULL;
        team_meet(t);
        for (uint32_t i = 1; i < t->size; i++)
                pthread_join(t->members[i].thread, NULL);
        pthread_barrier_destroy(&t->barrier);
        pthread_mutex_destroy(&t->gate);
        free(t->members);
        free(t);
        return NULL;
}
