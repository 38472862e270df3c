/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Summaries (ipc/base/summary.h): which blocks want one, and their memory. A bit for each block; a job takes the next
 * ones that are sealed still. Nothing is queued unless a method is on that reads summaries.
 */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>

#include "ipc/base/summary.h"
#include "ipc/base/sys.h"
#include "store/hooks.h"
#include "store/methods/methods.h"

static bool wanted_by_any(const struct space *space) {
        const shm_u64 *s = space->ix->settings;

        return kvd_setting_on(s, KVD_hshare_on) || kvd_setting_on(s, KVD_keydiff_on) ||
               kvd_setting_on(s, KVD_memshare_on) || kvd_setting_on(s, KVD_kvreviver_on);
}

static void mark(struct space *space, uint32_t id) {
        uint64_t bit = UINT64_C(1) << id % 64;

        space->n_unsummarised += !(space->unsummarised[id / 64] & bit);
        space->unsummarised[id / 64] |= bit;
}

static void readable(struct space *space, uint32_t id) {
        mark(space, id);
        job_ask(&space->summarise);
}

/* Blocks that were sealed while all methods were off want one, too. */
static void setting_changed(struct space *space) {
        uint32_t n = space_ids(space);
        bool before = space->watched;

        space->watched = wanted_by_any(space);
        if (before || !space->watched)
                return;
        for (uint32_t id = 0; id < n; id++)
                if (space->blocks[id].state == KVD_SEALED)
                        mark(space, id);
        if (space->n_unsummarised)
                job_ask(&space->summarise);
}

/* ---- the job ---------------------------------------------------------------------------------------------------- */

/* The next marked block, at or after the hand; its mark goes. NONE: there is none. */
static uint32_t next_marked(struct space *space) {
        uint32_t words = DIV_UP(space->ix->capacity, 64), at = space->summary_hand;

        if (!space->n_unsummarised)
                return NONE;
        while (!space->unsummarised[at])
                at = (at + 1) % words;
        space->summary_hand = at;
        at = at * 64 + (uint32_t)__builtin_ctzll(space->unsummarised[at]);
        space->unsummarised[at / 64] &= ~(UINT64_C(1) << at % 64);
        space->n_unsummarised--;
        return at;
}

static bool write_summarise(struct ticket *t, struct job *job) {
        struct space *space = t->space;
        uint32_t room = job_blocks(job), id;

        while (job->n_items < room && (id = next_marked(space)) != NONE) {
                struct kvd_job_item *item;

                if (space->blocks[id].state != KVD_SEALED || block_is_garbage(&space->blocks[id]) ||
                    space->blocks[id].pending || space->blocks[id].poisoned) /* pending: marked again later */
                        continue;
                item = job_add(job, block_ref(space, id), id);
                if (!item) {
                        mark(space, id);
                        break;
                }
                item->n_tokens = kvd_index_desc(space->ix, id)->n_tokens;
                item->position = (int32_t)block_position(space, id);
        }
        if (space->n_unsummarised)
                job_ask(t);
        job_results(job, 0);
        return job->n_items > 0;
}

static void settle_summarise(struct job *job, enum job_end end, const void *results, uint32_t n) {
        if (end == JOB_DONE)
                space_count(job->space, KVD_SPACE_SUMMARISED, job->n_items);
        for (uint32_t i = 0; i < job->n_items; i++)
                if (end == JOB_DONE)
                        job->space->blocks[job->items[i].slot].summarised = true;
                else if (end == JOB_AGAIN)
                        mark(job->space, job->items[i].slot);
}

static const struct job_kind job_summarise = {
        .number = KVD_JOB_SUMMARISE, .write = write_summarise, .settle = settle_summarise};

/* ---- memory ----------------------------------------------------------------------------------------------------- */

static int make_memory(struct space *space) {
        uint64_t bytes = kvd_summary_of(space->ix).size;
        _cleanup_(closep) int fd = sys->memfd_create("kvd-summaries", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        char path[64];

        if (fd < 0 || sys->fchmod(fd, 0600) < 0 || sys->ftruncate(fd, (off_t)bytes) < 0 ||
            sys->add_seals(fd, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
                return -errno;
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        space->summary_fd_ro = sys->open(path, O_RDONLY | O_CLOEXEC);
        if (space->summary_fd_ro < 0)
                return -errno;
        space->summary_fd = STEAL_FD(fd);
        return 0;
}

int space_summary_fd(struct space *space, bool writable) {
        int r = space_refuse_opaque(space, "summaries");

        if (r < 0)
                return r;
        r = space->summary_fd < 0 ? make_memory(space) : 0;
        if (r < 0)
                return store_refuse(space_store(space), r, "no memory for the summaries of space '%s'", space->name);
        return writable ? space->summary_fd : space->summary_fd_ro;
}

/* ---- life -------------------------------------------------------------------------------------- */

static int begin(struct space *space) {
        space->summary_fd = space->summary_fd_ro = -1;
        ticket_init(&space->summarise, &job_summarise, space, NULL);
        space->unsummarised = sys->calloc(DIV_UP(space->ix->capacity, 64), sizeof *space->unsummarised);
        if (!space->unsummarised)
                return -ENOMEM;
        setting_changed(space);
        return 0;
}

static void leave(struct space *space) {
        job_withdraw(&space->summarise);
}

static void end(struct space *space) {
        closep(&space->summary_fd);
        closep(&space->summary_fd_ro);
        free(space->unsummarised);
}

/* A summary of a block of this sequence is still to be made. Blocks of the end are the latest, so they come first. */
static bool pending(const struct sequence *q) {
        const struct space *space = q->space;

        if (!job_pending(&space->summarise))
                return false;
        for (uint32_t i = q->n_entries; i-- > 0;)
                if (q->entries[i].ref && !space->blocks[kvd_ref_id(q->entries[i].ref)].summarised)
                        return true;
        return false;
}

const struct hooks summaries_hooks = {
        .name = "summaries", .space_begins = begin, .setting_changed = setting_changed, .space_leaves = leave,
        .space_ends = end, .readable = readable, .sequence_pending = pending};
