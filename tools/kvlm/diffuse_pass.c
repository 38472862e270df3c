/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Threads divide the rows among them, and meet once a layer: attention needs the keys and values of all rows. A thread
 * takes its rows in tiles, so that what is between two matrix products stays in its cache.
 */

#include "tools/kvlm/diffuse_pass.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/attend.h"
#include "tools/kvlm/note.h"
#include "tools/kvlm/team.h"

enum { TILE = 32 };

struct bench { /* of one thread */
        float *attention;
        size_t room;
        float *tile; /* everything below, [TILE] each */
        float *normed, *change, *gate_up;
};

struct pass {
        const struct model *model;
        const struct kvd_ops *ops;
        struct plane_shape shape;
        struct team *team;
        struct bench *benches;
        uint32_t n_benches;
        float *frequencies; /* [head_dim / 2] */
        uint32_t room;      /* rows */
        float *rows;        /* everything below, [room] each */
        float *x;           /* [hidden] the residual stream */
        float *qkv;         /* [q, k, v] */
        float *mixed;       /* [q] out of attention */
        float *cosine, *sine; /* [head_dim / 2] */

        /* the run in progress */
        const struct context *context;
        const struct band *band;
        bool alone; /* one thread does all of it */
        const uint32_t *positions;
        uint32_t n_positions;
        float *logits;
};

struct range { /* positions */
        uint32_t from, to;
};

static uint32_t q_width(const struct config *c) {
        return c->heads * c->head_dim;
}

static uint32_t qkv_width(const struct config *c) {
        return (c->heads + 2 * c->kv_heads) * c->head_dim;
}

/* ---- shape and context ---- */

struct plane_shape plane_shape(const struct config *c, uint32_t block_tokens, enum kvd_number type) {
        struct plane_shape s = {.tokens = block_tokens, .type = type, .number_bytes = type == KVD_NUMBER_F32 ? 4 : 2};

        s.head_bytes = block_tokens * c->head_dim * s.number_bytes;
        s.plane_bytes = c->kv_heads * s.head_bytes;
        s.plain_bytes = 2 * s.plane_bytes;
        s.block_bytes = s.plain_bytes + block_tokens * c->hidden * s.number_bytes;
        return s;
}

int context_new(const struct config *c, const struct plane_shape *s, uint32_t n_prefix, uint32_t n_tokens,
                struct context *ret) {
        uint32_t gap = ALIGN_UP(n_prefix, s->tokens) - n_prefix, n_blocks = DIV_UP(n_tokens + gap, s->tokens);
        struct context context = {.n_prefix = n_prefix, .n_tokens = n_tokens, .n_blocks = n_blocks};

        context.blocks = calloc((size_t)c->layers * n_blocks, sizeof *context.blocks);
        context.slots = calloc(n_tokens, sizeof *context.slots);
        if (!context.blocks || !context.slots) {
                context_release(&context);
                return note(-ENOMEM, "out of memory for a request of %u tokens", n_tokens);
        }
        for (uint32_t i = 0; i < n_tokens; i++)
                context.slots[i] = i < n_prefix ? i : i + gap;
        *ret = context;
        return 0;
}

void context_release(struct context *c) {
        free(c->blocks);
        free(c->slots);
        *c = (struct context){0};
}

/* ---- numbers in planes ---- */

static void store(const struct pass *p, uint8_t *to, const float *from, uint32_t n) {
        if (p->shape.type == KVD_NUMBER_F32)
                memcpy(to, from, n * sizeof *from);
        else
                p->ops->narrow((uint16_t *)to, from, n, p->shape.type);
}

static void fetch(const struct pass *p, float *to, const uint8_t *from, uint32_t n) {
        if (p->shape.type == KVD_NUMBER_F32)
                memcpy(to, from, n * sizeof *to);
        else
                p->ops->widen(to, (const uint16_t *)from, n, p->shape.type);
}

static uint8_t *block_of(const struct pass *p, const struct context *c, uint32_t layer, uint32_t position) {
        return c->blocks[(size_t)layer * c->n_blocks + c->slots[position] / p->shape.tokens];
}

static uint8_t *state_of(const struct pass *p, const struct context *c, uint32_t layer, uint32_t position) {
        size_t slot = c->slots[position] % p->shape.tokens;

        return block_of(p, c, layer, position) + p->shape.plain_bytes +
               slot * p->model->config.hidden * p->shape.number_bytes;
}

/* ---- one layer, some rows ---- */

