/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Which descriptors outlive the daemon, and their names. A name identifies the version of an index,
 * segment or page, so that the next daemon cannot confuse a replaced one with its replacement.
 *
 * The keeper limits the total bytes of names, which is a cost with shares like any other. If the
 * index of a space or the page of a client were not kept, the next daemon would drop the whole
 * space. So if the limit is reached, the space or the client is refused. If a segment is not kept,
 * only its blocks are lost. So segments are used in any case, and leave the last quarter of their
 * domain's share to clients.
 */

#include "store/keep.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/device.h"
#include "store/account.h"
#include "store/cache/cache.h"
#include "store/keep_inside.h"

struct name {
        char text[KEEP_NAME_MAX];
};

/* SPACE, then the rest */
_printf_(2, 3) static struct name name_of(const struct space *s, const char *rest, ...) {
        struct name name;
        int n = snprintf(name.text, sizeof name.text, "%016" PRIx64, space_index(s)->instance[0]);
        va_list values;

        va_start(values, rest);
        vsnprintf(name.text + n, sizeof name.text - (size_t)n, rest, values);
        va_end(values);
        return name;
}

static struct name index_name(const struct space *s, uint32_t life) {
        return name_of(s, ".i.%u", life);
}

static struct name segment_name(const struct space *s, const struct segment *segment,
                                uint32_t shard) {
        if (!shard)
                return name_of(s, ".s.%u.%u", segment->number, segment->memory_version);
        return name_of(s, ".s.%u.%u.%u", segment->number, segment->memory_version, shard);
}

static struct name page_name(const struct attachment *a) {
        return name_of(a->space, ".p.%u.%u.%" PRIu64, a->kept.life, a->kept.seat, a->kept.process);
}

static struct name semaphores_name(const struct space *s, uint32_t life) {
        return name_of(s, ".w.%u", life);
}

static struct name process_name(const struct attachment *a) {
        return name_of(a->space, ".o.%u.%u", a->kept.life, a->kept.seat);
}

/* ---- what is kept ---------------------------------------------------------------------------- */

bool space_outlives(const struct space *s) {
        return space_store(s)->config.keep && s->ix->backend != KVD_BACKEND_LEGACY;
}

static bool keeps(const struct space *s) {
        return space_outlives(s) && !s->memory.left;
}

static void keep(const struct space *s, struct name name, int fd) {
        const struct store_config *config = &space_store(s)->config;

        if (keeps(s))
                config->keep->keep(config->keep_arg, name.text, fd);
}

static void drop(const struct space *s, struct name name) {
        const struct store_config *config = &space_store(s)->config;

        if (keeps(s))
                config->keep->drop(config->keep_arg, name.text);
}

/* ---- what it costs --------------------------------------------------------------------------- */

static uint64_t bytes_of(const struct space *s, struct name name) {
        return MAX(strlen(name.text) + 1, space_store(s)->config.keep_least);
}

uint64_t space_kept_bytes(const struct space *s) {
        uint64_t n = keeps(s) ? bytes_of(s, index_name(s, s->ix->life)) : 0;

        return n && s->ix->semaphore_rows ? n + bytes_of(s, semaphores_name(s, s->ix->life)) : n;
}

/*
 * On a GPU including the semaphore page of the attachment's life, which may be a previous daemon's.
 */
uint64_t attachment_kept_bytes(const struct attachment *a) {
        const struct space *s = a->space;
        uint64_t n = a->kept.is ? bytes_of(s, page_name(a)) + bytes_of(s, process_name(a)) : 0;

        return n && s->ix->semaphore_rows ? n + bytes_of(s, semaphores_name(s, a->kept.life)) : n;
}

static uint32_t segment_bytes(const struct space *space, const struct segment *segment) {
        uint64_t bytes = 0;

        for (uint32_t i = 0; i < space_index(space)->n_shards; i++)
                bytes += bytes_of(space, segment_name(space, segment, i));
        return (uint32_t)bytes;
}

static void charge_segment(struct space *space, struct segment *segment) {
        segment->kept = segment_bytes(space, segment);
        account_add(space, KVD_COST_kept, segment->kept);
}

/* ---- each kind ------------------------------------------------------------------------------- */

void keep_index(const struct space *space) {
        keep(space, index_name(space, space_index(space)->life), space_index_fd(space));
}

void drop_index(const struct space *space, uint32_t life) {
        drop(space, index_name(space, life));
}

void keep_semaphores(const struct space *space, int fd) {
        keep(space, semaphores_name(space, space_index(space)->life), fd);
}

void drop_semaphores(const struct space *space, uint32_t life) {
        drop(space, semaphores_name(space, life));
}

static bool has_room(const struct space *space, const struct segment *segment) {
        const struct domain *d = space_domain(space);
        uint64_t room = account_room(d, KVD_COST_kept), all = d->used[KVD_COST_kept] + room;

        return room >= segment_bytes(space, segment) + all / 4;
}

void keep_segment(struct space *space, struct segment *segment, const int *fds) {
        if (!keeps(space) || !has_room(space, segment))
                return;
        charge_segment(space, segment);
        for (uint32_t i = 0; i < space_index(space)->n_shards; i++)
                keep(space, segment_name(space, segment, i), fds[i]);
}

void keep_adopted(struct space *space, struct segment *segment) {
        if (keeps(space))
                charge_segment(space, segment);
}

void drop_segment(struct space *space, struct segment *segment) {
        if (!segment->kept || space_is_left(space))
                return;
        for (uint32_t i = 0; i < space_index(space)->n_shards; i++)
                drop(space, segment_name(space, segment, i));
        account_discharge(space, KVD_COST_kept, segment->kept);
        segment->kept = 0;
}

/*
 * The index counts the pages that are kept. A page is counted before its client gets it, and
 * dropped only after the client has unmapped it. So if the next daemon finds fewer pages, it knows
 * that an unknown client may be reading.
 */
int attachment_keep(struct attachment *a, int pidfd) {
        int r;

        if (!keeps(a->space))
                return 0;
        a->kept = (struct attachment_kept){true, space_index(a->space)->life, a->seat,
                                           a->tenant->process};
        r = account_charge(a->space, KVD_COST_kept, attachment_kept_bytes(a));
        if (r < 0) {
                a->kept.is = false;
                return r;
        }
        keep(a->space, process_name(a), pidfd);
        keep(a->space, page_name(a), a->pin_file.fd);
        atomic_fetch_add(&a->space->ix->n_pages, 1);
        return 0;
}

void drop_attachment(struct attachment *a) {
        if (!a->kept.is || space_is_left(a->space))
                return;
        account_discharge(a->space, KVD_COST_kept, attachment_kept_bytes(a));
        a->kept.is = false;
        atomic_fetch_sub(&a->space->ix->n_pages, 1);
        drop(a->space, page_name(a));
        drop(a->space, process_name(a));
}
