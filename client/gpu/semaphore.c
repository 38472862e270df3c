/* SPDX-License-Identifier: Apache-2.0 */

/*
 * This process's row of the semaphore page (ipc/base/semaphore.h): which stream writes which
 * semaphore, and which value it has promised. Each stream gets a semaphore of its own. Another
 * stream can take it over only when no semaphore is unused and all its promises are kept. So one
 * stream at a time writes a semaphore, and its values only grow.
 */

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "client/gpu/gpu_view.h"
#include "ipc/base/sys.h"

#define PROBE_SEMAPHORE (SEMAPHORES - 1)
/* longest wait on the CPU; the daemon ends waits for dead producers long before that */
#define WAIT_NS UINT64_C(60000000000)
#define LOOK_NS 20000

/* ---- values ---------------------------------------------------------------------------------- */

uint64_t semaphore_reached(const struct view *view, uint32_t semaphore) {
        const struct device *d = view->device;

        if (semaphore == 0 || semaphore > view->ix->semaphore_rows * SEMAPHORES)
                return UINT64_MAX; /* a wrong number from the daemon must not be an address */
        return shm_load(&d->page[semaphore - 1]);
}

bool semaphore_passed(const struct view *view, struct promise until) {
        return semaphore_reached(view, semaphore_at(view->device->row, until.at)) >= until.value;
}

static cu_address semaphore_address(const struct device *d, uint32_t semaphore) {
        return d->page_at + (uint64_t)(semaphore - 1) * sizeof(uint64_t);
}

/* ---- with the driver ------------------------------------------------------------------------- */

static int stream_fail(const struct device *d, cu_result error, const char *what) {
        char text[128];

        return client_fail(kvd_cuda_errno(error), "%s: %s", what,
                           kvd_cuda_why(d->gpu.cuda, error, text, sizeof text));
}

static int enter(struct device *d) {
        int r = kvd_device_enter(&d->gpu);

        return r < 0 ? client_fail(r, "%s", d->gpu.why) : 0;
}

/*
 * The legacy default stream is refused while a stream that synchronizes with it is being captured.
 * A graph would repeat what is valid only once, and waiting for the stream would break the capture;
 * this query does not.
 */
int device_refuses(const struct device *d, cu_stream stream) {
        int status = CU_NOT_CAPTURING;
        cu_result error = d->gpu.cuda->cuStreamIsCapturing(stream, &status);

        if (error != CU_CAPTURE_IMPLICIT && (error || status == CU_NOT_CAPTURING))
                return 0;
        return client_fail(-EBUSY, "the stream is being captured into a graph: make calls to kvd "
                                   "before or after the capture");
}

static int wait_for_stream(struct device *d, void *stream) {
        cu_result error;
        int r = enter(d);

        if (r < 0)
                return r;
        r = device_refuses(d, stream);
        error = r < 0 ? CU_OK : d->gpu.cuda->cuStreamSynchronize(stream);
        kvd_device_leave(&d->gpu);
        return error ? stream_fail(d, error, "the stream failed") : r;
}

static bool probe_on(struct device *d, cu_stream stream) {
        struct semaphore *own = &d->semaphores[PROBE_SEMAPHORE];
        uint32_t semaphore = semaphore_at(d->row, PROBE_SEMAPHORE);
        const struct kvd_cuda *cuda = d->gpu.cuda;
        cu_address at = semaphore_address(d, semaphore);
        uint64_t value = own->value + 1;

        if (cuda->cuStreamWriteValue64(stream, at, value, CU_WRITE_DEFAULT) != CU_OK ||
            cuda->cuStreamWaitValue64(stream, at, value, CU_WAIT_GEQ) != CU_OK ||
            cuda->cuStreamSynchronize(stream) != CU_OK ||
            shm_load(&d->page[semaphore - 1]) != value)
                return false;
        own->value = value;
        return true;
}

int semaphore_finish(struct view *view, void *stream) {
        return wait_for_stream(view->device, stream) == -EBUSY ? -EBUSY : 0;
}

/*
 * Device attributes do not tell the whole truth, so this tries a write and a wait on its own
 * stream. If only one works it may still be running, and the page is about to be unregistered.
 */
static bool probe(struct device *d) {
        bool works;

        if (kvd_device_enter(&d->gpu) < 0)
                return false;
        works = d->gpu.cuda->cuStreamCreateWithPriority(&d->own, CU_STREAM_NON_BLOCKING, 0) ==
                CU_OK;
        if (works && !probe_on(d, d->own)) {
                d->gpu.cuda->cuStreamSynchronize(d->own);
                d->gpu.cuda->cuStreamDestroy(d->own);
                works = false;
        }
        kvd_device_leave(&d->gpu);
        return works;
}

