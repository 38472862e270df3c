/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Mappings of one attachment. A lookup holds a reference while it reads; a pin and a block that the
 * caller fills hold one each until they are released. When the daemon is replaced, the space gets a
 * new view, and the old one is unmapped with its last reference. The struct itself lives until the
 * space is closed, so that a thread that was late in view_get may still touch its reference count.
 */

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "client/gpu/gpu_view.h"
#include "ipc/base/shared_file.h"
#include "ipc/base/sys.h"

/* ---- references ------------------------------------------------------------------------------ */

bool view_is_current(const struct view *view) {
        return atomic_load(&view->space->view) == view;
}

bool view_is_connected(const struct view *view) {
        const struct kvd *handle = view->space->handle;

        return view->epoch == handle->epoch && conn_is_open(handle->conn);
}

void view_count(const struct view *view, uint64_t counters[COUNTERS]) {
        static const enum counter place[KVD_N_CLIENT_COUNTERS] = {
                [KVD_CLIENT_LOOKUPS] = COUNT_LOOKUPS,
                [KVD_CLIENT_HITS] = COUNT_HITS,
                [KVD_CLIENT_TOKENS_ASKED] = COUNT_TOKENS_ASKED,
                [KVD_CLIENT_TOKENS_FOUND] = COUNT_TOKENS_FOUND,
                [KVD_CLIENT_RETRIES] = COUNT_RETRIES,
        };

        for (uint32_t i = 0; i < KVD_N_CLIENT_COUNTERS; i++)
                counters[place[i]] += atomic_load_explicit(&view->page->counters[i],
                                                           memory_order_relaxed);
}

/* Adds the page's counters to those of the space. */
static void keep_counters(struct view *view) {
        uint64_t counters[COUNTERS] = {0};

        view_count(view, counters);
        for (uint32_t i = 0; i < COUNTERS; i++)
                count(view->space, (enum counter)i, counters[i]);
}

static void take_down(struct view *view) {
        if (view->mapping)
                /* first: blocks that streams still use are pinned until then */
                view->mapping->release(view);
        if (view->page) {
                keep_counters(view);
                atomic_store(&view->page->left, 1); /* partner: inherited_look */
                munmap(view->page, kvd_pinpage_bytes(view->ix));
        }
        if (view->ix)
                munmap((void *)view->ix, view->index_bytes);
}

/* Set in refs once the view has been taken down. */
#define TAKEN_DOWN (UINT64_C(1) << 63)

/*
 * Does nothing while streams have yet to write there; the next call tries again. On a GPU it
 * releases the lock meanwhile, because the driver may wait for all work of the GPU.
 */
void view_unmap(struct view *view) {
        bool on_gpu = !view->unmapped && view->device;
        uint64_t nobody = 0;

        if (view->unmapped || (on_gpu && !semaphore_is_quiet(view)) ||
            !atomic_compare_exchange_strong(&view->refs, &nobody, TAKEN_DOWN))
                return;
        view->unmapped = true;
        if (on_gpu)
                handle_unlock(view->space->handle);
        take_down(view);
        if (on_gpu)
                handle_lock_again(view->space->handle);
}

bool view_hold(struct view *view) {
        uint64_t refs = atomic_load(&view->refs);

        while (!(refs & TAKEN_DOWN))
                if (atomic_compare_exchange_weak(&view->refs, &refs, refs + 1))
                        return true;
        return false;
}

struct view *view_get(struct kvd_space *space) {
        for (;;) {
                struct view *view = atomic_load(&space->view);

                atomic_fetch_add(&view->refs, 1);
                if (likely(atomic_load(&space->view) == view))
                        return view;
                view_leave(view); /* retired in the meantime */
        }
}

void view_leave(struct view *view) {
        atomic_fetch_sub(&view->refs, 1);
}

