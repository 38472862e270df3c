/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Takes the blocks of a cache over from the previous daemon's index into a new one. Wherever that
 * daemon stopped, only complete blocks are taken. Such a block is sealed in the old index (or
 * retiring, since it may be pinned), its proof ties its descriptor to its generation, its key
 * follows from its tokens and the key before it, and its parent was taken too. On a GPU, the old
 * semaphores must also say that its data was written. All other blocks are freed, or stay in limbo
 * while an old client may still write them.
 *
 * Each block takes time, and the daemon serves meanwhile. So the work is done in pieces, in four
 * phases:
 *
 *      NUMBERS   copies the generation of each block, and populates the pages to be written
 *      JUDGES    verifies sealed blocks, parents first; the path up to them is kept between pieces
 *      FREES     frees all other blocks, or leaves them to old clients
 *      UNMAPS    unmaps the old index
 */

#include "store/cache/before.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "ipc/base/device.h"
#include "ipc/base/enums.h"
#include "ipc/base/sys.h"
#include "store/cache/inside.h"
#include "store/summaries.h"

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
        if (b->bytes && b->at)
                munmap((void *)b->at, b->bytes);
        free(b->fate);
        free(b->path);
        free(b);
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

/* A worn-out block is ABSENT, and has memory. */
static bool may_have_memory(const struct before *b, uint32_t id) {
        return kvd_slot_state(old_slot(b, id)) != KVD_ABSENT ||
               kvd_slot_generation(old_slot(b, id)) >= KVD_GENERATION_LAST;
}

/* A binary search, since a segment may have a million blocks: those with memory are in front. */
uint32_t before_ready(const struct before *b, uint32_t segment) {
        uint32_t first = kvd_segment_first(&b->header, segment), low = first,
                 high = kvd_segment_end(&b->header, segment);

        while (low < high) {
                uint32_t middle = low + (high - low) / 2;

                if (may_have_memory(b, middle))
                        low = middle + 1;
                else
                        high = middle;
        }
        return low - first;
}

/* ---- one block ------------------------------------------------------------------------------- */

enum fate { UNKNOWN, TAKEN, LOST };

/* A block according to the old index, read once. */
struct claim {
        uint32_t id, parent; /* parent: NONE for the first of a chain */
        uint64_t slot;
        uint64_t proof;
        uint32_t semaphore; /* of the last life; fields has the value to be reached */
        uint32_t tokens[KVD_MAX_BLOCK_TOKENS];
        struct kvd_desc fields; /* its own tokens, at its end, are not used */
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
        c->semaphore = b->header.semaphore_rows ? desc->semaphore : 0;
        if (b->header.semaphore_rows)
                c->fields.semaphore_value = desc->semaphore_value;
        c->parent = c->fields.parent == KVD_ROOT ? NONE : kvd_ref_id(c->fields.parent);
        shm_read_words(c->tokens, desc->tokens, b->header.geometry.block_tokens);
}

/*
 * The proof says that its data is there, or names a semaphore value that has been reached. If
 * several streams write a block, no proof covers all of their values.
 */
static bool is_proven(const struct before *b, const struct space *space, const struct claim *c) {
        kvd_ref ref = kvd_ref_make(c->id, kvd_slot_generation(c->slot));
        struct kvd_desc waits = c->fields;

        if (c->proof == block_proof(&b->header, ref, &c->fields))
                return true;
        waits.semaphore = c->semaphore;
        return c->semaphore && b->header.n_shards == 1 &&
               c->proof == block_proof(&b->header, ref, &waits) &&
               semaphores_reached(space, b->header.life, c->semaphore, waits.semaphore_value);
}

/* Unused ones are 0. The words of a key may be any. */
static bool has_its_tokens(const struct kvd_shape *g, const struct claim *c) {
        bool keyed = c->fields.group == KVD_GROUP_KEYED;

        for (uint32_t i = 0; i < g->block_tokens; i++)
                if (i < c->fields.n_tokens ? !keyed && !kvd_token_is_valid(g, c->tokens[i]) :
                                             c->tokens[i])
                        return false;
        return true;
}

