/* SPDX-License-Identifier: Apache-2.0 */

/*
 * cuBLAS, loaded at run time. On a machine without it, calls for matrix products on the GPU fail
 * and say why.
 */

#include "kernels/cuda/cublas.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>

#include "ipc/base/util.h"
#include "kernels/ops.h"

/* NVIDIA's recommendation for the newest devices, more than older ones use: one size for all. */
enum { WORKSPACE_BYTES = 32 << 20 };

static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Written once, by load_once. */
static struct cublas table;
static bool loaded;
static char load_why[200];

static bool resolve(void *library, const char *symbol, void *to) {
        void *at = dlsym(library, symbol);

        if (at)
                *(void **)to = at;
        else
                snprintf(load_why, sizeof load_why, "cuBLAS has no %s: it is too old", symbol);
        return at != NULL;
}

/* The library stays open: its state on the device outlives any of our uses. */
static void load_once(void) {
        void *library = dlopen("libcublas.so.13", RTLD_NOW | RTLD_LOCAL);
        bool all = true;

        if (!library) {
                snprintf(load_why, sizeof load_why, "no cuBLAS: %s", dlerror());
                library = dlopen("libcublas.so.12", RTLD_NOW | RTLD_LOCAL);
        }
        if (!library)
                return;
#define RESOLVE(name, symbol, parameters) all = all && resolve(library, #symbol, &table.name);
        KVD_CUBLAS_CALLS(RESOLVE)
#undef RESOLVE
        loaded = all;
}

const struct cublas *cublas_load(const char **why) {
        pthread_once(&once, load_once);
        if (!loaded && why)
                *why = load_why;
        return loaded ? &table : NULL;
}

/* Translates the cublasStatus_t values that a caller can act on. */
static int check(struct gpu *gpu, int status, const char *what) {
        static const struct {
                int status, number;
                const char *text;
        } known[] = {
                {1, -ENODEV, "cannot be initialised"}, {3, -ENOMEM, "out of device memory"},
                {7, -EINVAL, "invalid value"},         {8, -ENODEV, "not supported on this device"},
                {15, -EOPNOTSUPP, "not supported"},
        };

        if (status == 0)
                return 0;
        for (size_t i = 0; i < ARRAY_SIZE(known); i++)
                if (known[i].status == status) {
                        snprintf(gpu->why, sizeof gpu->why, "cuBLAS: %s: %s", what, known[i].text);
                        return known[i].number;
                }
        snprintf(gpu->why, sizeof gpu->why, "cuBLAS: %s: error %d", what, status);
        return -EIO;
}

static void *pointer(cu_address at) {
        return (void *)(uintptr_t)at; /* cuBLAS takes addresses of the device as pointers */
}

static int open_handle(struct gpu_blas *b, cu_stream stream) {
        int r = check(b->gpu, b->calls->create(&b->handle), "cublasCreate");

        if (r == 0)
                r = gpu_check(b->gpu, b->gpu->cuda->cuMemAlloc(&b->workspace, WORKSPACE_BYTES),
                              "cuBLAS workspace");
        if (r == 0)
                r = check(b->gpu, b->calls->get_version(b->handle, &b->version),
                          "cublasGetVersion");
        if (r == 0)
                r = check(b->gpu, b->calls->set_stream(b->handle, stream), "cublasSetStream");
        if (r == 0) /* cublasSetStream resets the workspace */
                r = check(b->gpu,
                          b->calls->set_workspace(b->handle, pointer(b->workspace),
                                                  WORKSPACE_BYTES),
                          "cublasSetWorkspace");
        if (r == 0)
                r = check(b->gpu,
                          b->calls->set_math_mode(b->handle, CUBLAS_MATH_DEFAULT |
                                                                     CUBLAS_MATH_NO_REDUCED_SUMS),
                          "cublasSetMathMode");
        return r;
}

int gpu_blas_open(struct gpu_blas *ret, struct gpu *gpu, cu_stream stream) {
        const char *why = NULL;
        int r;

        *ret = (struct gpu_blas){.calls = cublas_load(&why), .gpu = gpu};
        if (!ret->calls) {
                snprintf(gpu->why, sizeof gpu->why, "%s", why);
                return -ENODEV;
        }
        r = open_handle(ret, stream);
        if (r < 0)
                gpu_blas_close(ret);
        return r;
}

void gpu_blas_close(struct gpu_blas *b) {
        if (b->handle)
                b->calls->destroy(b->handle);
        if (b->workspace)
                b->gpu->cuda->cuMemFree(b->workspace);
        b->handle = NULL;
        b->workspace = 0;
}

static int type_of(uint32_t number) {
        return number == KVD_NUMBER_F32 ? CUBLAS_F32 :
               number == KVD_NUMBER_F16 ? CUBLAS_F16 :
                                          CUBLAS_BF16;
}

/* cuBLAS is column-major: our rows are its columns, so the factors are swapped. */
int gpu_multiply(struct gpu_blas *b, const struct gpu_product *p) {
        const float one = 1.0f, zero = 0.0f;
        int type = type_of(p->number),
            sum = p->tf32 && type == CUBLAS_F32 ? CUBLAS_SUM_TF32 : CUBLAS_SUM_F32;

        return check(b->gpu,
                     b->calls->gemm_ex(b->handle, CUBLAS_TRANSPOSED, CUBLAS_PLAIN, (int)p->n_out,
                                       (int)p->rows, (int)p->n_in, &one, pointer(p->matrix), type,
                                       (int)p->n_in, pointer(p->from), type, (int)p->ld_from, &zero,
                                       pointer(p->to), CUBLAS_F32, (int)p->ld_to, sum,
                                       CUBLAS_ALGORITHM_DEFAULT),
                     "cublasGemmEx");
}
