/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Shared memory of the methods, and their requests to the daemon. Settings, labels of tokens and
 * BiCache's table are read where the daemon writes them. Only a change, a sample, a configuration
 * or the mapping of labels needs a request.
 */

#include <errno.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "client/internal.h"
#include "ipc/base/summary.h"
#include "ipc/base/sys.h"

/* ---- settings -------------------------------------------------------------------------------- */

int kvd_space_setting(struct kvd_space *space, const char *name, double *ret) {
        int which = kvd_setting_by_name(name), r = space_check(space);
        struct view *view;

        if (r < 0)
                return r;
        if (which < 0)
                return client_fail(-EINVAL, "there is no setting '%s'", name);
        view = view_get(space);
        *ret = kvd_setting_get(view->ix->settings, (enum kvd_setting)which);
        view_put(view);
        return 0;
}

int kvd_space_set(struct kvd_space *space, const char *name, double value) {
        int which = kvd_setting_by_name(name), r = space_check(space);
        struct kvd_msg_space_set request = {.space = kvd_slice_of(space->name),
                                            .key = kvd_slice_of(name)};
        struct view *view;
        char text[64];

        if (r < 0)
                return r;
        if (which < 0)
                return client_fail(-EINVAL, "there is no setting '%s'", name);
        request.value = kvd_slice_of(
                kvd_setting_format((enum kvd_setting)which, value, text, sizeof text));
        r = handle_lock(space->handle);
        if (r < 0)
                return r;
        r = view_attach(space, &view);
        if (r == 0)
                r = handle_call(space->handle, KVD_MSG_space_set, &request, NULL, NULL);
        handle_unlock(space->handle);
        return r;
}

/* ---- labels ---------------------------------------------------------------------------------- */

static int map_summaries(struct kvd_sequence *s, const struct kvd_fds *fds, uint64_t bytes) {
        if (fds->n != 1 || bytes < kvd_summary_of(s->view->ix).size)
                return client_fail(-EPROTO, "the daemon's summaries are shorter than announced");
        s->summary_bytes = bytes;
        return view_map_file(fds->fd[0], bytes, PROT_READ, &s->summaries);
}

static int fetch_summaries(struct kvd_sequence *s) {
        struct kvd_msg_summaries request = {s->view->handle};
        struct kvd *handle = s->space->handle;
        struct kvd_msg_summaries_reply reply;
        struct kvd_fds fds = {0};
        struct view *now;
        int r;

        deadline_begin();
        r = handle_lock(handle);
        if (r < 0)
                return r;
        r = view_attach(s->space, &now);
        if (r == 0 && now != s->view)
                r = client_fail(-ESTALE, "the sequence belongs to a daemon that is gone");
        if (r == 0)
                r = handle_call(handle, KVD_MSG_summaries, &request, &reply, &fds);
        if (r == 0)
                r = map_summaries(s, &fds, reply.bytes);
        kvd_fds_close(&fds);
        handle_unlock(handle);
        return r;
}

const uint8_t *kvd_sequence_labels(const struct kvd_sequence *sequence, uint32_t slot,
                                   struct kvd_label_shape *shape) {
        struct kvd_sequence *s = (struct kvd_sequence *)sequence;
        const struct kvd_shape *g = &s->space->geometry;
        struct kvd_summary summary;
        uint64_t stamp;
        uint8_t *row;

        if (slot >= s->n || forked(s->space->handle) || (!s->summaries && fetch_summaries(s) < 0))
                return NULL;
        summary = kvd_summary_of(s->view->ix);
        if (s->entries[slot].row >= (uint64_t)s->view->ix->capacity + kvd_places(s->view->ix))
                return NULL;
        row = kvd_summary_row(&summary, s->summaries, s->entries[slot].row);
        stamp = shm_load((shm_u64 *)row);
        if (stamp != ((uint64_t)s->entries[slot].row_generation << 32 | KVD_SUMMARY_MADE))
                return NULL;
        *shape = (struct kvd_label_shape){
                .channels = summary.channels,
                .label_bytes = summary.label_bytes,
                .head_stride = g->block_tokens * summary.label_bytes,
                .layer_stride = g->kv_heads * g->block_tokens * summary.label_bytes,
                .channel = s->summaries,
        };
        return row + summary.labels_off;
}