static void unprobe(struct device *d) {
        if (kvd_device_enter(&d->gpu) < 0)
                return;
        d->gpu.cuda->cuStreamDestroy(d->own);
        kvd_device_leave(&d->gpu);
}

/* ---- life ------------------------------------------------------------------------------------ */

int semaphore_open(struct view *view, int fd, uint32_t row, uint32_t token) {
        uint64_t bytes = semaphore_page_bytes(view->ix->semaphore_rows);
        struct device *d = view->device;
        void *at;
        int r;

        if (row >= view->ix->semaphore_rows)
                return daemon_fail(-EPROTO, "row %u of a semaphore page of %u", row,
                                   view->ix->semaphore_rows);
        r = view_map_file(fd, bytes, PROT_READ | PROT_WRITE, &at);
        if (r < 0)
                return r;
        pthread_mutex_init(&d->lock, NULL);
        d->page = at;
        d->page_bytes = bytes;
        d->row = row;
        d->token = token;
        for (uint32_t i = 0; i < SEMAPHORES; i++) {
                d->semaphores[i].value = shm_load(&d->page[row * SEMAPHORES + i]);
                pthread_mutex_init(&d->semaphores[i].order, NULL);
        }
        d->streams = kvd_device_register(&d->gpu, at, bytes, &d->page_at) == 0;
        if (d->streams && !probe(d)) {
                kvd_device_unregister(&d->gpu, at);
                d->streams = false;
        }
        return 0;
}

bool semaphore_is_quiet(const struct view *view) {
        struct device *d = view->device;
        bool passed = true;

        if (!d->page)
                return true;
        pthread_mutex_lock(&d->lock);
        for (uint32_t i = 0; passed && i < SEMAPHORES; i++)
                passed = semaphore_passed(view, (struct promise){i, d->semaphores[i].value});
        pthread_mutex_unlock(&d->lock);
        return passed;
}

static bool context_works(struct device *d) {
        cu_result error;

        if (kvd_device_enter(&d->gpu) < 0)
                return false;
        error = d->gpu.cuda->cuStreamQuery(d->own);
        kvd_device_leave(&d->gpu);
        return error == CU_OK || error == CU_NOT_READY;
}

/*
 * Waits until our streams have kept all promises. False: their context has failed. Polls our
 * semaphores: other streams of the context are the engine's, and may wait for anything.
 */
bool semaphore_quiet(struct view *view) {
        struct timespec pause = {0, LOOK_NS};
        struct device *d = view->device;

        while (!semaphore_is_quiet(view)) {
                if (!context_works(d))
                        return false;
                nanosleep(&pause, NULL);
                pause.tv_nsec = MIN(2 * pause.tv_nsec, 1000 * 1000);
        }
        return true;
}

void semaphore_close(struct view *view) {
        struct device *d = view->device;

        if (!d->page)
                return;
        semaphore_quiet(view);
        if (d->streams) {
                unprobe(d);
                kvd_device_unregister(&d->gpu, (void *)d->page);
        }
        for (uint32_t i = 0; i < atomic_load(&d->n_deferred); i++)
                if (d->deferred[i].is_pin)
                        unpin_block(view, kvd_ref_id(d->deferred[i].ref));
        free(d->deferred);
        munmap((void *)d->page, d->page_bytes);
        for (uint32_t i = 0; i < SEMAPHORES; i++)
                pthread_mutex_destroy(&d->semaphores[i].order);
        pthread_mutex_destroy(&d->lock);
        d->page = NULL;
}

/* ---- promises -------------------------------------------------------------------------------- */

/* Returns the stream's semaphore, or one that it can take; SEMAPHORES if all are busy. */
static uint32_t find_semaphore(const struct view *view, uint64_t stream) {
        const struct device *d = view->device;
        uint32_t unused = SEMAPHORES, passed = SEMAPHORES;

        for (uint32_t i = SEMAPHORES; i-- > 0;) {
                const struct semaphore *one = &d->semaphores[i];

                if (one->used && one->stream == stream)
                        return i;
                if (one->writers || one->value > SEMAPHORE_VALUE_MAX / 2)
                        continue;
                if (!one->used)
                        unused = i;
                else if (semaphore_passed(view, (struct promise){i, one->value}))
                        passed = i;
        }
        return unused < SEMAPHORES ? unused : passed;
}

