/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One process: start, devices, contexts, memory, and the promised errors. Each test runs in a
 * process of its own.
 */

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/device.h"
#include "ipc/base/util.h"
#include "tests/gpu/fakecuda/fixture.h"
#include "tests/lib/suite.h"

static int crashes(void (*work)(cu_address at), cu_address at) {
        pid_t pid = fork();
        int status;

        if (pid == 0) {
                signal(SIGSEGV, SIG_DFL);
                work(at);
                _exit(0);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void read_it(cu_address at) {
        (void)*(volatile uint8_t *)(uintptr_t)at;
}

static void write_it(cu_address at) {
        *(volatile uint8_t *)(uintptr_t)at = 1;
}

/* ---- start ----------------------------------------------------------------------------------- */

START_TEST(nothing_works_before_init) {
        cu_context context;
        cu_memory memory;
        int n;

        load();
        FAILS(CU_NOT_INITIALIZED, cuDeviceGetCount(&n));
        FAILS(CU_NOT_INITIALIZED, cuDevicePrimaryCtxRetain(&context, 0));
        FAILS(CU_NOT_INITIALIZED, cuMemCreate(&memory, SEGMENT, &shareable, 0));
        OK(cuDriverGetVersion(&n));
        ck_assert_int_eq(n, 13000);
        FAILS(CU_INVALID_VALUE, cuInit(1));
        OK(cuInit(0));
        OK(cuInit(0));
        OK(cuDeviceGetCount(&n));
        ck_assert_int_eq(n, 1);
}
END_TEST

START_TEST(a_forked_child_cannot_use_it) {
        pid_t pid;
        int status, n;

        start();
        pid = fork();
        if (pid == 0)
                _exit(cuda->cuDeviceGetCount(&n) != CU_NOT_INITIALIZED ||
                      cuda->cuInit(0) != CU_NOT_INITIALIZED);
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(status, 0);
}
END_TEST

typedef cu_result (*get_address)(const char *, void **, int, uint64_t, int *);

START_TEST(functions_by_version) {
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *at;
        get_address get = (get_address)dlsym(library, "cuGetProcAddress_v2");
        int status;

        ck_assert_int_eq(get("cuMemAlloc", &at, 3020, 0, &status), CU_OK);
        ck_assert_ptr_eq(at, dlsym(library, "cuMemAlloc_v2"));
        ck_assert_int_eq(get("cuMemAlloc", &at, 12000, 0, &status), CU_OK);
        ck_assert_int_eq(get("cuMemCreate", &at, 9000, 0, &status), CU_NOT_FOUND);
        ck_assert_int_eq(status, 2); /* the version is too old */
        ck_assert_ptr_null(at);
        ck_assert_int_eq(get("cuMemCreate", &at, 14000, 0, &status), CU_NOT_FOUND);
        ck_assert_int_eq(get("cuNothing", &at, 12000, 0, &status), CU_NOT_FOUND);
        ck_assert_int_eq(status, 1);
        ck_assert_int_eq(get("cuCtxSynchronize", &at, 2000, 0, &status), CU_OK);
        /* another signature */
        ck_assert_int_eq(get("cuCtxSynchronize", &at, 13000, 0, &status), CU_NOT_FOUND);
        ck_assert_ptr_nonnull(dlsym(library, "cuInit"));
}
END_TEST

START_TEST(an_old_driver_is_refused) {
        const char *why = "";

        setenv("FAKECUDA_VERSION", "11080", 1);
        ck_assert_ptr_null(kvd_cuda_load(&why));
        ck_assert_ptr_nonnull(strstr(why, " of version 12.0: it is too old"));
}
END_TEST

START_TEST(errors_in_words) {
        char text[100];

        load();
        ck_assert_str_eq(kvd_cuda_why(cuda, CU_OUT_OF_MEMORY, text, sizeof text),
                         "CUDA_ERROR_OUT_OF_MEMORY: out of memory");
        ck_assert_str_eq(kvd_cuda_why(cuda, 4711, text, sizeof text), "CUDA error 4711");
}
END_TEST

/* ---- devices and contexts -------------------------------------------------------------------- */

START_TEST(no_device) {
        setenv("FAKECUDA_DEVICES", "0", 1);
        load();
        FAILS(CU_NO_DEVICE, cuInit(0));
}
END_TEST

static struct cu_uuid uuid_of(cu_device device) {
        struct cu_uuid uuid;

        OK(cuDeviceGetUuid(&uuid, device));
        return uuid;
}

START_TEST(devices_differ) {
        struct cu_uuid a, b;
        cu_device device;
        char name[64];
        size_t total;
        int n;

        setenv("FAKECUDA_DEVICES", "3", 1);
        setenv("FAKECUDA_MEMORY", "512M", 1);
        load();
        OK(cuInit(0));
        OK(cuDeviceGetCount(&n));
        ck_assert_int_eq(n, 3);
        FAILS(CU_INVALID_DEVICE, cuDeviceGet(&device, 3));
        FAILS(CU_INVALID_DEVICE, cuDeviceGet(&device, -1));
        a = uuid_of(0);
        b = uuid_of(2);
        ck_assert_int_ne(memcmp(&a, &b, sizeof a), 0);
        OK(cuDeviceTotalMem(&total, 1));
        ck_assert_uint_eq(total, (size_t)512 << 20);
        OK(cuDeviceGetName(name, sizeof name, 1));
        ck_assert_ptr_nonnull(strstr(name, "1"));
        OK(cuDeviceGetAttribute(&n, CU_ATTR_WARP_SIZE, 0));
        ck_assert_int_eq(n, 32);
        FAILS(CU_INVALID_VALUE, cuDeviceGetAttribute(&n, 99999, 0));
}
END_TEST

START_TEST(visible_devices) {
        static const struct {
                const char *list;
                int n, first; /* number of the first device, which ends its UUID */
        } rows[] = {
                {"2", 1, 2},      {"1,0", 2, 1},
                {"0,7,1", 1, 0},  {"", 0, 0},
                {"-1", 0, 0},     {"GPU-66616b65-c0da-4001-8002-0305080d1501", 1, 1},
                {"GPU-66", 1, 0}, {"GPU-99", 0, 0},
        };
        struct cu_uuid uuid;
        int n;

        setenv("FAKECUDA_DEVICES", "3", 1);
        setenv("CUDA_VISIBLE_DEVICES", rows[_i].list, 1);
        load();
        FAILS(rows[_i].n ? CU_OK : CU_NO_DEVICE, cuInit(0));
        if (!rows[_i].n)
                return;
        OK(cuDeviceGetCount(&n));
        ck_assert_int_eq(n, rows[_i].n);
        uuid = uuid_of(0);
        ck_assert_int_eq(uuid.bytes[15], rows[_i].first);
}
END_TEST

START_TEST(contexts) {
        cu_context context, now;
        size_t a, b;

        load();
        OK(cuInit(0));
        FAILS(CU_INVALID_CONTEXT, cuMemGetInfo(&a, &b));
        FAILS(CU_INVALID_CONTEXT, cuCtxSynchronize());
        FAILS(CU_INVALID_CONTEXT, cuCtxPopCurrent(&now));
        FAILS(CU_INVALID_DEVICE, cuDevicePrimaryCtxRetain(&context, 1));
        FAILS(CU_INVALID_CONTEXT, cuDevicePrimaryCtxRelease(0));
        OK(cuDevicePrimaryCtxRetain(&context, 0));
        FAILS(CU_INVALID_CONTEXT, cuMemGetInfo(&a, &b)); /* retained is not current */
        OK(cuCtxPushCurrent(context));
        OK(cuCtxPushCurrent(context));
        OK(cuCtxPopCurrent(&now));
        ck_assert_ptr_eq(now, context);
        OK(cuMemGetInfo(&a, &b));
        OK(cuDevicePrimaryCtxRelease(0));
        FAILS(709, cuMemGetInfo(&a, &b)); /* destroyed, but still current */
        FAILS(CU_INVALID_CONTEXT, cuCtxPushCurrent(context));
        OK(cuCtxPopCurrent(&now));
        OK(cuCtxGetCurrent(&now));
        ck_assert_ptr_null(now);
}
END_TEST

START_TEST(the_last_release_frees) {
        size_t before, after, total;
        cu_context context;
        cu_address at;

        start();
        OK(cuMemGetInfo(&before, &total));
        OK(cuMemAlloc(&at, SEGMENT));
        OK(cuMemGetInfo(&after, &total));
        ck_assert_uint_eq(before - after, SEGMENT);
        OK(cuDevicePrimaryCtxRelease(0));
        OK(cuDevicePrimaryCtxRetain(&context, 0));
        OK(cuMemGetInfo(&after, &total));
        ck_assert_uint_eq(before, after);
        FAILS(CU_INVALID_VALUE, cuMemFree(at));
}
END_TEST

/* ---- handles and mappings -------------------------------------------------------------------- */

START_TEST(memory_needs_no_context) {
        cu_memory memory;
        size_t granularity;

        load();
        OK(cuInit(0));
        OK(cuMemGetAllocationGranularity(&granularity, &shareable, CU_GRANULARITY_RECOMMENDED));
        ck_assert_uint_eq(granularity, SEGMENT);
        memory = create(SEGMENT);
        close(export(memory));
        OK(cuMemRelease(memory));
}
END_TEST

START_TEST(wrong_sizes_and_handles) {
        struct cu_allocation private = shareable, elsewhere = shareable;
        cu_memory memory;
        int fd;

        start();
        elsewhere.location.id = 1;
        private.handle_types = CU_HANDLE_NONE;
        FAILS(CU_INVALID_VALUE, cuMemCreate(&memory, SEGMENT - 1, &shareable, 0));
        FAILS(CU_INVALID_VALUE, cuMemCreate(&memory, 0, &shareable, 0));
        FAILS(CU_INVALID_DEVICE, cuMemCreate(&memory, SEGMENT, &elsewhere, 0));
        OK(cuMemCreate(&memory, SEGMENT, &private, 0));
        FAILS(CU_INVALID_VALUE, cuMemExportToShareableHandle(&fd, memory, CU_HANDLE_POSIX_FD, 0));
        OK(cuMemRelease(memory));
        FAILS(CU_INVALID_VALUE, cuMemRelease(memory));
        FAILS(CU_INVALID_VALUE, cuMemRelease(12345));
        FAILS(CU_INVALID_VALUE, cuMemExportToShareableHandle(&fd, memory, CU_HANDLE_POSIX_FD, 0));
}
END_TEST

START_TEST(only_its_descriptors_are_imported) {
        int null = open("/dev/null", O_RDWR | O_CLOEXEC), plain = memfd_create("x", MFD_CLOEXEC);
        cu_memory memory;

        start();
        FAILS(CU_INVALID_VALUE,
              cuMemImportFromShareableHandle(&memory, (void *)(intptr_t)null, CU_HANDLE_POSIX_FD));
        FAILS(CU_INVALID_VALUE,
              cuMemImportFromShareableHandle(&memory, (void *)(intptr_t)plain, CU_HANDLE_POSIX_FD));
        FAILS(CU_INVALID_VALUE,
              cuMemImportFromShareableHandle(&memory, (void *)(intptr_t)-1, CU_HANDLE_POSIX_FD));
}
END_TEST

/* An import tells the device of the memory. Its size is found by mapping it, without a context. */
START_TEST(an_import_says_what_it_is) {
        struct cu_allocation is = {.location.id = 7};
        cu_memory memory, imported;
        cu_address at;
        int fd;

        load();
        OK(cuInit(0));
        OK(cuMemCreate(&memory, SEGMENT, &shareable, 0));
        OK(cuMemExportToShareableHandle(&fd, memory, CU_HANDLE_POSIX_FD, 0));
        OK(cuMemRelease(memory));
        OK(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)fd, CU_HANDLE_POSIX_FD));
        OK(cuMemGetAllocationPropertiesFromHandle(&is, imported));
        ck_assert_int_eq(is.location.type, CU_LOCATION_DEVICE);
        ck_assert_int_eq(is.location.id, 0);
        OK(cuMemAddressReserve(&at, 2 * SEGMENT, 0, 0, 0));
        FAILS(CU_INVALID_VALUE, cuMemMap(at, 2 * SEGMENT, 0, imported, 0));
        OK(cuMemMap(at, SEGMENT, 0, imported, 0));
        OK(cuMemUnmap(at, SEGMENT));
        OK(cuMemAddressFree(at, 2 * SEGMENT));
        OK(cuMemRelease(imported));
        FAILS(CU_INVALID_VALUE, cuMemGetAllocationPropertiesFromHandle(&is, imported));
        close(fd);
}
END_TEST

