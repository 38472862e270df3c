/* SPDX-License-Identifier: Apache-2.0 */
/* compute: arrays and parameters against a row */
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvctl/compute_frame.h"

int compute_fail(struct compute *c, const char *format, ...) {
        va_list list;

        va_start(list, format);
        vsnprintf(c->private->why, sizeof c->private->why, format, list);
        va_end(list);
        return -EINVAL;
}

void *compute_scratch(struct compute *c, size_t bytes) {
        struct compute_private *private = c->private;
        void *memory = NULL;

        if (private->n_scratch < ARRAY_SIZE(private->scratch))
                memory = aligned_alloc(64, ALIGN_UP(MAX(bytes, 1u), 64u));
        if (!memory) {
                compute_fail(c, "out of memory");
                return NULL;
        }
        private->scratch[private->n_scratch++] = memory;
        return memset(memory, 0, bytes);
}

void compute_clear(struct compute *c) {
        for (unsigned i = 0; i < COMPUTE_INPUTS; i++)
                npy_clear(&c->in[i]);
        for (unsigned i = 0; i < COMPUTE_OUTPUTS; i++)
                npy_clear(&c->out[i]);
        while (c->private->n_scratch)
                free(c->private->scratch[--c->private->n_scratch]);
}

unsigned compute_count_inputs(const struct compute_row *row, bool required) {
        unsigned n = 0;

        while (n < COMPUTE_INPUTS && row->in[n].name && !(required && row->in[n].types & COMPUTE_OPTIONAL))
                n++;
        return n;
}

unsigned compute_count_outputs(const struct compute_row *row) {
        unsigned n = 0;

        while (n < COMPUTE_OUTPUTS && row->out[n].name)
                n++;
        return n;
}

/* ---- sizes ------------------------------------------------------------------------------------------------------ */

/* The index of a size, or n_sizes. */
static unsigned find_size(const struct compute *c, const char *name, size_t length) {
        const struct compute_private *private = c->private;
        unsigned i = 0;

        while (i < private->n_sizes && (strncmp(private->sizes[i].name, name, length) != 0 ||
                                        private->sizes[i].name[length]))
                i++;
        return i;
}

uint64_t compute_size(const struct compute *c, const char *name) {
        unsigned i = find_size(c, name, strlen(name));

        if (i == c->private->n_sizes)
                abort();
        return c->private->sizes[i].size;
}

static int bind_size(struct compute *c, const char *name, size_t length, uint64_t size, const char *owner) {
        struct compute_private *private = c->private;
        unsigned i = find_size(c, name, length);

        if (i < private->n_sizes && private->sizes[i].size != size)
                return compute_fail(c, "\"%s\" is %llu in %s, and %llu in %s", private->sizes[i].name,
                                    (unsigned long long)private->sizes[i].size, private->sizes[i].owner,
                                    (unsigned long long)size, owner);
        if (i == private->n_sizes) {
                if (i == COMPUTE_SIZES || length >= sizeof private->sizes->name)
                        abort();
                memcpy(private->sizes[i].name, name, length);
                private->sizes[i].size = size;
                private->sizes[i].owner = owner;
                private->n_sizes++;
        }
        return 0;
}

/* The next name of a shape; 0 at its end. */
static size_t next_name(const char **shape) {
        *shape += **shape == ',';
        return strcspn(*shape, ",");
}

static uint32_t rank_of(const char *shape) {
        uint32_t rank = 0;
        size_t length;

        while ((length = next_name(&shape))) {
                shape += length;
                rank++;
        }
        return rank;
}

/* ---- inputs ----------------------------------------------------------------------------------------------------- */

static int check_type(struct compute *c, unsigned i) {
        static const enum kvd_number numbers[] = {[NPY_F32] = KVD_NUMBER_F32, [NPY_F16] = KVD_NUMBER_F16,
                                                  [NPY_BF16] = KVD_NUMBER_BF16};
        unsigned types = c->row->in[i].types & ~COMPUTE_OPTIONAL;
        const char *name = c->row->in[i].name;
        enum npy_type type = c->in[i].type;

        if (types == COMPUTE_NUMBER && type == NPY_U16)
                return compute_fail(c, "%s is uint16; if that is bf16, say --type bf16", name);
        if (!(types & COMPUTE_IS(type)))
                return compute_fail(c, "%s cannot be %s; \"kvctl compute %s --help\" has its types", name,
                                    npy_type_name(type), c->row->name);
        if (types != COMPUTE_NUMBER)
                return 0;
        if (c->type && c->type != numbers[type])
                return compute_fail(c, "%s is %s, unlike the arrays before it", name, npy_type_name(type));
        c->type = numbers[type];
        return 0;
}

static int bind_shape(struct compute *c, unsigned i) {
        const struct npy *array = &c->in[i];
        const char *shape = c->row->in[i].shape;
        char text[NPY_SHAPE_TEXT];

        if (rank_of(shape) != array->rank)
                return compute_fail(c, "%s has the shape %s, not (%s)", c->row->in[i].name,
                                    npy_shape_text(array, text), shape);
        for (uint32_t d = 0; d < array->rank; d++) {
                size_t length = next_name(&shape);
                int r = bind_size(c, shape, length, array->shape[d], c->row->in[i].name);

                if (r < 0)
                        return r;
                shape += length;
        }
        return 0;
}

