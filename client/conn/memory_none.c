/* SPDX-License-Identifier: Apache-2.0 */

/*
 * KVD_SPACE_INDEX_ONLY: a process that finds, allocates and publishes blocks, and never touches them.
 * Blocks have addresses all the same, as in other processes, but an access raises SIGSEGV.
 */

#include <sys/mman.h>

#include "client/internal.h"
#include "ipc/base/sys.h"

static int reserve(struct view *view) {
        uint64_t bytes = (uint64_t)view->ix->max_segments * kvd_shard_segment(view->ix);
        void *at = sys->mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                             -1, 0);

        if (at == MAP_FAILED)
                return client_fail(negative_errno(), "no addresses for a pool of %llu bytes",
                                   (unsigned long long)bytes);
        view->base = view->sealed = at;
        view->reserved = bytes;
        return 0;
}

uint32_t mapping_none_note(struct view *view, uint32_t first) {
        uint32_t end = MIN(atomic_load(&view->ix->n_segments), view->ix->max_segments), at = first;

        for (; at < end; at++) {
                atomic_store(&view->memory[at], atomic_load(&kvd_index_memory(view->ix)[at]));
                view_set_segment(view, at, true, true);
        }
        return at - first;
}

static int map(struct view *view, uint32_t number, const struct segment_source *from,
               bool writable) {
        return 0;
}

static void release(struct view *view) {
        if (view->base)
                munmap(view->base, view->reserved);
}

const struct mapping_kind mapping_none = {.reserve = reserve, .map = map, .release = release};
