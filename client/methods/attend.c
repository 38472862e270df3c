/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attention over a table of block ids, with the kernels that kvlm uses. A call first checks the ids
 * and turns them into addresses. Memory for addresses and scores belongs to the space, and is
 * reused by later calls.
 */

#include "client/methods/attend.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/sys.h"

/* ---- scratch memory -------------------------------------------------------------------------- */

static struct scratch *scratch_new(size_t bytes) {
        struct scratch *s = sys->calloc(1, sizeof *s + bytes);

        if (s)
                s->bytes = bytes;
        return s;
}

/*
 * Takes a buffer that an earlier call left, or makes one of twice the size, because contexts grow
 * by a token per call.
 */
struct scratch *scratch_take(struct kvd_space *space, size_t bytes) {
        for (uint32_t i = 0; i < ARRAY_SIZE(space->scratch); i++) {
                struct scratch *s = atomic_exchange(&space->scratch[i], NULL);

                if (s && s->bytes >= bytes)
                        return s;
                free(s);
        }
        return scratch_new(2 * bytes);
}

void scratch_put(struct kvd_space *space, struct scratch *s) {
        for (uint32_t i = 0; s && i < ARRAY_SIZE(space->scratch); i++)
                s = atomic_exchange(&space->scratch[i], s);
        free(s);
}

void attend_free_scratch(struct kvd_space *space) {
        for (uint32_t i = 0; i < ARRAY_SIZE(space->scratch); i++)
                free(atomic_exchange(&space->scratch[i], NULL));
}

/* ---- checks ---------------------------------------------------------------------------------- */

static struct view *find_view(struct kvd_space *space, const void *view) {
        struct view *it = atomic_load(&space->view);

        while (it && it != view)
                it = it->older;
        return it;
}

int attend_check_space(const struct kvd_space *space, uint32_t layer) {
        const struct kvd_shape *g = &space->geometry;
        int r = check_memory(space);

        if (r < 0)
                return r;
        if (kvd_shape_is_opaque(g))
                return client_fail(
                        -EINVAL, "space '%s' has opaque blocks (%s), in which kvd knows no layers",
                        space->name, g->layout);
        if (g->dtype == KVD_I8)
                return client_fail(-EINVAL,
                                   "attention supports no space of i8, whose scales kvd does not "
                                   "know: take q8");
        return layer < g->layers ? 0 : client_fail(-EINVAL, "layer %u of %u", layer, g->layers);
}

int attend_find_table(struct kvd_space *space, const struct kvd_table *t, struct view **ret) {
        uint64_t room = (uint64_t)t->n_blocks * space->geometry.block_tokens;

        *ret = find_view(space, t->view);
        if (!*ret)
                return client_fail(-EINVAL,
                                   "the table's view is not that of a pin or block of this space");
        if (t->n == 0 || (uint64_t)t->first + t->n > room)
                return client_fail(-EINVAL,
                                   "%u tokens from position %u on, in a table of %u blocks", t->n,
                                   t->first, t->n_blocks);
        return 0;
}

int attend_find_layer(struct kvd_space *space, uint32_t number, const struct kvd_table *t,
                      struct attend_layer *ret) {
        struct view *view;
        int r = attend_check_space(space, number);

        if (r == 0)
                r = attend_find_table(space, t, &view);
        if (r < 0)
                return r;
        if (view->device)
                return client_fail(-EINVAL, "the space's blocks are on a GPU, and this attention "
                                            "runs on the CPU: use kvd_batch_attention");
        *ret = (struct attend_layer){.geometry = &space->geometry,
                                     .ops = client_ops(),
                                     .view = view};
        layer_lay_out(view->ix, view->base, number, &ret->at);
        ret->keys = (size_t)(ret->at.keys - view->base);
        ret->values = (size_t)(ret->at.values - view->base);
        return 0;
}

int attend_check_block(const struct view *view, uint32_t id) {
        if (id < view->ix->capacity && view_has(view, kvd_segment_of(view->ix, id)))
                return 0;
        return client_fail(-EINVAL, "block %u of the table is not mapped", id);
}

