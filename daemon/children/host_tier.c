/* SPDX-License-Identifier: Apache-2.0 */

/* The timer of the host tier: see host_tier.h. */

#include "daemon/children/host_tier.h"

#include <errno.h>

#include "ipc/base/sys.h"
#include "store/file_tier.h"

#define LATER_NS UINT64_C(200000000) /* between two checks for blocks to write */

static void wants(void *data, bool soon) {
        struct host_tier *t = data;

        if (soon || !loop_timer_is_set(&t->look))
                loop_timer_set(t->loop, &t->look, sys_now_ns() + (soon ? 0 : LATER_NS));
}

static void look(struct loop_timer *timer) {
        struct host_tier *t = container_of(timer, struct host_tier, look);
        struct store_disk_info info;

        if (store_host_next(t->store))
                wants(t, false);
        store_disk_get_info(t->store, &info);
        if (info.errors)
                tier_errors_say(&t->errors, "host tier", info.errors, info.last_error);
}

int host_tier_begin(struct host_tier *t, const struct config *config, struct loop *loop,
                    struct store *store, struct kvd_why *why) {
        const struct store_disk_config tier = {.depth = config->host_tier_depth,
                                               .host = config->host_tier};
        int r;

        if (!config->host_tier || config->file[0])
                return 0;
        r = store_disk_begin(store, &tier);
        if (r < 0)
                return kvd_refuse(why, r, "%s", store_why(store));
        *t = (struct host_tier){.loop = loop, .store = store, .look = {.fire = look}};
        store_on_disk(store, wants, t);
        return 0;
}

void host_tier_end(struct host_tier *t) {
        if (!t->store)
                return;
        store_on_disk(t->store, NULL, NULL);
        loop_timer_stop(&t->look);
        t->store = NULL;
}
