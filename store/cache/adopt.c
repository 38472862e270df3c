/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Takes over the spaces of the previous daemon: each gets a new index over the same memory, and
 * keeps the clients that were connected. A space is dropped if its domain no longer exists, or if
 * the pin page of a client that may still read it is missing. A segment is dropped, with its
 * blocks, if it exceeds the domain's quota.
 *
 * The work before the first request grows with the number of names that the keeper handed over,
 * which is limited, and not with what is cached. Before the daemon serves, it makes each space with
 * its segments, its clients' pages, its settings and its charges. So other domains get at once what
 * they are entitled to, and memory in use is not given away. The blocks follow in pieces
 * (before.c), in
 *
 *      idle work          a piece of one space at a time, like all idle work
 *      requests for it    opening the space, or naming it in kvctl: each turn of the request does a
 *                         piece, and the reply is sent once it is complete (daemon/serve/requests.c)
 *
 * An incomplete space has only the clients of the previous daemon, and nothing but this work
 * changes it. Other idle work skips it, no other space takes its memory (an allocation that needs
 * some must be retried), and clients that leave are noticed afterwards. The keeper holds the old
 * index until the new one is complete. So if this daemon dies meanwhile, its successor finds
 * everything it found.
 */

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/device.h"
#include "ipc/base/settings.h"
#include "ipc/base/sys.h"
#include "store/account.h"
#include "store/cache/before.h"
#include "store/cache/inside.h"
#include "store/hooks.h"
#include "store/keep_inside.h"

/* ---- kept files ------------------------------------------------------------------------------ */

/* A kept file, and the parts of its name (keep.h). */
struct part {
        uint64_t cache;
        char kind;
        uint64_t number[3];
        struct kept_file *file;
};

struct parts {
        struct part *at; /* owned */
        size_t n;
};

static bool read_name(struct kept_file *file, struct part *ret) {
        int end = 0;

        *ret = (struct part){.file = file};
        file->name[KEEP_NAME_MAX - 1] = '\0';
        return sscanf(file->name, "%16" SCNx64 ".%c.%" SCNu64 ".%" SCNu64 ".%" SCNu64 "%n",
                      &ret->cache, &ret->kind, &ret->number[0], &ret->number[1], &ret->number[2],
                      &end) >= 3;
}

static int read_names(struct kept_file *files, size_t n, struct parts *ret) {
        *ret = (struct parts){.at = sys->calloc(n, sizeof *ret->at)};
        if (!ret->at)
                return -ENOMEM;
        for (size_t i = 0; i < n; i++)
                ret->n += read_name(&files[i], &ret->at[ret->n]);
        return 0;
}

/* A file with these first two numbers that was not taken yet; or NULL. */
static struct part *find(const struct parts *parts, uint64_t cache, char kind, uint64_t a,
                         uint64_t b) {
        for (struct part *p = parts->at; p < parts->at + parts->n; p++)
                if (p->cache == cache && p->kind == kind && p->number[0] == a &&
                    p->number[1] == b && p->file->fd >= 0)
                        return p;
        return NULL;
}

/* The memory of a segment, on each GPU of the pool. False: some is missing. */
static bool find_memory(const struct parts *parts, const struct space *space,
                        const struct segment *segment, struct part *ret[static KVD_SHARDS]) {
        uint64_t cache = space->ix->instance[0], found = 0;

        for (struct part *p = parts->at; p < parts->at + parts->n; p++)
                if (p->cache == cache && p->kind == 's' && p->number[0] == segment->number &&
                    p->number[1] == segment->memory_version && p->number[2] < space->ix->n_shards &&
                    p->file->fd >= 0) {
                        ret[p->number[2]] = p;
                        found |= UINT64_C(1) << p->number[2];
                }
        return found == (UINT64_C(1) << space->ix->n_shards) - 1;
}

_printf_(2, 3) static void say(struct store *store, const char *format, ...) {
        char line[512];
        va_list args;

        if (!store->config.keep->said)
                return;
        va_start(args, format);
        vsnprintf(line, sizeof line, format, args);
        va_end(args);
        store->config.keep->said(store->config.keep_arg, line);
}

static void forget(struct store *store, struct kept_file *file) {
        closep(&file->fd);
        file->fd = -1;
        store->config.keep->drop(store->config.keep_arg, file->name);
}

/* ---- one space ------------------------------------------------------------------------------- */

static bool has_client_of(const struct parts *parts, uint64_t cache, uint64_t life) {
        for (const struct part *p = parts->at; p < parts->at + parts->n; p++)
                if (p->cache == cache && p->kind == 'p' && p->number[0] == life && p->file->fd >= 0)
                        return true;
        return false;
}

/* Takes the semaphores of the last life, and of lives that still have clients. */
static void inherit_semaphores(struct space *space, const struct before *b,
                               const struct parts *parts) {
        uint64_t cache = space->ix->instance[0];

        for (struct part *p = parts->at; p < parts->at + parts->n; p++)
                if (p->cache == cache && p->kind == 'w' && p->file->fd >= 0 &&
                    (p->number[0] == b->header.life || has_client_of(parts, cache, p->number[0])))
                        semaphores_inherit(space, (uint32_t)p->number[0], &p->file->fd);
}