static int find_block(const struct view *view, uint32_t id, uint8_t **ret) {
        int r = attend_check_block(view, id);

        if (r < 0)
                return r;
        *ret = view->base + id * view->ix->block_bytes;
        return 0;
}

/* A block to write to. In limbo: the daemon lost the connection, but this process still runs. */
static int find_filling(const struct view *view, uint32_t id, uint8_t **ret) {
        int r = find_block(view, id, ret);
        enum kvd_state state;

        if (r < 0)
                return r;
        state = kvd_slot_state(atomic_load(&kvd_index_desc(view->ix, id)->slot));
        if (state != KVD_FILLING && state != KVD_LIMBO)
                return client_fail(-EINVAL, "block %u of the table is not being filled", id);
        return 0;
}

/* ---- writing --------------------------------------------------------------------------------- */

static void store(const struct attend_layer *l, uint8_t *block, uint64_t slot, const float *k,
                  const float *v) {
        const struct kvd_shape *g = l->geometry;

        for (uint32_t h = 0; h < g->kv_heads; h++, slot += l->at.head_stride) {
                enum kvd_number type = (enum kvd_number)g->dtype;

                l->ops->write_key(block + l->keys + slot, k + h * g->head_dim, g->head_dim, type);
                l->ops->write_row(block + l->values + slot, v + h * g->head_dim, g->head_dim, type);
        }
}

int kvd_paged_write(struct kvd_space *space, uint32_t layer, const struct kvd_table *t,
                    const float *k, const float *v, size_t ld) {
        uint32_t tokens = space->geometry.block_tokens, last = UINT32_MAX;
        struct attend_layer l;
        uint8_t *block = NULL;
        int r = attend_find_layer(space, layer, t, &l);

        for (uint32_t i = 0; r == 0 && i < t->n; i++, k += ld, v += ld) {
                uint32_t position = t->first + i;
                uint64_t slot = position % tokens * l.at.token_stride;

                if (!block || position / tokens != last)
                        r = find_filling(l.view, t->blocks[position / tokens], &block);
                if (r < 0)
                        break;
                last = position / tokens;
                store(&l, block, slot, k, v);
        }
        return r;
}

/* ---- attention ------------------------------------------------------------------------------- */

struct kvd_attention attend_describe(const struct attend_layer *l, const struct kvd_table *t,
                                     const struct kvd_heads *heads) {
        const struct kvd_shape *g = l->geometry;

        return (struct kvd_attention){
                .ops = l->ops,
                .stride = l->at.token_stride,
                .type = (enum kvd_number)g->dtype,
                .block_tokens = g->block_tokens,
                .dim = g->head_dim,
                .first = t->first,
                .window = heads->window,
                .n = t->n,
                .group = heads->heads / g->kv_heads,
                .scale = heads->scale,
                .cap = heads->cap,
        };
}

void attend_exact(const struct kvd_heads *heads, uint32_t most, struct kvd_attention *a) {
        const struct kvd_exact *e = heads->exact;
        uint32_t n = e ? MIN(e->n, most) : 0;

        if (n == 0)
                return;
        a->exact_k = e->k + (e->n - n) * e->ld;
        a->exact_v = e->v + (e->n - n) * e->ld;
        a->exact_ld = e->ld;
        a->exact_first = a->first + a->n - n;
        a->exact_span = e->span;
}

void attend_head(const struct attend_layer *l, const struct kvd_heads *heads, uint32_t head,
                 struct kvd_attention a) {
        size_t query = (size_t)head * a.group;

        a.k_offset = l->keys + head * l->at.head_stride;
        a.v_offset = l->values + head * l->at.head_stride;
        if (a.exact_k) {
                a.exact_k += (size_t)head * a.dim;
                a.exact_v += (size_t)head * a.dim;
        }
        a.q += query * a.dim;
        a.out += query * a.dim;
        a.sinks = heads->sinks ? heads->sinks + query : NULL;
        a.weight = a.weight ? a.weight + query * a.n : NULL;
        kvd_attend(&a);
}

