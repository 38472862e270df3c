/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Each stream has a thread that does its work in order. Default streams and events add waits: work
 * may have to wait until other streams have done a number of pieces. Streams are never freed, so
 * that a destroyed handle is recognised, unless FAKECUDA_REUSE gives it to the next stream.
 */

#include "tests/gpu/fakecuda/driver.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ipc/base/util.h"

struct wait {
        struct wait *next;
        const struct stream *stream;
        uint64_t number;
};

__thread bool fake_in_host_function;
static __thread struct stream *own[FAKE_DEVICES]; /* default streams of this thread */
static __thread struct stream *working;           /* the stream whose work this thread does */

static struct stream *streams;
static unsigned n_executed;
static uint64_t n_streams = 2; /* ids that default streams may have on drivers */
static struct sigaction before_us;

/* ---- a thread -------------------------------------------------------------------------------- */

static bool is_ready(const struct work *work) {
        for (const struct wait *w = work->waits; w; w = w->next)
                if (w->stream->done < w->number)
                        return false;
        return true;
}

static void free_work(struct work *work) {
        struct wait *next;

        for (struct wait *w = work->waits; w; w = next) {
                next = w->next;
                free(w);
        }
        free(work);
}

/* Of the other kinds, only a wait reads memory, and handles that itself. */
static bool touches_memory(const struct work *work) {
        return work->kind != WORK_HOST && work->kind != WORK_OTHER;
}

static bool takes_turns(const struct work *work) {
        return work && (work->kind == WORK_KERNEL || work->kind == WORK_SET);
}

static cu_result run(struct work *work, struct stream *stream) {
        cu_result error;

        if (touches_memory(work))
                ranges_in_use(true);
        pthread_mutex_unlock(&fake.lock);
        if (takes_turns(work))
                turn_begin(stream->device);
        fake_delay(work->kind);
        error = work->run(work, stream);
        pthread_mutex_lock(&fake.lock);
        turn_end(takes_turns(work->next) && is_ready(work->next) && !stream->device->broken);
        if (touches_memory(work))
                ranges_in_use(false);
        return error;
}

/*
 * Work of a broken context, and work that is left when its stream is dropped, counts as done
 * without being done.
 */
static void execute(struct stream *stream, struct work *work) {
        cu_result error = CU_OK;

        while (!stream->device->broken && !is_ready(work))
                pthread_cond_wait(&fake.changed, &fake.lock);
        if (stream->begun)
                *stream->begun = work->number;
        if (!stream->device->broken)
                error = fake_fault("execute", ++n_executed);
        if (!stream->device->broken && !error)
                error = run(work, stream);
        if (error)
                fake_break(stream->device, error);
        if (stream->device->broken)
                turn_drop(stream->device);
        if (work->done)
                work->done(work);
        stream->done++;
        pthread_cond_broadcast(&fake.changed);
}

static void *serve(void *data) {
        struct stream *stream = data;

        working = stream;
        pthread_mutex_lock(&fake.lock);
        for (;;) {
                struct work *work = stream->first;

                if (!work && !stream->alive)
                        break;
                if (!work) {
                        pthread_cond_wait(&fake.changed, &fake.lock);
                        continue;
                }
                execute(stream, work);
                stream->first = work->next;
                if (!stream->first)
                        stream->last = NULL;
                free_work(work);
        }
        stream->started = false;
        pthread_mutex_unlock(&fake.lock);
        return NULL;
}

/*
 * A fault on a stream's thread is a fault of the device: the context breaks, and this thread stops
 * for good, since its work cannot continue. Faults of other threads are the program's own.
 */
static void fault(int number, siginfo_t *info, void *context) {
        static const char text[] = "fakecuda: the processor touches memory of the device\n";

        if (!working) {
                if (fake_settings.strict && write(STDERR_FILENO, text, sizeof text - 1) < 0)
                        abort();
                sigaction(number, &before_us, NULL);
                return;
        }
        pthread_mutex_lock(&fake.lock);
        fake_break(working->device, CU_ILLEGAL_ADDRESS);
        working->done = working->submitted;
        pthread_mutex_unlock(&fake.lock);
        for (;;)
                pause();
}

