/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Runs a chunk of a causal sequence through all layers on a GPU. It launches the same computation
 * as pass.c, in the same order and with the same rounding of keys and values, and waits only for
 * logits.
 */

#include "tools/kvlm/device_forward.h"

#include <errno.h>
#include <math.h>

#include "ipc/base/util.h"
#include "kernels/cuda/attend.h"
#include "kernels/cuda/engine.h"
#include "tools/kvlm/device_inputs.h"
#include "tools/kvlm/refuse.h"

enum {
        /* rows of every product: no slower than one row as long as loading the weights dominates */
        ROWS = 64,
        SPLIT = 256, /* positions per thread block in a decoding step */
        /*
         * the same in other steps: larger, since each piece of each token needs memory for its sums
         */
        PROMPT_SPLIT = 2048,
};

struct device_forward {
        struct device *device;
        const struct device_model *model;
        struct block_shape shape;
        uint32_t max_rows; /* a multiple of ROWS */
        struct device_inputs *inputs;

        cu_address rows; /* contains all of the following */
        cu_address x, normed, qkv, mixed, change, gate_up, active, logits;
        cu_address workspace; /* for attention */
        uint64_t room;

        /* of the step in progress */
        const struct step *step;
        struct gpu_blocks blocks;
        uint32_t skipped; /* rows of the first product before the first token */
        /* rows of the products: skipped, tokens, and padding to a multiple of ROWS */
        uint32_t n_rows;
};

static uint32_t q_width(const struct config *c) {
        return c->heads * c->head_dim;
}

static uint32_t qkv_width(const struct config *c) {
        return (c->heads + 2 * c->kv_heads) * c->head_dim;
}

static uint32_t number_bytes(uint32_t number) {
        return number == KVD_NUMBER_F32 ? 4 : 2;
}

static int check(struct device_forward *f, int error) {
        return error < 0 ? device_failed(f->device, error) : 0;
}

/* The address of the step's first token in memory with rows of row_bytes bytes. */
static cu_address from_first(const struct device_forward *f, cu_address rows, size_t row_bytes) {
        return rows + f->skipped * row_bytes;
}

/* ---- products ---- */

static int multiply(struct device_forward *f, cu_address to, cu_address from, cu_address matrix,
                    uint32_t n_in, uint32_t n_out) {
        uint32_t number = device_number(f->device);
        int r = 0;

        for (uint64_t row = 0; r == 0 && row < f->n_rows; row += ROWS) {
                const struct gpu_product p = {
                        .to = to + row * n_out * 4,
                        .from = from + row * n_in * number_bytes(number),
                        .matrix = matrix,
                        .rows = ROWS,
                        .n_in = n_in,
                        .n_out = n_out,
                        .ld_to = n_out,
                        .ld_from = n_in,
                        .number = number,
                        .tf32 = f->device->options.products == PRODUCTS_TF32,
                };

                r = gpu_multiply(&f->device->blas, &p);
        }
        return r;
}

/* ---- one layer ---- */

/* x += change (0: none), and then its norm. */
static int norm(struct device_forward *f, cu_address change, cu_address weights) {
        const struct config *c = &f->model->config;
        size_t row = 4 * (size_t)c->hidden;
        uint32_t number = device_number(f->device);
        const struct gpu_norm a = {
                .to = from_first(f, f->normed, (size_t)c->hidden * number_bytes(number)),
                .x = from_first(f, f->x, row),
                .change = change ? from_first(f, change, row) : 0,
                .weights = weights,
                .n = f->step->n,
                .width = c->hidden,
                .to_number = number,
                .eps = c->norm_eps,
        };

        return gpu_norm(&f->device->gpu, f->device->stream, &a);
}

static int rotate(struct device_forward *f, uint32_t layer) {
        const struct config *c = &f->model->config;
        const struct block_shape *s = &f->shape;
        const struct gpu_rotate a = {
                .qkv = from_first(f, f->qkv, 4 * (size_t)qkv_width(c)),
                .cosine = f->inputs->cosine,
                .sine = f->inputs->sine,
                .blocks = f->blocks,
                .k_offset = 2 * layer * s->plane_bytes,
                .v_offset = (2 * layer + 1) * s->plane_bytes,
                .head_stride = s->head_bytes,
                .slot_stride = s->row_bytes,
                .n = f->step->n,
                .first = f->step->first,
                .stored = f->step->view.stored,
                .heads = c->heads,
                .kv_heads = c->kv_heads,
                .half = c->head_dim / 2,
                .block_tokens = s->tokens,
                .number = s->type,
        };

        return gpu_rotate(&f->device->gpu, f->device->stream, &a);
}

