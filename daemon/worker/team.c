/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/worker/team.h"

#include <pthread.h>
#include <stdatomic.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

/* A team lives as long as its process, so its threads are never ended. */

struct team {
        pthread_mutex_t lock;
        pthread_cond_t begun, ended;
        uint32_t threads;    /* the caller included */
        uint64_t round;      /* of team_run, under lock */
        uint32_t busy;       /* helpers in this round, under lock */
        atomic_uint next;    /* number to take */
        uint32_t n;
        team_piece *piece;
        void *data;
};

struct helper {
        struct team *team;
        uint32_t thread;
};

static void take_pieces(struct team *team, uint32_t thread) {
        uint32_t i;

        while ((i = atomic_fetch_add(&team->next, 1)) < team->n)
                team->piece(team->data, i, thread);
}

static void *help(void *data) {
        struct helper *helper = data;
        struct team *team = helper->team;
        uint64_t round = 0;

        for (;;) {
                pthread_mutex_lock(&team->lock);
                while (team->round == round)
                        pthread_cond_wait(&team->begun, &team->lock);
                round = team->round;
                pthread_mutex_unlock(&team->lock);
                take_pieces(team, helper->thread);
                pthread_mutex_lock(&team->lock);
                if (--team->busy == 0)
                        pthread_cond_signal(&team->ended);
                pthread_mutex_unlock(&team->lock);
        }
        return NULL;
}

struct team *team_new(uint32_t threads) {
        struct team *team = sys->calloc(1, sizeof *team);
        struct helper *helpers = sys->calloc(threads, sizeof *helpers);

        if (!team || !helpers) {
                free(team);
                free(helpers);
                return NULL;
        }
        pthread_mutex_init(&team->lock, NULL);
        pthread_cond_init(&team->begun, NULL);
        pthread_cond_init(&team->ended, NULL);
        for (team->threads = 1; team->threads < threads; team->threads++) {
                struct helper *h = &helpers[team->threads];
                pthread_t thread;

                *h = (struct helper){team, team->threads};
                if (pthread_create(&thread, NULL, help, h) != 0)
                        break;
                pthread_detach(thread);
        }
        return team;
}

uint32_t team_threads(const struct team *team) {
        return team->threads;
}

void team_run(struct team *team, uint32_t n, team_piece *piece, void *data) {
        bool alone = team->threads == 1 || n <= 1;

        if (alone) {
                for (uint32_t i = 0; i < n; i++)
                        piece(data, i, 0);
                return;
        }
        pthread_mutex_lock(&team->lock);
        team->n = n;
        team->piece = piece;
        team->data = data;
        atomic_store(&team->next, 0);
        team->busy = team->threads - 1;
        team->round++;
        pthread_cond_broadcast(&team->begun);
        pthread_mutex_unlock(&team->lock);
        take_pieces(team, 0);
        pthread_mutex_lock(&team->lock);
        while (team->busy)
                pthread_cond_wait(&team->ended, &team->lock);
        pthread_mutex_unlock(&team->lock);
}
