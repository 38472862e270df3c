/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Passes exact copies to the tiers of their places. Places that do not exist are refused here, once
 * for all tiers, because a job's places are not trusted to fit the space as it is mapped.
 */

#include "daemon/process/worker/copies.h"

#include <errno.h>

#include "daemon/process/worker/task.h"

static const struct worker_tier *const tiers[KVD_N_TIERS] = {
#define KVD_TIER(id, what) [KVD_TIER_##id] = &worker_tier_##id,
#include "ipc/base/tiers.def"
};

int copies_map(struct worker_space *w, const int fds[KVD_N_TIERS],
               const uint64_t bytes[KVD_N_TIERS]) {
        for (uint32_t t = 0; t < KVD_N_TIERS; t++) {
                uint64_t places = w->ix->tier_end[t] - kvd_tier_first(w->ix, t);
                int r = bytes[t] < places * w->ix->block_bytes ?
                                -EPROTO :
                                tiers[t]->map(&w->copies[t], fds[t], bytes[t]);

                if (r < 0)
                        return r;
        }
        return 0;
}

void copies_unmap(struct worker_space *w) {
        for (uint32_t t = 0; t < KVD_N_TIERS; t++)
                tiers[t]->unmap(&w->copies[t]);
}

/* Fails the copies whose place does not exist; all other places have a tier. */
static void refuse_unknown(const struct task *task, struct copy *copies, uint32_t n) {
        for (uint32_t i = 0; i < n; i++)
                if (copies[i].place != KVD_NOWHERE &&
                    copies[i].place >= kvd_places(task->space->ix)) {
                        copies[i].place = KVD_NOWHERE;
                        copies[i].error = ENODATA;
                }
}

void copies_put(struct task *task, struct copy *copies, uint32_t n) {
        refuse_unknown(task, copies, n);
        for (uint32_t t = 0; t < KVD_N_TIERS; t++)
                tiers[t]->put(task, t, copies, n);
}

void copies_get(struct task *task, struct copy *copies, uint32_t n) {
        refuse_unknown(task, copies, n);
        for (uint32_t t = 0; t < KVD_N_TIERS; t++)
                tiers[t]->get(task, t, copies, n);
}

void copies_read(struct task *task, struct copy *copies, uint32_t n) {
        refuse_unknown(task, copies, n);
        for (uint32_t t = 0; t < KVD_N_TIERS; t++)
                tiers[t]->read(task, t, copies, n);
}
