/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The file is "\x93NUMPY", two bytes of version, the length of the header (2 bytes in version 1, else 4), a header that
 * is a Python dictionary, and the bytes of the array. numpy writes the dictionary in one way, so that it is enough to
 * look for the keys; anything else is refused.
 */

#include "tools/kvctl/npy.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"

#define MAGIC "\x93NUMPY"
#define HEADER_MAX 4096u
#define ALIGN 64u

static const struct {
        const char *name, *code;
        size_t size;
} types[NPY_TYPES] = {
        [NPY_F32] = {"float32", "<f4", 4}, [NPY_F64] = {"float64", "<f8", 8}, [NPY_F16] = {"float16", "<f2", 2},
        [NPY_BF16] = {"bf16", "<u2", 2},   [NPY_U8] = {"uint8", "|u1", 1},    [NPY_I8] = {"int8", "|i1", 1},
        [NPY_U16] = {"uint16", "<u2", 2},  [NPY_I16] = {"int16", "<i2", 2},   [NPY_U32] = {"uint32", "<u4", 4},
        [NPY_I32] = {"int32", "<i4", 4},   [NPY_U64] = {"uint64", "<u8", 8},  [NPY_I64] = {"int64", "<i8", 8},
};

const char *npy_type_name(enum npy_type type) {
        return types[type].name;
}

size_t npy_type_size(enum npy_type type) {
        return types[type].size;
}

size_t npy_bytes(const struct npy *array) {
        return array->count * types[array->type].size;
}

const char *npy_shape_text(const struct npy *array, char text[NPY_SHAPE_TEXT]) {
        size_t n = (size_t)snprintf(text, NPY_SHAPE_TEXT, "(");

        for (uint32_t i = 0; i < array->rank; i++)
                n += (size_t)snprintf(text + n, NPY_SHAPE_TEXT - n, "%s%llu", i ? ", " : "",
                                      (unsigned long long)array->shape[i]);
        snprintf(text + n, NPY_SHAPE_TEXT - n, array->rank == 1 ? ",)" : ")");
        return text;
}

int npy_new(enum npy_type type, uint32_t rank, const uint64_t *shape, struct npy *ret) {
        struct npy array = {.type = type, .rank = rank, .count = 1};

        for (uint32_t i = 0; i < rank; i++) {
                array.shape[i] = shape[i];
                if (__builtin_mul_overflow(array.count, shape[i], &array.count))
                        return -EOVERFLOW;
        }
        if (array.count > (SIZE_MAX / 2) / types[type].size)
                return -EOVERFLOW;
        array.data = aligned_alloc(ALIGN, ALIGN_UP(MAX(npy_bytes(&array), 1u), ALIGN));
        if (!array.data)
                return -ENOMEM;
        memset(array.data, 0, npy_bytes(&array));
        *ret = array;
        return 0;
}

void npy_clear(struct npy *array) {
        free(array->data);
        *array = (struct npy){0};
}

/* ---- the header ------------------------------------------------------------------------------------------------- */

/* Behind 'key': in the dictionary, or NULL. */
static const char *value_of(const char *header, const char *key) {
        char quoted[32];
        const char *at;

        snprintf(quoted, sizeof quoted, "'%s':", key);
        at = strstr(header, quoted);
        return at ? at + strlen(quoted) + strspn(at + strlen(quoted), " ") : NULL;
}

static bool read_type(const char *header, enum npy_type *ret) {
        const char *code = value_of(header, "descr");

        if (!code || *code != '\'')
                return false;
        if (strncmp(code, "'|b1'", 5) == 0) {
                *ret = NPY_U8;
                return true;
        }
        for (int i = 0; i < NPY_TYPES; i++)
                if (i != NPY_BF16 && strncmp(code + 1, types[i].code, 3) == 0 && code[4] == '\'') {
                        *ret = (enum npy_type)i;
                        return true;
                }
        return false;
}

