/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One process: the order of work on streams, and how a context breaks. Each test runs in a process
 * of its own.
 */

#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/gpu/fakecuda/fixture.h"
#include "tests/lib/suite.h"

static const uint32_t fatbin = 0xba55ed50u;

struct store {
        cu_address to;
        uint64_t value, n;
};

static void sleep_ms(unsigned ms) {
        nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L}, NULL);
}

static uint64_t now_ms(void) {
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static uint64_t *words(cu_address at) {
        return (uint64_t *)(uintptr_t)at;
}

static cu_address memory(void) {
        return map(create(SEGMENT), SEGMENT, CU_ACCESS_READ_WRITE);
}

static cu_function store_kernel(void) {
        cu_library library;
        cu_kernel kernel;
        cu_function function;

        OK(cuLibraryLoadData(&library, &fatbin, NULL, NULL, 0, NULL, NULL, 0));
        OK(cuLibraryGetKernel(&kernel, library, "fakecuda_store"));
        OK(cuKernelGetFunction(&function, kernel));
        return function;
}

/* stores value, value + 1, ... in n words */
static void launch_store(cu_function function, cu_stream stream, cu_address to, uint64_t value,
                         uint64_t n) {
        struct store a = {to, value, n};
        void *parameters[] = {&a};

        OK(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL));
        memset(&a, 0xff, sizeof a); /* arguments were copied */
}

/* A stream that waits for a gate continues when it opens. */
struct gate {
        _Atomic int open;
};

static void pass_gate(void *data) {
        struct gate *gate = data;

        while (!gate->open)
                sleep_ms(1);
}

static void add_one(void *data) {
        atomic_fetch_add((_Atomic int *)data, 1);
}

/* ---- order ----------------------------------------------------------------------------------- */

START_TEST(a_stream_is_in_order) {
        struct gate gate = {0};
        cu_stream stream;
        cu_address at;
        uint64_t *host;

        start();
        stream = new_stream();
        at = memory();
        OK(cuMemHostAlloc((void **)&host, 64, 0));
        OK(cuLaunchHostFunc(stream, pass_gate, &gate));
        OK(cuMemsetD32Async(at, 7, 4, stream));
        OK(cuMemcpyDtoDAsync(at + 16, at, 8, stream));
        OK(cuMemcpyDtoHAsync(host, at + 16, 8, stream));
        OK(cuMemsetD8Async(at, 9, 16, stream));
        FAILS(CU_NOT_READY, cuStreamQuery(stream));
        ck_assert_uint_eq(words(at)[0], 0xa5a5a5a5a5a5a5a5u);
        gate.open = 1;
        OK(cuStreamSynchronize(stream));
        OK(cuStreamQuery(stream));
        ck_assert_uint_eq(*host, 0x0000000700000007u);
        ck_assert_uint_eq(words(at)[1], 0x0909090909090909u);
}
END_TEST

START_TEST(streams_do_not_wait_for_each_other) {
        struct gate gate = {0};
        cu_stream a, b;
        cu_address at;

        start();
        a = new_stream();
        b = new_stream();
        at = memory();
        OK(cuLaunchHostFunc(a, pass_gate, &gate));
        OK(cuMemsetD8Async(at, 1, 8, b));
        OK(cuStreamSynchronize(b));
        FAILS(CU_NOT_READY, cuStreamQuery(a));
        gate.open = 1;
        OK(cuCtxSynchronize());
        OK(cuStreamQuery(a));
}
END_TEST

START_TEST(the_legacy_stream_takes_turns) {
        struct gate gate = {0};
        cu_stream blocking, free_one = NULL;
        _Atomic int n = 0;

        start();
        OK(cuStreamCreateWithPriority(&blocking, 0, 0));
        free_one = new_stream();
        OK(cuLaunchHostFunc(blocking, pass_gate, &gate));
        OK(cuLaunchHostFunc(NULL, add_one, (void *)&n));              /* waits for blocking */
        OK(cuLaunchHostFunc(blocking, add_one, (void *)&n));          /* waits for that */
        OK(cuLaunchHostFunc(CU_PER_THREAD_STREAM, add_one, (void *)&n));
        OK(cuLaunchHostFunc(free_one, add_one, (void *)&n));          /* waits for nothing */
        OK(cuStreamSynchronize(free_one));
        sleep_ms(20);
        ck_assert_int_eq(n, 1);
        FAILS(CU_NOT_READY, cuStreamQuery(CU_LEGACY_STREAM));
        FAILS(CU_NOT_READY, cuStreamQuery(CU_PER_THREAD_STREAM));
        gate.open = 1;
        OK(cuStreamSynchronize(NULL));
        ck_assert_int_ge(n, 2);
        OK(cuCtxSynchronize());
        ck_assert_int_eq(n, 4);
}
END_TEST

