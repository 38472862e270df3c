/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Any call of the driver may fail at any time. libkvd then returns an error, or works without it.
 * It never hangs, releases all that it got from the driver, and the daemon and its other clients
 * are not affected. Needs the stand-in driver, which can fail the n-th call of a function.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/gpu/gpu_view.h"
#include "ipc/base/util.h"
#include "tests/gpu/device/peer.h"

#define DOC 3u

/* Checks that an error has a message. Returns r. */
static int said(int r) {
        if (r < 0 && !kvd_error()[0])
                die("error %d without a word", -r);
        return r;
}

static void use(kvd_space *space, const struct kvd_cuda *cuda, cu_stream stream, uint32_t doc) {
        struct kvd_pin pin = {0}, again = {0};
        uint32_t tokens[2 * BT], ids[2];
        struct kvd_block blocks[2] = {0};
        int got = said(kvd_alloc(space, 2, blocks));

        make_tokens(doc, 2, tokens);
        if (got != 2) {
                kvd_free(space, got > 0 ? (uint32_t)got : 0, blocks);
                return;
        }
        for (uint32_t i = 0; i < 2; i++)
                cuda->cuMemsetD32Async((cu_address)blocks[i].data, word_of(doc, i), BLOCK_WORDS,
                                       stream);
        if (said(kvd_seal_on(space, &pin, 2, blocks, tokens, 2 * BT, stream)) < 0)
                kvd_free_on(space, 2, blocks, stream);
        if (said((int)kvd_lookup(space, 0, tokens, 2 * BT, ids, 2, &again)) > 0) {
                said(kvd_wait_on(space, &again, stream));
                cuda->cuStreamSynchronize(stream);
                said(kvd_check_pin(space, &again));
        }
        kvd_unpin_on(space, &again, stream);
        kvd_unpin_on(space, &pin, stream);
        kvd_settle(space);
}

/* Uses the space with a stream of the caller, if the driver can create one. */
static void use_stream(kvd_space *space, const struct kvd_cuda *cuda, int device) {
        cu_context context;
        cu_stream stream;

        if (cuda->cuDevicePrimaryCtxRetain(&context, device) != CU_OK)
                return;
        if (cuda->cuCtxPushCurrent(context) == CU_OK) {
                if (cuda->cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0) == CU_OK) {
                        use(space, cuda, stream, DOC);
                        use(space, cuda, stream, DOC + 1);
                        cuda->cuStreamDestroy(stream);
                }
                cuda->cuCtxPopCurrent(&context);
        }
        cuda->cuDevicePrimaryCtxRelease(device);
}

/*
 * Uses everything, with a stream of the caller and the default stream, and closes the space while
 * work is under way.
 */
static void whole_life(struct role *role) {
        struct kvd_layer_view view;
        const struct kvd_cuda *cuda;
        const char *why;
        struct kvd_place place;
        kvd_space *space;
        kvd *handle;

        must(kvd_open(role->socket, &handle));
        if (said(kvd_space_open(handle, "s", &geometry, NULL, &space)) < 0) {
                kvd_close(handle);
                return;
        }
        must(kvd_space_place(space, &place));
        cuda = kvd_cuda_load(&why);
        use_stream(space, cuda, place.device);
        use(space, cuda, NULL, DOC + 2);
        said(kvd_layer_view(space, 0, &view));
        kvd_space_close(space);
        kvd_close(handle);
}

/* ---- acquired and released ------------------------------------------------------------------- */

/* How often the function was called. with_faults: including injected failures. */
static uint32_t calls(const char *log, const char *name, bool with_faults) {
        FILE *f = fopen(log, "r");
        char line[128], called[64];
        uint32_t n = 0;

        if (!f)
                die("no log of the driver");
        while (fgets(line, sizeof line, f))
                n += sscanf(line, "%*d %63s", called) == 1 && strcmp(called, name) == 0 &&
                     (with_faults || !strchr(line, '='));
        fclose(f);
        return n;
}

/* Everything that was acquired in this life was released in it. */
static void expect_nothing_kept(const char *fault, const char *log) {
        static const struct {
                const char *had, *gone;
        } pairs[] = {{"cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease"},
                     {"cuCtxPushCurrent", "cuCtxPopCurrent"},
                     {"cuMemAddressReserve", "cuMemAddressFree"},
                     {"cuMemImportFromShareableHandle", "cuMemRelease"},
                     {"cuMemMap", "cuMemUnmap"},
                     {"cuIpcOpenMemHandle", "cuIpcCloseMemHandle"},
                     {"cuMemHostRegister", "cuMemHostUnregister"},
                     {"cuStreamCreateWithPriority", "cuStreamDestroy"}};

        for (size_t i = 0; i < ARRAY_SIZE(pairs); i++) {
                uint32_t had = calls(log, pairs[i].had, false),
                         gone = calls(log, pairs[i].gone, true);

                if (had != gone)
                        die("%s: %u times %s, %u times %s", fault, had, pairs[i].had, gone,
                            pairs[i].gone);
        }
}

/* ---- a context that is lost ------------------------------------------------------------------ */

