/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The tokens of a request, and their blocks. A stored prefix is pinned, the rest is filled and
 * published. When blocks run out or the daemon is replaced, the request continues in kvlm's own
 * memory.
 */

#include <errno.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvlm/cache_internal.h"
#include "tools/kvlm/refuse.h"

static uint32_t block_tokens(const struct sequence *s) {
        return s->cache->options.shape.tokens;
}

/* The stream that orders operations on blocks; NULL for host memory, which needs none. */
static void *stream_of(const struct sequence *s) {
        return s->cache->options.device ? s->cache->options.device->stream : NULL;
}

/* These two cannot fail, since kvlm captures no streams. */
static void unpin(struct sequence *s) {
        kvd_unpin_on(s->cache->space, &s->pin, stream_of(s));
}

static void free_pooled(struct sequence *s, uint32_t i) {
        kvd_free_on(s->cache->space, 1, s->pool + i, stream_of(s));
}

/* From now on the sequence uses private blocks; its present blocks stay valid. */
static void let_down(struct sequence *s) {
        s->n_refused++;
        s->alone = true;
}

/* Makes the blocks of the new pin the table's first n blocks. */
static void adopt(struct sequence *s, const struct kvd_pin *pin, const uint32_t *ids, uint32_t n) {
        unpin(s);
        s->pin = *pin;
        for (uint32_t i = 0; i < n; i++) {
                s->blocks[i] = kvd_pin_block(pin, ids[i]);
                s->kinds[i] = i < s->n_chained ? s->kinds[i] : BLOCK_REUSED;
        }
        s->n_reused += (n - s->n_chained) * block_tokens(s);
        s->n_blocks = s->n_chained = n;
        s->n_computed = n * block_tokens(s);
}

