/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A request whose blocks the daemon's methods work on. Before each step it takes over the changes
 * that the daemon proposes, and turns the sequence's table into what attention reads: addresses,
 * rotations and holes.
 */

#include "tools/kvlm/pooled_internal.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#include <time.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tools/kvlm/refuse.h"

enum {
        LONG_STEP = 3, /* blocks: the step after one this long begins in a fresh block */
        WAITS = 200,   /* maximum number of waits for room in the pool, ROOM_NS each */
};
#define ROOM_NS 2000000L

/* ---- settings of the space ------------------------------------------------------------------- */

static double setting(kvd_space *space, const char *name) {
        double value = 0;

        kvd_space_setting(space, name, &value);
        return value;
}

double pooled_setting(const struct pooled *p, const char *name) {
        return setting(p->space, name);
}

bool pooled_wanted(const struct pooled_options *o, struct cache *cache) {
        kvd_space *space = cache_space(cache);

        if (o->use == POOLED_OFF || !space)
                return false;
        return o->use == POOLED_ON || setting(space, "memshare") > 0 ||
               setting(space, "kvreviver") > 0 || setting(space, "hshare") > 0 ||
               eviction_budget(space);
}

bool pooled_owns_prompt(const struct pooled_options *o, struct cache *cache) {
        return o->own_prompt || eviction_budget(cache_space(cache));
}

uint32_t pooled_not_found(const struct pooled_options *o, struct cache *cache, uint32_t tail) {
        if (pooled_owns_prompt(o, cache))
                return UINT32_MAX;
        return tail + (setting(cache_space(cache), "hshare") > 0 ? READER_CALIBRATION : 1);
}

uint32_t pooled_capacity(uint32_t n_tokens, uint32_t block_tokens) {
        return n_tokens + n_tokens / LONG_STEP + 2 * block_tokens;
}

/* ---- addresses and rotations for attention --------------------------------------------------- */

static void make_turns(struct pooled *p) {
        uint32_t n_blocks = p->n_entries;
        bool before = p->rotated;

        p->rotated = false;
        for (uint32_t i = 0; i < n_blocks; i++)
                p->rotated |= p->deltas[i] != 0;
        if (!p->rotated && !before)
                return;
        memset(p->rotation, 0, p->room * sizeof *p->rotation);
        kvd_rotations(p->deltas, n_blocks, p->setup.frequencies, p->half, p->rotation, p->rotations,
                      p->room);
}

/* Lists the slots in use, after entries were compacted or dropped. */
static void list_used(struct pooled *p) {
        uint32_t n = 0, open = p->n_entries * p->bt;

        for (uint32_t i = 0; i < p->n_entries; i++)
                for (uint32_t j = 0; j < p->fill[i]; j++)
                        p->used[n++] = i * p->bt + j;
        for (uint32_t slot = open; slot < p->n_slots + p->in_step; slot++)
                p->used[n++] = slot;
        p->n_used = n - p->in_step;
        p->gaps = true;
        p->renumbered++;
}

static void take_over(struct pooled *p) {
        const struct kvd_entry *entries;
        bool refilled = false;
        uint32_t n;

        entries = kvd_sequence_entries(p->table, &n);
        for (uint32_t i = 0; i < MIN(n, p->n_entries); i++) {
                uint32_t fill = entries[i].flags & KVD_ENTRY_DROPPED ? 0 : entries[i].n_tokens;

                p->blocks[i] = entries[i].data;
                p->deltas[i] = entries[i].data ? entries[i].delta : 0;
                p->flags[i] = entries[i].flags;
                refilled |= fill != p->fill[i];
                p->fill[i] = fill;
        }
        if (refilled)
                list_used(p);
        make_turns(p);
        p->s->unpublished = true;
}

static void took(struct pooled *p, int changes) {
        if (changes <= 0)
                return;
        p->stats.changes += (uint32_t)changes;
        p->late = false;
        take_over(p);
}

void pooled_wait(struct pooled *p) {
        double started = sys_now_ms();
        int r;

        if (!p->table)
                return;
        r = kvd_sequence_wait(p->table,
                              p->late ? 0 : p->setup.options->wait_ms * UINT64_C(1000000));
        if (r == -ETIMEDOUT && !p->late) {
                p->late = true;
                p->stats.late++;
        }
        /* changes may have been taken over before the timeout */
        took(p, r == -ETIMEDOUT ? 1 : r);
        p->stats.wait_ms += sys_now_ms() - started;
}