int attend_check_heads(const struct kvd_shape *g, const struct kvd_heads *heads) {
        if (g->rope == KVD_ROPE_PRE)
                return client_fail(-EINVAL, "the space's keys are stored before their rotation");
        if (heads->heads == 0 || heads->heads % g->kv_heads != 0)
                return client_fail(-EINVAL, "%u query heads do not share %u KV heads evenly",
                                   heads->heads, g->kv_heads);
        if (!(heads->cap >= 0 && heads->cap < INFINITY))
                return client_fail(-EINVAL, "the soft cap must be 0 or more, and finite");
        if (!(heads->scale > 0 && heads->scale < INFINITY))
                return client_fail(-EINVAL, "the scale must be more than 0, and finite");
        if (heads->exact && (heads->exact->n == 0 || heads->exact->span == 0))
                return client_fail(-EINVAL, "%u exact tokens, in spans of %u", heads->exact->n,
                                   heads->exact->span);
        return 0;
}

int attend_find_blocks(const struct attend_layer *l, const struct kvd_table *t, uint32_t n,
                       const uint8_t **blocks) {
        uint8_t *block = NULL;
        int r = 0;

        for (uint32_t i = 0; r == 0 && i < n; i++) {
                r = find_block(l->view, t->blocks[i], &block);
                blocks[i] = block;
        }
        return r;
}

int scratch_grow(struct scratch **s, size_t used, size_t bytes) {
        struct scratch *larger;

        if ((*s)->bytes >= bytes)
                return 0;
        larger = scratch_new(2 * bytes);
        if (!larger)
                return client_fail(-ENOMEM, "no memory for the scores of a call");
        memcpy(larger->data, (*s)->data, used);
        free(*s);
        *s = larger;
        return 0;
}

/* The table's addresses are at the start of the scratch memory, and the scores behind them. */
static int attend_in(struct scratch **s, const struct attend_layer *l, const struct kvd_table *t,
                     const struct kvd_heads *heads, struct kvd_attention *a) {
        uint32_t n_blocks = DIV_UP(t->first + t->n, a->block_tokens);
        size_t used = ALIGN_UP(n_blocks * sizeof(uint8_t *), ATTEND_LINE);
        int r = attend_find_blocks(l, t, n_blocks, (const uint8_t **)(*s)->data);

        if (r < 0)
                return r;
        a->blocks = (const uint8_t *const *)(*s)->data;
        r = scratch_grow(s, used, used + kvd_attend_scratch(a) * sizeof(float));
        if (r < 0)
                return r;
        a->blocks = (const uint8_t *const *)(*s)->data;
        a->scratch = (float *)((*s)->data + used);
        for (uint32_t h = 0; h < l->geometry->kv_heads; h++)
                attend_head(l, heads, h, *a);
        return 0;
}

int kvd_paged_attention(struct kvd_space *space, uint32_t layer, const struct kvd_table *t,
                        const struct kvd_heads *heads, const float *q, size_t ldq, float *out,
                        size_t ldo) {
        struct kvd_attention a;
        struct scratch *s;
        struct attend_layer l;
        int r = attend_find_layer(space, layer, t, &l);

        if (r == 0)
                r = attend_check_heads(l.geometry, heads);
        if (r < 0)
                return r;
        a = attend_describe(&l, t, heads);
        a.q = q;
        a.ldq = ldq;
        a.out = out;
        a.ldo = ldo;
        attend_exact(heads, a.first + a.n, &a);
        s = scratch_take(space, ALIGN_UP(t->n_blocks * sizeof(uint8_t *), ATTEND_LINE));
        if (!s)
                return client_fail(-ENOMEM, "no memory for a table of %u blocks", t->n_blocks);
        r = attend_in(&s, &l, t, heads, &a);
        scratch_put(space, s);
        return r;
}
