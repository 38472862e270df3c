/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <time.h>

#include "tests/gpu/fakecuda/driver.h"

/* Never freed, so that a destroyed handle is recognised. */
struct event {
        struct event *next;
        bool timing, alive;
        const struct stream *stream; /* of the last record; NULL: never recorded */
        uint64_t number;             /* position of the last record in its stream */
        uint64_t timed, time_ns;     /* the last record that was reached, and when */
};

static struct event *events;

static struct event *find(cu_event handle) {
        struct event *it = events;

        while (it && (cu_event)it != handle)
                it = it->next;
        return it && it->alive ? it : NULL;
}

static cu_result state(const struct event *event) {
        if (!event)
                return CU_INVALID_HANDLE;
        return event->stream && event->stream->done < event->number ? CU_NOT_READY : CU_OK;
}

cu_result cuEventCreate(cu_event *ret, unsigned flags) {
        enum { BLOCKING_SYNC = 1 };
        struct event *it;

        ENTER(cuEventCreate, NEEDS_CONTEXT);
        if (!ret || flags & ~(CU_EVENT_DISABLE_TIMING | BLOCKING_SYNC))
                return CU_INVALID_VALUE;
        it = calloc(1, sizeof *it);
        if (!it)
                abort();
        pthread_mutex_lock(&fake.lock);
        *it = (struct event){.next = events,
                             .timing = !(flags & CU_EVENT_DISABLE_TIMING),
                             .alive = true};
        events = it;
        pthread_mutex_unlock(&fake.lock);
        *ret = it;
        return CU_OK;
}

cu_result cuEventDestroy(cu_event handle) {
        struct event *it;

        ENTER(cuEventDestroy, NEEDS_CONTEXT);
        pthread_mutex_lock(&fake.lock);
        it = find(handle);
        if (it)
                it->alive = false;
        pthread_mutex_unlock(&fake.lock);
        return it ? CU_OK : CU_INVALID_HANDLE;
}

static cu_result pass(struct work *work, struct stream *stream) {
        struct event *event = work->event.event;
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        pthread_mutex_lock(&fake.lock);
        event->timed = work->number;
        event->time_ns = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
        pthread_mutex_unlock(&fake.lock);
        return CU_OK;
}

static cu_result record(struct event *event, struct stream *stream) {
        cu_result error;

        if (!event || !stream)
                return CU_INVALID_HANDLE;
        error = stream_append(stream,
                              &(struct work){.kind = WORK_OTHER, .run = pass, .event = {event}},
                              NULL, 0);
        if (!error) {
                event->stream = stream;
                event->number = stream->submitted;
        }
        return error;
}

cu_result cuEventRecord(cu_event handle, cu_stream stream) {
        cu_result error;

        ENTER(cuEventRecord, NEEDS_CONTEXT);
        pthread_mutex_lock(&fake.lock);
        error = record(find(handle), stream_find(stream));
        pthread_mutex_unlock(&fake.lock);
        return error;
}

static cu_result nothing(struct work *work, struct stream *stream) {
        return CU_OK;
}

/* Later records of the event do not affect waits that are already queued. */
cu_result cuStreamWaitEvent(cu_stream stream, cu_event handle, unsigned flags) {
        const struct event *event;
        cu_result error = CU_INVALID_HANDLE;

        ENTER(cuStreamWaitEvent, NEEDS_CONTEXT);
        if (flags)
                return CU_INVALID_VALUE;
        pthread_mutex_lock(&fake.lock);
        event = find(handle);
        if (event)
                error = stream_append(stream_find(stream),
                                      &(struct work){.kind = WORK_OTHER, .run = nothing},
                                      event->stream, event->number);
        pthread_mutex_unlock(&fake.lock);
        return error;
}

cu_result cuEventQuery(cu_event handle) {
        cu_result error;

        ENTER_UNSAFE(cuEventQuery, NEEDS_CONTEXT);
        pthread_mutex_lock(&fake.lock);
        error = state(find(handle));
        pthread_mutex_unlock(&fake.lock);
        return error;
}

cu_result cuEventSynchronize(cu_event handle) {
        const struct event *event;
        cu_result error;

        ENTER_UNSAFE(cuEventSynchronize, NEEDS_CONTEXT);
        pthread_mutex_lock(&fake.lock);
        event = find(handle);
        error = state(event);
        if (error == CU_NOT_READY)
                error = stream_wait(event->stream, event->number);
        pthread_mutex_unlock(&fake.lock);
        return error;
}

static bool has_time(const struct event *event) {
        return event->timing && event->stream && event->timed == event->number;
}

cu_result cuEventElapsedTime(float *ms, cu_event from, cu_event to) {
        const struct event *a, *b;
        cu_result error;

        ENTER(cuEventElapsedTime, NEEDS_CONTEXT);
        pthread_mutex_lock(&fake.lock);
        a = find(from);
        b = find(to);
        error = state(a) ?: state(b);
        if (!error && (!ms || !has_time(a) || !has_time(b)))
                error = ms ? CU_INVALID_HANDLE : CU_INVALID_VALUE;
        if (!error)
                *ms = (float)((double)(int64_t)(b->time_ns - a->time_ns) / 1e6);
        pthread_mutex_unlock(&fake.lock);
        return error;
}
