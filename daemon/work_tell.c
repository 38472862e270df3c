/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include "daemon/work_internal.h"
#include "ipc/base/device.h"
#include "ipc/base/summary.h"
#include "ipc/base/sys.h"

/* ---- what it knows ----------------------------------------------------------------------------------------------- */

void work_forget_known(struct work *w, uint32_t number) {
        for (struct known **link = &w->known; *link; link = &(*link)->next) {
                struct known *k = *link;

                if (k->number != number)
                        continue;
                *link = k->next;
                free(k);
                break;
        }
        if (w->sketch_space == number)
                w->sketch_space = w->sketch = 0;
}

void work_forget_all(struct work *w) {
        while (w->known) {
                struct known *k = w->known;

                w->known = k->next;
                free(k);
        }
        w->sketch_space = w->sketch = 0;
}

/* ---- questions --------------------------------------------------------------------------------------------------- */

int work_ask(struct work *w, struct kvd_msg *msg, const struct kvd_fds *fds) {
        ssize_t n;
        int r;

        msg->serial = ++w->serial;
        n = kvd_msg_encode(msg, w->frame, KVD_FRAME_MAX);
        r = n < 0 ? (int)n : kvd_frame_send(w->socket.fd, w->frame, (size_t)n, fds, MSG_DONTWAIT);
        if (r < 0)
                return r;
        w->asked = msg->number;
        loop_timer_set(w->loop, &w->deadline, sys_now_ns() + w->config->worker_deadline * UINT64_C(1000000000));
        return 0;
}

struct space *work_find_space(const struct work *w, uint32_t number) {
        struct space *space = store_next_space(w->store, number);

        return space && space_number(space) == number ? space : NULL;
}

struct known *work_find_known(const struct work *w, uint32_t number) {
        struct known *k = w->known;

        while (k && k->number != number)
                k = k->next;
        return k;
}

static int tier_files(struct space *space, struct kvd_fds *fds, uint64_t bytes[KVD_N_TIERS]) {
        for (uint32_t t = 0; t < KVD_N_TIERS; t++) {
                int fd = space_tier_fd(space, t, &bytes[t]);

                if (fd < 0)
                        return fd;
                fds->fd[fds->n++] = fd;
        }
        return 0;
}

static int space_files(struct space *space, int arguments, struct kvd_fds *fds) {
        const int files[] = {space_index_fd_for_worker(space), space_summary_fd(space, true), arguments};

        for (uint32_t i = 0; i < ARRAY_SIZE(files); i++) {
                if (files[i] < 0)
                        return files[i];
                fds->fd[fds->n++] = files[i];
        }
        return 0;
}

static int tell_space(struct work *w, struct space *space) {
        const struct kvd_index *ix = space_index(space);
        struct kvd_msg msg = {.number = KVD_MSG_work_space};
        uint64_t bytes[KVD_N_TIERS];
        struct kvd_fds fds = {.n = 0};
        struct known *k;
        int r = space_files(space, w->arguments_fd, &fds);

        if (r == 0)
                r = tier_files(space, &fds, bytes);
        if (r < 0)
                return r;
        msg.work_space.space = space_number(space);
        msg.work_space.index_bytes = ix->size;
        msg.work_space.summary_bytes = kvd_summary_of(ix).size;
        msg.work_space.tier_bytes = (struct kvd_slice){bytes, sizeof bytes};
        k = sys->calloc(1, sizeof *k + ix->max_segments * sizeof *k->turns);
        if (!k)
                return -ENOMEM;
        k->next = w->known;
        k->number = space_number(space);
        k->n_segments = ix->max_segments;
        w->known = k;
        return work_ask(w, &msg, &fds);
}

/* The first segment with other memory than the worker has mapped; n: there is none. */
static uint32_t stale_segment(const struct known *k, const struct space *space, uint32_t from, uint32_t n) {
        for (; from < n; from++) {
                uint32_t turn = space_segment_turn(space, from);

                if (turn && turn != k->turns[from])
                        break;
        }
        return from;
}

static int tell_handle(struct work *w, struct space *space, struct known *k) {
        const uint8_t *handle = space_segment_handle(space, 0);
        struct kvd_msg msg = {.number = KVD_MSG_work_segments,
                              .work_segments = {k->number, 0, 1, {handle, handle ? CU_IPC_HANDLE_BYTES : 0}}};

        if (!handle)
                return -ENODATA;
        k->turns[0] = space_segment_turn(space, 0);
        return work_ask(w, &msg, NULL);
}

/* A run of such segments. */
static int tell_segments(struct work *w, struct space *space, struct known *k, uint32_t first, uint32_t n) {
        struct kvd_msg msg = {.number = KVD_MSG_work_segments, .work_segments = {k->number, first, 0, {0}}};
        struct kvd_fds fds = {.n = 0};

        if (space_index(space)->backend == KVD_BACKEND_LEGACY)
                return tell_handle(w, space, k);
        for (uint32_t i = first; fds.n < KVD_FRAME_FDS && stale_segment(k, space, i, n) == i && i < n; i++) {
                int fd = space_worker_segment_fd(space, i);

                if (fd < 0)
                        return fd;
                k->turns[i] = space_segment_turn(space, i);
                fds.fd[fds.n++] = fd;
        }
        msg.work_segments.count = fds.n;
        return work_ask(w, &msg, &fds);
}

static int tell_sketch(struct work *w, struct space *space) {
        struct kvd_msg msg = {.number = KVD_MSG_work_sketch, .work_sketch = {w->job_space, w->job.sketch, 0}};
        struct kvd_fds fds = {.n = 1};

        fds.fd[0] = space_sketch_fd(space, w->job.sketch, &msg.work_sketch.bytes);
        if (fds.fd[0] < 0)
                return fds.fd[0];
        w->sketch_space = w->job_space;
        w->sketch = w->job.sketch;
        return work_ask(w, &msg, &fds);
}

static int tell_job(struct work *w) {
        struct kvd_msg msg = {.number = KVD_MSG_work, .work = {w->job.id, w->job.bytes}};

        return work_ask(w, &msg, NULL);
}

/* What the job needs first, then the job. */
int work_tell_next(struct work *w, struct space *space) {
        uint32_t n_segments = atomic_load(&space_index(space)->n_segments);
        struct known *k = work_find_known(w, w->job_space);
        uint32_t stale;

        if (!k)
                return tell_space(w, space);
        stale = stale_segment(k, space, 0, n_segments);
        if (stale < n_segments)
                return tell_segments(w, space, k, stale, n_segments);
        if (w->job.sketch && (w->sketch != w->job.sketch || w->sketch_space != w->job_space))
                return tell_sketch(w, space);
        return tell_job(w);
}
