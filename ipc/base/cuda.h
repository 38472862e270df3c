/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_CUDA_H
#define KVD_BASE_CUDA_H

/*
 * The CUDA driver, loaded at run time. No toolkit is needed: types, numbers and signatures are our
 * own declarations of the driver's ABI (tests/ipc/base compares them with cuda.h if there is one).
 * Every function is requested in the version that it is declared for (cuGetProcAddress), so that a
 * newer driver never returns one with another signature.
 *
 * kvd_cuda_load() opens libcuda.so.1 once per process and does not initialise it. Functions return
 * 0 or a CUresult; kvd_cuda_why() describes one in words. A process that was forked after cuInit
 * cannot use the driver.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int cu_result;       /* CUresult */
typedef int cu_device;       /* CUdevice: an ordinal among the visible ones */
typedef uint64_t cu_address; /* CUdeviceptr */
typedef uint64_t cu_memory;  /* CUmemGenericAllocationHandle */
typedef void *cu_context, *cu_stream, *cu_event, *cu_library, *cu_kernel, *cu_function;

/* ---- numbers --------------------------------------------------------------------------------- */

enum { /* cu_result */
       CU_OK = 0,
       CU_INVALID_VALUE = 1,
       CU_OUT_OF_MEMORY = 2,
       CU_NOT_INITIALIZED = 3,
       CU_NO_DEVICE = 100,
       CU_INVALID_DEVICE = 101,
       CU_INVALID_IMAGE = 200,
       CU_INVALID_CONTEXT = 201,
       CU_NO_BINARY_FOR_GPU = 209,
       CU_UNSUPPORTED_PTX = 222,
       CU_INVALID_HANDLE = 400,
       CU_NOT_FOUND = 500,
       CU_NOT_READY = 600,
       CU_ILLEGAL_ADDRESS = 700,
       CU_ALREADY_REGISTERED = 712,
       CU_NOT_REGISTERED = 713,
       CU_NOT_PERMITTED = 800,
       CU_NOT_SUPPORTED = 801,
       CU_CAPTURE_UNSUPPORTED = 900,
       CU_CAPTURE_INVALIDATED = 901,
       CU_CAPTURE_IMPLICIT = 906,
       CU_UNKNOWN = 999,
};

enum { /* device attributes */
       CU_ATTR_WARP_SIZE = 10,
       CU_ATTR_CLOCK_KHZ = 13,
       CU_ATTR_MULTIPROCESSORS = 16,
       CU_ATTR_PCI_BUS = 33,
       CU_ATTR_PCI_DEVICE = 34,
       CU_ATTR_L2_BYTES = 38,
       CU_ATTR_PCI_DOMAIN = 50,
       CU_ATTR_CAPABILITY_MAJOR = 75,
       CU_ATTR_CAPABILITY_MINOR = 76,
       CU_ATTR_SHARED_PER_BLOCK_OPTIN = 97,
       CU_ATTR_VIRTUAL_MEMORY = 102,
       CU_ATTR_POSIX_FD = 103,
       CU_ATTR_STREAM_WAIT_64 = 122,
       CU_ATTR_MPS_ENABLED = 133,
};

/* CUmemAllocationHandleType */
enum { CU_HANDLE_NONE = 0, CU_HANDLE_POSIX_FD = 1 };
enum { CU_LOCATION_DEVICE = 1 };   /* CUmemLocationType */
enum { CU_ALLOCATION_PINNED = 1 }; /* CUmemAllocationType */
enum { CU_ACCESS_NONE = 0, CU_ACCESS_READ = 1, CU_ACCESS_READ_WRITE = 3 };
enum { CU_GRANULARITY_MINIMUM = 0, CU_GRANULARITY_RECOMMENDED = 1 };
/* cuMemHostRegister */
enum { CU_REGISTER_PORTABLE = 1, CU_REGISTER_MAPPED = 2, CU_REGISTER_READ_ONLY = 8 };
/* cuMemHostAlloc */
enum { CU_HOST_PORTABLE = 1, CU_HOST_MAPPED = 2, CU_HOST_WRITE_COMBINED = 4 };
enum { CU_IPC_LAZY_PEER_ACCESS = 1 };
enum { CU_STREAM_NON_BLOCKING = 1 };
enum { CU_EVENT_DISABLE_TIMING = 2 };
enum { CU_NOT_CAPTURING = 0 };        /* CUstreamCaptureStatus */
enum { CU_CAPTURE_MODE_RELAXED = 2 }; /* CUstreamCaptureMode */
enum { CU_WAIT_GEQ = 0, CU_WAIT_EQ = 1 };
enum { CU_WRITE_DEFAULT = 0 };
enum { CU_FUNC_DYNAMIC_SHARED_BYTES = 8 }; /* CUfunction_attribute */