static bool read_shape(const char *header, struct npy *array) {
        const char *at = value_of(header, "shape");
        char *end;

        if (!at || *at++ != '(')
                return false;
        for (; *at != ')'; at = end + strspn(end, ", ")) {
                if (array->rank == NPY_RANK_MAX || !isdigit((unsigned char)*at))
                        return false;
                errno = 0;
                array->shape[array->rank++] = strtoull(at, &end, 10);
                if (errno || (*end != ',' && *end != ')'))
                        return false;
        }
        return true;
}

static const char *read_header(FILE *file, struct npy *ret) {
        unsigned char start[12];
        char header[HEADER_MAX + 1];
        struct npy array = {0};
        const char *order;
        size_t rest, length;

        if (fread(start, 1, 10, file) != 10 || memcmp(start, MAGIC, 6) != 0)
                return "is not an .npy file";
        rest = start[6] == 1 ? 0 : 2;
        if (start[6] < 1 || start[6] > 3 || fread(start + 10, 1, rest, file) != rest)
                return "has a version that is not known";
        length = start[8] | (size_t)start[9] << 8 | (rest ? (size_t)start[10] << 16 | (size_t)start[11] << 24 : 0);
        if (length > HEADER_MAX || fread(header, 1, length, file) != length)
                return "has a header that is too long, or ends in it";
        header[length] = 0;
        order = value_of(header, "fortran_order");
        if (!read_type(header, &array.type))
                return "has elements of a type that is not supported: little-endian floats and integers are";
        if (!read_shape(header, &array))
                return "has a shape that cannot be read";
        if (!order || (strncmp(order, "False", 5) != 0 && array.rank > 1))
                return "is in Fortran order: save numpy.ascontiguousarray() of it";
        *ret = array;
        return NULL;
}

/* ---- files ------------------------------------------------------------------------------------------------------ */

static void fclosep(FILE **file) {
        if (*file)
                fclose(*file);
}

_printf_(4, 5) static int fail(int error, char *why, size_t size, const char *format, ...) {
        va_list list;

        va_start(list, format);
        vsnprintf(why, size, format, list);
        va_end(list);
        return error;
}

int npy_load(const char *path, struct npy *ret, char *why, size_t why_size) {
        _cleanup_(fclosep) FILE *file = fopen(path, "rb");
        struct npy head = {0}, array;
        const char *wrong;
        int r;

        if (!file)
                return fail(-errno, why, why_size, "%s: %s", path, strerror(errno));
        wrong = read_header(file, &head);
        if (wrong)
                return fail(-EBADMSG, why, why_size, "%s %s", path, wrong);
        r = npy_new(head.type, head.rank, head.shape, &array);
        if (r < 0)
                return fail(r, why, why_size, "%s: %s", path, strerror(-r));
        if (fread(array.data, 1, npy_bytes(&array), file) != npy_bytes(&array) || fgetc(file) != EOF) {
                npy_clear(&array);
                return fail(-EBADMSG, why, why_size, "%s is shorter or longer than its header says", path);
        }
        *ret = array;
        return 0;
}

/* The array begins at a multiple of 64 bytes, as numpy has it. */
static bool write_header(FILE *file, const struct npy *array) {
        char shape[NPY_SHAPE_TEXT], header[384];
        size_t length, whole;

        length = (size_t)snprintf(header, sizeof header, "{'descr': '%s', 'fortran_order': False, 'shape': %s, }",
                                  types[array->type].code, npy_shape_text(array, shape));
        whole = ALIGN_UP(10 + length + 1, ALIGN) - 10;
        return fprintf(file, "%s%c%c%c%c%-*s\n", MAGIC, 1, 0, (int)(whole & 0xff), (int)(whole >> 8),
                       (int)(whole - 1), header) > 0;
}

int npy_save(const char *path, const struct npy *array, char *why, size_t why_size) {
        FILE *file = fopen(path, "wb");
        bool written;

        if (!file)
                return fail(-errno, why, why_size, "%s: %s", path, strerror(errno));
        errno = EIO;
        written = write_header(file, array) && fwrite(array->data, 1, npy_bytes(array), file) == npy_bytes(array);
        if (fclose(file) != 0 || !written)
                return fail(-errno, why, why_size, "%s: cannot write: %s", path, strerror(errno));
        return 0;
}
