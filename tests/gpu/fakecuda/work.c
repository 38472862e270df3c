/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/gpu/fakecuda/driver.h"
#include "tests/gpu/fakecuda/run.h"

static void *pointer(cu_address at) {
        return (void *)(uintptr_t)at;
}

static bool allows(cu_address at, size_t bytes, int access) {
        bool r;

        pthread_mutex_lock(&fake.lock);
        r = range_allows(at, bytes, access);
        pthread_mutex_unlock(&fake.lock);
        return r;
}

static bool is_known(unsigned kinds, cu_address at) {
        bool r;

        pthread_mutex_lock(&fake.lock);
        r = range_holding(kinds, at);
        pthread_mutex_unlock(&fake.lock);
        return r;
}

/* ---- copies ---------------------------------------------------------------------------------- */

static cu_result run_copy(struct work *work, struct stream *stream) {
        size_t bytes = work->copy.bytes;

        if ((!work->copy.to_host && !allows(work->copy.to, bytes, CU_ACCESS_READ_WRITE)) ||
            (!work->copy.from_host && !allows(work->copy.from, bytes, CU_ACCESS_READ)))
                return CU_ILLEGAL_ADDRESS;
        memmove(pointer(work->copy.to), pointer(work->copy.from), bytes);
        return CU_OK;
}

enum side { NEITHER, TO, FROM };

/* host: the side that may be any memory of the process. */
static cu_result copy(cu_address to, cu_address from, size_t bytes, enum side host,
                      cu_stream stream) {
        const struct work work = {.kind = WORK_COPY,
                                  .run = run_copy,
                                  .copy = {to, from, bytes, host == TO, host == FROM}};
        bool to_known = is_known(RANGE_OF_DEVICE | RANGE_OF_HOST, to);
        bool from_known = is_known(RANGE_OF_DEVICE | RANGE_OF_HOST, from);

        if (bytes == 0)
                return CU_OK;
        if ((host != TO && !to_known) || (host != FROM && !from_known) || !to || !from)
                return CU_INVALID_VALUE;
        return to_known && from_known ? stream_submit(stream, &work, NULL, 0) :
                                        stream_submit_and_wait(stream, &work);
}

cu_result cuMemcpyHtoDAsync(cu_address to, const void *from, size_t bytes, cu_stream stream) {
        ENTER(cuMemcpyHtoDAsync, NEEDS_CONTEXT);
        return copy(to, (cu_address)(uintptr_t)from, bytes, FROM, stream);
}

cu_result cuMemcpyDtoHAsync(void *to, cu_address from, size_t bytes, cu_stream stream) {
        ENTER(cuMemcpyDtoHAsync, NEEDS_CONTEXT);
        return copy((cu_address)(uintptr_t)to, from, bytes, TO, stream);
}

cu_result cuMemcpyDtoDAsync(cu_address to, cu_address from, size_t bytes, cu_stream stream) {
        ENTER(cuMemcpyDtoDAsync, NEEDS_CONTEXT);
        return copy(to, from, bytes, NEITHER, stream);
}

static cu_result run_set(struct work *work, struct stream *stream) {
        if (!allows(work->set.to, work->set.n * work->set.size, CU_ACCESS_READ_WRITE))
                return CU_ILLEGAL_ADDRESS;
        if (work->set.size == 1)
                memset(pointer(work->set.to), (int)work->set.value, work->set.n);
        for (size_t i = 0; work->set.size == 4 && i < work->set.n; i++)
                ((uint32_t *)pointer(work->set.to))[i] = work->set.value;
        return CU_OK;
}

static cu_result set(cu_address to, unsigned value, unsigned size, size_t n, cu_stream stream) {
        const struct work work = {.kind = WORK_SET, .run = run_set, .set = {to, n, value, size}};

        if (n == 0)
                return CU_OK;
        if (to % size || !is_known(RANGE_OF_DEVICE | RANGE_OF_HOST, to))
                return CU_INVALID_VALUE;
        return stream_submit(stream, &work, NULL, 0);
}

cu_result cuMemsetD8Async(cu_address to, unsigned char value, size_t n, cu_stream stream) {
        ENTER(cuMemsetD8Async, NEEDS_CONTEXT);
        return set(to, value, 1, n, stream);
}

cu_result cuMemsetD32Async(cu_address to, unsigned value, size_t n, cu_stream stream) {
        ENTER(cuMemsetD32Async, NEEDS_CONTEXT);
        return set(to, value, 4, n, stream);
}

/* ---- host functions -------------------------------------------------------------------------- */

static cu_result run_host(struct work *work, struct stream *stream) {
        fake_in_host_function = true;
        work->host.called(work->host.data);
        fake_in_host_function = false;
        return CU_OK;
}

cu_result cuLaunchHostFunc(cu_stream stream, void (*called)(void *data), void *data) {
        const struct work work = {.kind = WORK_HOST, .run = run_host, .host = {called, data}};

        ENTER(cuLaunchHostFunc, NEEDS_CONTEXT);
        return called ? stream_submit(stream, &work, NULL, 0) : CU_INVALID_VALUE;
}

