/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Threads divide the rows among them and synchronise once per layer, since attention needs the keys
 * and values of all rows. A thread processes its rows in tiles, so that the data between two matrix
 * products stays in its cache. If queries select what they attend to (pooled.h), threads divide the
 * heads for that, and synchronise twice more.
 */

#include "tools/kvlm/pass.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "ipc/base/threads.h"
#include "ipc/base/util.h"
#include "kernels/attend.h"
#include "tools/kvlm/refuse.h"
#include "tools/kvlm/pooled.h"

enum { TILE = 32 };

struct bench { /* of one thread */
        float *attention;
        size_t room;
        float *tile; /* contains all of the following, [TILE] each */
        float *normed, *change, *gate_up;
};

struct pass {
        const struct model *model;
        const struct kvd_ops *ops;
        struct block_shape shape;
        struct threads *threads;
        struct bench *benches;
        uint32_t n_benches;
        float *frequencies;    /* [head_dim / 2] */
        uint32_t first, room;  /* position of the first row; number of rows that fit */
        uint32_t n_angles;     /* number of rows whose cosine and sine are computed */
        float *rows;           /* contains all of the following, [room] each */
        float *x;              /* [hidden] the residual stream */
        float *qkv;            /* [q, k, v] */
        float *mixed;          /* [q] result of attention */
        float *cosine, *sine;  /* [head_dim / 2] */
        uint64_t attention_ns; /* of thread 0 */

        /* the run in progress */
        const struct view *view;
        uint32_t layer, end_layer, from, to;
        bool alone;                /* one thread does everything */
        const uint32_t *positions; /* NULL: from from on */
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

/* ---- shape ---- */

static struct block_shape shape_of(const struct config *c, uint32_t tokens, enum kvd_number type,
                                   uint32_t layers, uint32_t state) {
        struct block_shape s = {.tokens = tokens,
                                .type = type,
                                .layers = layers,
                                .kv_heads = c->kv_heads,
                                .head_dim = c->head_dim,
                                .row_bytes = kvd_row_bytes(type, c->head_dim),
                                .state_bytes = kvd_row_bytes(type, state)};

        s.head_bytes = tokens * s.row_bytes;
        s.plane_bytes = c->kv_heads * s.head_bytes;
        s.plain_bytes = 2 * layers * s.plane_bytes;
        s.block_bytes = s.plain_bytes + tokens * s.state_bytes;
        return s;
}

struct block_shape block_shape(const struct config *c, uint32_t tokens, enum kvd_number type) {
        return shape_of(c, tokens, type, c->layers, 0);
}

struct block_shape block_shape_of_layer(const struct config *c, uint32_t tokens,
                                        enum kvd_number type) {
        return shape_of(c, tokens, type, 1, c->hidden);
}

/* ---- rows in planes ---- */

static uint32_t slot_of(const struct view *v, uint32_t position) {
        return v->slots ? v->slots[position] : position - v->gone;
}

static uint8_t *block_of(const struct pass *p, const struct view *v, uint32_t layer,
                         uint32_t position) {
        return v->blocks[(size_t)layer * v->n_blocks + slot_of(v, position) / p->shape.tokens];
}

/* Bytes from a block's start to a layer's keys. */
static size_t layer_offset(const struct pass *p, const struct view *v, uint32_t layer) {
        return v->n_blocks ? 0 : 2 * layer * p->shape.plane_bytes;
}

static uint8_t *state_of(const struct pass *p, const struct view *v, uint32_t layer,
                         uint32_t position) {
        size_t slot = slot_of(v, position) % p->shape.tokens;

        return block_of(p, v, layer, position) + p->shape.plain_bytes + slot * p->shape.state_bytes;
}

static float *row_of(const struct pass *p, float *rows, size_t width, uint32_t position) {
        return rows + (position - p->first) * width;
}

/* ---- one layer, some rows ---- */

static void rotate(struct pass *p, struct range rows) {
        const struct config *c = &p->model->config;
        uint32_t half = c->head_dim / 2;

        for (uint32_t r = rows.from; r < rows.to; r++)
                for (uint32_t h = 0; h < c->heads + c->kv_heads; h++)
                        p->ops->rope(row_of(p, p->qkv, qkv_width(c), r) + h * c->head_dim,
                                     row_of(p, p->cosine, half, r), row_of(p, p->sine, half, r),
                                     half);
}

static void store_keys_values(struct pass *p, uint32_t layer, struct range rows) {
        const struct config *c = &p->model->config;
        const struct block_shape *s = &p->shape;

        for (uint32_t r = MAX(rows.from, p->view->stored); r < rows.to; r++) {
                const float *k = row_of(p, p->qkv, qkv_width(c), r) + q_width(c),
                            *v = k + c->kv_heads * c->head_dim;
                uint8_t *slot = block_of(p, p->view, layer, r) + layer_offset(p, p->view, layer) +
                                slot_of(p->view, r) % s->tokens * s->row_bytes;

                for (uint32_t h = 0; h < c->kv_heads; h++) {
                        uint8_t *to = slot + h * s->head_bytes;

                        p->ops->write_key(to, k + h * c->head_dim, c->head_dim, s->type);
                        p->ops->write_row(to + s->plane_bytes, v + h * c->head_dim, c->head_dim,
                                          s->type);
                }
        }
}

static struct kvd_attention attention(const struct pass *p, uint32_t layer, uint32_t head,
                                      struct range rows) {
        const struct config *c = &p->model->config;
        const struct block_shape *s = &p->shape;
        const struct view *v = p->view;
        uint32_t group = c->heads / c->kv_heads;
        size_t q = (size_t)head * group * c->head_dim,
               k_offset = layer_offset(p, v, layer) + head * s->head_bytes;

