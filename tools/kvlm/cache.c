/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvlm's side of the pool: the connection, the space, and blocks to fill. While the daemon is away,
 * blocks come from kvlm's own memory; the user is told once.
 */

#include "tools/kvlm/cache_internal.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client/kvd_methods.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tools/kvlm/refuse.h"

/* ---- connection ---- */

static void complain(struct cache *c, const char *why) {
        if (!c->complained)
                fprintf(stderr, "kvlm: not sharing: %s; continuing with private memory\n", why);
        c->complained = true;
}

/* NULL if the pool is where we compute, else the reason for not sharing. */
static const char *elsewhere(const struct cache *c) {
        const struct device *device = c->options.device;
        struct kvd_place place = {.device = -1};
        int r = kvd_space_place(c->space, &place);

        if (r < 0)
                return kvd_error();
        if (place.memory == KVD_MEMORY_HOST)
                return device ? "the daemon's pool is in host memory, and kvlm computes on a GPU" :
                                NULL;
        if (!device)
                return "the daemon's pool is in GPU memory, and kvlm computes on the CPU";
        return place.device == device->options.ordinal ? NULL :
                                                         "the daemon's pool is on another GPU";
}

static bool daemon_is_away(int error) {
        return error == -ENOENT || error == -ECONNREFUSED || error == -ECONNRESET ||
               error == -ENOTCONN;
}

/*
 * Methods that compare keys of different positions need to know how keys were rotated; others do
 * not.
 */
static void tell_rotation(struct cache *c) {
        double theta = 0;

        if (c->options.rope_theta > 0 &&
            kvd_space_setting(c->space, "model.rope_theta", &theta) == 0 &&
            theta != c->options.rope_theta)
                kvd_space_set(c->space, "model.rope_theta", c->options.rope_theta);
}

static int attach(struct cache *c) {
        int r = c->connection ? 0 : kvd_open(c->options.socket, &c->connection);

        if (r == 0)
                r = kvd_space_open(c->connection, c->options.space, &c->options.geometry,
                                   &c->options.space_options, &c->space);
        if (r == 0)
                tell_rotation(c);
        return r;
}

bool cache_is_here(const struct cache *c) {
        return elsewhere(c) == NULL;
}

bool cache_connected(struct cache *c) {
        const char *why;
        int r;

        if (c->space)
                return cache_is_here(c);
        if (!c->options.space || c->given_up)
                return false;
        r = attach(c);
        why = r == 0 ? elsewhere(c) : kvd_error();
        if (!why) {
                c->complained = false;
                return true;
        }
        complain(c, why);
        if (c->space)
                c->space = kvd_space_close(c->space);
        c->given_up = !daemon_is_away(r);
        return false;
}

int cache_new(const struct cache_options *options, struct cache **ret) {
        struct cache *c = calloc(1, sizeof *c);

        if (!c)
                return refuse(-ENOMEM, "out of memory");
        c->options = *options;
        cache_connected(c);
        *ret = c;
        return 0;
}

const struct cache_options *cache_options(const struct cache *c) {
        return &c->options;
}

kvd_space *cache_space(struct cache *c) {
        return cache_connected(c) ? c->space : NULL;
}

struct cache *cache_free(struct cache *c) {
        if (!c)
                return NULL;
        if (c->options.device)
                device_finish(c->options.device);
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

/* Allocation is slow on a GPU, so allocate everything that the sequence may need at once. */
static uint8_t *take_on_device(struct sequence *s, uint32_t i) {
        const struct cache_options *o = &s->cache->options;
        cu_address at;

        if (!s->arena &&
            device_take(o->device, s->room * o->shape.block_bytes, "keys and values", &at) == 0)
                s->arena = (uint8_t *)(uintptr_t)at;
        return s->arena ? s->arena + i * o->shape.block_bytes : NULL;
}

uint8_t *cache_take(struct sequence *s, uint32_t i) {
        struct cache *c = s->cache;
        size_t size = ALIGN_UP(c->options.shape.block_bytes, 64);
        uint8_t *block;

        if (c->options.device)
                return take_on_device(s, i);
        if (c->n_spare > 0)
                return c->spare[--c->n_spare];
        block = aligned_alloc(64, size);
        if (!block)
                refuse(-ENOMEM, "out of memory for keys and values");
        return block ? memset(block, 0, size) : NULL;
}

void cache_give(struct cache *c, uint8_t *block) {
        if (c->options.device)
                return;
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

/* ---- tiers below the pool ---- */

#define FETCH_MS 1000.0 /* maximum time to wait for a fetch */

/* Returns false if nothing more comes, or not in time. */
static bool fetch_some(kvd_space *space, uint32_t group, const uint32_t *tokens, uint32_t n_tokens,
                       double until_ms, int64_t *there) {
        struct pollfd p = {.fd = -1, .events = POLLIN};
        int64_t n = kvd_fetch(space, group, 0, tokens, n_tokens, &p.fd);
        bool more = p.fd >= 0 && n > *there;

        *there = n;
        if (more)
                more = poll(&p, 1, (int)MAX(until_ms - sys_now_ms(), 0)) == 1;
        if (p.fd >= 0)
                close(p.fd);
        return more;
}

/* Each call fetches a bounded piece; the next call tells whether there is more. */
void cache_fetch(kvd_space *space, uint32_t group, const uint32_t *tokens, uint32_t n_tokens) {
        double until_ms = sys_now_ms() + FETCH_MS;
        int64_t there = -1;

        while (fetch_some(space, group, tokens, n_tokens, until_ms, &there))
                ;
}
