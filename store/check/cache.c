/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The invariants of blocks, segments, lists and the index. Those of a block (B), of an entry of a
 * table, and of a block's place in its list are checked one by one, and only where there is memory.
 * Those of a whole space (S) are totals, or sums over the blocks of the walk.
 */

#include <string.h>

#include "ipc/base/pack.h"
#include "store/check/check.h"

/* ---- totals ---------------------------------------------------------------------------------- */

/* Blocks that have memory and count as absent. */
static uint64_t worn_out(const struct space *s) {
        uint64_t n = 0;

        for (uint32_t i = 0; i < s->ix->max_segments; i++)
                n += s->memory.segments[i].n_worn_out;
        return n;
}

static void check_segment_totals(struct walk *w) {
        const struct space *s = w->space;
        uint64_t ready = 0, n_free = 0, with_memory = 0, kept = 0, occupied = 0;

        for (uint32_t i = 0; i < s->ix->max_segments; i++) {
                ready += s->memory.segments[i].n_ready;
                n_free += s->memory.segments[i].free.n;
                kept += s->memory.segments[i].n_kept;
                occupied += s->memory.segments[i].n_kept || s->memory.segments[i].n_held;
                with_memory += s->memory.segments[i].n_ready != 0 ||
                               s->memory.returning == &s->memory.segments[i];
        }
        w->spent += s->ix->max_segments * 10;
        expect(w, n_free == s->count[KVD_FREE], "S8 free blocks are lost");
        expect(w, ready == s->ix->capacity - s->count[KVD_ABSENT] + worn_out(s),
               "S9 free + filling + sealed + limbo is not total");
        expect(w, with_memory == s->memory.n_with_memory,
               "S10 segments with memory are miscounted");
        expect(w,
               kept == s->count[KVD_FILLING] + s->count[KVD_LIMBO] + s->private.n +
                               s->unready.n_pending,
               "S17 blocks that keep their segments are miscounted");
        expect(w,
               occupied == s->memory.n_occupied &&
                       s->account.unused == (with_memory - occupied) * s->ix->segment_bytes,
               "S18 what others could have of the space is miscounted");
}

static void check_list_totals(struct walk *w) {
        const struct space *s = w->space;
        uint64_t filling = 0, leaves = 0, ready = 0;

        for (uint32_t i = 0; i < s->n_attachments; i++)
                filling += s->attachments[i] ? s->attachments[i]->filling.n : 0;
        for (const struct arena *arena = s->memory.arenas; arena; arena = arena->next) {
                leaves += arena->n_heap + arena->shelf.n;
                ready += arena->n_ready;
        }
        w->spent += s->n_attachments * 100;
        expect(w, filling + s->private.n_reviving == s->count[KVD_FILLING] + s->count[KVD_LIMBO],
               "S13 filling blocks without an owner");
        expect(w, leaves == s->leaves.n, "S14 leaves are miscounted");
        expect(w, ready == s->ix->capacity - s->count[KVD_ABSENT] + worn_out(s),
               "S15 blocks of arenas are miscounted");
}

bool check_totals(struct walk *w, uint64_t *at) {
        expect(w, w->space->count[KVD_RETIRING] == 0,
               "S2 a block is being retired between two requests");
        check_segment_totals(w);
        check_list_totals(w);
        check_chunks(w);
        return true;
}

/* ---- sums over the walk ---------------------------------------------------------------------- */

static void check_states(struct walk *w) {
        const struct space *s = w->space;
        const struct audit *audit = w->audit;

        for (uint32_t i = 0; i < KVD_N_STATES; i++)
                expect(w, i == KVD_ABSENT || audit->count[i] == s->count[i],
                       "S1 %llu blocks are in state %u, %llu are counted",
                       (unsigned long long)audit->count[i], i, (unsigned long long)s->count[i]);
}

static void check_owners(struct walk *w) {
        const struct space *s = w->space;
        uint64_t owners = 0;

        for (uint32_t i = 0; i < s->n_attachments; i++)
                if (s->attachments[i])
                        owners += s->attachments[i]->filling.n * check_mixed(i);
        expect(w, owners == w->audit->owners,
               "S12 a client's filling list is not as long as it says");
}