/* ---- blocks that hold numbers for a worker --------------------------------------------------- */

int filling_refs(const struct view *view, uint32_t n, const struct kvd_block *blocks,
                 kvd_ref *ret) {
        for (uint32_t i = 0; i < n; i++) {
                if (!blocks[i].data || blocks[i].view != view)
                        return client_fail(
                                -ESTALE,
                                "a block is not allocated, or belongs to a daemon that is gone");
                ret[i] = kvd_ref_make(blocks[i].id, blocks[i].generation);
        }
        return 0;
}

/* ---- sharing configuration ------------------------------------------------------------------- */

int kvd_sequence_critical(struct kvd_sequence *s, uint32_t n, const struct kvd_block *blocks,
                          uint32_t queries, uint32_t words, uint32_t selected) {
        struct kvd_msg_critical request = {.space = s->view->handle,
                                           .sequence = s->number,
                                           .op = 1,
                                           .queries = queries,
                                           .words = words,
                                           .selected = selected};
        const struct kvd_shape *g = &s->space->geometry;
        uint64_t bytes = (uint64_t)g->layers * g->kv_heads * queries * words * sizeof(uint64_t);
        kvd_ref refs[1024];
        int r = space_check(s->space);

        if (r < 0)
                return r;
        if (n == 0 || n > ARRAY_SIZE(refs) || bytes == 0 || bytes > n * s->view->ix->block_bytes)
                return client_fail(-EINVAL, "%llu bytes of selections do not fit %u blocks",
                                   (unsigned long long)bytes, n);
        r = filling_refs(s->view, n, blocks, refs);
        if (r < 0)
                return r;
        request.blocks = (struct kvd_slice){refs, n * (uint32_t)sizeof *refs};
        return sequence_call(s, KVD_MSG_critical, &request, NULL, NULL, NULL);
}

struct sharing {
        const struct kvd_shape *geometry;
        uint8_t *layer, *head;
        int ready;
};

static void take_sharing(const void *reply, void *to) {
        const struct kvd_msg_critical_reply *m = reply;
        struct sharing *sharing = to;
        uint32_t layers = sharing->geometry->layers;

        sharing->ready = m->ready && m->layers.size == layers &&
                         m->heads.size == layers * sharing->geometry->kv_heads;
        if (!sharing->ready)
                return;
        memcpy(sharing->layer, m->layers.data, m->layers.size);
        memcpy(sharing->head, m->heads.data, m->heads.size);
}

int kvd_sequence_sharing(struct kvd_sequence *s, uint8_t *layer, uint8_t *head) {
        struct kvd_msg_critical request = {.space = s->view->handle,
                                           .sequence = s->number,
                                           .op = 2};
        struct sharing sharing = {&s->space->geometry, layer, head, 0};
        struct kvd_msg_critical_reply reply;
        int r = sequence_call(s, KVD_MSG_critical, &request, &reply, take_sharing, &sharing);

        return r < 0 ? r : sharing.ready;
}

/* ---- BiCache's table ------------------------------------------------------------------------- */

/* 100 * m / n, rounded half to even, as the profile's samples are. */
static uint32_t percent(uint64_t m, uint64_t n) {
        uint64_t whole = 100 * m / n, rest = 100 * m % n;

        return (uint32_t)(whole + (2 * rest > n || (2 * rest == n && whole % 2)));
}

