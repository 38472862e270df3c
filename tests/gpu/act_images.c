/* SPDX-License-Identifier: Apache-2.0 */
/* Actions with images of kernels, and with calls that have two signatures */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/gpu/actor.h"
#include "tests/gpu/checks_cu.h"

#define TRY(step) \
        do { \
                note->result = (step); \
                if (note->result) \
                        return; \
        } while (0)

/*
 * From checks_image.S. Without nvcc, bytes that a GPU's driver refuses, and that the stand-in does
 * not read.
 */
#ifdef KVD_CHECKS_IMAGES
extern const uint8_t kvd_checks_image[], kvd_checks_image_small[];
#else
static const char kvd_checks_image[64] = "kvd: no image",
                  kvd_checks_image_small[64] = "kvd: no image";
#endif

static const void *image_of(uint64_t which) {
        return which ? kvd_checks_image_small : kvd_checks_image;
}

static cu_result load(struct stage *s, uint64_t which) {
        if (s->library)
                return CU_OK;
        return s->cuda->cuLibraryLoadData(&s->library, image_of(which), NULL, NULL, 0, NULL, NULL,
                                          0);
}

int stage_launch(struct stage *s, const char *name, const void *arguments) {
        return stage_launch_on(s, name, 1, s->streams[1], arguments);
}

int stage_launch_on(struct stage *s, const char *name, unsigned blocks, cu_stream stream,
                    const void *arguments) {
        void *parameters[] = {(void *)arguments};
        cu_kernel kernel;
        cu_function function;
        cu_result r = load(s, 0);

        if (!r)
                r = s->cuda->cuLibraryGetKernel(&kernel, s->library, name);
        if (!r)
                r = s->cuda->cuKernelGetFunction(&function, kernel);
        if (!r)
                r = s->cuda->cuLaunchKernel(function, blocks, 1, 1, 256, 1, 1, 0, stream,
                                            parameters, NULL);
        return r;
}

/* Loads the image, fills some words with its kernel, and checks them. */
static void act_image(struct stage *s, struct note *note) {
        uint32_t words[1000] = {0};
        uint64_t begin = now_ns();
        cu_address at;

        snprintf(note->text, sizeof note->text, "cuLibraryLoadData");
        TRY(load(s, note->n[0]));
        note->n[0] = now_ns() - begin;
        snprintf(note->text, sizeof note->text, "cuMemAlloc");
        TRY(s->cuda->cuMemAlloc(&at, sizeof words));
        snprintf(note->text, sizeof note->text, "launch");
        TRY(stage_launch(s, "kvd_check_fill", &(struct check_fill){at, ARRAY_SIZE(words), 7}));
        snprintf(note->text, sizeof note->text, "cuMemcpyDtoHAsync");
        TRY(s->cuda->cuMemcpyDtoHAsync(words, at, sizeof words, s->streams[1]));
        TRY(s->cuda->cuStreamSynchronize(s->streams[1]));
        note->n[1] = 0;
        for (uint32_t i = 0; i < ARRAY_SIZE(words); i++)
                note->n[1] += words[i] != 7 + i;
}

/* ---- cuMemcpyBatchAsync: one name, two signatures -------------------------------------------- */

struct copy_attributes {
        int order;
        struct cu_location from, to;
        unsigned flags;
};

enum { ORDER_STREAM = 1 };

typedef cu_result batch_12080(cu_address *to, cu_address *from, size_t *sizes, size_t n,
                              struct copy_attributes *, size_t *first, size_t n_attributes,
                              size_t *failed, cu_stream);
typedef cu_result batch_13000(cu_address *to, cu_address *from, size_t *sizes, size_t n,
                              struct copy_attributes *, size_t *first, size_t n_attributes,
                              cu_stream);
typedef cu_result get_function(const char *name, void **ret, int version, uint64_t flags,
                               int *found);

static cu_result find_batch(int version, void **ret) {
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        get_function *get = NULL;
        int found = 0;

        *ret = NULL;
        if (library)
                *(void **)&get = dlsym(library, "cuGetProcAddress_v2");
        if (!get)
                return CU_NOT_FOUND;
        cu_result r = get("cuMemcpyBatchAsync", ret, version, 0, &found);
        return r || *ret ? r : CU_NOT_FOUND;
}

struct batch {
        size_t n, bytes, failed;
        cu_address from, to, *tos, *froms;
        size_t *sizes;
};

/* Part i is copied to the place of part n - 1 - i. */
static int batch_prepare(struct stage *s, struct batch *b) {
        cu_result r = s->cuda->cuMemAlloc(&b->from, b->n * b->bytes);

        b->tos = calloc(b->n, sizeof *b->tos);
        b->froms = calloc(b->n, sizeof *b->froms);
        b->sizes = calloc(b->n, sizeof *b->sizes);
        r = r ? r : s->cuda->cuMemAlloc(&b->to, b->n * b->bytes);
        for (size_t i = 0; i < b->n && !r; i++) {
                b->froms[i] = b->from + i * b->bytes;
                b->tos[i] = b->to + (b->n - 1 - i) * b->bytes;
                b->sizes[i] = b->bytes;
                r = s->cuda->cuMemsetD32Async(b->froms[i], (unsigned)i + 1, b->bytes / 4,
                                              s->streams[1]);
        }
        return r ? r : s->cuda->cuStreamSynchronize(s->streams[1]);
}

static int batch_copy(struct stage *s, struct batch *b, int version, void *function) {
        struct copy_attributes a = {.order = ORDER_STREAM};
        size_t first = 0;

        if (version < 13000)
                return ((batch_12080 *)function)(b->tos, b->froms, b->sizes, b->n, &a, &first, 1,
                                                 &b->failed, s->streams[1]);
        return ((batch_13000 *)function)(b->tos, b->froms, b->sizes, b->n, &a, &first, 1,
                                         s->streams[1]);
}

static int batch_look(struct stage *s, struct batch *b, uint64_t *wrong) {
        cu_result r = CU_OK;

        for (size_t i = 0; i < b->n && !r; i++) {
                uint32_t word = 0;

                r = s->cuda->cuMemcpyDtoHAsync(&word, b->tos[i] + b->bytes - 4, sizeof word,
                                               s->streams[1]);
                r = r ? r : s->cuda->cuStreamSynchronize(s->streams[1]);
                *wrong += word != i + 1;
        }
        return r;
}

static void act_batch(struct stage *s, struct note *note) {
        struct batch b = {.n = note->n[1], .bytes = note->n[2]};
        int version = (int)note->n[0];
        void *function;
        uint64_t begin;

        memset(note->n, 0, sizeof note->n);
        snprintf(note->text, sizeof note->text, "cuGetProcAddress");
        TRY(find_batch(version, &function));
        note->n[2] = (uint64_t)(uintptr_t)function;
        snprintf(note->text, sizeof note->text, "cuMemAlloc");
        TRY(batch_prepare(s, &b));
        snprintf(note->text, sizeof note->text, "cuMemcpyBatchAsync");
        TRY(batch_copy(s, &b, version, function)); /* the first copy may load code */
        TRY(s->cuda->cuStreamSynchronize(s->streams[1]));
        begin = now_ns();
        TRY(batch_copy(s, &b, version, function));
        TRY(s->cuda->cuStreamSynchronize(s->streams[1]));
        note->n[0] = now_ns() - begin;
        TRY(batch_look(s, &b, &note->n[1]));
        free(b.tos);
        free(b.froms);
        free(b.sizes);
}

action_function *const actions_of_images[N_ACTIONS] = {[IMAGE] = act_image, [BATCH] = act_batch};
