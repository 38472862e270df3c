/* SPDX-License-Identifier: Apache-2.0 */
/* Actions with memory */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/gpu/actor.h"
#include "tests/gpu/checks_cu.h"

#define PIECE (1u << 20)

/* Does a step, and stores its result in the note. Returns from the action if it fails. */
#define TRY(step) \
        do { \
                note->result = (step); \
                if (note->result) \
                        return; \
        } while (0)

static struct cu_allocation exportable(cu_device device) {
        return (struct cu_allocation){.type = CU_ALLOCATION_PINNED,
                                      .handle_types = CU_HANDLE_POSIX_FD,
                                      .location = {CU_LOCATION_DEVICE, device}};
}

/* ---- opening --------------------------------------------------------------------------------- */

static void act_init(struct stage *s, struct note *note) {
        const char *why = "";

        s->cuda = kvd_cuda_load(&why);
        snprintf(note->text, sizeof note->text, "%s", why ? why : "");
        if (!s->cuda) {
                note->result = CU_NOT_INITIALIZED;
                return;
        }
        TRY(s->cuda->cuInit(0));
        TRY(s->cuda->cuDeviceGet(&s->device, getenv("KVD_GPU") ? atoi(getenv("KVD_GPU")) : 0));
}

static uint64_t attribute(struct stage *s, int which) {
        int value = 0;

        return s->cuda->cuDeviceGetAttribute(&value, which, s->device) ? 0 : (uint64_t)value;
}

/* Opens s->device, which must be set. */
int stage_open(struct stage *s) {
        cu_result r = s->cuda->cuDevicePrimaryCtxRetain(&s->context, s->device);

        r = r ? r : s->cuda->cuCtxPushCurrent(s->context);
        for (int i = 0; i < 2 && !r; i++)
                r = s->cuda->cuStreamCreateWithPriority(&s->streams[i], CU_STREAM_NON_BLOCKING, 0);
        return r;
}

static void act_open(struct stage *s, struct note *note) {
        size_t bytes = 0;
        int version = 0;

        act_init(s, note);
        if (note->result)
                return;
        TRY(stage_open(s));
        TRY(s->cuda->cuDriverGetVersion(&version));
        TRY(s->cuda->cuDeviceTotalMem(&bytes, s->device));
        note->n[0] = (uint64_t)version;
        note->n[1] = bytes;
        note->n[2] = attribute(s, CU_ATTR_CAPABILITY_MAJOR) * 10 +
                     attribute(s, CU_ATTR_CAPABILITY_MINOR);
        TRY(s->cuda->cuDeviceGetName(note->text, sizeof note->text, s->device));
}

static void act_see_free(struct stage *s, struct note *note) {
        size_t free = 0, total = 0;

        TRY(s->cuda->cuMemGetInfo(&free, &total));
        note->n[0] = free;
        note->n[1] = total;
}

/* ---- VMM ------------------------------------------------------------------------------------- */

static void act_create(struct stage *s, struct note *note) {
        struct cu_allocation what = exportable(s->device);
        uint64_t begin = now_ns();

        s->bytes = note->n[0];
        TRY(s->cuda->cuMemCreate(&s->memory, s->bytes, &what, 0));
        note->n[0] = now_ns() - begin;
        begin = now_ns();
        TRY(s->cuda->cuMemExportToShareableHandle(&s->fd, s->memory, CU_HANDLE_POSIX_FD, 0));
        note->n[1] = now_ns() - begin;
}

static void act_access(struct stage *s, struct note *note) {
        struct cu_access access = {{CU_LOCATION_DEVICE, s->device}, (int)note->n[0]};

        TRY(s->cuda->cuMemSetAccess(s->at, s->bytes, &access, 1));
}

/* Stores times in n[0..2]: reserve, map, set access. */
static void place(struct stage *s, struct note *note, uint64_t access) {
        uint64_t t[4] = {now_ns()};

        s->reserved = s->bytes;
        TRY(s->cuda->cuMemAddressReserve(&s->at, s->reserved, 0, 0, 0));
        t[1] = now_ns();
        TRY(s->cuda->cuMemMap(s->at, s->bytes, 0, s->memory, 0));
        t[2] = now_ns();
        note->n[0] = access;
        act_access(s, note);
        t[3] = now_ns();
        for (int i = 0; i < 3; i++)
                note->n[i] = t[i + 1] - t[i];
}

static void act_map(struct stage *s, struct note *note) {
        place(s, note, note->n[0]);
}

