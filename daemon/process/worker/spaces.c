/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Maps everything that the owner sends. Before a file is read, it must be as long as the message
 * says, and an index must have our version. A file that is refused makes jobs fail, but does not
 * end the worker.
 */

#include "daemon/process/worker/spaces.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

struct worker_space *spaces_find(const struct spaces *s, uint32_t number) {
        struct worker_space *w = s->first;

        while (w && w->number != number)
                w = w->next;
        return w;
}

/* ---- unmapping ------------------------------------------------------------------------------- */

static void unmap(void *at, uint64_t bytes) {
        if (at)
                munmap(at, bytes);
}

static void unmap_segment(struct worker_space *w, uint32_t segment) {
        uint64_t bytes = w->ix->segment_bytes;

        if (!space_has_segment(w, segment))
                return;
        w->mapped[segment / 64] &= ~(UINT64_C(1) << segment % 64);
        if (w->base) /* the addresses stay reserved; if mmap fails, the segment stays mapped */
                mmap(w->base + segment * bytes, bytes, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        else if (kvd_device_unmap(&w->device->device, w->device_base + segment * bytes, bytes) < 0)
                w->device->broken = true;
}

static void leave_device(struct worker_space *w) {
        if (!w->device_base)
                return;
        if (w->ix->backend == KVD_BACKEND_LEGACY) {
                kvd_device_close_handle(&w->device->device, w->device_base);
                return;
        }
        for (uint32_t i = 0; i < w->ix->max_segments; i++)
                unmap_segment(w, i);
        kvd_device_unreserve(&w->device->device, w->device_base, w->reserved);
}

static struct worker_space *space_free(struct worker_space *w) {
        if (!w)
                return NULL;
        leave_device(w);
        unmap(w->base, w->reserved);
        unmap(w->copies, w->copy_bytes);
        unmap(w->summaries, w->summary_bytes);
        unmap((void *)w->ix, w->index_bytes);
        free(w);
        return NULL;
}

static void space_freep(struct worker_space **w) {
        *w = space_free(*w);
}

struct worker_sketch *sketch_take(struct worker_sketch *sketch) {
        sketch->users++;
        return sketch;
}

void sketch_drop(struct worker_sketch *sketch) {
        if (!sketch || --sketch->users)
                return;
        unmap(sketch->at, sketch->bytes);
        free(sketch);
}

static void sketch_dropp(struct worker_sketch **sketch) {
        sketch_drop(*sketch);
}

static void forget_sketch(struct spaces *s) {
        sketch_drop(s->sketch);
        s->sketch = NULL;
}

int spaces_forget(struct spaces *s, uint32_t number) {
        for (struct worker_space **link = &s->first; *link; link = &(*link)->next) {
                struct worker_space *w = *link;

                if (w->number != number)
                        continue;
                *link = w->next;
                space_free(w);
                break;
        }
        if (s->sketch && s->sketch->space == number)
                forget_sketch(s);
        return 0;
}

/* ---- mapping --------------------------------------------------------------------------------- */

static int map_file(struct spaces *s, int fd, uint64_t bytes, int prot, const char *what,
                    void *ret) {
        struct stat st;
        void *at;

        if (fstat(fd, &st) < 0 || (uint64_t)st.st_size < bytes)
                return kvd_refuse(&s->why, -EPROTO, "%s is shorter than announced", what);
        at = sys->mmap(NULL, bytes, prot, MAP_SHARED, fd, 0);
        if (at == MAP_FAILED)
                return kvd_refuse(&s->why, negative_errno(),
                                  "%s of %llu bytes cannot be mapped: %s", what,
                                  (unsigned long long)bytes, strerror(errno));
        memcpy(ret, &at, sizeof at);
        return 0;
}

static int map_index(struct spaces *s, struct worker_space *w, int fd) {
        int r = w->index_bytes < KVD_INDEX_HEADER_BYTES ?
                        kvd_refuse(&s->why, -EPROTO, "an index without a header") :
                        map_file(s, fd, w->index_bytes, PROT_READ, "an index", &w->ix);

        if (r < 0)
                return r;
        if (kvd_index_validate(w->ix, w->index_bytes) < 0)
                return kvd_refuse(&s->why, -EPROTO, "an index of another version");
        w->summary = kvd_summary_of(w->ix);
        return 0;
}

static int map_summaries(struct spaces *s, struct worker_space *w, int fd) {
        if (w->summary_bytes < w->summary.size)
                return kvd_refuse(&s->why, -EPROTO, "summaries that are shorter than their layout");
        return map_file(s, fd, w->summary_bytes, PROT_READ | PROT_WRITE, "summaries",
                        &w->summaries);
}

static int map_copies(struct spaces *s, struct worker_space *w, int fd) {
        if (w->copy_bytes < kvd_places(w->ix) * w->ix->block_bytes)
                return kvd_refuse(&s->why, -EPROTO,
                                  "memory for fewer exact copies than the index says");
        return map_file(s, fd, w->copy_bytes, PROT_READ | PROT_WRITE, "exact copies", &w->copies);
}

static int reserve_on_device(struct spaces *s, struct worker_space *w, uint64_t bytes) {
        int r = w->ix->n_shards == 1 ? device_use(&s->device, w->ix->devices[0]) :
                                       kvd_refuse(&s->device.why, -EOPNOTSUPP,
                                                  "a space on several GPUs has no jobs");

        if (r < 0)
                return kvd_refuse(&s->why, r, "%s", s->device.why.line);
        w->device = &s->device;
        w->reserved = bytes;
        if (w->ix->backend == KVD_BACKEND_LEGACY)
                return 0; /* the segment's handle gives the address */
        r = kvd_device_reserve(&s->device.device, bytes, &w->device_base);
        if (r < 0)
                return kvd_refuse(&s->why, r, "%s", s->device.device.why);
        return 0;
}

static int reserve(struct spaces *s, struct worker_space *w) {
        uint64_t bytes = w->ix->max_segments * w->ix->segment_bytes;
        void *at;

        if (w->ix->backend != KVD_BACKEND_HOST)
                return reserve_on_device(s, w, bytes);
        at = sys->mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED)
                return kvd_refuse(&s->why, negative_errno(),
                                  "no address space for a pool of %llu bytes",
                                  (unsigned long long)bytes);
        w->base = at;
        w->reserved = bytes;
        return 0;
}