/* Takes the old clients' pin pages. False: one is missing. */
static bool inherit_pages(struct space *space, const struct before *b, const struct parts *parts) {
        uint64_t cache = space->ix->instance[0];
        uint32_t n = 0;

        for (struct part *p = parts->at; p < parts->at + parts->n; p++) {
                struct attachment_kept kept = {true, (uint32_t)p->number[0], (uint32_t)p->number[1],
                                               p->number[2]};
                struct part *process;

                if (p->cache != cache || p->kind != 'p' || p->file->fd < 0)
                        continue;
                process = find(parts, cache, 'o', p->number[0], p->number[1]);
                n += process &&
                     attachment_inherit(space, &kept, &p->file->fd, &process->file->fd) == 0;
        }
        atomic_store(&space->ix->n_pages, n);
        return n >= atomic_load(&b->header.n_pages) &&
               (space->ix->backend == KVD_BACKEND_HOST || worker_inherit(space) == 0);
}

static void adopt_segment(struct space *space, const struct before *b, const struct parts *parts,
                          struct segment *segment) {
        uint32_t version = before_memory(b, segment->number),
                 ready = before_ready(b, segment->number), n = space->ix->n_shards;
        struct part *part[KVD_SHARDS] = {0};
        int fds[KVD_SHARDS];

        segment->memory_version = version;
        if (!ready || !find_memory(parts, space, segment, part) || !segments_to_come(space))
                return;
        for (uint32_t i = 0; i < n && part[i]; i++)
                fds[i] = part[i]->file->fd;
        if (segment_adopt(space, segment, ready, version, fds) < 0)
                return;
        for (uint32_t i = 0; i < n && part[i]; i++)
                part[i]->file->fd = -1;
        keep_adopted(space, segment);
}

/* With isolation = arena the arena of the old segments has no writer, so no client writes there. */
static void adopt_memory(struct space *space, const struct before *b, const struct parts *parts) {
        struct arena *arena = space->memory.arenas;

        atomic_store(&space->ix->n_segments, b->n_segments);
        for (uint32_t i = 0; i < b->n_segments; i++) {
                space->memory.segments[i].arena = arena;
                adopt_segment(space, b, parts, &space->memory.segments[i]);
        }
}

static void adopt_settings(struct space *space, const struct before *b) {
        char text[64];
        double value;

        for (uint32_t i = 0; i < KVD_N_SETTINGS; i++) {
                enum kvd_setting which = (enum kvd_setting)i;

                value = kvd_setting_get(b->header.settings, which);
                kvd_setting_format(which, value, text, sizeof text);
                if (!kvd_setting_is_fixed(which) && kvd_setting_parse(which, text, &value) == 0)
                        kvd_setting_put(space->ix->settings, which, value);
        }
        hooks_setting_changed(space);
}

static bool are_same_gpus(const struct store_config *config, const struct kvd_index *before) {
        bool same = before->n_shards == config->n_gpus;

        for (uint32_t i = 0; same && i < config->n_gpus; i++)
                same = memcmp(before->devices[i], config->gpus[i].uuid,
                              sizeof before->devices[i]) == 0;
        return same;
}

/*
 * On GPUs, the segment size and the GPUs themselves must be the same as before; on the host, pages
 * must fit into the segments.
 */
static bool is_same_memory(const struct store *store, const struct kvd_index *before) {
        const struct store_config *config = &store->config;

        return before->backend == config->backend &&
               before->segment_bytes % store->pages.bytes == 0 &&
               (before->backend == KVD_BACKEND_HOST ||
                (before->segment_bytes == config->segment_bytes && are_same_gpus(config, before)));
}

static int make_space(struct store *store, const struct before *b, struct space **ret) {
        struct domain *domain = store_domain_by_name(store, b->header.domain);
        const struct store_config *config = &store->config;
        struct arena *arena;
        int r;

        if (!domain && config->keep->domain)
                domain = config->keep->domain(config->keep_arg, b->header.domain);
        if (!domain)
                return store_refuse(store, -ENOENT, "domain '%s' no longer exists",
                                    b->header.domain);
        if (domain->config.arena != b->header.arena)
                return store_refuse(store, -EPROTO, "the isolation of domain '%s' has changed",
                                    b->header.domain);
        if (!is_same_memory(store, &b->header))
                return store_refuse(store, -EPROTO, "its memory is %s",
                                    b->header.backend ?
                                            "on other GPUs, or in segments of another size" :
                                            "on the host, or in smaller pages");
        r = space_succeed(domain, &b->header, ret);
        if (r == 0 && b->header.arena)
                r = arena_new(*ret, NULL, &arena);
        return r;
}

