/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Libraries are images of which only the first word is read. Kernels come from the build
 * (kernels.h); a few that only the stand-in's own tests use are defined here. A launch runs one
 * block after the other on the stream's thread.
 */

#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/gpu/fakecuda/driver.h"
#include "tests/gpu/fakecuda/emulate.h"
#include "tests/gpu/fakecuda/kernels.h"

enum {
        FATBIN = 0xba55ed50u,
        PLACEHOLDER = 0x3a64766bu /* "kvd:", of a build without nvcc (embed.sh) */
};
enum { MOST_THREADS = 1024, PLAIN_SHARED = 48 << 10 };

struct library {
        struct library *next;
        bool alive;
};

/*
 * A kernel and its function are one object here: one per context, and a library has each kernel
 * once.
 */
struct kernel {
        struct kernel *next;
        const struct library *library;
        const struct fake_kernel *code;
        size_t own;    /* bytes of static shared memory */
        size_t shared; /* maximum bytes of dynamic shared memory of a launch */
};

static struct library *libraries;
static struct kernel *kernels;

/* ---- for the tests of the stand-in ----------------------------------------------------------- */

struct store {
        cu_address to;
        uint64_t value, n;
};

static void store(const struct fake_launch *launch, const void *argument) {
        const struct store *a = argument;

        for (uint64_t i = 0; i < a->n; i++)
                ((volatile uint64_t *)(uintptr_t)a->to)[i] = a->value + i;
}

static const struct fake_kernel own = {"fakecuda_store", sizeof(struct store), 256, store};

static const struct fake_kernel *find_code(const char *name) {
        return strcmp(name, own.name) == 0 ? &own : fake_kernel_find(name);
}

/* ---- libraries ------------------------------------------------------------------------------- */

static struct library *find_library(cu_library handle) {
        struct library *it = libraries;

        while (it && (cu_library)it != handle)
                it = it->next;
        return it && it->alive ? it : NULL;
}

static struct kernel *find_kernel(const void *handle) {
        struct kernel *it = kernels;

        while (it && (const void *)it != handle)
                it = it->next;
        return it && it->library->alive ? it : NULL;
}

cu_result cuLibraryLoadData(cu_library *ret, const void *image, void *jit, void **jit_values,
                            unsigned n_jit, void *options, void **values, unsigned n) {
        struct library *it;
        uint32_t word;

        ENTER(cuLibraryLoadData, NEEDS_INIT);
        if (!ret || !image)
                return CU_INVALID_VALUE;
        memcpy(&word, image, sizeof word);
        if (word != FATBIN && word != PLACEHOLDER)
                return CU_INVALID_IMAGE;
        it = calloc(1, sizeof *it);
        if (!it)
                abort();
        pthread_mutex_lock(&fake.lock);
        *it = (struct library){.next = libraries, .alive = true};
        libraries = it;
        pthread_mutex_unlock(&fake.lock);
        *ret = it;
        return CU_OK;
}

cu_result cuLibraryUnload(cu_library handle) {
        struct library *it;

        ENTER(cuLibraryUnload, NEEDS_INIT);
        pthread_mutex_lock(&fake.lock);
        it = find_library(handle);
        if (it)
                it->alive = false;
        pthread_mutex_unlock(&fake.lock);
        return it ? CU_OK : CU_INVALID_HANDLE;
}

static struct kernel *kernel_of(const struct library *library, const struct fake_kernel *code) {
        struct kernel *it = kernels;

        while (it && !(it->library == library && it->code == code))
                it = it->next;
        if (it)
                return it;
        it = calloc(1, sizeof *it);
        if (!it)
                abort();
        *it = (struct kernel){.next = kernels,
                              .library = library,
                              .code = code,
                              .own = fake_kernel_own_shared(code->name)};
        it->shared = MIN(fake_settings.shared, PLAIN_SHARED) - MIN(fake_settings.shared, it->own);
        kernels = it;
        return it;
}

cu_result cuLibraryGetKernel(cu_kernel *ret, cu_library handle, const char *name) {
        const struct fake_kernel *code;
        const struct library *library;

        ENTER(cuLibraryGetKernel, NEEDS_INIT);
        if (!ret || !name)
                return CU_INVALID_VALUE;
        code = find_code(name);
        pthread_mutex_lock(&fake.lock);
        library = find_library(handle);
        if (library && code)
                *ret = kernel_of(library, code);
        pthread_mutex_unlock(&fake.lock);
        return !library ? CU_INVALID_HANDLE : !code ? CU_NOT_FOUND : CU_OK;
}