START_TEST(events) {
        struct gate gate = {0};
        cu_stream a, b;
        cu_event begin, end, untimed;
        cu_address at;
        float ms;

        start();
        a = new_stream();
        b = new_stream();
        at = memory();
        OK(cuEventCreate(&begin, 0));
        OK(cuEventCreate(&end, 0));
        OK(cuEventCreate(&untimed, CU_EVENT_DISABLE_TIMING));
        OK(cuEventQuery(begin)); /* never recorded */
        FAILS(CU_INVALID_HANDLE, cuEventElapsedTime(&ms, begin, begin));
        OK(cuEventRecord(begin, a));
        OK(cuLaunchHostFunc(a, pass_gate, &gate));
        OK(cuMemsetD8Async(at, 3, 8, a));
        OK(cuEventRecord(end, a));
        FAILS(CU_NOT_READY, cuEventElapsedTime(&ms, begin, end));
        OK(cuStreamWaitEvent(b, end, 0));
        OK(cuMemcpyDtoDAsync(at + 8, at, 8, b));
        OK(cuEventRecord(untimed, b));
        FAILS(CU_NOT_READY, cuEventQuery(untimed));
        OK(cuEventSynchronize(begin));
        sleep_ms(30);
        gate.open = 1;
        OK(cuEventSynchronize(untimed));
        ck_assert_uint_eq(words(at)[1], 0x0303030303030303u);
        OK(cuEventElapsedTime(&ms, begin, end));
        ck_assert(ms >= 29);
        FAILS(CU_INVALID_HANDLE, cuEventElapsedTime(&ms, begin, untimed));
        OK(cuEventDestroy(end));
        FAILS(CU_INVALID_HANDLE, cuEventDestroy(end));
        FAILS(CU_INVALID_HANDLE, cuEventRecord(end, a));
        FAILS(CU_INVALID_HANDLE, cuStreamWaitEvent(b, end, 0));
}
END_TEST

START_TEST(a_destroyed_stream) {
        struct gate gate = {0};
        _Atomic int n = 0;
        cu_stream stream;

        start();
        stream = new_stream();
        OK(cuLaunchHostFunc(stream, pass_gate, &gate));
        OK(cuLaunchHostFunc(stream, add_one, (void *)&n));
        OK(cuStreamDestroy(stream));
        FAILS(CU_INVALID_HANDLE, cuStreamQuery(stream));
        FAILS(CU_INVALID_HANDLE, cuStreamSynchronize(stream));
        FAILS(CU_INVALID_HANDLE, cuStreamDestroy(stream));
        FAILS(CU_INVALID_HANDLE, cuLaunchHostFunc(stream, add_one, (void *)&n));
        FAILS(CU_INVALID_VALUE, cuStreamDestroy(NULL));
        gate.open = 1;
        OK(cuCtxSynchronize()); /* queued work is done */
        ck_assert_int_eq(n, 1);
}
END_TEST

static void call_the_driver(void *ret) {
        *(cu_result *)ret = cuda->cuCtxSynchronize();
}

START_TEST(no_calls_in_host_functions) {
        cu_result error = 0;

        start();
        OK(cuLaunchHostFunc(NULL, call_the_driver, &error));
        OK(cuCtxSynchronize());
        ck_assert_int_eq(error, CU_NOT_PERMITTED);
        FAILS(CU_INVALID_VALUE, cuLaunchHostFunc(NULL, NULL, NULL));
}
END_TEST

/* ---- many at once ---------------------------------------------------------------------------- */

enum { THREADS = 8, TURNS = 60 };

struct worker {
        cu_context context;
        cu_function store;
        uint64_t number;
};

/*
 * Uses memory, two streams and an event of its own. The second stream copies what the first one's
 * kernel has written.
 */
static void turn(struct worker *w, uint64_t *host, cu_stream a, cu_stream b, uint64_t i) {
        uint64_t first = w->number * 1000000 + i * 100;
        cu_event written;
        cu_address at;

        OK(cuMemAlloc(&at, 100 * 8));
        OK(cuEventCreate(&written, CU_EVENT_DISABLE_TIMING));
        launch_store(w->store, i % 3 ? a : CU_PER_THREAD_STREAM, at, first, 100);
        OK(cuEventRecord(written, i % 3 ? a : CU_PER_THREAD_STREAM));
        OK(cuStreamWaitEvent(b, written, 0));
        OK(cuMemcpyDtoHAsync(host, at, 100 * 8, b));
        OK(cuStreamSynchronize(b));
        for (uint64_t j = 0; j < 100; j++)
                ck_assert_uint_eq(host[j], first + j);
        OK(cuEventDestroy(written));
        OK(cuMemFree(at));
}