/* Takes ownership of b, until all of its blocks are taken over. */
static void adopt_space(struct store *store, struct before *b, const struct parts *parts) {
        struct space *space = NULL;
        int r = make_space(store, b, &space);

        if (r == 0)
                inherit_semaphores(space, b, parts);
        if (r == 0 && !inherit_pages(space, b, parts))
                r = store_refuse(store, -EPROTO, "a client that is not known may still read it");
        if (r < 0) {
                say(store, "space '%s' of domain '%s' begins empty: %s", b->header.name,
                    b->header.domain, store_why(store));
                forget(store, &b->file);
                before_close(b);
                if (space)
                        space_delete(space, true);
                return;
        }
        adopt_memory(space, b, parts);
        adopt_settings(space, b);
        before_begin(b, space);
        space->memory.before = b;
}

/* The clock continues, because old clients wrote their times of last use by it. */
static void complete(struct space *space, struct before *b) {
        struct shared_file last = {.fd = b->file.fd, .fd_ro = -1, .bytes = b->header.size};
        uint64_t clock = MAX(atomic_load(&b->header.clock), 1);

        space->memory.before = NULL;
        space->clock = clock;
        atomic_store(&space->ix->clock, (uint32_t)clock);
        semaphores_settle(space);
        keep_index(space);
        store_close_file(space_store(space), &last);
        b->file.fd = -1;
        forget(space_store(space), &b->file);
        before_close(b);
        say(space_store(space), "space '%s' continues with %" PRIu64 " sealed blocks", space->name,
            space->count[KVD_SEALED]);
        space_count_unused(space);
        pages_want_index(space, kvd_segments_ids(space->ix, space->ix->n_segments));
        space_is_busy(space);
}

void adopt_leave(struct space *space) {
        struct before *b = space->memory.before;

        if (!b)
                return;
        closep(&b->file.fd);
        before_close(b);
}

bool space_take_over(struct space *space) {
        struct before *b = space->memory.before;

        if (b && !before_piece(b, space))
                complete(space, b);
        return !space->memory.before;
}

/* ---- all of them ----------------------------------------------------------------------------- */

/* A daemon that ended during a takeover may have kept new semaphores without their index. */
static void forget_ahead(struct store *store, const struct part *index, const struct parts *parts) {
        for (struct part *p = parts->at; p < parts->at + parts->n; p++)
                if (p->cache == index->cache && p->kind == 'w' && p->file->fd >= 0 &&
                    p->number[0] > index->number[0])
                        forget(store, p->file);
}

/* NULL: the index cannot be used. */
static struct before *open_before(struct part *index) {
        struct before *b = sys->calloc(1, sizeof *b);
        int r = b ? before_open(index->file->fd, b) : -ENOMEM;

        if (r == 0 && b->header.instance[0] == index->cache && b->header.life == index->number[0] &&
            atomic_load(&b->header.alive)) {
                b->file = *index->file;
                index->file->fd = -1;
                return b;
        }
        if (b)
                before_close(b);
        return NULL;
}

static void adopt_index(struct store *store, struct part *index, const struct parts *parts) {
        struct before *b = open_before(index);

        forget_ahead(store, index, parts);
        if (b)
                adopt_space(store, b, parts);
        else
                say(store, "an index of the previous daemon cannot be used: %s", index->file->name);
}

/* Is it the newest index of its cache? There are two if a daemon ended during a takeover. */
static bool is_last(const struct part *index, const struct parts *parts) {
        for (const struct part *p = parts->at; p < parts->at + parts->n; p++)
                if (p->cache == index->cache && p->kind == 'i' && p->file->fd >= 0 &&
                    p->number[0] > index->number[0])
                        return false;
        return true;
}

static void close_rest(struct store *store, struct kept_file *files, size_t n) {
        for (size_t i = 0; i < n; i++)
                if (files[i].fd >= 0)
                        forget(store, &files[i]);
}

static bool has_index(const struct parts *parts) {
        for (const struct part *p = parts->at; p < parts->at + parts->n; p++)
                if (p->kind == 'i')
                        return true;
        return false;
}

static uint64_t reserved_in(const struct parts *parts) {
        uint64_t bytes = 0;

        for (const struct part *p = parts->at; p < parts->at + parts->n; p++)
                bytes += p->kind == 's' ? pages_reserved_in(p->file->fd) : 0;
        return bytes;
}

static void adopt_all(struct store *store, const struct parts *parts) {
        for (struct part *p = parts->at; p < parts->at + parts->n; p++)
                if (p->kind == 'i' && store->config.backend != KVD_BACKEND_LEGACY &&
                    is_last(p, parts))
                        adopt_index(store, p, parts);
}

void store_adopt(struct store *store, struct kept_file *files, size_t n) {
        struct parts parts;

        if (read_names(files, n, &parts) == 0) {
                if (has_index(&parts))
                        pages_choose_again(store, reserved_in(&parts));
                adopt_all(store, &parts);
        }
        free(parts.at);
        close_rest(store, files, n);
}