static bool is_complete(const struct before *b, const struct space *space, const struct claim *c) {
        const struct kvd_shape *g = &b->header.geometry;
        uint32_t generation = kvd_slot_generation(c->slot);
        enum kvd_state state = kvd_slot_state(c->slot);

        if ((state != KVD_SEALED && state != KVD_RETIRING) || !generation ||
            generation > KVD_GENERATION_LAST || c->slot != kvd_slot_make(state, generation) ||
            !is_proven(b, space, c))
                return false;
        return !c->fields.flags && kvd_has_group(&b->header, c->fields.group) &&
               c->fields.n_tokens && c->fields.n_tokens <= kvd_full_tokens(g, c->fields.group) &&
               has_its_tokens(g, c);
}

/* Its parent was taken itself, and is the block that this one names. */
static bool follows(const struct before *b, const struct space *space, const struct claim *c) {
        const struct kvd_desc *parent;

        if (c->parent == NONE)
                return c->fields.depth == 0;
        if (c->parent >= b->ids || b->fate[c->parent] != TAKEN ||
            block_ref(space, c->parent) != c->fields.parent)
                return false;
        parent = kvd_index_desc(space->ix, c->parent);
        return parent->n_tokens == space_full_tokens(space, c->fields.group) &&
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
        summary_want(space, c->id);
        space_count(space, KVD_SPACE_ADOPTED, 1);
}

/* The fate of its parent must be known. */
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

/* ---- the order of judging -------------------------------------------------------------------- */

static bool has_memory(const struct space *space, uint32_t id) {
        const struct segment *segment = block_segment(space, id);

        return id - kvd_segment_first(space->ix, segment->number) < segment->n_ready;
}

/* Depth decreases on the way up, so the path is finite even if the links are wrong. */
static bool leads_up(const struct before *b, uint32_t id, uint32_t *parent) {
        const struct kvd_desc *desc = old_desc(b, id);

        *parent = kvd_ref_id(shm_get64(&desc->parent));
        return shm_get64(&desc->parent) != KVD_ROOT && *parent < b->ids &&
               shm_get32(&old_desc(b, *parent)->depth) + UINT64_C(1) == shm_get32(&desc->depth);
}

#define AHEAD 16u /* blocks: as many as are judged while a cache line is fetched */

/* Keys are spread over the whole table, so each lookup is a cache miss or two: prefetch. */
static void look_ahead(const struct before *b, const struct space *space, uint32_t id) {
        if (id < b->ids)
                index_prefetch(space, old_desc(b, id)->key, id);
}

static void begin_path(struct before *b, const struct space *space, uint32_t id) {
        look_ahead(b, space, id + AHEAD);
        if (b->fate[id] != UNKNOWN)
                return;
        b->path[0] = id;
        b->n_path = 1;
        b->climbs = true;
}

/* Extends the path by one block, until it reaches one whose fate is known. */
static void climb(struct before *b) {
        uint32_t up;

        b->climbs = leads_up(b, b->path[b->n_path - 1], &up) && b->fate[up] == UNKNOWN &&
                    b->n_path < b->ids;
        if (b->climbs)
                b->path[b->n_path++] = up;
}

static void judge_last(struct before *b, struct space *space) {
        uint32_t id = b->path[--b->n_path];

        b->fate[id] = has_memory(space, id) ? (uint8_t)judge(b, space, id) : LOST;
}

/* Climbs to a block whose fate is known, and judges on the way down. False: there are no more. */
static bool step(struct before *b, struct space *space) {
        if (b->climbs)
                climb(b);
        else if (b->n_path)
                judge_last(b, space);
        else if (b->next < b->ids)
                begin_path(b, space, b->next++);
        else
                return false;
        return true;
}

/* ---- memory ---------------------------------------------------------------------------------- */

#define PAGE sys_page_bytes()
#define KEYS_PER_PAGE 4u /* with so many, hardly a page of the table stays unwritten */

/* Best effort: if it fails, pages are allocated one by one as they are written. */
static void advise(void *from, uint64_t bytes, int advice) {
        uintptr_t begin = ALIGN_UP((uintptr_t)from, PAGE),
                  end = ((uintptr_t)from + bytes) & ~(uintptr_t)(PAGE - 1);

        if (begin < end)
                sys->madvise((void *)begin, end - begin, advice);
}