static _Atomic bool may_pass;

static void pass_gate(void *data) {
        while (!may_pass)
                usleep(1000);
}

/* Opens the gate for a caller that tries again: it must not hang. */
static cu_result enters_nothing(cu_context context) {
        static uint32_t n;

        may_pass = n++ > 0;
        return CU_INVALID_CONTEXT;
}

static void wait_without_context(struct view *view) {
        const struct kvd_cuda *cuda = view->device->gpu.cuda;
        struct kvd_cuda failing = *cuda;

        failing.cuCtxPushCurrent = enters_nothing;
        view->device->gpu.cuda = &failing;
        if (semaphore_quiet(view) || may_pass)
                die("waited for a stream whose context cannot be entered");
        view->device->gpu.cuda = cuda;
}

/* A stream has not kept its promise yet, and never may: nobody waits for it. */
static void life_without_context(struct role *role) {
        struct kvd_pin pin = {0};
        struct side s;

        side_open(&s, role->socket, "s");
        publish(&s, 60, 1, &pin);
        if (s.cuda->cuLaunchHostFunc(s.stream, pass_gate, NULL) != CU_OK)
                die("no gate");
        must(kvd_unpin_on(s.space, &pin, s.stream));
        wait_without_context(atomic_load(&s.space->view));
        may_pass = true;
        side_close(&s);
}

/* ---- lives ----------------------------------------------------------------------------------- */

/* A life in which one call fails, by a setting of the stand-in driver. */
static void live(const struct instance *d, const char *fault, bool keeps_nothing) {
        char log[160];
        const char *const settings[] = {fault, "FAKECUDA_SLOW=set:1", log, NULL};
        const char *path = log + strlen("FAKECUDA_LOG=");
        struct peer peer;

        snprintf(log, sizeof log, "FAKECUDA_LOG=%s.log", d->socket);
        peer = peer_start(whole_life, d->socket, settings);
        peer_end(&peer);
        if (keeps_nothing)
                expect_nothing_kept(fault, path);
        unlink(path);
}

/* Fails calls 1 to 5. What a context holds that failed or cannot be entered is freed with it. */
static void fail_each(const struct instance *d, const char *name, int error) {
        bool can_give_back = strcmp(name, "execute") != 0 && strcmp(name, "cuCtxPushCurrent") != 0;
        char setting[96];

        for (uint32_t n = 1; n <= 5; n++) {
                snprintf(setting, sizeof setting, "FAKECUDA_FAIL=%s:%u=%d", name, n, error);
                live(d, setting, can_give_back);
        }
}

/* After all that, a client without failures finds what it wrote. */
static void good_life(struct role *role) {
        struct kvd_pin pin = {0};
        uint32_t ids[4];
        struct side s;

        side_open(&s, role->socket, "s");
        publish(&s, 50, 4, &pin);
        kvd_unpin(s.space, &pin);
        if (find(&s, 50, 4, &pin, ids) != 4)
                die("not found");
        must(kvd_wait_on(s.space, &pin, s.stream));
        put_read(&s, &pin, ids, 4);
        sync_stream(&s);
        must(kvd_check_pin(s.space, &pin));
        if (wrong_words(&s, 50, 4))
                die("wrong bytes");
        kvd_unpin(s.space, &pin);
        side_close(&s);
}

static void live_with_a_legacy_handle(void) {
        struct instance d;

        legacy_handles = true;
        start_daemon(&d, NULL);
        live(&d, "FAKECUDA_FAIL=", true);
        end_daemon(&d);
        legacy_handles = false;
}

int main(void) {
        static const char *const functions[] = {"cuInit",
                                                "cuDeviceGetCount",
                                                "cuDeviceGet",
                                                "cuDeviceGetUuid",
                                                "cuMemGetAllocationGranularity",
                                                "cuDevicePrimaryCtxRetain",
                                                "cuCtxPushCurrent",
                                                "cuMemAddressReserve",
                                                "cuMemImportFromShareableHandle",
                                                "cuMemMap",
                                                "cuMemSetAccess",
                                                "cuMemUnmap",
                                                "cuMemHostRegister",
                                                "cuMemHostGetDevicePointer",
                                                "cuStreamCreateWithPriority",
                                                "cuStreamWriteValue64",
                                                "cuStreamWaitValue64",
                                                "cuStreamSynchronize",
                                                "cuCtxSynchronize"};
        struct instance d;
        struct peer peer;

        start_daemon(&d, NULL);
        for (size_t i = 0; i < ARRAY_SIZE(functions); i++)
                fail_each(&d, functions[i], i % 2 ? CU_OUT_OF_MEMORY : CU_UNKNOWN);
        fail_each(&d, "execute", CU_ILLEGAL_ADDRESS);
        peer = peer_start(good_life, d.socket, NULL);
        peer_end(&peer);
        peer = peer_start(life_without_context, d.socket, NULL);
        peer_end(&peer);
        end_daemon(&d);
        live_with_a_legacy_handle();
        printf("%zu functions, five times each\n", ARRAY_SIZE(functions) + 1);
        return 0;
}
