/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_H
#define KVD_KERNELS_CUDA_H

/*
 * KeyDiff (keydiff.h) on keys in GPU memory; also in libkvd_kernels. Calls launch on a stream and
 * do not wait. They use the device's primary context, as the CUDA runtime and PyTorch do. All
 * memory is device memory, belongs to the caller, and must stay valid until the stream has
 * completed. Validity and scores are defined in keydiff.h (Park et al. 2025, equation 8). Scores
 * are within 2e-6 of the CPU's, anchors within 1e-5 of their length, and the same call gives the
 * same bits on every device.
 *
 * Results: 0 or negative errno, the reason in why (-ENOSYS: a build without CUDA; -ENODEV: no such
 * GPU; -EINVAL: invalid arguments). Thread-safe; concurrent calls wait for each other's launches.
 */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVD_CUDA_WHY 200

/*
 * Keys of one layer: head h of token t is dim elements, from element h * head_stride + t *
 * token_stride on; from that byte on, if numbers have less than 16 bits.
 */
struct kvd_cuda_keys {
        int device;    /* CUDA ordinal */
        void *stream;  /* CUstream; NULL for the legacy default stream */
        uint64_t keys; /* device address */
        uint64_t head_stride, token_stride;
        uint32_t heads, tokens, dim, type; /* dim: up to 256; type: enum kvd_number */
        /* device address of kvd_cuda_keydiff_scratch() bytes, aligned to 16; any contents */
        uint64_t scratch;
};

size_t kvd_cuda_keydiff_scratch(const struct kvd_cuda_keys *keys);

/*
 * Adds the directions of the valid keys to sums (float [heads][dim]), and their number to counts
 * (uint32_t [heads]).
 */
int kvd_cuda_keydiff_anchor(const struct kvd_cuda_keys *keys, uint64_t sums, uint64_t counts,
                            char why[KVD_CUDA_WHY]);

/* Stores scores (float [heads][tokens]) against an anchor (float [heads][dim]: mean or sum). */
int kvd_cuda_keydiff_score(const struct kvd_cuda_keys *keys, uint64_t anchor, uint64_t scores,
                           char why[KVD_CUDA_WHY]);

#ifdef __cplusplus
}
#endif

#endif
