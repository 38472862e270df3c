/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_GPU_DLPACK_H
#define KVD_CLIENT_GPU_DLPACK_H

/*
 * DLPack 0.8 and 1.1, the ABI with which libraries exchange tensors in memory
 * (https://dmlc.github.io/dlpack). Not installed: programs have their own dlpack.h.
 */

#include <stdint.h>

enum { DLPACK_CPU = 1, DLPACK_CUDA = 2 }; /* DLDeviceType */

/* DLDataTypeCode */
enum {
        DLPACK_INT = 0,
        DLPACK_UINT = 1,
        DLPACK_FLOAT = 2,
        DLPACK_BFLOAT = 4,
        DLPACK_E4M3 = 10, /* kDLFloat8_e4m3fn */
        DLPACK_E5M2 = 12,
};

struct DLDevice {
        int32_t type, id; /* id: CUDA's ordinal in this process */
};

struct DLDataType {
        uint8_t code, bits;
        uint16_t lanes;
};

struct DLTensor {
        void *data;
        struct DLDevice device;
        int32_t ndim;
        struct DLDataType dtype;
        int64_t *shape;
        int64_t *strides; /* in elements */
        uint64_t byte_offset;
};

struct DLManagedTensor {
        struct DLTensor tensor;
        void *owner;
        void (*deleter)(struct DLManagedTensor *self); /* called once, by any thread */
};

enum { DLPACK_READ_ONLY = 1 }; /* flags */

struct DLManagedTensorVersioned {
        struct {
                uint32_t major, minor;
        } version;
        void *owner;
        void (*deleter)(struct DLManagedTensorVersioned *self);
        uint64_t flags;
        struct DLTensor tensor;
};

_Static_assert(sizeof(struct DLTensor) == 48 && sizeof(struct DLManagedTensor) == 64 &&
                       sizeof(struct DLManagedTensorVersioned) == 80,
               "DLPack's ABI");

#endif