START_TEST(mappings_are_whole) {
        const struct cu_access write = {.location = {CU_LOCATION_DEVICE, 0},
                                        .flags = CU_ACCESS_READ_WRITE};
        cu_memory memory;
        cu_address at;

        start();
        memory = create(2 * SEGMENT);
        FAILS(CU_INVALID_VALUE, cuMemAddressReserve(&at, SEGMENT + 1, 0, 0, 0));
        OK(cuMemAddressReserve(&at, 4 * SEGMENT, 0, 0, 0));
        ck_assert_uint_eq(at % SEGMENT, 0);
        FAILS(CU_INVALID_VALUE, cuMemMap(at, SEGMENT, 0, memory, 0));
        FAILS(CU_INVALID_VALUE, cuMemMap(at, SEGMENT, SEGMENT, memory, 0));
        FAILS(CU_INVALID_VALUE, cuMemMap(at + 4096, 2 * SEGMENT, 0, memory, 0));
        /* past the reservation */
        FAILS(CU_INVALID_VALUE, cuMemMap(at + 3 * SEGMENT, 2 * SEGMENT, 0, memory, 0));
        /* outside it */
        FAILS(CU_INVALID_VALUE, cuMemMap(at + 8 * SEGMENT, 2 * SEGMENT, 0, memory, 0));
        FAILS(CU_INVALID_VALUE, cuMemMap(at, 2 * SEGMENT, 0, 12345, 0));
        OK(cuMemMap(at, 2 * SEGMENT, 0, memory, 0));
        FAILS(CU_INVALID_VALUE, cuMemMap(at + SEGMENT, 2 * SEGMENT, 0, memory, 0)); /* over it */
        FAILS(CU_INVALID_VALUE, cuMemSetAccess(at, SEGMENT, &write, 1));
        FAILS(CU_INVALID_VALUE, cuMemSetAccess(at, 4 * SEGMENT, &write, 1));
        FAILS(CU_INVALID_VALUE, cuMemUnmap(at, SEGMENT));
        FAILS(CU_INVALID_VALUE, cuMemUnmap(at + SEGMENT, SEGMENT));
        FAILS(CU_INVALID_VALUE, cuMemAddressFree(at, 4 * SEGMENT)); /* still mapped */
        /* a handle may be mapped twice */
        OK(cuMemMap(at + 2 * SEGMENT, 2 * SEGMENT, 0, memory, 0));
        OK(cuMemSetAccess(at, 4 * SEGMENT, &write, 1));
        *(uint32_t *)(uintptr_t)at = 0x600d;
        ck_assert_uint_eq(*(uint32_t *)(uintptr_t)(at + 2 * SEGMENT), 0x600d);
        OK(cuMemUnmap(at, 4 * SEGMENT)); /* several whole mappings at once */
        FAILS(CU_INVALID_VALUE, cuMemUnmap(at, 2 * SEGMENT));
        FAILS(CU_INVALID_VALUE, cuMemAddressFree(at, SEGMENT));
        OK(cuMemAddressFree(at, 4 * SEGMENT));
        FAILS(CU_INVALID_VALUE, cuMemAddressFree(at, 4 * SEGMENT));
}
END_TEST

