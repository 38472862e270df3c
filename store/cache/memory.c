/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Segments in the host's memory: one of the two tables of memory.h. A segment is a memfd whose
 * address space is fixed and whose memory comes and goes: fallocate puts pages behind it, and a
 * hole punched into it gives them back to the kernel, cleared, while clients keep their mapping.
 */

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>

#include "ipc/base/sys.h"
#include "store/cache/inside.h"
#include "store/cache/memory.h"

#define FREE_BYTES (UINT64_C(8) << 20) /* of memory given back at once: about 2 ms */

static int make_memfd(struct space *space, struct segment *segment) {
        unsigned huge = space_store(space)->huge ? SHARED_HUGE : 0;
        int r = shared_file_new("kvd-pool", space->ix->segment_bytes, SHARED_TWIN | huge,
                                &segment->file);

        if (r == 0)
                segment->memory_version = 1;
        return r;
}

/* ---- getting it ------------------------------------------------------------------------------ */

static uint32_t vacant(const struct space *space, const struct segment *segment) {
        return 1;
}

static int begin(struct space *space, struct segment *segment) {
        int r = segment->file.fd < 0 ? make_memfd(space, segment) : 0;

        if (r == 0)
                segment->stale = 0; /* what it still has is as good as new: the space is the same */
        return r;
}

static int fill(struct space *space, struct segment *segment, uint32_t first, uint32_t n) {
        uint64_t block_bytes = space->ix->block_bytes, page = space_store(space)->page_bytes;
        uint64_t from = first * block_bytes / page * page;
        uint64_t to = MIN(ALIGN_UP((first + (uint64_t)n) * block_bytes, page),
                          space->ix->segment_bytes);

        if (to > from && sys->fallocate(segment->file.fd, 0, (off_t)from, (off_t)(to - from)) < 0)
                return -errno;
        return 0;
}

static int descriptor(struct space *space, struct segment *segment, bool writable) {
        return writable ? segment->file.fd : segment->file.fd_ro;
}

/* ---- giving it back -------------------------------------------------------------------------- */

/*
 * Freeing 64 MiB takes the kernel some 15 ms: it is done a piece at a time, when there is nothing
 * else to do. What is still to be freed is stale; it belongs to nobody's budget any more. There is
 * one stale segment at a time, so that under load no more than that is owed.
 */
static bool free_piece(struct segment *segment) {
        uint64_t n = MIN(segment->stale, FREE_BYTES);

        if (!n)
                return false;
        segment->stale -= n;
        sys->fallocate(segment->file.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                       (off_t)segment->stale, (off_t)n);
        return true;
}

static bool idle(struct store *store) {
        if (store->stale && free_piece(store->stale))
                return true;
        store->stale = NULL;
        return false;
}

static void let_go(struct space *space, struct segment *segment) {
        while (idle(space_store(space)))
                ;
        segment->stale = ALIGN_UP(segment->n_ready * space->ix->block_bytes,
                                  space_store(space)->page_bytes);
        space_store(space)->stale = segment;
}

/* Clients that have it mapped keep what they have mapped. */
static bool bury(struct space *space, struct segment *segment) {
        if (segment->file.fd < 0)
                return false;
        if (free_piece(segment))
                return true;
        if (space_store(space)->stale == segment)
                space_store(space)->stale = NULL;
        shared_file_close(&segment->file);
        return true;
}

static void close_nothing(struct store *store) {
}

static void handed_out(struct attachment *a, uint32_t segment) {
}

static bool scarce(const struct store *store) {
        return false;
}

const struct memory_ops memory_host = {.close = close_nothing,
                                       .vacant = vacant,
                                       .begin = begin,
                                       .fill = fill,
                                       .let_go = let_go,
                                       .bury = bury,
                                       .idle = idle,
                                       .descriptor = descriptor,
                                       .handed_out = handed_out,
                                       .scarce = scarce};
