/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A space's index lists the blocks that came or went last (layout.h), and describes each block. A
 * follower remembers what it has reported of each block, looks at blocks that changed, and reports
 * the differences. It cannot get out of step: if more blocks changed than the index can list, or a
 * new daemon has a new index, the follower looks at all blocks and still reports only differences.
 *
 * A round first reports removed blocks and then stored ones, so that content which moves from one
 * block to another is not reported as removed after its arrival. Blocks that change meanwhile are
 * skipped: the next round looks at them again.
 *
 * kvd_follow_begin follows a space that the caller has open; kvctl has none, and maps the index
 * alone (tools/kvctl/follow.c).
 */

#include "client/follow.h"

#include <stdlib.h>

#include "client/internal.h"

#define MOST_LATE 1024u
#define LOOKS 16u /* for follower_tell_all, while a word goes from SEALED to RETIRING and back */

struct kvd_follow {
        struct kvd_space *space;    /* NULL: follower_take is called by kvctl */
        const struct view *view;    /* whose index it is; never read: it may be unmapped */
        const struct kvd_index *ix; /* valid during a round; NULL: there is none */
        bool whole, away;
        uint64_t seen; /* value of ix->changes in the last round */

        uint32_t capacity;
        uint64_t *known;                  /* owned; by id: the hash that was reported; 0 if none */
        const uint64_t *own;              /* during follower_tell_all: what rounds have reported */
        uint32_t *ids, n_ids;             /* owned; blocks to look at in this round */
        uint32_t *up;                     /* owned; a block and its unreported ancestors */
        bool all;                         /* look at all blocks in the next round */
        uint32_t late[MOST_LATE], n_late; /* blocks to look at again in the next round */

        const struct kvd_follow_ops *ops;
        void *arg;
        uint32_t tokens[KVD_MAX_BLOCK_TOKENS];
};

/* ---- a block --------------------------------------------------------------------------------- */

enum seen { GONE, THERE, CHANGING };

static uint64_t hash_of(const struct kvd_desc *desc) {
        uint64_t hash = shm_get64(&desc->key.lo);

        return hash ? hash : 1;
}

static bool may_be_there(const struct kvd_follow *f, uint32_t id) {
        return id < f->capacity && id < kvd_segments_ids(f->ix, atomic_load(&f->ix->n_segments));
}

/* *ref: the block's parent. Tokens are read only if with_tokens. */
static void read_desc(struct kvd_follow *f, const struct kvd_desc *desc, bool with_tokens,
                      struct kvd_stored *ret, kvd_ref *ref) {
        *ref = shm_get64(&desc->parent);
        *ret = (struct kvd_stored){.hash = hash_of(desc),
                                   .depth = shm_get32(&desc->depth),
                                   .group = __atomic_load_n(&desc->group, __ATOMIC_RELAXED),
                                   .salt = shm_get64(&desc->root),
                                   .n_tokens = __atomic_load_n(&desc->n_tokens, __ATOMIC_RELAXED),
                                   .tokens = f->tokens};
        ret->n_tokens = MIN(ret->n_tokens, f->ix->geometry.block_tokens);
        if (*ref != KVD_ROOT && may_be_there(f, kvd_ref_id(*ref)))
                ret->parent = hash_of(kvd_index_desc(f->ix, kvd_ref_id(*ref)));
        if (with_tokens)
                shm_read_words(f->tokens, desc->tokens, ret->n_tokens);
}

static bool is_whole(const struct kvd_follow *f, const struct kvd_stored *block) {
        return block->group != KVD_GROUP_KEYED && block->n_tokens == f->ix->geometry.block_tokens;
}

/* A parent outlives its children: if the block has not changed, its parent's hash is right, too. */
static enum seen look(struct kvd_follow *f, uint32_t id, bool with_tokens, struct kvd_stored *ret,
                      kvd_ref *ref) {
        const struct kvd_desc *desc;
        uint32_t looks = f->own ? LOOKS : 1;
        uint64_t slot;

        if (!may_be_there(f, id))
                return GONE;
        desc = kvd_index_desc(f->ix, id);
        do {
                if (!looks--)
                        return CHANGING;
                slot = shm_load(&desc->slot);
                if (kvd_slot_state(slot) == KVD_RETIRING && !f->own)
                        return CHANGING;
                if (!slot_stands(slot) ||
                    shm_get32(&desc->flags) & (KVD_DESC_PRIVATE | KVD_DESC_POISONED))
                        return GONE;
                read_desc(f, desc, with_tokens, ret, ref);
        } while (!shm_recheck(&desc->slot, slot));
        if (f->own && f->own[id] != ret->hash)
                return GONE;
        return f->whole && !is_whole(f, ret) ? GONE : THERE;
}

