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
 */

#include "tools/kvctl/follow.h"

#include <errno.h>
#include <sys/mman.h>

#include "ipc/base/shared_file.h"
#include "ipc/base/sys.h"

#define LOOK_NS UINT64_C(500000000) /* interval between checks of the connection */
#define MOST_LATE 1024u

struct follow {
        struct kvctl *kvctl;
        struct space_name name;
        bool whole;
        bool away;
        uint64_t look_ns;  /* when the connection is checked next */
        uint64_t instance; /* of the daemon that owns the index */

        const struct kvd_index *ix; /* owned mapping; NULL while there is no such space */
        uint64_t bytes;
        uint64_t seen; /* value of ix->changes in the last round */

        uint32_t capacity;
        uint64_t *known;                  /* owned; by id: the hash that was reported; 0 if none */
        uint32_t *ids, n_ids;             /* owned; blocks to look at in this round */
        uint32_t *up;                     /* owned; a block and its unreported ancestors */
        bool all;                         /* look at all blocks in the next round */
        uint32_t late[MOST_LATE], n_late; /* blocks to look at again in the next round */

        const struct follow_ops *ops;
        void *arg;
        uint32_t tokens[KVD_MAX_BLOCK_TOKENS];
};

/* ---- a block --------------------------------------------------------------------------------- */

enum seen { GONE, THERE, CHANGING };

static uint64_t hash_of(const struct kvd_desc *desc) {
        uint64_t hash = shm_get64(&desc->key.lo);

        return hash ? hash : 1;
}

static bool may_be_there(const struct follow *f, uint32_t id) {
        return id < f->capacity && id < kvd_segments_ids(f->ix, atomic_load(&f->ix->n_segments));
}

/* *ref: the block's parent. Tokens are read only if with_tokens. */
static void read_desc(struct follow *f, const struct kvd_desc *desc, bool with_tokens,
                      struct stored *ret, kvd_ref *ref) {
        *ref = shm_get64(&desc->parent);
        *ret = (struct stored){.hash = hash_of(desc),
                               .depth = shm_get32(&desc->depth),
                               .group = __atomic_load_n(&desc->group, __ATOMIC_RELAXED),
                               .root = shm_get64(&desc->root),
                               .n_tokens = __atomic_load_n(&desc->n_tokens, __ATOMIC_RELAXED),
                               .tokens = f->tokens};
        ret->n_tokens = MIN(ret->n_tokens, f->ix->geometry.block_tokens);
        if (*ref != KVD_ROOT && may_be_there(f, kvd_ref_id(*ref)))
                ret->parent = hash_of(kvd_index_desc(f->ix, kvd_ref_id(*ref)));
        if (with_tokens)
                shm_read_words(f->tokens, desc->tokens, ret->n_tokens);
}

static bool is_whole(const struct follow *f, const struct stored *block) {
        return block->group != KVD_GROUP_KEYED && block->n_tokens == f->ix->geometry.block_tokens;
}

/* A parent outlives its children: if the block has not changed, its parent's hash is right, too. */
static enum seen look(struct follow *f, uint32_t id, bool with_tokens, struct stored *ret,
                      kvd_ref *ref) {
        const struct kvd_desc *desc;
        uint64_t slot;

        if (!may_be_there(f, id))
                return GONE;
        desc = kvd_index_desc(f->ix, id);
        slot = shm_load(&desc->slot);
        if (kvd_slot_state(slot) == KVD_RETIRING)
                return CHANGING;
        if (kvd_slot_state(slot) != KVD_SEALED ||
            shm_get32(&desc->flags) & (KVD_DESC_PRIVATE | KVD_DESC_POISONED))
                return GONE;
        read_desc(f, desc, with_tokens, ret, ref);
        if (!shm_recheck(&desc->slot, slot))
                return CHANGING;
        return f->whole && !is_whole(f, ret) ? GONE : THERE;
}

static void look_later(struct follow *f, uint32_t id) {
        if (f->n_late < MOST_LATE)
                f->late[f->n_late++] = id;
        else
                f->all = true;
}

