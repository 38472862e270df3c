/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A pool in shared memory, as its user maps it: memfds side by side in one reserved range, which has them twice. In
 * the lower half the caller may write where the daemon lets him; in the upper half nobody may. Pins, and blocks once
 * they are sealed, are given out as addresses of the upper half, so that a stray write through one of them ends its own
 * process and not everybody's cache.
 */

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "client/internal.h"
#include "ipc/base/sys.h"

#define HUGE_BYTES (UINT64_C(2) << 20)

/* Address space for all segments there can be, so that a growing pool keeps its base. */
static int reserve(struct view *view) {
        uint64_t half = ALIGN_UP((uint64_t)view->ix->max_segments * view->ix->segment_bytes, HUGE_BYTES);
        uint64_t bytes = 2 * half + HUGE_BYTES;
        uint8_t *at = sys->mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        uint8_t *aligned;

        if (at == MAP_FAILED)
                return client_fail(-errno, "no address space for a pool of %llu bytes", (unsigned long long)bytes);
        aligned = (uint8_t *)ALIGN_UP((uintptr_t)at, HUGE_BYTES);
        if (aligned > at)
                munmap(at, (size_t)(aligned - at));
        if (aligned - at < (ptrdiff_t)HUGE_BYTES)
                munmap(aligned + bytes - HUGE_BYTES, (size_t)(at + HUGE_BYTES - aligned));
        view->base = aligned;
        view->sealed = aligned + half;
        view->reserved = half;
        return 0;
}

static int map_at(const struct view *view, uint8_t *range, uint32_t number, int fd, int prot) {
        uint64_t bytes = view->ix->segment_bytes;
        uint8_t *at = range + number * bytes;

        if (sys->mmap(at, bytes, prot, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
                return client_fail(-errno, "cannot map pool segment %u: %s", number, strerror(errno));
        sys->madvise(at, bytes, MADV_DONTFORK);
        return 0;
}

static int map(struct view *view, uint32_t number, const struct segment_source *from, bool writable) {
        int r = view_has(view, number) ? 0 : map_at(view, view->sealed, number, from->fd, PROT_READ);

        return r == 0 ? map_at(view, view->base, number, from->fd, PROT_READ | (writable ? PROT_WRITE : 0)) : r;
}

static void release(struct view *view) {
        if (view->base)
                munmap(view->base, 2 * view->reserved);
}

const struct mapping_kind mapping_host = {.reserve = reserve, .map = map, .release = release};
