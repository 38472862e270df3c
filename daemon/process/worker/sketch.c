/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A sketch consists of cells. Tokens' keys and values are added to the cells at places that a hash
 * of the tokens' ordinals gives. From sketch_begin to sketch_end the sketch is marked as being
 * changed, so that the death of a worker in between is noticed.
 *
 * The processor does this for blocks on a GPU, too. A sketch is in host memory, since its purpose
 * is to save GPU memory, and since it outlives workers. For every number, a kernel would read and
 * write a float in each of the sketch's rows across the bus (24 bytes, with three rows), and read
 * one in each row for a query (12 bytes). The number itself has 2 bytes, and is copied once, by the
 * copy engine.
 */

#include "daemon/process/worker/sketch.h"

#include <errno.h>
#include <string.h>

/*
 * Values of kvreviver.key_mode and kvreviver.hash (methods.def). The header has them plus 1; 0
 * means that the sketch was not begun.
 */
enum { KEYS_UNSIGNED, KEYS_SIGNED, KEYS_CENTRED };
enum { HASH_UNIFORM, HASH_PERMUTATION };

/* ---- open ------------------------------------------------------------------------------------ */

static void learn_hash(struct sketch_use *use) {
        const struct kvd_sketch_header *h = use->header;

        use->hash = (struct kvd_sketch_hash){.family = h->hash == 1 + HASH_UNIFORM ?
                                                               KVD_SKETCH_UNIFORM :
                                                               KVD_SKETCH_PERMUTATION,
                                             .rows = h->rows,
                                             .columns = h->columns,
                                             .salt = h->salt};
}

/* A sketch that was not begun takes the current settings. */
static void settle_modes(struct sketch_use *use) {
        struct kvd_sketch_header *h = use->header;

        if (!h->key_mode || !h->hash) {
                h->key_mode = 1 + (uint32_t)task_setting(use->task, KVD_kvreviver_key_mode);
                h->hash = 1 + (uint32_t)task_setting(use->task, KVD_kvreviver_hash);
        }
        learn_hash(use);
}

int sketch_open(struct task *task, struct sketch_use *use) {
        struct kvd_sketch_header *h = task->sketch ? task->sketch->at : NULL;
        size_t plane;
        int r;

        if (!h)
                return task_refuse(task, -EPROTO, "a job without a sketch");
        r = task_needs_numbers(task);
        if (r < 0)
                return r;
        if (__atomic_load_n(&h->state, __ATOMIC_ACQUIRE) != KVD_SKETCH_IDLE &&
            task->job->kind != KVD_JOB_REBUILD)
                return task_refuse(task, -ESTALE, "sketch %u is half written; it must be rebuilt",
                                   task->sketch->number);
        plane = (size_t)h->rows * h->columns * h->cell_floats;
        *use = (struct sketch_use){.task = task, .header = h, .mean = (float *)(h + 1)};
        use->keys = use->mean + h->cell_floats;
        use->values = use->keys + plane;
        use->members = task_room(task, task->job->n_items, sizeof *use->members);
        use->n = task->job->n_items;
        settle_modes(use);
        return use->members ? 0 : -ENOMEM;
}

int sketch_add(struct sketch_use *use, uint32_t i, uint8_t *block) {
        struct task *task = use->task;
        const struct kvd_job_item *item = &task->items[i];
        struct sketch_member *m = &use->members[i];
        uint64_t ordinals[KVD_MAX_PLANE_TOKENS];

        m->n_tokens = MIN(item->n_tokens, task->shape.tokens);
        m->places = task_room(task, (size_t)m->n_tokens * use->hash.rows, sizeof *m->places);
        if (!m->places)
                return -ENOMEM;
        for (uint32_t t = 0; t < m->n_tokens; t++)
                ordinals[t] = (uint64_t)item->ordinal + t;
        kvd_sketch_place(&use->hash, ordinals, m->n_tokens, m->places);
        m->block = block;
        return 0;
}

void sketch_look_at(struct sketch_use *use, uint32_t first, uint32_t n) {
        use->first = first;
        use->n = n;
        for (uint32_t i = first; i < first + n; i++)
                if (use->members[i].block)
                        use->members[i].block = task_block(use->task, i);
}

uint64_t sketch_tokens(const struct sketch_use *use) {
        uint64_t n = 0;

        for (uint32_t i = 0; i < use->task->job->n_items; i++)
                n += use->members[i].block ? use->members[i].n_tokens : 0;
        return n;
}

/* ---- the mark -------------------------------------------------------------------------------- */

