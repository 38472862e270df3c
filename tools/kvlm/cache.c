/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/cache.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "client/kvd_methods.h"
#include "ipc/base/util.h"
#include "tools/kvlm/note.h"

struct cache {
        struct cache_options options;
        kvd *connection;   /* NULL: none */
        kvd_space *space;  /* NULL: not attached */
        bool given_up;     /* the daemon refuses us: do not ask again */
        bool complained;
        uint8_t **spare;   /* private blocks that nobody uses */
        size_t n_spare, room;
};

/* ---- connection ---- */

static void complain(struct cache *c) {
        if (!c->complained)
                fprintf(stderr, "kvlm: not sharing: %s; going on with private memory\n", kvd_error());
        c->complained = true;
}

static bool daemon_is_away(int error) {
        return error == -ENOENT || error == -ECONNREFUSED || error == -ECONNRESET || error == -ENOTCONN;
}

/* Methods that compare keys from different places need to know how they were rotated. Others do without. */
static void tell_rotation(struct cache *c) {
        double theta = 0;

        if (c->options.rope_theta > 0 && kvd_space_setting(c->space, "model.rope_theta", &theta) == 0 &&
            theta != c->options.rope_theta)
                kvd_space_set(c->space, "model.rope_theta", c->options.rope_theta);
}

static int attach(struct cache *c) {
        int r = c->connection ? 0 : kvd_open(c->options.socket, &c->connection);

        if (r == 0)
                r = kvd_space_open(c->connection, c->options.space, &c->options.geometry, &c->options.space_options,
                                   &c->space);
        if (r == 0)
                tell_rotation(c);
        return r;
}

/* Before each sequence: a daemon may have come since. Once attached, the library reconnects by itself. */
static bool connected(struct cache *c) {
        int r;

        if (c->space)
                return true;
        if (!c->options.space || c->given_up)
                return false;
        r = attach(c);
        if (r == 0) {
                c->complained = false;
                return true;
        }
        complain(c);
        c->given_up = !daemon_is_away(r);
        return false;
}

int cache_new(const struct cache_options *options, struct cache **ret) {
        struct cache *c = calloc(1, sizeof *c);

        if (!c)
                return note(-ENOMEM, "out of memory");
        c->options = *options;
        connected(c);
        *ret = c;
        return 0;
}

const struct cache_options *cache_options(const struct cache *c) {
        return &c->options;
}

kvd_space *cache_space(struct cache *c) {
        return connected(c) ? c->space : NULL;
}

struct cache *cache_free(struct cache *c) {
        if (!c)
                return NULL;
        for (size_t i = 0; i < c->n_spare; i++)
                free(c->spare[i]);
        free(c->spare);
        if (c->space)
                kvd_space_close(c->space);
        if (c->connection)
                kvd_close(c->connection);
        free(c);
        return NULL;
}

/* ---- private blocks ---- */

static uint8_t *take_private(struct cache *c) {
        size_t size = ALIGN_UP(c->options.shape.block_bytes, 64);
        uint8_t *block;

        if (c->n_spare > 0)
                return c->spare[--c->n_spare];
        block = aligned_alloc(64, size);
        return block ? memset(block, 0, size) : NULL;
}

static void give_private(struct cache *c, uint8_t *block) {
        if (c->n_spare == c->room) {
                size_t room = c->room ? 2 * c->room : 64;
                uint8_t **spare = reallocarray(c->spare, room, sizeof *spare);

                if (!spare) {
                        free(block);
                        return;
                }
                c->spare = spare;
                c->room = room;
        }
        c->spare[c->n_spare++] = block;
}

/* ---- sequences ---- */

static uint32_t block_tokens(const struct sequence *s) {
        return s->cache->options.shape.tokens;
}

/* From here on the sequence uses private blocks; what it has stays valid. */
static void let_down(struct sequence *s) {
        s->n_refused++;
        s->alone = true;
}

/* The table's first n blocks are what the new pin holds. */
static void adopt(struct sequence *s, const struct kvd_pin *pin, const uint32_t *ids, uint32_t n) {
        kvd_unpin(s->cache->space, &s->pin);
        s->pin = *pin;
        for (uint32_t i = 0; i < n; i++) {
                s->blocks[i] = kvd_pin_block(pin, ids[i]);
                s->kinds[i] = i < s->n_chained ? s->kinds[i] : BLOCK_REUSED;
        }
        s->n_reused += (n - s->n_chained) * block_tokens(s);
        s->n_blocks = s->n_chained = n;
        s->n_computed = n * block_tokens(s);
}