static void *work(void *data) {
        struct worker *w = data;
        cu_stream a, b;
        uint64_t *host;

        OK(cuCtxPushCurrent(w->context));
        OK(cuMemHostAlloc((void **)&host, 100 * 8, 0));
        for (uint64_t i = 0; i < TURNS; i++) {
                a = new_stream();
                b = new_stream();
                turn(w, host, a, b, i);
                OK(cuStreamDestroy(a));
                OK(cuStreamDestroy(b));
        }
        OK(cuMemFreeHost(host));
        return NULL;
}

START_TEST(many_threads) {
        struct worker workers[THREADS];
        pthread_t threads[THREADS];
        size_t before, after, total;

        start();
        OK(cuMemGetInfo(&before, &total));
        for (uint64_t i = 0; i < THREADS; i++) {
                workers[i] = (struct worker){.store = store_kernel(), .number = i};
                OK(cuCtxGetCurrent(&workers[i].context));
                ck_assert_int_eq(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
        }
        for (int i = 0; i < THREADS; i++)
                pthread_join(threads[i], NULL);
        OK(cuCtxSynchronize());
        OK(cuMemGetInfo(&after, &total));
        ck_assert_uint_eq(before, after);
}
END_TEST

/* ---- copies ---------------------------------------------------------------------------------- */

/*
 * A copy from unregistered memory is done when the call returns. One from registered memory is done
 * later, with the contents of that time.
 */
START_TEST(pageable_and_pinned) {
        struct gate gate = {0};
        uint64_t *pinned, plain = 5;
        cu_stream stream;
        cu_address at;

        start();
        stream = new_stream();
        at = memory();
        OK(cuMemcpyHtoDAsync(at, &plain, 8, stream));
        ck_assert_uint_eq(words(at)[0], 5);
        OK(cuMemHostAlloc((void **)&pinned, 8, 0));
        *pinned = 6;
        OK(cuLaunchHostFunc(stream, pass_gate, &gate));
        OK(cuMemcpyHtoDAsync(at, pinned, 8, stream));
        *pinned = 7;
        ck_assert_uint_eq(words(at)[0], 5);
        gate.open = 1;
        OK(cuMemcpyDtoHAsync(&plain, at, 8, stream));
        ck_assert_uint_eq(plain, 7);
}
END_TEST

START_TEST(addresses_of_nothing) {
        uint64_t plain = 1;
        cu_address at;

        start();
        at = memory();
        FAILS(CU_INVALID_VALUE, cuMemcpyHtoDAsync(at + 2 * SEGMENT, &plain, 8, NULL));
        FAILS(CU_INVALID_VALUE, cuMemcpyDtoHAsync(&plain, (uintptr_t)&plain, 8, NULL));
        FAILS(CU_INVALID_VALUE, cuMemcpyDtoDAsync(at, 0, 8, NULL));
        FAILS(CU_INVALID_VALUE, cuMemsetD8Async(64, 0, 8, NULL));
        FAILS(CU_INVALID_VALUE, cuMemsetD32Async(at + 2, 0, 8, NULL));
        FAILS(CU_INVALID_VALUE, cuStreamWriteValue64(NULL, at + 4, 1, 0));
        FAILS(CU_INVALID_VALUE, cuStreamWriteValue64(NULL, (uintptr_t)&plain, 1, 0));
        OK(cuMemcpyDtoHAsync(&plain, 0, 0, NULL)); /* zero bytes from address 0 */
        OK(cuCtxSynchronize());
}
END_TEST

START_TEST(neighbouring_segments_are_one_range) {
        const struct cu_access write = {.location = {CU_LOCATION_DEVICE, 0},
                                        .flags = CU_ACCESS_READ_WRITE};
        cu_address at;

        start();
        OK(cuMemAddressReserve(&at, 4 * SEGMENT, 0, 0, 0));
        for (int i = 0; i < 3; i++)
                OK(cuMemMap(at + i * SEGMENT, SEGMENT, 0, create(SEGMENT), 0));
        OK(cuMemSetAccess(at, 3 * SEGMENT, &write, 1));
        OK(cuMemsetD8Async(at, 1, 3 * SEGMENT, NULL));
        OK(cuCtxSynchronize());
        OK(cuMemsetD8Async(at, 1, 3 * SEGMENT + 1, NULL));
        FAILS(CU_ILLEGAL_ADDRESS, cuCtxSynchronize());
}
END_TEST

START_TEST(late_copies) {
        uint64_t began, *pinned;
        cu_address at;

        setenv("FAKECUDA_SLOW", "copy:100,set:1", 1);
        start();
        at = memory();
        OK(cuMemHostAlloc((void **)&pinned, 8, 0));
        began = now_ms();
        OK(cuMemcpyHtoDAsync(at, pinned, 8, NULL));
        ck_assert(cuda->cuStreamQuery(NULL) == CU_NOT_READY || now_ms() - began >= 100);
        OK(cuCtxSynchronize());
        ck_assert_uint_ge(now_ms() - began, 100);
}
END_TEST

/* ---- contexts break -------------------------------------------------------------------------- */

/*
 * All faults lead to the same state: every call that needs a context returns 700, and no queued
 * work is done.
 */
static void expect_broken(cu_address elsewhere) {
        _Atomic int n = 0;
        cu_address at;
        size_t a, b;

        FAILS(CU_ILLEGAL_ADDRESS, cuCtxSynchronize());
        FAILS(CU_ILLEGAL_ADDRESS, cuStreamSynchronize(NULL));
        FAILS(CU_ILLEGAL_ADDRESS, cuMemGetInfo(&a, &b));
        FAILS(CU_ILLEGAL_ADDRESS, cuMemAlloc(&at, 1));
        FAILS(CU_ILLEGAL_ADDRESS, cuLaunchHostFunc(NULL, add_one, (void *)&n));
        ck_assert_int_eq(n, 0);
        ck_assert_uint_eq(words(elsewhere)[0], 0xa5a5a5a5a5a5a5a5u);
}

START_TEST(a_copy_against_the_access_breaks) {
        struct gate gate = {0};
        cu_address read_only, at;
        cu_memory handle;

        start();
        at = memory();
        handle = create(SEGMENT);
        read_only = map(handle, SEGMENT, CU_ACCESS_READ);
        OK(cuMemcpyDtoDAsync(at + 8, read_only, 8, NULL));
        OK(cuCtxSynchronize());
        OK(cuLaunchHostFunc(NULL, pass_gate, &gate)); /* until both are queued */
        OK(cuMemsetD8Async(read_only, 0, 8, NULL));
        OK(cuMemsetD8Async(at, 0, 8, NULL));
        gate.open = 1;
        expect_broken(at);
        ck_assert_uint_eq(words(read_only)[0], 0xa5a5a5a5a5a5a5a5u);
}
END_TEST

START_TEST(a_kernel_that_faults_breaks) {
        struct gate gate = {0};
        cu_address read_only, at;
        cu_function store;

        start();
        at = memory();
        read_only = map(create(SEGMENT), SEGMENT, CU_ACCESS_READ);
        store = store_kernel();
        OK(cuLaunchHostFunc(NULL, pass_gate, &gate)); /* until both are queued */
        launch_store(store, NULL, read_only, 1, 1);
        launch_store(store, NULL, at, 1, 1);
        gate.open = 1;
        expect_broken(at);
        ck_assert_uint_eq(words(read_only)[0], 0xa5a5a5a5a5a5a5a5u);
}
END_TEST

START_TEST(memory_that_is_unmapped_under_work_breaks) {
        struct gate gate = {0};
        cu_address at, other;

        start();
        at = memory();
        other = memory();
        OK(cuLaunchHostFunc(NULL, pass_gate, &gate));
        OK(cuMemsetD8Async(at, 0, 8, NULL));
        OK(cuMemsetD8Async(other, 0, 8, NULL));
        OK(cuMemUnmap(at, SEGMENT));
        gate.open = 1;
        expect_broken(other);
}
END_TEST

START_TEST(work_that_is_told_to_fail_breaks) {
        cu_address at;

        setenv("FAKECUDA_FAIL", "execute:2=700", 1);
        start();
        at = memory();
        OK(cuMemsetD8Async(at + 8, 0, 8, NULL));
        OK(cuMemsetD8Async(at, 0, 8, NULL));
        expect_broken(at);
        ck_assert_uint_eq(words(at)[1], 0);
}
END_TEST

START_TEST(a_wait_ends_when_its_context_breaks) {
        cu_address at;

        setenv("FAKECUDA_FAIL", "cuEventCreate:1=719", 1);
        start();
        at = memory();
        OK(cuMemsetD8Async(at, 0, 8, NULL));
        OK(cuStreamWaitValue64(NULL, at, 1, CU_WAIT_GEQ));
        FAILS(719, cuEventCreate(&(cu_event){0}, 0));
        FAILS(719, cuCtxSynchronize());
}
END_TEST

/* ---- kernels --------------------------------------------------------------------------------- */

START_TEST(kernels) {
        const uint32_t rubbish = 0;
        cu_library library;
        cu_kernel kernel;
        cu_function store;
        cu_address at;
        int n;

        start();
        at = memory();
        FAILS(CU_INVALID_IMAGE,
              cuLibraryLoadData(&library, &rubbish, NULL, NULL, 0, NULL, NULL, 0));
        OK(cuLibraryLoadData(&library, &fatbin, NULL, NULL, 0, NULL, NULL, 0));
        FAILS(CU_NOT_FOUND, cuLibraryGetKernel(&kernel, library, "kvd_nothing"));
        OK(cuLibraryGetKernel(&kernel, library, "kvd_summarise")); /* the build's own are there */
        store = store_kernel();
        launch_store(store, NULL, at, 10, 3);
        OK(cuCtxSynchronize());
        ck_assert_uint_eq(words(at)[2], 12);
        ck_assert_uint_eq(words(at)[3], 0xa5a5a5a5a5a5a5a5u);
        OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&n, store, 256, 0));
        ck_assert_int_eq(n, 8);
        OK(cuLibraryUnload(library));
        FAILS(CU_INVALID_HANDLE, cuLibraryUnload(library));
        FAILS(CU_INVALID_HANDLE, cuLibraryGetKernel(&kernel, library, "kvd_summarise"));
}
END_TEST

