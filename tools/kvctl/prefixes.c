/* SPDX-License-Identifier: Apache-2.0 */

/*
 * prefixes: what is cached, as chains of blocks. A chain is identified by its last block, because
 * the blocks before it may be shared.
 */

#include <endian.h>
#include <string.h>

#include "ipc/base/layout.h"
#include "tools/kvctl/kvctl.h"

enum { COLUMN_TOKENS = 4 };

static const struct column chain_columns[] = {
        {"domain", "DOMAIN", UNIT_NONE | COLUMN_QUIET},
        {"space", "SPACE", UNIT_NONE | COLUMN_QUIET},
        {"chain", "CHAIN", UNIT_NONE},
        {"group", "GROUP", UNIT_NONE | COLUMN_QUIET},
        [COLUMN_TOKENS] = {"tokens", "TOKENS", UNIT_COUNT},
        {"blocks", "BLOCKS", UNIT_COUNT},
        {"shared_blocks", "SHARED", UNIT_COUNT},
        {"pins", "PINS", UNIT_COUNT},
        {"idle_ticks", "IDLE", UNIT_COUNT},
        {"first_tokens", "FIRST TOKENS", UNIT_NONE},
};

static void fill_tokens(struct table *t, struct kvd_slice tokens) {
        uint32_t ids[32];
        size_t n = MIN(tokens.size / sizeof *ids, ARRAY_SIZE(ids));

        if (n)
                memcpy(ids, tokens.data, n * sizeof *ids);
        for (size_t i = 0; i < n; i++)
                ids[i] = le32toh(ids[i]);
        table_ids(t, ids, n);
}

static void fill_chain(struct table *t, const struct space_name *space,
                       const struct kvd_msg_chain_info_reply *info) {
        table_string(t, space->domain);
        table_string(t, space->name);
        table_format(t, "%u:%u", kvd_ref_id(info->leaf), kvd_ref_generation(info->leaf));
        table_fields(t, 6, KVD_MSG_chain_info_reply, info);
        fill_tokens(t, info->head);
}

static int fill_chains(struct kvctl *kvctl, struct table *t, const struct space_name *space) {
        struct kvd_msg_chain_info request = {.space = kvd_slice_of(space->name),
                                             .domain = kvd_slice_of(space->domain)};
        struct kvd_msg_chain_info_reply info;
        int r;

        while ((r = kvctl_next(kvctl, KVD_MSG_chain_info, &request, &info)) == 1) {
                request.cursor = info.next;
                request.above = info.above;
                if (info.leaf)
                        fill_chain(t, space, &info);
        }
        return r;
}

int add_chains(struct kvctl *kvctl, struct answer *answer, const struct space_list *list) {
        struct table *t = ANSWER_ROWS(answer, "chains", chain_columns);
        size_t limit = args_has(&kvctl->args, FLAG_LIMIT) ? kvctl->args.number[FLAG_LIMIT] :
                                                            SIZE_MAX,
               n;

        if (!t)
                return kvctl_out_of_memory(kvctl);
        for (size_t i = 0; i < list->n; i++) {
                int r = fill_chains(kvctl, t, &list->spaces[i]);

                if (r < 0)
                        return r;
        }
        table_sort(t, COLUMN_TOKENS, false);
        n = table_rows(t);
        table_cut(t, limit);
        if (n == 0)
                answer_say(answer, "Nothing is cached.");
        else if (n > limit)
                answer_say(answer, "%zu more %s not shown.", n - limit,
                           n - limit == 1 ? "chain is" : "chains are");
        return 0;
}

int verb_prefixes(struct kvctl *kvctl, struct answer *answer) {
        struct space_name space;
        int r = kvctl_space(kvctl, &space);

        return r < 0 ? r : add_chains(kvctl, answer, &(struct space_list){&space, 1});
}