/* Chains of sessions that end at some block. */
static uint64_t session_ends(struct walk *w) {
        const struct space *s = w->space;
        uint64_t n = 0;

        for (uint32_t i = 0; i < s->leaves.sessions.n_used; i++)
                n += session_chain(s, i)->block != NONE;
        w->spent += s->leaves.sessions.n_used;
        return n;
}

void check_cache_sums(struct walk *w) {
        const struct space *s = w->space;
        const struct audit *audit = w->audit;

        check_states(w);
        check_owners(w);
        expect(w, audit->entries == audit->indexed,
               "S3 the block table does not have one entry for each indexed block");
        expect(w, audit->run_entries == audit->runs,
               "S4 the run table does not have one entry for each run");
        expect(w, s->ix->run_capacity - s->runs.n_free == audit->runs, "S5 runs are lost");
        expect(w, audit->session_ends == session_ends(w),
               "S19 the end of a session's chain is lost");
        expect(w, audit->garbage == s->private.garbage.n, "Q7 garbage is lost");
        expect(w, audit->private == s->private.n && audit->reviving == s->private.n_reviving,
               "Q8 private blocks are miscounted");
}

/* ---- tables ---------------------------------------------------------------------------------- */

#define SLOT_NS 1u
#define ENTRY_NS 300u /* its block, and its key's place in the table */

/* Returns the number of entries in a piece. Skips pages that were never written. */
static uint64_t walk_table(struct walk *w, enum index_table table, uint64_t *at) {
        uint32_t slots = index_slots(w->space, table);
        uint64_t n = 0;

        *at = index_written(w->space, table, (uint32_t)MIN(*at, slots));
        for (uint64_t stop = MIN(*at + 4096, slots); *at < stop && check_may_go_on(w); (*at)++) {
                enum index_slot slot = index_slot(w->space, table, (uint32_t)*at);

                w->spent += slot == INDEX_EMPTY ? SLOT_NS : ENTRY_NS;
                n += slot != INDEX_EMPTY;
                expect(w, slot != INDEX_WRONG,
                       "S%u entry %llu of the %s table is not that of an indexed block or run",
                       table == INDEX_BLOCKS ? 3 : 4, (unsigned long long)*at,
                       table == INDEX_BLOCKS ? "block" : "run");
        }
        w->spent += 1000;
        return n;
}

bool check_table(struct walk *w, uint64_t *at) {
        w->audit->entries += walk_table(w, INDEX_BLOCKS, at);
        return *at >= index_slots(w->space, INDEX_BLOCKS);
}

bool check_run_table(struct walk *w, uint64_t *at) {
        w->audit->run_entries += walk_table(w, INDEX_RUNS, at);
        return *at >= index_slots(w->space, INDEX_RUNS);
}

/* ---- lists ----------------------------------------------------------------------------------- */

/* The list that the block must be in, or NULL, and the label of the invariant that says so. */
static const struct block_list *list_of(const struct space *s, uint32_t id, const char **label) {
        const struct block *b = &s->blocks[id];

        *label = b->state == KVD_FREE                 ? "S6" :
                 b->state == KVD_SEALED && b->private ? "Q7" :
                 b->state == KVD_SEALED               ? "F6" :
                                                        "S11";
        if (b->state == KVD_FREE)
                return &block_segment(s, id)->free;
        if (b->state == KVD_FILLING || b->state == KVD_LIMBO)
                return b->owner < s->n_attachments && s->attachments[b->owner] ?
                               &s->attachments[b->owner]->filling :
                               NULL;
        if (b->state != KVD_SEALED)
                return NULL;
        return block_is_garbage(b)        ? &s->private.garbage :
               b->poisoned && !b->pending ? &s->unready.poisoned :
                                            NULL;
}

static bool is_in(const struct space *s, const struct block_list *list, uint32_t id) {
        const char *label;

        return id < s->ix->capacity && list_of(s, id, &label) == list;
}

/* Its neighbours must be in the same list and point back; without one it must be the list's end. */
static void check_list(struct walk *w, uint32_t id) {
        const struct space *s = w->space;
        const struct block *b = &s->blocks[id];
        const char *label;
        const struct block_list *list = list_of(s, id, &label);
        bool filling = b->state == KVD_FILLING || b->state == KVD_LIMBO, before, behind;

        expect(w, list || !filling || (b->reviving && b->owner == NONE),
               "S11 block %u is being filled, but has no owner", id);
        if (!list)
                return;
        before = b->prev == NONE ? list->n && list->first == id :
                                   is_in(s, list, b->prev) && s->blocks[b->prev].next == id;
        behind = b->next == NONE ? list->n && list->last == id :
                                   is_in(s, list, b->next) && s->blocks[b->next].prev == id;
        expect(w, before && behind, "%s block %u is in the wrong list, or in none", label, id);
}

