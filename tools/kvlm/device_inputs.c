/* SPDX-License-Identifier: Apache-2.0 */

/*
 * All inputs are sent in one copy. The next step may refill the staging memory only after this copy
 * has completed, while the step's own kernels are still running.
 */

#include "tools/kvlm/device_inputs.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvlm/refuse.h"

static int check(struct device_inputs *in, cu_result error, const char *what) {
        int r = gpu_check(&in->device->gpu, error, what);

        return r < 0 ? device_failed(in->device, r) : 0;
}

/* Its address in the staging memory. */
static void *staged(struct device_inputs *in, cu_address at) {
        return in->staging + (at - in->memory);
}

/* ---- a step ---- */

/* As in pass.c: the angle is a float product; its cosine and sine are rounded once. */
static void stage_angles(struct device_inputs *in, const struct step *step) {
        float *cosine = staged(in, in->cosine), *sine = staged(in, in->sine);

        for (uint32_t r = 0; r < step->n; r++)
                for (uint32_t i = 0; i < in->half; i++) {
                        float angle = (float)(step->first + r) * in->frequencies[i];

                        cosine[r * in->half + i] = (float)cos((double)angle);
                        sine[r * in->half + i] = (float)sin((double)angle);
                }
}

/*
 * The lowest address counts as block 0, so it does not matter which memory the blocks are in, as
 * long as it is only one.
 */
static int stage_ids(struct device_inputs *in, uint8_t *const *at, uint32_t n,
                     struct gpu_blocks *ret) {
        uint32_t *ids = staged(in, in->ids);
        uintptr_t base = UINTPTR_MAX;

        for (uint32_t i = 0; i < n; i++)
                base = MIN(base, (uintptr_t)at[i]);
        for (uint32_t i = 0; i < n; i++) {
                uint64_t offset = (uintptr_t)at[i] - base, id = offset / in->shape.block_bytes;

                if (id * in->shape.block_bytes != offset || id >= GPU_NO_BLOCK)
                        return refuse(-EXDEV,
                                      "the blocks of a sequence are in two kinds of memory");
                ids[i] = (uint32_t)id;
        }
        *ret = (struct gpu_blocks){base, in->shape.block_bytes, in->ids};
        return 0;
}

static int copy(struct device_inputs *in, size_t bytes) {
        const struct kvd_cuda *cuda = in->device->gpu.cuda;
        int r = check(in,
                      cuda->cuMemcpyHtoDAsync(in->memory, in->staging, bytes, in->device->stream),
                      "cuMemcpyHtoDAsync");

        return r < 0 ? r :
                       check(in, cuda->cuEventRecord(in->copied, in->device->stream),
                             "cuEventRecord");
}

int device_inputs_send(struct device_inputs *in, const struct step *step, struct gpu_blocks *ret) {
        uint32_t length = step->first + step->n, n_blocks = DIV_UP(length, in->shape.tokens);
        const uint32_t starts[2] = {0, step->n};
        int r = check(in, in->device->gpu.cuda->cuEventSynchronize(in->copied),
                      "cuEventSynchronize");

        if (r == 0)
                r = stage_ids(in, step->view.blocks, n_blocks, ret);
        if (r < 0)
                return r;
        memcpy(staged(in, in->tokens), step->tokens, step->n * sizeof *step->tokens);
        memcpy(staged(in, in->length), &length, sizeof length);
        memcpy(staged(in, in->starts), starts, sizeof starts);
        stage_angles(in, step);
        return copy(in, in->ids - in->memory + n_blocks * sizeof(uint32_t));
}

/* ---- life ---- */

static cu_address place(cu_address *used, size_t bytes) {
        cu_address at = *used;

        *used += ALIGN_UP(bytes, 256);
        return at;
}

/* Places all inputs from an address on. Called with 0 first, so that the end is the size. */
static cu_address place_all(struct device_inputs *in, cu_address at, uint32_t chunk,
                            uint32_t blocks) {
        size_t angles = (size_t)chunk * in->half * sizeof(float);

        in->memory = at;
        in->tokens = place(&at, chunk * sizeof(uint32_t));
        in->cosine = place(&at, angles);
        in->sine = place(&at, angles);
        in->length = place(&at, sizeof(uint32_t));
        in->starts = place(&at, 2 * sizeof(uint32_t));
        in->ids = place(&at, blocks * sizeof(uint32_t));
        return at;
}

static int allocate(struct device_inputs *in, const struct config *c, uint32_t chunk) {
        uint32_t blocks = c->max_positions / in->shape.tokens + 1;
        const struct kvd_cuda *cuda = in->device->gpu.cuda;
        size_t bytes = place_all(in, 0, chunk, blocks);
        cu_address at = 0;
        int r;

        in->frequencies = calloc(c->head_dim, sizeof *in->frequencies);
        if (!in->frequencies)
                return refuse(-ENOMEM, "out of memory");
        for (uint32_t i = 0; i < in->half; i++)
                in->frequencies[i] = 1.0f /
                                     powf(c->rope_theta, (float)(2 * i) / (float)c->head_dim);
        r = check(in, cuda->cuMemHostAlloc((void **)&in->staging, bytes, CU_HOST_PORTABLE),
                  "cuMemHostAlloc");
        if (r == 0)
                r = check(in, cuda->cuEventCreate(&in->copied, CU_EVENT_DISABLE_TIMING),
                          "cuEventCreate");
        if (r == 0)
                r = device_take(in->device, bytes, "a step's inputs", &at);
        place_all(in, at, chunk, blocks);
        return r;
}

int device_inputs_new(struct device *device, const struct config *c,
                      const struct block_shape *shape, uint32_t chunk, struct device_inputs **ret) {
        struct device_inputs *in = calloc(1, sizeof *in);
        int r;

        if (!in)
                return refuse(-ENOMEM, "out of memory");
        *in = (struct device_inputs){.device = device, .shape = *shape, .half = c->head_dim / 2};
        r = allocate(in, c, chunk);
        if (r < 0) {
                device_inputs_free(in);
                return r;
        }
        *ret = in;
        return 0;
}

struct device_inputs *device_inputs_free(struct device_inputs *in) {
        if (!in)
                return NULL;
        if (in->copied)
                in->device->gpu.cuda->cuEventDestroy(in->copied);
        if (in->staging)
                in->device->gpu.cuda->cuMemFreeHost(in->staging);
        device_give(in->device, in->memory);
        free(in->frequencies);
        free(in);
        return NULL;
}
