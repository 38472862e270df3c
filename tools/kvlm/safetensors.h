/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_SAFETENSORS_H
#define KVLM_SAFETENSORS_H

/*
 * A safetensors file: 8 bytes of header length, little endian; a JSON header of {"name": {"dtype",
 * "shape", "data_offsets"}}; data. Its contents are not trusted: a tensor is found only if it has
 * the requested shape and its bytes are inside the file.
 */

#include <stdint.h>

#include "kernels/ops.h"
#include "tools/kvlm/file.h"
#include "tools/json.h"

struct safetensors {
        struct mapping file;
        json_t *header;
        const uint8_t *data;
        size_t data_size;
};

struct tensor {              /* a matrix, or a vector as one row */
        const uint8_t *data; /* no particular alignment */
        enum kvd_number type;
        uint32_t rows, columns;
};

int safetensors_open(const char *directory, struct safetensors *ret);
void safetensors_close(struct safetensors *);

/*
 * rows 0 requests a vector. -ENOENT if there is no tensor of that name, -EINVAL if it is not as
 * requested.
 */
int safetensors_find(const struct safetensors *, const char *name, uint32_t rows, uint32_t columns,
                     struct tensor *ret);

/* Reads rows first to first + n - 1 as contiguous floats. */
void tensor_read(const struct tensor *, const struct kvd_ops *, uint32_t first, uint32_t n,
                 float *to);

#endif