static void rotate(struct pass *p, struct range rows) {
        const struct config *c = &p->model->config;
        uint32_t half = c->head_dim / 2;

        for (size_t r = rows.from; r < rows.to; r++)
                for (uint32_t h = 0; h < c->heads + c->kv_heads; h++)
                        p->ops->rope(p->qkv + r * qkv_width(c) + h * c->head_dim, p->cosine + r * half,
                                     p->sine + r * half, half);
}

static void store_keys_values(struct pass *p, uint32_t layer, struct range rows) {
        const struct config *c = &p->model->config;
        const struct plane_shape *s = &p->shape;

        for (uint32_t r = rows.from; r < rows.to; r++) {
                const float *k = p->qkv + (size_t)r * qkv_width(c) + q_width(c), *v = k + c->kv_heads * c->head_dim;
                uint8_t *slot = block_of(p, p->context, layer, r) +
                                p->context->slots[r] % s->tokens * (s->head_bytes / s->tokens);

                for (uint32_t h = 0; h < c->kv_heads; h++) {
                        store(p, slot + h * s->head_bytes, k + h * c->head_dim, c->head_dim);
                        store(p, slot + s->plane_bytes + h * s->head_bytes, v + h * c->head_dim, c->head_dim);
                }
        }
}

/* Slots that a prefix leaves unused in its last block are seen by nobody: the others are named one by one then. */
static struct kvd_attention attention(const struct pass *p, uint32_t layer, uint32_t head, struct range rows) {
        const struct config *c = &p->model->config;
        const struct plane_shape *s = &p->shape;
        const struct context *context = p->context;
        uint32_t group = c->heads / c->kv_heads, n_seen = p->band->prefix_only ? context->n_prefix : context->n_tokens;
        bool gap = n_seen > context->n_prefix && context->n_prefix % s->tokens != 0;
        size_t q = (size_t)head * group * c->head_dim;

        return (struct kvd_attention){
                .ops = p->ops,
                .blocks = (const uint8_t *const *)context->blocks + (size_t)layer * context->n_blocks,
                .k_offset = head * s->head_bytes,
                .v_offset = head * s->head_bytes + s->plane_bytes,
                .stride = c->head_dim,
                .type = s->type,
                .block_tokens = s->tokens,
                .dim = c->head_dim,
                .n_keys = context->slots[n_seen - 1] + 1,
                .chosen = gap ? context->slots : NULL,
                .n_chosen = gap ? n_seen : 0,
                .n = rows.to - rows.from,
                .group = group,
                .scale = 1.0f / sqrtf((float)c->head_dim),
                .q = p->qkv + (size_t)rows.from * qkv_width(c) + q,
                .ldq = qkv_width(c),
                .out = p->mixed + (size_t)rows.from * q_width(c) + q,
                .ldo = q_width(c),
        };
}

static void norm(const struct pass *p, float *to, const float *weights, uint32_t row, uint32_t n) {
        const struct config *c = &p->model->config;

        for (size_t r = 0; r < n; r++)
                p->ops->rmsnorm(to + r * c->hidden, p->x + (row + r) * c->hidden, weights, c->hidden, c->norm_eps);
}

static void project(struct pass *p, uint32_t layer, struct range rows, struct bench *b) {
        const struct config *c = &p->model->config;
        const struct layer *l = p->model->layers + layer;

        for (uint32_t r = rows.from, n; r < rows.to; r += n) {
                n = MIN(TILE, rows.to - r);
                norm(p, b->normed, l->attention_norm, r, n);
                p->ops->matmul(p->qkv + (size_t)r * qkv_width(c), qkv_width(c), b->normed, c->hidden, n, l->qkv,
                               c->hidden, qkv_width(c));
        }
        rotate(p, rows);
        store_keys_values(p, layer, rows);
}

static void attend(struct pass *p, uint32_t layer, struct range rows, struct bench *b) {
        for (uint32_t h = 0; h < p->model->config.kv_heads && rows.to > rows.from; h++) {
                struct kvd_attention a = attention(p, layer, h, rows);

                a.scratch = b->attention;
                kvd_attend(&a);
        }
}