cu_result cuKernelGetFunction(cu_function *ret, cu_kernel handle) {
        struct kernel *it;

        ENTER(cuKernelGetFunction, NEEDS_CONTEXT);
        pthread_mutex_lock(&fake.lock);
        it = find_kernel(handle);
        pthread_mutex_unlock(&fake.lock);
        if (!ret)
                return CU_INVALID_VALUE;
        *ret = it;
        return it ? CU_OK : CU_INVALID_HANDLE;
}

cu_result cuFuncSetAttribute(cu_function handle, int attribute, int value) {
        struct kernel *it;
        bool fits;

        ENTER(cuFuncSetAttribute, NEEDS_CONTEXT);
        if (attribute != CU_FUNC_DYNAMIC_SHARED_BYTES || value < 0)
                return CU_INVALID_VALUE;
        pthread_mutex_lock(&fake.lock);
        it = find_kernel(handle);
        fits = it && (size_t)value + it->own <= fake_settings.shared;
        if (fits)
                it->shared = (size_t)value;
        pthread_mutex_unlock(&fake.lock);
        return fits ? CU_OK : it ? CU_INVALID_VALUE : CU_INVALID_HANDLE;
}

cu_result cuOccupancyMaxActiveBlocksPerMultiprocessor(int *ret, cu_function handle, int threads,
                                                      size_t shared) {
        const struct kernel *it;

        ENTER(cuOccupancyMaxActiveBlocksPerMultiprocessor, NEEDS_CONTEXT);
        pthread_mutex_lock(&fake.lock);
        it = find_kernel(handle);
        pthread_mutex_unlock(&fake.lock);
        if (!it)
                return CU_INVALID_HANDLE;
        if (!ret || threads <= 0 || threads > MOST_THREADS)
                return CU_INVALID_VALUE;
        *ret = shared > it->shared || (unsigned)threads > it->code->threads ?
                       0 :
                       2048 / (int)ALIGN_UP(threads, 32);
        if (shared + it->own && *ret)
                *ret = (int)MIN((size_t)*ret, fake_settings.shared / (shared + it->own));
        return CU_OK;
}

/* ---- launches -------------------------------------------------------------------------------- */

static cu_result run_kernel(struct work *work, struct stream *stream) {
        const struct fake_launch launch = {
                .grid = {work->launch.grid[0], work->launch.grid[1], work->launch.grid[2]},
                .block = {work->launch.block[0], work->launch.block[1], work->launch.block[2]},
                .shared = work->launch.shared,
        };

        emulate_between = turn_look;
        work->launch.kernel->run(&launch, work->launch.arguments);
        return CU_OK;
}

static void free_arguments(struct work *work) {
        free(work->launch.arguments);
}

static cu_result check(const struct kernel *kernel, const struct work *work) {
        const unsigned *g = work->launch.grid, *b = work->launch.block;
        uint64_t threads = (uint64_t)b[0] * b[1] * b[2];

        if (!kernel)
                return CU_INVALID_HANDLE;
        if (!g[0] || !g[1] || !g[2] || g[0] > INT32_MAX || g[1] > 65535 || g[2] > 65535 ||
            !threads || b[0] > MOST_THREADS || b[1] > MOST_THREADS || b[2] > 64 ||
            threads > MOST_THREADS || work->launch.shared > kernel->shared ||
            kernel->own > fake_settings.shared)
                return CU_INVALID_VALUE;
        return threads > kernel->code->threads ? CU_LAUNCH_OUT_OF_RESOURCES : CU_OK;
}

/* Every kernel takes one struct as argument, which is copied now. */
cu_result cuLaunchKernel(cu_function handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                         unsigned by, unsigned bz, unsigned shared, cu_stream stream,
                         void **parameters, void **extra) {
        struct work work = {.kind = WORK_KERNEL,
                            .run = run_kernel,
                            .done = free_arguments,
                            .launch = {.grid = {gx, gy, gz},
                                       .block = {bx, by, bz},
                                       .shared = shared}};
        const struct kernel *kernel;
        cu_result error;

        ENTER(cuLaunchKernel, NEEDS_CONTEXT);
        pthread_mutex_lock(&fake.lock);
        kernel = find_kernel(handle);
        error = check(kernel, &work);
        pthread_mutex_unlock(&fake.lock);
        if (error)
                return error;
        if (!parameters || !parameters[0] || extra)
                return CU_INVALID_VALUE;
        work.launch.kernel = kernel->code;
        work.launch.arguments = malloc(kernel->code->argument_bytes);
        if (!work.launch.arguments)
                abort();
        memcpy(work.launch.arguments, parameters[0], kernel->code->argument_bytes);
        error = stream_submit(stream, &work, NULL, 0);
        if (error)
                free(work.launch.arguments);
        return error;
}
