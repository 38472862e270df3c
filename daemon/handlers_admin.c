/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/handlers.h"

#include <errno.h>
#include <string.h>

#include "daemon/log.h"
#include "daemon/worker_jobs.h"
#include "ipc/base/util.h"

int handle_space_set(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        const struct kvd_msg_space_set *m = &request->space_set;
        char key[64], value[256];
        struct space *space;
        int r;

        r = client_find_named(c, m->domain, m->space, &space);
        if (r < 0)
                return r;
        r = space_set(space, kvd_slice_copy(m->key, key, sizeof key), kvd_slice_copy(m->value, value, sizeof value));
        if (r < 0)
                return client_store_failed(c, r);
        log_info("client %u of domain %s set %s = %s of space '%s'", c->number, domain_config(c->domain)->name, key,
                 value, space_name(space));
        return 0;
}

int handle_space_delete(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        const struct kvd_msg_space_delete *m = &request->space_delete;
        char name[KVD_NAME_MAX + 1];
        const char *domain;
        struct space *space;
        int r;

        r = client_find_named(c, m->domain, m->space, &space);
        if (r < 0)
                return r;
        domain = domain_config(space_domain(space))->name;
        r = space_delete(space, m->force);
        if (r < 0)
                return client_store_failed(c, r);
        worker_look(c->server->worker); /* the worker maps the space's memory */
        log_info("client %u of domain %s deleted space '%s' of domain %s", c->number, domain_config(c->domain)->name,
                 kvd_slice_copy(m->space, name, sizeof name), domain);
        return 0;
}

int handle_block_map(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        const struct kvd_msg_block_map *m = &request->block_map;
        struct scratch *s = c->server->scratch;
        const struct kvd_index *ix;
        struct space *space;
        uint64_t total;
        uint32_t n;
        int r;

        r = client_find_named(c, m->domain, m->space, &space);
        if (r < 0)
                return r;
        ix = space_index(space);
        total = kvd_segments_ids(ix, atomic_load(&ix->n_segments));
        reply->msg.block_map_reply.total = (uint32_t)MIN(total, ix->capacity);
        reply->msg.block_map_reply.states.data = s->states;
        reply->msg.block_map_reply.parents.data = s->parents;
        n = m->parents ? ARRAY_SIZE(s->parents) : ARRAY_SIZE(s->states);
        n = space_map(space, m->first, n, s->states, m->parents ? s->parents : NULL);
        reply->msg.block_map_reply.states.size = n;
        reply->msg.block_map_reply.parents.size = m->parents ? n * (uint32_t)sizeof *s->parents : 0;
        return 0;
}

int handle_chain_info(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        const struct kvd_msg_chain_info *m = &request->chain_info;
        struct chain_info *chain = &c->server->scratch->chain;
        uint32_t cursor = m->cursor;
        struct space *space;
        int r;

        r = client_find_named(c, m->domain, m->space, &space);
        if (r < 0)
                return r;
        r = space_next_chain(space, &cursor, chain);
        if (r < 0)
                return client_refuse(c, r, "there are no more chains");
        reply->msg.chain_info_reply = (struct kvd_msg_chain_info_reply){
                .next = cursor,
                .leaf = chain->leaf,
                .group = chain->group,
                .blocks = chain->blocks,
                .shared_blocks = chain->shared_blocks,
                .tokens = chain->tokens,
                .pins = chain->pins,
                .idle_ticks = chain->idle_ticks,
                .head = {chain->head, chain->n_head * (uint32_t)sizeof chain->head[0]},
        };
        return 0;
}

int handle_check(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        const struct kvd_msg_check *m = &request->check;
        struct check_report *report = &c->server->scratch->report;
        uint32_t cursor = m->cursor;
        struct space *space;
        int r;

        r = client_find_named(c, m->domain, m->space, &space);
        if (r < 0)
                return r;
        memset(report, 0, sizeof *report);
        space_check(space, &cursor, report);
        reply->msg.check_reply = (struct kvd_msg_check_reply){
                .next = cursor,
                .checked = report->checked,
                .broken = report->broken,
                .first = kvd_slice_of(report->first),
        };
        if (report->broken)
                log_error("space '%s' is broken: %s", space_name(space), report->first);
        return 0;
}
