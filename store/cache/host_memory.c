/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Segments in host memory: one of the two tables of memory.h. A segment is a memfd. fallocate gives
 * it pages, and punching a hole gives them back to the kernel while clients keep their mapping. New
 * pages are zero.
 *
 * A client that was once given a memfd's descriptor may keep it, and write into it at any time. So
 * a memfd serves one segment of one space only, and for a limited time:
 *
 *      isolation = arena    while it has memory; the segment's next writer gets a new memfd
 *      isolation = shared   while the space has clients, so that their addresses stay valid; if a
 *                           client writes into a hole, it is punched again
 */

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/stat.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "store/account.h"
#include "store/cache/inside.h"
#include "store/cache/memory.h"
#include "store/job.h"
#include "store/keep_inside.h"

#define FREE_BYTES (UINT64_C(4) << 20)   /* given back at once: about a millisecond */
#define LARGE_AHEAD (UINT64_C(16) << 20) /* large pages that are wanted before they are needed */

/* Tells clients that have the segment mapped that it is another memfd now. */
static void tell_clients(struct space *space, const struct segment *segment) {
        atomic_store(&kvd_index_memory(space->ix)[segment->number], segment->memory_version);
        atomic_fetch_add(&space->ix->memory_epoch, 1);
}

static int make_memfd(struct space *space, struct segment *segment) {
        unsigned huge = space_store(space)->pages.huge ? SHARED_HUGE : 0,
                 twin = space->ix->arena ? SHARED_TWIN : 0;
        int r;

        if (account_room(space->domain, KVD_COST_files) < segment_files(space->ix))
                return -EMFILE;
        r = shared_file_new("kvd-pool", space->ix->segment_bytes, twin | huge, &segment->file);
        if (r < 0)
                return r;
        account_add(space, KVD_COST_files, segment_files(space->ix));
        segment->memory_version++;
        tell_clients(space, segment);
        keep_segment(space, segment, &segment->file.fd);
        return 0;
}

static int adopt(struct space *space, struct segment *segment, uint32_t version, int *fd) {
        unsigned huge = space_store(space)->pages.huge ? SHARED_HUGE : 0,
                 twin = space->ix->arena ? SHARED_TWIN : 0;
        int r = account_room(space->domain, KVD_COST_files) < segment_files(space->ix) ? -EMFILE :
                                                                                         0;

        if (r == 0)
                r = shared_file_adopt(fd, space->ix->segment_bytes, twin | huge, &segment->file);
        if (r < 0)
                return r;
        account_add(space, KVD_COST_files, segment_files(space->ix));
        segment->memory_version = version;
        tell_clients(space, segment);
        return 0;
}

/* ---- getting it ------------------------------------------------------------------------------ */

static uint32_t vacant(const struct space *space, const struct segment *segment) {
        return 1;
}

static int begin(struct space *space, struct segment *segment) {
        int r = segment->file.fd < 0 ? make_memfd(space, segment) : 0;

        if (r == 0)
                /* its pages can be used again: the space is the same */
                segment->stale = segment->large = 0;
        return r;
}

/*
 * Asks for large pages for the memory up to `filled`, and for some of the segment behind it, which
 * gets its first small pages here. Memory is filled ahead only once they have come.
 */
static void want_large(struct space *space, struct segment *segment, uint64_t filled) {
        const struct pages *pages = &space_store(space)->pages;
        uint64_t to = MIN(ALIGN_UP(filled + LARGE_AHEAD, SHARED_LARGE), space->ix->segment_bytes);

        if (!pages->maker.want || !pages->large || pages->huge ||
            space->ix->segment_bytes % SHARED_LARGE || segment->large >= to)
                return;
        for (uint64_t at = MAX(segment->large, ALIGN_UP(filled, SHARED_LARGE)); at < to;
             at += SHARED_LARGE)
                sys->fallocate(segment->file.fd, 0, (off_t)at, (off_t)pages->bytes);
        pages->maker.want(pages->maker.data, segment->file.fd, segment->large, to - segment->large);
        segment->large = to;
}

static int fill(struct space *space, struct segment *segment, uint32_t first, uint32_t n) {
        uint64_t block_bytes = space->ix->block_bytes, page = space_store(space)->pages.bytes;
        uint64_t from = first * block_bytes / page * page;
        uint64_t to = MIN(ALIGN_UP((first + (uint64_t)n) * block_bytes, page),
                          space->ix->segment_bytes);

        if (to > from && sys->fallocate(segment->file.fd, 0, (off_t)from, (off_t)(to - from)) < 0)
                return negative_errno();
        want_large(space, segment, to);
        return 0;
}

/*
 * With isolation = shared every existing segment can be mapped, even without memory, since engines
 * compute addresses.
 */
static int descriptor(struct space *space, struct segment *segment, uint32_t shard, bool writable) {
        if (shard)
                return -ENOENT;
        if (segment->file.fd < 0 && (space->ix->arena || make_memfd(space, segment) < 0))
                return -ENODATA;
        return writable ? segment->file.fd : segment->file.fd_ro;
}

