/* SPDX-License-Identifier: Apache-2.0 */

/* The thread has a window of address space, in which a file is mapped only while it is worked on. */

#include "daemon/serve/large_pages.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "daemon/base/chores.h"
#include "ipc/base/shared_file.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define TRIES 3

struct part {
        int fd; /* owned */
        uint64_t from, bytes;
};

struct large_pages {
        struct chores *chores;         /* owned */
        void *window;                  /* owned; SHARED_LARGE of address space for the thread */
        atomic_bool stop;              /* the thread ends with the page that it is at */
        _Atomic uint64_t made, failed; /* relaxed: for people */
};

/* The kernel gives up while somebody holds a page's lock, so it is asked again. */
static void enlarge(struct large_pages *large, int fd, uint64_t at) {
        int r = -EAGAIN;

        for (int i = 0; r == -EAGAIN && i < TRIES; i++)
                r = shared_file_enlarge(fd, at, large->window);
        atomic_fetch_add_explicit(r == 0 ? &large->made : &large->failed, 1, memory_order_relaxed);
}

static void work(void *data, const void *item) {
        struct large_pages *large = data;
        struct part part = *(const struct part *)item;

        for (uint64_t i = 0; i < part.bytes && !atomic_load(&large->stop); i += SHARED_LARGE)
                enlarge(large, part.fd, part.from + i);
        sys->mmap(large->window, SHARED_LARGE, PROT_NONE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        close(part.fd);
}

int large_pages_new(struct large_pages **ret) {
        _cleanup_(large_pages_freep) struct large_pages *large = sys->calloc(1, sizeof *large);
        int r = large ? chores_new(LARGE_PAGES_WAITING, sizeof(struct part), work, large,
                                   &large->chores) :
                        -ENOMEM;

        if (r == 0)
                r = shared_reserve(SHARED_LARGE, &large->window);
        if (r < 0)
                return r;
        *ret = STEAL(large);
        return 0;
}

struct large_pages *large_pages_free(struct large_pages *large) {
        struct part part;

        if (!large)
                return NULL;
        atomic_store(&large->stop, true);
        while (large->chores && chores_take_back(large->chores, &part))
                close(part.fd);
        chores_free(large->chores);
        if (large->window)
                munmap(large->window, SHARED_LARGE);
        free(large);
        return NULL;
}

void large_pages_freep(struct large_pages **large) {
        large_pages_free(*large);
}

void large_pages_want(struct large_pages *large, int fd, uint64_t from, uint64_t bytes) {
        struct part part = {fcntl(fd, F_DUPFD_CLOEXEC, 0), from, bytes};

        if (part.fd >= 0 && chores_add(large->chores, &part) == 0)
                return;
        closep(&part.fd);
        atomic_fetch_add_explicit(&large->failed, bytes / SHARED_LARGE, memory_order_relaxed);
}

bool large_pages_busy(struct large_pages *large) {
        return chores_left(large->chores) > 0;
}

struct large_pages_count large_pages_count(const struct large_pages *large) {
        return (struct large_pages_count){atomic_load_explicit(&large->made, memory_order_relaxed),
                                          atomic_load_explicit(&large->failed,
                                                               memory_order_relaxed)};
}