static void start(struct stream *stream) {
        static bool handling;
        struct sigaction action = {.sa_sigaction = fault,
                                   .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
        sigset_t all, old;
        pthread_attr_t detached;
        pthread_t thread;

        if (!handling)
                sigaction(SIGSEGV, &action, &before_us);
        handling = true;
        sigfillset(&all);
        sigdelset(&all, SIGSEGV);
        sigdelset(&all, SIGBUS);
        pthread_sigmask(SIG_BLOCK, &all, &old);
        pthread_attr_init(&detached);
        pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
        if (pthread_create(&thread, &detached, serve, stream) != 0)
                abort();
        pthread_attr_destroy(&detached);
        pthread_sigmask(SIG_SETMASK, &old, NULL);
        stream->started = true;
}

/* ---- work that outlives its process ---------------------------------------------------------- */

static _Atomic uint64_t *share_word(void) {
        void *at = mmap(NULL, FAKE_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

        if (at == MAP_FAILED)
                abort();
        return at;
}

/* Repeats the work that was under way from its beginning, then does the work queued after it. */
static void *go_on_for(void *data) {
        struct pollfd parent = {.fd = (int)(intptr_t)data, .events = POLLIN};

        while (poll(&parent, 1, -1) < 0 && errno == EINTR)
                continue;
        for (struct stream *it = streams; it; it = it->next)
                for (struct work *work = it->first; work; work = work->next)
                        if (work->number >= *it->begun) {
                                fake_delay(work->kind);
                                work->run(work, it);
                        }
        return NULL;
}

/* A pidfd of the parent, opened before the fork: the parent may be killed before the child runs. */
static int forking;

static void before_fork(void) {
        pthread_mutex_lock(&fake.lock);
        forking = (int)syscall(SYS_pidfd_open, getpid(), 0);
        if (forking < 0)
                abort();
}

static void in_parent(void) {
        close(forking);
        pthread_mutex_unlock(&fake.lock);
}

static void in_child(void) {
        pthread_t thread;

        pthread_mutex_unlock(&fake.lock);
        if (pthread_create(&thread, NULL, go_on_for, (void *)(intptr_t)forking) != 0)
                abort();
}

void streams_watch_forks(void) {
        pthread_atfork(before_fork, in_parent, in_child);
}

/* ---- handles --------------------------------------------------------------------------------- */

static struct stream *add(struct device *device, bool blocking) {
        struct stream *it = calloc(1, sizeof *it);

        if (!it)
                abort();
        *it = (struct stream){.next = streams,
                              .device = device,
                              .blocking = blocking,
                              .alive = true,
                              .handle = it,
                              .id = ++n_streams};
        if (fake_settings.outlives)
                it->begun = share_word();
        streams = it;
        return it;
}

static void reuse_handle(struct stream *it) {
        for (struct stream *old = streams; old; old = old->next)
                if (!old->alive && old->handle) {
                        it->handle = old->handle;
                        old->handle = NULL;
                        return;
                }
}

struct stream *stream_next(const struct stream *after) {
        return after ? after->next : streams;
}

static struct stream *legacy(struct device *device) {
        if (!device->legacy)
                device->legacy = add(device, true);
        return device->legacy;
}

static struct stream *of_thread(struct device *device) {
        struct stream **it = &own[device - fake.devices];

        if (!*it || !(*it)->alive)
                *it = add(device, true);
        return *it;
}

struct stream *stream_find(cu_stream handle) {
        struct stream *it = streams;

        if (!handle || handle == CU_LEGACY_STREAM)
                return legacy(fake_current());
        if (handle == CU_PER_THREAD_STREAM)
                return of_thread(fake_current());
        while (it && it->handle != handle)
                it = it->next;
        return it && it->alive ? it : NULL;
}

cu_result cuStreamCreateWithPriority(cu_stream *ret, unsigned flags, int priority) {
        struct stream *it;

        ENTER(cuStreamCreateWithPriority, NEEDS_CONTEXT);
        if (!ret || flags & ~CU_STREAM_NON_BLOCKING)
                return CU_INVALID_VALUE;
        pthread_mutex_lock(&fake.lock);
        it = add(fake_current(), !(flags & CU_STREAM_NON_BLOCKING));
        if (fake_settings.reuse_handles)
                reuse_handle(it);
        *ret = it->handle;
        pthread_mutex_unlock(&fake.lock);
        return CU_OK;
}

cu_result cuStreamGetId(cu_stream handle, unsigned long long *ret) {
        struct stream *it;

        ENTER(cuStreamGetId, NEEDS_CONTEXT);
        if (!ret)
                return CU_INVALID_VALUE;
        pthread_mutex_lock(&fake.lock);
        it = stream_find(handle);
        if (it)
                *ret = it->id;
        pthread_mutex_unlock(&fake.lock);
        return it ? CU_OK : CU_INVALID_HANDLE;
}

/* Queued work is still done. */
cu_result cuStreamDestroy(cu_stream handle) {
        struct stream *it;

        ENTER(cuStreamDestroy, NEEDS_CONTEXT);
        if (!handle || handle == CU_LEGACY_STREAM || handle == CU_PER_THREAD_STREAM)
                return CU_INVALID_VALUE;
        pthread_mutex_lock(&fake.lock);
        it = stream_find(handle);
        if (it)
                it->alive = false;
        pthread_cond_broadcast(&fake.changed);
        pthread_mutex_unlock(&fake.lock);
        return it ? CU_OK : CU_INVALID_HANDLE;
}

void stream_destroy_all(struct device *device) {
        for (struct stream *it = streams; it; it = it->next)
                if (it->device == device)
                        it->alive = false;
        device->legacy = NULL;
        pthread_cond_broadcast(&fake.changed);
}

/* ---- queueing -------------------------------------------------------------------------------- */

static void wait_for(struct work *work, const struct stream *stream, uint64_t number) {
        struct wait *it;

        if (!stream || stream->done >= number)
                return;
        it = malloc(sizeof *it);
        if (!it)
                abort();
        *it = (struct wait){work->waits, stream, number};
        work->waits = it;
}

/* The legacy default stream synchronises with every blocking stream of its context. */
static void take_turns(struct work *work, const struct stream *stream) {
        const struct stream *first = stream->device->legacy;

        if (stream != first && stream->blocking && first)
                wait_for(work, first, first->submitted);
        for (const struct stream *it = streams; stream == first && it; it = it->next)
                if (it != first && it->blocking && it->device == stream->device)
                        wait_for(work, it, it->submitted);
}

static void append(struct stream *stream, struct work *work) {
        work->next = NULL;
        work->number = ++stream->submitted;
        if (stream->last)
                stream->last->next = work;
        else
                stream->first = work;
        stream->last = work;
        if (!stream->started)
                start(stream);
        pthread_cond_broadcast(&fake.changed);
}

/* A GPU's queue has limited room: a call that queues more waits. */
static void wait_for_room(const struct stream *stream) {
        while (fake_settings.depth && stream->alive && !stream->device->broken &&
               stream->submitted - stream->done >= fake_settings.depth)
                pthread_cond_wait(&fake.changed, &fake.lock);
}

static void forget(const struct work *like) {
        struct work work = *like;

        if (work.done)
                work.done(&work);
}

cu_result stream_append(struct stream *stream, const struct work *like, const struct stream *with,
                        uint64_t number) {
        struct work *work;
        cu_result error;
        bool captured;

        if (!stream)
                return CU_INVALID_HANDLE;
        error = capture_add(stream, &captured);
        if (captured)
                forget(like);
        if (error || captured)
                return error;
        wait_for_room(stream);
        work = malloc(sizeof *work);
        if (!work)
                abort();
        *work = *like;
        work->waits = NULL;
        take_turns(work, stream);
        wait_for(work, with, number);
        append(stream, work);
        return CU_OK;
}

cu_result stream_submit(cu_stream handle, const struct work *work, const struct stream *with,
                        uint64_t number) {
        cu_result error;

        pthread_mutex_lock(&fake.lock);
        error = stream_append(stream_find(handle), work, with, number);
        pthread_mutex_unlock(&fake.lock);
        return error;
}

cu_result stream_submit_and_wait(cu_stream handle, const struct work *work) {
        struct stream *stream;
        cu_result error;

        pthread_mutex_lock(&fake.lock);
        stream = stream_find(handle);
        error = stream ? capture_allows_waiting(stream) : CU_INVALID_HANDLE;
        if (!error)
                error = stream_append(stream, work, NULL, 0);
        if (!error)
                error = stream_wait(stream, stream->submitted);
        pthread_mutex_unlock(&fake.lock);
        return error;
}

/* ---- waiting --------------------------------------------------------------------------------- */

cu_result stream_wait(const struct stream *stream, uint64_t number) {
        while (stream->done < number && !stream->device->broken)
                pthread_cond_wait(&fake.changed, &fake.lock);
        return stream->device->broken;
}

cu_result stream_wait_all(struct device *device) {
        for (struct stream *it = streams; it && !device->broken; it = it->next)
                if (it->device == device)
                        stream_wait(it, it->submitted);
        return device->broken;
}

cu_result cuStreamSynchronize(cu_stream handle) {
        struct stream *it;
        cu_result error;

        ENTER(cuStreamSynchronize, NEEDS_CONTEXT);
        pthread_mutex_lock(&fake.lock);
        it = stream_find(handle);
        error = it ? capture_allows_waiting(it) : CU_INVALID_HANDLE;
        if (!error)
                error = stream_wait(it, it->submitted);
        pthread_mutex_unlock(&fake.lock);
        return error;
}

cu_result cuStreamQuery(cu_stream handle) {
        const struct stream *it;
        cu_result error;

        ENTER(cuStreamQuery, NEEDS_CONTEXT);
        pthread_mutex_lock(&fake.lock);
        it = stream_find(handle);
        error = it ? capture_allows_waiting(it) : CU_INVALID_HANDLE;
        if (!error && it->done < it->submitted)
                error = CU_NOT_READY;
        pthread_mutex_unlock(&fake.lock);
        return error;
}
