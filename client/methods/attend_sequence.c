/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attention over a sequence's entries as the methods have left them, and over a table behind them.
 * The kernel sees one table of slots: entry i has slots i * block_tokens and following, and the
 * table's begin behind the last entry. An entry that is not resident is a hole. A list names the
 * slots that hold tokens, if not all do.
 */

#include "client/methods/attend.h"

#include <errno.h>
#include <string.h>

#include "ipc/base/util.h"

/* A call. The pointers are into its scratch memory, one behind the other. */
struct call {
        const struct kvd_seen *seen;
        const struct attend_part *part; /* NULL: all */
        const struct kvd_entry *entries;
        uint32_t n; /* entries */
        const struct kvd_table *tail;
        uint32_t n_blocks; /* entries, and the tail's blocks that hold tokens */
        uint32_t n_slots;  /* of these, up to the last new token */
        bool gaps;         /* some slot of a resident entry holds no token */
        uint32_t turned;   /* entries whose delta is not 0 */
        struct attend_layer layer;

        const uint8_t **blocks;
        uint32_t *fill;     /* [n] tokens of each entry; 0: not resident */
        float *mass;        /* [n_blocks] */
        uint32_t *list;     /* [n_slots] slots that are seen */
        uint32_t *rotation; /* [n_blocks] */
        int32_t *deltas;    /* [n_blocks] */
        float *rotations;   /* [turned][head_dim] */
        size_t used;        /* bytes of all of these */
};

/* ---- checks ---------------------------------------------------------------------------------- */

static int check_entries(struct call *c, const struct kvd_heads *heads) {
        const struct kvd_shape *g = c->layer.geometry;

        for (uint32_t i = 0; i < c->n; i++) {
                const struct kvd_entry *e = c->entries + i;

                c->gaps |= e->data && e->n_tokens < g->block_tokens;
                c->turned += e->data && e->delta != 0;
                if (heads->window &&
                    (e->n_tokens < g->block_tokens || e->flags & KVD_ENTRY_COMPACT))
                        return client_fail(-EINVAL,
                                           "a sliding window over entry %u, whose slots are not"
                                           " positions one behind the other",
                                           i);
        }
        if (c->turned && (!c->seen->frequencies || g->head_dim % 2 != 0))
                return client_fail(-EINVAL,
                                   "an entry has a delta, and the call has no frequencies");
        return 0;
}

static int check(struct call *c, const struct kvd_heads *heads) {
        const struct kvd_sequence *s = c->seen->sequence;
        uint32_t bt = c->layer.geometry->block_tokens;
        int r = attend_check_heads(c->layer.geometry, heads);

        if (r < 0)
                return r;
        if (c->layer.view != s->view)
                return client_fail(-ESTALE,
                                   "the table and the sequence belong to different daemons");
        if (c->layer.geometry->layer_groups > 1)
                return client_fail(-EINVAL, "sequences of several layer groups");
        if ((uint64_t)c->n * bt + c->tail->first + c->tail->n > UINT32_MAX)
                return client_fail(-EINVAL, "more than 2^32 slots");
        return check_entries(c, heads);
}