START_TEST(access_is_enforced) {
        const struct cu_access read = {.location = {CU_LOCATION_DEVICE, 0},
                                       .flags = CU_ACCESS_READ};
        cu_memory memory;
        cu_address at;

        start();
        memory = create(SEGMENT);
        OK(cuMemAddressReserve(&at, SEGMENT, 0, 0, 0));
        ck_assert_int_eq(crashes(read_it, at), SIGSEGV);
        OK(cuMemMap(at, SEGMENT, 0, memory, 0));
        ck_assert_int_eq(crashes(read_it, at), SIGSEGV); /* no access yet */
        OK(cuMemSetAccess(at, SEGMENT, &read, 1));
        ck_assert_int_eq(crashes(read_it, at), 0);
        ck_assert_int_eq(crashes(write_it, at), SIGSEGV);
        OK(cuMemUnmap(at, SEGMENT));
        ck_assert_int_eq(crashes(read_it, at), SIGSEGV);
}
END_TEST

START_TEST(memory_lives_while_anything_holds_it) {
        size_t before, now, total;
        cu_memory memory;
        cu_address at;
        uint8_t *seen;
        int fd;

        setenv("FAKECUDA_MEMORY", "64M", 1);
        start();
        OK(cuMemGetInfo(&before, &total));
        memory = create(4 * SEGMENT);
        OK(cuMemGetInfo(&now, &total));
        ck_assert_uint_eq(before - now, 4 * SEGMENT);
        at = map(memory, 4 * SEGMENT, CU_ACCESS_READ_WRITE);
        seen = (uint8_t *)(uintptr_t)at;
        ck_assert_uint_eq(seen[0], 0xa5); /* fresh memory is not zero */
        ck_assert_uint_eq(seen[4 * SEGMENT - 1], 0xa5);
        seen[100] = 7;
        OK(cuMemRelease(memory));
        ck_assert_uint_eq(seen[100], 7);
        fd = export(create(SEGMENT));
        OK(cuMemUnmap(at, 4 * SEGMENT));
        OK(cuMemGetInfo(&now, &total));
        ck_assert_uint_eq(before - now, SEGMENT);
        at = map_fd(fd, SEGMENT, CU_ACCESS_READ);
        ck_assert_uint_eq(*(uint8_t *)(uintptr_t)at, 0xa5);
}
END_TEST