/* ---- a round --------------------------------------------------------------------------------- */

static void take_out(struct follow *f, uint32_t id) {
        struct stored block;
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
static uint32_t find_way_up(struct follow *f, uint32_t id) {
        uint32_t n = 0;
        struct stored block;
        kvd_ref ref;

        do {
                if (n == f->capacity || look(f, id, false, &block, &ref) != THERE)
                        return 0;
                f->up[n++] = id;
                id = kvd_ref_id(ref);
        } while (ref != KVD_ROOT && id < f->capacity && !f->known[id]);
        return n;
}

static bool tell_stored(struct follow *f, uint32_t id) {
        struct stored block;
        kvd_ref ref;

        if (look(f, id, true, &block, &ref) != THERE ||
            (ref != KVD_ROOT && f->known[kvd_ref_id(ref)] != block.parent))
                return false;
        f->known[id] = block.hash;
        f->ops->stored(f->arg, &block);
        return true;
}

static void take_in(struct follow *f, uint32_t id) {
        struct stored block;
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

static void for_each(struct follow *f, bool all, void (*call)(struct follow *, uint32_t)) {
        uint32_t n = all ? f->capacity : f->n_ids;

        for (uint32_t i = 0; i < n; i++)
                call(f, all ? i : f->ids[i]);
}

static void add_id(struct follow *f, uint32_t id) {
        if (id < f->capacity)
                f->ids[f->n_ids++] = id;
}

/* Lists changed blocks in f->ids. True: look at all blocks, because the list is incomplete. */
static bool read_changes(struct follow *f) {
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

static void round_through(struct follow *f) {
        bool all = read_changes(f);

        f->all = false;
        for_each(f, all, take_out);
        for_each(f, all, take_in);
}

int follow_tell_all(struct follow *f, const struct follow_ops *ops, void *arg) {
        uint64_t *known = f->known, *fresh = f->ix ? calloc(f->capacity, sizeof *fresh) : NULL;
        const struct follow_ops *own = f->ops;
        void *own_arg = f->arg;

        if (!f->ix)
                return 0;
        if (!fresh)
                return kvctl_out_of_memory(f->kvctl);
        f->known = fresh;
        f->ops = ops;
        f->arg = arg;
        for_each(f, true, take_in);
        f->known = known;
        f->ops = own;
        f->arg = own_arg;
        free(fresh);
        return 0;
}

/* ---- the index ------------------------------------------------------------------------------- */

static void forget_blocks(struct follow *f) {
        free(f->known);
        free(f->ids);
        free(f->up);
        f->known = NULL;
        f->ids = f->up = NULL;
        f->capacity = 0;
}

static void unmap_index(struct follow *f) {
        if (f->ix)
                munmap((void *)f->ix, f->bytes);
        f->ix = NULL;
}

/* An index of another size is of a new cache. Otherwise, known blocks are compared with it. */
static int make_room(struct follow *f, const struct kvd_index *ix) {
        uint32_t n = ix->capacity;

        if (f->known && f->capacity == n)
                return 0;
        if (f->known)
                f->ops->cleared(f->arg);
        forget_blocks(f);
        f->known = calloc(n, sizeof *f->known);
        f->ids = calloc((size_t)ix->change_slots + MOST_LATE, sizeof *f->ids);
        f->up = calloc(n, sizeof *f->up);
        f->capacity = n;
        return f->known && f->ids && f->up ? 0 : kvctl_out_of_memory(f->kvctl);
}

static int take_index(struct follow *f, int fd, uint64_t bytes) {
        void *at;
        int r = shared_file_map(fd, bytes, PROT_READ, &at);

        if (r < 0)
                return kvctl_fail(f->kvctl, KVCTL_NO, r, "the index cannot be mapped: %s",
                                  strerror(-r));
        if (bytes < KVD_INDEX_HEADER_BYTES || kvd_index_validate(at, bytes) < 0) {
                munmap(at, bytes);
                return kvctl_fail(
                        f->kvctl, KVCTL_NO, -EPROTO,
                        "the daemon's index has another layout; is it of another version?");
        }
        r = make_room(f, at);
        unmap_index(f);
        f->ix = at;
        f->bytes = bytes;
        f->seen = shm_load(&f->ix->changes);
        f->n_late = 0;
        f->all = true;
        return r;
}

static int open_index(struct follow *f) {
        struct kvd_msg_follow request = {.space = kvd_slice_of(f->name.name),
                                         .domain = kvd_slice_of(f->name.domain)};
        struct kvd_msg_follow_reply reply;
        struct kvd_fds fds = {.n = 0};
        int r = kvctl_call_fds(f->kvctl, KVD_MSG_follow, &request, &reply, &fds);

        if (r == 0)
                r = fds.n == 1 ? take_index(f, fds.fd[0], reply.bytes) :
                                 kvctl_fail(f->kvctl, KVCTL_NO, -EPROTO, "no index came");
        if (r == 0)
                f->instance = conn_peer(f->kvctl->conn)->instance;
        kvd_fds_close(&fds);
        return r;
}

/* ---- a daemon that is away ------------------------------------------------------------------- */

static void say_away(struct follow *f, bool is) {
        if (f->away != is && f->ops->away)
                f->ops->away(f->arg, is);
        f->away = is;
}

static void space_is_gone(struct follow *f) {
        f->ops->cleared(f->arg);
        forget_blocks(f);
        unmap_index(f);
}

/* A daemon or a space that is away may come back, which is no error. Other errors are final. */
static int open_again(struct follow *f) {
        int r = open_index(f);

        if (r < 0 && f->kvctl->exit == KVCTL_NO_DAEMON) {
                say_away(f, true);
                return 0;
        }
        if (r == -ENOENT && f->ix)
                space_is_gone(f);
        if (r == -ENOENT || r == 0)
                say_away(f, false);
        return r == -ENOENT ? 0 : r;
}

/* After a change of daemons, the old index is no longer updated. */
static bool is_served(const struct follow *f) {
        return f->ix && f->kvctl->conn && conn_peer(f->kvctl->conn)->instance == f->instance;
}

static int look_at_connection(struct follow *f) {
        uint64_t now = sys_now_ns();

        if (now < f->look_ns)
                return 0;
        f->look_ns = now + LOOK_NS;
        if (f->kvctl->conn && !conn_has_peer(f->kvctl->conn))
                kvctl_hang_up(f->kvctl);
        return is_served(f) ? 0 : open_again(f);
}

int follow_step(struct follow *f) {
        int r = look_at_connection(f);

        if (r < 0 || !f->ix)
                return r;
        round_through(f);
        if (!atomic_load(&f->ix->alive))
                space_is_gone(f);
        return 0;
}

const struct kvd_index *follow_index(const struct follow *f) {
        return f->ix;
}

/* ---- life ------------------------------------------------------------------------------------ */

static void ignore_stored(void *arg, const struct stored *block) {
        (void)arg;
        (void)block;
}

static const struct follow_ops ignore = {.stored = ignore_stored};

int follow_begin(struct kvctl *kvctl, const struct space_name *space, bool whole, bool quiet,
                 const struct follow_ops *ops, void *arg, struct follow **ret) {
        struct follow *f = calloc(1, sizeof *f);
        int r;

        if (!f)
                return kvctl_out_of_memory(kvctl);
        *f = (struct follow){.kvctl = kvctl,
                             .name = *space,
                             .whole = whole,
                             .ops = quiet ? &ignore : ops,
                             .arg = arg};
        r = open_index(f);
        if (r == 0 && quiet)
                round_through(f);
        f->ops = ops;
        f->look_ns = sys_now_ns() + LOOK_NS;
        if (r < 0)
                follow_end(f);
        else
                *ret = f;
        return r;
}

struct follow *follow_end(struct follow *f) {
        if (!f)
                return NULL;
        forget_blocks(f);
        unmap_index(f);
        free(f);
        return NULL;
}

void follow_endp(struct follow **f) {
        follow_end(*f);
}
