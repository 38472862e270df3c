/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Spaces are made, compared and deleted here, and their memory is buried afterwards. What a space
 * contains is in the other files; the parts of the store are told by hooks (hooks.h).
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/device.h"
#include "ipc/base/enums.h"
#include "ipc/base/sys.h"
#include "ipc/base/text.h"
#include "store/cache/inside.h"
#include "store/cache/memory.h"
#include "store/hooks.h"
#include "store/job.h"

/* ---- finding and comparing ------------------------------------------------------------------- */

struct space *space_by_name(struct domain *domain, const char *name) {
        for (struct space *s = domain->spaces; s; s = s->next)
                if (strcmp(s->name, name) == 0)
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
                                    "space '%s': policy %s goes by what the methods think of a "
                                    "block, and they cannot look into opaque ones",
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

static void space_free(struct space *space) {
        while (space->memory.arenas) {
                struct arena *arena = space->memory.arenas;

                space->memory.arenas = arena->next;
                free(arena->heap);
                free(arena);
        }
        hooks_space_ends(space);
        index_free(space);
        free(space->memory.segments);
        free(space->blocks);
        free(space->runs.free);
        free(space->attachments);
        free(space->leases.at);
        free(space);
}

static void space_freep(struct space **space) {
        if (*space)
                space_free(*space);
}

static int make_tables(struct space *space) {
        const struct kvd_index *ix = space->ix;

        space->memory.segments = sys->calloc(ix->max_segments, sizeof *space->memory.segments);
        for (uint32_t i = 0; space->memory.segments && i < ix->max_segments; i++)
                space->memory.segments[i] = (struct segment){.file = SHARED_FILE_NONE, .number = i};
        space->blocks = sys->calloc(ix->capacity, sizeof *space->blocks);
        space->runs.free = sys->calloc(ix->run_capacity, sizeof *space->runs.free);
        space->attachments = sys->calloc(space_store(space)->config.max_attachments,
                                         sizeof(struct attachment *));
        space->leases.at = sys->calloc(STORE_MAX_LEASES, sizeof *space->leases.at);
        if (!space->memory.segments || !space->blocks || !space->runs.free || !space->attachments ||
            !space->leases.at)
                return -ENOMEM;
        space->runs.n_free = ix->run_capacity;
        for (uint32_t i = 0; i < STORE_MAX_LEASES; i++)
                space->leases.at[i].holder = NONE;
        space->count[KVD_ABSENT] = ix->capacity;
        return 0;
}

static int space_new(struct domain *domain, const struct space_spec *spec, struct space **ret) {
        _cleanup_(space_freep) struct space *space = sys->calloc(1, sizeof *space);
        struct arena *arena;
        int r;

        if (!space)
                return store_refuse(domain->store, -ENOMEM, "out of memory for space '%s'",
                                    spec->name);
        space->domain = domain;
        space->index = SHARED_FILE_NONE;
        memcpy(space->name, spec->name, sizeof space->name);
        r = index_new(space, spec);
        if (r < 0)
                return r;
        settings_init(space->ix);
        r = make_tables(space);
        if (r == 0 && !space->ix->arena)
                r = arena_new(space, NULL, &arena);
        if (r == 0)
                r = hooks_space_begins(space);
        if (r < 0)
                return store_refuse(domain->store, r,
                                    "out of memory for space '%s' of %u blocks; give it max_blocks",
                                    spec->name, space->ix->capacity);
        space->number = domain->store->next_number++;
        space->next = domain->spaces;
        *ret = domain->spaces = STEAL(space);
        return 0;
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
                /* no opinion: it may have been changed since the space was made */
                if (!wanted->options.policy)
                        spec.options.policy = space->ix->policy;
                return compare(space, &spec);
        }
        *created = true;
        return space_new(domain, &spec, ret);
}

/* ---- deleting -------------------------------------------------------------------------------- */

static uint32_t live_attachments(const struct space *space) {
        uint32_t n = 0;

        for (uint32_t i = 0; i < space->n_attachments; i++)
                n += space->attachments[i] && space->attachments[i]->state != FOLDING;
        return n;
}

