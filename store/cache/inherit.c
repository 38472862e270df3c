/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Clients of the previous daemon still read the blocks that they had pinned, through the old index,
 * which does not change any more. Such a client's pin page becomes an attachment without a
 * connection. Eviction scans it like any other. It ends when the client writes there that it has
 * left, or when the client's process has ended.
 *
 * D11 (tests/client/spin/restart.pml): before the first eviction, each such page gets the number of
 * the new index. A pin that the client makes after that is not valid, and the client sees that
 * (C5). The scan finds pins that were made before.
 */

#include <errno.h>
#include <sys/eventfd.h>

#include "ipc/base/lifeline.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "store/account.h"
#include "store/cache/inside.h"
#include "store/hooks.h"
#include "store/keep_inside.h"

/* ---- taking over ----------------------------------------------------------------------------- */

static uint32_t free_seat(const struct space *space) {
        uint32_t seat = 0;

        while (seat < space->n_attachments && space->attachments[seat])
                seat++;
        return seat;
}

/* All old clients count as process 0, so that they use up the share of no process. */
static int inherit(struct attachment *a, int *page) {
        uint64_t bytes = kvd_pinpage_bytes(a->space->ix);
        int r = shared_file_adopt(page, bytes, SHARED_MAPPED, &a->pin_file);

        if (r < 0)
                return r;
        a->tenant = tenant_join(a->space, 0);
        if (!a->tenant)
                return -ENOMEM;
        attachment_map(a);
        r = hooks_attachment_begins(a);
        if (r == 0)
                atomic_store(&a->page->epoch, a->space->ix->life); /* D11 */
        return r;
}

int attachment_inherit(struct space *space, const struct attachment_kept *kept, int *page,
                       int *process) {
        struct attachment *a = space->account.inherited.n <
                                               space_store(space)->config.max_attachments ?
                                       sys->calloc(1, sizeof *a) :
                                       NULL;
        int r;

        if (!a)
                return -ENOMEM;
        *a = (struct attachment){.space = space,
                                 .seat = free_seat(space),
                                 .state = ORPHANED,
                                 .pin_file = SHARED_FILE_NONE,
                                 .kept = *kept,
                                 .process = -1,
                                 .arena = space->memory.arenas};
        attachment_charge(space);
        account_add(space, KVD_COST_kept, attachment_kept_bytes(a));
        r = inherit(a, page);
        if (r < 0) {
                account_discharge(space, KVD_COST_kept, attachment_kept_bytes(a));
                attachment_unmake(a);
                return r;
        }
        a->process = *process;
        *process = -1;
        space->account.inherited.n++;
        attachment_enter(a);
        return 0;
}

/*
 * An attachment that has ended already, with a page that no process maps. Blocks that the worker
 * was filling become free when its last work on the GPU must be over.
 */
int worker_inherit(struct space *space) {
        struct attachment_kept nobody = {.is = false};
        _cleanup_(closep) int ended = sys->eventfd(1, EFD_CLOEXEC);
        struct shared_file page;
        int r;

        if (ended < 0)
                return negative_errno();
        r = shared_file_new("kvd-pins", kvd_pinpage_bytes(space->ix), 0, &page);
        if (r == 0)
                r = attachment_inherit(space, &nobody, &page.fd, &ended);
        shared_file_close(&page);
        return r;
}

/* ---- their end ------------------------------------------------------------------------------- */

/* Has its process ended, and must the GPU have stopped the work that the process queued there? */
static bool has_died(struct attachment *a) {
        uint64_t now;

        if (!a->died_ns && !sys_is_readable(a->process))
                return false;
        now = sys_now_ns();
        if (!a->died_ns)
                a->died_ns = now;
        if (!space_store(a->space)->config.quarantine_ns)
                return true;
        return now - a->died_ns >=
               space_store(a->space)->config.quarantine_ns + lifeline_delay_ns(a->process);
}

#define LOOKS 16u /* processes looked at in one call; each takes a system call */

uint32_t inherited_look(struct space *space) {
        uint32_t looks = LOOKS, ended = 0;

        for (uint32_t i = 0; space->account.inherited.n && looks && i < space->n_attachments; i++) {
                uint32_t seat = space->account.inherited.hand++ % space->n_attachments;
                struct attachment *a = space->attachments[seat];

                if (!attachment_is_inherited(a))
                        continue;
                looks--;
                if (!atomic_load(&a->page->left) && !has_died(a))
                        continue;
                attachment_free(a, a->kept.is && !atomic_load(&a->page->left));
                ended++;
        }
        return ended;
}
