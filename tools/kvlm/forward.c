/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Threads divide the tokens of a chunk among them and each takes its rows through all layers. They meet once a
 * layer: attention needs the keys and values of every earlier row of the chunk. Where queries say what they attend to
 * (pooled.h), heads are divided for that, and they meet twice more.
 */

#include "tools/kvlm/forward.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#include <time.h>

#include "ipc/base/util.h"
#include "kernels/attend.h"
#include "tools/kvlm/note.h"
#include "tools/kvlm/pooled.h"
#include "tools/kvlm/team.h"

struct workspace { /* of one thread */
        float *attention;
        size_t room;
};

struct forward {
        const struct model *model;
        const struct kvd_ops *ops;
        struct block_shape shape;
        struct team *team;
        struct workspace *workspaces;
        float *frequencies; /* [head_dim / 2] */
        float *rows;        /* everything below, [chunk] each */
        float *x;           /* [hidden] the residual stream */
        float *normed;      /* [hidden] */
        float *change;      /* [hidden] what a part adds to x */
        float *qkv;         /* [q, k, v] */
        float *mixed;       /* [q] out of attention */
        float *gate_up;     /* [2 ffn] */
        float *cosine, *sine; /* [head_dim / 2] */

        const struct step *step; /* the one in progress */
        bool alone;              /* one thread does all of it */
        uint64_t attention_ns;   /* of member 0 */
};

struct range { /* rows of the chunk */
        uint32_t from, to;
};

struct block_shape block_shape(const struct config *c, uint32_t block_tokens, enum kvd_number type) {
        struct block_shape s = {block_tokens, type, c->kv_heads, c->head_dim, 0, 0, 0};

        s.head_bytes = (size_t)block_tokens * c->head_dim * (type == KVD_NUMBER_F32 ? 4 : 2);
        s.plane_bytes = c->kv_heads * s.head_bytes;
        s.block_bytes = 2 * c->layers * s.plane_bytes;
        return s;
}

static uint32_t q_width(const struct config *c) {
        return c->heads * c->head_dim;
}

static uint32_t qkv_width(const struct config *c) {
        return (c->heads + 2 * c->kv_heads) * c->head_dim;
}

/* ---- one layer, some rows ---- */

static void rotate(struct forward *f, struct range rows) {
        const struct config *c = &f->model->config;
        uint32_t half = c->head_dim / 2;

        for (uint32_t r = rows.from; r < rows.to; r++)
                for (uint32_t h = 0; h < c->heads + c->kv_heads; h++)
                        f->ops->rope(f->qkv + (size_t)r * qkv_width(c) + h * c->head_dim, f->cosine + r * half,
                                     f->sine + r * half, half);
}

static void store_head(const struct forward *f, uint8_t *to, const float *from) {
        if (f->shape.type == KVD_NUMBER_F32)
                memcpy(to, from, f->shape.head_dim * sizeof *from);
        else
                f->ops->narrow((uint16_t *)to, from, f->shape.head_dim, f->shape.type);
}

static void store_keys_values(struct forward *f, uint32_t layer, struct range rows) {
        const struct config *c = &f->model->config;
        const struct block_shape *s = &f->shape;
        size_t slot_bytes = s->head_bytes / s->tokens;

        for (uint32_t r = rows.from; r < rows.to; r++) {
                uint32_t position = f->step->first + r, at = position - f->step->gone;
                const float *k = f->qkv + (size_t)r * qkv_width(c) + q_width(c), *v = k + c->kv_heads * c->head_dim;
                uint8_t *slot;

                if (position < f->step->stored)
                        continue;
                slot = f->step->blocks[at / s->tokens] + 2 * layer * s->plane_bytes + at % s->tokens * slot_bytes;
                for (uint32_t h = 0; h < c->kv_heads; h++) {
                        store_head(f, slot + h * s->head_bytes, k + h * c->head_dim);
                        store_head(f, slot + s->plane_bytes + h * s->head_bytes, v + h * c->head_dim);
                }
        }
}

static struct kvd_attention attention(const struct forward *f, uint32_t layer, uint32_t head, struct range rows) {
        const struct config *c = &f->model->config;
        const struct block_shape *s = &f->shape;
        uint32_t group = c->heads / c->kv_heads;
        size_t q = (size_t)head * group * c->head_dim, k_offset = 2 * layer * s->plane_bytes + head * s->head_bytes;

        return (struct kvd_attention){
                .ops = f->ops,
                .blocks = (const uint8_t *const *)f->step->blocks,
                .k_offset = k_offset,
                .v_offset = k_offset + s->plane_bytes,
                .stride = c->head_dim,
                .type = s->type,
                .block_tokens = s->tokens,
                .dim = c->head_dim,
                .first = f->step->first - f->step->gone + rows.from,
                .n = rows.to - rows.from,
                .group = group,
                .scale = 1.0f / sqrtf((float)c->head_dim),
                .q = f->qkv + (size_t)rows.from * qkv_width(c) + q,
                .ldq = qkv_width(c),
                .out = f->mixed + (size_t)rows.from * q_width(c) + q,
                .ldo = q_width(c),
                .chosen = f->step->chosen,
                .n_chosen = f->step->n_chosen,
                .turn = f->step->turn,
                .turns = f->step->turns,
                .block_mass = f->step->block_mass,
        };
}

