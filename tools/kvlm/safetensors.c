/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Reads tensors from a safetensors file. The header is not trusted: everything is checked against
 * the file's size and the requested shape.
 */

#include "tools/kvlm/safetensors.h"

#include <endian.h>
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvlm/refuse.h"

#define FILE_NAME "model.safetensors"

enum { MAX_HEADER = 100 << 20 }; /* as in the reference implementation */

static int parse_header(struct safetensors *s) {
        uint64_t size;

        if (s->file.size < sizeof size)
                return refuse(-EINVAL, FILE_NAME " is cut short: no header");
        memcpy(&size, s->file.data, sizeof size);
        size = le64toh(size);
        if (size > s->file.size - sizeof size || size > MAX_HEADER)
                return refuse(-EINVAL,
                              FILE_NAME " is damaged: a header of %" PRIu64
                                        " bytes in a file of %zu",
                              size, s->file.size);
        s->header = json_read((const char *)s->file.data + sizeof size, size);
        if (!json_is_object(s->header))
                return refuse(-EINVAL, FILE_NAME " is damaged: its header is not a JSON object");
        s->data = s->file.data + sizeof size + size;
        s->data_size = s->file.size - sizeof size - size;
        return 0;
}

int safetensors_open(const char *directory, struct safetensors *ret) {
        struct safetensors s = {0};
        int r = map_file(directory, FILE_NAME, &s.file);

        if (r < 0)
                return r;
        r = parse_header(&s);
        if (r < 0) {
                safetensors_close(&s);
                return r;
        }
        *ret = s;
        return 0;
}

void safetensors_close(struct safetensors *s) {
        json_decref(s->header);
        s->header = NULL;
        unmap(&s->file);
}

static int read_type(const json_t *value, enum kvd_number *ret) {
        static const struct {
                const char *name;
                enum kvd_number type;
        } types[] = {{"F32", KVD_NUMBER_F32}, {"F16", KVD_NUMBER_F16}, {"BF16", KVD_NUMBER_BF16}};

        for (size_t i = 0; i < ARRAY_SIZE(types); i++)
                if (json_says(value, types[i].name)) {
                        *ret = types[i].type;
                        return 0;
                }
        return -EINVAL;
}

/* Reads an array of exactly n whole numbers. */
static int read_numbers(const json_t *array, uint32_t n, uint64_t *ret) {
        if (json_array_size(array) != n)
                return -EINVAL;
        for (uint32_t i = 0; i < n; i++)
                if (json_whole(json_array_get(array, i), ret + i) < 0)
                        return -EINVAL;
        return 0;
}

static size_t number_bytes(enum kvd_number type) {
        return type == KVD_NUMBER_F32 ? 4 : 2;
}

int safetensors_find(const struct safetensors *s, const char *name, uint32_t rows, uint32_t columns,
                     struct tensor *ret) {
        const json_t *header = json_object_get(s->header, name);
        uint64_t shape[2], offsets[2], bytes;
        uint32_t n_dims = rows ? 2 : 1;

        if (!header)
                return refuse(-ENOENT, FILE_NAME " has no tensor %s: is this a Llama model?", name);
        if (read_type(json_object_get(header, "dtype"), &ret->type) < 0)
                return refuse(-EINVAL, "tensor %s: its type is none of F32, F16, BF16", name);
        if (read_numbers(json_object_get(header, "shape"), n_dims, shape) < 0 ||
            shape[n_dims - 1] != columns || (rows && shape[0] != rows))
                return refuse(
                        -EINVAL,
                        "tensor %s: its shape is not the one that config.json implies (%u x %u)",
                        name, MAX(rows, 1), columns);
        /* below 2^64, and so is the next product: sizes are below 2^24 */
        bytes = (uint64_t)MAX(rows, 1) * columns;
        bytes *= number_bytes(ret->type);
        if (read_numbers(json_object_get(header, "data_offsets"), 2, offsets) < 0 ||
            offsets[0] > offsets[1] || offsets[1] > s->data_size ||
            offsets[1] - offsets[0] != bytes)
                return refuse(-EINVAL,
                              "tensor %s: its data is not inside " FILE_NAME
                              " (is the file cut short?)",
                              name);
        ret->data = s->data + offsets[0];
        ret->rows = MAX(rows, 1);
        ret->columns = columns;
        return 0;
}

void tensor_read(const struct tensor *t, const struct kvd_ops *ops, uint32_t first, uint32_t n,
                 float *to) {
        size_t row_bytes = t->columns * number_bytes(t->type), count = (size_t)n * t->columns;
        const uint8_t *from = t->data + first * row_bytes;
        uint16_t aligned[256];

        if (t->type == KVD_NUMBER_F32) {
                memcpy(to, from, count * sizeof *to);
                return;
        }
        for (size_t i = 0, part; i < count; i += part) {
                part = MIN(count - i, ARRAY_SIZE(aligned));
                memcpy(aligned, from + i * sizeof *aligned, part * sizeof *aligned);
                ops->widen(to + i, aligned, part, t->type);
        }
}
