/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Makes, compares and deletes spaces, and frees them in pieces afterwards. The other files handle
 * what a space contains; hooks (hooks.h) notify the parts of the store.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "ipc/base/device.h"
#include "ipc/base/enums.h"
#include "ipc/base/sys.h"
#include "ipc/base/text.h"
#include "store/account.h"
#include "store/cache/inside.h"
#include "store/cache/memory.h"
#include "store/hooks.h"
#include "store/job.h"
#include "store/keep_inside.h"

/* ---- finding and comparing ------------------------------------------------------------------- */

static struct space **chain_of(struct store *store, const char *name) {
        uint32_t hash = 2166136261u; /* FNV-1a */

        while (*name)
                hash = (hash ^ (uint8_t)*name++) * 16777619u;
        return &store->spaces.named[hash % STORE_NAMES];
}

struct space *space_by_name(struct domain *domain, const char *name) {
        for (struct space *s = *chain_of(domain->store, name); s; s = s->listed.same)
                if (s->domain == domain && strcmp(s->name, name) == 0)
                        return s;
        return NULL;
}

static int normalise(struct store *store, struct space_spec *spec) {
        const char *why;

        if (!kvd_is_name(spec->name, KVD_NAME_MAX))
                return store_refuse(store, -EINVAL,
                                    "a space's name is 1 to %u of " KVD_NAME_LETTERS, KVD_NAME_MAX);
        if (kvd_shape_normalise(&spec->geometry, &why) < 0)
                return store_refuse(store, -EINVAL, "space '%s': %s", spec->name, why);
        if (!spec->options.kind)
                spec->options.kind = KVD_kind_causal;
        if (!spec->options.keys)
                spec->options.keys = KVD_keys_serve;
        if (!spec->options.policy)
                spec->options.policy = KVD_policy_lru;
        if (spec->options.kind > KVD_kind_max || spec->options.keys > KVD_keys_max ||
            spec->options.policy > KVD_policy_max)
                return store_refuse(store, -EINVAL, "space '%s': unknown kind, keys or policy",
                                    spec->name);
        if (policy_goes_by_worth(spec->options.policy) && kvd_shape_is_opaque(&spec->geometry))
                return store_refuse(store, -EOPNOTSUPP,
                                    "space '%s': policy %s depends on the methods, and these "
                                    "cannot look into opaque blocks",
                                    spec->name,
                                    kvd_enum_word(KVD_ENUM_policy, spec->options.policy));
        return 0;
}

static int refuse_different(struct space *space, const char *field) {
        return store_refuse(space_store(space), -EEXIST,
                            "space '%s' exists with another %s; use another name, or "
                            "delete it with kvctl space delete",
                            space->name, field);
}

static int compare(struct space *space, const struct space_spec *spec) {
        const struct kvd_index *ix = space->ix;
        const char *field = kvd_shape_difference(&ix->geometry, &spec->geometry);

        if (!field)
                field = ix->kind != spec->options.kind     ? "kind" :
                        ix->keys != spec->options.keys     ? "keys" :
                        ix->policy != spec->options.policy ? "policy" :
                                                             NULL;
        return field ? refuse_different(space, field) : 0;
}

/* ---- making ---------------------------------------------------------------------------------- */

/* As calloc(n, 64), aligned to cache lines. The pointer to be freed is stored before them. */
static void *new_lines(uint32_t n) {
        uint8_t *room = sys->calloc((size_t)n + 1, 64);
        void **lines;

        if (!room)
                return NULL;
        lines = (void **)ALIGN_UP((uintptr_t)room + sizeof room, 64);
        lines[-1] = room;
        return lines;
}

static void free_lines(void *lines) {
        if (lines)
                free(((void **)lines)[-1]);
}

static void space_free(struct space *space) {
        while (space->memory.arenas) {
                struct arena *arena = space->memory.arenas;

                space->memory.arenas = arena->next;
                free(arena->heap);
                free(arena);
        }
        adopt_leave(space);
        hooks_space_ends(space);
        account_close(space);
        index_free(space);
        free(space->memory.segments);
        free_lines(space->blocks);
        free(space->records);
        free(space->look.marks);
        free(space->runs.free);
        free(space->attachments);
        users_close(space);
        free(space->leases.at);
        sessions_close(space);
        free(space);
}