/* Whether the step is a single token whose positions are divided among thread blocks. */
static bool splits(const struct device_forward *f) {
        return f->step->decoding && f->step->n == 1 && f->device->options.decode == DECODE_FAST;
}

static struct gpu_attend attention(const struct device_forward *f, uint32_t layer) {
        const struct config *c = &f->model->config;
        const struct block_shape *s = &f->shape;
        uint32_t number = device_number(f->device);

        return (struct gpu_attend){
                .blocks = f->blocks,
                .ld_blocks = DIV_UP(f->step->first + f->step->n, s->tokens),
                .k_offset = 2 * layer * s->plane_bytes,
                .v_offset = (2 * layer + 1) * s->plane_bytes,
                .head_stride = s->head_bytes,
                .token_stride = s->row_bytes,
                .number = s->type,
                .block_tokens = s->tokens,
                .dim = c->head_dim,
                .kv_heads = c->kv_heads,
                .group = c->heads / c->kv_heads,
                .n_sequences = 1,
                .max_length = f->step->first + f->step->n,
                .lengths = f->inputs->length,
                .starts = splits(f) ? 0 : f->inputs->starts,
                .max_tokens = f->step->n,
                .q_number = KVD_NUMBER_F32,
                .out_number = number,
                .scale = 1.0f / sqrtf((float)c->head_dim),
                .q = from_first(f, f->qkv, 4 * (size_t)qkv_width(c)),
                .q_token = qkv_width(c),
                .q_head = c->head_dim,
                .out = from_first(f, f->mixed, (size_t)q_width(c) * number_bytes(number)),
                .out_token = q_width(c),
                .out_head = c->head_dim,
                .split = splits(f) ? SPLIT : PROMPT_SPLIT,
                .workspace = f->workspace,
                .workspace_bytes = f->room,
        };
}

static int attend(struct device_forward *f, uint32_t layer) {
        const struct gpu_attend a = attention(f, layer);

        return splits(f) ? gpu_attend_decode(&f->device->gpu, f->device->stream, &a) :
                           gpu_attend_prefill(&f->device->gpu, f->device->stream, &a);
}

static int attention_part(struct device_forward *f, uint32_t layer) {
        const struct config *c = &f->model->config;
        const struct device_layer *l = f->model->layers + layer;
        int r = norm(f, layer > 0 ? f->change : 0, l->attention_norm);

        if (r == 0)
                r = multiply(f, f->qkv, f->normed, l->qkv, c->hidden, qkv_width(c));
        if (r == 0)
                r = rotate(f, layer);
        if (r == 0)
                r = attend(f, layer);
        return r < 0 ? r : multiply(f, f->change, f->mixed, l->output, q_width(c), c->hidden);
}

static int ffn_part(struct device_forward *f, uint32_t layer) {
        const struct config *c = &f->model->config;
        const struct device_layer *l = f->model->layers + layer;
        uint32_t number = device_number(f->device);
        const struct gpu_swiglu swiglu = {
                .to = from_first(f, f->active, (size_t)c->ffn * number_bytes(number)),
                .gate_up = from_first(f, f->gate_up, 8 * (size_t)c->ffn),
                .n = f->step->n,
                .width = c->ffn,
                .to_number = number,
        };
        int r = norm(f, f->change, l->ffn_norm);

        if (r == 0)
                r = multiply(f, f->gate_up, f->normed, l->gate_up, c->hidden, 2 * c->ffn);
        if (r == 0)
                r = gpu_swiglu(&f->device->gpu, f->device->stream, &swiglu);
        return r < 0 ? r : multiply(f, f->change, f->active, l->down, c->ffn, c->hidden);
}

/* ---- logits ---- */

/* Computes the rows of one product at a time, and copies those that are wanted to the host. */
static int logits(struct device_forward *f) {
        const struct config *c = &f->model->config;
        uint32_t number = device_number(f->device), end = f->skipped + f->step->n;
        uint32_t from = f->step->all_logits ? f->skipped : end - 1;
        float *to = f->step->logits;
        int r;

        if (!to)
                return 0;
        r = check(f, norm(f, f->change, f->model->norm));
        for (uint32_t tile = from / ROWS * ROWS; r == 0 && tile < end; tile += ROWS) {
                uint32_t first = MAX(from, tile), n = MIN(end, tile + ROWS) - first;
                const struct gpu_product p = {
                        .to = f->logits,
                        .from = f->normed + (uint64_t)tile * c->hidden * number_bytes(number),
                        .matrix = f->model->head,
                        .rows = ROWS,
                        .n_in = c->hidden,
                        .n_out = c->vocab,
                        .ld_to = c->vocab,
                        .ld_from = c->hidden,
                        .number = number,
                        .tf32 = f->device->options.products == PRODUCTS_TF32,
                };

                r = check(f, gpu_multiply(&f->device->blas, &p));
                if (r == 0)
                        r = device_read(f->device, to, f->logits + (first - tile) * 4ull * c->vocab,
                                        n * 4ull * c->vocab);
                to += (size_t)n * c->vocab;
        }
        return r;
}