START_TEST(wrong_launches) {
        struct store a = {0};
        void *parameters[] = {&a};
        cu_function f;

        start();
        f = store_kernel();
#define LAUNCH(gx, gy, bx, shared) \
        cuLaunchKernel(f, gx, gy, 1, bx, 1, 1, shared, NULL, parameters, NULL)
        OK(LAUNCH(1, 1, 256, 48 << 10));
        FAILS(CU_INVALID_VALUE, LAUNCH(0, 1, 32, 0));
        FAILS(CU_INVALID_VALUE, LAUNCH(1, 65536, 32, 0));
        FAILS(CU_INVALID_VALUE, LAUNCH(1, 1, 0, 0));
        FAILS(CU_INVALID_VALUE, LAUNCH(1, 1, 1025, 0));
        FAILS(701, LAUNCH(1, 1, 512, 0)); /* this kernel's blocks have at most 256 */
        FAILS(CU_INVALID_VALUE, LAUNCH(1, 1, 32, (48 << 10) + 1));
        OK(cuFuncSetAttribute(f, CU_FUNC_DYNAMIC_SHARED_BYTES, 100 << 10));
        OK(LAUNCH(1, 1, 32, 100 << 10));
        FAILS(CU_INVALID_VALUE, cuFuncSetAttribute(f, CU_FUNC_DYNAMIC_SHARED_BYTES, 228 << 10));
        FAILS(CU_INVALID_VALUE, cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL));
        FAILS(CU_INVALID_HANDLE, cuLaunchKernel(&a, 1, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL));
        OK(cuCtxSynchronize());
}
END_TEST