/* If another thread's call has the lock, the next call unmaps the view. */
void view_put_some(struct view *view, uint32_t n) {
        struct kvd *handle = view->space->handle;

        if (atomic_fetch_sub(&view->refs, n) != n || view_is_current(view) ||
            pthread_mutex_trylock(&handle->lock) != 0)
                return;
        view_unmap(view);
        handle_unlock(handle);
}

/* ---- mapping --------------------------------------------------------------------------------- */

int view_map_file(int fd, uint64_t bytes, int prot, void **ret) {
        int r = shared_file_map(fd, bytes, prot, ret);

        if (r == -EPROTO)
                return daemon_fail(r, "a mapping is shorter than announced");
        if (r < 0)
                return client_fail(r, "cannot map %llu bytes: %s", (unsigned long long)bytes,
                                   strerror(-r));
        sys->madvise(*ret, bytes, MADV_DONTFORK);
        return 0;
}

/* ---- segments -------------------------------------------------------------------------------- */

bool view_has(const struct view *view, uint32_t segment) {
        uint64_t bits = atomic_load_explicit(&view->mapped[segment / 64], memory_order_acquire);

        return bits >> segment % 64 & 1 &&
               atomic_load(&view->memory[segment]) ==
                       atomic_load(&kvd_index_memory(view->ix)[segment]);
}

bool view_is_fresh(const struct view *view) {
        return atomic_load_explicit(&view->memory_epoch, memory_order_acquire) ==
               atomic_load_explicit(&view->ix->memory_epoch, memory_order_acquire);
}

bool view_has_any(const struct view *view) {
        for (uint32_t i = 0; i < ARRAY_SIZE(view->mapped); i++)
                if (atomic_load(&view->mapped[i]))
                        return true;
        return false;
}

/* The thread that released an old view's last reference may not have unmapped it yet. */
bool view_is_last(struct view *view) {
        bool last = true;

        atomic_fetch_add(&view->refs, 1);
        for (struct view *old = view->older; old; old = old->older) {
                view_unmap(old);
                last = last && old->unmapped;
        }
        view_leave(view);
        return last;
}

bool view_may_write(const struct view *view, uint32_t segment) {
        return view->writable[segment / 64] >> segment % 64 & 1;
}

void view_set_segment(struct view *view, uint32_t segment, bool mapped, bool writable) {
        uint64_t bit = UINT64_C(1) << segment % 64,
                 bits = atomic_load(&view->mapped[segment / 64]) & ~bit;
        uint32_t n = MIN(atomic_load(&view->n_mapped), segment);

        view->writable[segment / 64] &= ~bit;
        view->writable[segment / 64] |= writable ? bit : 0;
        atomic_store(&view->mapped[segment / 64], bits | (mapped ? bit : 0));
        while (n < view->ix->max_segments && view_has(view, n))
                n++;
        atomic_store(&view->n_mapped, n);
}

void view_lose_segment(struct view *view, uint32_t segment) {
        view_set_segment(view, segment, false, false);
}

/* ---- life ------------------------------------------------------------------------------------ */

struct view *view_new(struct kvd_space *space) {
        struct view *view = sys->mmap(NULL, sizeof *view, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        if (view == MAP_FAILED)
                return NULL;
        pthread_mutex_init(&view->magazine.lock, NULL);
        view->space = space;
        return view;
}

void view_free(struct view *view) {
        if (!view->unmapped)
                take_down(view);
        pthread_mutex_destroy(&view->magazine.lock);
        free(view->magazine.refs);
        munmap(view, sizeof *view);
}

/* A forked child has no mappings, and may have mapped something else at their addresses. */
void view_forget_mappings(struct kvd_space *space) {
        for (struct view *view = atomic_load(&space->view); view; view = view->older)
                view->unmapped = true;
}

void view_free_all(struct kvd_space *space) {
        struct view *view = atomic_exchange(&space->view, NULL);

        while (view) {
                struct view *older = view->older;

                view_free(view);
                view = older;
        }
}
