/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A cache's blocks are carried over from the index of the daemon before into a new one. Whatever
 * stopped that daemon, and wherever, only what was complete is taken: a block that the old index
 * calls sealed (or retiring, since it may be pinned), whose proof ties what is said of it to this
 * incarnation, whose key follows from its tokens and from the block before it, and which stands
 * behind a block that was taken itself. All else is free, or left alone while somebody may write it:
 * on a GPU, too, what its producer's stream had not written yet, as the semaphores of then say.
 */

#include "store/cache/before.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "ipc/base/device.h"
#include "ipc/base/enums.h"
#include "ipc/base/sys.h"
#include "store/cache/inside.h"
#include "store/hooks.h"

/* ---- the old index --------------------------------------------------------------------------- */

static bool is_sound(const struct before *b) {
        const struct kvd_index *ix = &b->header;

        return kvd_index_validate(ix, b->bytes) == 0 && ix->backend != KVD_BACKEND_LEGACY &&
               ix->proof == index_proof(ix) && b->n_segments <= ix->max_segments &&
               !ix->name[KVD_NAME_MAX] && !ix->domain[KVD_NAME_MAX];
}

static int map(int fd, struct before *b) {
        struct stat st;
        void *at;
        int r;

        if (fstat(fd, &st) < 0 || st.st_size < (off_t)sizeof b->header)
                return -EPROTO;
        b->bytes = (uint64_t)st.st_size;
        r = shared_file_map(fd, b->bytes, PROT_READ, &at);
        if (r == 0)
                b->at = at;
        return r;
}

int before_open(int fd, struct before *b) {
        int r = map(fd, b);

        if (r < 0)
                return r;
        memcpy(&b->header, b->at, sizeof b->header);
        b->n_segments = atomic_load(&b->header.n_segments);
        if (!is_sound(b))
                return -EPROTO;
        b->ids = kvd_segments_ids(&b->header, b->n_segments);
        b->fate = sys->calloc(MAX(b->ids, 1), sizeof *b->fate);
        b->path = sys->calloc(MAX(b->ids, 1), sizeof *b->path);
        return b->fate && b->path ? 0 : -ENOMEM;
}

void before_close(struct before *b) {
        if (b->at)
                munmap((void *)b->at, b->bytes);
        free(b->fate);
        free(b->path);
}

static const struct kvd_desc *old_desc(const struct before *b, uint32_t id) {
        return (const struct kvd_desc *)(b->at + b->header.desc_off +
                                         (uint64_t)id * b->header.desc_stride);
}

static uint64_t old_slot(const struct before *b, uint32_t id) {
        return shm_load(&old_desc(b, id)->slot);
}

static const uint64_t *old_proof(const struct before *b, uint32_t id) {
        return b->header.proof_off ? (const uint64_t *)(b->at + b->header.proof_off) + id :
                                     &old_desc(b, id)->semaphore_value;
}

uint32_t before_memory(const struct before *b, uint32_t segment) {
        const shm_u32 *memory = (const shm_u32 *)(b->at + b->header.memory_off);

        return atomic_load(&memory[segment]);
}

uint32_t before_ready(const struct before *b, uint32_t segment) {
        uint32_t first = kvd_segment_first(&b->header, segment),
                 end = kvd_segment_end(&b->header, segment);

        while (end > first && kvd_slot_state(old_slot(b, end - 1)) == KVD_ABSENT)
                end--;
        return end - first;
}

/* ---- one block ------------------------------------------------------------------------------- */

enum fate { UNKNOWN, TAKEN, LOST };

/* What the old index says of it, read once. */
struct claim {
        uint32_t id, parent;     /* parent: NONE for the first of a chain */
        uint64_t slot;
        uint64_t proof;
        uint32_t semaphore;      /* of that life; what it must have reached is in the fields */
        uint32_t tokens[KVD_MAX_BLOCK_TOKENS];
        struct kvd_desc fields; /* ends in tokens of its own, which nobody uses */
};

