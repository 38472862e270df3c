/* SPDX-License-Identifier: Apache-2.0 */

/*
 * This is what the store does when nobody asks for anything. A call does a bounded piece of it and
 * says whether there is more, so that requests never wait for it.
 */

#include "store/cache/cache.h"
#include "store/cache/memory.h"
#include "store/hooks.h"

#define SWEEP 256u /* garbage looked at in one call */

static bool space_idle(struct space *space) {
        bool more = hooks_idle(space);

        return more || garbage_sweep(space, SWEEP) || attachment_fold(space) || space_trim(space) ||
               space_fill_ahead(space) || available_look(space);
}

bool store_idle(struct store *store) {
        bool more = store->memory->idle(store) || store_bury(store);

        for (struct domain *d = store->domains; d; d = d->next)
                for (struct space *s = d->spaces; s; s = s->next)
                        more |= space_idle(s);
        return more;
}