void sequence_find(struct sequence *s) {
        uint32_t whole = (s->n_tokens - MIN(s->n_tokens, MAX(s->not_found, 1))) / block_tokens(s);
        _cleanup_(freep) uint32_t *ids = NULL;
        struct kvd_pin pin = {0};
        int64_t found;

        if (s->alone || whole <= s->n_chained || s->n_blocks > s->n_chained)
                return;
        ids = calloc(whole, sizeof *ids);
        if (!ids)
                return;
        found = kvd_lookup(s->cache->space, 0, s->tokens, whole * block_tokens(s), ids, whole, &pin);
        if (found > s->n_computed)
                adopt(s, &pin, ids, (uint32_t)(found / block_tokens(s)));
        else
                kvd_unpin(s->cache->space, &pin);
        if (found < 0)
                let_down(s);
}

static int create(struct cache *c, const uint32_t *tokens, uint32_t n_tokens, uint32_t capacity,
                  struct sequence **ret) {
        size_t room = DIV_UP(MAX(capacity, 1), c->options.shape.tokens);
        struct sequence *s = calloc(1, sizeof *s);

        if (!s)
                return note(-ENOMEM, "out of memory");
        *s = (struct sequence){.cache = c, .n_tokens = n_tokens, .capacity = capacity, .alone = true};
        s->tokens = calloc(MAX(capacity, 1), sizeof *s->tokens);
        s->blocks = calloc(room, sizeof *s->blocks);
        s->pool = calloc(room, sizeof *s->pool);
        s->kinds = calloc(room, sizeof *s->kinds);
        if (!s->tokens || !s->blocks || !s->pool || !s->kinds) {
                sequence_free(s);
                return note(-ENOMEM, "out of memory for a sequence of %u tokens", capacity);
        }
        memcpy(s->tokens, tokens, n_tokens * sizeof *tokens);
        *ret = s;
        return 0;
}

int sequence_new(struct cache *c, const uint32_t *tokens, uint32_t n_tokens, uint32_t capacity,
                 struct sequence **ret) {
        int r = create(c, tokens, n_tokens, capacity, ret);

        if (r < 0 || !c->options.space)
                return r;
        if (connected(c))
                (*ret)->alone = false;
        else
                let_down(*ret);
        return 0;
}

int sequence_new_private(struct cache *c, const uint32_t *tokens, uint32_t n_tokens, struct sequence **ret) {
        return create(c, tokens, n_tokens, n_tokens, ret);
}

/* The pool's next blocks for the table, as many as it gives of n. */
static uint32_t take_pool(struct sequence *s, uint32_t n) {
        int got = s->alone ? 0 : kvd_alloc(s->cache->space, n, s->pool + s->n_blocks);

        for (uint32_t tries = 0; got == -ENOBUFS && s->on_full && s->on_full(s->on_full_data, tries); tries++)
                got = kvd_alloc(s->cache->space, n, s->pool + s->n_blocks);
        if (got < 0) {
                let_down(s);
                return 0;
        }
        for (int i = 0; i < got; i++, s->n_blocks++) {
                s->blocks[s->n_blocks] = s->pool[s->n_blocks].data;
                s->kinds[s->n_blocks] = BLOCK_FILLING;
        }
        return (uint32_t)got;
}

int sequence_extend(struct sequence *s, uint32_t n_tokens) {
        uint32_t first = s->n_blocks, need = DIV_UP(n_tokens, block_tokens(s));

        while (s->n_blocks < need) {
                if (take_pool(s, need - s->n_blocks) > 0)
                        continue;
                s->blocks[s->n_blocks] = take_private(s->cache);
                if (!s->blocks[s->n_blocks])
                        return note(-ENOMEM, "out of memory for keys and values");
                s->kinds[s->n_blocks++] = BLOCK_PRIVATE;
        }
        if (need > first && n_tokens % block_tokens(s) != 0) /* slots that no token has yet */
                memset(s->blocks[need - 1], 0, s->cache->options.shape.block_bytes);
        return 0;
}

