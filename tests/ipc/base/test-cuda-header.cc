/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Our own declarations of the CUDA driver against the toolkit's, decided by the compiler, in C++, because its templates
 * can take a function's type apart. Then, where a libcuda.so.1 is found (in the suite, the stand-in): does it have
 * every function under the name that a program compiled with cuda.h would link to?
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <dlfcn.h>
#include <string.h>

namespace ours {
#include "ipc/base/cuda.h"
}

/* Before the toolkit makes macros of some of the names. */
#define TYPE(name, version, parameters) typedef decltype(ours::kvd_cuda::name) our_##name;
KVD_CUDA_CALLS(TYPE)

#include <cuda.h>
#include <cudaTypedefs.h>

/* ---- signatures: as many parameters, each of the same size and kind -------------------------------------------- */

template <class T> struct kind {
        static constexpr bool pointer = false;
};
template <class T> struct kind<T *> {
        static constexpr bool pointer = true;
};

template <class A, class B> constexpr bool same_passing() {
        return sizeof(A) == sizeof(B) && kind<A>::pointer == kind<B>::pointer;
}

/* What a pointer points to has the same size, too, where both sides say what it is. */
template <class T> struct pointed {
        static constexpr size_t bytes = 0;
};
template <class T> struct pointed<T *> {
        static constexpr size_t bytes = sizeof(T);
};
template <> struct pointed<void *> {
        static constexpr size_t bytes = 0;
};
template <> struct pointed<const void *> {
        static constexpr size_t bytes = 0;
};
template <class R, class... A> struct pointed<R (*)(A...)> {
        static constexpr size_t bytes = 0;
};
template <> struct pointed<CUcontext> {
        static constexpr size_t bytes = 0;
};
template <> struct pointed<CUstream> {
        static constexpr size_t bytes = 0;
};
template <> struct pointed<CUevent> {
        static constexpr size_t bytes = 0;
};
template <> struct pointed<CUlibrary> {
        static constexpr size_t bytes = 0;
};
template <> struct pointed<CUkernel> {
        static constexpr size_t bytes = 0;
};
template <> struct pointed<CUfunction> {
        static constexpr size_t bytes = 0;
};

template <class A, class B> constexpr bool same_parameter() {
        return same_passing<A, B>() &&
               (pointed<A>::bytes == pointed<B>::bytes || !pointed<A>::bytes || !pointed<B>::bytes);
}

template <class A, class B> struct same_function {
        static constexpr bool value = false;
};
template <class R, class S, class... A, class... B> struct same_function<R (*)(A...), S (*)(B...)> {
        template <size_t n, size_t m> static constexpr bool parameters() {
                if constexpr (n == m)
                        return (same_parameter<A, B>() && ... && true);
                else
                        return false;
        }
        static constexpr bool value = same_passing<R, S>() && parameters<sizeof...(A), sizeof...(B)>();
};

static_assert(same_function<int (*)(int, void *), CUresult (*)(int, const char *)>::value, "it takes these");
static_assert(!same_function<int (*)(int, void *), int (*)(int)>::value, "... and not another number of parameters");
static_assert(!same_function<int (*)(int), int (*)(long)>::value, "... another size");
static_assert(!same_function<int (*)(long), int (*)(void *)>::value, "... another kind");
static_assert(!same_function<int (*)(int *), int (*)(size_t *)>::value, "... or another size behind a pointer");