/* A kernel's static shared memory counts, and devices differ in the limit. */
START_TEST(shared_memory_of_a_kernels_own) {
        enum { OWN = 80, MOST = 99 << 10 };
        cu_library library;
        cu_kernel kernel;
        cu_function f;
        int n;

        setenv("FAKECUDA_SHARED", "99K", 1);
        start();
        OK(cuDeviceGetAttribute(&n, CU_ATTR_SHARED_PER_BLOCK_OPTIN, 0));
        ck_assert_int_eq(n, MOST);
        OK(cuLibraryLoadData(&library, &fatbin, NULL, NULL, 0, NULL, NULL, 0));
        OK(cuLibraryGetKernel(&kernel, library, "kvd_memshare_plain"));
        OK(cuKernelGetFunction(&f, kernel));
        FAILS(CU_INVALID_VALUE, cuFuncSetAttribute(f, CU_FUNC_DYNAMIC_SHARED_BYTES, MOST));
        FAILS(CU_INVALID_VALUE, cuFuncSetAttribute(f, CU_FUNC_DYNAMIC_SHARED_BYTES, MOST - OWN + 1));
        OK(cuFuncSetAttribute(f, CU_FUNC_DYNAMIC_SHARED_BYTES, MOST - OWN));
        OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&n, f, 256, MOST - OWN));
        ck_assert_int_eq(n, 1);
}
END_TEST

/* ---- words ----------------------------------------------------------------------------------- */