static cu_result run_own(struct work *work, struct stream *stream) {
        return work->own.run(work->own.data);
}

static void free_own(struct work *work) {
        free(work->own.data);
}

cu_result fakecuda_run(cu_stream stream, cu_result (*run)(void *data), void *data) {
        const struct work work = {.kind = WORK_KERNEL,
                                  .run = run_own,
                                  .done = free_own,
                                  .own = {run, data}};

        ENTER(fakecuda_run, NEEDS_CONTEXT);
        return stream_submit(stream, &work, NULL, 0);
}

bool fakecuda_allows(cu_address at, size_t bytes, int access) {
        return allows(at, bytes, access);
}

/* ---- words that order streams, of any process ------------------------------------------------ */

/*
 * A waiting stream sleeps on the word's low half, in any process that maps it, and a stream write
 * wakes all sleepers there. Streams that must also notice plain stores read the word again
 * regularly. Others sleep without a timeout, until a stream write or the end of their context wakes
 * them.
 */
enum { LOOK_AGAIN_US = 200 };

static uint32_t *low_half(cu_address at) {
        return (uint32_t *)pointer(at) + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__);
}

static cu_result run_write(struct work *work, struct stream *stream) {
        if (!allows(work->word.at, 8, CU_ACCESS_READ_WRITE))
                return CU_ILLEGAL_ADDRESS;
        atomic_store((_Atomic uint64_t *)pointer(work->word.at), work->word.value);
        syscall(SYS_futex, low_half(work->word.at), FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
        return CU_OK;
}

/* False: the device may not read it. */
static bool look_at(cu_address at, uint64_t *ret) {
        bool there, of_device;

        pthread_mutex_lock(&fake.lock);
        there = range_allows(at, 8, CU_ACCESS_READ);
        of_device = range_holding(RANGE_OF_DEVICE, at);
        if (of_device)
                ranges_in_use(true);
        if (there)
                *ret = atomic_load((_Atomic uint64_t *)pointer(at));
        if (of_device)
                ranges_in_use(false);
        pthread_mutex_unlock(&fake.lock);
        return there;
}

static long sleep_on(cu_address at, uint64_t seen, _Atomic cu_result *broken) {
        struct futex_waitv either[] = {
                {.uaddr = (uintptr_t)low_half(at), .val = (uint32_t)seen, .flags = FUTEX_32},
                {.uaddr = (uintptr_t)broken, .val = CU_OK, .flags = FUTEX_32},
        };

        if (fake_settings.only_writes_wake)
                return syscall(SYS_futex_waitv, either, ARRAY_SIZE(either), 0, NULL, 0);
        return syscall(SYS_futex, low_half(at), FUTEX_WAIT, (uint32_t)seen,
                       &(struct timespec){.tv_nsec = 1000L * LOOK_AGAIN_US}, NULL, 0);
}

static bool is_reached(uint64_t word, uint64_t value, unsigned flags) {
        return flags == CU_WAIT_GEQ ? (int64_t)(word - value) >= 0 : word == value;
}

/* If the processor cannot access the word (FAKECUDA_STRICT), it polls. */
static cu_result run_wait(struct work *work, struct stream *stream) {
        while (!stream->device->broken) {
                uint64_t word;

                if (!look_at(work->word.at, &word))
                        return CU_ILLEGAL_ADDRESS;
                if (is_reached(word, work->word.value, work->word.flags))
                        return CU_OK;
                if (sleep_on(work->word.at, word, &stream->device->broken) < 0 && errno == EFAULT)
                        nanosleep(&(struct timespec){.tv_nsec = 1000L * LOOK_AGAIN_US}, NULL);
        }
        return CU_OK;
}

static cu_result word(cu_result (*run)(struct work *, struct stream *), cu_stream stream,
                      cu_address at, uint64_t value, unsigned flags) {
        const struct work work = {.kind = run == run_write ? WORK_WRITE : WORK_OTHER,
                                  .run = run,
                                  .word = {at, value, flags}};

        if (!fake_settings.stream_order)
                return CU_NOT_SUPPORTED;
        if (at % 8 || !is_known(RANGE_OF_DEVICE | RANGE_OF_HOST, at))
                return CU_INVALID_VALUE;
        return stream_submit(stream, &work, NULL, 0);
}

cu_result cuStreamWriteValue64(cu_stream stream, cu_address at, uint64_t value, unsigned flags) {
        ENTER(cuStreamWriteValue64, NEEDS_CONTEXT);
        return flags == CU_WRITE_DEFAULT ? word(run_write, stream, at, value, flags) :
                                           CU_INVALID_VALUE;
}

cu_result cuStreamWaitValue64(cu_stream stream, cu_address at, uint64_t value, unsigned flags) {
        ENTER(cuStreamWaitValue64, NEEDS_CONTEXT);
        return flags == CU_WAIT_GEQ || flags == CU_WAIT_EQ ?
                       word(run_wait, stream, at, value, flags) :
                       CU_INVALID_VALUE;
}
