/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Capture of streams into graphs, as far as it forbids calls. A graph here is only a number of
 * nodes: tests check whether kvd added one, or broke the capture.
 */

#include <stdlib.h>

#include "tests/gpu/fakecuda/driver.h"

enum mode { GLOBAL, THREAD_LOCAL, RELAXED };

struct capture {
        enum mode mode;
        pthread_t by;
        bool valid;
        size_t nodes;
};

static __thread int own_mode = GLOBAL;

static bool is_captured_beside(const struct stream *stream, const struct stream *legacy) {
        return stream != legacy && stream->blocking && stream->capture &&
               stream->device == legacy->device;
}

/* Is the stream a legacy default stream that may not be used because another one is captured? */
static bool is_implicit(const struct stream *stream, bool break_it) {
        bool found = false;

        for (struct stream *it = stream_next(NULL); it && stream == stream->device->legacy;
             it = stream_next(it))
                if (is_captured_beside(it, stream)) {
                        it->capture->valid &= !break_it;
                        found = true;
                }
        return found;
}

cu_result capture_add(struct stream *stream, bool *ret) {
        *ret = false;
        if (is_implicit(stream, true))
                return CU_CAPTURE_IMPLICIT;
        if (!stream->capture)
                return CU_OK;
        if (!stream->capture->valid)
                return CU_CAPTURE_INVALIDATED;
        stream->capture->nodes++;
        *ret = true;
        return CU_OK;
}

cu_result capture_allows_waiting(const struct stream *stream) {
        if (is_implicit(stream, true))
                return CU_CAPTURE_IMPLICIT;
        if (!stream->capture)
                return CU_OK;
        stream->capture->valid = false;
        return CU_CAPTURE_UNSUPPORTED;
}

cu_result capture_allows_waiting_for_all(const struct device *device) {
        cu_result error = CU_OK;

        for (struct stream *it = stream_next(NULL); it; it = stream_next(it))
                if (it->device == device && it->capture) {
                        it->capture->valid = false;
                        error = CU_CAPTURE_UNSUPPORTED;
                }
        return error;
}

static bool forbids(const struct capture *capture) {
        bool own = pthread_equal(capture->by, pthread_self());

        if (own_mode == RELAXED || capture->mode == RELAXED)
                return false;
        return own || (capture->mode == GLOBAL && own_mode == GLOBAL);
}

cu_result capture_allows_unsafe(void) {
        cu_result error = CU_OK;

        pthread_mutex_lock(&fake.lock);
        for (struct stream *it = stream_next(NULL); it; it = stream_next(it))
                if (it->capture && forbids(it->capture)) {
                        it->capture->valid = false;
                        error = CU_CAPTURE_UNSUPPORTED;
                }
        pthread_mutex_unlock(&fake.lock);
        return error;
}

cu_result cuThreadExchangeStreamCaptureMode(int *mode) {
        int before = own_mode;

        ENTER(cuThreadExchangeStreamCaptureMode, NEEDS_INIT);
        if (!mode || *mode < GLOBAL || *mode > RELAXED)
                return CU_INVALID_VALUE;
        own_mode = *mode;
        *mode = before;
        return CU_OK;
}

cu_result cuStreamIsCapturing(cu_stream handle, int *ret) {
        enum { NONE, ACTIVE, INVALIDATED };
        const struct stream *it;
        cu_result error = CU_OK;

        ENTER(cuStreamIsCapturing, NEEDS_CONTEXT);
        if (!ret)
                return CU_INVALID_VALUE;
        pthread_mutex_lock(&fake.lock);
        it = stream_find(handle);
        if (!it)
                error = CU_INVALID_HANDLE;
        else if (is_implicit(it, false))
                error = CU_CAPTURE_IMPLICIT;
        else
                *ret = !it->capture ? NONE : it->capture->valid ? ACTIVE : INVALIDATED;
        pthread_mutex_unlock(&fake.lock);
        return error;
}

static cu_result begin(struct stream *it, int mode) {
        if (!it)
                return CU_INVALID_HANDLE;
        if (it == it->device->legacy)
                return CU_CAPTURE_UNSUPPORTED;
        if (it->capture)
                return CU_ILLEGAL_STATE;
        it->capture = calloc(1, sizeof *it->capture);
        if (!it->capture)
                abort();
        *it->capture = (struct capture){(enum mode)mode, pthread_self(), true, 0};
        return CU_OK;
}

cu_result cuStreamBeginCapture(cu_stream handle, int mode) {
        cu_result error;

        ENTER(cuStreamBeginCapture, NEEDS_CONTEXT);
        if (mode < GLOBAL || mode > RELAXED)
                return CU_INVALID_VALUE;
        pthread_mutex_lock(&fake.lock);
        error = begin(stream_find(handle), mode);
        pthread_mutex_unlock(&fake.lock);
        return error;
}

/* Ends the capture, which becomes the graph. */
static cu_result end(struct stream *it, void **ret) {
        struct capture *capture = it ? it->capture : NULL;

        *ret = NULL;
        if (!capture)
                return it ? CU_ILLEGAL_STATE : CU_INVALID_HANDLE;
        if (capture->mode != RELAXED && !pthread_equal(capture->by, pthread_self()))
                return CU_CAPTURE_WRONG_THREAD;
        it->capture = NULL;
        if (capture->valid) {
                *ret = capture;
                return CU_OK;
        }
        free(capture);
        return CU_CAPTURE_INVALIDATED;
}

cu_result cuStreamEndCapture(cu_stream handle, void **ret) {
        cu_result error;

        ENTER(cuStreamEndCapture, NEEDS_CONTEXT);
        if (!ret)
                return CU_INVALID_VALUE;
        pthread_mutex_lock(&fake.lock);
        error = end(stream_find(handle), ret);
        pthread_mutex_unlock(&fake.lock);
        return error;
}

/* Only returns the number of nodes, which have no handles. */
cu_result cuGraphGetNodes(void *graph, void **nodes, size_t *n) {
        ENTER(cuGraphGetNodes, NEEDS_INIT);
        if (!graph || nodes || !n)
                return CU_INVALID_VALUE;
        *n = ((const struct capture *)graph)->nodes;
        return CU_OK;
}

cu_result cuGraphDestroy(void *graph) {
        ENTER(cuGraphDestroy, NEEDS_INIT);
        free(graph);
        return graph ? CU_OK : CU_INVALID_VALUE;
}