static int map_arguments(struct spaces *s, int fd) {
        if (s->arguments)
                return 0;
        return map_file(s, fd, KVD_JOB_BYTES, PROT_READ, "arguments", &s->arguments);
}

/* A space that is sent again replaces its earlier mapping. */
int spaces_map(struct spaces *s, const struct kvd_msg_work_space *msg, const struct kvd_fds *fds) {
        _cleanup_(space_freep) struct worker_space *w = sys->calloc(1, sizeof *w);
        int r;

        if (!w)
                return kvd_refuse(&s->why, -ENOMEM, "out of memory");
        if (fds->n != 4)
                return kvd_refuse(&s->why, -EPROTO, "a space must come with 4 descriptors");
        spaces_forget(s, msg->space);
        w->number = msg->space;
        w->index_bytes = msg->index_bytes;
        w->summary_bytes = msg->summary_bytes;
        w->copy_bytes = msg->copy_bytes;
        r = map_index(s, w, fds->fd[0]);
        if (r == 0)
                r = map_summaries(s, w, fds->fd[1]);
        if (r == 0)
                r = map_arguments(s, fds->fd[2]);
        if (r == 0)
                r = map_copies(s, w, fds->fd[3]);
        if (r == 0)
                r = reserve(s, w);
        if (r < 0)
                return r;
        w->next = s->first;
        s->first = STEAL(w);
        return 0;
}

static int map_on_device(struct spaces *s, struct worker_space *w, uint32_t number, int fd) {
        uint64_t bytes = w->ix->segment_bytes;
        int r;

        unmap_segment(w, number);
        r = kvd_device_map(&s->device.device, w->device_base + number * bytes, bytes, fd, true);
        return r < 0 ? kvd_refuse(&s->why, r, "segment %u cannot be mapped: %s", number,
                                  s->device.device.why) :
                       0;
}

