/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Like model.c, runs the same list of weights twice: first to add up their size, then to fill the
 * memory.
 */

#include "tools/kvlm/device_model.h"

#include <errno.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvlm/refuse.h"

enum { ALIGNMENT = 256 };

struct upload {
        struct device *device;
        const struct kvd_ops *ops;
        uint32_t number;
        uint64_t used;
        cu_address memory; /* 0: only count */
        float *rows; /* room for the largest matrix, row by row; its size is counted in largest */
        size_t largest;
};

static cu_address take(struct upload *u, size_t numbers, uint32_t number) {
        cu_address at = u->memory ? u->memory + u->used : 0;

        u->used += ALIGN_UP(numbers * (number == KVD_NUMBER_F32 ? 4 : 2), ALIGNMENT);
        u->largest = MAX(u->largest, numbers);
        return at;
}

/*
 * Sends u->rows to the device, narrowed in place: the write position is never ahead of the read
 * position.
 */
static int send(struct upload *u, cu_address to, size_t numbers, uint32_t number) {
        if (number != KVD_NUMBER_F32)
                u->ops->narrow((uint16_t *)u->rows, u->rows, numbers, number);
        return device_write(u->device, to, u->rows, numbers * (number == KVD_NUMBER_F32 ? 4 : 2));
}

static int plain(struct upload *u, const float *from, uint32_t rows, uint32_t columns,
                 uint32_t number, cu_address *ret) {
        size_t numbers = (size_t)rows * columns;

        *ret = take(u, numbers, number);
        if (!u->memory)
                return 0;
        memcpy(u->rows, from, numbers * sizeof *from);
        return send(u, *ret, numbers, number);
}

/* Unpacks a matrix that is packed in panels of 16 interleaved rows (kernels/ops.h). */
static int packed(struct upload *u, const float *from, uint32_t rows, uint32_t columns,
                  cu_address *ret) {
        *ret = take(u, (size_t)rows * columns, u->number);
        if (!u->memory)
                return 0;
        for (uint32_t row = 0; row < rows; row++) {
                const float *lane = from + (size_t)(row / KVD_PANEL) * KVD_PANEL * columns +
                                    row % KVD_PANEL;

                for (size_t d = 0; d < columns; d++)
                        u->rows[(size_t)row * columns + d] = lane[d * KVD_PANEL];
        }
        return send(u, *ret, (size_t)rows * columns, u->number);
}

static int upload_layer(struct upload *u, const struct config *c, const struct layer *from,
                        struct device_layer *to) {
        uint32_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
        int r = plain(u, from->attention_norm, 1, c->hidden, KVD_NUMBER_F32, &to->attention_norm);

        if (r == 0)
                r = packed(u, from->qkv, q + 2 * kv, c->hidden, &to->qkv);
        if (r == 0)
                r = packed(u, from->output, c->hidden, q, &to->output);
        if (r == 0)
                r = plain(u, from->ffn_norm, 1, c->hidden, KVD_NUMBER_F32, &to->ffn_norm);
        if (r == 0)
                r = packed(u, from->gate_up, 2 * c->ffn, c->hidden, &to->gate_up);
        return r < 0 ? r : packed(u, from->down, c->hidden, c->ffn, &to->down);
}

static int upload_all(struct upload *u, const struct model *from, struct device_model *to) {
        const struct config *c = &from->config;
        int r;

        u->used = 0;
        r = plain(u, from->embedding, c->vocab, c->hidden, u->number, &to->embedding);
        if (r == 0)
                r = plain(u, from->norm, 1, c->hidden, KVD_NUMBER_F32, &to->norm);
        if (r == 0 && c->tied)
                to->head = to->embedding;
        else if (r == 0)
                r = packed(u, from->head, c->vocab, c->hidden, &to->head);
        for (uint32_t i = 0; r == 0 && i < c->layers; i++)
                r = upload_layer(u, c, from->layers + i, to->layers + i);
        return r;
}

static int upload(struct upload *u, const struct model *from, struct device_model *to) {
        int r;

        upload_all(u, from, to);
        to->bytes = u->used;
        r = device_take(u->device, to->bytes, "the model is too large", &to->weights);
        if (r < 0)
                return r;
        u->memory = to->weights;
        u->rows = malloc(u->largest * sizeof *u->rows);
        r = u->rows ? upload_all(u, from, to) : refuse(-ENOMEM, "out of memory");
        free(u->rows);
        return r;
}

int device_model_new(struct device *device, const struct model *model, struct device_model **ret) {
        struct upload u = {.device = device,
                           .ops = kvd_ops_pick(NULL),
                           .number = device_number(device)};
        struct device_model *m = calloc(1, sizeof *m);
        int r;

        if (m)
                m->layers = calloc(model->config.layers, sizeof *m->layers);
        if (!m || !m->layers) {
                free(m);
                return refuse(-ENOMEM, "out of memory");
        }
        m->config = model->config;
        r = upload(&u, model, m);
        if (r < 0) {
                device_model_free(device, m);
                return r;
        }
        *ret = m;
        return 0;
}

struct device_model *device_model_free(struct device *device, struct device_model *m) {
        if (!m)
                return NULL;
        device_give(device, m->weights);
        free(m->layers);
        free(m);
        return NULL;
}
