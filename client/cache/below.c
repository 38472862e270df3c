/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Finds what is stored below the pool behind a chain, as far as the daemon has entered it in the
 * index. Records form chains as blocks do; the search starts at the record of the chain's last
 * block. The result is only a hint: to load the tokens, the caller must ask the daemon, which
 * compares them.
 */

#include "client/internal.h"
#include "ipc/base/key.h"
#include "ipc/base/util.h"

/* The handle of the record that follows `handle` and has these tokens; 0 if none. */
static uint64_t record_behind(const struct kvd_index *ix, const struct lookup_end *e,
                              uint64_t handle, const uint32_t *tokens, uint32_t n) {
        uint64_t hint = kvd_hint(handle, e->group, e->root, tokens, n);
        uint64_t wanted = kvd_hint_slot(hint, 0);

        for (uint32_t i = 0; i < KVD_BUCKETS * KVD_BUCKET_SLOTS; i++) {
                uint64_t slot = atomic_load_explicit(kvd_index_hint(ix, hint, i),
                                                     memory_order_relaxed);

                if (slot && slot - kvd_hint_handle(slot) == wanted)
                        return kvd_hint_handle(slot);
        }
        return 0;
}

static uint32_t in_the_file(const struct kvd_index *ix, const struct lookup_end *e) {
        uint32_t bt = kvd_full_tokens(&ix->geometry, e->group), id = kvd_ref_id(e->leaf), n = 0;
        uint64_t handle = 0;

        if (!ix->hint_slots || (e->leaf != KVD_ROOT && id >= ix->capacity))
                return 0;
        if (e->leaf != KVD_ROOT) {
                handle = atomic_load_explicit(&kvd_index_records(ix)[id], memory_order_relaxed);
                if (!handle)
                        return 0;
        }
        while (n < KVD_FETCH_BLOCKS && (n + 1) * bt <= e->n_tokens) {
                handle = record_behind(ix, e, handle, e->tokens + n * bt, bt);
                if (!handle)
                        break;
                n++;
        }
        return n * bt;
}

/* A bidirectional prefix that is not in the pool: the number of all its tokens, or 0. */
static uint32_t whole_in_the_file(const struct kvd_index *ix, const struct lookup_end *e) {
        struct lookup_end of = *e;
        uint32_t bt = ix->geometry.block_tokens;
        uint64_t handle = 0;

        if (!ix->hint_slots)
                return 0;
        of.root = kvd_hint_root(e->tokens, e->n_tokens);
        for (uint32_t at = 0; at < e->n_tokens; at += bt) {
                handle = record_behind(ix, &of, handle, e->tokens + at, MIN(bt, e->n_tokens - at));
                if (!handle)
                        return 0;
        }
        return e->n_tokens;
}

static bool can_come(const struct kvd_index *ix, const struct lookup_end *e) {
        uint32_t bt = kvd_full_tokens(&ix->geometry, e->group);

        if (ix->kind != KVD_BIDIRECTIONAL)
                return e->n_tokens >= bt;
        return e->leaf == KVD_ROOT && e->n_tokens && kvd_fetch_takes(e->n_tokens, bt);
}

uint32_t lookup_below(const struct kvd_index *ix, const struct lookup_end *e) {
        uint32_t tiers = atomic_load_explicit(&ix->below, memory_order_relaxed), n = 0;

        if (!can_come(ix, e))
                return 0;
        if (tiers & KVD_BELOW_FILE)
                n = (ix->kind == KVD_BIDIRECTIONAL ? whole_in_the_file : in_the_file)(ix, e);
        return !n && tiers & (KVD_BELOW_UNTOLD | KVD_BELOW_SERVERS) ? KVD_BELOW_UNKNOWN : n;
}
