/* SPDX-License-Identifier: Apache-2.0 */

/*
 * client end: the daemon's reply names the process for which blocks are kept; kvctl counts them
 * afterwards. The rest of the client has been freed by then.
 */

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "tools/kvctl/map.h"
#include "tools/kvctl/kvctl.h"

static const struct column end_columns[] = {
        {"client", NULL, UNIT_NONE},
        {"pid", NULL, UNIT_NONE},
        {"process_gone", NULL, UNIT_NONE},
        {"kept_spaces", NULL, UNIT_COUNT},
        {"kept_pinned_blocks", NULL, UNIT_COUNT},
        {"kept_filling_blocks", NULL, UNIT_COUNT},
        {"kept_bytes", NULL, UNIT_BYTES},
};

static int parse(struct kvctl *kvctl, uint32_t *ret) {
        const char *text = kvctl->args.operand[0];
        unsigned long number;
        char *end;

        errno = 0;
        number = strtoul(text, &end, 10);
        if (!isdigit((unsigned char)*text) || *end || errno || number > UINT32_MAX)
                return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL,
                                  "NUMBER is a client's, as in \"kvctl clients\", not \"%s\"",
                                  text);
        *ret = (uint32_t)number;
        return 0;
}

/* ---- kept blocks ----------------------------------------------------------------------------- */

static int count_in_space(struct kvctl *kvctl, const struct space_name *space,
                          struct kvd_msg_pins request, uint64_t *pinned) {
        struct kvd_msg_pins_reply reply;
        int r;

        request.space = kvd_slice_of(space->name);
        request.domain = kvd_slice_of(space->domain);
        do {
                r = kvctl_next(kvctl, KVD_MSG_pins, &request, &reply);
                if (r != 1)
                        return r;
                *pinned += reply.ids.size / sizeof(uint32_t);
                request.first = reply.next;
        } while (request.first);
        return 0;
}

static int count_pinned(struct kvctl *kvctl, const struct kvd_msg_client_end *of, uint64_t *ret) {
        const struct kvd_msg_pins request = {.client = of->client, .client_domain = of->domain};
        struct kvd_msg_space_info_reply info;
        uint32_t cursor = 0;
        int r;

        *ret = 0;
        while ((r = kvctl_next_space(kvctl, &cursor, &info)) == 1) {
                const struct space_name space = space_name_of(&info);

                r = count_in_space(kvctl, &space, request, ret);
                if (r < 0)
                        return r;
        }
        return r;
}

/*
 * The client's share of the memory that eviction cannot take: blocks that it pins, the blocks
 * before those, and blocks that it fills. Pins are requested again, because the daemon's own figure
 * may be older.
 */
static int measure_kept(struct kvctl *kvctl, uint32_t client, uint32_t pid, uint64_t *ret) {
        _cleanup_(maps_clear) struct maps maps = {0};
        struct kvd_msg_client_info_reply info;
        char domain[KVD_NAME_MAX + 1];
        uint32_t cursor = 0;
        int r = maps_read(kvctl, false, &maps);

        if (r < 0)
                return r;
        while ((r = kvctl_next_client(kvctl, &cursor, &info)) == 1) {
                if (info.client != client || info.pid != pid)
                        continue;
                kvd_slice_copy(info.domain, domain, sizeof domain);
                r = maps_held_by(kvctl, &maps, client, domain, ret);
                *ret += info.filling_bytes;
                break;
        }
        return r;
}

/* ---- the verb -------------------------------------------------------------------------------- */

static void say(struct answer *answer, uint32_t client, const struct kvd_msg_client_end_reply *m,
                uint64_t pinned, uint64_t bytes) {
        char process[64] = "its process in another pid namespace", until[96], size[UNIT_TEXT_MAX];

        unit_format_u64(UNIT_BYTES, bytes, size);
        if (m->pid)
                snprintf(process, sizeof process, "process %u", m->pid);
        snprintf(until, sizeof until, m->gone ? "team or GPU work of %s ends" : "%s is gone",
                 process);
        if (!m->spaces)
                answer_say(answer, "Client %u (%s) is ended; nothing is kept.", client, process);
        else
                answer_say(answer,
                           "Client %u is ended; %s are kept until %s: the blocks that it pins "
                           "(%llu), those before them, and those that it was filling (%llu).",
                           client, size, until, (unsigned long long)pinned,
                           (unsigned long long)m->filling);
}

static int look_at_kept(struct kvctl *kvctl, const struct kvd_msg_client_end *request, uint32_t pid,
                        uint64_t *pinned, uint64_t *bytes) {
        int r = count_pinned(kvctl, request, pinned);

        return r < 0 ? r : measure_kept(kvctl, request->client, pid, bytes);
}

int verb_client_end(struct kvctl *kvctl, struct answer *answer) {
        struct table *t = ANSWER_RECORD(answer, "client", end_columns);
        struct kvd_msg_client_end request = {.domain = kvctl_domain(kvctl)};
        struct kvd_msg_client_end_reply reply = {0};
        uint64_t pinned = 0, bytes = 0;
        int r = t ? parse(kvctl, &request.client) : kvctl_out_of_memory(kvctl);

        if (r == 0)
                r = kvctl_call(kvctl, KVD_MSG_client_end, &request, &reply);
        if (r == 0 && reply.spaces)
                r = look_at_kept(kvctl, &request, reply.pid, &pinned, &bytes);
        if (r < 0)
                return r;
        table_number(t, request.client);
        table_number(t, reply.pid);
        table_flag(t, reply.gone);
        table_number(t, reply.spaces);
        table_number(t, pinned);
        table_number(t, reply.filling);
        table_number(t, bytes);
        say(answer, request.client, &reply, pinned, bytes);
        return 0;
}
