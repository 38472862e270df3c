/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KVLM_FOLDER_H
#define KVD_TESTS_KVLM_FOLDER_H

/* A separate folder for each test, with random models in it, and runs of kvlm on them. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Paths and texts that these functions return are valid until folder_remove(). */
void folder_make(void); /* checked fixtures, to run before and after each test */
void folder_remove(void);
const char *folder_path(const char *name);
const char *folder_write(const char *name, const void *data, size_t size); /* returns its path */
const char *folder_write_text(const char *name, const char *text);
void *folder_read(const char *name, size_t *size);
void *folder_memory(size_t bytes); /* zeroed */
/* returns its end */
char *print_to(char *at, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- models ---- */

struct shape {
        uint32_t layers, hidden, heads, kv_heads, head_dim, ffn, vocab;
        bool tied;
        const char *type; /* "F32", "F16", "BF16" */
};

struct weights { /* the values as written, rounded to the type */
        const char *name;
        uint32_t rows, columns;
        const float *data;
};

struct random_model {
        struct shape shape;
        struct weights weights[256];
        uint32_t n;
};

/*
 * Writes a model into a folder of that name. Its vocabulary has some words in addition to the
 * bytes.
 */
const struct random_model *folder_model(const char *name, const struct shape *, uint32_t seed);
void folder_config(const char *name, const struct shape *);
void folder_vocabulary(const char *name, uint32_t n); /* 260 or more */
const float *model_weights(const struct random_model *, const char *format, ...)
        __attribute__((format(printf, 2, 3)));

/* ---- runs ---- */

extern const char *kvlm_program;

struct output {
        int status; /* exit status, or minus the signal that ended it */
        char *out, *err;
};

/* Arguments end with NULL. */
struct output kvlm(const char *first, ...) __attribute__((sentinel));

#endif
