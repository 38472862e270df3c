/* SPDX-License-Identifier: Apache-2.0 */

/*
 * These are the invariants of blocks, segments, lists and the index. Those over all of a space (S)
 * are summed up in one go; those of a block (B) are looked at block by block.
 */

#include <string.h>

#include "store/check/check.h"

/* ---- sums ------------------------------------------------------------------------------------ */

static uint64_t table_entries(const shm_u64 *table, uint32_t slots) {
        uint64_t n = 0;

        for (uint32_t i = 0; i < slots; i++)
                n += atomic_load_explicit((shm_u64 *)&table[i], memory_order_relaxed) != 0;
        return n;
}

static void check_counts(struct walk *w) {
        const struct space *s = w->space;
        uint64_t count[KVD_N_STATES] = {0}, indexed = 0, runs = 0;

        for (uint32_t i = 0; i < s->ix->capacity; i++) {
                count[s->blocks[i].state]++;
                indexed += s->blocks[i].indexed;
                runs += s->blocks[i].run != 0;
        }
        for (uint32_t i = 0; i < KVD_N_STATES; i++)
                expect(w, count[i] == s->count[i],
                       "S1 %llu blocks are in state %u, %llu are counted",
                       (unsigned long long)count[i], i, (unsigned long long)s->count[i]);
        expect(w, s->count[KVD_RETIRING] == 0, "S2 a block is being retired between two requests");
        expect(w, table_entries(kvd_index_table(s->ix), s->ix->table_slots) == indexed,
               "S3 the block table does not have one entry for each indexed block");
        expect(w, table_entries(kvd_index_run_table(s->ix), s->ix->run_table_slots) == runs,
               "S4 the run table does not have one entry for each run");
        expect(w, s->ix->run_capacity - s->runs.n_free == runs, "S5 runs are lost");
}

static uint32_t walk_free_list(struct walk *w, const struct segment *segment) {
        uint32_t n = 0;

        for (uint32_t id = block_list_first(&segment->free); id != NONE && n <= segment->free.n;
             id = w->space->blocks[id].next, n++)
                expect(w, w->space->blocks[id].state == KVD_FREE,
                       "S6 block %u is in the free list and not free", id);
        return n;
}

static void check_segments(struct walk *w) {
        const struct space *s = w->space;
        uint64_t ready = 0, n_free = 0, with_memory = 0;

        for (uint32_t i = 0; i < s->ix->max_segments; i++) {
                const struct segment *segment = &s->memory.segments[i];

                expect(w, walk_free_list(w, segment) == segment->free.n,
                       "S7 free list of segment %u is broken", i);
                ready += segment->n_ready;
                n_free += segment->free.n;
                with_memory += segment->n_ready != 0;
        }
        expect(w, n_free == s->count[KVD_FREE], "S8 free blocks are lost");
        expect(w, ready == s->ix->capacity - s->count[KVD_ABSENT],
               "S9 free + filling + sealed + limbo is not total");
        expect(w, with_memory == s->memory.n_with_memory,
               "S10 segments with memory are miscounted");
}

static void check_lists(struct walk *w) {
        const struct space *s = w->space;
        uint64_t filling = 0, leaves = 0, ready = 0;

        for (uint32_t i = 0; i < s->n_attachments; i++) {
                uint32_t n = 0;

                if (!s->attachments[i])
                        continue;
                for (uint32_t id = block_list_first(&s->attachments[i]->filling);
                     id != NONE && n <= s->ix->capacity; n++) {
                        expect(w, s->blocks[id].owner == i,
                               "S11 block %u is in the wrong filling list", id);
                        id = s->blocks[id].next;
                }
                expect(w, n == s->attachments[i]->filling.n,
                       "S12 filling list of client seat %u is broken", i);
                filling += n;
        }
        for (const struct arena *arena = s->memory.arenas; arena; arena = arena->next) {
                leaves += arena->n_heap;
                ready += arena->n_ready;
        }
        expect(w, filling + s->private.n_reviving == s->count[KVD_FILLING] + s->count[KVD_LIMBO],
               "S13 filling blocks without an owner");
        expect(w, leaves == s->leaves.n, "S14 leaves are miscounted");
        expect(w, ready == s->ix->capacity - s->count[KVD_ABSENT],
               "S15 blocks of arenas are miscounted");
}

void check_cache(struct walk *w) {
        check_counts(w);
        check_segments(w);
        check_lists(w);
}