static void advise_ids(struct space *space, uint32_t first, uint32_t n, int advice) {
        struct kvd_index *ix = space->ix;

        advise(&space->blocks[first], (uint64_t)n * sizeof *space->blocks, advice);
        advise(kvd_index_desc(ix, first), (uint64_t)n * ix->desc_stride, advice);
}

/*
 * Populates the pages that are about to be written for these ids, and the same share of the table:
 * a page fault for each page would cost more than all work on its blocks.
 */
static void have_pages(const struct before *b, struct space *space, uint32_t first, uint32_t n) {
        uint64_t table = space->ix->table_slots * sizeof(shm_u64), from = table * first / b->ids;

        if (has_memory(space, first))
                advise_ids(space, first, n, MADV_POPULATE_WRITE);
        if (b->fills_table)
                advise((uint8_t *)kvd_index_table(space->ix) + from,
                       table * (first + n) / b->ids - from, MADV_POPULATE_WRITE);
}

/* ---- pieces ---------------------------------------------------------------------------------- */

#define PASSED 4096u                  /* ids in one piece, ... */
#define POPULATED (UINT64_C(4) << 20) /* bytes of their descriptors */
#define STEPS 1024u                   /* calls of step in one piece: about as many blocks, ... */
#define JUDGED (1024u * 256)          /* tokens of these blocks */
#define UNMAPPED (UINT64_C(4) << 20)  /* bytes in one piece */

/* (id, generation) names one block as long as the cache lives, so generations continue. */
static void carry_generation(const struct before *b, struct space *space, uint32_t id) {
        uint32_t generation = kvd_slot_generation(old_slot(b, id));

        if (generation)
                index_set_state(space, id, KVD_ABSENT, MIN(generation, KVD_GENERATION_LAST));
}

static void give_free(const struct before *b, struct space *space, uint32_t id) {
        enum kvd_state state = kvd_slot_state(old_slot(b, id));

        if (b->fate[id] == TAKEN || !has_memory(space, id))
                return;
        if (state == KVD_FREE || state == KVD_ABSENT || !block_inherit(space, id))
                block_append_free(space, id);
}

static uint32_t passed(const struct before *b) {
        return (uint32_t)MIN(PASSED, POPULATED / b->header.desc_stride);
}

/* False: those were the last ids. */
static bool pass(struct before *b, struct space *space,
                 void (*each)(const struct before *, struct space *, uint32_t)) {
        uint32_t end = b->next + MIN(b->ids - b->next, passed(b));

        for (; b->next < end; b->next++)
                each(b, space, b->next);
        return b->next < b->ids;
}

static bool number(struct before *b, struct space *space) {
        if (b->next < b->ids)
                have_pages(b, space, b->next, MIN(b->ids - b->next, passed(b)));
        return pass(b, space, carry_generation);
}

static bool judge_some(struct before *b, struct space *space) {
        bool more = space->ix->kind == KVD_kind_causal;
        uint32_t n = MIN(STEPS, JUDGED / space_block_tokens(space));

        for (uint32_t i = 0; more && i < n; i++)
                more = step(b, space);
        return more;
}

static bool unmap(struct before *b) {
        uint64_t n = MIN(b->bytes, UNMAPPED);

        munmap((void *)b->at, n);
        b->at += n;
        b->bytes -= n;
        return b->bytes;
}

static bool go_on(struct before *b, struct space *space) {
        switch (b->phase) {
        case BEFORE_NUMBERS: return number(b, space);
        case BEFORE_JUDGES: return judge_some(b, space);
        case BEFORE_FREES: return pass(b, space, give_free);
        default: return unmap(b);
        }
}

bool before_piece(struct before *b, struct space *space) {
        if (go_on(b, space))
                return true;
        b->next = 0;
        return b->phase++ < BEFORE_UNMAPS;
}

void before_begin(struct before *b, struct space *space) {
        struct kvd_index *ix = space->ix;
        uint64_t table = ix->table_slots * sizeof(shm_u64), ready = 0;

        for (uint32_t i = 0; i < b->n_segments; i++) {
                uint32_t n = space->memory.segments[i].n_ready;

                advise_ids(space, kvd_segment_first(ix, i), n, MADV_HUGEPAGE);
                ready += n;
        }
        b->fills_table = ready >= table / PAGE * KEYS_PER_PAGE;
        if (b->fills_table)
                advise(kvd_index_table(ix), table, MADV_HUGEPAGE);
}
