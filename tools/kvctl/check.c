/* SPDX-License-Identifier: Apache-2.0 */

/*
 * check: the daemon walks the invariants of its spaces. Each request does a piece, so that the
 * daemon serves others in between.
 */

#include "tools/kvctl/kvctl.h"

static const struct column check_columns[] = {
        {"domain", "DOMAIN", UNIT_NONE | COLUMN_QUIET},
        {"space", "SPACE", UNIT_NONE},
        {"blocks_checked", "CHECKED", UNIT_COUNT},
        {"broken", "BROKEN", UNIT_COUNT},
        {"first_broken", "FIRST BROKEN INVARIANT", UNIT_NONE},
};

struct report {
        uint64_t checked, broken;
        bool partial;
        char first[256];
};

#define WALKS 3 /* at most, of a space that changes during each */

static int walk_space(struct kvctl *kvctl, const struct space_name *space, struct report *report) {
        struct kvd_msg_check request = {.space = kvd_slice_of(space->name),
                                        .domain = kvd_slice_of(space->domain)};
        struct kvd_msg_check_reply reply;

        *report = (struct report){0};
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
        report->partial = reply.partial;
        return 0;
}

/* Sums over a whole space can be compared only if it did not change during the walk: retry. */
static int check_space(struct kvctl *kvctl, const struct space_name *space, struct report *report) {
        int r;

        for (int walk = 0; walk < WALKS; walk++) {
                r = walk_space(kvctl, space, report);
                if (r < 0 || report->broken || !report->partial)
                        return r;
        }
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
        uint64_t broken = 0, partial = 0;
        int r = kvctl_spaces(kvctl, &list);

        if (!t)
                return kvctl_out_of_memory(kvctl);
        for (size_t i = 0; i < list.n && r == 0; i++) {
                struct report report = {0};

                r = check_space(kvctl, &list.spaces[i], &report);
                fill_report(t, &list.spaces[i], &report);
                broken += report.broken;
                partial += report.partial;
        }
        if (r < 0)
                return r;
        if (broken)
                answer_say(answer,
                           "Broken: save \"kvctl dump\" and the daemon's log, and report it.");
        else
                answer_say(answer, "All invariants hold in %zu space%s.", list.n,
                           list.n == 1 ? "" : "s");
        if (partial)
                answer_say(
                        answer,
                        "Sums over %llu of them were not compared, because blocks came and went all the time.",
                        (unsigned long long)partial);
        return broken > 0;
}