#define CU_IPC_HANDLE_BYTES 64u
#define CU_LEGACY_STREAM ((cu_stream)1)
#define CU_PER_THREAD_STREAM ((cu_stream)2)

struct cu_uuid {
        uint8_t bytes[16];
};

struct cu_location {
        int type, id;
};

struct cu_allocation { /* CUmemAllocationProp */
        int type, handle_types;
        struct cu_location location;
        void *windows;
        struct {
                uint8_t compression, rdma;
                uint16_t usage;
                uint8_t reserved[4];
        } flags;
};

struct cu_access { /* CUmemAccessDesc */
        struct cu_location location;
        int flags;
};

struct cu_ipc_handle {
        uint8_t bytes[CU_IPC_HANDLE_BYTES];
};

/* ---- functions ------------------------------------------------------------------------------- */

/* CALL(name, version requested, parameters) */
#define KVD_CUDA_CALLS(CALL) \
        CALL(cuInit, 2000, (unsigned flags)) \
        CALL(cuDriverGetVersion, 2020, (int *ret)) \
        CALL(cuGetErrorName, 6000, (cu_result error, const char **ret)) \
        CALL(cuGetErrorString, 6000, (cu_result error, const char **ret)) \
        CALL(cuDeviceGetCount, 2000, (int *ret)) \
        CALL(cuDeviceGet, 2000, (cu_device * ret, int ordinal)) \
        CALL(cuDeviceGetName, 2000, (char *ret, int n, cu_device device)) \
        CALL(cuDeviceGetUuid, 11040, (struct cu_uuid * ret, cu_device device)) \
        CALL(cuDeviceGetAttribute, 2000, (int *ret, int attribute, cu_device device)) \
        CALL(cuDeviceTotalMem, 3020, (size_t * ret, cu_device device)) \
        CALL(cuDevicePrimaryCtxRetain, 7000, (cu_context * ret, cu_device device)) \
        CALL(cuDevicePrimaryCtxRelease, 11000, (cu_device device)) \
        CALL(cuCtxPushCurrent, 4000, (cu_context context)) \
        CALL(cuCtxPopCurrent, 4000, (cu_context * ret)) \
        CALL(cuCtxGetCurrent, 4000, (cu_context * ret)) \
        CALL(cuCtxSynchronize, 2000, (void)) \
        CALL(cuCtxGetStreamPriorityRange, 5050, (int *least, int *greatest)) \
        CALL(cuThreadExchangeStreamCaptureMode, 10010, (int *mode)) \
        CALL(cuMemGetInfo, 3020, (size_t * free, size_t * total)) \
        CALL(cuMemAlloc, 3020, (cu_address * ret, size_t bytes)) \
        CALL(cuMemFree, 3020, (cu_address at)) \
        CALL(cuMemHostAlloc, 2020, (void **ret, size_t bytes, unsigned flags)) \
        CALL(cuMemFreeHost, 2000, (void *at)) \
        CALL(cuMemHostRegister, 6050, (void *at, size_t bytes, unsigned flags)) \
        CALL(cuMemHostUnregister, 4000, (void *at)) \
        CALL(cuMemHostGetDevicePointer, 3020, (cu_address * ret, void *at, unsigned flags)) \
        CALL(cuMemcpyHtoDAsync, 3020, \
             (cu_address to, const void *from, size_t bytes, cu_stream stream)) \
        CALL(cuMemcpyDtoHAsync, 3020, (void *to, cu_address from, size_t bytes, cu_stream stream)) \
        CALL(cuMemcpyDtoDAsync, 3020, \
             (cu_address to, cu_address from, size_t bytes, cu_stream stream)) \
        CALL(cuMemsetD8Async, 3020, \
             (cu_address to, unsigned char value, size_t n, cu_stream stream)) \
        CALL(cuMemsetD32Async, 3020, (cu_address to, unsigned value, size_t n, cu_stream stream)) \
        CALL(cuMemAddressReserve, 10020, \
             (cu_address * ret, size_t bytes, size_t alignment, cu_address at, \
              unsigned long long flags)) \
        CALL(cuMemAddressFree, 10020, (cu_address at, size_t bytes)) \
        CALL(cuMemCreate, 10020, \
             (cu_memory * ret, size_t bytes, const struct cu_allocation *what, \
              unsigned long long flags)) \
        CALL(cuMemRelease, 10020, (cu_memory memory)) \
        CALL(cuMemMap, 10020, \
             (cu_address at, size_t bytes, size_t offset, cu_memory memory, \
              unsigned long long flags)) \
        CALL(cuMemUnmap, 10020, (cu_address at, size_t bytes)) \
        CALL(cuMemSetAccess, 10020, \
             (cu_address at, size_t bytes, const struct cu_access *access, size_t n)) \
        CALL(cuMemGetAllocationGranularity, 10020, \
             (size_t * ret, const struct cu_allocation *what, int option)) \
        CALL(cuMemExportToShareableHandle, 10020, \
             (void *ret, cu_memory memory, int handle_type, unsigned long long flags)) \
        CALL(cuMemImportFromShareableHandle, 10020, \
             (cu_memory * ret, void *handle, int handle_type)) \
        CALL(cuMemGetAllocationPropertiesFromHandle, 10020, \
             (struct cu_allocation * ret, cu_memory memory)) \
        CALL(cuIpcGetMemHandle, 4010, (struct cu_ipc_handle * ret, cu_address at)) \
        CALL(cuIpcOpenMemHandle, 11000, \
             (cu_address * ret, struct cu_ipc_handle handle, unsigned flags)) \
        CALL(cuIpcCloseMemHandle, 4010, (cu_address at)) \
        CALL(cuStreamCreateWithPriority, 5050, (cu_stream * ret, unsigned flags, int priority)) \
        CALL(cuStreamDestroy, 4000, (cu_stream stream)) \
        CALL(cuStreamGetId, 12000, (cu_stream stream, unsigned long long *ret)) \
        CALL(cuStreamIsCapturing, 10000, (cu_stream stream, int *ret)) \
        CALL(cuStreamSynchronize, 2000, (cu_stream stream)) \
        CALL(cuStreamQuery, 2000, (cu_stream stream)) \
        CALL(cuStreamWaitEvent, 3020, (cu_stream stream, cu_event event, unsigned flags)) \
        CALL(cuStreamWriteValue64, 11070, \
             (cu_stream stream, cu_address at, uint64_t value, unsigned flags)) \
        CALL(cuStreamWaitValue64, 11070, \
             (cu_stream stream, cu_address at, uint64_t value, unsigned flags)) \
        CALL(cuLaunchHostFunc, 10000, (cu_stream stream, void (*called)(void *data), void *data)) \
        CALL(cuEventCreate, 2000, (cu_event * ret, unsigned flags)) \
        CALL(cuEventDestroy, 4000, (cu_event event)) \
        CALL(cuEventRecord, 2000, (cu_event event, cu_stream stream)) \
        CALL(cuEventQuery, 2000, (cu_event event)) \
        CALL(cuEventSynchronize, 2000, (cu_event event)) \
        CALL(cuEventElapsedTime, 2000, (float *ms, cu_event from, cu_event to)) \
        CALL(cuLibraryLoadData, 12000, \
             (cu_library * ret, const void *image, void *jit, void **jit_values, unsigned n_jit, \
              void *options, void **values, unsigned n)) \
        CALL(cuLibraryUnload, 12000, (cu_library library)) \
        CALL(cuLibraryGetKernel, 12000, (cu_kernel * ret, cu_library library, const char *name)) \
        CALL(cuKernelGetFunction, 12000, (cu_function * ret, cu_kernel kernel)) \
        CALL(cuFuncSetAttribute, 9000, (cu_function function, int attribute, int value)) \
        CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050, \
             (int *ret, cu_function function, int threads, size_t shared)) \
        CALL(cuLaunchKernel, 4000, \
             (cu_function function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, \
              unsigned by, unsigned bz, unsigned shared, cu_stream stream, void **parameters, \
              void **extra))

struct kvd_cuda {
#define KVD_CUDA_MEMBER(name, version, parameters) cu_result(*name) parameters;
        KVD_CUDA_CALLS(KVD_CUDA_MEMBER)
#undef KVD_CUDA_MEMBER
};

/*
 * Returns the driver's functions, the same table at every call; thread-safe. NULL: *why says in one
 * line what is missing (libcuda.so.1, or a function that a driver older than 12.0 lacks).
 */
const struct kvd_cuda *kvd_cuda_load(const char **why);

/* Writes "CUDA_ERROR_OUT_OF_MEMORY: out of memory" to to; returns to. cuda may be NULL. */
const char *kvd_cuda_why(const struct kvd_cuda *cuda, cu_result error, char *to, size_t size);

/* The negative errno for a CUresult: -ENOMEM, -ENODEV, -EIO, ... */
int kvd_cuda_errno(cu_result error);

#endif
