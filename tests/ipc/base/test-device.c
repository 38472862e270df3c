/* SPDX-License-Identifier: Apache-2.0 */

/* A GPU as a client and the daemon use it, on the stand-in driver. */

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ipc/base/device.h"
#include "tests/gpu/fakecuda/fixture.h"
#include "tests/lib/suite.h"

static uint64_t *words(cu_address at) {
        return (uint64_t *)(uintptr_t)at;
}

static struct cu_uuid uuid_of(int ordinal) {
        struct cu_uuid uuid;

        OK(cuDeviceGetUuid(&uuid, ordinal));
        return uuid;
}

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

SUITE("device", TESTS(a_device_is_found_by_its_uuid, a_device_maps_segments),
      LOOPS(4, a_device_survives_failing_calls),
      TESTS(a_device_opens_handles, a_handle_of_a_process_with_the_same_number))
