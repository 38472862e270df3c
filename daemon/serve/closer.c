/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Since Linux 6.16 a socket can refuse descriptors (SO_PASSRIGHTS). Before, they stay unread in its
 * queue, and are closed when the socket is. A close that lingers returns at a signal, so the thread
 * sends itself a signal every 10 ms while it closes.
 */

#include "daemon/serve/closer.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/chores.h"
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
        struct chores *chores; /* owned */
        timer_t nudge;         /* of the thread, once it has closed something */
        bool has_nudge;
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
        sigemptyset(&set);
        sigaddset(&set, NUDGE);
        pthread_sigmask(SIG_UNBLOCK, &set, NULL);
        timer_create(CLOCK_MONOTONIC, &event, &timer);
        return timer;
}

static void close_slowly(void *data, const void *item) {
        const struct itimerspec on = {.it_value.tv_nsec = NUDGE_NS,
                                      .it_interval.tv_nsec = NUDGE_NS},
                                off = {0};
        struct closer *c = data;

        if (!c->has_nudge)
                c->nudge = make_nudge();
        c->has_nudge = true;
        timer_settime(c->nudge, 0, &on, NULL);
        close(*(const int *)item);
        timer_settime(c->nudge, 0, &off, NULL);
}

/* ---- life ------------------------------------------------------------------------------------ */

int closer_new(uint32_t room, struct closer **ret) {
        struct closer *c = sys->calloc(1, sizeof *c);
        int r = c ? chores_new(room, sizeof(int), close_slowly, c, &c->chores) : -ENOMEM;

        if (r < 0) {
                free(c);
                return r;
        }
        *ret = c;
        return 0;
}

struct closer *closer_free(struct closer *c) {
        if (!c)
                return NULL;
        chores_free(c->chores);
        if (c->has_nudge)
                timer_delete(c->nudge);
        free(c);
        return NULL;
}

void closer_take(struct closer *c, int fd) {
        int r = chores_add(c->chores, &fd);

        if (r == 0)
                return;
        if (r != -EAGAIN)
                log_limited(LOG_ERR, "no thread can be started to close large files");
        degraded_note(closing);
        close(fd);
}

uint32_t closer_waiting(struct closer *c) {
        return chores_left(c->chores);
}