static void end_attachments(struct space *space) {
        for (uint32_t i = 0; i < space->n_attachments; i++) {
                struct attachment *a = space->attachments[i];

                if (!a || a->state == FOLDING)
                        continue;
                if (a->gone)
                        a->gone(a);
                attachment_free(a, false);
        }
        while (attachment_fold(space))
                ;
}

static bool has_attachments(const struct space *space) {
        for (uint32_t i = 0; i < space->n_attachments; i++)
                if (space->attachments[i])
                        return true;
        return false;
}

/*
 * Idle work: frees a piece of a deleted space, since a large pool is not freed in an instant. True:
 * there is more.
 */
bool store_bury(struct store *store) {
        struct space *space = store->deleted;

        if (!space)
                return false;
        for (; space->memory.n_buried < space->ix->max_segments; space->memory.n_buried++)
                if (segment_bury(space, &space->memory.segments[space->memory.n_buried]))
                        return true;
        if (hooks_space_buried(space) || attachment_fold(space))
                return true;
        /* streams that wait for them are to be woken first: semaphore.c */
        if (has_attachments(space))
                return false;
        store->deleted = space->next;
        space_free(space);
        return store->deleted != NULL;
}

/* The space is gone at once; its memory goes back to the pool piece by piece. */
int space_delete(struct space *space, bool force) {
        struct store *store = space_store(space);
        struct space **at = &space->domain->spaces;
        uint32_t n = live_attachments(space);

        if (n && !force)
                return store_refuse(store, -EBUSY,
                                    "%u client%s using space '%s'; stop %s, or pass --force", n,
                                    n == 1 ? " is" : "s are", space->name, n == 1 ? "it" : "them");
        if (n && store->config.backend == KVD_BACKEND_LEGACY && !store->exporter_gone)
                return store_refuse(store, -EBUSY,
                                    "%u clients use space '%s', and have its memory by legacy CUDA "
                                    "handles, which cannot be taken from under them; end them",
                                    n, space->name);
        end_attachments(space);
        hooks_space_leaves(space);
        jobs_forget_space(space);
        while (*at != space)
                at = &(*at)->next;
        *at = space->next;
        atomic_store(&space->ix->alive, 0);
        space->next = store->deleted;
        store->deleted = space;
        return 0;
}

/* ---- questions ------------------------------------------------------------------------------- */

const char *space_name(const struct space *space) {
        return space->name;
}

struct domain *space_domain(const struct space *space) {
        return space->domain;
}

uint32_t space_number(const struct space *space) {
        return space->number;
}

const struct kvd_index *space_index(const struct space *space) {
        return space->ix;
}

int space_index_fd(const struct space *space) {
        return space->index.fd_ro;
}

int space_segment_fd(struct attachment *a, uint32_t number, bool *writable) {
        struct space *space = a->space;
        struct segment *segment;
        int fd;

        if (number >= atomic_load_explicit(&space->ix->n_segments, memory_order_relaxed))
                return store_refuse(space_store(space), -ENOENT, "space '%s' has no segment %u",
                                    space->name, number);
        segment = &space->memory.segments[number];
        *writable = !space->ix->arena || segment->arena == a->arena;
        fd = space_store(space)->memory->descriptor(space, segment, *writable);
        if (fd >= 0)
                space_store(space)->memory->handed_out(a, number);
        return fd;
}

/* ---- the same for workers -------------------------------------------------------------------- */

int space_index_fd_for_worker(struct space *space) {
        return space->index.fd_ro;
}

int space_worker_segment_fd(struct space *space, uint32_t segment) {
        struct segment *s = &space->memory.segments[segment];
        int fd;

        if (segment >= atomic_load_explicit(&space->ix->n_segments, memory_order_relaxed))
                return store_refuse(space_store(space), -ENOENT, "space '%s' has no segment %u",
                                    space->name, segment);
        fd = space_store(space)->memory->descriptor(space, s, true);
        s->worker = fd >= 0;
        return fd;
}

uint32_t space_memory_version(const struct space *space, uint32_t segment) {
        const struct segment *s = &space->memory.segments[segment];

        return s->file.fd >= 0 || s->n_ready ? s->memory_version : 0;
}
