/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A lifeline outlives its connection, since memory may be in use after a connection is lost. It is
 * closed only when no daemon watches the other end any more, so there are about as many as the
 * daemon has clients in this process. The list has no lock: a forked child could find it locked.
 */

#include "client/conn/lifeline.h"

#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

#include "client/conn/error.h"
#include "client/conn/forked.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

struct held {
        int fd; /* owned */
        struct held *next;
};

static _Atomic(struct held *) held;

static void keep(struct held *h) {
        h->next = atomic_load(&held);
        while (!atomic_compare_exchange_weak(&held, &h->next, h))
                ;
}

static bool is_watched(int fd) {
        struct pollfd p = {.fd = fd};

        return sys->poll(&p, 1, 0) < 0 || !(p.revents & POLLERR);
}

static void let_go(void) {
        struct held *h = atomic_exchange(&held, NULL), *next;

        for (; h; h = next) {
                next = h->next;
                if (is_watched(h->fd)) {
                        keep(h);
                        continue;
                }
                close(h->fd);
                free(h);
        }
}

int lifeline_hold(int fd) {
        struct held *h = sys->calloc(1, sizeof *h);

        if (!h) {
                close(fd);
                return client_fail(-ENOMEM, "out of memory");
        }
        let_go();
        h->fd = fd;
        keep(h);
        return 0;
}

/* The page with this process' number; forked children see 0. NULL: out of memory. */
static _Atomic uint64_t *number_page(void) {
        static _Atomic(_Atomic uint64_t *) page;
        _Atomic uint64_t *there = atomic_load(&page), *made;

        if (there)
                return there;
        made = forked_page_new();
        if (!made || atomic_compare_exchange_strong(&page, &there, made))
                return made;
        forked_page_free((void *)made);
        return there;
}

int lifeline_process(uint64_t *ret) {
        _Atomic uint64_t *number = number_page();
        uint64_t none = 0, random;

        if (!number || sys->getrandom(&random, sizeof random, 0) != sizeof random)
                return client_fail(-ENOMEM, "cannot generate a number for this process");
        atomic_compare_exchange_strong(number, &none, random | 1);
        *ret = atomic_load(number);
        return 0;
}
