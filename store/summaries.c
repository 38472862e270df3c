/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tracks which blocks need a summary (ipc/base/summary.h), with a bit for each block, and allocates
 * the memory of summaries. A job takes the next marked blocks that are still sealed. Nothing is
 * queued unless a method that reads summaries is on.
 */

#include <errno.h>
#include <sys/stat.h>

#include "ipc/base/shared_file.h"
#include "ipc/base/summary.h"
#include "ipc/base/sys.h"
#include "store/account.h"
#include "store/hooks.h"
#include "store/sequence/sequence.h"
#include "store/summaries.h"

/* The blocks of a space that need a summary, and the file of its summaries. */
struct summaries {
        struct ticket ticket;
        uint64_t *marks; /* owned; a bit for each block */
        uint64_t n_marked;
        uint32_t hand;           /* next word of marks to look at */
        uint32_t n_old;          /* lower ids may be sealed blocks without a mark */
        struct shared_file file; /* owned; created at first use */
};

static struct summaries *summaries_of(const struct space *space) {
        return space->parts.summaries;
}

static void mark(struct space *space, uint32_t id) {
        uint64_t bit = UINT64_C(1) << id % 64;

        summaries_of(space)->n_marked += !(summaries_of(space)->marks[id / 64] & bit);
        summaries_of(space)->marks[id / 64] |= bit;
}

void summary_want(struct space *space, uint32_t id) {
        if (!space->parts.watched)
                return;
        mark(space, id);
        job_ask(&summaries_of(space)->ticket);
}

/* Blocks that were sealed while all methods were off need a summary, too. */
static void setting_changed(struct space *space) {
        bool before = space->parts.watched,
             now = kvd_settings_read_summaries(space_index(space)->settings);

        space->parts.watched = now;
        if (before || !now)
                return;
        summaries_of(space)->n_old = space_ids(space);
        space_is_busy(space);
}

#define OLD_LOOKS 16384u /* blocks looked at in one call */

static bool mark_old(struct space *space) {
        struct summaries *all = summaries_of(space);

        if (!all->n_old)
                return false;
        for (uint32_t i = 0; all->n_old && i < OLD_LOOKS; i++)
                if (block_of(space, --all->n_old)->state == KVD_SEALED)
                        mark(space, all->n_old);
        if (all->n_marked)
                job_ask(&all->ticket);
        return true;
}

/* ---- the job --------------------------------------------------------------------------------- */

/* Returns the next marked block at or after the hand, and clears its mark. NONE if none. */
static uint32_t next_marked(struct space *space) {
        uint32_t words = DIV_UP(space_index(space)->capacity, 64), at = summaries_of(space)->hand;

        if (!summaries_of(space)->n_marked)
                return NONE;
        while (!summaries_of(space)->marks[at])
                at = (at + 1) % words;
        summaries_of(space)->hand = at;
        at = at * 64 + (uint32_t)__builtin_ctzll(summaries_of(space)->marks[at]);
        summaries_of(space)->marks[at / 64] &= ~(UINT64_C(1) << at % 64);
        summaries_of(space)->n_marked--;
        return at;
}

#define MARK_LOOKS 8192u /* blocks looked at for one job: many may be gone by now */

static bool write_summarise(struct ticket *t, struct job *job) {
        struct space *space = t->space;
        uint32_t room = job_blocks(job), id;

        for (; job->n_items < room && job->looks < MARK_LOOKS && (id = next_marked(space)) != NONE;
             job->looks++) {
                const struct block *b = block_of(space, id);
                struct kvd_job_item *item;

                if (b->state != KVD_SEALED || block_is_garbage(b) || b->poisoned ||
                    b->pending) /* marked again later */
                        continue;
                item = job_add(job, block_ref(space, id), id);
                if (!item) {
                        mark(space, id);
                        break;
                }
                item->n_tokens = block_desc(space, id)->n_tokens;
                item->position = (int32_t)block_position(space, id);
        }
        if (summaries_of(space)->n_marked)
                job_ask(t);
        job_results(job, 0);
        return job->n_items > 0;
}

static void settle_summarise(struct job *job, enum job_end end, const void *results, uint32_t n) {
        if (end == JOB_DONE)
                space_count(job->space, KVD_SPACE_SUMMARISED, job->n_items);
        for (uint32_t i = 0; i < job->n_items; i++)
                if (end == JOB_DONE)
                        job->space->blocks[job->items[i].at].summarised = true;
                else if (end == JOB_AGAIN)
                        mark(job->space, job->items[i].at);
}

