/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The properties of the stand-in driver that everything else is tested on: memory, access, handles
 * and the order of streams between two processes. This process is A, and the forked one is B; both
 * initialise the driver after the fork. tests/ipc/base/test-cuda-header.cc compares
 * its functions with cuda.h.
 */

#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/gpu/fakecuda/fixture.h"
#include "tests/lib/suite.h"

static uint64_t *words(cu_address at) {
        return (uint64_t *)(uintptr_t)at;
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

/* ---- memory ---------------------------------------------------------------------------------- */

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

/* ---- order ----------------------------------------------------------------------------------- */

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

SUITE("fakecuda",
      TESTS(two_processes_share_in_place, memory_outlives_its_owner, read_only_faults_its_author,
            legacy_handles),
      LOOPS(2, streams_of_two_processes_take_turns))
