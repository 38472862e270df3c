/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/vague.h"

#include <errno.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/sketch.h"
#include "tools/kvlm/note.h"
#include "tools/kvlm/quant.h"

enum { SKETCH_ROWS = 3 };

/* ---- life ---- */

static size_t number_bytes(const struct relief *r) {
        return r->setup.shape.type == KVD_NUMBER_F32 ? 4 : 2;
}

/* Floats of a cell, and numbers of a row. */
static uint32_t row_numbers(const struct relief *r) {
        return 2 * r->heads * r->setup.shape.head_dim;
}

static int allocate_layer(struct vague *v, const struct relief *r, struct vague_layer *l) {
        size_t capacity = r->setup.capacity;

        l->tokens = calloc(capacity, sizeof *l->tokens);
        l->index = calloc(capacity, sizeof *l->index);
        if (!l->tokens || !l->index)
                return -ENOMEM;
        if (v->sketch) {
                l->cells = calloc((size_t)v->rows * v->columns + 1, row_numbers(r) * sizeof *l->cells);
                l->places = calloc(capacity, v->rows * sizeof *l->places);
                if (r->m->reviver.keys == SKETCH_CENTRED)
                        l->mean = calloc(row_numbers(r) / 2, sizeof *l->mean);
                if (!l->cells || !l->places || (r->m->reviver.keys == SKETCH_CENTRED && !l->mean))
                        return -ENOMEM;
        } else {
                l->packed = calloc(capacity, v->packed_bytes);
                if (!l->packed)
                        return -ENOMEM;
        }
        if (r->m->reviver.spill)
                l->spilled = calloc(capacity, v->row_bytes);
        return r->m->reviver.spill && !l->spilled ? -ENOMEM : 0;
}

/* N = floor(share of the budget) cells, in rows. */
int vague_new(const struct relief *r, uint32_t limit, struct vague **ret) {
        struct vague *v = calloc(1, sizeof *v);
        uint32_t cells = (uint32_t)(r->m->reviver.vague * (float)r->budget + 1e-3f);
        int e = v ? 0 : -ENOMEM;

        if (v) {
                v->sketch = r->m->evict == EVICT_REVIVER;
                v->rows = SKETCH_ROWS;
                v->columns = cells == 0 ? 0 : MAX(cells / SKETCH_ROWS, 1);
                v->row_bytes = row_numbers(r) * number_bytes(r);
                v->packed_bytes = 2 * r->heads * quant_bytes(r->setup.shape.head_dim);
                v->limit = limit;
                v->layers = calloc(r->setup.layers, sizeof *v->layers);
                e = v->layers ? 0 : -ENOMEM;
        }
        for (uint32_t l = 0; e == 0 && l < r->setup.layers; l++)
                e = allocate_layer(v, r, v->layers + l);
        if (e < 0) {
                vague_free(v, r->setup.layers);
                return note(e, "out of memory for what is left of %u tokens", r->setup.capacity);
        }
        *ret = v;
        return 0;
}

struct vague *vague_free(struct vague *v, uint32_t layers) {
        for (uint32_t i = 0; v && v->layers && i < layers; i++) {
                struct vague_layer *l = v->layers + i;

                free(l->spilled);
                free(l->packed);
                free(l->places);
                free(l->mean);
                free(l->cells);
                free(l->index);
                free(l->tokens);
        }
        if (v)
                free(v->layers);
        free(v);
        return NULL;
}

uint64_t vague_bytes(const struct vague *v, const struct relief *r) {
        uint64_t cells = (uint64_t)v->rows * v->columns * row_numbers(r) * sizeof(float), bytes = 0;

        for (uint32_t l = 0; l < r->setup.layers; l++)
                bytes += v->sketch ? (v->layers[l].inserted ? cells : 0) : v->layers[l].n * v->packed_bytes;
        return bytes;
}

/* ---- the sketch ---- */

static struct kvd_sketch_part part(const struct vague *v, const struct relief *r, uint32_t layer, uint32_t head,
                                   bool value) {
        const struct vague_layer *l = v->layers + layer;
        uint32_t dim = r->setup.shape.head_dim, sign = r->m->reviver.keys == SKETCH_UNSIGNED ? 0 : KVD_SKETCH_KEY_SIGN;

        return (struct kvd_sketch_part){
                .cells = l->cells + ((value ? r->heads : 0) + head) * dim,
                .stride = row_numbers(r),
                .rows = v->rows,
                .columns = v->columns,
                .dim = dim,
                .sign = value ? KVD_SKETCH_VALUE_SIGN : sign,
                .mean = value || !l->mean ? NULL : l->mean + (size_t)head * dim,
        };
}