static int map_on_host(struct spaces *s, struct worker_space *w, uint32_t number, int fd) {
        uint64_t bytes = w->ix->segment_bytes;
        struct stat st;

        if (fstat(fd, &st) < 0 || (uint64_t)st.st_size < bytes)
                return kvd_refuse(&s->why, -EPROTO, "segment %u is shorter than announced", number);
        if (sys->mmap(w->base + number * bytes, bytes, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
                return kvd_refuse(&s->why, negative_errno(), "segment %u cannot be mapped: %s",
                                  number, strerror(errno));
        return 0;
}

static int open_handle(struct spaces *s, struct worker_space *w,
                       const struct kvd_msg_work_segments *msg) {
        struct cu_ipc_handle handle;
        int r;

        if (msg->handles.size != sizeof handle || msg->first || msg->count != 1)
                return kvd_refuse(&s->why, -EPROTO, "not a handle of segment 0");
        memcpy(&handle, msg->handles.data, sizeof handle);
        if (w->device_base)
                kvd_device_close_handle(&s->device.device, w->device_base);
        w->device_base = 0;
        r = kvd_device_open_handle(&s->device.device, &handle, &w->device_base);
        if (r < 0)
                return kvd_refuse(&s->why, r, "segment 0 cannot be opened: %s",
                                  s->device.device.why);
        w->mapped[0] = 1;
        return 0;
}

int spaces_map_segments(struct spaces *s, const struct kvd_msg_work_segments *msg,
                        const struct kvd_fds *fds) {
        struct worker_space *w = spaces_find(s, msg->space);
        int r = 0;

        if (w && w->ix->backend == KVD_BACKEND_LEGACY)
                return open_handle(s, w, msg);
        if (!w || fds->n != msg->count || (uint64_t)msg->first + fds->n > w->ix->max_segments)
                return kvd_refuse(&s->why, -EPROTO, "segments of no space, or beyond its end");
        for (uint32_t i = 0, n = msg->first; r == 0 && i < fds->n; i++, n++) {
                r = w->device_base ? map_on_device(s, w, n, fds->fd[i]) :
                                     map_on_host(s, w, n, fds->fd[i]);
                if (r == 0)
                        w->mapped[n / 64] |= UINT64_C(1) << n % 64;
        }
        return r;
}

int spaces_unmap_segment(struct spaces *s, const struct kvd_msg_work_unmap *msg) {
        struct worker_space *w = spaces_find(s, msg->space);

        if (!w || msg->segment >= w->ix->max_segments)
                return kvd_refuse(&s->why, -EPROTO, "a segment that is not mapped");
        unmap_segment(w, msg->segment);
        return 0;
}

const struct worker_device *spaces_broken(const struct spaces *s) {
        if (s->device.broken)
                return &s->device;
        for (uint32_t i = 0; i < ARRAY_SIZE(s->others); i++)
                if (s->others[i].broken)
                        return &s->others[i];
        return NULL;
}

/* The device of that UUID, entered; the first that is asked for is also that of jobs. */
static int enter_device(struct spaces *s, const uint8_t uuid[16], struct worker_device **ret) {
        struct worker_device *d = &s->device;
        int r;

        for (uint32_t i = 0; d->open && memcmp(&d->device.uuid, uuid, 16) != 0; i++) {
                if (i == ARRAY_SIZE(s->others))
                        return kvd_refuse(&s->why, -EPROTO, "memory of too many devices");
                d = &s->others[i];
        }
        r = device_use(d, uuid);
        if (r == 0)
                r = device_enter(d);
        *ret = d;
        return r < 0 ? kvd_refuse(&s->why, r, "%s", d->why.line) : 0;
}

static int leave_entered(struct spaces *s, struct worker_device *d, int r) {
        device_leave(d);
        return r < 0 ? kvd_refuse(&s->why, r, "%s", d->why.line) : 0;
}

int spaces_clear(struct spaces *s, const struct kvd_msg_work_clear *msg,
                 const struct kvd_fds *fds) {
        struct worker_device *d;
        int r;

        if (msg->device.size != 16 || fds->n != msg->count || !fds->n)
                return kvd_refuse(&s->why, -EPROTO, "nothing to clear");
        r = enter_device(s, msg->device.data, &d);
        if (r < 0)
                return r;
        return leave_entered(s, d, device_clear(d, fds->fd, fds->n, msg->bytes));
}

int spaces_wake(struct spaces *s, const struct kvd_msg_work_wake *msg, const struct kvd_fds *fds) {
        struct worker_device *d;
        uint64_t words[128];
        int r;

        if (msg->device.size != 16 || fds->n != 1 || msg->words.size % (2 * sizeof *words) ||
            msg->words.size > sizeof words)
                return kvd_refuse(&s->why, -EPROTO, "nothing to wake");
        memcpy(words, msg->words.data, msg->words.size); /* it may be unaligned */
        r = enter_device(s, msg->device.data, &d);
        if (r < 0)
                return r;
        return leave_entered(s, d,
                             device_wake(d, fds->fd[0], msg->bytes, words,
                                         msg->words.size / (2 * sizeof *words)));
}

static int check_sketch(const struct worker_space *w, const struct kvd_sketch_header *h,
                        uint64_t bytes) {
        const struct kvd_shape *g = &w->ix->geometry;
        uint64_t floats = (uint64_t)w->summary.layers * g->kv_heads * g->head_dim;

        if (h->cell_floats != floats || h->rows == 0 || h->rows > 8 || h->columns == 0 ||
            h->columns > 1u << 30)
                return -EPROTO;
        /* checked first, so that kvd_sketch_bytes does not overflow */
        return bytes / sizeof(float) / 2 / h->rows / h->columns >= floats &&
                               kvd_sketch_bytes(h->rows, h->columns, h->cell_floats) <= bytes ?
                       0 :
                       -EPROTO;
}

int spaces_map_sketch(struct spaces *s, const struct kvd_msg_work_sketch *msg,
                      const struct kvd_fds *fds) {
        const struct worker_space *w = spaces_find(s, msg->space);
        _cleanup_(sketch_dropp) struct worker_sketch *sketch = NULL;
        int r;

        forget_sketch(s);
        if (!w || fds->n != 1)
                return kvd_refuse(&s->why, -EPROTO, "a sketch without a space");
        if (msg->bytes < sizeof *sketch->at)
                return kvd_refuse(&s->why, -EPROTO, "a sketch without a header");
        sketch = sys->calloc(1, sizeof *sketch);
        if (!sketch)
                return kvd_refuse(&s->why, -ENOMEM, "out of memory");
        *sketch = (struct worker_sketch){1, msg->space, msg->sketch, NULL, msg->bytes};
        r = map_file(s, fds->fd[0], msg->bytes, PROT_READ | PROT_WRITE, "a sketch", &sketch->at);
        if (r < 0)
                return r;
        if (!sketch->at || check_sketch(w, sketch->at, msg->bytes) < 0)
                return kvd_refuse(&s->why, -EPROTO, "a sketch that does not fit its space");
        s->sketch = STEAL(sketch);
        return 0;
}