/* Until release, no other stream gets the semaphore, even if all its promises are kept. */
static uint32_t claim(const struct view *view, uint64_t stream) {
        struct device *d = view->device;
        uint32_t which;

        pthread_mutex_lock(&d->lock);
        which = find_semaphore(view, stream);
        if (which < SEMAPHORES) {
                d->semaphores[which].stream = stream;
                d->semaphores[which].used = true;
                d->semaphores[which].writers++;
        }
        pthread_mutex_unlock(&d->lock);
        return which;
}

static void release(struct device *d, struct semaphore *one, uint64_t value) {
        pthread_mutex_lock(&d->lock);
        one->value = value;
        one->writers--;
        pthread_mutex_unlock(&d->lock);
}

/*
 * With the device entered. The driver blocks the caller while the stream's queue is full, perhaps
 * for as long as the stream waits for another one. The lock blocks only threads that write the same
 * semaphore, and they use the same stream.
 */
static cu_result write_next(struct view *view, void *stream, struct promise *ret) {
        struct device *d = view->device;
        struct semaphore *one;
        unsigned long long id;
        cu_result error = d->gpu.cuda->cuStreamGetId(stream, &id);

        if (error)
                return error;
        ret->at = claim(view, id);
        if (ret->at == SEMAPHORES)
                return CU_NOT_SUPPORTED;
        one = &d->semaphores[ret->at];
        pthread_mutex_lock(&one->order);
        ret->value = one->value + 1;
        error = d->gpu.cuda->cuStreamWriteValue64(stream,
                                                  semaphore_address(d,
                                                                    semaphore_at(d->row, ret->at)),
                                                  ret->value, CU_WRITE_DEFAULT);
        release(d, one, error ? one->value : ret->value);
        pthread_mutex_unlock(&one->order);
        return error;
}

int semaphore_promise(struct view *view, void *stream, struct promise *ret) {
        struct device *d = view->device;
        cu_result error = CU_NOT_SUPPORTED;
        int r = d->streams ? enter(d) : 0;

        if (r < 0)
                return r;
        if (d->streams) {
                r = device_refuses(d, stream);
                error = r < 0 ? CU_OK : write_next(view, stream, ret);
                kvd_device_leave(&d->gpu);
        }
        if (r < 0 || error == CU_OK)
                return r;
        r = wait_for_stream(d, stream);
        return r < 0 ? r : -EOPNOTSUPP;
}

/* ---- waits ----------------------------------------------------------------------------------- */

static int wait_here(const struct view *view, uint32_t semaphore, uint64_t value) {
        uint64_t end = sys_now_ns() + WAIT_NS;
        struct timespec pause = {0, LOOK_NS};

        while (semaphore_reached(view, semaphore) < value) {
                if (sys_now_ns() > end)
                        return client_fail(-ETIMEDOUT,
                                           "a block's data was not written within a minute");
                nanosleep(&pause, NULL);
        }
        return 0;
}

/*
 * True if this stream writes the semaphore: then it is already behind that write. With the device
 * entered.
 */
static bool is_own(struct view *view, cu_stream stream, uint32_t semaphore) {
        struct device *d = view->device;
        uint32_t first = semaphore_at(d->row, 0);
        unsigned long long id;
        bool own = false;

        if (semaphore < first || semaphore >= first + SEMAPHORES ||
            d->gpu.cuda->cuStreamGetId(stream, &id))
                return false;
        pthread_mutex_lock(&d->lock);
        own = d->semaphores[semaphore - first].used &&
              d->semaphores[semaphore - first].stream == id;
        pthread_mutex_unlock(&d->lock);
        return own;
}

int semaphore_wait(struct view *view, void *stream, uint32_t semaphore, uint64_t value) {
        struct device *d = view->device;
        cu_result error = CU_OK;
        int r;

        if (semaphore_reached(view, semaphore) >= value)
                return 0;
        r = enter(d);
        if (r < 0)
                return r;
        r = device_refuses(d, stream);
        /*
         * Once the daemon was replaced, a stream must not wait: it might never be released if the
         * producer dies. The CPU gives up after a time.
         */
        if (r == 0 && (!d->streams || !view_is_current(view)))
                r = wait_here(view, semaphore, value);
        else if (r == 0 && !is_own(view, stream, semaphore))
                error = d->gpu.cuda->cuStreamWaitValue64(stream, semaphore_address(d, semaphore),
                                                         value, CU_WAIT_GEQ);
        kvd_device_leave(&d->gpu);
        return error ? stream_fail(d, error, "the stream cannot wait") : r;
}
