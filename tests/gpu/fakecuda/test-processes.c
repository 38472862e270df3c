/* SPDX-License-Identifier: Apache-2.0 */

/* Several processes, which use each other's memory and streams. In each test:
 *
 *      this process is A, and the forked one is B; both initialise the driver after the fork.
 */

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "ipc/base/device.h"
#include "ipc/base/util.h"
#include "tests/gpu/fakecuda/fixture.h"
#include "tests/lib/suite.h"

static uint64_t *words(cu_address at) {
        return (uint64_t *)(uintptr_t)at;
}

static void sleep_ms(unsigned ms) {
        nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L}, NULL);
}

static void set_word(cu_address at, uint64_t value) {
        OK(cuMemcpyHtoDAsync(at, &value, sizeof value, NULL));
        OK(cuCtxSynchronize());
}

static uint64_t get_word(cu_address at) {
        uint64_t value;

        OK(cuMemcpyDtoHAsync(&value, at, sizeof value, NULL));
        return value;
}

/* ---- handles --------------------------------------------------------------------------------- */

/* B maps A's memory and writes, and A reads it in place; then the other way round. */
static void write_in_place(int fd) {
        cu_address at;
        char one;
        int memory = hear(fd, &one, 1);

        start();
        at = map_fd(memory, SEGMENT, CU_ACCESS_READ_WRITE);
        set_word(at, 0xb);
        meet(fd);
        meet(fd);
        ck_assert_uint_eq(get_word(at + 8), 0xa);
}

START_TEST(two_processes_share_in_place) {
        struct peer b = peer_start(write_in_place);
        cu_memory memory;
        cu_address at;
        int fd;

        start();
        memory = create(SEGMENT);
        fd = export(memory);
        tell(b.fd, "", 1, fd);
        close(fd);
        at = map(memory, SEGMENT, CU_ACCESS_READ_WRITE);
        meet(b.fd);
        ck_assert_uint_eq(get_word(at), 0xb);
        set_word(at + 8, 0xa);
        meet(b.fd);
        peer_end(&b);
}
END_TEST

/* An owner without a context, like the daemon: it creates memory, shares it, and is killed. */
static void own(int fd) {
        cu_memory memory;
        int it;

        load();
        OK(cuInit(0));
        memory = create(SEGMENT);
        it = export(memory);
        tell(fd, "", 1, it);
        pause();
}

START_TEST(memory_outlives_its_owner) {
        struct peer b = peer_start(own);
        cu_address at;
        char one;
        int memory = hear(b.fd, &one, 1);
        size_t free, total;

        setenv("FAKECUDA_MEMORY", "64M", 1);
        start();
        at = map_fd(memory, SEGMENT, CU_ACCESS_READ_WRITE);
        set_word(at, 1);
        peer_kill(&b);
        ck_assert_uint_eq(get_word(at), 1);
        OK(cuMemGetInfo(&free, &total));
        ck_assert_uint_eq(total - free, SEGMENT);
        OK(cuMemUnmap(at, SEGMENT));
        OK(cuMemGetInfo(&free, &total));
        ck_assert_uint_eq(total - free, 0);
}
END_TEST

/* Memory that B may only read stays unchanged, whatever B does, and A is not affected. */
static void write_against_the_access(int fd) {
        cu_address at;
        char one;
        int memory = hear(fd, &one, 1);

        start();
        at = map_fd(memory, SEGMENT, CU_ACCESS_READ);
        ck_assert_uint_eq(get_word(at), 0xa);
        OK(cuMemsetD8Async(at, 0, 8, NULL));
        FAILS(CU_ILLEGAL_ADDRESS, cuCtxSynchronize());
        meet(fd);
        signal(SIGSEGV, SIG_DFL);
        words(at)[0] = 0; /* this kills B */
        _exit(7);
}