/* One context per process and device, however often it is retained. */
START_TEST(a_context_takes_memory) {
        size_t with_one, now, total;
        cu_context again;

        setenv("FAKECUDA_MEMORY", "64M", 1);
        setenv("FAKECUDA_CONTEXT", "16M", 1);
        start();
        OK(cuMemGetInfo(&with_one, &total));
        ck_assert_uint_eq(total - with_one, 16 << 20);
        OK(cuDevicePrimaryCtxRetain(&again, 0));
        OK(cuMemGetInfo(&now, &total));
        ck_assert_uint_eq(now, with_one);
        OK(cuDevicePrimaryCtxRelease(0));
        OK(cuDevicePrimaryCtxRelease(0));
        create(28 * SEGMENT);
        FAILS(CU_OUT_OF_MEMORY, cuDevicePrimaryCtxRetain(&again, 0));
}
END_TEST

START_TEST(a_descriptor_keeps_memory) {
        size_t before, now, total;
        cu_memory memory;
        int fd;

        setenv("FAKECUDA_MEMORY", "64M", 1);
        start();
        OK(cuMemGetInfo(&before, &total));
        memory = create(SEGMENT);
        fd = export(memory);
        OK(cuMemRelease(memory));
        OK(cuMemGetInfo(&now, &total));
        ck_assert_uint_eq(before - now, SEGMENT);
        close(fd);
        OK(cuMemGetInfo(&now, &total));
        ck_assert_uint_eq(before, now);
}
END_TEST

