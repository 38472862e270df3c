/* SPDX-License-Identifier: Apache-2.0 */

/*
 * How much each client holds. The blocks that a client's pins keep are found by walking the map of
 * each space (map.c). A block that several clients hold is counted for each of them.
 */

#include "tools/kvctl/holders.h"

#include <string.h>

#include "ipc/base/degraded.h"

#define NAMED 3u /* clients, at most, in the sentence */

void holders_clear(struct holders *h) {
        free(h->holders);
        *h = (struct holders){0};
}

static uint64_t bytes_of(const struct holder *h) {
        return h->pinned_bytes + h->filling_bytes;
}

static int list_holders(struct kvctl *kvctl, struct holders *holders) {
        struct kvd_msg_client_info_reply info;
        uint32_t cursor = 0;
        int r;

        while ((r = kvctl_next_client(kvctl, &cursor, &info)) == 1) {
                struct holder *grown, *h;

                if (!info.pinned && !info.filling)
                        continue;
                grown = realloc(holders->holders, (holders->n + 1) * sizeof *grown);
                if (!grown)
                        return kvctl_out_of_memory(kvctl);
                holders->holders = grown;
                h = &grown[holders->n++];
                *h = (struct holder){.client = info.client,
                                     .pid = info.pid,
                                     .filling_bytes = info.filling_bytes,
                                     .pinned_bytes = info.pinned};
                kvd_slice_copy(info.domain, h->domain, sizeof h->domain);
                kvd_slice_copy(info.name, h->name, sizeof h->name);
        }
        return r;
}

static int compare(const void *a, const void *b) {
        uint64_t x = bytes_of(a), y = bytes_of(b);

        return x < y ? 1 : x > y ? -1 : 0;
}

int holders_read(struct kvctl *kvctl, struct maps *maps, struct holders *ret) {
        int r = list_holders(kvctl, ret);

        for (size_t i = 0; i < ret->n && r == 0; i++) {
                struct holder *h = &ret->holders[i];

                if (h->pinned_bytes) /* blocks, until now */
                        r = maps_held_by(kvctl, maps, h->client, h->domain, &h->pinned_bytes);
        }
        if (r == 0 && ret->n)
                qsort(ret->holders, ret->n, sizeof *ret->holders, compare);
        return r;
}

uint64_t holders_bytes(const struct holders *holders,
                       const struct kvd_msg_client_info_reply *info) {
        for (size_t i = 0; i < holders->n; i++)
                if (holders->holders[i].client == info->client &&
                    kvd_slice_is(info->domain, holders->holders[i].domain))
                        return bytes_of(&holders->holders[i]);
        return 0;
}

static bool is_full(uint64_t held, uint64_t pool_bytes) {
        return pool_bytes && held >= pool_bytes / 100 * KVD_NEARLY_ALL;
}

void holders_say(struct answer *answer, const struct holders *holders, uint64_t held,
                 uint64_t pool_bytes) {
        char names[400] = "", bytes[UNIT_TEXT_MAX];
        size_t n = 0;

        if (!is_full(held, pool_bytes))
                return;
        for (size_t i = 0; i < MIN(holders->n, NAMED); i++) {
                const struct holder *h = &holders->holders[i];

                unit_format_u64(UNIT_BYTES, bytes_of(h), bytes);
                n += (size_t)snprintf(names + n, sizeof names - n,
                                      "%s%s (client %u, process %u) %s", i ? ", " : "", h->name,
                                      h->client, h->pid, bytes);
        }
        answer_say(answer, "full: clients hold %llu %% of the pool: %s%s",
                   (unsigned long long)(held * 100 / pool_bytes),
                   n ? names : "those of other domains", holders->n > NAMED ? ", ..." : "");
}

int holders_say_full(struct kvctl *kvctl, struct answer *answer, struct maps *maps,
                     uint64_t pool_bytes) {
        _cleanup_(holders_clear) struct holders holders = {0};
        struct map_sums sums = maps_bytes(maps);
        int r = 0;

        if (is_full(sums.held + sums.filling, pool_bytes))
                r = holders_read(kvctl, maps, &holders);
        if (r == 0)
                holders_say(answer, &holders, sums.held + sums.filling, pool_bytes);
        return r;
}
