/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Layer 0 is sealed last: kvd_lease() treats group 0 as the sign that a prefix is complete, and so
 * does this file. An entry may still be found in part, after an eviction or because its producer
 * needed fewer layers. The missing layers are then computed from the last stored hidden state,
 * which gives the same bits as computing from the beginning.
 */

#include "tools/kvlm/entry.h"

#include <errno.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvlm/refuse.h"

enum { TRIES = 8, LEASE_MS = 10000 };

/* ---- blocks of one layer ---- */

static struct kvd_block *pool_of(const struct entry *e, uint32_t layer) {
        return e->pool + (size_t)layer * e->context.n_blocks;
}

static uint8_t **blocks_of(const struct entry *e, uint32_t layer) {
        return e->context.blocks + (size_t)layer * e->context.n_blocks;
}

static int take_private(struct entry *e, uint32_t layer) {
        size_t bytes = e->maker->shape->block_bytes;

        e->memory[layer] = aligned_alloc(64, ALIGN_UP(e->context.n_blocks * bytes, 64));
        if (!e->memory[layer])
                return refuse(-ENOMEM, "out of memory for a prefix of %u tokens",
                              e->context.n_tokens);
        for (uint32_t i = 0; i < e->context.n_blocks; i++)
                blocks_of(e, layer)[i] = e->memory[layer] + i * bytes;
        e->kinds[layer] = ENTRY_PRIVATE;
        return 0;
}

/* Allocates all blocks of a layer, or none. */
static bool take_pool(struct entry *e, uint32_t layer) {
        struct kvd_block *pool = pool_of(e, layer);
        uint32_t got = 0;

        while (e->space && !e->refused && got < e->context.n_blocks) {
                int n = kvd_alloc(e->space, e->context.n_blocks - got, pool + got);

                e->refused = n < 0;
                got += n > 0 ? (uint32_t)n : 0;
        }
        if (got < e->context.n_blocks) {
                if (got > 0)
                        kvd_free(e->space, got, pool);
                return false;
        }
        for (uint32_t i = 0; i < got; i++)
                blocks_of(e, layer)[i] = pool[i].data;
        e->kinds[layer] = ENTRY_FILLING;
        return true;
}

static int take(struct entry *e, uint32_t layer) {
        uint32_t bt = e->maker->shape->tokens;
        int r = take_pool(e, layer) ? 0 : take_private(e, layer);

        if (r == 0 && e->context.n_tokens % bt != 0) /* unused slots */
                memset(blocks_of(e, layer)[e->context.n_blocks - 1], 0,
                       e->maker->shape->block_bytes);
        return r;
}

static void drop(struct entry *e, uint32_t layer) {
        if (e->kinds[layer] == ENTRY_FILLING)
                kvd_free(e->space, e->context.n_blocks, pool_of(e, layer));
        if (e->pins[layer].base)
                kvd_unpin(e->space, &e->pins[layer]);
        free(e->memory[layer]);
        e->memory[layer] = NULL;
        e->kinds[layer] = ENTRY_ABSENT;
}

/* ---- finding ---- */

/* Looks up and pins the layer's blocks. *below: they are not in the pool, but can be fetched. */
static bool look_up(struct entry *e, uint32_t layer, uint32_t *ids, bool *below) {
        struct kvd_pin *pin = e->pins + layer;
        bool found;

        kvd_catch_up(e->space);
        found = kvd_lookup(e->space, layer, e->tokens, e->context.n_tokens, ids,
                           e->context.n_blocks, pin) == e->context.n_tokens;
        *below = pin->n_below;
        if (!found)
                kvd_unpin(e->space, pin);
        return found;
}

static bool find(struct entry *e, uint32_t layer) {
        _cleanup_(freep) uint32_t *ids = calloc(e->context.n_blocks, sizeof *ids);
        const struct kvd_pin *pin = e->pins + layer;
        bool below = false, found = ids && look_up(e, layer, ids, &below);

        if (!found && below) {
                cache_fetch(e->space, layer, e->tokens, e->context.n_tokens);
                found = look_up(e, layer, ids, &below);
        }
        if (!found)
                return false;
        for (uint32_t i = 0; i < e->context.n_blocks; i++)
                blocks_of(e, layer)[i] = kvd_pin_block(pin, ids[i]);
        e->kinds[layer] = ENTRY_REUSED;
        return true;
}

/* Finds the next layers, up to the first missing one. */
static bool find_layers(struct entry *e, uint32_t need) {
        while (e->n_layers < need && find(e, e->n_layers))
                e->n_found = ++e->n_layers;
        return e->n_layers >= need;
}

/* ---- making ---- */

/* Restores the rows to their state before the next layer. */
static void rewind_rows(struct entry *e) {
        struct view view = context_view(&e->context, true);

        if (e->n_layers == 0)
                pass_embed(e->maker->pass, e->tokens, 0, e->context.n_tokens);
        else
                pass_restore(e->maker->pass, &view, e->n_layers - 1, e->context.n_tokens);
}

static int compute_next(struct entry *e) {
        struct view view = context_view(&e->context, true);
        int r = take(e, e->n_layers);

        view.keep_states = true;
        if (r == 0)
                r = pass_run(e->maker->pass, &view, e->n_layers, e->n_layers + 1, 0,
                             e->context.n_tokens);
        if (r < 0)
                return r;
        e->n_layers++;
        e->n_made++;
        return 0;
}

static void forget_from(struct entry *e, uint32_t layer) {
        for (uint32_t l = layer; l < e->maker->config->layers; l++)
                drop(e, l);
        e->n_layers = MIN(e->n_layers, layer);
        e->n_found = MIN(e->n_found, layer);
}

