/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/handlers.h"

#include <errno.h>

#include "daemon/log.h"
#include "daemon/arrays.h"

static struct kvd_slice blocks_slice(const kvd_ref *blocks, uint32_t n) {
        return (struct kvd_slice){blocks, n * (uint32_t)sizeof *blocks};
}

/* The refusal's text names the space and what its blocks are doing. */
static int refuse_allocation(struct client *c, int error) {
        log_rarely(LOG_WARNING, "client %u of domain %s (process %d) was refused blocks: %s; kvctl clients shows who holds "
                   "them", c->number, domain_config(c->domain)->name, c->peer.pid, store_why(c->server->store));
        return client_store_failed(c, error);
}

int handle_allocate(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        struct scratch *s = c->server->scratch;
        struct attachment *attachment;
        int r;

        r = client_find_space(c, request->allocate.space, &attachment);
        if (r < 0)
                return r;
        if (request->allocate.count == 0)
                return client_refuse(c, -EINVAL, "count is 0; ask for at least one block");
        r = space_allocate(attachment, request->allocate.count, s->blocks);
        if (r < 0)
                return refuse_allocation(c, r);
        reply->msg.allocate_reply.blocks = blocks_slice(s->blocks, (uint32_t)r);
        return 0;
}

int handle_release(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        struct attachment *attachment;
        int64_t n;
        int r;

        r = client_find_space(c, request->release.space, &attachment);
        if (r < 0)
                return r;
        n = array_of_blocks(c, request->release.blocks);
        if (n < 0)
                return (int)n;
        reply->msg.release_reply.released = space_release(attachment, c->server->scratch->blocks, (uint32_t)n);
        return 0;
}

static int take_seal(struct client *c, const struct kvd_msg_seal *m, struct seal_request *ret) {
        int64_t n_blocks = array_of_blocks(c, m->blocks), n_tokens = n_blocks < 0 ? 0 : array_of_tokens(c, m->tokens);
        struct scratch *s = c->server->scratch;

        if (n_blocks < 0 || n_tokens < 0)
                return -EINVAL;
        *ret = (struct seal_request){
                .group = m->group,
                .parent = m->parent,
                .root = m->root,
                .n_blocks = (uint32_t)n_blocks,
                .blocks = s->blocks,
                .n_tokens = (uint32_t)n_tokens,
                .tokens = s->tokens,
                .semaphore = m->semaphore,
                .semaphore_value = m->semaphore_value,
        };
        return key_of(c, m->prefix_key, &ret->prefix_key);
}

int handle_seal(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        kvd_ref *sealed = c->server->scratch->sealed;
        struct attachment *attachment;
        struct seal_request seal;
        int r;

        r = client_find_space(c, request->seal.space, &attachment);
        if (r < 0)
                return r;
        r = take_seal(c, &request->seal, &seal);
        if (r < 0)
                return r;
        r = space_seal(attachment, &seal, sealed);
        if (r < 0)
                return client_store_failed(c, r);
        if (seal.semaphore)
                server_watch_order(c->server);
        reply->msg.seal_reply.blocks = blocks_slice(sealed, seal.n_blocks);
        return 0;
}

int handle_lease(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        const struct kvd_msg_lease *m = &request->lease;
        struct attachment *attachment;
        struct kvd_key prefix;
        int r;

        r = client_find_space(c, m->space, &attachment);
        if (r < 0)
                return r;
        r = key_of(c, m->prefix_key, &prefix);
        if (r < 0)
                return r;
        if (m->op != 1 && m->op != 2)
                return client_refuse(c, -EINVAL, "op is %u; 1 begins a lease, 2 ends it", m->op);
        if (m->op == 1)
                r = space_lease(attachment, prefix, m->prefix_tokens);
        else
                space_lease_end(attachment, prefix, m->prefix_tokens);
        if (r < 0)
                return client_store_failed(c, r);
        reply->msg.lease_reply.granted = (uint32_t)r;
        reply->msg.lease_reply.epoch = atomic_load(&space_index(attachment_space(attachment))->lease_epoch);
        return 0;
}

int handle_evict(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        const struct kvd_msg_evict *m = &request->evict;
        struct space *space;
        bool more = false;
        int64_t n;
        int r;

        r = client_find_named(c, m->domain, m->space, &space);
        if (r < 0)
                return r;
        n = space_evict(space, m->blocks, m->chain, &more);
        if (n < 0)
                return client_store_failed(c, (int)n);
        reply->msg.evict_reply.evicted = (uint64_t)n;
        reply->msg.evict_reply.more = more;
        return 0;
}