/* ---- one step ---- */

static int embed(struct device_forward *f) {
        const struct config *c = &f->model->config;
        const struct gpu_embed a = {
                .to = from_first(f, f->x, 4 * (size_t)c->hidden),
                .table = f->model->embedding,
                .tokens = f->inputs->tokens,
                .n = f->step->n,
                .width = c->hidden,
                .number = device_number(f->device),
        };

        return gpu_embed(&f->device->gpu, f->device->stream, &a);
}

/* Grows the workspace by at least half, since sequences grow token by token. */
static int make_room(struct device_forward *f) {
        const struct gpu_attend a = attention(f, 0);
        uint64_t need = gpu_attend_workspace(&f->device->gpu, &a);
        int r;

        if (need <= f->room)
                return 0;
        r = device_wait(f->device);
        device_give(f->device, f->workspace);
        f->workspace = f->room = 0;
        need += need / 2;
        if (r == 0)
                r = device_take(f->device, need, "attention over that many tokens", &f->workspace);
        f->room = r == 0 ? need : 0;
        return r;
}

int device_forward_step(struct device_forward *f, const struct step *step) {
        int r;

        f->step = step;
        f->skipped = step->first % ROWS;
        f->n_rows = ALIGN_UP(f->skipped + step->n, ROWS);
        r = make_room(f);
        if (r == 0)
                r = device_inputs_send(f->inputs, step, &f->blocks);
        if (r < 0)
                return r;
        r = embed(f);
        for (uint32_t layer = 0; r == 0 && layer < f->model->config.layers; layer++) {
                r = attention_part(f, layer);
                if (r == 0)
                        r = ffn_part(f, layer);
        }
        return r < 0 ? check(f, r) : logits(f);
}

/* ---- life ---- */

static size_t place(size_t *used, size_t bytes) {
        size_t at = *used;

        *used += ALIGN_UP(bytes, 256);
        return at;
}

static int allocate_rows(struct device_forward *f) {
        const struct config *c = &f->model->config;
        uint32_t number = number_bytes(device_number(f->device));
        struct {
                cu_address *at;
                size_t row; /* bytes */
                uint32_t rows;
        } parts[] = {
                {&f->x, 4 * (size_t)c->hidden, f->max_rows},
                {&f->normed, (size_t)number * c->hidden, f->max_rows},
                {&f->qkv, 4 * (size_t)qkv_width(c), f->max_rows},
                {&f->mixed, (size_t)number * q_width(c), f->max_rows},
                {&f->change, 4 * (size_t)c->hidden, f->max_rows},
                {&f->gate_up, 8 * (size_t)c->ffn, f->max_rows},
                {&f->active, (size_t)number * c->ffn, f->max_rows},
                {&f->logits, 4 * (size_t)c->vocab, ROWS},
        };
        size_t used = 0;
        int r;

        for (size_t i = 0; i < ARRAY_SIZE(parts); i++)
                *parts[i].at = place(&used, parts[i].row * parts[i].rows);
        r = device_take(f->device, used, "too many tokens at a time (--chunk)", &f->rows);
        for (size_t i = 0; i < ARRAY_SIZE(parts); i++)
                *parts[i].at += f->rows;
        return r;
}

int device_forward_new(struct device *device, const struct device_model *model,
                       const struct block_shape *shape, uint32_t chunk,
                       struct device_forward **ret) {
        struct device_forward *f = calloc(1, sizeof *f);
        int r;

        if (!f)
                return refuse(-ENOMEM, "out of memory");
        *f = (struct device_forward){.device = device, .model = model, .shape = *shape};
        f->max_rows = ALIGN_UP(chunk + ROWS - 1, ROWS);
        r = device_inputs_new(device, &model->config, shape, chunk, &f->inputs);
        if (r == 0)
                r = allocate_rows(f);
        if (r < 0) {
                device_forward_free(f);
                return r;
        }
        *ret = f;
        return 0;
}

struct device_forward *device_forward_free(struct device_forward *f) {
        if (!f)
                return NULL;
        device_finish(f->device);
        device_inputs_free(f->inputs);
        device_give(f->device, f->workspace);
        device_give(f->device, f->rows);
        free(f);
        return NULL;
}