/* weight 1 or -1; row in the cache's type. */
static void add(struct vague *v, const struct relief *r, uint32_t layer, const uint32_t *places, const uint8_t *row,
                float weight) {
        uint8_t *const at = (uint8_t *)row; /* an insertion only reads */
        struct kvd_sketch_vectors x = {&at, 0, row_numbers(r), 1, r->setup.shape.type};

        for (uint32_t h = 0; h < r->heads; h++)
                for (uint32_t value = 0; value < 2; value++) {
                        const struct kvd_sketch_part p = part(v, r, layer, h, value);

                        x.offset = (2 * h + value) * r->setup.shape.head_dim * number_bytes(r);
                        r->setup.ops->sketch->insert(&p, places, 1, &x, weight);
                }
}

/* The paper hashes positions; permutations want the tokens of a sketch numbered as they come. */
static void find_places(struct vague *v, const struct relief *r, uint32_t layer, uint32_t token, uint32_t *to) {
        bool uniform = r->m->reviver.hash == SKETCH_UNIFORM;
        const struct kvd_sketch_hash hash = {
                .family = uniform ? KVD_SKETCH_UNIFORM : KVD_SKETCH_PERMUTATION,
                .rows = v->rows,
                .columns = v->columns,
                .salt = r->m->seed * 0x9e3779b97f4a7c15u + layer + 1,
        };
        uint64_t ordinal = uniform ? token : v->layers[layer].inserted;

        kvd_sketch_place(&hash, &ordinal, 1, to);
}

double vague_load(const struct vague *v, uint32_t layer) {
        const struct vague_layer *l = v->layers + layer;

        return v->sketch && v->columns ? (double)(l->inserted - l->deleted) / ((double)v->rows * v->columns) : 0.0;
}

bool vague_answers(const struct vague *v, const struct relief *r, uint32_t layer) {
        return !v->sketch || (v->columns > 0 && vague_load(v, layer) <= (double)r->m->reviver.max_load);
}

bool vague_wants_mean(const struct vague *v, const struct relief *r, uint32_t layer) {
        return v->layers[layer].mean && v->layers[layer].inserted == 0;
}

/* ---- tokens ---- */

static void widen(const struct relief *r, float *to, const uint8_t *from) {
        uint32_t dim = r->setup.shape.head_dim;

        if (r->setup.shape.type == KVD_NUMBER_F32)
                memcpy(to, from, dim * sizeof *to);
        else
                r->setup.ops->widen(to, (const uint16_t *)from, dim, r->setup.shape.type);
}

static void narrow(const struct relief *r, uint8_t *to, const float *from) {
        uint32_t dim = r->setup.shape.head_dim;

        if (r->setup.shape.type == KVD_NUMBER_F32)
                memcpy(to, from, dim * sizeof *from);
        else
                r->setup.ops->narrow((uint16_t *)to, from, dim, r->setup.shape.type);
}

static void pack(const struct vague *v, const struct relief *r, uint8_t *to, const uint8_t *row) {
        uint32_t dim = r->setup.shape.head_dim;
        float numbers[512];

        for (uint32_t i = 0; i < 2 * r->heads; i++)
                if (dim <= ARRAY_SIZE(numbers)) {
                        widen(r, numbers, row + (size_t)i * dim * number_bytes(r));
                        quant_pack(r->setup.ops, to + i * quant_bytes(dim), numbers, dim);
                }
}

void vague_put(struct vague *v, const struct relief *r, uint32_t layer, uint32_t token, const uint8_t *row) {
        struct vague_layer *l = v->layers + layer;

        l->index[token] = l->n;
        l->tokens[l->n] = token;
        if (v->sketch && v->columns > 0) {
                find_places(v, r, layer, token, l->places + (size_t)l->n * v->rows);
                add(v, r, layer, l->places + (size_t)l->n * v->rows, row, 1.0f);
                l->inserted++;
        } else if (!v->sketch) {
                pack(v, r, l->packed + l->n * v->packed_bytes, row);
        }
        l->n++;
        if (l->spilled)
                memcpy(l->spilled + token * v->row_bytes, row, v->row_bytes);
}