/* ---- one block ------------------------------------------------------------------------------- */

static void check_chain(struct walk *w, uint32_t id) {
        const struct space *s = w->space;
        const struct block *b = &s->blocks[id];
        const struct kvd_desc *desc = kvd_index_desc(s->ix, id), *parent;
        uint32_t bt = s->ix->geometry.block_tokens;

        expect(w, desc->n_tokens >= 1 && desc->n_tokens <= bt, "B2 block %u has %u tokens", id,
               desc->n_tokens);
        expect(w, !b->indexed || index_holds(s, id), "B3 block %u is not found by its key", id);
        if (b->parent == NONE) {
                expect(w, desc->parent == KVD_ROOT && desc->depth == 0,
                       "B4 block %u begins a chain in its middle", id);
                return;
        }
        parent = kvd_index_desc(s->ix, b->parent);
        expect(w,
               s->blocks[b->parent].state == KVD_SEALED && desc->parent == block_ref(s, b->parent),
               "B5 parent of block %u is gone or another one", id);
        expect(w,
               desc->depth == parent->depth + 1 && parent->n_tokens == bt &&
                       parent->group == desc->group && parent->root == desc->root,
               "B6 block %u does not continue its parent", id);
        expect(w,
               kvd_key_equal(desc->key,
                             kvd_key_block(s->ix, parent->key, desc->tokens, desc->n_tokens)),
               "B7 key of block %u is not that of its tokens", id);
}

static void check_children(struct walk *w, uint32_t id) {
        const struct space *s = w->space;
        const struct block *b = &s->blocks[id];
        const struct arena *arena = block_segment(s, id)->arena;

        for (uint32_t c = b->child, n = 0; c != NONE && n <= s->ix->capacity;
             c = s->blocks[c].sib_next, n++)
                expect(w, s->blocks[c].parent == id && s->blocks[c].state == KVD_SEALED,
                       "B8 block %u has block %u as a child that is not", id, c);
        expect(w, (b->private ? block_is_garbage(b) : b->child == NONE) == (b->heap != 0),
               "B9 block %u is wrongly in or out of the leaves", id);
        if (!b->heap)
                return;
        expect(w, b->heap <= arena->n_heap && arena->heap[b->heap - 1] == id,
               "B10 leaf %u is at the wrong place", id);
        expect(w, b->heap == 1 || s->blocks[arena->heap[b->heap / 2 - 1]].stamp <= b->stamp,
               "B11 leaf %u is colder than the one above it", id);
}

static void check_run(struct walk *w, uint32_t id) {
        const struct space *s = w->space;
        const struct kvd_run *run = kvd_index_run(s->ix, s->blocks[id].run - 1);
        const struct kvd_desc *leaf = kvd_index_desc(s->ix, id);
        uint32_t bt = s->ix->geometry.block_tokens, at = id;

        expect(w, shm_load(&run->leaf) == block_ref(s, id), "B12 run of block %u ends elsewhere",
               id);
        expect(w, index_holds_run(s, id), "B13 run of block %u is not found by its key", id);
        for (uint32_t i = KVD_RUN_BLOCKS; i-- > 0 && at != NONE; at = s->blocks[at].parent)
                expect(w,
                       run->ids[i] == at &&
                               memcmp(run->tokens + i * bt, kvd_index_desc(s->ix, at)->tokens,
                                      bt * sizeof(uint32_t)) == 0,
                       "B14 run of block %u differs from its chain at %u", id, at);
        expect(w,
               run->parent == (at == NONE ? KVD_ROOT : block_ref(s, at)) &&
                       run->root == leaf->root && run->group == leaf->group,
               "B15 run of block %u hangs wrong", id);
}

void check_block(struct walk *w, uint32_t id) {
        const struct space *s = w->space;
        const struct block *b = &s->blocks[id];
        uint64_t slot = shm_load(&kvd_index_desc(s->ix, id)->slot);

        expect(w, kvd_slot_state(slot) == b->state,
               "B1 block %u is in state %u, its slot word says %u", id, b->state,
               kvd_slot_state(slot));
        if (b->state != KVD_SEALED) {
                expect(w, !b->heap && !b->run && !b->indexed,
                       "B16 block %u is indexed and not sealed", id);
                expect(w, !b->private && !b->refs, "Q1 block %u is private and not sealed", id);
                return;
        }
        if (!b->private)
                check_chain(w, id);
        check_children(w, id);
        if (b->run)
                check_run(w, id);
}