static uint64_t *registered_page(void) {
        void *at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

        OK(cuMemHostRegister(at, 4096, CU_REGISTER_PORTABLE | CU_REGISTER_MAPPED));
        return at;
}

START_TEST(words_order_streams) {
        uint64_t *page, word;
        cu_stream a, b;
        cu_address at, data;

        start();
        a = new_stream();
        b = new_stream();
        page = registered_page();
        at = (uintptr_t)page;
        data = memory();
        OK(cuStreamWaitValue64(b, at, 5, CU_WAIT_GEQ));
        OK(cuMemcpyDtoDAsync(data + 8, data, 8, b));
        OK(cuStreamWriteValue64(a, at, 4, 0));
        OK(cuStreamSynchronize(a));
        sleep_ms(20);
        FAILS(CU_NOT_READY, cuStreamQuery(b));
        OK(cuMemsetD8Async(data, 1, 8, a));
        OK(cuStreamWriteValue64(a, at, 6, 0)); /* past 5 is as good */
        OK(cuStreamSynchronize(b));
        ck_assert_uint_eq(words(data)[1], 0x0101010101010101u);
        word = atomic_load((_Atomic uint64_t *)page);
        ck_assert_uint_eq(word, 6);
}
END_TEST

START_TEST(geq_is_cyclic_and_eq_is_not) {
        uint64_t *page;
        cu_stream stream;
        cu_address at;

        start();
        stream = new_stream();
        page = registered_page();
        at = (uintptr_t)page;
        page[0] = 3;
        OK(cuStreamWaitValue64(stream, at, UINT64_MAX - 3, CU_WAIT_GEQ)); /* 3 is 7 past it */
        OK(cuStreamSynchronize(stream));
        page[1] = UINT64_MAX - 3;
        OK(cuStreamWaitValue64(stream, at + 8, 3, CU_WAIT_EQ));
        sleep_ms(20);
        FAILS(CU_NOT_READY, cuStreamQuery(stream));
        OK(cuStreamWriteValue64(NULL, at + 8, 3, 0));
        OK(cuStreamSynchronize(stream));
        FAILS(CU_INVALID_VALUE, cuStreamWaitValue64(stream, at, 3, 77));
        FAILS(CU_INVALID_VALUE, cuStreamWriteValue64(stream, at, 3, 1));
}
END_TEST

static bool is_awake(const char *thread) {
        char path[300], state = 'R';
        FILE *f;

        snprintf(path, sizeof path, "/proc/self/task/%s/stat", thread);
        f = fopen(path, "re");
        if (f && fscanf(f, "%*d (%*[^)]) %c", &state) != 1)
                state = 'R';
        if (f)
                fclose(f);
        return state != 'S';
}

/* True if this process has threads other than its first, and all of those sleep. */
static bool others_sleep(void) {
        DIR *threads = opendir("/proc/self/task");
        unsigned n = 0, awake = 0;
        struct dirent *e;

        ck_assert_ptr_nonnull(threads);
        while ((e = readdir(threads)))
                if (e->d_name[0] != '.' && atoi(e->d_name) != getpid()) {
                        awake += is_awake(e->d_name);
                        n++;
                }
        closedir(threads);
        return n > 0 && awake == 0;
}

/* A stream sees any store that comes before it sleeps. So the test waits until it sleeps. */
START_TEST(who_wakes_a_waiter) {
        uint64_t *page;
        cu_stream stream;
        cu_address at;

        if (_i)
                setenv("FAKECUDA_WAKE", "write", 1);
        start();
        stream = new_stream();
        page = registered_page();
        at = (uintptr_t)page;
        OK(cuStreamWaitValue64(stream, at, 1, CU_WAIT_GEQ));
        while (!others_sleep())
                sleep_ms(1);
        atomic_store((_Atomic uint64_t *)page, 1);
        if (_i) {
                sleep_ms(50);
                FAILS(CU_NOT_READY, cuStreamQuery(stream));
        } else {
                OK(cuStreamSynchronize(stream));
        }
        OK(cuStreamWriteValue64(NULL, at, 2, 0));
        OK(cuCtxSynchronize());
        atomic_store((_Atomic uint64_t *)page, 3);
        /* a value that is already there needs no wake */
        OK(cuStreamWaitValue64(stream, at, 3, CU_WAIT_GEQ));
        OK(cuStreamSynchronize(stream));
}
END_TEST

