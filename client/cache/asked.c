/* SPDX-License-Identifier: Apache-2.0 */

/*
 * While a space has a follower (kvctl trace), each of its clients notes its lookups in its own pin
 * page: the keys of the blocks, and the number of tokens found. The follower reads at its own pace,
 * and clients do not wait for it: new notes overwrite those not yet read. If another thread of the
 * client is writing a note, a lookup is only counted.
 */

#include "client/internal.h"
#include "ipc/base/key.h"

static struct kvd_key chain_key(const struct kvd_index *ix, const struct lookup_note *note) {
        return ix->kind == KVD_BIDIRECTIONAL ?
                       kvd_key_prefix_root(ix, kvd_key_prefix(ix, note->tokens, note->n_tokens),
                                           note->group) :
                       kvd_key_root(ix, note->group, note->salt);
}

static void put(struct view *view, uint64_t at, uint64_t word) {
        atomic_store_explicit(&view->asked[at % KVD_ASKED_WORDS], word, memory_order_relaxed);
}

static void put_keys(struct view *view, const struct lookup_note *note, uint64_t at, uint32_t n) {
        uint32_t bt = kvd_full_tokens(&view->ix->geometry, note->group);
        struct kvd_key key = chain_key(view->ix, note);

        for (uint32_t i = 0; i < n; i++) {
                key = kvd_key_block(view->ix, key, note->tokens + i * bt,
                                    MIN(bt, note->n_tokens - i * bt));
                put(view, at + i, key.lo);
        }
}

static void write_note(struct view *view, const struct lookup_note *note) {
        struct kvd_pinpage *page = view->page;
        uint32_t bt = kvd_full_tokens(&view->ix->geometry, note->group);
        uint32_t n = MIN(DIV_UP(note->n_tokens, bt), KVD_ASKED_KEYS);
        uint64_t at = atomic_load_explicit(&page->asked, memory_order_relaxed);

        shm_write_begin(&page->asked_begun, at + KVD_ASKED_HEAD + n);
        put(view, at, (uint64_t)note->group << 32 | n);
        put(view, at + 1, (uint64_t)note->found << 32 | note->n_tokens);
        put_keys(view, note, at + KVD_ASKED_HEAD, n);
        shm_write_end(&page->asked, at + KVD_ASKED_HEAD + n);
}

void lookup_noted(struct view *view, const struct lookup_note *note) {
        if (!note->n_tokens)
                return;
        if (atomic_exchange_explicit(&view->noting, true, memory_order_acquire)) {
                atomic_fetch_add_explicit(&view->page->not_noted, 1, memory_order_relaxed);
                return;
        }
        write_note(view, note);
        atomic_store_explicit(&view->noting, false, memory_order_release);
}
