/* SPDX-License-Identifier: Apache-2.0 */

/* tiers: the tiers below the pool, how full they are, and their traffic. */

#include <errno.h>

#include "tools/kvctl/kvctl.h"

static const struct column tier_columns[] = {
        {"tier", "TIER", UNIT_NONE},
        {"state", "STATE", UNIT_NONE},
        {"bytes", "SIZE", UNIT_BYTES},
        {"used", "USED", UNIT_BYTES},
        {"records", "BLOCKS", UNIT_COUNT},
        {"hits", "FETCHED", UNIT_COUNT},
        {"misses", "MISSED", UNIT_COUNT},
        {"wrong", "WRONG", UNIT_COUNT},
        {"queue", "QUEUE", UNIT_COUNT},
        {"read_bytes", "READ", UNIT_BYTES},
        {"written_bytes", "WRITTEN", UNIT_BYTES},
        {"read_per_second", "READ/S", UNIT_BYTES},
        {"written_per_second", "WRITTEN/S", UNIT_BYTES},
        {"age_ms", "AGE", UNIT_MS},
        {"evicted", "EVICTED", UNIT_COUNT},
        {"copies", "COPIES", UNIT_COUNT},
        {"copies_written", NULL, UNIT_COUNT},
        {"copies_read", NULL, UNIT_COUNT},
        {"copies_lost", "LOST", UNIT_COUNT},
        {"errors", "ERRORS", UNIT_COUNT},
        {"servers", "SERVERS", UNIT_COUNT},
        {"away", "AWAY", UNIT_COUNT},
        {"why", NULL, UNIT_NONE},
};

static void fill_rate(struct table *t, uint64_t bytes, uint64_t ns) {
        if (ns)
                table_real(t, (double)bytes * 1e9 / (double)ns);
        else
                table_none(t);
}

/* Bytes per second of busy time, since the previous picture or the daemon's start. */
static void fill_rates(struct table *t, const struct kvd_msg_tier_info_reply *m,
                       struct tier_work *before) {
        fill_rate(t, m->read_bytes - before->read_bytes, m->read_ns - before->read_ns);
        fill_rate(t, m->written_bytes - before->written_bytes, m->write_ns - before->write_ns);
        *before = (struct tier_work){m->read_bytes, m->read_ns, m->written_bytes, m->write_ns};
}

static void fill_tier(struct table *t, const struct kvd_msg_tier_info_reply *m,
                      struct tier_work *before) {
        table_text(t, m->name.data, m->name.size);
        table_fields(t, 10, KVD_MSG_tier_info_reply, m);
        fill_rates(t, m, before);
        if (m->records)
                table_number(t, m->age_ms);
        else
                table_none(t);
        table_fields(t, 9, KVD_MSG_tier_info_reply, m);
}

static int fill_tiers(struct kvctl *kvctl, struct answer *answer, struct table *t) {
        struct kvd_msg_tier_info request = {0};
        struct kvd_msg_tier_info_reply reply;
        int r;

        while ((r = kvctl_next(kvctl, KVD_MSG_tier_info, &request, &reply)) == 1) {
                fill_tier(t, &reply, &kvctl->tiers[MIN(request.tier, KVCTL_TIERS - 1)]);
                if (reply.why.size)
                        answer_say(answer, "%.*s: %.*s", (int)reply.name.size,
                                   (const char *)reply.name.data, (int)reply.why.size,
                                   (const char *)reply.why.data);
                request.tier++;
        }
        return r;
}

int verb_tiers(struct kvctl *kvctl, struct answer *answer) {
        struct table *t = ANSWER_ROWS(answer, "tiers", tier_columns);
        int r = t ? fill_tiers(kvctl, answer, t) : kvctl_out_of_memory(kvctl);

        if (r == 0 && !table_rows(t))
                answer_say(answer, "There is nothing below the pool; \"file\", \"remote\" and "
                                   "\"host_tier\" in kvd.conf(5) add tiers.");
        return r;
}