/* The tile's rows of x, with what attention and the feed-forward network add. */
static void finish_tile(struct pass *p, uint32_t layer, uint32_t row, uint32_t n, struct bench *b) {
        const struct config *c = &p->model->config;
        const struct layer *l = p->model->layers + layer;
        float *x = p->x + (size_t)row * c->hidden;

        p->ops->matmul(b->change, c->hidden, p->mixed + (size_t)row * q_width(c), q_width(c), n, l->output, q_width(c),
                       c->hidden);
        p->ops->add(x, b->change, (size_t)n * c->hidden);
        norm(p, b->normed, l->ffn_norm, row, n);
        p->ops->matmul(b->gate_up, 2 * (size_t)c->ffn, b->normed, c->hidden, n, l->gate_up, c->hidden, 2 * c->ffn);
        for (size_t r = 0; r < n; r++) {
                float *gate = b->gate_up + r * 2 * c->ffn;

                p->ops->swiglu(gate, gate, gate + c->ffn, c->ffn);
        }
        p->ops->matmul(b->change, c->hidden, b->gate_up, 2 * (size_t)c->ffn, n, l->down, c->ffn, c->hidden);
        p->ops->add(x, b->change, (size_t)n * c->hidden);
}

/* Rows go on as they were stored, rounded: who restarts from the stored ones gets the same keys and values. */
static void keep_states(struct pass *p, uint32_t layer, struct range rows) {
        uint32_t hidden = p->model->config.hidden;

        for (uint32_t r = rows.from; r < rows.to; r++) {
                uint8_t *state = state_of(p, p->context, layer, r);

                store(p, state, p->x + (size_t)r * hidden, hidden);
                fetch(p, p->x + (size_t)r * hidden, state, hidden);
        }
}

/* ---- one run ---- */

static struct range share(const struct pass *p, uint32_t from, uint32_t to, uint32_t member) {
        uint64_t n = to - from, members = p->alone ? 1 : team_size(p->team);

        return (struct range){from + (uint32_t)(n * member / members), from + (uint32_t)(n * (member + 1) / members)};
}

static void run(void *data, uint32_t member) {
        struct pass *p = data;
        struct range rows = share(p, p->band->from, p->band->to, member);
        struct bench *b = p->benches + member;

        for (uint32_t layer = p->band->layer; layer < p->band->end_layer; layer++) {
                project(p, layer, rows, b);
                if (!p->alone)
                        team_meet(p->team);
                attend(p, layer, rows, b);
                for (uint32_t r = rows.from, n; r < rows.to; r += n) {
                        n = MIN(TILE, rows.to - r);
                        finish_tile(p, layer, r, n, b);
                }
                if (p->band->keep_states)
                        keep_states(p, layer, rows);
        }
}

static void start(struct pass *p, uint32_t rows, void (*work)(void *, uint32_t)) {
        uint32_t members = team_size(p->team);

        p->alone = members == 1 || rows < 4 * members;
        if (p->alone)
                work(p, 0);
        else
                team_run(p->team, work, p);
}

/* Every bench suffices for all rows; it grows by half at least. */
static int make_room(struct pass *p) {
        struct kvd_attention a = attention(p, p->band->layer, 0, (struct range){p->band->from, p->band->to});
        size_t need = kvd_attend_scratch(&a);

        for (uint32_t i = 0; i < team_size(p->team); i++) {
                struct bench *b = p->benches + i;

                if (need <= b->room)
                        continue;
                free(b->attention);
                b->room = 0;
                b->attention = calloc(need + need / 2, sizeof *b->attention);
                if (!b->attention)
                        return note(-ENOMEM, "out of memory for attention over %u tokens", p->context->n_tokens);
                b->room = need + need / 2;
        }
        return 0;
}

int pass_run(struct pass *p, const struct context *context, const struct band *band) {
        int r;

        p->context = context;
        p->band = band;
        if (band->from == band->to || band->layer == band->end_layer)
                return 0;
        r = make_room(p);
        if (r == 0)
                start(p, band->to - band->from, run);
        return r;
}

/* As Hugging Face: the angle is a float product, its cosine and sine are rounded once. */
static void angles(struct pass *p) {
        uint32_t half = p->model->config.head_dim / 2;

        for (uint32_t r = 0; r < p->room; r++)
                for (uint32_t i = 0; i < half; i++) {
                        float angle = (float)r * p->frequencies[i];

                        p->cosine[(size_t)r * half + i] = (float)cos((double)angle);
                        p->sine[(size_t)r * half + i] = (float)sin((double)angle);
                }
}

void pass_embed(struct pass *p, const uint32_t *tokens, uint32_t from, uint32_t to) {
        size_t hidden = p->model->config.hidden;

        for (uint32_t r = from; r < to; r++)
                memcpy(p->x + r * hidden, p->model->embedding + tokens[r] * hidden, hidden * sizeof *p->x);
}