/* ---- one block ------------------------------------------------------------------------------- */

static void check_chain(struct walk *w, uint32_t id) {
        const struct space *s = w->space;
        const struct block *b = &s->blocks[id];
        const struct kvd_desc *desc = kvd_index_desc(s->ix, id), *parent;
        uint32_t full = space_full_tokens(s, desc->group);

        expect(w,
               desc->n_tokens >= 1 && desc->n_tokens <= full && kvd_has_group(s->ix, desc->group),
               "B2 block %u of group %u has %u tokens", id, desc->group, desc->n_tokens);
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
               desc->depth == parent->depth + 1 && parent->n_tokens == full &&
                       parent->group == desc->group && parent->root == desc->root,
               "B6 block %u does not continue its parent", id);
        expect(w,
               kvd_key_equal(desc->key,
                             kvd_key_block(s->ix, parent->key, desc->tokens, desc->n_tokens)),
               "B7 key of block %u is not that of its tokens", id);
}

static bool is_child(const struct space *s, uint32_t id, uint32_t parent) {
        return id < s->ix->capacity && s->blocks[id].parent == parent &&
               s->blocks[id].state == KVD_SEALED;
}

/* A block may have any number of children, so only its neighbours are checked. */
static void check_siblings(struct walk *w, uint32_t id) {
        const struct space *s = w->space;
        const struct block *b = &s->blocks[id];
        bool first = b->child == NONE ||
                     (is_child(s, b->child, id) && s->blocks[b->child].sib_prev == NONE);
        bool before = b->parent == NONE   ? b->sib_prev == NONE :
                      b->sib_prev == NONE ? s->blocks[b->parent].child == id :
                                            is_child(s, b->sib_prev, b->parent) &&
                                                    s->blocks[b->sib_prev].sib_next == id;
        bool behind = b->sib_next == NONE || (is_child(s, b->sib_next, b->parent) &&
                                              s->blocks[b->sib_next].sib_prev == id);

        expect(w, first, "B8 block %u has a wrong first child", id);
        expect(w, before && behind, "B8 block %u is not among the children of its parent", id);
}

static void check_leaf(struct walk *w, uint32_t id) {
        const struct space *s = w->space;
        const struct block *b = &s->blocks[id];
        const struct arena *arena = block_segment(s, id)->arena;

        expect(w, (b->private ? block_is_garbage(b) : b->child == NONE) == (b->heap != 0),
               "B9 block %u is wrongly in or out of the leaves", id);
        if (!b->heap)
                return;
        expect(w,
               (b->heap <= arena->n_heap || b->heap > s->ix->capacity - arena->shelf.n) &&
                       arena->heap[b->heap - 1] == id,
               "B10 leaf %u is at the wrong place", id);
        if (b->heap > arena->n_heap)
                return; /* on the shelf */
        expect(w,
               b->heap == 1 ||
                       s->blocks[arena->heap[(b->heap - 2) / HEAP_CHILDREN]].stamp <= b->stamp,
               "B11 leaf %u is colder than the one above it", id);
}

static void check_run(struct walk *w, uint32_t id) {
        const struct space *s = w->space;
        const struct kvd_run *run = kvd_index_run(s->ix, s->blocks[id].run - 1);
        const struct kvd_desc *leaf = kvd_index_desc(s->ix, id);
        uint32_t tokens[KVD_RUN_TOKENS_MOST], room[KVD_PACKED_MOST];
        uint32_t bt = s->ix->geometry.block_tokens, at = id;
        const uint32_t *packed;

        expect(w, shm_load(&run->leaf) == block_ref(s, id), "B12 run of block %u ends elsewhere",
               id);
        expect(w, index_holds_run(s, id), "B13 run of block %u is not found by its key", id);
        for (uint32_t i = KVD_RUN_BLOCKS; i-- > 0 && at != NONE; at = s->blocks[at].parent) {
                expect(w, run->ids[i] == at, "B14 run of block %u differs from its chain at %u", id,
                       at);
                memcpy(tokens + i * bt, kvd_index_desc(s->ix, at)->tokens, bt * sizeof *tokens);
        }
        packed = kvd_pack(&s->ix->geometry, tokens, KVD_RUN_BLOCKS * bt, room);
        expect(w, packed && memcmp(run->tokens, packed, s->ix->run_words * sizeof *packed) == 0,
               "B14 run of block %u has other tokens than its chain", id);
        expect(w,
               run->parent == (at == NONE ? KVD_ROOT : block_ref(s, at)) &&
                       run->root == leaf->root && run->group == leaf->group,
               "B15 run of block %u has another parent, root or group than its chain", id);
}

