/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Maps a pool in shared memory: memfds side by side in one reserved range, each mapped twice. The
 * lower half is writable where the daemon permits it; the upper half is read-only. Pins and sealed
 * blocks have addresses in the upper half, so that a stray write through one of them kills its own
 * process and does not damage the shared cache.
 *
 * The view owns the reservation. If the space has fixed addresses, the space owns it: its views use
 * it one after the other, and a new one maps nothing before the old ones are unmapped.
 */

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "client/internal.h"
#include "ipc/base/shared_file.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

static int reserve_range(uint64_t half, uint8_t **ret) {
        void *at;
        int r = shared_reserve(2 * half, &at);

        if (r < 0)
                return client_fail(r, "no address space for a pool of %llu bytes",
                                   (unsigned long long)(2 * half));
        *ret = at;
        return 0;
}

static int check_fits(const struct view *view, uint64_t half) {
        const struct kvd_space *space = view->space;

        if (half <= space->fixed.reserved && view->ix->capacity <= space->fixed.blocks)
                return 0;
        return client_fail(-ENOSPC,
                           "the new daemon's space '%s' has %u blocks, but the fixed addresses "
                           "have room for %u; open the space again",
                           space->name, view->ix->capacity, space->fixed.blocks);
}

/* Reserves addresses for the maximum number of segments, so that a growing pool keeps its base. */
static int reserve(struct view *view) {
        uint32_t shard = view->space->options.shard;
        uint64_t half = ALIGN_UP((uint64_t)view->ix->max_segments * view->ix->segment_bytes,
                                 SHARED_LARGE);
        struct kvd_space *space = view->space;
        uint8_t *base = space->fixed.base;
        int r;

        if (shard)
                return client_fail(-EINVAL,
                                   "the pool is in host memory, which has no shards, and "
                                   "options.shard is %u",
                                   shard);
        r = base ? check_fits(view, half) : reserve_range(half, &base);
        if (r < 0)
                return r;
        if (is_fixed(space) && !space->fixed.base) {
                space->fixed.base = base;
                space->fixed.reserved = half;
                space->fixed.blocks = view->ix->capacity;
        }
        view->base = base;
        view->reserved = space->fixed.base ? space->fixed.reserved : half;
        view->sealed = base + view->reserved;
        return 0;
}

static int map_at(const struct view *view, uint8_t *range, uint32_t number, int fd, int prot) {
        uint64_t bytes = view->ix->segment_bytes;
        uint8_t *at = range + number * bytes;

        if (sys->mmap(at, bytes, prot, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
                return client_fail(negative_errno(), "cannot map pool segment %u: %s", number,
                                   strerror(errno));
        sys->madvise(at, bytes, MADV_DONTFORK);
        return 0;
}

static int map(struct view *view, uint32_t number, const struct segment_source *from,
               bool writable) {
        int r = 0;

        if (is_fixed(view->space) && !view_is_last(view))
                return client_fail(-ESTALE, "blocks or pins of the previous daemon are still held, "
                                            "and the addresses are fixed: release them first");
        if (!view_has(view, number))
                r = map_at(view, view->sealed, number, from->fd, PROT_READ);
        return r == 0 ? map_at(view, view->base, number, from->fd,
                               PROT_READ | (writable ? PROT_WRITE : 0)) :
                        r;
}

/*
 * Fixed addresses stay reserved. If the kernel has no memory for that, segments stay mapped until
 * others replace them.
 */
static void release(struct view *view) {
        if (!view->base)
                return;
        if (!is_fixed(view->space))
                munmap(view->base, 2 * view->reserved);
        else if (view_has_any(view)) /* otherwise an older view uses them */
                mmap(view->base, 2 * view->reserved, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void mapping_host_end(struct kvd_space *space) {
        if (space->fixed.base)
                munmap(space->fixed.base, 2 * space->fixed.reserved);
}

const struct mapping_kind mapping_host = {.reserve = reserve, .map = map, .release = release};