START_TEST(memory_ends) {
        cu_memory memory[4];
        cu_address at;

        setenv("FAKECUDA_MEMORY", "8M", 1);
        start();
        for (int i = 0; i < 3; i++)
                memory[i] = create(SEGMENT);
        FAILS(CU_OUT_OF_MEMORY, cuMemCreate(&memory[3], 2 * SEGMENT, &shareable, 0));
        OK(cuMemAlloc(&at, SEGMENT));
        FAILS(CU_OUT_OF_MEMORY, cuMemAlloc(&at, 1));
        OK(cuMemRelease(memory[0]));
        OK(cuMemAlloc(&at, 1));
}
END_TEST

START_TEST(without_descriptors) {
        struct cu_allocation private = shareable;
        cu_memory memory;
        int n;

        setenv("FAKECUDA_VMM", "0", 1);
        start();
        OK(cuDeviceGetAttribute(&n, CU_ATTR_POSIX_FD, 0));
        ck_assert_int_eq(n, 0);
        FAILS(CU_NOT_SUPPORTED, cuMemCreate(&memory, SEGMENT, &shareable, 0));
        private.handle_types = CU_HANDLE_NONE;
        OK(cuMemCreate(&memory, SEGMENT, &private, 0));
}
END_TEST

/* Each device has its own memory, and cannot map that of the other. */
START_TEST(memory_of_two_devices) {
        const struct cu_access on[] = {{{CU_LOCATION_DEVICE, 0}, CU_ACCESS_READ},
                                       {{CU_LOCATION_DEVICE, 1}, CU_ACCESS_READ}};
        struct cu_allocation there = shareable;
        size_t before[2], now[2], total;
        cu_context context[2];
        cu_memory memory, imported;
        cu_address at;

        setenv("FAKECUDA_DEVICES", "2", 1);
        start();
        there.location.id = 1;
        for (int i = 0; i < 2; i++) {
                OK(cuDevicePrimaryCtxRetain(&context[i], i));
                OK(cuCtxPushCurrent(context[i]));
                OK(cuMemGetInfo(&before[i], &total));
        }
        OK(cuMemCreate(&memory, SEGMENT, &there, 0));
        imported = import(export(memory));
        OK(cuMemAddressReserve(&at, SEGMENT, 0, 0, 0));
        OK(cuMemMap(at, SEGMENT, 0, imported, 0));
        FAILS(CU_INVALID_DEVICE, cuMemSetAccess(at, SEGMENT, &on[0], 1));
        OK(cuMemSetAccess(at, SEGMENT, &on[1], 1));
        for (int i = 1; i >= 0; i--) {
                OK(cuMemGetInfo(&now[i], &total));
                OK(cuCtxPopCurrent(NULL));
        }
        ck_assert_uint_eq(before[0], now[0]);
        ck_assert_uint_eq(before[1] - now[1], SEGMENT);
}
END_TEST