/* ---- giving it back -------------------------------------------------------------------------- */

/*
 * Freeing 64 MiB takes the kernel some 15 ms, so it is done in pieces as idle work. Memory that is
 * still to be freed is stale, and is not charged to any domain. Only one memfd is stale at a time,
 * which limits the backlog under load.
 */
static bool free_piece(const struct shared_file *file, uint64_t *bytes) {
        uint64_t n = MIN(*bytes, FREE_BYTES);

        if (!n)
                return false;
        *bytes -= n;
        sys->fallocate(file->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)*bytes,
                       (off_t)n);
        return true;
}

static bool idle(struct store *store) {
        if (store->owed.stale && free_piece(&store->owed.stale->file, &store->owed.stale->stale))
                return true;
        store->owed.stale = NULL;
        if (free_piece(&store->owed.retired, &store->owed.retired_bytes))
                return true;
        shared_file_close(&store->owed.retired);
        return false;
}

/* A worker that has the old memfd mapped keeps its memory, so it is asked to unmap it. */
static void leave_worker(struct store *store, struct segment *segment) {
        if (!segment->worker || segment->unmap.in)
                return;
        kvd_list_insert(&store->owed.unmaps, NULL, &segment->unmap);
        jobs_want_worker(store);
}

/* Gives up the segment's memfd. Clients that still have it mapped share it with nothing else. */
static void retire(struct space *space, struct segment *segment) {
        struct store *store = space_store(space);

        if (store->owed.stale == segment)
                store->owed.stale = NULL;
        account_discharge(space, KVD_COST_files, segment_files(space->ix));
        drop_segment(space, segment);
        store->owed.retired = segment->file;
        store->owed.retired_bytes = space->ix->segment_bytes;
        segment->file = SHARED_FILE_NONE;
        segment->stale = 0;
        leave_worker(store, segment);
}

static bool keeps_memfds(const struct space *space) {
        return !space->ix->arena && space_users(space) > 0;
}

static bool let_go(struct space *space, struct segment *segment) {
        if (idle(space_store(space)))
                return false;
        if (!keeps_memfds(space)) {
                retire(space, segment);
                return true;
        }
        segment->stale = space->ix->segment_bytes;
        space_store(space)->owed.stale = segment;
        return true;
}

/* Only closes the memfd, if any: it is left to the next daemon. */
static void leave_file(struct store *store, struct segment *segment) {
        if (store->owed.stale == segment)
                store->owed.stale = NULL;
        shared_file_close(&segment->file);
}

/* Clients keep their mappings. */
static bool bury(struct space *space, struct segment *segment) {
        bool more = segment->file.fd >= 0 && !space->memory.left;

        if (more)
                retire(space, segment);
        else
                leave_file(space_store(space), segment);
        kvd_list_remove(&segment->unmap); /* a worker forgets the space as a whole */
        return more;
}

/* ---- segments without memory ----------------------------------------------------------------- */

#define TIDY_LOOKS 64u /* segments looked at in one call */

static bool has_pages(const struct segment *segment) {
        struct stat st;

        return fstat(segment->file.fd, &st) == 0 && st.st_blocks > 0;
}

/* False: nothing (more) to do. */
static bool tidy_segment(struct space *space, struct segment *segment) {
        struct store *store = space_store(space);

        if (segment->file.fd < 0 || segment->n_ready || store->owed.stale == segment)
                return false;
        if (!keeps_memfds(space)) {
                if (!idle(store))
                        retire(space, segment);
                return true;
        }
        if (free_piece(&segment->file, &segment->stale))
                return true;
        if (has_pages(segment))
                segment->stale = space->ix->segment_bytes;
        return segment->stale > 0;
}

static bool tidy(struct space *space) {
        uint32_t n = atomic_load_explicit(&space->ix->n_segments, memory_order_relaxed);
        uint32_t end = MIN(n, space->memory.tidy + TIDY_LOOKS);

        for (; space->memory.tidy < end; space->memory.tidy++)
                if (tidy_segment(space, &space->memory.segments[space->memory.tidy]))
                        return true;
        return end < n;
}

/* ---- the rest of the table ------------------------------------------------------------------- */

static bool next_unmap(struct store *store, struct space **space, uint32_t *number) {
        struct segment *segment = kvd_list_first(&store->owed.unmaps, struct segment, unmap);

        if (!segment)
                return false;
        kvd_list_remove(&segment->unmap);
        *space = segment->arena->space;
        *number = segment->number;
        return true;
}

static void end(struct store *store) {
        while (idle(store))
                ;
}

static void handed_out(struct attachment *a, uint32_t segment) {
}

static bool scarce(const struct store *store) {
        return false;
}

const struct memory_ops memory_host = {.close = end,
                                       .vacant = vacant,
                                       .begin = begin,
                                       .fill = fill,
                                       .adopt = adopt,
                                       .let_go = let_go,
                                       .bury = bury,
                                       .idle = idle,
                                       .tidy = tidy,
                                       .descriptor = descriptor,
                                       .handed_out = handed_out,
                                       .next_unmap = next_unmap,
                                       .scarce = scarce};
