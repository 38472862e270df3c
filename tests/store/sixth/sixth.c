/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A sixth method, which does what the store's part of any method does: it asks for a job when it is
 * switched on, writes the blocks of a sequence into it, and takes the result.
 */

#include "tests/store/sixth/sixth.h"

#include "store/hooks.h"
#include "store/methods/methods.h"

uint32_t sixth_seen;

static struct ticket ticket; /* a method of the product has it in struct space or struct sequence */
static bool begun;

static bool write_sixth(struct ticket *t, struct job *job) {
        struct sequence *q = t->owner;
        uint32_t most = (uint32_t)setting(q->space, KVD_sixth_most);

        for (uint32_t i = 0; i < MIN(q->n_entries, most); i++)
                job_add(job, q->entries[i].ref, i);
        return job->n_items > 0;
}

static void settle_sixth(struct job *job, enum job_end end, const void *results, uint32_t n) {
        sixth_seen += end == JOB_DONE ? job->n_items : 0;
}

static const struct job_kind job_sixth = {.number = KVD_JOB_SIXTH,
                                          .result_bytes = sizeof(uint32_t),
                                          .write = write_sixth,
                                          .settle = settle_sixth};

static void begin(struct sequence *q) {
        begun = true;
        ticket_init(&ticket, &job_sixth, q->space, q);
}

static bool pending(struct sequence *q) {
        return job_pending(&ticket);
}

static void end(struct sequence *q) {
        begun = false;
        job_withdraw(&ticket);
}

static void setting_changed(struct space *space) {
        if (begun && is_on(space, KVD_sixth_on))
                job_ask(&ticket);
}

const struct hooks sixth_hooks = {.setting_changed = setting_changed,
                                  .sequence_begins = begin,
                                  .sequence_pending = pending,
                                  .sequence_ends = end};
