/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_DEVICE_H
#define KVLM_DEVICE_H

/*
 * A GPU of ours: one stream on which everything happens in order, cuBLAS, and memory. What is
 * launched here does not wait; device_wait() does. Functions that can fail note a line.
 */

#include "kernels/cuda/cublas.h"
#include "kernels/cuda/gpu.h"

enum device_products {
        PRODUCTS_F32,  /* fp32 weights and activations */
        PRODUCTS_TF32, /* fp32 in memory, 10 bits of mantissa in products */
        PRODUCTS_BF16, /* bf16 weights, activations rounded to bf16 before a product */
};

struct device_options {
        cu_device ordinal; /* -1: where the pool is, or the first */
        enum device_products products;
        /*
         * exact: what is generated is computed like a prompt: the same bits, one block of threads a
         * head
         */
        enum { DECODE_FAST, DECODE_EXACT } decode;
};

struct device {
        struct device_options options;
        struct gpu gpu;
        struct gpu_blas blas;
        cu_stream stream;
        /* what bits depend on beside the model; processes that agree in it compute equal bits */
        char arithmetic[128];
        bool opened;
};

/*
 * -ENODEV: no driver, no such GPU, no cuBLAS; -ENOSYS, -ENOEXEC: no kernels in this build, or none
 * for this GPU.
 */
int device_new(const struct device_options *, struct device **ret);
struct device *device_free(struct device *);

/* In fp32 or bf16 lie what goes into products: enum kvd_number. */
uint32_t device_number(const struct device *);

int device_failed(struct device *, int error); /* notes gpu.why, returns error */
int device_wait(struct device *);              /* until all that was launched is done */
/* the same, before memory is let go of: errors are nobody's any more */
void device_finish(struct device *);

/* ---- memory; what names it as a resource goes into the line where there is not enough -------- */

int device_take(struct device *, uint64_t bytes, const char *what, cu_address *ret); /* zeroed */
void device_give(struct device *, cu_address); /* 0 is fine; may wait */

int device_clear(struct device *, cu_address to, uint64_t bytes);
int device_copy(struct device *, cu_address to, cu_address from, uint64_t bytes);
int device_read(struct device *, void *to, cu_address from, uint64_t bytes);        /* waits */
int device_write(struct device *, cu_address to, const void *from, uint64_t bytes); /* waits */

/* How many bytes differ. Waits. */
int device_compare(struct device *, cu_address a, cu_address b, uint64_t bytes, uint64_t *ret);

#endif