START_TEST(without_words) {
        uint64_t *page;
        int n;

        setenv("FAKECUDA_STREAM_ORDER", "0", 1);
        start();
        page = registered_page();
        FAILS(CU_NOT_SUPPORTED, cuStreamWriteValue64(NULL, (uintptr_t)page, 1, 0));
        FAILS(CU_NOT_SUPPORTED, cuStreamWaitValue64(NULL, (uintptr_t)page, 1, CU_WAIT_GEQ));
        OK(cuDeviceGetAttribute(&n, CU_ATTR_STREAM_WAIT_64, 0));
        ck_assert_int_eq(n, 0);
}
END_TEST

/* ---- room ------------------------------------------------------------------------------------ */

struct writer {
        cu_context context;
        cu_stream stream;
        cu_address at;
        _Atomic unsigned queued;
};

static void *write_often(void *data) {
        struct writer *w = data;

        OK(cuCtxPushCurrent(w->context));
        for (unsigned i = 0; i < 10; i++) {
                OK(cuStreamWriteValue64(w->stream, w->at + 8, i, 0));
                w->queued++;
        }
        return NULL;
}

/* A call that queues more than there is room for waits until there is. Other streams continue. */
START_TEST(a_full_queue_makes_the_caller_wait) {
        struct writer w;
        pthread_t thread;

        setenv("FAKECUDA_DEPTH", "4", 1);
        start();
        w = (struct writer){.stream = new_stream(), .at = memory()};
        OK(cuCtxGetCurrent(&w.context));
        memset(words(w.at), 0, 16);
        OK(cuStreamWaitValue64(w.stream, w.at, 1, CU_WAIT_GEQ));
        ck_assert_int_eq(pthread_create(&thread, NULL, write_often, &w), 0);
        while (w.queued < 3)
                sleep_ms(1);
        sleep_ms(50);
        ck_assert_uint_eq(w.queued, 3);
        OK(cuStreamWriteValue64(new_stream(), w.at, 1, 0));
        pthread_join(thread, NULL);
        OK(cuStreamSynchronize(w.stream));
        ck_assert_uint_eq(words(w.at)[1], 9);
}
END_TEST

/* ---- capture --------------------------------------------------------------------------------- */

enum { GLOBAL, THREAD_LOCAL, RELAXED };

static struct {
        cu_result (*begin)(cu_stream stream, int mode);
        cu_result (*end)(cu_stream stream, void **ret);
        cu_result (*nodes)(void *graph, void **nodes, size_t *n);
        cu_result (*destroy)(void *graph);
} graphs;

static void find_graphs(void) {
        void *driver = dlopen("libcuda.so.1", RTLD_NOW);

        *(void **)&graphs.begin = dlsym(driver, "cuStreamBeginCapture_v2");
        *(void **)&graphs.end = dlsym(driver, "cuStreamEndCapture");
        *(void **)&graphs.nodes = dlsym(driver, "cuGraphGetNodes");
        *(void **)&graphs.destroy = dlsym(driver, "cuGraphDestroy");
        ck_assert(graphs.begin && graphs.end && graphs.nodes && graphs.destroy);
}

/* Returns the number of nodes, or -1 if the capture was broken. */
static int end_capture(cu_stream stream) {
        size_t n = 0;
        void *graph;
        cu_result error = graphs.end(stream, &graph);

        if (error == CU_CAPTURE_INVALIDATED)
                return -1;
        ck_assert_int_eq(error, CU_OK);
        ck_assert_int_eq(graphs.nodes(graph, NULL, &n), CU_OK);
        ck_assert_int_eq(graphs.destroy(graph), CU_OK);
        return (int)n;
}

static int status_of(cu_stream stream) {
        int status = -1;

        OK(cuStreamIsCapturing(stream, &status));
        return status;
}

START_TEST(what_is_captured_is_not_done) {
        cu_stream stream, other;
        cu_address at;

        start();
        find_graphs();
        stream = new_stream();
        other = new_stream();
        at = memory();
        OK(cuMemsetD8Async(at, 1, 8, other));
        OK(cuStreamSynchronize(other));
        ck_assert_int_eq(graphs.begin(stream, GLOBAL), CU_OK);
        ck_assert_int_eq(status_of(stream), 1);
        ck_assert_int_eq(status_of(other), 0);
        OK(cuMemsetD8Async(at, 2, 8, stream));
        OK(cuStreamWriteValue64(stream, at, 3, CU_WRITE_DEFAULT));
        launch_store(store_kernel(), stream, at, 4, 1);
        OK(cuStreamSynchronize(other));
        ck_assert_int_eq(end_capture(stream), 3);
        OK(cuStreamSynchronize(stream));
        ck_assert_uint_eq(words(at)[0], 0x0101010101010101u);
        ck_assert_int_eq(status_of(stream), 0);
}
END_TEST

