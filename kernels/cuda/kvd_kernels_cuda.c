/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The public calls for keys in GPU memory. They check arguments, enter the device's primary
 * context, and launch.
 */

#include "kernels/cuda/kvd_kernels_cuda.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>

#include "ipc/base/util.h"
#include "kernels/cuda/keydiff.h"

enum {
        DEVICES = 64,
        IDS_BYTES = 16 /* at the start of scratch: the id of the only block, 0 */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* protected by lock; opened at first use, and kept until the process exits */
static struct gpu gpus[DEVICES];

typedef int launch_fn(struct gpu *gpu, cu_stream stream, const struct gpu_scores *a);

static struct gpu_scores keydiff_of(const struct kvd_cuda_keys *k) {
        struct gpu_scores a = {.to = k->tokens,
                               .stride = k->tokens,
                               .scratch = k->scratch + IDS_BYTES};

        a.keys = (struct gpu_key_rows){.blocks = {.base = k->keys, .ids = k->scratch},
                                       .head_stride = k->head_stride,
                                       .token_stride = k->token_stride,
                                       .layers = 1,
                                       .heads = k->heads,
                                       .dim = k->dim,
                                       .per_block = k->tokens,
                                       .number = k->type};
        return a;
}

size_t kvd_cuda_keydiff_scratch(const struct kvd_cuda_keys *keys) {
        struct gpu_scores a = keydiff_of(keys);

        return IDS_BYTES + gpu_score_scratch(&a);
}

/* Makes the device's context current. */
static int enter(struct gpu *gpu, int device) {
        return gpu->context ? gpu_enter(gpu) : gpu_open(gpu, device);
}

static int launch(const struct kvd_cuda_keys *k, const struct gpu_scores *a, launch_fn *function,
                  char *why) {
        struct gpu *gpu = &gpus[k->device];
        int r = enter(gpu, k->device);

        if (r == 0) {
                r = gpu_check(gpu, gpu->cuda->cuMemsetD32Async(k->scratch, 0, 1, k->stream),
                              "cuMemsetD32Async");
                r = r < 0 ? r : function(gpu, k->stream, a);
                gpu_leave(gpu);
        }
        snprintf(why, KVD_CUDA_WHY, "%s", r < 0 ? gpu->why : "");
        return r;
}

static int call(const struct kvd_cuda_keys *k, const struct gpu_scores *a, launch_fn *function,
                char *why) {
        int r;

        if (k->device < 0 || k->device >= DEVICES) {
                snprintf(why, KVD_CUDA_WHY, "there is no device %d", k->device);
                return -ENODEV;
        }
        pthread_mutex_lock(&lock);
        r = launch(k, a, function, why);
        pthread_mutex_unlock(&lock);
        return r;
}

int kvd_cuda_keydiff_anchor(const struct kvd_cuda_keys *keys, uint64_t sums, uint64_t counts,
                            char why[KVD_CUDA_WHY]) {
        struct gpu_scores a = keydiff_of(keys);

        a.sums = sums;
        a.counts = counts;
        return call(keys, &a, gpu_anchor, why);
}

int kvd_cuda_keydiff_score(const struct kvd_cuda_keys *keys, uint64_t anchor, uint64_t scores,
                           char why[KVD_CUDA_WHY]) {
        struct gpu_scores a = keydiff_of(keys);

        a.sums = anchor;
        a.scores = scores;
        return call(keys, &a, gpu_score, why);
}
