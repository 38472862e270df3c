/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_NPY_H
#define KVCTL_NPY_H

/* Arrays in numpy's .npy files: versions 1 to 3, little-endian numbers, C order, up to NPY_RANK_MAX dimensions. */

#include <stddef.h>
#include <stdint.h>

#define NPY_RANK_MAX 8u

enum npy_type {
        NPY_F32,
        NPY_F64,
        NPY_F16,
        NPY_BF16, /* numpy has no such type: in files it is uint16 */
        NPY_U8,
        NPY_I8,
        NPY_U16,
        NPY_I16,
        NPY_U32,
        NPY_I32,
        NPY_U64,
        NPY_I64,
        NPY_TYPES
};

struct npy {
        enum npy_type type;
        uint32_t rank;
        uint64_t shape[NPY_RANK_MAX];
        uint64_t count; /* elements */
        void *data;     /* aligned to 64 bytes; NULL: no array */
};

const char *npy_type_name(enum npy_type type); /* as numpy calls it, and "bf16" */
size_t npy_type_size(enum npy_type type);
size_t npy_bytes(const struct npy *array);

/* "(2, 3)", in a buffer of the caller's */
#define NPY_SHAPE_TEXT 192
const char *npy_shape_text(const struct npy *array, char text[NPY_SHAPE_TEXT]);

/* An array of zeros. -EOVERFLOW or -ENOMEM */
int npy_new(enum npy_type type, uint32_t rank, const uint64_t *shape, struct npy *ret);

/* -errno, or -EBADMSG for what is no such file; why is always filled then. */
int npy_load(const char *path, struct npy *ret, char *why, size_t why_size);
int npy_save(const char *path, const struct npy *array, char *why, size_t why_size);

void npy_clear(struct npy *array);

#endif