static void norm(struct forward *f, const float *weights, struct range rows) {
        const struct config *c = &f->model->config;

        for (size_t r = rows.from; r < rows.to; r++)
                f->ops->rmsnorm(f->normed + r * c->hidden, f->x + r * c->hidden, weights, c->hidden, c->norm_eps);
}

/* to = from times a matrix, whole rows of both. */
static void multiply(struct forward *f, float *to, const float *from, size_t from_stride, const float *matrix,
                     uint32_t n_in, uint32_t n_out, struct range rows) {
        f->ops->matmul(to + (size_t)rows.from * n_out, n_out, from + rows.from * from_stride, from_stride,
                       rows.to - rows.from, matrix, n_in, n_out);
}

static void add_change(struct forward *f, struct range rows) {
        size_t hidden = f->model->config.hidden;

        f->ops->add(f->x + rows.from * hidden, f->change + rows.from * hidden, (rows.to - rows.from) * hidden);
}

static uint32_t members(const struct forward *f) {
        return f->alone ? 1 : team_size(f->team);
}

static void attend(struct forward *f, uint32_t layer, struct range rows, uint32_t member) {
        const struct config *c = &f->model->config;

        for (uint32_t h = 0; h < c->kv_heads && rows.to > rows.from; h++) {
                struct kvd_attention a = attention(f, layer, h, rows);

                a.scratch = f->workspaces[member].attention;
                if (f->step->pooled)
                        pooled_choose(f->step->pooled, layer, h, &a);
                kvd_attend(&a);
        }
}

/* What the queries want of what, and what of it must be fetched first. */
static void look(struct forward *f, uint32_t layer, uint32_t member) {
        for (uint32_t h = member; h < f->model->config.kv_heads; h += members(f)) {
                struct kvd_attention a = attention(f, layer, h, (struct range){0, f->step->n});

                pooled_look(f->step->pooled, layer, h, &a);
        }
        if (!f->alone)
                team_meet(f->team);
        if (member == 0)
                pooled_fetch(f->step->pooled, layer);
        if (!f->alone)
                team_meet(f->team);
}

