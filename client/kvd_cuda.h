/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CUDA_H
#define KVD_CUDA_H

/*
 * libkvd on a GPU: the same calls as in kvd.h, and what streams add to them.
 *
 * A daemon with a CUDA backend keeps its pool in GPU memory. kvd_space_open then maps it on that
 * GPU (found by UUID, in the device's primary context, which CUDA runtime, PyTorch and JAX use
 * too), and every address that kvd.h gives out (kvd_block.data, kvd_pin.base, kvd_pin_block) is an
 * address of the device: for kernels and CUDA copies, never for the processor. Nothing of a lookup
 * changes: it reads the index, in host memory.
 *
 * Work on a GPU is done when its stream has passed, and no processor waits for that:
 *
 *      kvd_lookup                  tokens in, blocks out, pinned
 *      kvd_wait_on(stream)         the stream waits until whoever computes these blocks has written them
 *        ... kernels that read the blocks ...
 *      kvd_unpin_on(stream)        lets go of them when the stream has passed here
 *
 *      kvd_alloc                   blocks to fill
 *        ... kernels that write the blocks ...
 *      kvd_seal_on(stream)         publishes them at once; who finds them waits for the stream, not for the call
 *
 * stream is a CUstream (cudaStream_t) of the device's primary context, as a pointer; NULL is the
 * legacy default stream, as in CUDA. In a host space stream is ignored and each of these calls is the
 * one of kvd.h without "_on".
 *
 * While the stream is being captured into a graph (cuStreamBeginCapture, cudaStreamBeginCapture,
 * torch.cuda.graph), or, for the legacy default stream, while one is that it takes turns with, each
 * call that would put something into it is -EBUSY and does nothing: pin and blocks stay the
 * caller's, and the capture stays valid. What orders blocks holds for one time, and a graph would
 * do it each time: call kvd before and behind what is captured.
 *
 * Where the driver has no stream memory operations, or all of a process' 64 slots are in use by
 * other streams, kvd_seal_on, kvd_unpin_on and kvd_free_on wait for the stream instead. kvd_seal,
 * kvd_unpin and kvd_free of kvd.h mean in a device space: the caller has waited already.
 *
 * If a producer dies between kvd_seal_on and the end of its kernels, streams that wait for it go on
 * once its GPU work is known to be over, and kvd_check_pin says that what was read is not the
 * block's data: drop the step's results, let go of the pin, look up again. Check every pin that
 * kvd_wait_on was called for, after the step and before anything of it is given away.
 */

/* Installed, <kvd.h> is included before this. */
#if !defined(KVD_H)
#include "kvd.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* ---- where a space is ------------------------------------------------------------------------ */

enum kvd_memory { KVD_MEMORY_HOST = 0, KVD_MEMORY_CUDA = 1 };

struct kvd_place {
        uint32_t memory;        /* enum kvd_memory */
        int32_t device;         /* ordinal in this process, -1 in host memory */
        uint8_t uuid[16];       /* of the GPU; zeros in host memory */
        /* 1: legacy CUDA IPC handles instead of VMM: nothing is mapped read-only */
        uint32_t legacy;
        uint32_t stream_order;  /* 1: streams order seals and reads; 0: the calls wait instead */
};
int kvd_space_place(kvd_space *space, struct kvd_place *ret);

/* ---- streams --------------------------------------------------------------------------------- */

/*
 * Makes the stream wait until all blocks of the pin's chain are written. 0 at once, without a CUDA
 * call, if they are.
 */
int kvd_wait_on(kvd_space *space, const struct kvd_pin *pin, void *stream);

/*
 * After the stream has passed: 0, or -EIO if the data of a block of the chain was never written
 * (its producer died). -EAGAIN: the producer has not written it yet, and may.
 */
int kvd_check_pin(kvd_space *space, const struct kvd_pin *pin);

/*
 * kvd_seal of blocks that the stream is still writing. On success the chain is published; blocks
 * that were duplicates are freed when the stream has passed.
 */
int kvd_seal_on(kvd_space *space, struct kvd_pin *pin, uint32_t n, struct kvd_block *blocks,
                const uint32_t *tokens, uint32_t n_tokens, void *stream);

/* kvd_seal_keep likewise. Duplicates are the caller's still: kvd_free_on. */
int kvd_seal_keep_on(kvd_space *space, struct kvd_pin *pin, uint32_t n, struct kvd_block *blocks,
                     const uint32_t *tokens, uint32_t n_tokens, uint32_t *ids, void *stream);