/* ---- cuMemAlloc and host memory -------------------------------------------------------------- */

START_TEST(allocations) {
        struct cu_ipc_handle handle;
        cu_address at, vmm;

        start();
        FAILS(CU_INVALID_VALUE, cuMemAlloc(&at, 0));
        OK(cuMemAlloc(&at, 1000));
        ck_assert_uint_eq(*(uint8_t *)(uintptr_t)(at + 999), 0xa5);
        FAILS(CU_INVALID_VALUE, cuMemFree(at + 8));
        OK(cuIpcGetMemHandle(&handle, at));
        /* its own process */
        FAILS(CU_INVALID_CONTEXT, cuIpcOpenMemHandle(&at, handle, CU_IPC_LAZY_PEER_ACCESS));
        OK(cuMemFree(at));
        FAILS(CU_INVALID_VALUE, cuMemFree(at));
        OK(cuMemFree(0));
        FAILS(CU_INVALID_VALUE, cuIpcGetMemHandle(&handle, at));
        vmm = map(create(SEGMENT), SEGMENT, CU_ACCESS_READ_WRITE);
        FAILS(CU_INVALID_VALUE, cuIpcGetMemHandle(&handle, vmm));
        FAILS(CU_INVALID_VALUE, cuMemFree(vmm));
        FAILS(CU_INVALID_VALUE, cuIpcCloseMemHandle(vmm));
}
END_TEST

START_TEST(without_legacy_handles) {
        struct cu_ipc_handle handle;
        cu_address at;

        setenv("FAKECUDA_LEGACY", "0", 1);
        start();
        OK(cuMemAlloc(&at, 1000));
        FAILS(CU_NOT_SUPPORTED, cuIpcGetMemHandle(&handle, at));
}
END_TEST

