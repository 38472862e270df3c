/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The cache: a client takes blocks, fills them, publishes or returns them, and has others evicted.
 * Leases keep two clients from computing the same prefix at once.
 */

#include "daemon/handlers/handlers.h"

#include <errno.h>
#include <stdio.h>

#include "daemon/base/degraded.h"
#include "daemon/base/log.h"
#include "daemon/handlers/arrays.h"
#include "daemon/serve/mates.h"
#include "store/remote_tier.h"

static struct kvd_slice blocks_slice(const kvd_ref *blocks, uint32_t n) {
        return (struct kvd_slice){blocks, n * (uint32_t)sizeof *blocks};
}

/* Number of blocks of the space that a client holds. */
static uint64_t held_by(const struct client *c, const struct space *space) {
        for (uint32_t i = 0; i < CLIENT_SPACES; i++) {
                const struct attachment *a = c->spaces[i].attachment;

                if (a && attachment_space(a) == space)
                        return attachment_holds(a);
        }
        return 0;
}

/* Names the client that holds the most blocks of the space; "" if none holds any. */
static void name_holder(const struct server *server, const struct space *space, char *to,
                        size_t size) {
        const struct client *most = NULL;
        uint64_t n = 0;

        *to = 0;
        for (uint32_t i = 0; i < server->seats.n; i++) {
                const struct client *c = &server->seats.clients[i];
                uint64_t held = c->state >= CLIENT_ATTACHED ? held_by(c, space) : 0;

                most = held > n ? c : most;
                n = MAX(n, held);
        }
        if (most)
                snprintf(to, size, "; client %u (%s, process %d) holds most: %llu blocks",
                         most->number, most->name, most->peer.pid, (unsigned long long)n);
}

/* The refusal's text names the space and what its blocks are doing. */
static void tell_refusal(const struct client *c, const struct space *space) {
        char holder[160];

        name_holder(c->server, space, holder, sizeof holder);
        log_line(LOG_WARNING,
                 "client %u of domain %s (process %d) was refused blocks: %s%s; see kvctl clients",
                 c->number, domain_config(c->domain)->name, c->peer.pid,
                 store_why(c->server->store), holder);
}

static int refuse_allocation(struct client *c, const struct space *space, int error) {
        static struct log_limit limit;

        if (log_allow_rarely(&limit))
                tell_refusal(c, space);
        if (error == -ENOBUFS)
                degraded_note(full);
        return client_store_failed(c, error);
}

int handle_allocate(struct client *c, const struct kvd_msg *request, struct call *call) {
        struct scratch *s = c->server->scratch;
        int r;

        if (request->allocate.count == 0)
                return client_refuse(c, -EINVAL, "count is 0; ask for at least one block");
        r = space_allocate(call->attachment, request->allocate.count, s->blocks);
        if (r < 0)
                return refuse_allocation(c, attachment_space(call->attachment), r);
        call->reply.allocate_reply.blocks = blocks_slice(s->blocks, (uint32_t)r);
        call->reply.allocate_reply.more = r == 0;
        return 0;
}

int handle_release(struct client *c, const struct kvd_msg *request, struct call *call) {
        int64_t n;

        n = array_of_blocks(c, request->release.blocks);
        if (n < 0)
                return (int)n;
        attachment_withhold(call->attachment,
                            space_semaphore_fd(call->space) >= 0 && mates_may_write(c));
        call->reply.release_reply.released = space_release(call->attachment,
                                                           c->server->scratch->blocks, (uint32_t)n);
        return 0;
}