START_TEST(read_only_faults_its_author) {
        struct peer b;
        cu_memory memory;
        cu_address at;

        b = peer_start(write_against_the_access);
        start();
        memory = create(SEGMENT);
        at = map(memory, SEGMENT, CU_ACCESS_READ_WRITE);
        set_word(at, 0xa);
        tell(b.fd, "", 1, export(memory));
        meet(b.fd);
        ck_assert_int_eq(read(b.fd, &(char){0}, 1), 0); /* B has ended */
        ck_assert_uint_eq(get_word(at), 0xa);
        OK(cuCtxSynchronize());
}
END_TEST

/* The memory limit counts for all processes together. */
static void take_most(int fd) {
        cu_address at;

        start();
        OK(cuMemAlloc(&at, 6 * SEGMENT));
        meet(fd);
        pause();
}

START_TEST(memory_is_one_for_all) {
        struct peer b;
        cu_memory memory;

        setenv("FAKECUDA_MEMORY", "16M", 1);
        b = peer_start(take_most);
        start();
        meet(b.fd);
        create(2 * SEGMENT);
        FAILS(CU_OUT_OF_MEMORY, cuMemCreate(&memory, SEGMENT, &shareable, 0));
        peer_kill(&b);
        create(6 * SEGMENT);
        FAILS(CU_OUT_OF_MEMORY, cuMemCreate(&memory, SEGMENT, &shareable, 0));
}
END_TEST

/* ---- legacy handles -------------------------------------------------------------------------- */

static void hold(int fd) {
        struct cu_ipc_handle handle;
        cu_address at;
        char one;

        start();
        OK(cuMemAlloc(&at, 3 * SEGMENT + 4096));
        set_word(at, 0xb);
        OK(cuIpcGetMemHandle(&handle, at));
        tell(fd, &handle, sizeof handle, -1);
        hear(fd, &one, 1);
        ck_assert_uint_eq(get_word(at), 0xa);
        OK(cuMemFree(at));
        meet(fd);
        pause();
}

/* With a setting, a free that the header calls undefined ends the process that calls it. */
static void free_what_another_has_open(int fd) {
        struct cu_ipc_handle handle;
        cu_address at;

        setenv("FAKECUDA_FREE", "alone", 1);
        start();
        OK(cuMemAlloc(&at, SEGMENT));
        OK(cuIpcGetMemHandle(&handle, at));
        tell(fd, &handle, sizeof handle, -1);
        meet(fd); /* B has opened and closed it */
        OK(cuMemFree(at));
        OK(cuMemAlloc(&at, SEGMENT));
        OK(cuIpcGetMemHandle(&handle, at));
        tell(fd, &handle, sizeof handle, -1);
        meet(fd); /* B has opened it */
        OK(cuMemFree(at));
        _exit(0);
}

START_TEST(memory_that_another_has_open_is_not_freed) {
        struct peer b = peer_start(free_what_another_has_open);
        struct cu_ipc_handle handle;
        cu_address at;
        int status;

        start();
        hear(b.fd, &handle, sizeof handle);
        OK(cuIpcOpenMemHandle(&at, handle, CU_IPC_LAZY_PEER_ACCESS));
        OK(cuIpcCloseMemHandle(at));
        meet(b.fd);
        hear(b.fd, &handle, sizeof handle);
        OK(cuIpcOpenMemHandle(&at, handle, CU_IPC_LAZY_PEER_ACCESS));
        meet(b.fd);
        ck_assert_int_eq(waitpid(b.pid, &status, 0), b.pid);
        ck_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}
END_TEST