/*
 * Publishes a layer. If another client published it first, its blocks are used instead. If the
 * daemon fails, the layer either remains ours, unpublished, or is lost: part of it was sealed, or
 * it is unknown whether it was. A lost layer and all deeper ones are dropped.
 */
static void seal(struct entry *e, uint32_t layer) {
        struct kvd_block *pool = pool_of(e, layer);
        uint32_t n = e->context.n_blocks, lost = 0;
        int sealed;

        e->pins[layer] = (struct kvd_pin){.group = layer};
        sealed = kvd_seal(e->space, &e->pins[layer], n, pool, e->tokens, e->context.n_tokens);
        for (uint32_t i = 0; i < n; i++) {
                blocks_of(e, layer)[i] = pool[i].data;
                lost += !pool[i].data;
        }
        if (sealed == (int)n) {
                e->kinds[layer] = ENTRY_SEALED;
                return;
        }
        e->refused = true;
        if (sealed <= 0 && lost == 0)
                return;
        kvd_free(e->space, n - (uint32_t)MAX(sealed, 0), pool + MAX(sealed, 0));
        e->kinds[layer] = ENTRY_ABSENT;
        forget_from(e, layer);
}

/*
 * Computes the missing layers. Layers that seal() lost are computed again, in private memory, since
 * e->refused is then set.
 */
static int make(struct entry *e, uint32_t end_layer) {
        int r = pass_rows(e->maker->pass, 0, e->context.n_tokens);

        while (r == 0 && e->n_layers < end_layer) {
                uint32_t layer = e->n_layers;

                rewind_rows(e);
                r = compute_next(e);
                if (r == 0 && layer > 0 && e->kinds[layer] == ENTRY_FILLING)
                        seal(e, layer);
                if (r == 0 && e->n_layers == end_layer && e->kinds[0] == ENTRY_FILLING)
                        seal(e, 0);
        }
        return r;
}

/* ---- single flight ---- */

static int make_leased(struct entry *e, uint32_t need, uint32_t end_layer) {
        /* another client may have finished it before we got the lease */
        int r = find_layers(e, need) ? 0 : make(e, end_layer);

        kvd_lease_end(e->space, e->tokens, e->context.n_tokens);
        return r;
}

static int find_or_make(struct entry *e, uint32_t need, uint32_t end_layer) {
        for (int i = 0; i < TRIES && e->space; i++) {
                int r;

                if (find_layers(e, need))
                        return 0;
                r = kvd_lease(e->space, e->tokens, e->context.n_tokens, LEASE_MS);
                if (r == 1)
                        return make_leased(e, need, end_layer);
                if (r < 0)
                        break;
        }
        e->refused = e->space != NULL;
        return make(e, need); /* in private memory */
}

/* ---- life ---- */

static int create(const struct entry_maker *maker, const uint32_t *tokens, uint32_t n_tokens,
                  struct entry **ret) {
        struct entry *e = calloc(1, sizeof *e);
        size_t layers = maker->config->layers;
        int r;

        if (!e)
                return refuse(-ENOMEM, "out of memory");
        *e = (struct entry){.maker = maker, .tokens = tokens};
        r = context_new(maker->config, maker->shape, n_tokens, n_tokens, &e->context);
        if (r == 0) {
                e->kinds = calloc(layers, sizeof *e->kinds);
                e->pins = calloc(layers, sizeof *e->pins);
                e->pool = calloc(layers * e->context.n_blocks, sizeof *e->pool);
                e->memory = calloc(layers, sizeof *e->memory);
                if (!e->kinds || !e->pins || !e->pool || !e->memory)
                        r = refuse(-ENOMEM, "out of memory for a prefix of %u tokens", n_tokens);
        }
        if (r < 0) {
                entry_close(e);
                return r;
        }
        *ret = e;
        return 0;
}

int entry_open(const struct entry_maker *maker, const uint32_t *tokens, uint32_t n_tokens,
               uint32_t need, uint32_t make_layers, struct entry **ret) {
        struct entry *e = NULL;
        int r = create(maker, tokens, n_tokens, &e);

        if (r < 0)
                return r;
        e->space = cache_space(maker->cache);
        r = find_or_make(e, need, MAX(need, make_layers));
        if (r < 0)
                entry_close(e);
        else
                *ret = e;
        return r;
}

int entry_open_private(const struct entry_maker *maker, const uint32_t *tokens, uint32_t n_tokens,
                       uint32_t n_layers, struct entry **ret) {
        struct entry *e = NULL;
        int r = create(maker, tokens, n_tokens, &e);

        if (r < 0)
                return r;
        r = make(e, n_layers);
        if (r < 0)
                entry_close(e);
        else
                *ret = e;
        return r;
}

struct entry *entry_close(struct entry *e) {
        if (!e)
                return NULL;
        if (e->kinds && e->pins && e->memory)
                forget_from(e, 0);
        context_release(&e->context);
        free(e->memory);
        free(e->pool);
        free(e->pins);
        free(e->kinds);
        free(e);
        return NULL;
}

uint8_t *entry_block(const struct entry *e, uint32_t layer, uint32_t i) {
        return blocks_of(e, layer)[i];
}

uint64_t entry_bytes(const struct entry *e, uint32_t n_layers, bool shared) {
        uint64_t n = 0;

        for (uint32_t layer = 0; layer < MIN(n_layers, e->n_layers); layer++)
                n += (e->kinds[layer] >= ENTRY_SEALED) == shared;
        return n * e->context.n_blocks * e->maker->shape->block_bytes;
}