START_TEST(host_memory) {
        uint8_t *page = mmap(NULL, 1 << 16, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                             0);
        void *at;
        cu_address device;

        start();
        FAILS(CU_INVALID_VALUE, cuMemHostGetDevicePointer(&device, page, 0));
        FAILS(CU_INVALID_VALUE, cuMemHostRegister(page, 0, 0));
        FAILS(CU_INVALID_VALUE, cuMemHostRegister((void *)4096, 4096, 0)); /* no memory is there */
        OK(cuMemHostRegister(page, 8192, CU_REGISTER_PORTABLE | CU_REGISTER_MAPPED));
        FAILS(CU_ALREADY_REGISTERED, cuMemHostRegister(page + 4096, 8192, 0));
        OK(cuMemHostGetDevicePointer(&device, page + 100, 0));
        ck_assert_uint_eq(device, (uintptr_t)page + 100);
        FAILS(CU_NOT_REGISTERED, cuMemHostUnregister(page + 4096));
        OK(cuMemHostUnregister(page));
        FAILS(CU_NOT_REGISTERED, cuMemHostUnregister(page));
        OK(cuMemHostAlloc(&at, 1 << 20, CU_HOST_PORTABLE | CU_HOST_MAPPED));
        OK(cuMemHostGetDevicePointer(&device, at, 0));
        FAILS(CU_INVALID_VALUE, cuMemFreeHost((uint8_t *)at + 1));
        OK(cuMemFreeHost(at));
        FAILS(CU_INVALID_VALUE, cuMemFreeHost(at));
}
END_TEST

/* ---- faults and log -------------------------------------------------------------------------- */

START_TEST(the_nth_call_fails) {
        cu_memory memory;
        size_t a, b;

        setenv("FAKECUDA_FAIL", "cuMemCreate:2=2,cuMemGetInfo:1=999,cuCtxSynchronize:1=700", 1);
        start();
        OK(cuMemCreate(&memory, SEGMENT, &shareable, 0));
        FAILS(CU_OUT_OF_MEMORY, cuMemCreate(&memory, SEGMENT, &shareable, 0));
        OK(cuMemCreate(&memory, SEGMENT, &shareable, 0));
        FAILS(CU_UNKNOWN, cuMemGetInfo(&a, &b));
        OK(cuMemGetInfo(&a, &b));
        FAILS(CU_ILLEGAL_ADDRESS, cuCtxSynchronize());
        FAILS(CU_ILLEGAL_ADDRESS, cuCtxSynchronize()); /* stays */
        FAILS(CU_ILLEGAL_ADDRESS, cuMemGetInfo(&a, &b));
        OK(cuMemCreate(&memory, SEGMENT, &shareable, 0)); /* needs no context */
}
END_TEST

START_TEST(the_log_shows_who_made_a_context) {
        char path[] = "/tmp/fakecuda-XXXXXX", text[4096] = "", want[100];
        FILE *file;

        close(mkstemp(path));
        setenv("FAKECUDA_LOG", path, 1);
        setenv("FAKECUDA_FAIL", "cuInit:1=999", 1);
        load();
        FAILS(CU_UNKNOWN, cuInit(0));
        OK(cuInit(0));
        OK(cuMemRelease(create(SEGMENT)));
        file = fopen(path, "re");
        ck_assert_uint_lt(fread(text, 1, sizeof text - 1, file), sizeof text - 1);
        fclose(file);
        unlink(path);
        snprintf(want, sizeof want, "%d cuInit = 999\n%d cuInit\n%d cuMemCreate\n%d cuMemRelease\n",
                 getpid(), getpid(), getpid(), getpid());
        ck_assert_str_eq(text, want);
        ck_assert_ptr_null(strstr(text, "Ctx"));
}
END_TEST

SUITE("fakecuda",
      TESTS(nothing_works_before_init, a_forked_child_cannot_use_it, functions_by_version,
            an_old_driver_is_refused, errors_in_words, no_device, devices_differ),
      LOOPS(8, visible_devices),
      TESTS(contexts, the_last_release_frees, memory_needs_no_context, wrong_sizes_and_handles,
            only_its_descriptors_are_imported, an_import_says_what_it_is, mappings_are_whole,
            access_is_enforced,
            memory_lives_while_anything_holds_it, a_context_takes_memory, a_descriptor_keeps_memory,
            memory_ends,
            without_descriptors, allocations, without_legacy_handles, memory_of_two_devices,
            host_memory, the_nth_call_fails, the_log_shows_who_made_a_context))