START_TEST(legacy_handles) {
        struct peer b = peer_start(hold);
        struct cu_ipc_handle handle;
        cu_address at, again;

        start();
        hear(b.fd, &handle, sizeof handle);
        FAILS(CU_INVALID_VALUE, cuIpcOpenMemHandle(&at, handle, 0));
        OK(cuIpcOpenMemHandle(&at, handle, CU_IPC_LAZY_PEER_ACCESS));
        OK(cuIpcOpenMemHandle(&again, handle, CU_IPC_LAZY_PEER_ACCESS));
        ck_assert_uint_eq(at, again);
        ck_assert_uint_eq(get_word(at), 0xb);
        set_word(at, 0xa);
        FAILS(CU_INVALID_VALUE, cuMemFree(at));
        tell(b.fd, "", 1, -1);
        meet(b.fd);
        /* freed */
        FAILS(CU_INVALID_HANDLE, cuIpcOpenMemHandle(&again, handle, CU_IPC_LAZY_PEER_ACCESS));
        ck_assert_uint_eq(get_word(at), 0xa); /* B, which has it open, keeps it */
        peer_kill(&b);
        ck_assert_uint_eq(get_word(at + 3 * SEGMENT), 0xa5a5a5a5a5a5a5a5u);
        OK(cuIpcCloseMemHandle(at));
        FAILS(CU_INVALID_VALUE, cuIpcCloseMemHandle(at)); /* one close undid both opens */
}
END_TEST

START_TEST(legacy_handles_end_with_their_process) {
        struct peer b = peer_start(hold);
        struct cu_ipc_handle handle;
        cu_address at;

        start();
        hear(b.fd, &handle, sizeof handle);
        peer_kill(&b);
        FAILS(CU_INVALID_HANDLE, cuIpcOpenMemHandle(&at, handle, CU_IPC_LAZY_PEER_ACCESS));
}
END_TEST

/* ---- order between streams of two processes -------------------------------------------------- */

enum { ROUNDS = 200 };

/*
 * Descriptor 1 is the page with the words, 2 the data. B computes round i when word 0 is i, and
 * then sets word 1 to i.
 */
static void answer(int fd) {
        uint64_t *page, one;
        cu_stream stream;
        cu_address data;
        int host = hear(fd, &one, sizeof one), memory = hear(fd, &one, sizeof one);

        start();
        page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, host, 0);
        OK(cuMemHostRegister(page, 4096, CU_REGISTER_PORTABLE | CU_REGISTER_MAPPED));
        data = map_fd(memory, SEGMENT, CU_ACCESS_READ_WRITE);
        stream = new_stream();
        for (uint64_t i = 1; i <= ROUNDS; i++) {
                OK(cuStreamWaitValue64(stream, (uintptr_t)page, i, CU_WAIT_GEQ));
                OK(cuMemcpyDtoDAsync(data + 8 * (2 * i + 1), data + 8 * 2 * i, 8, stream));
                OK(cuStreamWriteValue64(stream, (uintptr_t)(page + 1), i, 0));
        }
        OK(cuStreamSynchronize(stream));
        meet(fd);
}

static uint64_t *shared_page(int *fd) {
        uint64_t *page;

        *fd = memfd_create("page", MFD_CLOEXEC);
        ck_assert_int_eq(ftruncate(*fd, 4096), 0);
        page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
        OK(cuMemHostRegister(page, 4096, CU_REGISTER_PORTABLE | CU_REGISTER_MAPPED));
        return page;
}

START_TEST(streams_of_two_processes_take_turns) {
        uint64_t *page, *numbers, zero = 0;
        cu_memory memory;
        cu_address data;
        cu_stream stream;
        struct peer b;
        int fd;

        if (_i)
                setenv("FAKECUDA_WAKE", "write", 1);
        b = peer_start(answer);
        start();
        page = shared_page(&fd);
        memory = create(SEGMENT);
        data = map(memory, SEGMENT, CU_ACCESS_READ_WRITE);
        tell(b.fd, &zero, sizeof zero, fd);
        tell(b.fd, &zero, sizeof zero, export(memory));
        stream = new_stream();
        OK(cuMemHostAlloc((void **)&numbers, (ROUNDS + 1) * sizeof *numbers, 0));
        for (uint64_t i = 1; i <= ROUNDS; i++) {
                numbers[i] = i * 1000;
                OK(cuMemcpyHtoDAsync(data + 8 * 2 * i, &numbers[i], 8, stream));
                OK(cuStreamWriteValue64(stream, (uintptr_t)page, i, 0));
                OK(cuStreamWaitValue64(stream, (uintptr_t)(page + 1), i, CU_WAIT_GEQ));
        }
        OK(cuStreamSynchronize(stream));
        for (uint64_t i = 1; i <= ROUNDS; i++)
                ck_assert_uint_eq(words(data)[2 * i + 1], i * 1000);
        meet(b.fd);
        peer_end(&b);
}
END_TEST

