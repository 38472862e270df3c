/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Since Linux 6.16 a socket can refuse descriptors (SO_PASSRIGHTS). Before, they stay unread in its
 * queue, and are closed when the socket is. A close that lingers returns at a signal, so the thread
 * sends itself a signal every 10 ms while it closes.
 */

#include "daemon/serve/closer.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/degraded.h"
#include "daemon/base/log.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83 /* Linux 6.16 */
#endif
#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

#define NUDGE SIGUSR1
#define NUDGE_NS 10000000

struct closer {
        pthread_t thread;
        bool runs, stop;
        pthread_mutex_t mutex;
        pthread_cond_t changed;
        uint32_t room, first, n; /* the ring in fds */
        int fds[];               /* owned; room entries */
};

/* ---- which sockets --------------------------------------------------------------------------- */

bool closer_forbid_fds(int listening) {
        int no = 0;

        return sys->setsockopt(listening, SOL_SOCKET, SO_PASSRIGHTS, &no, sizeof no) == 0;
}

/*
 * On a service manager's socket, connections that were made before closer_forbid_fds accept
 * descriptors, as with an older kernel. Other ancillary data would look like descriptors, so it is
 * turned off.
 */
bool closer_is_needed(int connection) {
        int allowed = 1, no = 0;
        unsigned n = sizeof allowed;

        if (sys->getsockopt(connection, SOL_SOCKET, SO_PASSRIGHTS, &allowed, &n) == 0 && !allowed)
                return false;
        sys->setsockopt(connection, SOL_SOCKET, SO_PASSCRED, &no, sizeof no);
        sys->setsockopt(connection, SOL_SOCKET, SO_PASSSEC, &no, sizeof no);
        return true;
}

/* ---- thread ---------------------------------------------------------------------------------- */

static void nudged(int number) {
}

static timer_t make_nudge(void) {
        struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = NUDGE};
        struct sigaction action = {.sa_handler = nudged};
        timer_t timer = NULL;
        sigset_t set;

        event.sigev_notify_thread_id = gettid();
        sigaction(NUDGE, &action, NULL);
        sigfillset(&set);
        sigdelset(&set, NUDGE);
        pthread_sigmask(SIG_SETMASK, &set, NULL);
        timer_create(CLOCK_MONOTONIC, &event, &timer);
        return timer;
}

static void close_slowly(timer_t timer, int fd) {
        const struct itimerspec on = {.it_value.tv_nsec = NUDGE_NS,
                                      .it_interval.tv_nsec = NUDGE_NS},
                                off = {0};

        timer_settime(timer, 0, &on, NULL);
        close(fd);
        timer_settime(timer, 0, &off, NULL);
}

static int next(struct closer *c) {
        int fd = -1;

        pthread_mutex_lock(&c->mutex);
        while (!c->n && !c->stop)
                pthread_cond_wait(&c->changed, &c->mutex);
        if (c->n) {
                fd = c->fds[c->first];
                c->first = (c->first + 1) % c->room;
                c->n--;
        }
        pthread_mutex_unlock(&c->mutex);
        return fd;
}

static void *run(void *data) {
        timer_t timer = make_nudge();

        for (int fd; (fd = next(data)) >= 0;)
                close_slowly(timer, fd);
        timer_delete(timer);
        return NULL;
}

/* ---- life ------------------------------------------------------------------------------------ */

int closer_new(uint32_t room, struct closer **ret) {
        struct closer *c = sys->calloc(1, sizeof *c + room * sizeof *c->fds);

        if (!c)
                return -ENOMEM;
        c->room = room;
        pthread_mutex_init(&c->mutex, NULL);
        pthread_cond_init(&c->changed, NULL);
        *ret = c;
        return 0;
}

struct closer *closer_free(struct closer *c) {
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

static void close_here(int fd) {
        degraded_note(closing);
        close(fd);
}

void closer_take(struct closer *c, int fd) {
        bool taken;

        if (!c->runs)
                c->runs = pthread_create(&c->thread, NULL, run, c) == 0;
        if (!c->runs) {
                log_limited(LOG_ERR, "no thread can be started to close large files");
                close_here(fd);
                return;
        }
        pthread_mutex_lock(&c->mutex);
        taken = c->n < c->room;
        if (taken)
                c->fds[(c->first + c->n++) % c->room] = fd;
        pthread_cond_signal(&c->changed);
        pthread_mutex_unlock(&c->mutex);
        if (!taken)
                close_here(fd);
}

uint32_t closer_waiting(struct closer *c) {
        uint32_t n;

        pthread_mutex_lock(&c->mutex);
        n = c->n;
        pthread_mutex_unlock(&c->mutex);
        return n;
}