static void take_proposals(struct pooled *p) {
        if (p->table)
                took(p, kvd_sequence_sync(p->table));
}

/*
 * The pool is full: waits for blocks that others free or that the daemon takes from this sequence.
 */
static bool wait_for_room(void *data, uint32_t tries) {
        const struct timespec pause = {0, ROOM_NS};
        struct pooled *p = data;

        if (!p->table || tries >= WAITS)
                return false;
        p->stats.waits++;
        nanosleep(&pause, NULL);
        take_proposals(p);
        return true;
}

/* ---- life ------------------------------------------------------------------------------------ */

struct pooled *pooled_free(struct pooled *p) {
        if (!p)
                return NULL;
        p->s->on_full = NULL;
        kvd_reader_free(p->reader);
        kvd_sequence_close(p->table);
        free(p->lists);
        free(p->rotations);
        free(p->rotation);
        free(p->deltas);
        free(p->flags);
        free(p->blocks);
        free(p->fill);
        free(p->first);
        free(p->used);
        free(p);
        return NULL;
}

static int allocate(struct pooled *p, uint32_t head_dim) {
        p->used = calloc(p->capacity, sizeof *p->used);
        p->first = calloc(p->room + 1, sizeof *p->first);
        p->fill = calloc(p->room, sizeof *p->fill);
        p->blocks = calloc(p->room, sizeof *p->blocks);
        p->flags = calloc(p->room, sizeof *p->flags);
        p->deltas = calloc(p->room, sizeof *p->deltas);
        p->rotation = calloc(p->room, sizeof *p->rotation);
        p->rotations = calloc((size_t)p->room * head_dim, sizeof *p->rotations);
        p->lists = calloc((size_t)p->setup.kv_heads * p->capacity, sizeof *p->lists);
        if (!p->used || !p->first || !p->fill || !p->blocks || !p->flags || !p->deltas ||
            !p->rotation || !p->rotations || !p->lists)
                return refuse(-ENOMEM, "out of memory for a sequence of %u tokens", p->capacity);
        return 0;
}

/* Sets up what the enabled methods need. Without a table they do not work. */
static int add_methods(struct pooled *p, uint32_t head_dim) {
        const struct kvd_reader_options options = {
                .heads = p->setup.kv_heads * p->setup.group,
                .scale = 1 / sqrtf((float)head_dim),
                .frequencies = p->setup.frequencies,
                .timeout_ns = p->setup.options->wait_ms * UINT64_C(1000000),
        };

        if (!p->table)
                return 0;
        p->evicts = eviction_budget(p->space);
        if (kvd_reader_new(p->table, &options, &p->reader) < 0)
                return refuse(-ENOMEM, "%s", kvd_error());
        return 0;
}

int pooled_new(const struct pooled_setup *setup, struct sequence *s, uint32_t capacity,
               struct pooled **ret) {
        const struct cache_options *o = cache_options(s->cache);
        struct pooled *p = calloc(1, sizeof *p);
        int r;

        if (!p)
                return refuse(-ENOMEM, "out of memory");
        *p = (struct pooled){.setup = *setup,
                             .s = s,
                             .space = cache_space(s->cache),
                             .bt = o->shape.tokens,
                             .half = o->shape.head_dim / 2,
                             .capacity = capacity,
                             .room = DIV_UP(capacity, o->shape.tokens) + 1,
                             .stats = {.used = true}};
        r = allocate(p, o->shape.head_dim);
        if (r == 0 && !s->alone && p->space && kvd_sequence_open(p->space, p->room, &p->table) < 0)
                p->table = NULL; /* continue without a table */
        if (r == 0)
                r = add_methods(p, o->shape.head_dim);
        s->on_full = wait_for_room;
        s->on_full_data = p;
        if (r < 0) {
                pooled_free(p);
                return r;
        }
        *ret = p;
        return 0;
}

/* ---- steps of reasoning ---------------------------------------------------------------------- */

static bool ends_step(const struct pooled *p, uint32_t token) {
        size_t size;
        const char *text = tokenizer_decode(p->setup.tokenizer, token, &size);

        return size >= 2 && memcmp(text + size - 2, "\n\n", 2) == 0;
}

