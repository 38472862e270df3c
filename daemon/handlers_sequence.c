/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/handlers.h"

#include <errno.h>

#include "daemon/arrays.h"
#include "daemon/worker_jobs.h"
#include "ipc/base/util.h"

/*
 * What only a worker can do is refused where there is none, at once and in words. What would merely be better with one
 * (labels, scores) is not asked for by a message.
 */
static int check_worker(struct client *c, const char *what) {
        if (worker_is_on(c->server->worker))
                return 0;
        return client_refuse(c, -EOPNOTSUPP, "%s needs a worker, and this daemon runs none; see worker in kvd.conf",
                             what);
}

static bool is_on(struct attachment *attachment, enum kvd_setting which) {
        return kvd_setting_on(space_index(attachment_space(attachment))->settings, which);
}

int handle_table(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        const struct kvd_msg_table *m = &request->table;
        struct attachment *attachment;
        int r;

        r = client_find_space(c, m->space, &attachment);
        if (r < 0)
                return r;
        reply->msg.table_reply.sequence = m->sequence;
        if (m->op == 1)
                r = sequence_open(attachment, m->max_blocks, &reply->msg.table_reply.sequence);
        else if (m->op == 2)
                r = sequence_close(attachment, m->sequence);
        else
                return client_refuse(c, -EINVAL, "op is %u; 1 opens a sequence, 2 closes it", m->op);
        return r < 0 ? client_store_failed(c, r) : 0;
}

int handle_append(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        const struct kvd_msg_append *m = &request->append;
        struct scratch *s = c->server->scratch;
        struct append_request append = {.own = m->own, .blocks = s->blocks, .tokens = s->tokens};
        struct attachment *attachment;
        int64_t n_blocks, n_tokens;
        int r;

        r = client_find_space(c, m->space, &attachment);
        if (r < 0)
                return r;
        n_blocks = array_of_blocks(c, m->blocks);
        n_tokens = n_blocks < 0 ? 0 : array_of_tokens(c, m->tokens);
        if (n_blocks < 0 || n_tokens < 0)
                return -EINVAL;
        append.n_blocks = (uint32_t)n_blocks;
        append.n_tokens = (uint32_t)n_tokens;
        r = sequence_append(attachment, m->sequence, &append, &reply->msg.append_reply.first);
        return r < 0 ? client_store_failed(c, r) : 0;
}

int handle_share(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        const struct kvd_msg_share *m = &request->share;
        struct attachment *attachment;
        int r;

        r = client_find_space(c, m->space, &attachment);
        if (r >= 0 && is_on(attachment, KVD_memshare_on))
                r = check_worker(c, "MemShare");
        if (r < 0)
                return r;
        r = sequence_share(attachment, m->sequence, m->first, m->tokens);
        if (r < 0)
                return client_store_failed(c, r);
        reply->msg.share_reply.queued = (uint32_t)r;
        return 0;
}

int handle_sync(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        const struct kvd_msg_sync *m = &request->sync;
        struct scratch *s = c->server->scratch;
        struct sequence_report report;
        struct attachment *attachment;
        int64_t n;
        int r;

        r = client_find_space(c, m->space, &attachment);
        if (r < 0)
                return r;
        n = array_of_numbers(c, m->taken, "taken");
        if (n < 0)
                return (int)n;
        r = sequence_sync(attachment, m->sequence, s->numbers, (uint32_t)n, s->changes);
        if (r < 0)
                return client_store_failed(c, r);
        sequence_report(attachment, m->sequence, &report);
        reply->msg.sync_reply = (struct kvd_msg_sync_reply){
                .changes = {s->changes, (uint32_t)r * (uint32_t)sizeof *s->changes},
                .pending = report.pending,
                .copy_bytes = report.copy_bytes,
                .sketch_bytes = report.sketch_bytes,
        };
        return 0;
}

int handle_cool(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        const struct kvd_msg_cool *m = &request->cool;
        struct attachment *attachment;
        int64_t n;
        int r;

        r = client_find_space(c, m->space, &attachment);
        if (r >= 0 && m->how != KVD_COOL_DROP)
                r = check_worker(c, "keeping a copy of blocks");
        if (r < 0)
                return r;
        if (m->how == 0)
                return client_refuse(c, -EINVAL, "how is 0; 1 spills, 2 makes vague, 3 drops");
        n = array_of_numbers(c, m->slots, "slots");
        if (n < 0)
                return (int)n;
        r = sequence_cool(attachment, m->sequence, m->how, c->server->scratch->numbers, (uint32_t)n);
        if (r < 0)
                return client_store_failed(c, r);
        reply->msg.cool_reply.cooling = (uint32_t)r;
        return 0;
}

int handle_revive(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        const struct kvd_msg_revive *m = &request->revive;
        struct kvd_msg_revive_reply *answer = &reply->msg.revive_reply;
        struct attachment *attachment;
        int64_t n;
        int r;

        r = client_find_space(c, m->space, &attachment);
        if (r >= 0)
                r = check_worker(c, "reviving blocks");
        if (r < 0)
                return r;
        if (m->how == 0)
                return client_refuse(c, -EINVAL, "how is 0; 1 is exactly, 2 approximately, 3 both");
        n = array_of_numbers(c, m->slots, "slots");
        if (n < 0)
                return (int)n;
        r = sequence_revive(attachment, m->sequence, m->how, c->server->scratch->numbers, (uint32_t)n, &answer->exact,
                            &answer->approx);
        return r < 0 ? client_store_failed(c, r) : 0;
}

int handle_compact(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        const struct kvd_msg_compact *m = &request->compact;
        struct attachment *attachment;
        int r;

        r = client_find_space(c, m->space, &attachment);
        if (r >= 0)
                r = check_worker(c, "KeyDiff");
        if (r < 0)
                return r;
        r = sequence_compact(attachment, m->sequence, m->first, m->entries, m->keep);
        if (r < 0)
                return client_store_failed(c, r);
        reply->msg.compact_reply.entries = (uint32_t)r;
        return 0;
}
