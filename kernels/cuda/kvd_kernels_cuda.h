/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_H
#define KVD_KERNELS_CUDA_H

/*
 * KeyDiff of kvd_kernels.h on keys that lie in a GPU's memory, in libkvd_kernels too. Calls launch
 * on a stream and do not wait; the device's primary context is used, which is the one that the CUDA
 * runtime and PyTorch use. All memory is the caller's, in the device, and must stay until the
 * stream has passed. What is valid, and what a score is, is said in keydiff.h; scores are within
 * 2e-6 of the processor's, anchors within 1e-5 of their length, and the same call gives the same
 * bits on every device.
 *
 * Results: 0 or negative errno, the reason in why (-ENOSYS: a build without CUDA; -ENODEV: no such
 * GPU). Threads may call at the same time; they wait for each other's launches.
 */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVD_CUDA_WHY 200

/* Head h of token t begins at element h * head_stride + t * token_stride; dim is up to 256. */
struct kvd_cuda_keys {
        int device; /* ordinal */
        void *stream; /* CUstream; NULL: the legacy default stream */
        uint64_t keys; /* address */
        uint64_t head_stride, token_stride;
        uint32_t heads, tokens, dim, type; /* enum kvd_number */
        /* kvd_cuda_keydiff_scratch() bytes, aligned to 16; their contents do not matter */
        uint64_t scratch;
};

size_t kvd_cuda_keydiff_scratch(const struct kvd_cuda_keys *keys);

/* sums (float [heads][dim]) and counts (uint32_t [heads]) grow by those of the keys. */
int kvd_cuda_keydiff_anchor(const struct kvd_cuda_keys *keys, uint64_t sums, uint64_t counts,
                            char why[KVD_CUDA_WHY]);

/* scores (float [heads][tokens]) against an anchor (float [heads][dim]). */
int kvd_cuda_keydiff_score(const struct kvd_cuda_keys *keys, uint64_t anchor, uint64_t scores,
                           char why[KVD_CUDA_WHY]);

#ifdef __cplusplus
}
#endif

#endif