static bool in_own_part(const struct pooled *p, uint32_t token) {
        return p->setup.options->own_prompt || p->evicts || token >= p->setup.prompt;
}

/* Whether queries look at what they need. */
static bool selects(const struct pooled *p) {
        return p->reader && reader_looks(p->reader);
}

uint32_t pooled_step_limit(const struct pooled *p, uint32_t first) {
        uint32_t dense = pooled_dense(p), most = selects(p) ? 1 : UINT32_MAX, n = 1;

        if (first < dense)
                most = eviction_limit(p, first);
        if (!in_own_part(p, first))
                return most;
        while (n < most && first + n < p->s->n_tokens && !ends_step(p, p->s->tokens[first + n - 1]))
                n++;
        return n;
}

/* Skips the rest of the block: the next token begins in a fresh one. */
static void close_block(struct pooled *p) {
        uint32_t empty = ALIGN_UP(p->n_slots, p->bt) - p->n_slots;

        if (empty == 0)
                return;
        p->n_slots += empty;
        p->first[p->n_slots / p->bt] = p->n;
        p->stats.empty_slots += empty;
        p->gaps = true;
}

static void end_step(struct pooled *p) {
        uint32_t n = p->n - p->step_first;

        if (p->table && n > 0 && p->first[p->n_entries] > p->step_first) {
                kvd_sequence_step(p->table, p->step_first,
                                  MIN(p->first[p->n_entries], p->n) - p->step_first);
                pooled_wait(p);
        }
        p->stats.steps++;
        p->step_first = p->n;
        p->last_step = n / p->bt;
}

/* ---- the pool's table ------------------------------------------------------------------------ */

static uint32_t id_of(const struct pooled *p, uint32_t i) {
        return (uint32_t)((uint64_t)(p->s->blocks[i] - p->s->pin.base) / p->s->pin.block_bytes);
}

/* Makes the next block, which is complete, an entry. False if that is impossible. */
static bool enter(struct pooled *p) {
        uint32_t i = p->n_entries, n = p->first[i + 1] - p->first[i], id;
        const uint32_t *tokens = p->s->tokens + p->first[i];
        int r = 0;

        if (p->s->kinds[i] == BLOCK_PRIVATE)
                return false;
        if (p->s->kinds[i] == BLOCK_FILLING) {
                r = kvd_sequence_append(p->table, 1, p->s->pool + i, tokens, n);
                p->s->kinds[i] = r == 1 ? BLOCK_OWN : p->s->kinds[i];
                p->flags[i] = r == 1 ? KVD_ENTRY_OWN : 0;
        } else {
                id = id_of(p, i);
                r = kvd_sequence_borrow(p->table, &p->s->pin, 1, &id, tokens);
                p->flags[i] = KVD_ENTRY_BORROWED;
        }
        return r >= 0;
}

static void enter_all(struct pooled *p) {
        while (p->n_entries < p->n_slots / p->bt) {
                uint32_t i = p->n_entries;

                /* if published, it may be another client's block now */
                p->blocks[i] = p->s->blocks[i];
                if (p->table && !p->stuck && !enter(p))
                        p->stuck = true;
                p->fill[i] = p->first[i + 1] - p->first[i];
                p->n_entries++;
        }
}

/* ---- a step of computing --------------------------------------------------------------------- */

/* Accounts for stored tokens that were found meanwhile; none of ours exist yet. */
static void take_found(struct pooled *p, uint32_t first) {
        for (; p->n < first; p->n++)
                p->used[p->n_used++] = p->n_slots++;
        for (uint32_t i = 0; i <= p->n_slots / p->bt; i++)
                p->first[i] = i * p->bt;
}

/* Number of tokens behind the table's entries. */
static uint32_t count_behind(const struct pooled *p) {
        uint32_t n, behind = p->n_used;

        kvd_sequence_entries(p->table, &n);
        for (uint32_t i = 0; i < n; i++)
                behind -= p->fill[i];
        return behind;
}

static void begin_reading(struct pooled *p, uint32_t n) {
        p->behind = count_behind(p);
        p->in_step = n;
        kvd_reader_begin(p->reader, p->behind + n, n);
}

