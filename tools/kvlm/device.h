/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_DEVICE_H
#define KVLM_DEVICE_H

/*
 * A GPU to compute on: one stream on which everything happens in order, cuBLAS, and memory.
 * Launches are asynchronous; device_wait() waits. Functions that can fail store a message
 * (refuse.h).
 */

#include "kernels/cuda/cublas.h"
#include "kernels/cuda/gpu.h"

enum device_products {
        PRODUCTS_F32,  /* fp32 weights and activations */
        PRODUCTS_TF32, /* fp32 in memory, 10 bits of mantissa in products */
        PRODUCTS_BF16, /* bf16 weights, activations rounded to bf16 before a product */
};

struct device_options {
        cu_device ordinal; /* -1: the pool's GPU, or the first one */
        enum device_products products;
        /*
         * exact: generated tokens are computed like a prompt, with the same bits and one thread
         * block per head
         */
        enum { DECODE_FAST, DECODE_EXACT } decode;
};

struct device {
        struct device_options options;
        struct gpu gpu;
        struct gpu_blas blas;
        cu_stream stream;
        /*
         * what bits depend on in addition to the model; processes with equal strings compute equal
         * bits
         */
        char arithmetic[128];
        bool opened;
};

/*
 * -ENODEV if there is no driver, no such GPU or no cuBLAS; -ENOSYS or -ENOEXEC if this build has no
 * kernels, or none for this GPU.
 */
int device_new(const struct device_options *, struct device **ret);
struct device *device_free(struct device *);

/* The type of the factors of products, fp32 or bf16: enum kvd_number. */
uint32_t device_number(const struct device *);

int device_failed(struct device *, int error); /* stores gpu.why as the message, returns error */
int device_wait(struct device *);              /* until everything launched is done */
/* the same before memory is freed; ignores errors */
void device_finish(struct device *);

/* ---- memory; what: the name of the resource for the message if there is not enough ----------- */

int device_take(struct device *, uint64_t bytes, const char *what, cu_address *ret); /* zeroed */
void device_give(struct device *, cu_address); /* 0 is fine; may wait */

int device_clear(struct device *, cu_address to, uint64_t bytes);
int device_copy(struct device *, cu_address to, cu_address from, uint64_t bytes);
int device_read(struct device *, void *to, cu_address from, uint64_t bytes);        /* waits */
int device_write(struct device *, cu_address to, const void *from, uint64_t bytes); /* waits */

/* Counts the bytes that differ. Waits. */
int device_compare(struct device *, cu_address a, cu_address b, uint64_t bytes, uint64_t *ret);

#endif