/* B waits for a stream of A that never comes; B is killed, and A does not notice. */
static void wait_for_ever(int fd) {
        uint64_t *page, one;
        int host = hear(fd, &one, sizeof one);

        start();
        page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, host, 0);
        OK(cuMemHostRegister(page, 4096, CU_REGISTER_PORTABLE | CU_REGISTER_MAPPED));
        OK(cuStreamWaitValue64(NULL, (uintptr_t)page, 1, CU_WAIT_GEQ));
        meet(fd);
        OK(cuStreamSynchronize(NULL));
        _exit(7);
}

START_TEST(a_waiting_process_can_be_killed) {
        struct peer b = peer_start(wait_for_ever);
        uint64_t zero = 0;
        int fd;

        start();
        shared_page(&fd);
        tell(b.fd, &zero, sizeof zero, fd);
        meet(b.fd);
        sleep_ms(20);
        peer_kill(&b);
        OK(cuCtxSynchronize());
}
END_TEST

/* ---- struct kvd_device, over all of it ------------------------------------------------------- */

static struct cu_uuid uuid_of(int ordinal) {
        struct cu_uuid uuid;

        OK(cuDeviceGetUuid(&uuid, ordinal));
        return uuid;
}

/*
 * B's stream waits for word 3, with sets queued after the wait. B forks C, and is killed. The
 * queued work is still done, because C has B's descriptors.
 */
static void queue_and_fork(int fd) {
        cu_address at;
        pid_t child;
        char one;
        int memory = hear(fd, &one, 1);

        setenv("FAKECUDA_OUTLIVES", "1", 1);
        start();
        at = map_fd(memory, SEGMENT, CU_ACCESS_READ_WRITE);
        OK(cuStreamWaitValue64(NULL, at + 24, 1, CU_WAIT_EQ));
        for (unsigned i = 0; i < 3; i++)
                OK(cuMemsetD8Async(at + 8 * i, (unsigned char)(i + 1), 8, NULL));
        child = fork();
        ck_assert_int_ge(child, 0);
        if (child == 0) {
                alarm(LIMIT_S);
                for (;;)
                        pause();
        }
        tell(fd, &child, sizeof child, -1);
        pause();
}

START_TEST(what_was_queued_outlives_its_process) {
        struct peer b = peer_start(queue_and_fork);
        cu_address at;
        pid_t child;
        int fd;

        start();
        fd = export(create(SEGMENT));
        tell(b.fd, "m", 1, fd);
        at = map_fd(fd, SEGMENT, CU_ACCESS_READ_WRITE);
        hear(b.fd, &child, sizeof child);
        peer_kill(&b);
        sleep_ms(20);
        ck_assert_uint_ne(words(at)[0], 0x0101010101010101);
        set_word(at + 24, 1);
        while (words(at)[2] != 0x0303030303030303)
                sleep_ms(1);
        ck_assert_uint_eq(words(at)[0], 0x0101010101010101);
        ck_assert_uint_eq(words(at)[1], 0x0202020202020202);
        kill(child, SIGKILL);
}
END_TEST