static void *allocates(void *data) {
        cu_context context = data;
        int relaxed = RELAXED;
        cu_address at;

        OK(cuCtxPushCurrent(context));
        FAILS(CU_CAPTURE_UNSUPPORTED, cuMemAlloc(&at, 4096));
        OK(cuThreadExchangeStreamCaptureMode(&relaxed));
        ck_assert_int_eq(relaxed, GLOBAL);
        OK(cuMemAlloc(&at, 4096));
        return NULL;
}

START_TEST(what_breaks_a_capture) {
        cu_stream stream, blocking;
        cu_context context;
        pthread_t thread;
        int status = 0;

        start();
        find_graphs();
        stream = new_stream();
        ck_assert_int_eq(graphs.begin(stream, THREAD_LOCAL), CU_OK);
        FAILS(CU_CAPTURE_UNSUPPORTED, cuStreamSynchronize(stream));
        ck_assert_int_eq(status_of(stream), 2);
        ck_assert_int_eq(end_capture(stream), -1);
        ck_assert_int_eq(graphs.begin(stream, RELAXED), CU_OK);
        FAILS(CU_CAPTURE_UNSUPPORTED, cuCtxSynchronize());
        ck_assert_int_eq(end_capture(stream), -1);
        ck_assert_int_eq(graphs.begin(stream, GLOBAL), CU_OK);
        OK(cuCtxGetCurrent(&context));
        pthread_create(&thread, NULL, allocates, context);
        pthread_join(thread, NULL);
        ck_assert_int_eq(end_capture(stream), -1);
        OK(cuStreamCreateWithPriority(&blocking, 0, 0));
        ck_assert_int_eq(graphs.begin(blocking, GLOBAL), CU_OK);
        FAILS(CU_CAPTURE_IMPLICIT, cuStreamIsCapturing(NULL, &status));
        ck_assert_int_eq(status_of(blocking), 1);
        FAILS(CU_CAPTURE_IMPLICIT, cuStreamSynchronize(NULL));
        ck_assert_int_eq(end_capture(blocking), -1);
}
END_TEST

/* ---- strictly -------------------------------------------------------------------------------- */

static bool can_be_read(cu_address at) {
        pid_t pid = fork();
        int status;

        if (pid == 0) {
                signal(SIGSEGV, SIG_DFL);
                (void)*(volatile uint64_t *)(uintptr_t)at;
                _exit(0);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        return status == 0;
}

/*
 * Streams can access all kinds of device memory. The processor cannot; it can access host memory.
 */
START_TEST(memory_of_the_device_is_not_the_hosts) {
        uint64_t *host, value = 0;
        cu_address at[2];
        cu_stream stream;

        setenv("FAKECUDA_STRICT", "1", 1);
        start();
        stream = new_stream();
        at[0] = memory();
        OK(cuMemAlloc(&at[1], 4096));
        OK(cuMemHostAlloc((void **)&host, 4096, 0));
        for (int i = 0; i < 2; i++) {
                ck_assert(!can_be_read(at[i]));
                launch_store(store_kernel(), stream, at[i], 7, 2);
                OK(cuStreamWaitValue64(NULL, at[i] + 16, 9, CU_WAIT_EQ));
                OK(cuMemcpyDtoHAsync(host, at[i] + 8, 8, stream));
                OK(cuStreamWriteValue64(stream, at[i] + 16, 9, 0));
                OK(cuMemcpyDtoHAsync(&value, at[i] + 16, 8, NULL));
                OK(cuCtxSynchronize());
                ck_assert_uint_eq(*host, 8);
                ck_assert_uint_eq(value, 9);
                ck_assert(!can_be_read(at[i]));
        }
        ck_assert(can_be_read((uintptr_t)host));
}
END_TEST

SUITE("streams",
      TESTS(a_stream_is_in_order, streams_do_not_wait_for_each_other,
            the_legacy_stream_takes_turns, events, a_destroyed_stream, no_calls_in_host_functions,
            many_threads, pageable_and_pinned, addresses_of_nothing,
            neighbouring_segments_are_one_range, late_copies, a_copy_against_the_access_breaks,
            a_kernel_that_faults_breaks, memory_that_is_unmapped_under_work_breaks,
            work_that_is_told_to_fail_breaks, a_wait_ends_when_its_context_breaks, kernels,
            shared_memory_of_a_kernels_own,
            wrong_launches, words_order_streams, geq_is_cyclic_and_eq_is_not),
      LOOPS(2, who_wakes_a_waiter),
      TESTS(without_words, a_full_queue_makes_the_caller_wait, what_is_captured_is_not_done,
            what_breaks_a_capture, memory_of_the_device_is_not_the_hosts))