static void act_import(struct stage *s, struct note *note) {
        uint64_t access = note->n[1], begin = now_ns(), took;

        s->bytes = note->n[0];
        note->result = s->cuda->cuMemImportFromShareableHandle(&s->memory, (void *)(uintptr_t)s->fd,
                                                               CU_HANDLE_POSIX_FD);
        took = now_ns() - begin;
        if (s->fd >= 0)
                close(s->fd);
        s->fd = -1;
        if (note->result)
                return;
        place(s, note, access);
        memmove(&note->n[1], &note->n[0], 3 * sizeof note->n[0]);
        note->n[0] = took;
}

static void act_unmap(struct stage *s, struct note *note) {
        uint64_t begin = now_ns();

        if (s->at) {
                TRY(s->cuda->cuMemUnmap(s->at, s->bytes));
                note->n[0] = now_ns() - begin;
                TRY(s->cuda->cuMemAddressFree(s->at, s->reserved));
                s->at = 0;
        }
        begin = now_ns();
        TRY(s->cuda->cuMemRelease(s->memory));
        s->memory = 0;
        note->n[1] = now_ns() - begin;
}

/* ---- legacy handles -------------------------------------------------------------------------- */

static void act_alloc(struct stage *s, struct note *note) {
        struct cu_ipc_handle handle;

        s->bytes = note->n[0];
        TRY(s->cuda->cuMemAlloc(&s->at, s->bytes));
        TRY(s->cuda->cuIpcGetMemHandle(&handle, s->at));
        memcpy(note->text, handle.bytes, sizeof handle.bytes);
}

static void act_legacy(struct stage *s, struct note *note) {
        struct cu_ipc_handle handle;
        uint64_t begin = now_ns();

        memcpy(handle.bytes, note->text, sizeof handle.bytes);
        s->bytes = note->n[0];
        TRY(s->cuda->cuIpcOpenMemHandle(&s->at, handle, CU_IPC_LAZY_PEER_ACCESS));
        note->n[0] = now_ns() - begin;
}

static void act_unlegacy(struct stage *s, struct note *note) {
        uint64_t begin = now_ns();

        TRY(s->cuda->cuIpcCloseMemHandle(s->at));
        note->n[0] = now_ns() - begin;
        s->at = 0;
}

/* ---- what is in it --------------------------------------------------------------------------- */

static uint32_t word_of(uint64_t seed, uint64_t i) {
        return (uint32_t)((i + 1) * 2654435761u ^ (seed * 0x9e3779b97f4a7c15u >> 32));
}

/* Writes the whole mapping from host memory, or, with differ, compares it. */
static void go_through(struct stage *s, struct note *note, uint64_t seed, bool differ) {
        _cleanup_(freep) uint32_t *piece = malloc(PIECE);

        note->n[0] = note->n[1] = 0;
        for (uint64_t at = 0; piece && at < s->bytes; at += PIECE) {
                uint64_t n = MIN(PIECE, s->bytes - at), first = at / 4;

                for (uint64_t i = 0; !differ && i < n / 4; i++)
                        piece[i] = word_of(seed, first + i);
                TRY(differ ? s->cuda->cuMemcpyDtoHAsync(piece, s->at + at, n, s->streams[1]) :
                             s->cuda->cuMemcpyHtoDAsync(s->at + at, piece, n, s->streams[1]));
                TRY(s->cuda->cuStreamSynchronize(s->streams[1]));
                for (uint64_t i = 0; differ && i < n / 4; i++)
                        if (piece[i] != word_of(seed, first + i) && note->n[0]++ == 0)
                                note->n[1] = first + i;
        }
}

static void act_fill(struct stage *s, struct note *note) {
        go_through(s, note, note->n[0], false);
}

static void act_check(struct stage *s, struct note *note) {
        go_through(s, note, note->n[0], true);
}

static void act_peek(struct stage *s, struct note *note) {
        uint32_t word = 0;

        TRY(s->cuda->cuMemcpyDtoHAsync(&word, s->at, sizeof word, s->streams[1]));
        TRY(s->cuda->cuStreamSynchronize(s->streams[1]));
        note->n[0] = word;
}

static cu_result spoil(struct stage *s, uint64_t how, cu_address at) {
        static uint32_t word = 0xdeadbeef;

        if (how == BY_MEMSET)
                return s->cuda->cuMemsetD32Async(at, word, 1, s->streams[1]);
        if (how == BY_COPY)
                return s->cuda->cuMemcpyHtoDAsync(at, &word, sizeof word, s->streams[1]);
        return stage_launch(s, "kvd_check_fill", &(struct check_fill){at, 1, word});
}

