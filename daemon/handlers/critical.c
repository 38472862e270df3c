/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Configurations of shared selections, which name each layer's and head's source and are made from a
 * client's selections, and the summaries that hold the labels of tokens.
 */

#include "daemon/handlers/handlers.h"

#include <errno.h>

#include "daemon/handlers/arrays.h"
#include "ipc/base/summary.h"

static int make_configuration(struct client *c, struct attachment *attachment,
                              const struct kvd_msg_critical *m) {
        struct critical_request critical = {.blocks = c->server->scratch->blocks,
                                            .queries = m->queries,
                                            .words = m->words,
                                            .selected = m->selected};
        int64_t n;
        int r;

        r = client_needs_worker(c, "a sharing configuration");
        n = r < 0 ? r : array_of_blocks(c, m->blocks);
        if (n < 0)
                return (int)n;
        critical.n_blocks = (uint32_t)n;
        r = sequence_critical(attachment, m->sequence, &critical);
        return r < 0 ? client_store_failed(c, r) : 0;
}

static int tell_configuration(struct client *c, struct attachment *attachment, uint32_t sequence,
                              struct kvd_msg_critical_reply *reply) {
        const struct kvd_shape *g = &space_index(attachment_space(attachment))->geometry;
        struct scratch *s = c->server->scratch;
        int r;

        if (g->layers > sizeof s->layers || (uint64_t)g->layers * g->kv_heads > sizeof s->heads)
                return client_refuse(c, -E2BIG,
                                     "the reply would not fit: at most %zu layers "
                                     "and %zu heads in all layers",
                                     sizeof s->layers, sizeof s->heads);
        r = sequence_sharing(attachment, sequence, s->layers, s->heads);
        if (r < 0)
                return client_store_failed(c, r);
        reply->ready = r > 0;
        if (r > 0) {
                reply->layers = (struct kvd_slice){s->layers, g->layers};
                reply->heads = (struct kvd_slice){s->heads, g->layers * g->kv_heads};
        }
        return 0;
}

int handle_critical(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct kvd_msg_critical *m = &request->critical;

        if (m->op == 1)
                return make_configuration(c, call->attachment, m);
        if (m->op == 2)
                return tell_configuration(c, call->attachment, m->sequence,
                                          &call->reply.critical_reply);
        return client_refuse(c, -EINVAL, "op is %u; 1 makes a configuration, 2 asks for it", m->op);
}

int handle_summaries(struct client *c, const struct kvd_msg *request, struct call *call) {
        int fd = space_summary_fd(call->space, false);

        if (fd < 0)
                return client_store_failed(c, fd);
        call->fds.fd[0] = fd;
        call->fds.n = 1;
        call->reply.summaries_reply.bytes = kvd_summary_of(space_index(call->space)).size;
        return 0;
}