static void read_claim(const struct before *b, uint32_t id, struct claim *c) {
        const struct kvd_desc *desc = old_desc(b, id);

        c->id = id;
        c->slot = shm_load(&desc->slot);
        c->proof = shm_get64(old_proof(b, id));
        c->fields = (struct kvd_desc){.key = desc->key,
                                      .parent = desc->parent,
                                      .depth = desc->depth,
                                      .n_tokens = desc->n_tokens,
                                      .group = desc->group,
                                      .root = desc->root,
                                      .flags = desc->flags};
        if (b->header.semaphore_rows) {
                c->semaphore = desc->semaphore;
                c->fields.semaphore_value = desc->semaphore_value;
        }
        c->parent = c->fields.parent == KVD_ROOT ? NONE : kvd_ref_id(c->fields.parent);
        shm_read_words(c->tokens, desc->tokens, b->header.geometry.block_tokens);
}

/* Its proof says that its data is there, or it says what it waits for, and that has come. */
static bool is_proven(const struct before *b, const struct space *space, const struct claim *c) {
        kvd_ref ref = kvd_ref_make(c->id, kvd_slot_generation(c->slot));
        struct kvd_desc waits = c->fields;

        if (c->proof == block_proof(&b->header, ref, &c->fields))
                return true;
        waits.semaphore = c->semaphore;
        return c->semaphore && c->proof == block_proof(&b->header, ref, &waits) &&
               hooks_was_reached(space, b->header.life, c->semaphore, waits.semaphore_value);
}

static bool is_complete(const struct before *b, const struct space *space,
                        const struct claim *c) {
        const struct kvd_shape *g = &b->header.geometry;
        uint32_t generation = kvd_slot_generation(c->slot);
        enum kvd_state state = kvd_slot_state(c->slot);

        if ((state != KVD_SEALED && state != KVD_RETIRING) || !generation ||
            generation > KVD_GENERATION_LAST || c->slot != kvd_slot_make(state, generation) ||
            !is_proven(b, space, c))
                return false;
        if (c->fields.flags || c->fields.group >= g->layer_groups || !c->fields.n_tokens ||
            c->fields.n_tokens > g->block_tokens)
                return false;
        for (uint32_t i = 0; i < g->block_tokens; i++)
                if (i < c->fields.n_tokens ? !kvd_token_is_valid(g, c->tokens[i]) : c->tokens[i])
                        return false;
        return true;
}

/* What it stands behind was taken itself, and is what this block takes it for. */
static bool follows(const struct before *b, const struct space *space, const struct claim *c) {
        const struct kvd_desc *parent;

        if (c->parent == NONE)
                return c->fields.depth == 0;
        if (c->parent >= b->ids || b->fate[c->parent] != TAKEN ||
            block_ref(space, c->parent) != c->fields.parent)
                return false;
        parent = kvd_index_desc(space->ix, c->parent);
        return parent->n_tokens == b->header.geometry.block_tokens &&
               parent->group == c->fields.group && parent->root == c->fields.root &&
               parent->depth + 1 == c->fields.depth;
}

static bool has_its_key(const struct space *space, const struct claim *c, struct kvd_key root) {
        struct kvd_key before = c->parent == NONE ? root :
                                                    kvd_index_desc(space->ix, c->parent)->key;
        struct kvd_key key = kvd_key_block(space->ix, before, c->tokens, c->fields.n_tokens);

        return kvd_key_equal(key, c->fields.key);
}

static void take(struct space *space, const struct claim *c, struct kvd_key root) {
        space->blocks[c->id].parent = c->parent;
        index_write(space, c->id, &c->fields, c->tokens);
        block_set_state(space, c->id, KVD_SEALED, kvd_slot_generation(c->slot));
        index_enter(space, c->id, root);
        block_link(space, c->id, c->parent);
        hooks_readable(space, c->id);
        space_count(space, KVD_SPACE_ADOPTED, 1);
}

/* Of the block before it, the fate is known. */
static enum fate judge(struct before *b, struct space *space, uint32_t id) {
        struct kvd_key root;
        struct claim c;

        read_claim(b, id, &c);
        if (!is_complete(b, space, &c) || !follows(b, space, &c))
                return LOST;
        root = kvd_key_root(space->ix, c.fields.group, c.fields.root);
        if (!has_its_key(space, &c, root) || index_find(space, &c.fields, c.tokens) != NONE)
                return LOST;
        take(space, &c, root);
        return TAKEN;
}

/* ---- all of them ----------------------------------------------------------------------------- */

#define PAGE sys_page_bytes()