int kvd_prefix_depth(struct kvd_space *space, uint32_t prefix_tokens, uint32_t prompt_tokens,
                     uint32_t generated_tokens) {
        uint64_t n = (uint64_t)prefix_tokens + prompt_tokens;
        struct view *view;
        uint32_t def, b;
        int r = space_check(space);

        if (r < 0)
                return r;
        if (prefix_tokens == 0)
                return client_fail(-EINVAL, "an empty prefix cannot be cached");
        view = view_get(space);
        def = atomic_load_explicit(&view->ix->depth_def, memory_order_acquire);
        n += def == 1 ? generated_tokens : 0;
        b = atomic_load_explicit(&view->ix->depth[percent(prefix_tokens, n)], memory_order_relaxed);
        view_put(view);
        return def == 0 ? 0 : (int)MAX(b, 1);
}

int kvd_prefix_refresh(struct kvd_space *space, uint32_t t) {
        double delta;
        int r = kvd_space_setting(space, "bicache.delta", &delta);

        return r < 0 ? r : (t - 1) % MAX((uint32_t)delta, 1) == 0;
}

/* ---- BiCache's profile ----------------------------------------------------------------------- */

#define SAMPLE_NS UINT64_C(60000000000)
#define LOOK_AGAIN_NS 100000000L

static int sample_call(struct kvd_space *space, const struct view *view, uint32_t number,
                       const void *request, void *reply) {
        struct view *now;
        int r;

        deadline_begin(); /* of one request: the wait for the sample has its own */
        r = handle_lock(space->handle);
        if (r < 0)
                return r;
        r = view_attach(space, &now);
        if (r == 0)
                r = now == view ? handle_call(space->handle, number, request, reply, NULL) :
                                  client_fail(-ESTALE, "the daemon that took the sample is gone");
        handle_unlock(space->handle);
        return r;
}

/* The caller must not write the blocks before the worker has read them. */
static int wait_for_sample(struct kvd_space *space, struct view *view, uint64_t ticket) {
        struct kvd_msg_sample_done request = {view->handle, ticket};
        uint64_t deadline = sys_now_ns() + SAMPLE_NS;
        struct kvd_msg_sample_done_reply reply = {0};
        const struct timespec pause = {0, LOOK_AGAIN_NS};

        do {
                uint32_t epoch = atomic_load(&view->ix->sync_epoch);
                int r = sample_call(space, view, KVD_MSG_sample_done, &request, &reply);

                if (r < 0 || reply.done)
                        return r;
                syscall(SYS_futex, &view->ix->sync_epoch, FUTEX_WAIT, epoch, &pause, NULL, 0);
        } while (sys_now_ns() < deadline);
        return client_fail(-ETIMEDOUT, "no worker took the sample within a minute");
}

static int take_sample(struct kvd_space *space, struct view *view, uint32_t r, uint32_t n,
                       const struct kvd_block *blocks, uint32_t n_tokens) {
        struct kvd_msg_sample request = {.space = view->handle, .r = r, .tokens = n_tokens};
        struct kvd_msg_sample_reply reply = {0};
        kvd_ref refs[4096];
        int result;

        if (n > ARRAY_SIZE(refs))
                return client_fail(-EINVAL, "a sample of %u blocks; the maximum is %zu", n,
                                   ARRAY_SIZE(refs));
        result = filling_refs(view, n, blocks, refs);
        if (result < 0)
                return result;
        request.blocks = (struct kvd_slice){refs, n * (uint32_t)sizeof *refs};
        result = sample_call(space, view, KVD_MSG_sample, &request, &reply);
        return result < 0 ? result : wait_for_sample(space, view, reply.ticket);
}

int kvd_prefix_sample(struct kvd_space *space, uint32_t r, uint32_t n,
                      const struct kvd_block *blocks, uint32_t n_tokens) {
        struct view *view;
        int result = space_check(space);

        if (result < 0)
                return result;
        view = view_get(space);
        result = take_sample(space, view, r, 2 * n * space->geometry.layer_groups, blocks,
                             n_tokens);
        view_put(view);
        return result;
}