static const struct job_kind job_summarise = {.number = KVD_JOB_SUMMARISE,
                                              .rests = true,
                                              .write = write_summarise,
                                              .settle = settle_summarise};

/* ---- memory ---------------------------------------------------------------------------------- */

/* Charges the whole size, since clients that read the sparse file may allocate all its pages. */
static int make_file(struct space *space, struct shared_file *file) {
        uint64_t bytes = kvd_summary_of(space_index(space)).size;
        int r = account_charge(space, KVD_COST_overhead, bytes);

        if (r < 0)
                return r;
        r = shared_file_new("kvd-summaries", bytes, SHARED_TWIN, file);
        if (r == 0)
                return 0;
        account_discharge(space, KVD_COST_overhead, bytes);
        return store_refuse(space_store(space), r, "no memory for the summaries of space '%s': %s",
                            space_name(space), strerror(-r));
}

/* Workers map the summaries of every space; those of opaque blocks stay empty. */
int space_summary_fd(struct space *space, bool writable) {
        struct shared_file *file = &summaries_of(space)->file;
        int r = writable ? 0 : space_refuse_opaque(space, "summaries");

        if (r < 0)
                return r;
        r = file->fd < 0 ? make_file(space, file) : 0;
        if (r < 0)
                return r;
        return writable ? file->fd : file->fd_ro;
}

uint64_t summaries_bytes(const struct space *space) {
        return summaries_of(space)->file.fd >= 0 ? kvd_summary_of(space_index(space)).size : 0;
}

/* ---- life ------------------------------------------------------------------------------------ */

static int begin(struct space *space) {
        struct summaries *all = space->parts.summaries = sys->calloc(1, sizeof *all);

        if (!all)
                return -ENOMEM;
        all->file = SHARED_FILE_NONE;
        ticket_init(&all->ticket, &job_summarise, space, NULL);
        all->marks = sys->calloc(DIV_UP(space_index(space)->capacity, 64), sizeof *all->marks);
        if (!all->marks)
                return -ENOMEM;
        setting_changed(space);
        return 0;
}

static void leave(struct space *space) {
        job_withdraw(&summaries_of(space)->ticket);
}

static void end(struct space *space) {
        struct summaries *all = summaries_of(space);

        if (!all)
                return;
        store_close_file(space_store(space), &all->file);
        free(all->marks);
        free(all);
}

/* Rows of blocks that are gone keep their memory until other blocks use them. */
static void usage(const struct space *space, struct space_usage *ret) {
        const struct shared_file *file = &summaries_of(space)->file;
        struct stat st;

        ret->label_bytes = file->fd >= 0 && fstat(file->fd, &st) == 0 ?
                                   (uint64_t)st.st_blocks * 512 :
                                   0;
}

#define PENDING_LOOKS 4096u /* entries looked at in one call */

/*
 * Is a summary of a block of this sequence still to be made? A long sequence is scanned in several
 * calls, which return true until all is scanned. The scan starts at the end, where the newest
 * blocks are.
 */
static bool pending(struct sequence *q) {
        const struct space *space = q->space;

        if (!job_pending(&summaries_of(space)->ticket))
                return false;
        for (uint32_t i = 0; i < PENDING_LOOKS && q->n_summarised < q->n_entries; i++) {
                uint32_t at = q->unsummarised < q->n_entries ? q->unsummarised : q->n_entries - 1;
                kvd_ref ref = q->entries[at].ref;

                q->unsummarised = at;
                if (ref && !block_of(space, kvd_ref_id(ref))->summarised) {
                        q->n_summarised = 0;
                        return true;
                }
                q->unsummarised = at ? at - 1 : NONE;
                q->n_summarised++;
        }
        if (q->n_summarised < q->n_entries)
                return true;
        q->n_summarised = 0;
        q->unsummarised = NONE;
        return false;
}

const struct hooks summaries_hooks = {.space_begins = begin,
                                      .setting_changed = setting_changed,
                                      .idle = mark_old,
                                      .space_leaves = leave,
                                      .space_ends = end,
                                      .usage = usage,
                                      .sequence_pending = pending};
