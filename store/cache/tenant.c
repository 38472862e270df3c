/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Counts what one process has of a space over all of its attachments, including those whose
 * connection is lost, so that a second connection does not bring a second share. Of the seats,
 * sequences and leases of a space, one process leaves a sixteenth to others, and at least one.
 */

#include "ipc/base/sys.h"
#include "store/cache/inside.h"

struct tenant *tenant_join(struct space *space, uint64_t process) {
        struct tenant *t = space->account.tenants;

        while (t && t->process != process)
                t = t->next;
        if (!t) {
                t = sys->calloc(1, sizeof *t);
                if (!t)
                        return NULL;
                t->process = process;
                t->next = space->account.tenants;
                space->account.tenants = t;
        }
        t->n_attachments++;
        t->n_live++;
        return t;
}

void tenant_leave(struct space *space, struct tenant *tenant) {
        struct tenant **at = &space->account.tenants;

        if (--tenant->n_attachments)
                return;
        while (*at != tenant)
                at = &(*at)->next;
        *at = tenant->next;
        free(tenant);
}

uint32_t tenant_most(uint32_t of) {
        return of > 1 ? of - MAX(of / 16, 1) : of;
}