START_TEST(a_device_is_found_by_its_uuid) {
        struct kvd_device device;
        struct cu_uuid uuid, nobody = {{1}};
        cu_context context;

        setenv("FAKECUDA_DEVICES", "3", 1);
        setenv("CUDA_VISIBLE_DEVICES", "2,1", 1);
        load();
        OK(cuInit(0));
        uuid = uuid_of(1);
        ck_assert_int_eq(kvd_device_open(&device, &uuid), 0);
        ck_assert_int_eq(device.ordinal, 1);
        ck_assert_uint_eq(device.granularity, SEGMENT);
        OK(cuCtxGetCurrent(&context));
        ck_assert_ptr_null(context); /* left as it was */
        ck_assert_int_eq(kvd_device_enter(&device), 0);
        ck_assert_int_eq(kvd_device_enter(&device), 0);
        kvd_device_leave(&device);
        OK(cuCtxGetCurrent(&context));
        ck_assert_ptr_eq(context, device.context);
        kvd_device_leave(&device);
        kvd_device_close(&device);
        ck_assert_int_eq(kvd_device_open(&device, &nobody), -ENODEV);
        ck_assert_str_eq(device.why,
                         "none of the 2 devices that this process sees is the daemon's");
}
END_TEST

static cu_result is_gone(cu_context context) {
        return CU_INVALID_VALUE;
}

/* If a context cannot be entered, every operation on the device returns an error. */
static void expect_no_context(const struct kvd_device *device, cu_address at, int memory) {
        struct kvd_cuda calls = *device->cuda;
        struct kvd_device gone = *device;

        calls.cuCtxPushCurrent = is_gone;
        gone.cuda = &calls;
        ck_assert_int_eq(kvd_device_map(&gone, at, SEGMENT, memory, true), -EINVAL);
        ck_assert_int_eq(kvd_device_unmap(&gone, at, SEGMENT), -EINVAL);
        ck_assert_ptr_nonnull(strstr(gone.why, "cuCtxPushCurrent"));
}

static void map_as_client(int fd) {
        struct kvd_device device;
        struct cu_uuid uuid;
        cu_address at, page_at, ret;
        int memory = hear(fd, &uuid, sizeof uuid);
        void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

        load();
        ck_assert_int_eq(kvd_device_open(&device, &uuid), 0);
        ck_assert_int_eq(kvd_device_reserve(&device, 4 * SEGMENT, &at), 0);
        ck_assert_int_eq(kvd_device_map(&device, at + SEGMENT, SEGMENT, memory, true), 0);
        ck_assert_int_eq(kvd_device_map(&device, at + SEGMENT, SEGMENT, memory, true), -EINVAL);
        ck_assert_ptr_nonnull(strstr(device.why, "cuMemMap: CUDA_ERROR_INVALID_VALUE"));
        ck_assert_int_eq(kvd_device_map(&device, at, SEGMENT, memory, false), 0);
        expect_no_context(&device, at, memory);
        close(memory);
        words(at + SEGMENT)[5] = 0xb;
        ck_assert_uint_eq(words(at)[5], 0xb);
        ck_assert_int_eq(kvd_device_register(&device, page, 4096, &page_at), 0);
        ck_assert_int_eq(kvd_device_register(&device, page, 4096, &ret), -EEXIST);
        kvd_device_unregister(&device, page);
        ck_assert_int_eq(kvd_device_register(&device, page, 4096, &ret), 0);
        ck_assert_int_eq(kvd_device_unmap(&device, at, SEGMENT), 0);
        ck_assert_int_eq(kvd_device_unmap(&device, at, SEGMENT), -EINVAL);
        ck_assert_int_eq(kvd_device_unmap(&device, at + SEGMENT, SEGMENT), 0);
        kvd_device_unreserve(&device, at, 4 * SEGMENT);
        kvd_device_close(&device);
        meet(fd);
}

START_TEST(a_device_maps_segments) {
        struct peer b = peer_start(map_as_client);
        struct cu_uuid uuid;
        cu_memory memory;
        cu_address at;

        start();
        uuid = uuid_of(0);
        memory = create(SEGMENT);
        at = map(memory, SEGMENT, CU_ACCESS_READ);
        tell(b.fd, &uuid, sizeof uuid, export(memory));
        meet(b.fd);
        ck_assert_uint_eq(words(at)[5], 0xb);
        peer_end(&b);
}
END_TEST