static void check_sessions(struct walk *w, uint32_t id) {
        const struct space *s = w->space;
        const struct block *b = &s->blocks[id];
        uint32_t before = NONE;

        for (uint32_t at = b->session - 1; at != NONE; at = session_chain(s, at)->next) {
                const struct session_chain *c = session_chain(s, at);

                expect(w, c->block == id && c->prev == before,
                       "B17 a session does not end at block %u", id);
                before = at;
                w->audit->session_ends++;
                w->spent += 20;
        }
        expect(w, !b->session || !(b->private || b->poisoned),
               "B17 a session ends at block %u, which is private or poisoned", id);
}

static void check_sealed(struct walk *w, uint32_t id) {
        const struct space *s = w->space;
        const struct block *b = &s->blocks[id];

        w->spent += s->ix->geometry.block_tokens;
        if (!b->private)
                check_chain(w, id);
        check_siblings(w, id);
        check_leaf(w, id);
        check_sessions(w, id);
        if (!b->run)
                return;
        w->spent += 1000 + KVD_RUN_BLOCKS * s->ix->geometry.block_tokens;
        check_run(w, id);
}

static void check_block(struct walk *w, uint32_t id) {
        const struct space *s = w->space;
        const struct block *b = &s->blocks[id];
        uint64_t slot = shm_load(&kvd_index_desc(s->ix, id)->slot);

        expect(w, kvd_slot_state(slot) == b->state,
               "B1 block %u is in state %u, its slot word says %u", id, b->state,
               kvd_slot_state(slot));
        check_list(w, id);
        check_private(w, id);
        check_pending(w, id);
        if (b->state == KVD_SEALED) {
                check_sealed(w, id);
                return;
        }
        expect(w, !b->heap && !b->run && !b->indexed, "B16 block %u is indexed and not sealed", id);
        expect(w, !b->private && !b->refs, "Q1 block %u is private and not sealed", id);
}

static void count_block(struct audit *audit, const struct block *b, uint32_t id) {
        bool filling = b->state == KVD_FILLING || b->state == KVD_LIMBO;

        audit->count[b->state]++;
        audit->indexed += b->indexed;
        audit->runs += b->run != 0;
        audit->free += b->state == KVD_FREE;
        audit->private += b->private;
        audit->garbage += block_is_garbage(b);
        audit->reviving += b->reviving;
        audit->pending += b->pending;
        audit->poisoned += b->poisoned && !b->pending;
        audit->owners += filling && b->owner != NONE ? check_mixed(b->owner) : 0;
        audit->refs += b->refs * check_mixed(id);
        audit->holds += b->holds * check_mixed(id);
}

static void end_segment(struct walk *w, uint32_t number) {
        expect(w, !w->audit->whole || w->audit->free == space_segment(w->space, number)->free.n,
               "S7 free list of segment %u is not as long as it says", number);
        w->audit->free = 0;
}

#define BLOCK_NS 300u

/* Segment by segment, the blocks that have memory. */
bool check_blocks(struct walk *w, uint64_t *at) {
        struct space *s = w->space;
        uint32_t end = space_ids(s);

        while (*at < end && check_may_go_on(w)) {
                uint32_t id = (uint32_t)*at, segment = kvd_segment_of(s->ix, id),
                         first = kvd_segment_first(s->ix, segment),
                         behind = first + s->memory.segments[segment].n_ready;

                w->spent += BLOCK_NS;
                if (id < first || id >= behind) {
                        *at = MAX(id + 1, kvd_segment_first(s->ix, segment + 1));
                        continue;
                }
                count_block(w->audit, &s->blocks[id], id);
                check_block(w, id);
                w->report->checked++;
                if (++*at == behind)
                        end_segment(w, segment);
        }
        return *at >= end;
}
