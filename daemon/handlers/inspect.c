/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Inspection of a space: its blocks' states, pins, chains and invariants, and the pages that
 * followers read. Each reply is a piece of the whole, and the next request continues where it
 * ended.
 */

#include "daemon/handlers/handlers.h"

#include <errno.h>
#include <string.h>

#include "daemon/base/log.h"
#include "ipc/base/shared_file.h"
#include "ipc/base/util.h"

/* ---- blocks ---------------------------------------------------------------------------------- */

int handle_block_map(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct kvd_msg_block_map *m = &request->block_map;
        struct scratch *s = c->server->scratch;
        const struct kvd_index *ix = space_index(call->space);
        uint64_t total = kvd_segments_ids(ix, atomic_load(&ix->n_segments));
        struct map_room room = {s->states, m->parents ? s->parents : NULL,
                                m->ages ? s->ages : NULL};
        uint32_t n = m->parents ? ARRAY_SIZE(s->parents) : ARRAY_SIZE(s->states);

        call->reply.block_map_reply.total = (uint32_t)MIN(total, ix->capacity);
        call->reply.block_map_reply.states.data = s->states;
        call->reply.block_map_reply.parents.data = s->parents;
        call->reply.block_map_reply.ages.data = s->ages;
        n = space_map(call->space, m->first, m->ages ? MIN(n, ARRAY_SIZE(s->ages)) : n, &room);
        call->reply.block_map_reply.states.size = n;
        call->reply.block_map_reply.parents.size = m->parents ? n * (uint32_t)sizeof *s->parents :
                                                                0;
        call->reply.block_map_reply.ages.size = m->ages ? n : 0;
        return 0;
}

int handle_chain_info(struct client *c, const struct kvd_msg *request, struct call *call) {
        struct chain_info *chain = &c->server->scratch->chain;
        uint32_t cursor = request->chain_info.cursor, above = request->chain_info.above;
        int r = space_next_chain(call->space, &cursor, &above, chain);

        if (r < 0)
                return client_refuse(c, r, "there are no more chains");
        call->reply.chain_info_reply = (struct kvd_msg_chain_info_reply){
                .next = cursor,
                .above = above,
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

int handle_check(struct client *c, const struct kvd_msg *request, struct call *call) {
        struct check_report *report = &c->server->scratch->report;
        uint64_t cursor = request->check.cursor;

        memset(report, 0, sizeof *report);
        space_check(call->space, &cursor, report);
        call->reply.check_reply = (struct kvd_msg_check_reply){
                .next = cursor,
                .partial = report->partial,
                .checked = report->checked,
                .broken = report->broken,
                .first = kvd_slice_of(report->first),
        };
        if (report->broken)
                log_limited(LOG_ERR, "space '%s' is broken: %s", space_name(call->space),
                            report->first);
        return 0;
}

/* ---- pins ------------------------------------------------------------------------------------ */

static const struct attachment *find_attachment(const struct client *c, const struct space *space) {
        for (uint32_t i = 0; i < CLIENT_SPACES; i++)
                if (c->spaces[i].attachment && attachment_space(c->spaces[i].attachment) == space)
                        return c->spaces[i].attachment;
        return NULL;
}

/* A client that is gone, or does not use the space, has no pins. */
int handle_pins(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct kvd_msg_pins *m = &request->pins;
        const struct attachment *attachment = NULL;
        uint32_t *ids = c->server->scratch->ids, n = 0, cursor = m->first;
        const struct client *other;
        struct domain *domain;
        int r = client_find_domain(c, m->client_domain, &domain);

        if (r < 0)
                return r;
        other = client_by_number(&c->server->seats, domain, m->client);
        if (other)
                attachment = find_attachment(other, call->space);
        if (attachment)
                n = attachment_pins(attachment, &cursor, ids, ARRAY_SIZE(c->server->scratch->ids));
        call->reply.pins_reply.ids = (struct kvd_slice){ids, n * (uint32_t)sizeof *ids};
        call->reply.pins_reply.next = attachment ? cursor : 0;
        return 0;
}

/* ---- following ------------------------------------------------------------------------------- */

static const struct client *next_user(const struct seats *seats, const struct space *space,
                                      uint32_t *at, const struct attachment **ret) {
        for (; *at < seats->n; (*at)++) {
                const struct client *c = &seats->clients[*at];

                *ret = c->n_spaces ? find_attachment(c, space) : NULL;
                if (*ret)
                        return c;
        }
        return NULL;
}

/* Only the client itself may write to its page: followers get a descriptor for reading only. */
static int give_page(struct client *c, uint32_t at, struct call *call) {
        struct kvd_msg_follow_reply *m = &call->reply.follow_reply;
        const struct attachment *attachment;
        const struct client *user = next_user(&c->server->seats, call->space, &at, &attachment);

        if (!user)
                return client_refuse(c, -ENOENT, "there are no more clients");
        call->own_fd = shared_file_for_reading(attachment_pin_fd(attachment));
        if (call->own_fd < 0)
                return client_refuse(c, -ENOMEM, "a client's page cannot be opened again: %s",
                                     strerror(-call->own_fd));
        m->next = at + 2;
        m->bytes = attachment_pin_bytes(attachment);
        m->client = user->number;
        call->fds.fd[call->fds.n++] = call->own_fd;
        return 0;
}

/* A client that may name the space may also attach to it, and would get the same index. */
int handle_follow(struct client *c, const struct kvd_msg *request, struct call *call) {
        struct kvd_msg_follow_reply *m = &call->reply.follow_reply;

        if (request->follow.cursor) {
                client_follow(c, call->space);
                return give_page(c, request->follow.cursor - 1, call);
        }
        m->next = 1;
        m->bytes = space_index(call->space)->size;
        call->fds.fd[call->fds.n++] = space_index_fd(call->space);
        return 0;
}