static void space_freep(struct space **space) {
        if (*space)
                space_free(*space);
}

/* Its index counts in full, since a client that reads it allocates all of its pages. */
uint64_t space_table_bytes(const struct kvd_index *ix) {
        uint64_t block_bytes = sizeof(struct block) + sizeof(struct block_mark) +
                               sizeof(struct block_record);

        return ix->size + (uint64_t)ix->capacity * block_bytes +
               (uint64_t)ix->run_capacity * sizeof(uint32_t) +
               (uint64_t)ix->max_segments * sizeof(struct segment) +
               (uint64_t)kvd_places(ix) * sizeof(uint32_t);
}

static int charge(struct space *space) {
        int r = account_charge(space, KVD_COST_spaces, 1);

        if (r == 0)
                r = account_charge(space, KVD_COST_files, SPACE_FILES);
        if (r == 0)
                r = account_charge(space, KVD_COST_overhead, space_table_bytes(space->ix));
        if (r == 0)
                r = account_charge(space, KVD_COST_kept, space_kept_bytes(space));
        return r;
}

static int make_tables(struct space *space) {
        const struct kvd_index *ix = space->ix;
        /* clients of the previous daemon have seats in addition */
        uint32_t seats = 2 * space_store(space)->config.max_attachments;

        space->memory.segments = sys->calloc(ix->max_segments, sizeof *space->memory.segments);
        for (uint32_t i = 0; space->memory.segments && i < ix->max_segments; i++)
                space->memory.segments[i] = (struct segment){.file = SHARED_FILE_NONE, .number = i};
        space->blocks = new_lines(ix->capacity);
        space->look.marks = sys->calloc(ix->capacity, sizeof *space->look.marks);
        space->records = sys->calloc(ix->capacity, sizeof *space->records);
        space->runs.free = sys->calloc(ix->run_capacity, sizeof *space->runs.free);
        space->attachments = sys->calloc(seats, sizeof(struct attachment *));
        space->leases.at = sys->calloc(STORE_MAX_LEASES, sizeof *space->leases.at);
        if (!space->memory.segments || !space->blocks || !space->look.marks || !space->records ||
            !space->runs.free || !space->attachments || !space->leases.at ||
            users_open(space, seats) < 0)
                return -ENOMEM;
        space->runs.n_free = ix->run_capacity;
        for (uint32_t i = 0; i < STORE_MAX_LEASES; i++)
                space->leases.at[i].holder = NONE;
        space->count[KVD_ABSENT] = ix->capacity;
        return 0;
}

static int make_room(struct domain *domain) {
        int r = roll_make_room(&domain->store->spaces.all);

        return r < 0 ? r : roll_make_room(&domain->spaces);
}

static void enter(struct space *space) {
        struct space_lists *lists = &space_store(space)->spaces;
        struct space **named = chain_of(space_store(space), space->name);

        space->number = roll_enter(&lists->all, space);
        space->listed.place = roll_enter(&space->domain->spaces, space);
        space->listed.in = true;
        space->listed.same = *named;
        *named = space;
}

static void leave(struct space *space) {
        struct space_lists *lists = &space_store(space)->spaces;
        struct space **named = chain_of(space_store(space), space->name);

        roll_leave(&lists->all, space->number);
        roll_leave(&space->domain->spaces, space->listed.place);
        space->listed.in = false;
        kvd_list_remove(&space->listed.busy);
        while (*named != space)
                named = &(*named)->listed.same;
        *named = space->listed.same;
}

/* Refusals of the accounts have their reason already. */
static int refuse_tables(struct space *space, int error) {
        if (error == -EDQUOT || error == -ENOBUFS)
                return error;
        return store_refuse(
                space_store(space), error,
                "cannot make the tables of space '%s' for %u blocks (%s); give it max_blocks",
                space->name, space->ix->capacity, strerror(-error));
}