static uint64_t now_ns(void) {
        struct timespec ts;

        clock_gettime(CLOCK_MONOTONIC, &ts);
        return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void attention_part(struct forward *f, uint32_t layer, struct range rows, uint32_t member) {
        const struct config *c = &f->model->config;
        const struct layer *l = f->model->layers + layer;
        uint64_t started;

        norm(f, l->attention_norm, rows);
        multiply(f, f->qkv, f->normed, c->hidden, l->qkv, c->hidden, qkv_width(c), rows);
        rotate(f, rows);
        store_keys_values(f, layer, rows);
        if (!f->alone)
                team_meet(f->team);
        started = now_ns();
        if (f->step->pooled)
                look(f, layer, member);
        attend(f, layer, rows, member);
        if (member == 0)
                f->attention_ns += now_ns() - started;
        multiply(f, f->change, f->mixed, q_width(c), l->output, q_width(c), c->hidden, rows);
        add_change(f, rows);
}

static void ffn_part(struct forward *f, uint32_t layer, struct range rows) {
        const struct config *c = &f->model->config;
        const struct layer *l = f->model->layers + layer;

        norm(f, l->ffn_norm, rows);
        multiply(f, f->gate_up, f->normed, c->hidden, l->gate_up, c->hidden, 2 * c->ffn, rows);
        for (size_t r = rows.from; r < rows.to; r++) {
                float *gate = f->gate_up + r * 2 * c->ffn;

                f->ops->swiglu(gate, gate, gate + c->ffn, c->ffn);
        }
        multiply(f, f->change, f->gate_up, 2 * (size_t)c->ffn, l->down, c->ffn, c->hidden, rows);
        add_change(f, rows);
}

/* ---- one step, some rows ---- */

static void embed(struct forward *f, struct range rows) {
        size_t hidden = f->model->config.hidden;

        for (uint32_t r = rows.from; r < rows.to; r++)
                memcpy(f->x + r * hidden, f->model->embedding + f->step->tokens[r] * hidden, hidden * sizeof *f->x);
}

/* As Hugging Face: the angle is a float product, its cosine and sine are rounded once. */
static void angles(struct forward *f, struct range rows) {
        uint32_t half = f->model->config.head_dim / 2;

        for (uint32_t r = rows.from; r < rows.to; r++)
                for (uint32_t i = 0; i < half; i++) {
                        float angle = (float)(f->step->first + r) * f->frequencies[i];

                        f->cosine[r * half + i] = (float)cos((double)angle);
                        f->sine[r * half + i] = (float)sin((double)angle);
                }
}

static void logits(struct forward *f, struct range rows) {
        const struct model *m = f->model;
        uint32_t skipped = f->step->all_logits ? 0 : f->step->n - 1;

        rows.from = MAX(rows.from, skipped);
        if (!f->step->logits || rows.from >= rows.to)
                return;
        norm(f, m->norm, rows);
        f->ops->matmul(f->step->logits + (size_t)(rows.from - skipped) * m->config.vocab, m->config.vocab,
                       f->normed + (size_t)rows.from * m->config.hidden, m->config.hidden, rows.to - rows.from, m->head,
                       m->config.hidden, m->config.vocab);
}

static void run(void *data, uint32_t member) {
        struct forward *f = data;
        uint64_t n = f->step->n;
        struct range rows = {n * member / members(f), n * (member + 1) / members(f)};

        embed(f, rows);
        angles(f, rows);
        for (uint32_t layer = 0; layer < f->model->config.layers; layer++) {
                attention_part(f, layer, rows, member);
                ffn_part(f, layer, rows);
        }
        logits(f, rows);
}

/* Every workspace suffices for the whole step; it grows by half at least, as sequences do token by token. */
static int make_room(struct forward *f) {
        struct kvd_attention a = attention(f, 0, 0, (struct range){0, f->step->n});
        size_t need = kvd_attend_scratch(&a);

        for (uint32_t i = 0; i < members(f); i++) {
                struct workspace *w = f->workspaces + i;

                if (need <= w->room)
                        continue;
                free(w->attention);
                w->room = 0;
                w->attention = calloc(need + need / 2, sizeof *w->attention);
                if (!w->attention)
                        return note(-ENOMEM, "out of memory for attention over %u tokens", f->step->first + f->step->n);
                w->room = need + need / 2;
        }
        return 0;
}

int forward_step(struct forward *f, const struct step *step) {
        int r;

        f->step = step;
        f->alone = team_size(f->team) == 1 || step->n < 4 * team_size(f->team);
        r = make_room(f);
        if (r < 0)
                return r;
        if (f->alone)
                run(f, 0);
        else
                team_run(f->team, run, f);
        return 0;
}

const float *forward_frequencies(const struct forward *f) {
        return f->frequencies;
}

double forward_attention_ms(const struct forward *f) {
        return (double)f->attention_ns / 1e6;
}

/* ---- life ---- */

static int allocate(struct forward *f, uint32_t chunk, uint32_t threads) {
        const struct config *c = &f->model->config;
        const struct {
                float **at;
                size_t width;
        } parts[] = {
                {&f->x, c->hidden},        {&f->normed, c->hidden},      {&f->change, c->hidden},
                {&f->qkv, qkv_width(c)},   {&f->mixed, q_width(c)},      {&f->gate_up, 2 * (size_t)c->ffn},
                {&f->cosine, c->head_dim}, {&f->sine, c->head_dim},
        };
        size_t total = 0;

        for (size_t i = 0; i < ARRAY_SIZE(parts); i++)
                total += ALIGN_UP(chunk * parts[i].width, 16);
        f->rows = aligned_alloc(64, total * sizeof *f->rows);
        f->workspaces = calloc(threads, sizeof *f->workspaces);
        f->frequencies = calloc(c->head_dim, sizeof *f->frequencies);
        if (!f->rows || !f->workspaces || !f->frequencies)
                return note(-ENOMEM, "out of memory for a chunk of %u tokens", chunk);
        total = 0;
        for (size_t i = 0; i < ARRAY_SIZE(parts); i++) {
                *parts[i].at = f->rows + total;
                total += ALIGN_UP(chunk * parts[i].width, 16);
        }
        for (uint32_t i = 0; i < c->head_dim / 2; i++)
                f->frequencies[i] = 1.0f / powf(c->rope_theta, (float)(2 * i) / (float)c->head_dim);
        return 0;
}

int forward_new(const struct model *model, const struct kvd_ops *ops, const struct block_shape *shape, uint32_t chunk,
                uint32_t threads, struct forward **ret) {
        struct forward *f = calloc(1, sizeof *f);
        int r;

        if (!f)
                return note(-ENOMEM, "out of memory");
        *f = (struct forward){.model = model, .ops = ops, .shape = *shape};
        r = allocate(f, chunk, threads);
        if (r == 0)
                r = team_new(threads, &f->team);
        if (r < 0) {
                forward_free(f);
                return r;
        }
        *ret = f;
        return 0;
}

struct forward *forward_free(struct forward *f) {
        if (!f)
                return NULL;
        for (uint32_t i = 0; f->team && i < team_size(f->team); i++)
                free(f->workspaces[i].attention);
        team_free(f->team);
        free(f->frequencies);
        free(f->workspaces);
        free(f->rows);
        free(f);
        return NULL;
}