int pooled_prepare(struct pooled *p, struct step *step) {
        int r;

        if (step->first > p->n)
                take_found(p, step->first);
        for (uint32_t i = 0; i < step->n; i++)
                p->used[p->n_used + i] = p->n_slots + i;
        r = sequence_extend(p->s, p->n_slots + step->n);
        for (uint32_t i = p->n_entries; i < p->s->n_blocks; i++)
                p->blocks[i] = p->s->blocks[i];
        if (p->reader)
                begin_reading(p, step->n);
        step->view = (struct view){
                .blocks = p->blocks,
                .gone = step->first - p->n_slots,
                .chosen = p->gaps ? p->used : NULL,
                .n_chosen = p->n_used + step->n,
                /* in a step of one token, a rotation may appear during the step */
                .rotation = p->rotated || step->n == 1 ? p->rotation : NULL,
                .rotations = p->rotations,
                .block_mass = p->reader && step->n == 1 ? reader_mass(p->reader) : NULL,
                .pooled = selects(p) ? p : NULL,
        };
        return r;
}

bool pooled_publishes(const struct pooled *p, uint32_t n_computed) {
        return !p->setup.options->own_prompt && !p->evicts && n_computed <= pooled_dense(p);
}

static void fill_first(struct pooled *p, uint32_t n_computed) {
        p->in_step = 0;
        for (; p->n < n_computed; p->n++) {
                if (p->n_slots % p->bt == 0)
                        p->first[p->n_slots / p->bt] = p->n;
                p->used[p->n_used++] = p->n_slots++;
        }
        p->first[DIV_UP(p->n_slots, p->bt)] = p->n;
}

void pooled_look(struct pooled *p, uint32_t layer, uint32_t head, const struct kvd_attention *a) {
        reader_look(p->reader, layer, head, a->q, a->ldq);
}

void pooled_fetch(struct pooled *p, uint32_t layer) {
        int changes = reader_fetch(p->reader);

        took(p, changes < 0 ? 1 : changes); /* the step goes on without blocks that do not come */
        reader_seen(p->reader, layer, &p->seen);
}

/* The tokens behind the table's entries, and this token's own, are always attended to. */
void pooled_choose(struct pooled *p, uint32_t head, struct kvd_attention *a) {
        uint32_t *list = p->lists + (size_t)head * p->capacity, n = p->behind + a->n;

        if (!p->seen.chosen) { /* slots may have gone out of use since the step began */
                a->chosen = p->gaps ? p->used : NULL;
                a->n_chosen = p->n_used + a->n;
                return;
        }
        a->n_chosen = p->seen.n_chosen[head];
        memcpy(list, p->seen.chosen[head], a->n_chosen * sizeof *list);
        memcpy(list + a->n_chosen, p->used + p->n_used - p->behind, n * sizeof *list);
        a->n_chosen += n;
        a->chosen = list;
}

/* Called when the last chunk of the prompt is in the table. */
static int begin_decoding(struct pooled *p) {
        int changes = kvd_reader_decode(p->reader, count_behind(p));

        if (changes < 0)
                return refuse(changes, "%s", kvd_error());
        took(p, changes);
        return 0;
}

int pooled_settle(struct pooled *p, uint32_t n_computed) {
        bool own;
        int r = 0;

        fill_first(p, n_computed);
        p->s->n_computed = n_computed;
        own = in_own_part(p, n_computed - 1);
        if (!own)
                p->step_first = n_computed;
        else if (ends_step(p, p->s->tokens[n_computed - 1])) {
                if (p->setup.options->align && (n_computed - p->step_first) / p->bt >= LONG_STEP)
                        close_block(p);
                enter_all(p);
                end_step(p);
        }
        enter_all(p);
        if (p->reader)
                took(p, kvd_reader_end(p->reader));
        if (p->reader && n_computed == pooled_dense(p))
                r = begin_decoding(p);
        if (p->evicts)
                eviction_settle(p);
        if (own)
                take_proposals(p);
        return r;
}

struct pooled_stats pooled_stats(const struct pooled *p) {
        struct pooled_stats stats = p->stats;

        if (p->reader)
                kvd_reader_stats(p->reader, &stats.reader);
        if (p->table)
                kvd_sequence_stats(p->table, &stats.table);
        return stats;
}