/* The number of slots at the end whose positions follow one another without gaps. */
static uint32_t plain_slots(const struct call *c) {
        uint32_t bt = c->layer.geometry->block_tokens, i = c->n;

        while (i > 0 && c->entries[i - 1].n_tokens == bt && c->entries[i - 1].delta == 0 &&
               !(c->entries[i - 1].flags & KVD_ENTRY_COMPACT))
                i--;
        return c->n_slots - i * bt;
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Where n bytes begin; the next ones begin behind them. */
static size_t place(struct call *c, size_t n) {
        size_t at = c->used;

        c->used += ALIGN_UP(n, ATTEND_LINE);
        return at;
}

/* Sets the pointers into scratch memory that begins at base; 0: only counts its bytes. */
static void lay_out(struct call *c, uintptr_t base) {
        uint32_t dim = c->layer.geometry->head_dim;
        uint32_t n_turned = c->turned ? c->n_blocks : 0,
                 n_listed = c->gaps || c->seen->chosen ? c->n_slots : 0;

        c->used = 0;
        c->blocks = (const uint8_t **)(base + place(c, c->n_blocks * sizeof *c->blocks));
        c->fill = (uint32_t *)(base + place(c, c->n * sizeof *c->fill));
        c->mass = (float *)(base + place(c, c->n_blocks * sizeof *c->mass));
        c->list = (uint32_t *)(base + place(c, n_listed * sizeof *c->list));
        c->rotation = (uint32_t *)(base + place(c, n_turned * sizeof *c->rotation));
        c->deltas = (int32_t *)(base + place(c, n_turned * sizeof *c->deltas));
        c->rotations = (float *)(base + place(c, (size_t)c->turned * dim * sizeof *c->rotations));
}

/* ---- what is seen ---------------------------------------------------------------------------- */

static int fill_blocks(struct call *c) {
        const bool *without = c->part ? c->part->without : NULL;
        uint32_t n_behind = c->n_blocks - c->n;

        for (uint32_t i = 0; i < c->n; i++) {
                c->blocks[i] = without && without[i] ? NULL : c->entries[i].data;
                c->fill[i] = c->blocks[i] ? c->entries[i].n_tokens : 0;
        }
        if (!c->part || c->part->behind)
                return attend_find_blocks(&c->layer, c->tail, n_behind, c->blocks + c->n);
        memset(c->blocks + c->n, 0, n_behind * sizeof *c->blocks);
        return 0;
}

/* There are at most as many deltas as entries that have one. */
static void fill_rotations(struct call *c) {
        memset(c->rotation, 0, c->n_blocks * sizeof *c->rotation);
        for (uint32_t i = 0; i < c->n_blocks; i++)
                c->deltas[i] = i < c->n && c->entries[i].data ? c->entries[i].delta : 0;
        kvd_rotations(c->deltas, c->n_blocks, c->seen->frequencies, c->layer.geometry->head_dim / 2,
                      c->rotation, c->rotations, c->turned);
}

static uint32_t list_all(const uint32_t *fill, uint32_t n, uint32_t block_tokens, uint32_t *to) {
        uint32_t listed = 0;

        for (uint32_t i = 0; i < n; i++)
                for (uint32_t j = 0; j < fill[i]; j++)
                        to[listed++] = i * block_tokens + j;
        return listed;
}

/* Chosen slots that hold no token are left out. */
static uint32_t list_chosen(const uint32_t *fill, uint32_t n, uint32_t block_tokens,
                            const uint32_t *chosen, uint32_t n_chosen, uint32_t *to) {
        uint32_t listed = 0;

        for (uint32_t i = 0; i < n_chosen; i++) {
                uint32_t slot = chosen[i], entry = slot / block_tokens;

                if (entry < n && slot % block_tokens < fill[entry] &&
                    (listed == 0 || slot > to[listed - 1]))
                        to[listed++] = slot;
        }
        return listed;
}

uint32_t attend_list(const uint32_t *fill, uint32_t n, uint32_t block_tokens, uint32_t n_slots,
                     const uint32_t *chosen, uint32_t n_chosen, uint32_t *to) {
        uint32_t listed = chosen ? list_chosen(fill, n, block_tokens, chosen, n_chosen, to) :
                                   list_all(fill, n, block_tokens, to);

        for (uint32_t slot = n * block_tokens; slot < n_slots; slot++)
                to[listed++] = slot;
        return listed;
}

static void choose(struct call *c, uint32_t head, struct kvd_attention *a) {
        static const uint32_t none; /* an empty list may be NULL */
        const uint32_t *chosen = c->seen->chosen ? c->seen->chosen[head] : NULL;

        if (c->seen->chosen)
                a->n_chosen = attend_list(c->fill, c->n, a->block_tokens, c->n_slots,
                                          chosen ? chosen : &none, c->seen->n_chosen[head],
                                          c->list);
        else if (c->gaps && head == 0)
                a->n_chosen = attend_list(c->fill, c->n, a->block_tokens, c->n_slots, NULL, 0,
                                          c->list);
}

/* ---- the call -------------------------------------------------------------------------------- */

static void attend(struct call *c, const struct kvd_heads *heads, struct kvd_attention *a) {
        memset(c->mass, 0, c->n_blocks * sizeof *c->mass);
        a->blocks = (const uint8_t *const *)c->blocks;
        a->block_mass = c->seen->mass ? c->mass : NULL;
        a->weight = c->part ? c->part->weight : NULL;
        a->chosen = c->gaps || c->seen->chosen ? c->list : NULL;
        a->rotation = c->turned ? c->rotation : NULL;
        a->rotations = c->rotations;
        for (uint32_t h = 0; h < c->layer.geometry->kv_heads; h++) {
                choose(c, h, a);
                attend_head(&c->layer, heads, h, *a);
        }
        for (uint32_t i = 0; c->seen->mass && i < c->n; i++)
                c->seen->mass[i] += c->mass[i];
}

/* a needs most scratch memory when it sees all slots. */
static int attend_in(struct scratch **s, struct call *c, const struct kvd_heads *heads,
                     struct kvd_attention *a) {
        int r;

        a->n_chosen = c->gaps || c->seen->chosen ? c->n_slots : 0;
        a->chosen = a->n_chosen ? c->list : NULL;
        a->rotation = c->turned ? c->rotation : NULL;
        r = scratch_grow(s, 0, c->used + kvd_attend_scratch(a) * sizeof(float));
        if (r < 0)
                return r;
        lay_out(c, (uintptr_t)(*s)->data);
        a->scratch = (float *)((*s)->data + c->used);
        r = fill_blocks(c);
        if (r == 0 && c->turned)
                fill_rotations(c);
        if (r == 0)
                attend(c, heads, a);
        return r;
}

int attend_sequence(const struct kvd_seen *seen, uint32_t layer, const struct kvd_table *tail,
                    const struct kvd_heads *heads, const struct attend_part *part, const float *q,
                    size_t ldq, float *out, size_t ldo) {
        struct kvd_sequence *sequence = seen->sequence;
        struct call c = {.seen = seen, .part = part, .tail = tail};
        struct kvd_attention a;
        struct scratch *s;
        int r = attend_find_layer(sequence->space, layer, tail, &c.layer);

        c.entries = kvd_sequence_entries(sequence, &c.n);
        if (r == 0)
                r = check(&c, heads);
        if (r < 0)
                return r;
        a = attend_describe(&c.layer, tail, heads);
        a.first += c.n * a.block_tokens;
        a.q = q;
        a.ldq = ldq;
        a.out = out;
        a.ldo = ldo;
        c.n_slots = a.first + a.n;
        attend_exact(heads, plain_slots(&c), &a);
        c.n_blocks = DIV_UP(c.n_slots, a.block_tokens);
        lay_out(&c, 0);
        s = scratch_take(sequence->space, c.used);
        if (!s)
                return client_fail(-ENOMEM, "no memory for %u entries", c.n);
        r = attend_in(&s, &c, heads, &a);
        scratch_put(sequence->space, s);
        return r;
}

int kvd_sequence_attention(const struct kvd_seen *seen, uint32_t layer,
                           const struct kvd_table *tail, const struct kvd_heads *heads,
                           const float *q, size_t ldq, float *out, size_t ldo) {
        return attend_sequence(seen, layer, tail, heads, NULL, q, ldq, out, ldo);
}
