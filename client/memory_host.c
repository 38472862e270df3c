/* SPDX-License-Identifier: Apache-2.0 */

/* A pool in shared memory, as its user maps it: memfds side by side in one reserved range. */

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "client/internal.h"
#include "ipc/base/sys.h"

#define HUGE_BYTES (UINT64_C(2) << 20)

/* Address space for all segments there can be, so that a growing pool keeps its base. */
static int reserve(struct view *view) {
        uint64_t bytes = (uint64_t)view->ix->max_segments * view->ix->segment_bytes + HUGE_BYTES;
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
        view->reserved = bytes - HUGE_BYTES;
        return 0;
}

static int map(struct view *view, uint32_t number, const struct segment_source *from, bool writable) {
        uint64_t bytes = view->ix->segment_bytes;
        uint8_t *at = view->base + number * bytes;
        int prot = PROT_READ | (writable ? PROT_WRITE : 0);

        if (sys->mmap(at, bytes, prot, MAP_SHARED | MAP_FIXED, from->fd, 0) == MAP_FAILED)
                return client_fail(-errno, "cannot map pool segment %u: %s", number, strerror(errno));
        sys->madvise(at, bytes, MADV_DONTFORK);
        return 0;
}

static void release(struct view *view) {
        if (view->base)
                munmap(view->base, view->reserved);
}

const struct mapping_kind mapping_host = {.reserve = reserve, .map = map, .release = release};