#define FUNCTION(name, version, parameters) \
        static_assert(same_function<our_##name, PFN_##name##_v##version>::value, #name);
KVD_CUDA_CALLS(FUNCTION)

/* ---- numbers --------------------------------------------------------------------------------------------------- */

#define NUMBERS(IS) \
        IS(CU_OK, CUDA_SUCCESS) \
        IS(CU_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE) \
        IS(CU_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY) \
        IS(CU_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED) \
        IS(CU_NO_DEVICE, CUDA_ERROR_NO_DEVICE) \
        IS(CU_INVALID_DEVICE, CUDA_ERROR_INVALID_DEVICE) \
        IS(CU_INVALID_IMAGE, CUDA_ERROR_INVALID_IMAGE) \
        IS(CU_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT) \
        IS(CU_NO_BINARY_FOR_GPU, CUDA_ERROR_NO_BINARY_FOR_GPU) \
        IS(CU_UNSUPPORTED_PTX, CUDA_ERROR_UNSUPPORTED_PTX_VERSION) \
        IS(CU_INVALID_HANDLE, CUDA_ERROR_INVALID_HANDLE) \
        IS(CU_NOT_FOUND, CUDA_ERROR_NOT_FOUND) \
        IS(CU_NOT_READY, CUDA_ERROR_NOT_READY) \
        IS(CU_ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_ADDRESS) \
        IS(CU_ALREADY_REGISTERED, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) \
        IS(CU_NOT_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED) \
        IS(CU_NOT_PERMITTED, CUDA_ERROR_NOT_PERMITTED) \
        IS(CU_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED) \
        IS(CU_CAPTURE_UNSUPPORTED, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) \
        IS(CU_CAPTURE_INVALIDATED, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED) \
        IS(CU_CAPTURE_IMPLICIT, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) \
        IS(CU_UNKNOWN, CUDA_ERROR_UNKNOWN) \
        IS(CU_ATTR_WARP_SIZE, CU_DEVICE_ATTRIBUTE_WARP_SIZE) \
        IS(CU_ATTR_CLOCK_KHZ, CU_DEVICE_ATTRIBUTE_CLOCK_RATE) \
        IS(CU_ATTR_MULTIPROCESSORS, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) \
        IS(CU_ATTR_PCI_BUS, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) \
        IS(CU_ATTR_PCI_DEVICE, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID) \
        IS(CU_ATTR_L2_BYTES, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE) \
        IS(CU_ATTR_PCI_DOMAIN, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID) \
        IS(CU_ATTR_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) \
        IS(CU_ATTR_CAPABILITY_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) \
        IS(CU_ATTR_SHARED_PER_BLOCK_OPTIN, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN) \
        IS(CU_ATTR_VIRTUAL_MEMORY, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) \
        IS(CU_ATTR_POSIX_FD, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) \
        IS(CU_ATTR_STREAM_WAIT_64, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS) \
        IS(CU_ATTR_MPS_ENABLED, CU_DEVICE_ATTRIBUTE_MPS_ENABLED) \
        IS(CU_HANDLE_NONE, CU_MEM_HANDLE_TYPE_NONE) \
        IS(CU_HANDLE_POSIX_FD, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) \
        IS(CU_LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE) \
        IS(CU_ALLOCATION_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED) \
        IS(CU_ACCESS_NONE, CU_MEM_ACCESS_FLAGS_PROT_NONE) \
        IS(CU_ACCESS_READ, CU_MEM_ACCESS_FLAGS_PROT_READ) \
        IS(CU_ACCESS_READ_WRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE) \
        IS(CU_GRANULARITY_MINIMUM, CU_MEM_ALLOC_GRANULARITY_MINIMUM) \
        IS(CU_GRANULARITY_RECOMMENDED, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) \
        IS(CU_REGISTER_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE) \
        IS(CU_REGISTER_MAPPED, CU_MEMHOSTREGISTER_DEVICEMAP) \
        IS(CU_REGISTER_READ_ONLY, CU_MEMHOSTREGISTER_READ_ONLY) \
        IS(CU_HOST_PORTABLE, CU_MEMHOSTALLOC_PORTABLE) \
        IS(CU_HOST_MAPPED, CU_MEMHOSTALLOC_DEVICEMAP) \
        IS(CU_HOST_WRITE_COMBINED, CU_MEMHOSTALLOC_WRITECOMBINED) \
        IS(CU_IPC_LAZY_PEER_ACCESS, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) \
        IS(CU_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING) \
        IS(CU_EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING) \
        IS(CU_NOT_CAPTURING, CU_STREAM_CAPTURE_STATUS_NONE) \
        IS(CU_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED) \
        IS(CU_WAIT_GEQ, CU_STREAM_WAIT_VALUE_GEQ) \
        IS(CU_WAIT_EQ, CU_STREAM_WAIT_VALUE_EQ) \
        IS(CU_WRITE_DEFAULT, CU_STREAM_WRITE_VALUE_DEFAULT) \
        IS(CU_FUNC_DYNAMIC_SHARED_BYTES, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)

#define NUMBER(mine, theirs) static_assert((long)ours::mine == (long)(theirs), #mine);
NUMBERS(NUMBER)

/* Macros on both sides; the toolkit's name a pointer. */
#define STRINGS_EQUAL(a, b) __builtin_strcmp(a, b) == 0
#define TEXT(macro) TEXT_(macro)
#define TEXT_(macro) #macro
static_assert(CU_IPC_HANDLE_BYTES == CU_IPC_HANDLE_SIZE, "legacy handles");
static_assert(STRINGS_EQUAL(TEXT(CU_LEGACY_STREAM), "((cu_stream)1)"), "the legacy default stream");
static_assert(STRINGS_EQUAL(TEXT(CU_STREAM_LEGACY), "((CUstream)0x1)"), "the legacy default stream");
static_assert(STRINGS_EQUAL(TEXT(CU_PER_THREAD_STREAM), "((cu_stream)2)"), "the default stream of a thread");
static_assert(STRINGS_EQUAL(TEXT(CU_STREAM_PER_THREAD), "((CUstream)0x2)"), "the default stream of a thread");

/* ---- layouts --------------------------------------------------------------------------------------------------- */

#define MEMBERS(IS) \
        IS(cu_allocation, type, CUmemAllocationProp, type) \
        IS(cu_allocation, handle_types, CUmemAllocationProp, requestedHandleTypes) \
        IS(cu_allocation, location, CUmemAllocationProp, location) \
        IS(cu_allocation, windows, CUmemAllocationProp, win32HandleMetaData) \
        IS(cu_allocation, flags, CUmemAllocationProp, allocFlags) \
        IS(cu_allocation, flags.compression, CUmemAllocationProp, allocFlags.compressionType) \
        IS(cu_allocation, flags.rdma, CUmemAllocationProp, allocFlags.gpuDirectRDMACapable) \
        IS(cu_allocation, flags.usage, CUmemAllocationProp, allocFlags.usage) \
        IS(cu_allocation, flags.reserved, CUmemAllocationProp, allocFlags.reserved) \
        IS(cu_location, type, CUmemLocation, type) \
        IS(cu_location, id, CUmemLocation, id) \
        IS(cu_access, location, CUmemAccessDesc, location) \
        IS(cu_access, flags, CUmemAccessDesc, flags) \
        IS(cu_uuid, bytes, CUuuid, bytes) \
        IS(cu_ipc_handle, bytes, CUipcMemHandle, reserved)

#define MEMBER(mine, member, theirs, other) \
        static_assert(sizeof(ours::mine) == sizeof(theirs), #mine); \
        static_assert(alignof(ours::mine) == alignof(theirs), #mine); \
        static_assert(offsetof(ours::mine, member) == offsetof(theirs, other), #mine "." #member); \
        static_assert(sizeof(ours::mine::member) == sizeof(theirs::other), #mine "." #member);
MEMBERS(MEMBER)

/* ---- names ----------------------------------------------------------------------------------------------------- */

/* Functions that cuda.h has in a newer version than we ask for: another signature, under another name. */
static bool is_newer(const char *symbol) {
        return strcmp(symbol, "cuEventElapsedTime_v2") == 0 || strcmp(symbol, "cuCtxSynchronize_v2") == 0;
}

static int missing(void *library, const char *symbol) {
        if (is_newer(symbol) || dlsym(library, symbol))
                return 0;
        printf("libcuda.so.1 has no %s\n", symbol);
        return 1;
}

static int missing_names() {
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        int n = 0;

        if (!library)
                printf("no driver: names were not looked for\n");
#define NAME(name, version, parameters) n += library ? missing(library, TEXT(name)) : 0;
        KVD_CUDA_CALLS(NAME)
        return n;
}

#define ONE(...) +1

int main() {
        printf("%d functions, %d numbers, %d members are those of CUDA %d.%d\n", 0 KVD_CUDA_CALLS(ONE), 0 NUMBERS(ONE),
               0 MEMBERS(ONE), CUDA_VERSION / 1000, CUDA_VERSION % 1000 / 10);
        return missing_names() ? 1 : 0;
}