static int space_new(struct domain *domain, const struct space_spec *spec,
                     const struct kvd_index *before, struct space **ret) {
        _cleanup_(space_freep) struct space *space = sys->calloc(1, sizeof *space);
        struct arena *arena;
        int r;

        if (!space)
                return store_refuse(domain->store, -ENOMEM, "out of memory for space '%s'",
                                    spec->name);
        space->domain = domain;
        space->index = SHARED_FILE_NONE;
        memcpy(space->name, spec->name, sizeof space->name);
        r = index_new(space, spec, before);
        if (r == 0)
                r = charge(space);
        if (r < 0)
                return r;
        settings_init(space->ix);
        r = make_tables(space);
        if (r == 0 && !space->ix->arena)
                r = arena_new(space, NULL, &arena);
        if (r == 0)
                r = make_room(domain);
        if (r == 0)
                r = hooks_space_begins(space);
        if (r < 0)
                return refuse_tables(space, r);
        space->leaves.ages.last = ++domain->store->spaces.clock;
        enter(space);
        space_is_busy(space);
        if (!before)
                keep_index(space);
        *ret = STEAL(space);
        return 0;
}

int space_succeed(struct domain *domain, const struct kvd_index *before, struct space **ret) {
        struct space_spec spec = {.geometry = before->geometry,
                                  .options = {.kind = before->kind,
                                              .keys = before->keys,
                                              .policy = before->policy,
                                              .max_blocks = before->max_blocks}};
        int r;

        memcpy(spec.name, before->name, sizeof spec.name);
        if (space_by_name(domain, spec.name))
                return store_refuse(domain->store, -EEXIST, "there are two spaces '%s'", spec.name);
        r = normalise(domain->store, &spec);
        return r < 0 ? r : space_new(domain, &spec, before, ret);
}

int space_open(struct domain *domain, const struct space_spec *wanted, bool create,
               struct space **ret, bool *created) {
        struct space *space = space_by_name(domain, wanted->name);
        struct space_spec spec = *wanted;
        int r;

        *created = false;
        if (!create) {
                *ret = space;
                return space ? 0 :
                               store_refuse(domain->store, -ENOENT,
                                            "there is no space '%s' in domain '%s'", spec.name,
                                            domain->config.name);
        }
        r = normalise(domain->store, &spec);
        if (r < 0)
                return r;
        if (space) {
                *ret = space;
                /* the caller does not care, and it may have been changed since */
                if (!wanted->options.policy)
                        spec.options.policy = space->ix->policy;
                return compare(space, &spec);
        }
        r = space_new(domain, &spec, NULL, ret);
        *created = r == 0;
        return r;
}

/* ---- deleting -------------------------------------------------------------------------------- */

#define LET_GO_BYTES (UINT64_C(4) << 20) /* of the daemon's own memory in one call */

/*
 * Frees the pages of a piece of a table, from *from on. False: the table ends before that, and
 * *from is reduced by its size, for the next table.
 */
static bool let_go(void *at, uint64_t bytes, uint64_t *from) {
        uint64_t end = MIN(bytes, *from + LET_GO_BYTES);
        uintptr_t first = ALIGN_UP((uintptr_t)at + *from, sys_page_bytes()),
                  behind = ((uintptr_t)at + end) / sys_page_bytes() * sys_page_bytes();

        if (*from >= bytes) {
                *from -= ALIGN_UP(bytes, LET_GO_BYTES);
                return false;
        }
        if (behind > first)
                sys->madvise((void *)first, behind - first, MADV_DONTNEED);
        return true;
}

/* Frees a piece of the tables, since those of many small blocks are as large as a pool. */
static bool let_go_piece(struct space *space) {
        const struct kvd_index *ix = space->ix;
        uint64_t from = space->memory.let_go;
        bool more = let_go(space->blocks, ix->capacity * sizeof *space->blocks, &from) ||
                    let_go(space->runs.free, ix->run_capacity * sizeof *space->runs.free, &from) ||
                    let_go(space->index.at, space->index.bytes, &from);

        for (struct arena *arena = space->memory.arenas; !more && arena; arena = arena->next)
                more = let_go(arena->heap, ix->capacity * sizeof *arena->heap, &from);
        space->memory.let_go += more ? LET_GO_BYTES : 0;
        return more;
}

