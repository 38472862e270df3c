/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/copy.h"

#include <errno.h>
#include <stdio.h>

#include "ipc/base/util.h"

enum { THREADS = 256, PIECE = THREADS * 4 * 16 };

static int launch(struct gpu *gpu, enum gpu_kernel kernel, cu_stream stream, uint64_t pieces, const void *a) {
        uint32_t blocks = MAX(gpu_resident_blocks(gpu, kernel, THREADS, 0), 1); /* if none, the launch says why */

        return gpu_launch(gpu, kernel, (struct gpu_grid){(uint32_t)MIN(pieces, blocks), 1, 1, THREADS, 0}, stream, a);
}

static int refuse(struct gpu *gpu, const char *what) {
        snprintf(gpu->why, sizeof gpu->why, "%s: addresses and sizes are multiples of 16", what);
        return -EINVAL;
}

int gpu_gather(struct gpu *gpu, cu_stream stream, const struct gpu_gather *a) {
        uint64_t pieces = a->n * DIV_UP(a->bytes, PIECE);

        if ((a->bytes | a->offset | a->blocks.block_bytes | a->blocks.base | a->packed) % 16)
                return refuse(gpu, "gather");
        return pieces == 0 ? 0 : launch(gpu, GPU_KERNEL_gather, stream, pieces, a);
}

int gpu_clear(struct gpu *gpu, cu_stream stream, const struct gpu_clear *a) {
        uint64_t pieces = a->n * DIV_UP(a->bytes, PIECE);

        if ((a->bytes | a->offset | a->blocks.block_bytes | a->blocks.base) % 16)
                return refuse(gpu, "clear");
        return pieces == 0 ? 0 : launch(gpu, GPU_KERNEL_clear, stream, pieces, a);
}

/* ---- the driver's copies ---- */

/* Blocks from i on that lie one behind the other and are copied whole, or are not resident: one copy. */
static uint32_t run_of(const struct gpu_gather *a, const uint32_t *ids, uint32_t i) {
        bool whole = a->bytes == a->blocks.block_bytes, none = ids[i] == GPU_NO_BLOCK;
        uint32_t n = 1;

        while (i + n < a->n && (none ? ids[i + n] == GPU_NO_BLOCK : whole && ids[i + n] == ids[i] + n))
                n++;
        return n;
}

int gpu_gather_copies(struct gpu *gpu, cu_stream stream, const struct gpu_gather *a, const uint32_t *ids) {
        const struct kvd_cuda *cuda = gpu->cuda;

        for (uint32_t i = 0, n; a->bytes && i < a->n; i += n) {
                cu_address packed = a->packed + i * a->bytes;
                cu_address block = a->blocks.base + ids[i] * a->blocks.block_bytes + a->offset;
                cu_result error = CU_OK;

                n = run_of(a, ids, i);
                if (ids[i] != GPU_NO_BLOCK)
                        error = cuda->cuMemcpyDtoDAsync(a->to_blocks ? block : packed, a->to_blocks ? packed : block,
                                                        n * a->bytes, stream);
                else if (!a->to_blocks)
                        error = cuda->cuMemsetD8Async(packed, 0, n * a->bytes, stream);
                if (error != CU_OK)
                        return gpu_check(gpu, error, "gather by copies");
        }
        return 0;
}

int gpu_gather_fastest(struct gpu *gpu, cu_stream stream, const struct gpu_gather *a, const uint32_t *ids,
                       bool host_memory) {
        bool sixteens = (a->bytes | a->offset | a->blocks.block_bytes | a->blocks.base | a->packed) % 16 == 0;

        if (!sixteens || (host_memory && a->bytes >= GPU_COPIES_FROM))
                return gpu_gather_copies(gpu, stream, a, ids);
        return gpu_gather(gpu, stream, a);
}