        return (struct kvd_attention){
                .ops = p->ops,
                .blocks = (const uint8_t *const *)v->blocks + (size_t)layer * v->n_blocks,
                .k_offset = k_offset,
                .v_offset = k_offset + s->plane_bytes,
                .stride = s->row_bytes,
                .type = s->type,
                .block_tokens = s->tokens,
                .dim = c->head_dim,
                .first = v->n_keys ? 0 : slot_of(v, rows.from),
                .n_keys = v->n_keys,
                .chosen = v->chosen,
                .n_chosen = v->n_chosen,
                .rotation = v->rotation,
                .rotations = v->rotations,
                .block_mass = v->block_mass,
                .n = rows.to - rows.from,
                .group = group,
                .scale = 1.0f / sqrtf((float)c->head_dim),
                .q = row_of(p, p->qkv, qkv_width(c), rows.from) + q,
                .ldq = qkv_width(c),
                .out = row_of(p, p->mixed, q_width(c), rows.from) + q,
                .ldo = q_width(c),
        };
}

static void meet(const struct pass *p) {
        if (!p->alone)
                threads_meet(p->threads);
}

static void norm(const struct pass *p, float *to, const float *weights, uint32_t row, uint32_t n) {
        const struct config *c = &p->model->config;

        for (size_t r = 0; r < n; r++)
                p->ops->rmsnorm(to + r * c->hidden, row_of(p, p->x, c->hidden, row) + r * c->hidden,
                                weights, c->hidden, c->norm_eps);
}

static void project(struct pass *p, uint32_t layer, struct range rows, struct bench *b) {
        const struct config *c = &p->model->config;
        const struct layer *l = p->model->layers + layer;

        for (uint32_t r = rows.from, n; r < rows.to; r += n) {
                n = MIN(TILE, rows.to - r);
                norm(p, b->normed, l->attention_norm, r, n);
                p->ops->matmul(row_of(p, p->qkv, qkv_width(c), r), qkv_width(c), b->normed,
                               c->hidden, n, l->qkv, c->hidden, qkv_width(c));
        }
        rotate(p, rows);
        store_keys_values(p, layer, rows);
}

/* Lets the queries score what they need, and then fetches what is missing. */
static void look(struct pass *p, uint32_t layer, uint32_t member) {
        uint32_t members = p->alone ? 1 : threads_count(p->threads);

        for (uint32_t h = member; h < p->model->config.kv_heads; h += members) {
                struct kvd_attention a = attention(p, layer, h, (struct range){p->from, p->to});

                pooled_look(p->view->pooled, layer, h, &a);
        }
        meet(p);
        if (member == 0)
                pooled_fetch(p->view->pooled, layer);
        meet(p);
}

static void attend(struct pass *p, uint32_t layer, struct range rows, uint32_t member) {
        uint64_t started = sys_now_ns();

        if (p->view->pooled)
                look(p, layer, member);
        for (uint32_t h = 0; h < p->model->config.kv_heads && rows.to > rows.from; h++) {
                struct kvd_attention a = attention(p, layer, h, rows);

                a.scratch = p->benches[member].attention;
                if (p->view->pooled)
                        pooled_choose(p->view->pooled, h, &a);
                kvd_attend(&a);
        }
        if (member == 0)
                p->attention_ns += sys_now_ns() - started;
}

/* Adds the results of attention and of the feed-forward network to the tile's rows of x. */
static void finish_tile(struct pass *p, uint32_t layer, uint32_t row, uint32_t n, struct bench *b) {
        const struct config *c = &p->model->config;
        const struct layer *l = p->model->layers + layer;
        float *x = row_of(p, p->x, c->hidden, row);

        p->ops->matmul(b->change, c->hidden, row_of(p, p->mixed, q_width(c), row), q_width(c), n,
                       l->output, q_width(c), c->hidden);
        p->ops->add(x, b->change, (size_t)n * c->hidden);
        norm(p, b->normed, l->ffn_norm, row, n);
        p->ops->matmul(b->gate_up, 2 * (size_t)c->ffn, b->normed, c->hidden, n, l->gate_up,
                       c->hidden, 2 * c->ffn);
        for (size_t r = 0; r < n; r++) {
                float *gate = b->gate_up + r * 2 * c->ffn;

                p->ops->swiglu(gate, gate, gate + c->ffn, c->ffn);
        }
        p->ops->matmul(b->change, c->hidden, b->gate_up, 2 * (size_t)c->ffn, n, l->down, c->ffn,
                       c->hidden);
        p->ops->add(x, b->change, (size_t)n * c->hidden);
}

/*
 * Rows continue as they were stored, rounded, so that a restart from the stored ones gives the same
 * keys and values.
 */
static void keep_states(struct pass *p, uint32_t layer, struct range rows) {
        uint32_t hidden = p->model->config.hidden;

        for (uint32_t r = rows.from; r < rows.to; r++) {
                uint8_t *state = state_of(p, p->view, layer, r);
                float *x = row_of(p, p->x, hidden, r);

                p->ops->write_row(state, x, hidden, p->shape.type);
                p->ops->read_row(x, state, hidden, p->shape.type);
        }
}

/* ---- one run ---- */

static struct range share(const struct pass *p, uint32_t member) {
        uint64_t n = p->to - p->from, members = p->alone ? 1 : threads_count(p->threads);