static void look_later(struct kvd_follow *f, uint32_t id) {
        if (f->n_late < MOST_LATE)
                f->late[f->n_late++] = id;
        else
                f->all = true;
}

/* ---- a round --------------------------------------------------------------------------------- */

static void take_out(struct kvd_follow *f, uint32_t id) {
        struct kvd_stored block;
        enum seen seen;
        kvd_ref ref;

        if (!f->known[id])
                return;
        seen = look(f, id, false, &block, &ref);
        if (seen == CHANGING)
                look_later(f, id);
        if (seen == CHANGING || (seen == THERE && block.hash == f->known[id]))
                return;
        f->ops->removed(f->arg, f->known[id]);
        f->known[id] = 0;
}

/* Lists in f->up the blocks from id up to the first known one; 0: one is changing or gone. */
static uint32_t find_way_up(struct kvd_follow *f, uint32_t id) {
        uint32_t n = 0;
        struct kvd_stored block;
        kvd_ref ref;

        do {
                if (n == f->capacity || look(f, id, false, &block, &ref) != THERE)
                        return 0;
                f->up[n++] = id;
                id = kvd_ref_id(ref);
        } while (ref != KVD_ROOT && id < f->capacity && !f->known[id]);
        return n;
}

static bool tell_stored(struct kvd_follow *f, uint32_t id) {
        struct kvd_stored block;
        kvd_ref ref;

        if (look(f, id, true, &block, &ref) != THERE ||
            (ref != KVD_ROOT && f->known[kvd_ref_id(ref)] != block.parent))
                return false;
        f->known[id] = block.hash;
        f->ops->stored(f->arg, &block);
        return true;
}

static void take_in(struct kvd_follow *f, uint32_t id) {
        struct kvd_stored block;
        enum seen seen;
        kvd_ref ref;
        uint32_t n;

        if (f->known[id])
                return;
        seen = look(f, id, false, &block, &ref);
        if (seen == GONE)
                return;
        n = seen == THERE ? find_way_up(f, id) : 0;
        if (!n)
                look_later(f, id);
        while (n-- > 0)
                if (!tell_stored(f, f->up[n])) {
                        look_later(f, id);
                        return;
                }
}

static void for_each(struct kvd_follow *f, bool all, void (*call)(struct kvd_follow *, uint32_t)) {
        uint32_t n = all ? f->capacity : f->n_ids;

        for (uint32_t i = 0; i < n; i++)
                call(f, all ? i : f->ids[i]);
}

static void add_id(struct kvd_follow *f, uint32_t id) {
        if (id < f->capacity)
                f->ids[f->n_ids++] = id;
}

/* Lists changed blocks in f->ids. True: look at all blocks, because the list is incomplete. */
static bool read_changes(struct kvd_follow *f) {
        const shm_u32 *slots = kvd_index_changes(f->ix);
        uint32_t n_slots = f->ix->change_slots;
        uint64_t end = shm_load(&f->ix->changes), from = f->seen;

        f->n_ids = 0;
        for (uint32_t i = 0; i < f->n_late; i++)
                add_id(f, f->late[i]);
        f->n_late = 0;
        f->seen = end;
        if (f->all || end - from > n_slots)
                return true;
        for (uint64_t i = from; i < end; i++)
                add_id(f, atomic_load_explicit(&slots[i % n_slots], memory_order_relaxed));
        return shm_load_again(&f->ix->changes_begun) > from + n_slots;
}

void follower_round(struct kvd_follow *f) {
        bool all = read_changes(f);

        f->all = false;
        for_each(f, all, take_out);
        for_each(f, all, take_in);
}

