/* SPDX-License-Identifier: Apache-2.0 */

/*
 * FAKECUDA_SLICE: a device does the kernels and sets of one process at a time, as a GPU without MPS
 * does. A process has the device until it has no more work there, or until its slice has ended and
 * another process waits, even in the middle of a kernel. The process whose turn it is has locked a
 * byte of this library's file, and the next process has locked another byte. The operating system
 * releases the locks of a killed process, and a forked process does not inherit them.
 */

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/gpu/fakecuda/driver.h"

enum byte { DEVICE, NEXT, N_BYTES };

static struct turn {
        pthread_mutex_t lock; /* held during a piece of work, which are done one by one */
        bool has;
        uint64_t began_ns;
} turns[FAKE_DEVICES] = {[0 ... FAKE_DEVICES - 1] = {.lock = PTHREAD_MUTEX_INITIALIZER}};

static __thread struct turn *mine; /* turn of the device whose work this thread does */

static int file(void) {
        static _Atomic int fd = -1;
        Dl_info here;
        int made, none = -1;

        if (fd >= 0)
                return fd;
        if (!dladdr(&turns, &here) || (made = open(here.dli_fname, O_RDWR | O_CLOEXEC)) < 0)
                abort();
        if (!atomic_compare_exchange_strong(&fd, &none, made))
                close(made); /* nothing is locked yet */
        return fd;
}

/* Groups that share a byte by chance take turns with each other. */
static struct flock lock_of(const struct turn *turn, enum byte byte, short type) {
        uint64_t group = 0;

        for (const char *at = fake_settings.group; *at; at++)
                group = group * 37 + (uint64_t)*at;
        return (struct flock){.l_type = type,
                              .l_whence = SEEK_SET,
                              .l_len = 1,
                              .l_start = (off_t)((group % (1u << 30) * FAKE_DEVICES +
                                                  (uint64_t)(turn - turns)) *
                                                         N_BYTES +
                                                 byte)};
}

static void change(const struct turn *turn, enum byte byte, short type) {
        struct flock lock = lock_of(turn, byte, type);

        while (fcntl(file(), F_SETLKW, &lock) < 0)
                if (errno != EINTR)
                        abort();
}

static uint64_t now_ns(void) {
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static void take(struct turn *turn) {
        change(turn, NEXT, F_WRLCK);
        change(turn, DEVICE, F_WRLCK);
        change(turn, NEXT, F_UNLCK);
        turn->has = true;
        turn->began_ns = now_ns();
}

static void give(struct turn *turn) {
        change(turn, DEVICE, F_UNLCK);
        turn->has = false;
}

static bool is_over(const struct turn *turn) {
        struct flock lock = lock_of(turn, NEXT, F_WRLCK);

        if (now_ns() < turn->began_ns + fake_settings.slice * UINT64_C(1000000))
                return false;
        return fcntl(file(), F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

void turn_begin(const struct device *device) {
        struct turn *turn = &turns[device->number];

        if (!fake_settings.slice)
                return;
        pthread_mutex_lock(&turn->lock);
        if (!turn->has)
                take(turn);
        mine = turn;
}

void turn_look(void) {
        if (mine && is_over(mine)) {
                give(mine);
                take(mine);
        }
}

void turn_end(bool more) {
        struct turn *turn = mine;

        if (!turn)
                return;
        mine = NULL;
        if (!more || is_over(turn))
                give(turn);
        pthread_mutex_unlock(&turn->lock);
}

void turn_drop(const struct device *device) {
        struct turn *turn = &turns[device->number];

        if (!fake_settings.slice)
                return;
        pthread_mutex_lock(&turn->lock);
        if (turn->has)
                give(turn);
        pthread_mutex_unlock(&turn->lock);
}