        return (struct range){p->from + (uint32_t)(n * member / members),
                              p->from + (uint32_t)(n * (member + 1) / members)};
}

static void run(void *data, uint32_t member) {
        struct pass *p = data;
        struct range rows = share(p, member);
        struct bench *b = p->benches + member;

        for (uint32_t layer = p->layer; layer < p->end_layer; layer++) {
                project(p, layer, rows, b);
                meet(p);
                attend(p, layer, rows, member);
                for (uint32_t r = rows.from, n; r < rows.to; r += n) {
                        n = MIN(TILE, rows.to - r);
                        finish_tile(p, layer, r, n, b);
                }
                if (p->view->keep_states)
                        keep_states(p, layer, rows);
        }
}

static void start(struct pass *p, void (*work)(void *, uint32_t)) {
        uint32_t members = threads_count(p->threads);

        p->alone = members == 1 || p->to - p->from < 4 * members;
        if (p->alone)
                work(p, 0);
        else
                threads_all(p->threads, work, p);
}

/* Makes every bench large enough for all rows; it grows by at least half. */
static int make_room(struct pass *p) {
        struct kvd_attention a = attention(p, p->layer, 0, (struct range){p->from, p->to});
        size_t need = kvd_attend_scratch(&a);

        for (uint32_t i = 0; i < threads_count(p->threads); i++) {
                struct bench *b = p->benches + i;

                if (need <= b->room)
                        continue;
                free(b->attention);
                b->room = 0;
                b->attention = calloc(need + need / 2, sizeof *b->attention);
                if (!b->attention)
                        return refuse(-ENOMEM, "out of memory for attention over %u tokens", p->to);
                b->room = need + need / 2;
        }
        return 0;
}

int pass_run(struct pass *p, const struct view *view, uint32_t layer, uint32_t end_layer,
             uint32_t from, uint32_t to) {
        int r;

        if (from == to || layer == end_layer)
                return 0;
        p->view = view;
        p->layer = layer;
        p->end_layer = end_layer;
        p->from = from;
        p->to = to;
        r = make_room(p);
        if (r == 0)
                start(p, run);
        return r;
}

void pass_embed(struct pass *p, const uint32_t *tokens, uint32_t from, uint32_t to) {
        uint32_t hidden = p->model->config.hidden;

        for (uint32_t r = from; r < to; r++)
                memcpy(row_of(p, p->x, hidden, r),
                       p->model->embedding + (size_t)tokens[r - from] * hidden,
                       hidden * sizeof *p->x);
}

void pass_restore(struct pass *p, const struct view *view, uint32_t layer, uint32_t to) {
        uint32_t hidden = p->model->config.hidden;

        for (uint32_t r = 0; r < to; r++)
                p->ops->read_row(row_of(p, p->x, hidden, r), state_of(p, view, layer, r), hidden,
                                 p->shape.type);
}

static void run_logits(void *data, uint32_t member) {
        struct pass *p = data;
        const struct model *m = p->model;
        struct range rows = share(p, member);
        struct bench *b = p->benches + member;

        for (uint32_t i = rows.from, n; i < rows.to; i += n) {
                n = MIN(TILE, rows.to - i);
                for (uint32_t j = 0; j < n; j++)
                        norm(p, b->normed + (size_t)j * m->config.hidden, m->norm,
                             p->positions ? p->positions[i + j] : i + j, 1);
                p->ops->matmul(p->logits + (size_t)(i - p->from) * m->config.vocab, m->config.vocab,
                               b->normed, m->config.hidden, n, m->head, m->config.hidden,
                               m->config.vocab);
        }
}

void pass_logits(struct pass *p, uint32_t from, uint32_t to, float *ret) {
        p->positions = NULL;
        p->from = from;
        p->to = to;
        p->logits = ret;
        start(p, run_logits);
}

void pass_logits_at(struct pass *p, const uint32_t *positions, uint32_t n, float *ret) {
        p->positions = positions;
        p->from = 0;
        p->to = n;
        p->logits = ret;
        start(p, run_logits);
}

const float *pass_frequencies(const struct pass *p) {
        return p->frequencies;
}

double pass_attention_ms(const struct pass *p) {
        return (double)p->attention_ns / 1e6;
}

/* ---- rows ---- */

/* As in Hugging Face's code: the angle is a float product; its cosine and sine are rounded once. */
static void angles(struct pass *p, uint32_t n) {
        uint32_t half = p->model->config.head_dim / 2;

        for (uint32_t r = 0; r < n; r++)
                for (uint32_t i = 0; i < half; i++) {
                        float angle = (float)(p->first + r) * p->frequencies[i];

                        p->cosine[(size_t)r * half + i] = (float)cos((double)angle);
                        p->sine[(size_t)r * half + i] = (float)sin((double)angle);
                }
}

static size_t padded(size_t n) {
        return ALIGN_UP(n, 16);
}

static int grow(struct pass *p, uint32_t room) {
        const struct config *c = &p->model->config;
        size_t half = padded((size_t)room * (c->head_dim / 2)),
               x = padded((size_t)room * c->hidden), qkv = padded((size_t)room * qkv_width(c)),
               mixed = padded((size_t)room * q_width(c));

        free(p->rows);
        p->room = p->n_angles = 0;
        p->rows = aligned_alloc(64, (x + qkv + mixed + 2 * half) * sizeof *p->rows);
        if (!p->rows)
                return refuse(-ENOMEM, "out of memory for %u tokens at once", room);
        p->room = room;
        p->x = p->rows;
        p->qkv = p->x + x;
        p->mixed = p->qkv + qkv;
        p->cosine = p->mixed + mixed;
        p->sine = p->cosine + half;
        return 0;
}

int pass_rows(struct pass *p, uint32_t first, uint32_t n) {
        int r = n > p->room ? grow(p, n) : 0;

        if (r == 0 && (first != p->first || n > p->n_angles)) {
                p->first = first;
                p->n_angles = n;
                angles(p, n);
        }
        return r;
}

/* ---- life ---- */

static int allocate(struct pass *p, uint32_t threads) {
        const struct config *c = &p->model->config;
        size_t normed = padded((size_t)TILE * c->hidden),
               gate_up = padded((size_t)TILE * 2 * c->ffn);

        p->benches = calloc(threads, sizeof *p->benches);
        p->frequencies = calloc(c->head_dim, sizeof *p->frequencies);
        if (!p->benches || !p->frequencies)
                return refuse(-ENOMEM, "out of memory");
        p->n_benches = threads;
        for (uint32_t i = 0; i < c->head_dim / 2; i++)
                p->frequencies[i] = 1.0f / powf(c->rope_theta, (float)(2 * i) / (float)c->head_dim);
        for (uint32_t i = 0; i < threads; i++) {
                struct bench *b = p->benches + i;

                b->tile = aligned_alloc(64, (2 * normed + gate_up) * sizeof *b->tile);
                if (!b->tile)
                        return refuse(-ENOMEM, "out of memory for %u threads", threads);
                b->normed = b->tile;
                b->change = b->normed + normed;
                b->gate_up = b->change + normed;
        }
        if (threads_new(threads, &p->threads) < 0)
                return refuse(-ENOMEM, "out of memory for %u threads", threads);
        return 0;
}

int pass_new(const struct model *model, const struct kvd_ops *ops, const struct block_shape *shape,
             uint32_t threads, struct pass **ret) {
        struct pass *p = calloc(1, sizeof *p);
        int r;

        if (!p)
                return refuse(-ENOMEM, "out of memory");
        *p = (struct pass){.model = model, .ops = ops, .shape = *shape};
        r = allocate(p, threads);
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
        threads_free(p->threads);
        free(p->benches);
        free(p->frequencies);
        free(p->rows);
        free(p);
        return NULL;
}
