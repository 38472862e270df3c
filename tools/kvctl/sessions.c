/* SPDX-License-Identifier: Apache-2.0 */

/*
 * sessions: what agents asked to keep, by name. Users see their own sessions, and administrators
 * those of all users.
 */

#include "ipc/base/enums.h"
#include "tools/kvctl/kvctl.h"

static const struct column session_columns[] = {
        {"domain", "DOMAIN", UNIT_NONE | COLUMN_QUIET},
        {"space", "SPACE", UNIT_NONE | COLUMN_QUIET},
        {"name", "NAME", UNIT_NONE},
        {"uid", "UID", UNIT_NONE | COLUMN_QUIET},
        {"keep", "KEEP", UNIT_NONE},
        {"blocks", "BLOCKS", UNIT_COUNT},
        {"bytes", "BYTES", UNIT_BYTES},
        {"left_ms", "LEFT", UNIT_MS},
};

static void fill_session(struct table *t, const struct space_name *space,
                         const struct kvd_msg_session_info_reply *info) {
        table_string(t, space->domain);
        table_string(t, space->name);
        table_fields(t, 2, KVD_MSG_session_info_reply, info);
        table_string(t, kvd_enum_word(KVD_ENUM_keep, info->keep));
        table_fields(t, 3, KVD_MSG_session_info_reply, info);
}

static int fill_sessions(struct kvctl *kvctl, struct table *t, const struct space_name *space) {
        struct kvd_msg_session_info request = {.space = kvd_slice_of(space->name),
                                               .domain = kvd_slice_of(space->domain)};
        struct kvd_msg_session_info_reply info;
        int r;

        while ((r = kvctl_next(kvctl, KVD_MSG_session_info, &request, &info)) == 1) {
                request.cursor = info.next;
                fill_session(t, space, &info);
        }
        return r;
}

static int add_sessions(struct kvctl *kvctl, struct answer *answer, const struct space_list *list) {
        struct table *t = ANSWER_ROWS(answer, "sessions", session_columns);
        int r = t ? 0 : kvctl_out_of_memory(kvctl);

        for (size_t i = 0; r == 0 && i < list->n; i++)
                r = fill_sessions(kvctl, t, &list->spaces[i]);
        if (r == 0 && !table_rows(t))
                answer_say(answer, "There are no sessions that you may see.");
        return r;
}

int verb_sessions(struct kvctl *kvctl, struct answer *answer) {
        _cleanup_(space_list_clear) struct space_list list = {0};
        int r = kvctl_spaces(kvctl, &list);

        return r < 0 ? r : add_sessions(kvctl, answer, &list);
}
