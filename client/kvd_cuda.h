/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CUDA_H
#define KVD_CUDA_H

/*
 * libkvd on a GPU: how the calls of kvd.h behave there, and the calls that work with streams.
 *
 * A daemon with a CUDA backend keeps its pool in GPU memory. kvd_space_open then maps it on that
 * GPU (found by UUID, in the device's primary context, which the CUDA runtime, PyTorch and JAX also
 * use). Every address from kvd.h (kvd_block.data, kvd_pin.base, kvd_pin_block) is then a device
 * address, for kernels and CUDA copies only, never for the CPU. Lookups are unchanged: they read
 * the index in host memory.
 *
 * GPU work is complete when its stream has passed it, and the CPU does not wait for that:
 *
 *      kvd_lookup                  find blocks and pin them
 *      kvd_wait_on(stream)         make the stream wait until the blocks have been written
 *        ... kernels that read the blocks ...
 *      kvd_unpin_on(stream)        release the blocks when the stream has passed this point
 *
 *      kvd_alloc                   get blocks to fill
 *        ... kernels that write the blocks ...
 *      kvd_seal_on(stream)         publish them at once; readers' streams wait for this stream
 *
 * stream is a CUstream (cudaStream_t) of the device's primary context, passed as a pointer; NULL is
 * the legacy default stream, as in CUDA. In a host space the stream is ignored, and each call is
 * equivalent to the call of kvd.h without "_on".
 *
 * While the stream is being captured into a graph (cuStreamBeginCapture, cudaStreamBeginCapture,
 * torch.cuda.graph), every call that would add work to it returns -EBUSY and does nothing: pin and
 * blocks remain the caller's, and the capture stays valid. (For the legacy default stream this also
 * holds while a stream that synchronizes with it is being captured.) A graph would replay an
 * ordering that is valid only once, so call kvd before and after the captured part.
 *
 * If the driver has no stream memory operations, or all 64 slots of the process are in use by other
 * streams, kvd_seal_on, kvd_unpin_on and kvd_free_on wait for the stream instead. In a device
 * space, call kvd_seal, kvd_unpin and kvd_free of kvd.h only after waiting for the stream.
 *
 * If a producer dies after kvd_seal_on and before its kernels have finished, waiting streams
 * continue once its GPU work is known to be over. kvd_check_pin then reports that the blocks were
 * never written: discard the step's results, release the pin, and look up again. Check every pin
 * passed to kvd_wait_on, after the step and before its results are used.
 */

/* For programs that have not included <kvd.h>. */
#if !defined(KVD_H)
#include "kvd.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* ---- where a space is ------------------------------------------------------------------------ */

enum kvd_memory {
        KVD_MEMORY_HOST = 0,
        KVD_MEMORY_CUDA = 1,
        KVD_MEMORY_NONE = 2, /* KVD_SPACE_INDEX_ONLY */
};

struct kvd_place {
        uint32_t memory;       /* enum kvd_memory */
        int32_t device;        /* device ordinal in this process; -1: no GPU */
        uint8_t uuid[16];      /* UUID of the GPU; zeros: none */
        uint32_t legacy;       /* 1: legacy CUDA IPC instead of VMM: nothing is mapped read-only */
        uint32_t stream_order; /* 1: streams order seals and reads; 0: the calls wait instead */
        uint32_t shard;        /* number of the GPU among those of the pool, from 0 on */
        uint32_t shards;       /* number of the pool's GPUs; 0 in host memory */
        /*
         * Random number of the space's cache: the same in all processes that use it, and kept by a
         * daemon that takes the cache over. Block ids mean the same where it is equal.
         */
        uint64_t cache;
};
int kvd_space_place(kvd_space *space, struct kvd_place *ret);

/* ---- streams --------------------------------------------------------------------------------- */

/*
 * Makes the stream wait until all blocks of the pin's chain are written. If they are written
 * already, returns 0 without a CUDA call.
 */
int kvd_wait_on(kvd_space *space, const struct kvd_pin *pin, void *stream);

/*
 * Call this after the stream has passed. Returns 0 if all blocks of the chain are written. -EIO: a
 * block was never written, because its producer died; -EAGAIN: a block is not written yet.
 */
int kvd_check_pin(kvd_space *space, const struct kvd_pin *pin);

/*
 * Does the same as kvd_seal for blocks that the stream is still writing. On success the chain is
 * published. -EOPNOTSUPP: the pool is on several GPUs, see kvd_seal_written. The caller's copies of
 * duplicates are freed when the stream has passed.
 */
int kvd_seal_on(kvd_space *space, struct kvd_pin *pin, uint32_t n, struct kvd_block *blocks,
                const uint32_t *tokens, uint32_t n_tokens, void *stream);

/* Does the same as kvd_seal_keep. Duplicates remain the caller's: free them with kvd_free_on. */
int kvd_seal_keep_on(kvd_space *space, struct kvd_pin *pin, uint32_t n, struct kvd_block *blocks,
                     const uint32_t *tokens, uint32_t n_tokens, uint32_t *ids, void *stream);

/*
 * For pools on several GPUs, where a process for each of them writes its shard of a block.
 * kvd_write_on says when the stream has done all work that is in it now; the process passes that to
 * the one that holds the blocks, which publishes them with what all streams have said, its own
 * included. Readers' streams wait for all of them. If one of the processes dies before its stream
 * has written, the blocks are dropped, as with kvd_seal_on.
 *
 * kvd_seal_written does the same as kvd_seal_keep. Free duplicates when all streams have passed.
 * -EINVAL: a process of those streams is gone, or has spoken of another daemon's pool. kvd_write_on
 * returns -ESTALE if the daemon was replaced.
 */
