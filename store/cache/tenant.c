/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What one process has of a space is counted here over all of its attachments, those whose
 * connection is lost included: a second connection is no second share. Of what all clients of a
 * space have in common, seats, sequences and leases, one process leaves a sixteenth to others,
 * and at least one.
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