/*
 * Tells of the blocks that rounds have reported, since the next round reports the others to all, and
 * reports the end of these, also if the daemon is looking for their pins now.
 */
int follower_tell_all(struct kvd_follow *f, const struct kvd_follow_ops *ops, void *arg) {
        uint64_t *known = f->known, *fresh = f->ix ? calloc(f->capacity, sizeof *fresh) : NULL;
        const struct kvd_follow_ops *own = f->ops;
        void *own_arg = f->arg;

        if (!f->ix)
                return 0;
        if (!fresh)
                return -ENOMEM;
        f->known = fresh;
        f->ops = ops;
        f->arg = arg;
        f->own = known;
        for_each(f, true, take_in);
        f->own = NULL;
        f->known = known;
        f->ops = own;
        f->arg = own_arg;
        free(fresh);
        return 0;
}

/* ---- the index ------------------------------------------------------------------------------- */

static void forget_blocks(struct kvd_follow *f) {
        free(f->known);
        free(f->ids);
        free(f->up);
        f->known = NULL;
        f->ids = f->up = NULL;
        f->capacity = 0;
}

void follower_lose(struct kvd_follow *f) {
        if (f->known)
                f->ops->cleared(f->arg);
        forget_blocks(f);
        f->ix = NULL;
}

/* An index of another size is of a new cache. Otherwise, known blocks are compared with it. */
static int make_room(struct kvd_follow *f, const struct kvd_index *ix) {
        uint32_t n = ix->capacity;

        if (f->known && f->capacity == n)
                return 0;
        follower_lose(f);
        f->known = calloc(n, sizeof *f->known);
        f->ids = calloc((size_t)ix->change_slots + MOST_LATE, sizeof *f->ids);
        f->up = calloc(n, sizeof *f->up);
        if (!f->known || !f->ids || !f->up) {
                forget_blocks(f);
                return -ENOMEM;
        }
        f->capacity = n;
        return 0;
}

int follower_take(struct kvd_follow *f, const struct kvd_index *ix) {
        int r = make_room(f, ix);

        if (r < 0)
                return r;
        f->ix = ix;
        f->seen = shm_load(&ix->changes);
        f->n_late = 0;
        f->all = true;
        return 0;
}

void follower_away(struct kvd_follow *f, bool is) {
        if (f->away != is && f->ops->away)
                f->ops->away(f->arg, is);
        f->away = is;
}

/* ---- life ------------------------------------------------------------------------------------ */

struct kvd_follow *follower_new(bool whole, const struct kvd_follow_ops *ops, void *arg) {
        struct kvd_follow *f = calloc(1, sizeof *f);

        if (f)
                *f = (struct kvd_follow){.whole = whole, .ops = ops, .arg = arg};
        return f;
}

void follower_report_to(struct kvd_follow *f, const struct kvd_follow_ops *ops) {
        f->ops = ops;
}

int kvd_follow_begin(struct kvd_space *space, const struct kvd_follow_ops *ops, void *arg,
                     struct kvd_follow **ret) {
        struct kvd_follow *f;
        int r = space_check(space);

        if (r < 0)
                return r;
        f = follower_new(true, ops, arg);
        if (!f)
                return client_fail(-ENOMEM, "out of memory");
        f->space = space;
        *ret = f;
        return 0;
}

struct kvd_follow *kvd_follow_end(struct kvd_follow *f) {
        if (f)
                forget_blocks(f);
        free(f);
        return NULL;
}

/* A view is never at the address of an earlier one, because views are freed with their space. */
static int look_in(struct kvd_follow *f, const struct view *view) {
        int r = 0;

        if (!atomic_load(&view->ix->alive)) {
                follower_lose(f);
                return 0;
        }
        if (f->view != view || !f->ix)
                r = follower_take(f, view->ix);
        if (r < 0)
                return client_fail(r, "out of memory");
        f->view = view;
        follower_round(f);
        return 0;
}

int kvd_follow_step(struct kvd_follow *f) {
        struct view *view;
        int r = space_check(f->space);

        if (r < 0)
                return r;
        follower_away(f, kvd_catch_up(f->space) < 0);
        view = view_get(f->space);
        r = look_in(f, view);
        view_put(view);
        return r;
}