/*
 * Idle work: frees a piece of a deleted space, since freeing a large pool takes time. True: there
 * is more.
 */
bool store_bury(struct store *store) {
        struct space *space = store->deleted;

        if (!space)
                return false;
        for (; space->memory.n_buried < space->ix->max_segments; space->memory.n_buried++)
                if (segment_bury(space, &space->memory.segments[space->memory.n_buried]))
                        return true;
        if (attachment_fold(space) || hooks_space_buried(space))
                return true;
        /* streams that wait for their data must be woken first: semaphore.c */
        if (space_next_attachment(space, NULL))
                return false;
        if (let_go_piece(space))
                return true;
        store->deleted = space->next;
        store->spaces.buried++;
        space_free(space);
        return store->deleted != NULL;
}

static void end(struct space *space) {
        struct store *store = space_store(space);

        attachments_end(space);
        hooks_space_leaves(space);
        jobs_forget_space(space);
        leave(space);
        space_count_unused(space);
        space->next = store->deleted;
        store->deleted = space;
}

/* The space is gone at once; its memory goes back to the pool piece by piece. */
int space_delete(struct space *space, bool force) {
        struct store *store = space_store(space);
        uint32_t n = space_users(space);

        if (n && !force)
                return store_refuse(store, -EBUSY,
                                    "%u client%s using space '%s'; stop %s, or pass --force", n,
                                    n == 1 ? " is" : "s are", space->name, n == 1 ? "it" : "them");
        if (n && store->config.backend == KVD_BACKEND_LEGACY && !store->exporter_gone)
                return store_refuse(store, -EBUSY,
                                    "%u clients use space '%s' through legacy CUDA handles, so its "
                                    "memory cannot be taken from them; stop them first",
                                    n, space->name);
        drop_index(space, space->ix->life);
        end(space);
        atomic_store(&space->ix->alive, 0);
        return 0;
}

void store_hand_on(struct store *store) {
        for (struct space *space = NULL; (space = store_space_after(store, space));)
                if (space_outlives(space)) {
                        space->memory.left = true;
                        attachments_end(space);
                }
}

void space_leave(struct space *space) {
        if (space_outlives(space)) {
                space->memory.left = true;
                end(space);
        } else {
                space_delete(space, true);
        }
}

/* ---- segments' descriptors ------------------------------------------------------------------- */

int space_segment_fd(struct attachment *a, uint32_t number, uint32_t shard, bool *writable) {
        struct space *space = a->space;
        struct segment *segment;
        int fd;

        if (number >= atomic_load_explicit(&space->ix->n_segments, memory_order_relaxed))
                return store_refuse(space_store(space), -ENOENT, "space '%s' has no segment %u",
                                    space->name, number);
        segment = &space->memory.segments[number];
        *writable = !space->ix->arena || segment->arena == a->arena;
        fd = space_store(space)->memory->descriptor(space, segment, shard, *writable);
        if (fd >= 0)
                space_store(space)->memory->handed_out(a, number);
        return fd;
}

/* ---- the same for workers -------------------------------------------------------------------- */

int space_worker_segment_fd(struct space *space, uint32_t segment) {
        struct segment *s = &space->memory.segments[segment];
        int fd;

        if (segment >= atomic_load_explicit(&space->ix->n_segments, memory_order_relaxed))
                return store_refuse(space_store(space), -ENOENT, "space '%s' has no segment %u",
                                    space->name, segment);
        fd = space_store(space)->memory->descriptor(space, s, 0, true);
        s->worker = fd >= 0;
        return fd;
}

uint32_t space_memory_version(const struct space *space, uint32_t segment) {
        const struct segment *s = &space->memory.segments[segment];

        return s->file.fd >= 0 || s->n_ready ? s->memory_version : 0;
}
