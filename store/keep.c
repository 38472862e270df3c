/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Which descriptors outlive the daemon, and under what names. A name says which index, memory or
 * page it is, not only whose: so a successor cannot take what was replaced for what replaced it.
 */

#include "store/keep.h"

#include <inttypes.h>
#include <stdio.h>

#include "ipc/base/device.h"
#include "store/cache/cache.h"
#include "store/kept.h"

struct name {
        char text[KEEP_NAME_MAX];
};

static struct name index_name(const struct space *s, uint32_t life) {
        struct name name;

        snprintf(name.text, sizeof name.text, "%016" PRIx64 ".i.%u", s->ix->instance[0], life);
        return name;
}

static struct name segment_name(const struct space *s, const struct segment *segment) {
        struct name name;

        snprintf(name.text, sizeof name.text, "%016" PRIx64 ".s.%u.%u", s->ix->instance[0],
                 segment->number, segment->memory_version);
        return name;
}

static struct name page_name(const struct attachment *a) {
        struct name name;

        snprintf(name.text, sizeof name.text, "%016" PRIx64 ".p.%u.%u.%" PRIu64,
                 a->space->ix->instance[0], a->kept.life, a->kept.seat, a->kept.process);
        return name;
}

static struct name semaphores_name(const struct space *s, uint32_t life) {
        struct name name;

        snprintf(name.text, sizeof name.text, "%016" PRIx64 ".w.%u", s->ix->instance[0], life);
        return name;
}

static struct name process_name(const struct attachment *a) {
        struct name name;

        snprintf(name.text, sizeof name.text, "%016" PRIx64 ".o.%u.%u",
                 a->space->ix->instance[0], a->kept.life, a->kept.seat);
        return name;
}

/* ---- what is kept ---------------------------------------------------------------------------- */

bool space_outlives(const struct space *s) {
        return space_store(s)->config.keep && s->ix->backend != KVD_BACKEND_LEGACY;
}

/* Huge pages that are kept are those that the next daemon wants, and could not have. */
static bool keeps(const struct space *s) {
        return space_outlives(s) && !s->memory.left && !space_store(s)->huge;
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

void keep_index(const struct space *space) {
        keep(space, index_name(space, space->ix->life), space->index.fd_ro);
}

void drop_index(const struct space *space, uint32_t life) {
        drop(space, index_name(space, life));
}

void keep_semaphores(const struct space *space, int fd) {
        keep(space, semaphores_name(space, space->ix->life), fd);
}

void drop_semaphores(const struct space *space, uint32_t life) {
        drop(space, semaphores_name(space, life));
}

void keep_segment(const struct space *space, const struct segment *segment, int fd) {
        keep(space, segment_name(space, segment), fd);
}

void drop_segment(const struct space *space, const struct segment *segment) {
        drop(space, segment_name(space, segment));
}

/*
 * The index counts pages that are kept. A client has its page only later, and forgets it before: so
 * a successor that finds fewer of them knows that somebody may read who cannot be asked.
 */
void attachment_keep(struct attachment *a, int pidfd) {
        if (!keeps(a->space))
                return;
        a->kept = (struct attachment_kept){true, a->space->ix->life, a->seat, a->tenant->process};
        keep(a->space, process_name(a), pidfd);
        keep(a->space, page_name(a), a->pin_file.fd);
        atomic_fetch_add(&a->space->ix->n_pages, 1);
}

void drop_attachment(struct attachment *a) {
        if (!a->kept.is || a->space->memory.left)
                return;
        a->kept.is = false;
        atomic_fetch_sub(&a->space->ix->n_pages, 1);
        drop(a->space, page_name(a));
        drop(a->space, process_name(a));
}
