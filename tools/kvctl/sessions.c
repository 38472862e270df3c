/* SPDX-License-Identifier: Apache-2.0 */

/*
 * sessions: what agents asked to keep, by name; session end: ends one. Users see and end their own
 * sessions, and administrators those of all users.
 */

#include <errno.h>

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

/* ---- session end ----------------------------------------------------------------------------- */

static const struct column end_columns[] = {
        {"domain", NULL, UNIT_NONE},
        {"space", NULL, UNIT_NONE},
        {"name", NULL, UNIT_NONE},
};

static int parse(struct kvctl *kvctl, struct kvd_msg_session_end *ret) {
        const struct args *args = &kvctl->args;

        ret->name = kvd_slice_of(args->operand[1]);
        ret->user = args_has(args, FLAG_USER) ? args->number[FLAG_USER] + 1 : 0;
        if (args->number[FLAG_USER] <= UINT32_MAX && ret->name.size <= KVD_NAME_MAX)
                return 0;
        return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL,
                          "NAME and UID are those of a session in \"kvctl sessions\"");
}

int verb_session_end(struct kvctl *kvctl, struct answer *answer) {
        struct table *t = ANSWER_RECORD(answer, "session", end_columns);
        struct kvd_msg_session_end_reply reply;
        struct kvd_msg_session_end request;
        struct space_name space;
        int r = t ? parse(kvctl, &request) : kvctl_out_of_memory(kvctl);

        if (r == 0)
                r = kvctl_space(kvctl, &space);
        if (r < 0)
                return r;
        request.space = kvd_slice_of(space.name);
        request.domain = kvd_slice_of(space.domain);
        r = kvctl_call(kvctl, KVD_MSG_session_end, &request, &reply);
        if (r < 0)
                return r;
        table_string(t, space.domain);
        table_string(t, space.name);
        table_string(t, kvctl->args.operand[1]);
        answer_say(answer, "Session %s is ended; its blocks are like others.",
                   kvctl->args.operand[1]);
        return 0;
}