struct kvd_written {
        uint64_t value;
        uint32_t semaphore; /* 0: it is done */
        uint32_t writer;    /* names the process */
};
int kvd_write_on(kvd_space *space, void *stream, struct kvd_written *ret);
int kvd_seal_written(kvd_space *space, struct kvd_pin *pin, uint32_t n, struct kvd_block *blocks,
                     const uint32_t *tokens, uint32_t n_tokens, uint32_t *ids,
                     const struct kvd_written *written, uint32_t n_written);

/*
 * Releases the pin when the stream has passed this point. The pin is empty afterwards; the blocks
 * stay pinned until a later call of this library (such as kvd_settle) finds the stream past it.
 * Returns 0, -EBUSY if the stream is being captured, or -EOPNOTSUPP with KVD_SPACE_INDEX_ONLY.
 */
int kvd_unpin_on(kvd_space *space, struct kvd_pin *pin, void *stream);

/*
 * Frees the blocks when the stream has passed this point. Returns 0, -EBUSY if the stream is being
 * captured, or -EOPNOTSUPP with KVD_SPACE_INDEX_ONLY; blocks that are not zeroed then remain the
 * caller's.
 */
int kvd_free_on(kvd_space *space, uint32_t n, struct kvd_block *blocks, void *stream);

/*
 * Releases pins and blocks that streams have passed since, and memory without blocks that the
 * daemon wants for other clients. Returns how many pins and blocks still wait for a stream. Waits
 * for no stream, but the driver may wait when it unmaps memory; calls of other threads continue
 * meanwhile. For processes that make no other calls for a long time.
 */
int kvd_settle(kvd_space *space);

/* ---- tensors --------------------------------------------------------------------------------- */

/*
 * Layout of a layer (numbered in the whole model): strides in bytes to the address of (block,
 * plane, head, token, dim). -EINVAL: there is no such layer, or blocks are opaque.
 */
struct kvd_layer_view {
        uint8_t *keys;   /* the layer's K plane in block 0: head 0, token 0 */
        uint8_t *values; /* likewise its V plane */
        uint64_t block_stride, head_stride, token_stride;
        uint64_t
                element; /* 0: quantised; a row of (block, plane, head, token) has codes and scales */
        uint64_t blocks; /* block ids below this are mapped now */
        uint32_t group;  /* layer group whose blocks hold this layer */
};
int kvd_layer_view(kvd_space *space, uint32_t layer, struct kvd_layer_view *ret);

/*
 * DLPack tensors (https://dmlc.github.io/dlpack) of the space's dtype, without a copy. Each is
 * deleted once by its own deleter, from any thread, possibly after kvd_space_close and kvd_close:
 * the last tensor keeps the space and its connection open. On a GPU, make the stream wait for the
 * data (kvd_wait_on) as for any other use.
 *
 * DLManagedTensor is DLPack 0.8, which cannot mark data as read-only. Prefer
 * DLManagedTensorVersioned (1.1).
 */
struct DLManagedTensor;
struct DLManagedTensorVersioned;

/*
 * Converts a tensor of the calls below into one with a version and flags, for consumers that take
 * version 1.0 or later (in a capsule named "dltensor_versioned"). It replaces the old tensor, whose
 * deleter must not be called any more. The READ_ONLY flag is set for blocks of a pin: in host
 * memory a write to them raises SIGSEGV.
 */
int kvd_dlpack_versioned(struct DLManagedTensor *tensor, struct DLManagedTensorVersioned **ret);

/*
 * Makes a tensor of one block, with shape [layers of the group, 2 (K, V), heads, tokens, dim] in
 * HND order or [layers, 2, tokens, heads, dim] in NHD order; an opaque block is [block_bytes] of
 * uint8, on several GPUs the bytes of the shard. Of a quantised dtype, it is of uint8, and dim is
 * the bytes of a row (enum kvd_dtype). -EINVAL: the block is not in the chain that pin holds. The
 * tensor has its own pin, which its deleter releases: on a GPU when the legacy default stream, or the stream set by
 * kvd_dlpack_release_on, has passed. If that stream is being captured, the deleter does not touch
 * the capture, and a later call of this library (such as kvd_settle) releases the block; the stream
 * must exist until then.
 */
int kvd_dlpack_block(kvd_space *space, const struct kvd_pin *pin, uint32_t block,
                     struct DLManagedTensor **ret);
void kvd_dlpack_release_on(struct DLManagedTensor *block, void *stream);

/*
 * Does the same for a block being filled, which remains the caller's and must outlive the tensor.
 */
int kvd_dlpack_filling(kvd_space *space, const struct kvd_block *block,
                       struct DLManagedTensor **ret);

/*
 * Makes a strided, writable tensor of a layer's K (values: 0) or V (values: 1) plane over all
 * possible blocks (kvd_space_memory), to be indexed with a block table: [blocks, heads, tokens,
 * dim] in HND order or [blocks, tokens, heads, dim] in NHD order. It keeps the mapping but pins no
 * blocks: blocks that the caller does not hold may have no memory.
 */
int kvd_dlpack_layer(kvd_space *space, uint32_t layer, uint32_t values,
                     struct DLManagedTensor **ret);

/*
 * Does the same for the whole space as int8 [blocks, block_bytes], for engines that lay out blocks
 * themselves.
 */
int kvd_dlpack_memory(kvd_space *space, struct DLManagedTensor **ret);

/* Returns the number of tensors of an open space that are not deleted yet. */
uint32_t kvd_dlpack_live(kvd_space *space);

/*
 * Destructor for PyCapsule_New(tensor, "dltensor", kvd_dlpack_capsule_free), or
 * "dltensor_versioned": deletes the tensor if no consumer has taken it.
 */
void kvd_dlpack_capsule_free(void *capsule);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
