/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A reload is a thread that reads the file once, and an eventfd to which it writes at its end.
 * Requests meanwhile cause one more reading, since the file may have changed after the first one.
 */

#include "daemon/main/reload.h"

#include <errno.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "daemon/main/options.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

static void *run(void *data) {
        struct reload *reload = data;
        uint64_t one = 1;

        reload->r = options_load(reload->options, &reload->next, &reload->why);
        while (write(reload->done.fd, &one, sizeof one) < 0 && errno == EINTR)
                ;
        return NULL;
}

bool reload_begin(struct reload *reload) {
        reload->again = reload->runs;
        if (!reload->runs)
                reload->runs = pthread_create(&reload->thread, NULL, run, reload) == 0;
        return reload->runs;
}

static void thread_done(struct loop_source *source, short revents) {
        struct reload *reload = container_of(source, struct reload, done);
        uint64_t n;

        if (read(source->fd, &n, sizeof n) != sizeof n)
                return;
        pthread_join(reload->thread, NULL);
        reload->runs = false;
        if (!reload->again) {
                reload->loaded(reload, reload->r, &reload->next, &reload->why);
                return;
        }
        config_clear(&reload->next);
        if (!reload_begin(reload))
                reload->loaded(reload,
                               kvd_refuse(&reload->why, -EAGAIN, "no thread can be started"),
                               &reload->next, &reload->why);
}

int reload_init(struct reload *reload, struct loop *loop) {
        reload->done.events = POLLIN;
        reload->done.ready = thread_done;
        reload->done.fd = sys->eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        return reload->done.fd < 0 ? negative_errno() : loop_add(loop, &reload->done);
}

void reload_close(struct reload *reload) {
        if (reload->runs) {
                pthread_cancel(reload->thread); /* it may be blocked for ever */
                pthread_join(reload->thread, NULL);
                config_clear(&reload->next);
        }
        reload->runs = false;
        closep(&reload->done.fd);
        reload->done.fd = -1;
}
