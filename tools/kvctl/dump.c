/* SPDX-License-Identifier: Apache-2.0 */

/*
 * dump: everything. The answer consists of the other verbs' own tables, so that it cannot differ
 * from them.
 */

#include "tools/kvctl/kvctl.h"

typedef int add_fn(struct kvctl *kvctl, struct answer *answer);
typedef int add_of_spaces_fn(struct kvctl *kvctl, struct answer *answer,
                             const struct space_list *list);

static int add_all_settings(struct kvctl *kvctl, struct answer *answer,
                            const struct space_list *list) {
        return add_methods(kvctl, answer, list, true);
}

static add_fn *const parts[] = {add_daemon, add_degraded, add_spaces, add_clients};
static add_of_spaces_fn *const parts_of_spaces[] = {add_counters, add_chains, add_states,
                                                    add_all_settings};

int verb_dump(struct kvctl *kvctl, struct answer *answer) {
        _cleanup_(space_list_clear) struct space_list list = {0};
        int r = 0;

        for (size_t i = 0; i < ARRAY_SIZE(parts) && r == 0; i++)
                r = parts[i](kvctl, answer);
        if (r == 0)
                r = kvctl_spaces(kvctl, &list);
        for (size_t i = 0; i < ARRAY_SIZE(parts_of_spaces) && r == 0; i++)
                r = parts_of_spaces[i](kvctl, answer, &list);
        return r;
}