void pass_restore(struct pass *p, const struct context *context, uint32_t layer) {
        uint32_t hidden = p->model->config.hidden;

        for (uint32_t r = 0; r < context->n_prefix; r++)
                fetch(p, p->x + (size_t)r * hidden, state_of(p, context, layer, r), hidden);
}

static void run_logits(void *data, uint32_t member) {
        struct pass *p = data;
        const struct model *m = p->model;
        struct range rows = share(p, 0, p->n_positions, member);
        struct bench *b = p->benches + member;

        for (uint32_t i = rows.from, n; i < rows.to; i += n) {
                n = MIN(TILE, rows.to - i);
                for (uint32_t j = 0; j < n; j++)
                        norm(p, b->normed + (size_t)j * m->config.hidden, m->norm, p->positions[i + j], 1);
                p->ops->matmul(p->logits + (size_t)i * m->config.vocab, m->config.vocab, b->normed, m->config.hidden, n,
                               m->head, m->config.hidden, m->config.vocab);
        }
}

void pass_logits(struct pass *p, const uint32_t *positions, uint32_t n, float *to) {
        p->positions = positions;
        p->n_positions = n;
        p->logits = to;
        start(p, n, run_logits);
}

/* ---- life ---- */

static size_t padded(size_t n) {
        return ALIGN_UP(n, 16);
}

int pass_room(struct pass *p, uint32_t n_tokens) {
        const struct config *c = &p->model->config;
        uint32_t room = MAX(n_tokens, 1);
        size_t half = (size_t)room * (c->head_dim / 2), total;

        if (n_tokens <= p->room)
                return 0;
        free(p->rows);
        p->room = 0;
        total = padded((size_t)room * c->hidden) + padded((size_t)room * qkv_width(c)) +
                padded((size_t)room * q_width(c)) + 2 * padded(half);
        p->rows = aligned_alloc(64, total * sizeof *p->rows);
        if (!p->rows)
                return note(-ENOMEM, "out of memory for a request of %u tokens", n_tokens);
        p->room = room;
        p->x = p->rows;
        p->qkv = p->x + padded((size_t)room * c->hidden);
        p->mixed = p->qkv + padded((size_t)room * qkv_width(c));
        p->cosine = p->mixed + padded((size_t)room * q_width(c));
        p->sine = p->cosine + padded(half);
        angles(p);
        return 0;
}

static int allocate(struct pass *p, uint32_t threads) {
        const struct config *c = &p->model->config;
        size_t normed = padded((size_t)TILE * c->hidden), gate_up = padded((size_t)TILE * 2 * c->ffn);

        p->benches = calloc(threads, sizeof *p->benches);
        p->frequencies = calloc(c->head_dim, sizeof *p->frequencies);
        if (!p->benches || !p->frequencies)
                return note(-ENOMEM, "out of memory");
        p->n_benches = threads;
        for (uint32_t i = 0; i < c->head_dim / 2; i++)
                p->frequencies[i] = 1.0f / powf(c->rope_theta, (float)(2 * i) / (float)c->head_dim);
        for (uint32_t i = 0; i < threads; i++) {
                struct bench *b = p->benches + i;

                b->tile = aligned_alloc(64, (2 * normed + gate_up) * sizeof *b->tile);
                if (!b->tile)
                        return note(-ENOMEM, "out of memory for %u threads", threads);
                b->normed = b->tile;
                b->change = b->normed + normed;
                b->gate_up = b->change + normed;
        }
        return 0;
}

int pass_new(const struct model *model, const struct kvd_ops *ops, const struct plane_shape *shape, uint32_t threads,
             struct pass **ret) {
        struct pass *p = calloc(1, sizeof *p);
        int r;

        if (!p)
                return note(-ENOMEM, "out of memory");
        *p = (struct pass){.model = model, .ops = ops, .shape = *shape};
        r = allocate(p, threads);
        if (r == 0)
                r = team_new(threads, &p->team);
        if (r < 0) {
                pass_free(p);
                return r;
        }
        *ret = p;
        return 0;
}

struct pass *pass_free(struct pass *p) {
        if (!p)
                return NULL;
        for (uint32_t i = 0; i < p->n_benches; i++) {
                free(p->benches[i].attention);
                free(p->benches[i].tile);
        }
        if (p->team)
                team_free(p->team);
        free(p->benches);
        free(p->frequencies);
        free(p->rows);
        free(p);
        return NULL;
}