static void act_spoil(struct stage *s, struct note *note) {
        int called = spoil(s, note->n[0], s->at + note->n[1] * 4);
        int waited = s->cuda->cuStreamSynchronize(s->streams[1]),
            after = s->cuda->cuCtxSynchronize();

        note->n[0] = (uint64_t)called;
        note->n[1] = (uint64_t)waited;
        note->n[2] = (uint64_t)after;
        note->result = called ? called : waited ? waited : after;
}

static void act_health(struct stage *s, struct note *note) {
        TRY(s->cuda->cuCtxSynchronize());
}

/* ---- host memory ----------------------------------------------------------------------------- */

static void act_register(struct stage *s, struct note *note) {
        uint64_t begin = now_ns();

        s->host_bytes = note->n[0];
        s->host = mmap(NULL, s->host_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, s->fd, 0);
        if (s->fd >= 0)
                close(s->fd);
        s->fd = -1;
        if (s->host == MAP_FAILED) {
                note->result = CU_OUT_OF_MEMORY;
                s->host = NULL;
                return;
        }
        if (note->n[1])
                madvise(s->host, s->host_bytes, MADV_HUGEPAGE);
        madvise(s->host, s->host_bytes, MADV_POPULATE_WRITE);
        note->n[0] = now_ns() - begin;
        begin = now_ns();
        TRY(s->cuda->cuMemHostRegister(s->host, s->host_bytes,
                                       CU_REGISTER_PORTABLE | CU_REGISTER_MAPPED));
        note->n[1] = now_ns() - begin;
        TRY(s->cuda->cuMemHostGetDevicePointer(&s->host_at, s->host, 0));
}

static void act_unregister(struct stage *s, struct note *note) {
        uint64_t begin = now_ns();

        TRY(s->cuda->cuMemHostUnregister(s->host));
        note->n[0] = now_ns() - begin;
        munmap(s->host, s->host_bytes);
        s->host = NULL;
}

/* The rate of the fastest of five copies of everything. */
static void act_rate(struct stage *s, struct note *note) {
        uint64_t bytes = MIN(note->n[0], MIN(s->bytes, s->host_bytes)), in = note->n[1],
                 best = UINT64_MAX;

        for (int i = 0; i < 5; i++) {
                uint64_t begin = now_ns();

                TRY(in ? s->cuda->cuMemcpyHtoDAsync(s->at, s->host, bytes, s->streams[1]) :
                         s->cuda->cuMemcpyDtoHAsync(s->host, s->at, bytes, s->streams[1]));
                TRY(s->cuda->cuStreamSynchronize(s->streams[1]));
                best = MIN(best, now_ns() - begin);
        }
        note->n[0] = bytes * 1000000000u / best;
}

/* ---- how many mappings ----------------------------------------------------------------------- */

/* Maps one handle repeatedly, in one reservation. The process ends afterwards. */
static void act_spread(struct stage *s, struct note *note) {
        uint64_t most = note->n[0], until = now_ns() + note->n[1] * 1000000u, n = 0, begin = 0;
        struct cu_access access = {{CU_LOCATION_DEVICE, s->device}, CU_ACCESS_READ_WRITE};
        cu_address at;

        TRY(s->cuda->cuMemAddressReserve(&at, most * s->bytes, 0, 0, 0));
        while (n < most && now_ns() < until && !note->result) {
                begin = now_ns();
                note->result = s->cuda->cuMemMap(at + n * s->bytes, s->bytes, 0, s->memory, 0);
                if (!note->result)
                        note->result = s->cuda->cuMemSetAccess(at + n * s->bytes, s->bytes, &access,
                                                               1);
                n += !note->result;
        }
        note->n[0] = n;
        note->n[1] = now_ns() - begin;
}

action_function *const actions_of_memory[N_ACTIONS] = {
        [INIT] = act_init,
        [OPEN] = act_open,
        [SEE_FREE] = act_see_free,
        [CREATE] = act_create,
        [IMPORT] = act_import,
        [MAP] = act_map,
        [ACCESS] = act_access,
        [UNMAP] = act_unmap,
        [ALLOC] = act_alloc,
        [LEGACY] = act_legacy,
        [UNLEGACY] = act_unlegacy,
        [FILL] = act_fill,
        [CHECK] = act_check,
        [SPOIL] = act_spoil,
        [HEALTH] = act_health,
        [REGISTER] = act_register,
        [UNREGISTER] = act_unregister,
        [PEEK] = act_peek,
        [SPREAD] = act_spread,
        [RATE] = act_rate,
};