/* What is left in the sketch without being listed is a tombstone: nobody asks for it, it only disturbs. */
void vague_remove(struct vague *v, const struct relief *r, uint32_t layer, uint32_t token) {
        struct vague_layer *l = v->layers + layer;
        uint32_t i = l->index[token], last = --l->n;

        l->tokens[i] = l->tokens[last];
        l->index[l->tokens[i]] = i;
        if (v->sketch)
                memmove(l->places + (size_t)i * v->rows, l->places + (size_t)last * v->rows,
                        v->rows * sizeof *l->places);
        else
                memmove(l->packed + i * v->packed_bytes, l->packed + last * v->packed_bytes, v->packed_bytes);
}

/* Takes it out of the sketch as the methods say; the token is still listed. */
static void delete(struct vague *v, const struct relief *r, uint32_t layer, uint32_t token, const uint8_t *row,
                   bool exact) {
        struct vague_layer *l = v->layers + layer;
        enum sketch_delete how = r->m->reviver.delete;

        if (v->columns == 0 || how == DELETE_TOMBSTONE || (how == DELETE_EXACT && !exact))
                return;
        add(v, r, layer, l->places + (size_t)l->index[token] * v->rows, row, -1.0f);
        l->deleted++;
}

static void estimate(const struct vague *v, const struct relief *r, uint32_t layer, uint32_t token, uint8_t *row) {
        uint32_t dim = r->setup.shape.head_dim, places[SKETCH_ROWS];
        size_t bytes = dim * number_bytes(r);
        float key[512], value[512];

        for (uint32_t h = 0; h < r->heads; h++, row += 2 * bytes) {
                vague_read(v, r, layer, h, &token, 1, key, value, places);
                narrow(r, row, key);
                narrow(r, row + bytes, value);
        }
}

bool vague_row(struct vague *v, const struct relief *r, uint32_t layer, uint32_t token, uint8_t *row) {
        const struct vague_layer *l = v->layers + layer;
        bool exact = l->spilled;

        if (exact && r->m->reviver.delete != DELETE_ESTIMATE)
                memcpy(row, l->spilled + token * v->row_bytes, v->row_bytes);
        else
                estimate(v, r, layer, token, row);
        if (v->sketch)
                delete(v, r, layer, token, row, exact);
        if (exact)
                memcpy(row, l->spilled + token * v->row_bytes, v->row_bytes);
        return exact;
}

static void query(const struct vague *v, const struct relief *r, uint32_t layer, uint32_t head, const uint32_t *places,
                  uint32_t n, float *keys, float *values) {
        for (uint32_t value = 0; value < 2; value++) {
                const struct kvd_sketch_part p = part(v, r, layer, head, value);
                uint8_t *const at = (uint8_t *)(value ? values : keys);
                const struct kvd_sketch_vectors x = {&at, 0, r->setup.shape.head_dim, MAX(n, 1), KVD_NUMBER_F32};

                r->setup.ops->sketch->query(&p, places, n, &x, 1.0f);
        }
}

void vague_read(const struct vague *v, const struct relief *r, uint32_t layer, uint32_t head, const uint32_t *tokens,
                uint32_t n, float *keys, float *values, uint32_t *places) {
        const struct vague_layer *l = v->layers + layer;
        uint32_t dim = r->setup.shape.head_dim;

        for (uint32_t i = 0; i < n; i++) {
                size_t at = l->index[tokens[i]];
                const uint8_t *packed = l->packed + at * v->packed_bytes + 2 * head * quant_bytes(dim);

                if (v->sketch) {
                        memcpy(places + (size_t)i * v->rows, l->places + at * v->rows, v->rows * sizeof *places);
                        continue;
                }
                quant_unpack(keys + (size_t)i * dim, packed, dim);
                quant_unpack(values + (size_t)i * dim, packed + quant_bytes(dim), dim);
        }
        if (v->sketch)
                query(v, r, layer, head, places, n, keys, values);
}

void vague_read_spilled(const struct vague *v, const struct relief *r, uint32_t layer, uint32_t head, uint32_t token,
                        float *key, float *value) {
        size_t bytes = r->setup.shape.head_dim * number_bytes(r);
        const uint8_t *row = v->layers[layer].spilled + token * v->row_bytes + 2 * head * bytes;

        widen(r, key, row);
        widen(r, value, row + bytes);
}