static bool has_memory(const struct space *space, uint32_t id) {
        const struct segment *segment = block_segment(space, id);

        return id - kvd_segment_first(space->ix, segment->number) < segment->n_ready;
}

/* Depth falls on the way up, so that there is an end to it, whatever the links are. */
static bool leads_up(const struct before *b, uint32_t id, uint32_t *parent) {
        const struct kvd_desc *desc = old_desc(b, id);

        *parent = kvd_ref_id(shm_get64(&desc->parent));
        return shm_get64(&desc->parent) != KVD_ROOT && *parent < b->ids &&
               shm_get32(&old_desc(b, *parent)->depth) + UINT64_C(1) == shm_get32(&desc->depth);
}

/* Parents first: up to a block whose fate is known, and down again. */
static void decide(struct before *b, struct space *space, uint32_t id) {
        uint32_t n = 0;

        while (b->fate[id] == UNKNOWN && n < b->ids) {
                b->path[n++] = id;
                if (!leads_up(b, id, &id))
                        break;
        }
        while (n-- > 0)
                b->fate[b->path[n]] = has_memory(space, b->path[n]) ?
                                              (uint8_t)judge(b, space, b->path[n]) :
                                              LOST;
}

/*
 * All of it is about to be written. A page at a time costs more than all that is done with the
 * blocks on it; if the kernel does not want to, that is what happens.
 */
static void have_pages(void *from, uint64_t bytes) {
        uintptr_t begin = ALIGN_UP((uintptr_t)from, PAGE),
                  end = ((uintptr_t)from + bytes) & ~(uintptr_t)(PAGE - 1);

        if (begin >= end)
                return;
        sys->madvise((void *)begin, end - begin, MADV_HUGEPAGE);
        sys->madvise((void *)begin, end - begin, MADV_POPULATE_WRITE);
}

#define KEYS_PER_PAGE 4u /* from then on hardly a page of a table stays unwritten */

static void have_all_pages(const struct before *b, struct space *space) {
        struct kvd_index *ix = space->ix;
        uint64_t table = ix->table_slots * sizeof(shm_u64), ready = 0;

        for (uint32_t i = 0; i < b->n_segments; i++) {
                uint32_t first = kvd_segment_first(ix, i), n = space->memory.segments[i].n_ready;

                have_pages(&space->blocks[first], n * sizeof *space->blocks);
                have_pages(kvd_index_desc(ix, first), (uint64_t)n * ix->desc_stride);
                ready += n;
        }
        if (ready >= table / PAGE * KEYS_PER_PAGE)
                have_pages(kvd_index_table(ix), table);
}

/* An incarnation names one block as long as the cache lives, so generations go on. */
static void carry_generations(const struct before *b, struct space *space) {
        for (uint32_t id = 0; id < b->ids; id++) {
                uint32_t generation = kvd_slot_generation(old_slot(b, id));

                if (generation)
                        index_set_state(space, id, KVD_ABSENT,
                                        MIN(generation, KVD_GENERATION_LAST));
        }
}

static void give_rest(const struct before *b, struct space *space) {
        for (uint32_t id = 0; id < b->ids; id++) {
                enum kvd_state state = kvd_slot_state(old_slot(b, id));

                if (b->fate[id] == TAKEN || !has_memory(space, id))
                        continue;
                if (state == KVD_FREE || state == KVD_ABSENT || !block_inherit(space, id))
                        block_append_free(space, id);
        }
}

#define AHEAD 16u /* blocks: the time that a cache line takes to come */

/* Keys are spread over the whole table, so each is a miss or two, unless they come all at once. */
static void look_ahead(const struct before *b, const struct space *space, uint32_t id) {
        if (id < b->ids)
                index_prefetch(space, old_desc(b, id)->key, id);
}

static void decide_all(struct before *b, struct space *space) {
        for (uint32_t id = 0; id < b->ids; id++) {
                look_ahead(b, space, id + AHEAD);
                decide(b, space, id);
        }
}

uint64_t before_give_blocks(struct before *b, struct space *space) {
        have_all_pages(b, space);
        carry_generations(b, space);
        if (space->ix->kind == KVD_kind_causal)
                decide_all(b, space);
        give_rest(b, space);
        return space->count[KVD_SEALED];
}
