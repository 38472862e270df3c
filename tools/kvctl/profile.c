/* SPDX-License-Identifier: Apache-2.0 */

/*
 * profile build, export, import and forget: a space's table, which says how many layers of a shared
 * prefix are reused. The daemon collects samples, and builds the table from them.
 */

#include "tools/kvctl/profile.h"

#include <errno.h>

#include "tools/kvctl/kvctl.h"

enum { SHOW = 1, FORGET, BUILD, IMPORT };

static const struct column columns[] = {
        {"space", NULL, UNIT_NONE},
        {"ratio_percent", NULL, UNIT_COUNT},
        {"samples", NULL, UNIT_COUNT},
        {"depth", NULL, UNIT_COUNT},
};

/* People get the table as a line for a file, programs each ratio. */
static int show(struct kvctl *kvctl, struct answer *answer, const char *space,
                const struct kvd_msg_profile_reply *reply) {
        const uint8_t *depth = reply->depth.data;
        _cleanup_(freep) char *text = profile_line(depth, reply->def);
        struct table *t = ANSWER_ROWS(answer, "profile", columns);
        uint32_t samples[PROFILE_RATIOS];

        if (!t || !text)
                return kvctl_out_of_memory(kvctl);
        memcpy(samples, reply->samples.data, sizeof samples);
        for (unsigned r = 0; r < PROFILE_RATIOS; r++) {
                table_string(t, space);
                table_number(t, r);
                table_number(t, samples[r]);
                table_number(t, depth[r]);
        }
        answer_say(answer, "%s", text);
        return 0;
}

static int call(struct kvctl *kvctl, struct answer *answer, struct kvd_msg_profile *request) {
        struct kvd_msg_profile_reply reply;
        struct space_name space;
        int r = kvctl_space(kvctl, &space);

        if (r < 0)
                return r;
        request->space = kvd_slice_of(space.name);
        request->domain = kvd_slice_of(space.domain);
        r = kvctl_call(kvctl, KVD_MSG_profile, request, &reply);
        if (r < 0 || request->op == FORGET)
                return r;
        if (reply.depth.size != PROFILE_RATIOS ||
            reply.samples.size != PROFILE_RATIOS * sizeof(uint32_t))
                return kvctl_fail(
                        kvctl, KVCTL_NO, -ENODATA,
                        "space \"%s\" has no table; \"kvctl profile build %s\" makes one from samples",
                        space.name, space.name);
        return show(kvctl, answer, space.name, &reply);
}

int verb_profile_build(struct kvctl *kvctl, struct answer *answer) {
        return call(kvctl, answer, &(struct kvd_msg_profile){.op = BUILD});
}

int verb_profile_export(struct kvctl *kvctl, struct answer *answer) {
        return call(kvctl, answer, &(struct kvd_msg_profile){.op = SHOW});
}

int verb_profile_forget(struct kvctl *kvctl, struct answer *answer) {
        int r = call(kvctl, answer, &(struct kvd_msg_profile){.op = FORGET});

        if (r == 0)
                answer_say(answer,
                           "Samples and table are forgotten; prefixes are reused one layer deep.");
        return r;
}

int verb_profile_import(struct kvctl *kvctl, struct answer *answer) {
        uint8_t depth[PROFILE_RATIOS];
        struct kvd_msg_profile request = {.op = IMPORT, .depth = {depth, sizeof depth}};
        int r = profile_read(kvctl->args.operand[1], depth, &request.def, &kvctl->why);

        kvctl->exit = KVCTL_USAGE; /* of a failure to read */
        return r < 0 ? r : call(kvctl, answer, &request);
}
