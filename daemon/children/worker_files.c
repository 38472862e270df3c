/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Records what the worker has mapped, until it dies, so that each descriptor is sent once. A
 * segment is recorded with the version of its memory, and is sent again once it has other memory.
 */

#include "daemon/children/worker_files.h"

#include <errno.h>
#include <stdlib.h>

#include "ipc/base/device.h"
#include "ipc/base/summary.h"
#include "ipc/base/sys.h"

struct known_space {
        struct known_space *next;
        uint32_t number, n_segments;
        uint32_t versions[]; /* of each segment's memory, when it was sent; 0: not mapped */
};

/* ---- notes ----------------------------------------------------------------------------------- */

void worker_files_forget_sketch(struct worker_files *f) {
        f->sketch_space = f->sketch = 0;
}

void worker_files_forget(struct worker_files *f, uint32_t space) {
        struct known_space **link = &f->known, *k;

        while (*link && (*link)->number != space)
                link = &(*link)->next;
        k = *link;
        if (k)
                *link = k->next;
        free(k);
        if (f->sketch_space == space)
                worker_files_forget_sketch(f);
}

void worker_files_forget_all(struct worker_files *f) {
        while (f->known)
                worker_files_forget(f, f->known->number);
        worker_files_forget_sketch(f);
}

bool worker_files_deleted(const struct worker_files *f, struct store *store, uint32_t *ret) {
        const struct known_space *k = f->known;

        while (k && store_space_by_number(store, k->number))
                k = k->next;
        *ret = k ? k->number : 0;
        return k != NULL;
}

static struct known_space *find(const struct worker_files *f, uint32_t space) {
        struct known_space *k = f->known;

        while (k && k->number != space)
                k = k->next;
        return k;
}

bool worker_files_unmap(struct worker_files *f, uint32_t space, uint32_t segment) {
        struct known_space *k = find(f, space);

        if (k)
                k->versions[segment] = 0;
        return k != NULL;
}

/* ---- sending --------------------------------------------------------------------------------- */

static int note_space(struct worker_files *f, const struct space *space) {
        uint32_t n = space_index(space)->max_segments;
        struct known_space *k = sys->calloc(1, sizeof *k + n * sizeof *k->versions);

        if (!k)
                return -ENOMEM;
        k->next = f->known;
        k->number = space_number(space);
        k->n_segments = n;
        f->known = k;
        return 0;
}

static int add_file(struct kvd_fds *fds, int fd) {
        if (fd < 0)
                return fd;
        fds->fd[fds->n++] = fd;
        return 0;
}

/* The order is that of message work_space: index, summaries, arguments, exact copies. */
static int space_files(struct space *space, int arguments, struct kvd_fds *fds,
                       uint64_t *copy_bytes) {
        int r = add_file(fds, space_index_fd(space));

        if (r == 0)
                r = add_file(fds, space_summary_fd(space, true));
        if (r == 0)
                r = add_file(fds, arguments);
        if (r == 0)
                r = add_file(fds, space_copies_fd(space, copy_bytes));
        return r;
}

static int send_space(struct worker_files *f, struct child *child, struct space *space,
                      int arguments) {
        const struct kvd_index *ix = space_index(space);
        struct kvd_msg msg = {.number = KVD_MSG_work_space};
        struct kvd_fds fds = {.n = 0};
        int r = space_files(space, arguments, &fds, &msg.work_space.copy_bytes);

        if (r == 0)
                r = note_space(f, space);
        if (r < 0)
                return r;
        msg.work_space.space = space_number(space);
        msg.work_space.index_bytes = ix->size;
        msg.work_space.summary_bytes = kvd_summary_of(ix).size;
        return child_ask(child, &msg, &fds);
}

/* The first segment, beginning at from, whose present memory the worker has not mapped; n: none. */
static uint32_t stale_segment(const struct known_space *k, const struct space *space, uint32_t from,
                              uint32_t n) {
        for (; from < n; from++) {
                uint32_t version = space_memory_version(space, from);

                if (version && version != k->versions[from])
                        break;
        }
        return from;
}

/* With legacy handles, a space has one segment, whose handle is part of the message. */
static int send_handle(struct known_space *k, struct child *child, struct space *space) {
        const uint8_t *handle = space_segment_handle(space, 0, 0);
        struct kvd_msg msg =
                {.number = KVD_MSG_work_segments,
                 .work_segments = {k->number, 0, 1, {handle, handle ? CU_IPC_HANDLE_BYTES : 0}}};

        if (!handle)
                return -ENODATA;
        k->versions[0] = space_memory_version(space, 0);
        return child_ask(child, &msg, NULL);
}

/* Sends a run of consecutive stale segments, which begins at first. */
static int send_segments(struct known_space *k, struct child *child, struct space *space,
                         uint32_t first, uint32_t n) {
        struct kvd_msg msg = {.number = KVD_MSG_work_segments,
                              .work_segments = {k->number, first, 0, {0}}};
        struct kvd_fds fds = {.n = 0};

        if (space_index(space)->backend == KVD_BACKEND_LEGACY)
                return send_handle(k, child, space);
        for (uint32_t i = first;
             fds.n < KVD_FRAME_FDS && i < n && stale_segment(k, space, i, n) == i; i++) {
                int fd = space_worker_segment_fd(space, i);

                if (fd < 0)
                        return fd;
                k->versions[i] = space_memory_version(space, i);
                fds.fd[fds.n++] = fd;
        }
        msg.work_segments.count = fds.n;
        return child_ask(child, &msg, &fds);
}

static int send_sketch(struct worker_files *f, struct child *child, struct space *space,
                       uint32_t sketch) {
        struct kvd_msg msg = {.number = KVD_MSG_work_sketch,
                              .work_sketch = {space_number(space), sketch, 0}};
        struct kvd_fds fds = {.n = 1};

        fds.fd[0] = space_sketch_fd(space, sketch, &msg.work_sketch.bytes);
        if (fds.fd[0] < 0)
                return fds.fd[0];
        f->sketch_space = space_number(space);
        f->sketch = sketch;
        return child_ask(child, &msg, &fds);
}

static bool has_sketch(const struct worker_files *f, const struct space *space, uint32_t sketch) {
        return !sketch || (f->sketch == sketch && f->sketch_space == space_number(space));
}

int worker_files_send(struct worker_files *f, struct child *child, struct space *space,
                      uint32_t sketch, int arguments) {
        uint32_t n_segments = atomic_load(&space_index(space)->n_segments), stale;
        struct known_space *k = find(f, space_number(space));
        int r;

        stale = k ? stale_segment(k, space, 0, n_segments) : 0;
        if (!k)
                r = send_space(f, child, space, arguments);
        else if (stale < n_segments)
                r = send_segments(k, child, space, stale, n_segments);
        else if (!has_sketch(f, space, sketch))
                r = send_sketch(f, child, space, sketch);
        else
                return 0;
        return r < 0 ? r : 1;
}