int compute_bind_inputs(struct compute *c) {
        for (unsigned i = 0; i < compute_count_inputs(c->row, false); i++) {
                int r = c->in[i].data ? check_type(c, i) : 0;

                if (r == 0 && c->in[i].data)
                        r = bind_shape(c, i);
                if (r < 0)
                        return r;
        }
        return 0;
}

/* ---- outputs ---------------------------------------------------------------------------------------------------- */

static enum npy_type type_of_output(const struct compute *c, unsigned i) {
        static const enum npy_type of_number[] = {[KVD_NUMBER_F32] = NPY_F32, [KVD_NUMBER_F16] = NPY_F16,
                                                  [KVD_NUMBER_BF16] = NPY_BF16};
        unsigned type = c->row->out[i].type;

        if (type == COMPUTE_LIKE_NUMBER)
                return of_number[c->type];
        return type == COMPUTE_LIKE_FIRST ? c->in[0].type : (enum npy_type)type;
}

int compute_make(struct compute *c, unsigned i, uint32_t rank, const uint64_t *shape) {
        int r = npy_new(type_of_output(c, i), rank, shape, &c->out[i]);

        return r < 0 ? compute_fail(c, "%s: %s", c->row->out[i].name, strerror(-r)) : 0;
}

/* 1: not all of its sizes are known. */
static int make_output(struct compute *c, unsigned i) {
        const char *at = c->row->out[i].shape;
        uint64_t shape[NPY_RANK_MAX];
        uint32_t rank = rank_of(at);

        for (uint32_t d = 0; d < rank; d++) {
                size_t length = next_name(&at);
                unsigned known = find_size(c, at, length);

                if (known == c->private->n_sizes)
                        return 1;
                shape[d] = c->private->sizes[known].size;
                at += length;
        }
        return compute_make(c, i, rank, shape);
}

int compute_bind_outputs(struct compute *c) {
        for (unsigned i = 0; i < compute_count_outputs(c->row); i++)
                if (make_output(c, i) < 0)
                        return -EINVAL;
        return 0;
}

/* ---- parameters ------------------------------------------------------------------------------------------------- */

static unsigned find_param(const struct compute *c, const char *name, size_t length) {
        unsigned i = 0;

        while (i < COMPUTE_PARAMS && c->row->param[i].name &&
               (strlen(c->row->param[i].name) != length || strncmp(c->row->param[i].name, name, length) != 0))
                i++;
        return i < COMPUTE_PARAMS && c->row->param[i].name ? i : COMPUTE_PARAMS;
}

double compute_number(const struct compute *c, const char *name) {
        unsigned i = find_param(c, name, strlen(name));

        if (i == COMPUTE_PARAMS)
                abort();
        return c->private->value[i];
}

uint64_t compute_whole(const struct compute *c, const char *name) {
        return (uint64_t)compute_number(c, name);
}

unsigned compute_choice(const struct compute *c, const char *name) {
        return (unsigned)compute_number(c, name);
}

/* The index of a word of "a|b|c", or -1. */
static int find_word(const char *words, const char *word, size_t length) {
        for (int i = 0; *words; i++) {
                size_t n = strcspn(words, "|");

                if (n == length && strncmp(words, word, n) == 0)
                        return i;
                words += n + (words[n] == '|');
        }
        return -1;
}

static int read_param(struct compute *c, unsigned i, const char *text, size_t length) {
        const char *choices = c->row->param[i].choices, *name = c->row->param[i].name;
        bool whole = choices && strcmp(choices, "whole") == 0;
        char *end;
        double value;

        if (choices && !whole) {
                value = find_word(choices, text, length);
                if (value < 0)
                        return compute_fail(c, "%s is one of %s, not \"%.*s\"", name, choices, (int)length, text);
        } else {
                value = strtod(text, &end);
                if (length == 0 || end != text + length)
                        return compute_fail(c, "%s is a number, not \"%.*s\"", name, (int)length, text);
                if (whole && !(value >= 0 && value <= 0x1p53 && value == floor(value)))
                        return compute_fail(c, "%s is a whole number, not \"%.*s\"", name, (int)length, text);
        }
        c->private->value[i] = value;
        return whole ? bind_size(c, name, strlen(name), (uint64_t)value, "the parameters") : 0;
}

static int read_given(struct compute *c, const char *given, bool seen[COMPUTE_PARAMS]) {
        while (given && *given) {
                size_t length = strcspn(given, ","), name = strcspn(given, "=,");
                unsigned i = find_param(c, given, name);
                int r;

                if (i == COMPUTE_PARAMS)
                        return compute_fail(c, "%s has no parameter \"%.*s\"", c->row->name, (int)name, given);
                if (name == length || seen[i])
                        return compute_fail(c, "write a parameter once, as %.*s=VALUE", (int)name, given);
                r = read_param(c, i, given + name + 1, length - name - 1);
                if (r < 0)
                        return r;
                seen[i] = true;
                given += length + (given[length] == ',');
        }
        return 0;
}

int compute_bind_params(struct compute *c, const char *given) {
        bool seen[COMPUTE_PARAMS] = {0};
        int r = read_given(c, given, seen);

        for (unsigned i = 0; r == 0 && i < COMPUTE_PARAMS && c->row->param[i].name; i++) {
                const char *value = c->row->param[i].value;

                if (!seen[i] && !value)
                        r = compute_fail(c, "%s wants --param %s=VALUE: %s", c->row->name, c->row->param[i].name,
                                         c->row->param[i].text);
                else if (!seen[i])
                        r = read_param(c, i, value, strlen(value));
        }
        return r;
}