static int64_t look_up(struct sequence *s, uint32_t whole, uint32_t *ids, struct kvd_pin *pin) {
        kvd_catch_up(s->cache->space);
        return kvd_lookup(s->cache->space, 0, s->tokens, whole * block_tokens(s), ids, whole, pin);
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
        found = look_up(s, whole, ids, &pin);
        if (found >= 0 && pin.n_below && !s->fetched) {
                kvd_unpin(s->cache->space, &pin);
                s->fetched = true;
                cache_fetch(s->cache->space, 0, s->tokens, whole * block_tokens(s));
                found = look_up(s, whole, ids, &pin);
        }
        if (found > 0 && !cache_is_here(s->cache))
                found = -ESTALE;
        if (found > s->n_computed && kvd_wait_on(s->cache->space, &pin, stream_of(s)) == 0)
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
                return refuse(-ENOMEM, "out of memory");
        *s = (struct sequence){.cache = c,
                               .n_tokens = n_tokens,
                               .capacity = capacity,
                               .alone = true,
                               .n_public = UINT32_MAX,
                               .room = (uint32_t)room};
        s->tokens = calloc(MAX(capacity, 1), sizeof *s->tokens);
        s->blocks = calloc(room, sizeof *s->blocks);
        s->pool = calloc(room, sizeof *s->pool);
        s->kinds = calloc(room, sizeof *s->kinds);
        if (!s->tokens || !s->blocks || !s->pool || !s->kinds) {
                sequence_free(s);
                return refuse(-ENOMEM, "out of memory for a sequence of %u tokens", capacity);
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
        if (cache_connected(c))
                (*ret)->alone = false;
        else
                let_down(*ret);
        return 0;
}

int sequence_new_private(struct cache *c, const uint32_t *tokens, uint32_t n_tokens,
                         struct sequence **ret) {
        return create(c, tokens, n_tokens, n_tokens, ret);
}

/*
 * On a device, all blocks of a table are in one mapping; a new daemon's mapping is a different one.
 */
static bool fits_table(const struct sequence *s, const uint8_t *block) {
        uint64_t bytes = s->cache->options.shape.block_bytes, a = (uintptr_t)block,
                 b = (uintptr_t)s->blocks[0];
        uint64_t apart = a > b ? a - b : b - a;

        return !s->cache->options.device || s->n_blocks == 0 ||
               (apart % bytes == 0 && apart / bytes < UINT32_MAX);
}

/* Takes up to n more blocks from the pool. Returns how many. */
static uint32_t take_pool(struct sequence *s, uint32_t n) {
        int got = s->alone ? 0 : kvd_alloc(s->cache->space, n, s->pool + s->n_blocks);

        for (uint32_t tries = 0;
             got == -ENOBUFS && s->on_full && s->on_full(s->on_full_data, tries); tries++)
                got = kvd_alloc(s->cache->space, n, s->pool + s->n_blocks);
        if (got > 0 && !(cache_is_here(s->cache) && fits_table(s, s->pool[s->n_blocks].data))) {
                kvd_free(s->cache->space, (uint32_t)got, s->pool + s->n_blocks);
                got = -ESTALE;
        }
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

/* Frees the blocks after the pinned ones: to the spare private blocks, or back to the daemon. */
static void drop_unchained(struct sequence *s) {
        for (uint32_t i = s->n_chained; i < s->n_blocks; i++) {
                if (s->kinds[i] == BLOCK_PRIVATE)
                        cache_give(s->cache, s->blocks[i]);
                else
                        free_pooled(s, i);
        }
        s->n_blocks = s->n_chained;
        s->n_computed = MIN(s->n_computed, s->n_chained * block_tokens(s));
}

static void begin_anew(struct sequence *s) {
        if (!s->alone)
                let_down(s);
        drop_unchained(s);
        unpin(s);
        s->n_blocks = s->n_chained = 0;
        s->n_computed = s->n_reused = 0;
}

bool sequence_check(struct sequence *s) {
        if (!s->pin.base || kvd_check_pin(s->cache->space, &s->pin) == 0)
                return true;
        begin_anew(s);
        return false;
}

static int copy_block(struct sequence *s, uint32_t i) {
        const struct cache_options *o = &s->cache->options;
        uint8_t *to = cache_take(s, i);

        return to ? device_copy(o->device, (uintptr_t)to, (uintptr_t)s->blocks[i],
                                o->shape.block_bytes) :
                    -ENOMEM;
}

/*
 * Copies the table's blocks into private ones. Pool blocks are given back when the stream has
 * completed.
 */
static int copy_out(struct sequence *s) {
        for (uint32_t i = 0; i < s->n_blocks; i++) {
                int r = copy_block(s, i);

                if (r < 0)
                        return r;
        }
        for (uint32_t i = s->n_chained; i < s->n_blocks; i++)
                free_pooled(s, i);
        unpin(s);
        for (uint32_t i = 0; i < s->n_blocks; i++)
                s->blocks[i] = cache_take(s, i);
        memset(s->kinds, BLOCK_PRIVATE, s->n_blocks);
        s->n_chained = 0;
        return 0;
}

/*
 * On a device, before the first private block: copies the pool's blocks, after checking that they
 * are valid.
 */
static int leave_pool(struct sequence *s) {
        int r;

        if (!s->cache->options.device || s->n_blocks == 0 || s->kinds[0] == BLOCK_PRIVATE)
                return 0;
        r = device_wait(s->cache->options.device);
        if (r < 0)
                return r;
        return sequence_check(s) ? copy_out(s) : 1;
}

static int clear_block(struct sequence *s, uint32_t i) {
        const struct cache_options *o = &s->cache->options;

        if (o->device)
                return device_clear(o->device, (uintptr_t)s->blocks[i], o->shape.block_bytes);
        memset(s->blocks[i], 0, o->shape.block_bytes);
        return 0;
}

int sequence_extend(struct sequence *s, uint32_t n_tokens) {
        uint32_t first = s->n_blocks, need = DIV_UP(n_tokens, block_tokens(s));

        while (s->n_blocks < need) {
                int r;

                if (take_pool(s, need - s->n_blocks) > 0)
                        continue;
                r = leave_pool(s);
                if (r != 0)
                        return r;
                s->blocks[s->n_blocks] = cache_take(s, s->n_blocks);
                if (!s->blocks[s->n_blocks])
                        return -ENOMEM;
                s->kinds[s->n_blocks++] = BLOCK_PRIVATE;
        }
        if (need > first && n_tokens % block_tokens(s) != 0) /* unused slots */
                return clear_block(s, need - 1);
        return 0;
}

/* Sealed blocks have a read-only address. Whether it is that of the block that we wrote. */
static bool is_own(const struct kvd_space_memory *memory, const uint8_t *written,
                   const uint8_t *sealed) {
        return written - memory->base == sealed - memory->sealed;
}

/*
 * Adds sealed blocks to the chain. If another client published the same block first, its block is
 * used. False if waiting for it failed; the sequence then starts over.
 */
static bool chain(struct sequence *s, uint32_t n, const struct kvd_space_memory *memory) {
        bool others = false;

        for (uint32_t end = s->n_chained + n; s->n_chained < end; s->n_chained++) {
                uint8_t *sealed = s->pool[s->n_chained].data;
                bool own = is_own(memory, s->blocks[s->n_chained], sealed);

                s->kinds[s->n_chained] = own ? BLOCK_SEALED : BLOCK_REUSED;
                s->blocks[s->n_chained] = sealed;
                others |= s->kinds[s->n_chained] == BLOCK_REUSED;
        }
        if (!others || kvd_wait_on(s->cache->space, &s->pin, stream_of(s)) == 0)
                return true;
        begin_anew(s);
        return false;
}

/*
 * Without an answer (data is then NULL), a block may or may not have been sealed and evicted: it
 * must not be read.
 */
static void stop_publishing(struct sequence *s) {
        let_down(s);
        s->unpublished = true;
        if (!s->pool[s->n_chained].data)
                drop_unchained(s);
}

void sequence_publish(struct sequence *s, uint32_t n_computed) {
        uint32_t first = s->n_chained, n = 0;
        struct kvd_space_memory memory;
        int sealed;

        s->n_computed = n_computed;
        while (first + n < MIN(n_computed, s->n_public) / block_tokens(s) &&
               s->kinds[first + n] == BLOCK_FILLING)
                n++;
        if (n == 0 || s->unpublished || kvd_space_memory(s->cache->space, &memory) < 0)
                return;
        sealed = kvd_seal_on(s->cache->space, &s->pin, n, s->pool + first,
                             s->tokens + first * block_tokens(s), n * block_tokens(s),
                             stream_of(s));
        if (sealed > 0 && !chain(s, (uint32_t)sealed, &memory))
                return;
        if (sealed < (int)n)
                stop_publishing(s);
}

uint32_t sequence_shared_blocks(const struct sequence *s) {
        return s->n_chained;
}

struct sequence *sequence_free(struct sequence *s) {
        if (!s)
                return NULL;
        if (s->pin.base)
                unpin(s);
        if (s->kinds)
                drop_unchained(s);
        if (s->arena)
                device_give(s->cache->options.device, (uintptr_t)s->arena);
        free(s->kinds);
        free(s->pool);
        free(s->blocks);
        free(s->tokens);
        free(s);
        return NULL;
}