/* Whichever call fails, the next try works, and nothing stays mapped. */
START_TEST(a_device_survives_failing_calls) {
        static const char *const faults[] = {"cuMemImportFromShareableHandle:1=2", "cuMemMap:1=2",
                                             "cuMemSetAccess:1=2", "cuCtxPushCurrent:1=2"};
        struct kvd_device device;
        struct cu_uuid uuid;
        cu_address at;
        int fd;

        setenv("FAKECUDA_FAIL", faults[_i], 1);
        load();
        OK(cuInit(0));
        uuid = uuid_of(0);
        fd = export(create(SEGMENT));
        ck_assert_int_eq(kvd_device_open(&device, &uuid), 0);
        ck_assert_int_eq(kvd_device_reserve(&device, SEGMENT, &at), 0);
        ck_assert_int_eq(kvd_device_map(&device, at, SEGMENT, fd, true), -ENOMEM);
        ck_assert_int_eq(kvd_device_map(&device, at, SEGMENT, fd, true), 0);
        ck_assert_int_eq(kvd_device_unmap(&device, at, SEGMENT), 0);
        kvd_device_unreserve(&device, at, SEGMENT);
        kvd_device_close(&device);
}
END_TEST

/* As in a container whose process ids equal those outside. */
START_TEST(a_handle_of_a_process_with_the_same_number) {
        struct kvd_device device;
        struct cu_ipc_handle handle = {0};
        struct cu_uuid uuid;
        cu_address at;

        setenv("FAKECUDA_FAIL", "cuIpcOpenMemHandle:1=201", 1);
        load();
        OK(cuInit(0));
        uuid = uuid_of(0);
        ck_assert_int_eq(kvd_device_open(&device, &uuid), 0);
        ck_assert_int_lt(kvd_device_open_handle(&device, &handle, &at), 0);
        ck_assert_ptr_nonnull(strstr(device.why, "in different containers?"));
        kvd_device_close(&device);
}
END_TEST

static void open_as_client(int fd) {
        struct kvd_device device;
        struct cu_ipc_handle handle;
        struct cu_uuid uuid;
        cu_address at;

        hear(fd, &uuid, sizeof uuid);
        hear(fd, &handle, sizeof handle);
        load();
        ck_assert_int_eq(kvd_device_open(&device, &uuid), 0);
        ck_assert_int_eq(kvd_device_open_handle(&device, &handle, &at), 0);
        words(at)[0] = 0xb;
        kvd_device_close_handle(&device, at);
        kvd_device_close(&device);
        meet(fd);
}

START_TEST(a_device_opens_handles) {
        struct peer b = peer_start(open_as_client);
        struct cu_ipc_handle handle;
        struct cu_uuid uuid;
        cu_address at;

        start();
        uuid = uuid_of(0);
        OK(cuMemAlloc(&at, SEGMENT));
        OK(cuIpcGetMemHandle(&handle, at));
        tell(b.fd, &uuid, sizeof uuid, -1);
        tell(b.fd, &handle, sizeof handle, -1);
        meet(b.fd);
        ck_assert_uint_eq(words(at)[0], 0xb);
        peer_end(&b);
}
END_TEST

/* ---- turns ----------------------------------------------------------------------------------- */

enum { KERNELS = 20 };

static void launch_stores(cu_stream stream, cu_address at, unsigned n) {
        static const uint32_t fatbin = 0xba55ed50u;
        struct {
                cu_address to;
                uint64_t value, n;
        } a = {at, 1, 1};
        void *parameters[] = {&a};
        cu_library library;
        cu_kernel kernel;
        cu_function f;

        OK(cuLibraryLoadData(&library, &fatbin, NULL, NULL, 0, NULL, NULL, 0));
        OK(cuLibraryGetKernel(&kernel, library, "fakecuda_store"));
        OK(cuKernelGetFunction(&f, kernel));
        for (unsigned i = 0; i < n; i++, a.to += sizeof(uint64_t))
                OK(cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL));
}