/*
 * Lets go when the stream has passed this point. The pin holds nothing afterwards; the blocks stay
 * pinned until a later call of this library (or kvd_settle) finds the stream past it. 0; -EBUSY (the
 * stream is being captured) is the only error.
 */
int kvd_unpin_on(kvd_space *space, struct kvd_pin *pin, void *stream);

/* Likewise. -EBUSY: blocks that are not zeros are the caller's still. */
int kvd_free_on(kvd_space *space, uint32_t n, struct kvd_block *blocks, void *stream);

/*
 * Lets go of what streams have passed since, and of memory without blocks that the daemon wants for
 * others; returns how many pins and blocks still wait for a stream. Waits for no stream, but a driver
 * may where it unmaps memory; other threads' calls go on meanwhile. For who calls nothing else for
 * long.
 */
int kvd_settle(kvd_space *space);

/* ---- tensors --------------------------------------------------------------------------------- */

/*
 * Where layer `layer` (of the whole model) lies: address of (block, plane, head, token, dim) by
 * strides in bytes. -EINVAL: there is no such layer, or blocks are opaque.
 */
struct kvd_layer_view {
        uint8_t *keys;           /* block 0, head 0, token 0 of the layer's K plane */
        uint8_t *values;
        uint64_t block_stride, head_stride, token_stride, element;
        uint64_t blocks;         /* block ids below this are mapped at present */
        uint32_t group;          /* layer group whose blocks hold this layer */
};
int kvd_layer_view(kvd_space *space, uint32_t layer, struct kvd_layer_view *ret);

/*
 * Tensors of other libraries, by DLPack (https://dmlc.github.io/dlpack), without a copy, of the
 * space's dtype. Each is deleted by its own deleter, from any thread, once. It may be after
 * kvd_space_close and kvd_close: what a tensor needs is closed with the last of them. On a GPU the
 * caller has his stream wait for the data (kvd_wait_on) as for any other use.
 */
/* DLPack 0.8: it does not say what may be written; prefer the other */
struct DLManagedTensor;
struct DLManagedTensorVersioned; /* 1.1 */

/*
 * Turns any of the tensors below into one with a version and flags, for consumers that take version
 * 1.0 and up (in a capsule named "dltensor_versioned"); it has the other's place, whose deleter
 * must not be called any more. Flag READ_ONLY is set for blocks of a pin: on a host a write there
 * is SIGSEGV.
 */
int kvd_dlpack_versioned(struct DLManagedTensor *tensor, struct DLManagedTensorVersioned **ret);

/*
 * One block, shape [layers of the group, 2 (K, V), heads, tokens, dim] in HND order or [layers, 2,
 * tokens, heads, dim] in NHD; of opaque blocks, [block_bytes] of uint8. pin must hold the block;
 * the tensor holds a pin of its own, which its deleter lets go: on a GPU when the legacy default
 * stream has passed, or the one named by kvd_dlpack_release_on. A deleter that is called while that
 * stream is being captured leaves the capture alone: the block is let go of by a later call of this
 * library (or kvd_settle), until when the stream must stay. -EINVAL: the block is not in the
 * pin's chain.
 */
int kvd_dlpack_block(kvd_space *space, const struct kvd_pin *pin, uint32_t block,
                     struct DLManagedTensor **ret);
void kvd_dlpack_release_on(struct DLManagedTensor *block, void *stream);

/* A block that the caller fills, likewise; it stays the caller's, and must outlive the tensor. */
int kvd_dlpack_filling(kvd_space *space, const struct kvd_block *block,
                       struct DLManagedTensor **ret);

/*
 * A layer's K (values: 0) or V (1) plane over all blocks that there can be (kvd_space_memory), as
 * [blocks, heads, tokens, dim] (HND) or [blocks, tokens, heads, dim] (NHD), strided: index it with
 * a block table. Holds the mapping, pins nothing: there is memory where blocks are held, and
 * elsewhere there may be none. Writable.
 */
int kvd_dlpack_layer(kvd_space *space, uint32_t layer, uint32_t values,
                     struct DLManagedTensor **ret);

/*
 * Everything, likewise, as int8 [blocks, block_bytes]: for engines that lay out a block themselves.
 */
int kvd_dlpack_memory(kvd_space *space, struct DLManagedTensor **ret);

/* Tensors of the space, which is open, that are not deleted yet. */
uint32_t kvd_dlpack_live(kvd_space *space);

/*
 * For PyCapsule_New(tensor, "dltensor", kvd_dlpack_capsule_free), or "dltensor_versioned": deletes
 * a tensor that nobody took.
 */
void kvd_dlpack_capsule_free(void *capsule);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
