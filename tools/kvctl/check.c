/* SPDX-License-Identifier: Apache-2.0 */

/*
 * check: the daemon walks the invariants of its spaces. Each request does a piece, so that the
 * daemon serves others in between.
 */

#include "tools/kvctl/kvctl.h"
#include "tools/kvctl/verbs.h"

static const struct column check_columns[] = {
        {"domain", "DOMAIN", UNIT_NONE | COLUMN_QUIET},
        {"space", "SPACE", UNIT_NONE},
        {"blocks_checked", "CHECKED", UNIT_COUNT},
        {"broken", "BROKEN", UNIT_COUNT},
        {"first_broken", "FIRST BROKEN INVARIANT", UNIT_NONE},
};

struct report {
        uint64_t checked, broken;
        char first[256];
};

static int check_space(struct kvctl *kvctl, const struct space_name *space, struct report *report) {
        struct kvd_msg_check request = {.space = kvd_slice_of(space->name),
                                        .domain = kvd_slice_of(space->domain)};
        struct kvd_msg_check_reply reply;

        do {
                int r = kvctl_call(kvctl, KVD_MSG_check, &request, &reply);

                if (r < 0)
                        return r;
                report->checked += reply.checked;
                report->broken += reply.broken;
                if (reply.broken && !*report->first)
                        kvd_slice_copy(reply.first, report->first, sizeof report->first);
                request.cursor = reply.next;
        } while (reply.next);
        return 0;
}

static void fill_report(struct table *t, const struct space_name *space,
                        const struct report *report) {
        table_string(t, space->domain);
        table_string(t, space->name);
        table_number(t, report->checked);
        table_number(t, report->broken);
        table_string(t, report->broken ? report->first : NULL);
}

int verb_check(struct kvctl *kvctl, struct answer *answer) {
        _cleanup_(space_list_clear) struct space_list list = {0};
        struct table *t = ANSWER_ROWS(answer, "checks", check_columns);
        uint64_t broken = 0;
        int r = kvctl_spaces(kvctl, &list);

        if (!t)
                return kvctl_out_of_memory(kvctl);
        for (size_t i = 0; i < list.n && r == 0; i++) {
                struct report report = {0};

                r = check_space(kvctl, &list.spaces[i], &report);
                fill_report(t, &list.spaces[i], &report);
                broken += report.broken;
        }
        if (r < 0)
                return r;
        if (broken)
                answer_say(answer,
                           "Broken: save \"kvctl dump\" and the daemon's log, and report it.");
        else
                answer_say(answer, "All invariants hold in %zu space%s.", list.n,
                           list.n == 1 ? "" : "s");
        return broken > 0;
}