static bool is_written(cu_address at, unsigned i) {
        return ((volatile uint64_t *)words(at))[i] == 1;
}

/* B queues many kernels, and stays alive. */
static void queue_kernels(int fd) {
        cu_address at;
        int memory;
        char one;

        setenv("FAKECUDA_SLOW", "kernel:20", 1);
        memory = hear(fd, &one, 1);
        start();
        at = map_fd(memory, SEGMENT, CU_ACCESS_READ_WRITE);
        launch_stores(new_stream(), at, KERNELS);
        meet(fd);
        OK(cuCtxSynchronize());
        meet(fd);
}

static void begin_turns(const char *slice, void (*work)(int), struct peer *b, cu_address *ret) {
        cu_memory memory;
        int fd;

        setenv("FAKECUDA_SLICE", slice, 1);
        *b = peer_start(work);
        start();
        memory = create(SEGMENT);
        fd = export(memory);
        *ret = map(memory, SEGMENT, CU_ACCESS_READ_WRITE);
        tell(b->fd, "", 1, fd);
        close(fd);
        meet(b->fd);
        while (!is_written(*ret, 0))
                sleep_ms(1);
}

/* During B's slice, no kernel of A runs, but A's copies and waits do. */
START_TEST(kernels_of_two_processes_take_turns) {
        struct peer b;
        cu_address at;

        begin_turns("100000", queue_kernels, &b, &at);
        launch_stores(NULL, at + 4096, 1);
        OK(cuCtxSynchronize());
        ck_assert(is_written(at, KERNELS - 1));
        meet(b.fd);
        peer_end(&b);
}
END_TEST

/* B runs a very long kernel. A's kernels are still done. */
static void one_long_kernel(int fd) {
        cu_address at;
        int memory;
        char one;

        memory = hear(fd, &one, 1);
        setenv("FAKECUDA_SLOW", "kernel:600000", 1);
        start();
        at = map_fd(memory, SEGMENT, CU_ACCESS_READ_WRITE);
        set_word(at, 1);
        launch_stores(new_stream(), at + 8, 1);
        meet(fd);
        for (;;)
                pause();
}

START_TEST(a_slice_ends_in_the_middle_of_a_kernel) {
        struct peer b;
        cu_address at;

        begin_turns("2", one_long_kernel, &b, &at);
        for (int i = 0; i < 10; i++) {
                launch_stores(NULL, at + 4096, 1);
                OK(cuCtxSynchronize());
        }
        ck_assert(!is_written(at, 1));
        peer_kill(&b);
}
END_TEST

/* An endless slice ends with its process. */
START_TEST(a_process_that_is_killed_leaves_its_turn) {
        struct peer b;
        cu_address at;

        begin_turns("100000", one_long_kernel, &b, &at);
        sleep_ms(50); /* B probably runs its kernel by then; if not, this checks nothing */
        peer_kill(&b);
        launch_stores(NULL, at + 4096, 1);
        OK(cuCtxSynchronize());
        ck_assert(!is_written(at, 1));
}
END_TEST

SUITE("sharing",
      TESTS(two_processes_share_in_place, memory_outlives_its_owner, read_only_faults_its_author,
            memory_is_one_for_all, memory_that_another_has_open_is_not_freed, legacy_handles,
            legacy_handles_end_with_their_process),
      LOOPS(2, streams_of_two_processes_take_turns),
      TESTS(a_waiting_process_can_be_killed, what_was_queued_outlives_its_process, a_device_is_found_by_its_uuid, a_device_maps_segments),
      LOOPS(4, a_device_survives_failing_calls),
      TESTS(a_device_opens_handles, a_handle_of_a_process_with_the_same_number,
            kernels_of_two_processes_take_turns,
            a_slice_ends_in_the_middle_of_a_kernel, a_process_that_is_killed_leaves_its_turn))
