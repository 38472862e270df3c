/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sequences, the block tables of inference requests: a client opens one, appends to it, takes the
 * changes that the store proposes, cools blocks and revives them.
 */

#include "daemon/handlers/handlers.h"

#include <errno.h>

#include "client/kvd_methods.h"
#include "daemon/handlers/arrays.h"
#include "ipc/base/util.h"

static bool is_on(struct space *space, enum kvd_setting which) {
        return kvd_setting_on(space_index(space)->settings, which);
}

int handle_table(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct kvd_msg_table *m = &request->table;
        int r;

        call->reply.table_reply.sequence = m->sequence;
        if (m->op == 1)
                r = sequence_open(call->attachment, m->max_blocks,
                                  &call->reply.table_reply.sequence);
        else if (m->op == 2)
                r = sequence_close(call->attachment, m->sequence);
        else
                return client_refuse(c, -EINVAL, "op is %u; 1 opens a sequence, 2 closes it",
                                     m->op);
        return r < 0 ? client_store_failed(c, r) : 0;
}

int handle_append(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct kvd_msg_append *m = &request->append;
        struct scratch *s = c->server->scratch;
        struct append_request append = {.own = m->own, .blocks = s->blocks, .tokens = s->tokens};
        int64_t n_blocks, n_tokens;
        int r;

        n_blocks = array_of_blocks(c, m->blocks);
        n_tokens = n_blocks < 0 ? 0 : array_of_tokens(c, m->tokens);
        if (n_blocks < 0 || n_tokens < 0)
                return -EINVAL;
        append.n_blocks = (uint32_t)n_blocks;
        append.n_tokens = (uint32_t)n_tokens;
        r = sequence_append(call->attachment, m->sequence, &append,
                            &call->reply.append_reply.first);
        return r < 0 ? client_store_failed(c, r) : 0;
}

int handle_share(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct kvd_msg_share *m = &request->share;
        int r = 0;

        if (is_on(call->space, KVD_memshare_on))
                r = client_needs_worker(c, "MemShare");
        if (r < 0)
                return r;
        r = sequence_share(call->attachment, m->sequence, m->first, m->tokens);
        if (r < 0)
                return client_store_failed(c, r);
        call->reply.share_reply.queued = (uint32_t)r;
        return 0;
}

int handle_sync(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct kvd_msg_sync *m = &request->sync;
        struct scratch *s = c->server->scratch;
        struct sequence_report report;
        int64_t n;
        int r;

        n = array_of_numbers(c, m->taken, "taken");
        if (n < 0)
                return (int)n;
        r = sequence_sync(call->attachment, m->sequence, s->numbers, (uint32_t)n, s->changes);
        if (r < 0)
                return client_store_failed(c, r);
        sequence_report(call->attachment, m->sequence, &report);
        call->reply.sync_reply = (struct kvd_msg_sync_reply){
                .changes = {s->changes, (uint32_t)r * (uint32_t)sizeof *s->changes},
                .pending = report.pending,
                .copy_bytes = report.copy_bytes,
                .sketch_bytes = report.sketch_bytes,
        };
        return 0;
}

int handle_cool(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct kvd_msg_cool *m = &request->cool;
        int64_t n;
        int r = 0;

        if (m->how != KVD_COOL_DROP)
                r = client_needs_worker(c, "keeping a copy of blocks");
        if (r < 0)
                return r;
        if (m->how == 0)
                return client_refuse(c, -EINVAL, "how is 0; 1 spills, 2 makes vague, 3 drops");
        n = array_of_numbers(c, m->slots, "slots");
        if (n < 0)
                return (int)n;
        r = sequence_cool(call->attachment, m->sequence, m->how, c->server->scratch->numbers,
                          (uint32_t)n);
        if (r < 0)
                return client_store_failed(c, r);
        call->reply.cool_reply.cooling = (uint32_t)r;
        return 0;
}

int handle_revive(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct kvd_msg_revive *m = &request->revive;
        struct kvd_msg_revive_reply *answer = &call->reply.revive_reply;
        int64_t n;
        int r;

        if (m->how == 0)
                return client_refuse(c, -EINVAL, "how is 0; 1 is exactly, 2 approximately, 3 both");
        n = array_of_numbers(c, m->slots, "slots");
        if (n < 0)
                return (int)n;
        r = sequence_revive(call->attachment, m->sequence, m->how, c->server->scratch->numbers,
                            (uint32_t)n, &answer->exact, &answer->approx);
        return r < 0 ? client_store_failed(c, r) : 0;
}

int handle_compact(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct kvd_msg_compact *m = &request->compact;
        struct compact_request compact = {.first = m->first,
                                          .n = m->entries,
                                          .keep = m->keep,
                                          .scores = c->server->scratch->blocks};
        int64_t n = array_of_blocks(c, m->scores);
        int r;

        if (n < 0)
                return (int)n;
        compact.n_scores = (uint32_t)n;
        r = sequence_compact(call->attachment, m->sequence, &compact);
        if (r < 0)
                return client_store_failed(c, r);
        call->reply.compact_reply.entries = (uint32_t)r;
        return 0;
}