/*
 * Other processes read the mark only after this one has ended. So it is enough that the compiler
 * does not move writes out of the range between begin and end.
 */
void sketch_begin(struct sketch_use *use) {
        use->header->job = use->task->job->id;
        __atomic_store_n(&use->header->state, KVD_SKETCH_BUSY, __ATOMIC_RELAXED);
        __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

void sketch_end(struct sketch_use *use, int64_t tokens) {
        use->header->n_tokens = (uint32_t)MAX((int64_t)use->header->n_tokens + tokens, 0);
        __atomic_store_n(&use->header->state, KVD_SKETCH_IDLE, __ATOMIC_RELEASE);
}

/* ---- parts ----------------------------------------------------------------------------------- */

/* The cells of one layer and head (number `at`), for keys or for values. */
static struct kvd_sketch_part part_of(const struct sketch_use *use, uint32_t at, bool values) {
        const struct kvd_sketch_header *h = use->header;
        uint32_t dim = use->task->shape.dim;
        struct kvd_sketch_part part = {.stride = h->cell_floats,
                                       .rows = h->rows,
                                       .columns = h->columns,
                                       .dim = dim};

        part.cells = (values ? use->values : use->keys) + (size_t)at * dim;
        part.sign = values                           ? KVD_SKETCH_VALUE_SIGN :
                    h->key_mode == 1 + KEYS_UNSIGNED ? 0 :
                                                       KVD_SKETCH_KEY_SIGN;
        part.mean = !values && h->has_mean ? use->mean + (size_t)at * dim : NULL;
        return part;
}

static struct kvd_sketch_vectors vectors_of(const struct task *task, uint8_t *const *block,
                                            uint32_t at, bool values) {
        const struct shape *s = &task->shape;
        uint32_t layer = at / s->heads, head = at % s->heads;

        return (struct kvd_sketch_vectors){.blocks = block,
                                           .offset = (2 * layer + values) * s->plane +
                                                     head * s->head_stride,
                                           .stride = s->token_stride,
                                           .per_block = s->tokens,
                                           .type = s->type};
}

/* Calls piece for each part; a call processes n items. */
static void on_all_parts(struct sketch_use *use, uint32_t n, threads_piece *piece, void *data) {
        struct task *task = use->task;
        uint32_t parts = task->shape.layers * task->shape.heads;

        task_share(task, parts, n * task->shape.block_bytes / parts * (1 + use->hash.rows), piece,
                   data);
}

/* ---- insertion ------------------------------------------------------------------------------- */

struct change {
        struct sketch_use *use;
        uint32_t first, n; /* items */
        float weight;
        float *rooms; /* [thread][token][dim] */
};

#define ITEMS_BYTES (UINT64_C(8) << 20) /* items that are inserted or removed at a time */

/* In batches. Each cell gets the items in order, whatever the size of a batch. */
static void on_all_items(struct sketch_use *use, struct change *change, threads_piece *piece) {
        const struct task *task = use->task;
        uint32_t most = (uint32_t)MAX(ITEMS_BYTES / task->shape.block_bytes, 1);
        uint32_t end = use->first + use->n;

        for (change->first = use->first; change->first < end; change->first += change->n) {
                change->n = MIN(most, end - change->first);
                on_all_parts(use, change->n, piece, change);
        }
}

static void change_part(void *data, uint32_t at, uint32_t thread) {
        const struct change *change = data;
        const struct sketch_use *use = change->use;
        const struct task *task = use->task;

        for (int values = 0; values < 2; values++) {
                struct kvd_sketch_part part = part_of(use, at, values);

                for (uint32_t i = change->first; i < change->first + change->n; i++) {
                        const struct sketch_member *m = &use->members[i];
                        struct kvd_sketch_vectors x = vectors_of(task, &m->block, at, values);

                        if (m->block)
                                task->ops->sketch->insert(&part, m->places, m->n_tokens, &x,
                                                          change->weight);
                }
        }
}

/* One token's key as floats. */
static const float *key_floats(const struct task *task, const uint8_t *key, float *room) {
        if (task->shape.type == KVD_NUMBER_F32)
                return (const float *)key;
        task->ops->read_row(room, key, task->shape.dim, task->shape.type);
        return room;
}

static void mean_part(void *data, uint32_t at, uint32_t thread) {
        const struct change *change = data;
        const struct sketch_use *use = change->use;
        const struct task *task = use->task;
        const struct shape *s = &task->shape;
        float *mean = use->mean + (size_t)at * s->dim,
              *room = change->rooms + (size_t)thread * s->dim;
        float n = (float)sketch_tokens(use);

        if (change->first == 0)
                memset(mean, 0, s->dim * sizeof *mean);
        for (uint32_t i = change->first; i < change->first + change->n; i++) {
                const struct sketch_member *m = &use->members[i];

                for (uint32_t t = 0; m->block && t < m->n_tokens; t++) {
                        const uint8_t *key = head_keys(s, m->block, at / s->heads, at % s->heads) +
                                             t * s->token_stride;
                        const float *k = key_floats(task, key, room);

                        for (uint32_t d = 0; d < s->dim; d++)
                                mean[d] += k[d] / n;
                }
        }
}

bool sketch_wants_mean(const struct sketch_use *use) {
        return use->header->key_mode == 1 + KEYS_CENTRED && !use->header->has_mean;
}

int sketch_add_to_mean(struct sketch_use *use) {
        struct task *task = use->task;
        struct change change = {.use = use};

        change.rooms = task_room(task, (size_t)threads_count(task->threads) * task->shape.dim,
                                 sizeof(float));
        if (!change.rooms)
                return -ENOMEM;
        on_all_items(use, &change, mean_part);
        return 0;
}

void sketch_freeze_mean(struct sketch_use *use) {
        use->header->has_mean = 1;
}

void sketch_insert(struct sketch_use *use) {
        struct change change = {.use = use, .weight = 1.0f};

        on_all_items(use, &change, change_part);
}

/* ---- removal and queries --------------------------------------------------------------------- */

void sketch_remove(struct sketch_use *use) {
        struct change change = {.use = use, .weight = -1.0f};

        on_all_items(use, &change, change_part);
}

/* Algorithm 3 of the paper: removes the estimate, which contains parts of other tokens. */
static void remove_estimate(void *data, uint32_t at, uint32_t thread) {
        const struct change *change = data;
        const struct sketch_use *use = change->use;
        const struct task *task = use->task;
        const struct shape *s = &task->shape;
        uint8_t *room = (uint8_t *)(change->rooms + (size_t)thread * s->tokens * s->dim);
        const struct kvd_sketch_vectors x = {.blocks = &room,
                                             .stride = s->dim * sizeof(float),
                                             .per_block = s->tokens,
                                             .type = KVD_NUMBER_F32};

        for (int values = 0; values < 2; values++) {
                struct kvd_sketch_part part = part_of(use, at, values);

                for (uint32_t i = 0; i < task->job->n_items; i++) {
                        const struct sketch_member *m = &use->members[i];

                        if (!m->block)
                                continue;
                        task->ops->sketch->query(&part, m->places, m->n_tokens, &x, 1.0f);
                        task->ops->sketch->insert(&part, m->places, m->n_tokens, &x, -1.0f);
                }
        }
}

int sketch_remove_estimates(struct sketch_use *use) {
        struct task *task = use->task;
        struct change change = {.use = use};

        change.rooms = task_room(task,
                                 (size_t)threads_count(task->threads) * task->shape.tokens *
                                         task->shape.dim,
                                 sizeof(float));
        if (!change.rooms)
                return -ENOMEM;
        on_all_parts(use, task->job->n_items, remove_estimate, &change);
        return 0;
}

static void query_part(void *data, uint32_t at, uint32_t thread) {
        const struct sketch_use *use = data;
        const struct task *task = use->task;

        for (int values = 0; values < 2; values++) {
                struct kvd_sketch_part part = part_of(use, at, values);

                for (uint32_t i = use->first; i < use->first + use->n; i++) {
                        const struct sketch_member *m = &use->members[i];
                        struct kvd_sketch_vectors x = vectors_of(task, &m->block, at, values);

                        if (m->block)
                                task->ops->sketch->query(&part, m->places, m->n_tokens, &x, 1.0f);
                }
        }
}

void sketch_query(struct sketch_use *use) {
        on_all_parts(use, use->n, query_part, use);
}

void sketch_clear(struct sketch_use *use) {
        struct kvd_sketch_header *h = use->header;

        uint64_t left = kvd_sketch_bytes(h->rows, h->columns, h->cell_floats) - sizeof *h, n;

        h->n_tokens = h->has_mean = h->key_mode = h->hash = 0;
        for (uint8_t *at = (uint8_t *)(h + 1); left; at += n, left -= n) {
                n = MIN(left, ITEMS_BYTES);
                memset(at, 0, n);
                task_spend(use->task, n);
        }
        settle_modes(use);
}