static int take_seal(struct client *c, const struct kvd_msg_seal *m, struct seal_request *ret) {
        int64_t n_blocks = array_of_blocks(c, m->blocks),
                n_tokens = n_blocks < 0 ? 0 : array_of_tokens(c, m->tokens);
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

/* The slice may be unaligned. */
static int take_promises(struct client *c, struct kvd_slice from, struct kvd_promise to[KVD_SHARDS],
                         struct seal_request *ret) {
        if (from.size % sizeof *to || from.size > KVD_SHARDS * sizeof *to)
                return client_refuse(c, -EINVAL, "promises are pieces of %zu bytes", sizeof *to);
        if (from.size)
                memcpy(to, from.data, from.size);
        ret->promises = to;
        ret->n_promises = from.size / (uint32_t)sizeof *to;
        return 0;
}

/*
 * A client that seals blocks will probably fill more, and so gets them without another message. If
 * there are none, the seal succeeds all the same.
 */
static struct kvd_slice fresh_blocks(struct client *c, struct call *call, uint32_t n) {
        kvd_ref *fresh = c->server->scratch->blocks;
        int r = n ? space_allocate(call->attachment, n, fresh) : 0;

        return blocks_slice(fresh, (uint32_t)MAX(r, 0));
}

int handle_seal(struct client *c, const struct kvd_msg *request, struct call *call) {
        kvd_ref *sealed = c->server->scratch->sealed;
        struct kvd_promise promises[KVD_SHARDS];
        struct seal_request seal;
        int r;

        r = take_seal(c, &request->seal, &seal);
        if (r == 0)
                r = take_promises(c, request->seal.promises, promises, &seal);
        if (r < 0)
                return r;
        r = space_seal(call->attachment, &seal, sealed);
        if (r < 0)
                return client_store_failed(c, r);
        if (seal.semaphore || seal.n_promises)
                shared_pages_watch_semaphores(&c->server->pages);
        call->reply.seal_reply.blocks = blocks_slice(sealed, seal.n_blocks);
        call->reply.seal_reply.fresh = fresh_blocks(c, call, request->seal.fresh);
        return 0;
}

/* The results of posts are in the client's page, so there is no reply. */
int handle_post(struct client *c, const struct kvd_msg *request, struct call *call) {
        c->rings = c->used;
        rounds_kicked(&c->server->rounds, c);
        client_take_ring(c);
        call->quiet = true;
        return 0;
}

/* Posts are taken when a request's attachment is found (requests.c). */
int handle_flush(struct client *c, const struct kvd_msg *request, struct call *call) {
        return 0;
}

int handle_lease(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct kvd_msg_lease *m = &request->lease;
        struct kvd_key prefix;
        int r;

        r = key_of(c, m->prefix_key, &prefix);
        if (r < 0)
                return r;
        if (m->op != 1 && m->op != 2)
                return client_refuse(c, -EINVAL, "op is %u; 1 begins a lease, 2 ends it", m->op);
        if (m->op == 1)
                r = space_lease(call->attachment, prefix, m->prefix_tokens);
        else
                space_lease_end(call->attachment, prefix, m->prefix_tokens);
        if (r < 0)
                return client_store_failed(c, r);
        call->reply.lease_reply.granted = (uint32_t)r;
        call->reply.lease_reply.epoch = atomic_load(
                &space_index(attachment_space(call->attachment))->lease_epoch);
        return 0;
}

int handle_evict(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct kvd_msg_evict *m = &request->evict;
        uint64_t *no_return = &call->reply.evict_reply.no_return;
        bool more = false;
        int64_t n;

        n = m->to == 1 ? space_demote(call->space) :
            m->to == 2 ? space_demoted(call->space, no_return) :
                         space_evict(call->space, m->blocks, m->chain, &more);
        if (n < 0)
                return client_store_failed(c, (int)n);
        if (m->to) {
                more = n > 0;
                n = 0;
        }
        call->reply.evict_reply.evicted = (uint64_t)n;
        call->reply.evict_reply.more = more;
        return 0;
}

/* The store owns the descriptor until the fetch has ended. */
int handle_fetch(struct client *c, const struct kvd_msg *request, struct call *call) {
        struct fetch_request fetch = {.group = request->fetch.group,
                                      .salt = request->fetch.salt,
                                      .tokens = c->server->scratch->tokens,
                                      .behind = request->fetch.behind,
                                      .before = request->fetch.before,
                                      .more = request->fetch.more};
        int64_t n = array_of_tokens(c, request->fetch.tokens), r;
        int fd;

        if (n < 0)
                return (int)n;
        fetch.n_tokens = (uint32_t)n;
        r = space_fetch(call->attachment, &fetch, &fd);
        if (r < 0)
                return client_store_failed(c, (int)r);
        call->reply.fetch_reply.tokens = (uint32_t)r;
        if (fd >= 0)
                call->fds.fd[call->fds.n++] = fd;
        return 0;
}