/* What is behind the pin goes: to the spare private blocks, or back to the daemon. */
static void drop_unchained(struct sequence *s) {
        for (uint32_t i = s->n_chained; i < s->n_blocks; i++) {
                if (s->kinds[i] == BLOCK_PRIVATE)
                        give_private(s->cache, s->blocks[i]);
                else
                        kvd_free(s->cache->space, 1, s->pool + i);
        }
        s->n_blocks = s->n_chained;
        s->n_computed = MIN(s->n_computed, s->n_chained * block_tokens(s));
}

/* Who came second gets the first one's block. */
static void chain(struct sequence *s, uint32_t n) {
        for (uint32_t end = s->n_chained + n; s->n_chained < end; s->n_chained++) {
                uint8_t *sealed = s->pool[s->n_chained].data;

                s->kinds[s->n_chained] = s->blocks[s->n_chained] == sealed ? BLOCK_SEALED : BLOCK_REUSED;
                s->blocks[s->n_chained] = sealed;
        }
}

/* Without an answer (data is NULL then) a block may be sealed or not, and evicted or not: it must not be read. */
static void stop_publishing(struct sequence *s) {
        let_down(s);
        s->unpublished = true;
        if (!s->pool[s->n_chained].data)
                drop_unchained(s);
}

void sequence_publish(struct sequence *s, uint32_t n_computed) {
        uint32_t first = s->n_chained, n = 0;
        int sealed;

        s->n_computed = n_computed;
        while (first + n < n_computed / block_tokens(s) && s->kinds[first + n] == BLOCK_FILLING)
                n++;
        if (n == 0 || s->unpublished)
                return;
        sealed = kvd_seal(s->cache->space, &s->pin, n, s->pool + first, s->tokens + first * block_tokens(s),
                          n * block_tokens(s));
        if (sealed > 0)
                chain(s, (uint32_t)sealed);
        if (sealed < (int)n)
                stop_publishing(s);
}

/* ---- what is not exact any more ---- */

void sequence_keep_private(struct sequence *s) {
        s->alone = s->unpublished = true;
}

int sequence_own(struct sequence *s, uint32_t n, uint8_t **before) {
        uint32_t shared = MIN(n, s->n_chained), got;

        memcpy(before, s->blocks, n * sizeof *before);
        for (got = 0; got < shared; got++) {
                s->blocks[got] = take_private(s->cache);
                if (!s->blocks[got])
                        break;
        }
        if (got == shared) {
                memset(s->kinds, BLOCK_PRIVATE, shared);
                return 0;
        }
        while (got-- > 0)
                give_private(s->cache, s->blocks[got]);
        memcpy(s->blocks, before, n * sizeof *before);
        return note(-ENOMEM, "out of memory for keys and values");
}

/* Private memory goes back to the system: sequences of a budget do not come back for it. */
static void drop_block(struct sequence *s, uint32_t i) {
        if (s->kinds[i] == BLOCK_PRIVATE)
                free(s->blocks[i]);
        else if (s->kinds[i] == BLOCK_FILLING)
                kvd_free(s->cache->space, 1, s->pool + i);
}

/* Blocks that were replaced are the first of the pinned ones, so that the pin can go as a whole. */
void sequence_cut(struct sequence *s, uint32_t n_slots) {
        uint32_t n = DIV_UP(n_slots, block_tokens(s));

        for (uint32_t i = n; i < s->n_blocks; i++)
                drop_block(s, i);
        s->n_blocks = MIN(n, s->n_blocks);
        if (s->n_chained > 0)
                kvd_unpin(s->cache->space, &s->pin);
        s->n_chained = 0;
}

void sequence_drop(struct sequence *s, const bool *drop) {
        uint32_t n = 0, chained = 0;

        for (uint32_t i = 0; i < s->n_blocks; i++) {
                if (drop[i]) {
                        drop_block(s, i);
                        continue;
                }
                chained += i < s->n_chained;
                s->blocks[n] = s->blocks[i];
                s->kinds[n] = s->kinds[i];
                s->pool[n++] = s->pool[i];
        }
        s->n_blocks = n;
        s->n_chained = chained;
}

uint32_t sequence_shared_blocks(const struct sequence *s) {
        return s->n_chained;
}

struct sequence *sequence_free(struct sequence *s) {
        if (!s)
                return NULL;
        if (s->pin.base)
                kvd_unpin(s->cache->space, &s->pin);
        if (s->kinds)
                drop_unchained(s);
        free(s->kinds);
        free(s->pool);
        free(s->blocks);
        free(s->tokens);
        free(s);
        return NULL;
}
