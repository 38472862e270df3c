/* SPDX-License-Identifier: Apache-2.0 */

/*
 * BiCache's profile of a space. Clients sample how similar a prefix is with and without the tokens
 * that follow it. A table of depths is built from the samples, shown, forgotten, or imported.
 */

#include "daemon/handlers/handlers.h"

#include <errno.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/handlers/arrays.h"

int handle_sample(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct kvd_msg_sample *m = &request->sample;
        int64_t n;
        int r;

        n = array_of_blocks(c, m->blocks);
        if (n < 0)
                return (int)n;
        r = space_sample(call->attachment, m->r, m->tokens, c->server->scratch->blocks, (uint32_t)n,
                         &call->reply.sample_reply.ticket);
        return r < 0 ? client_store_failed(c, r) : 0;
}

int handle_sample_done(struct client *c, const struct kvd_msg *request, struct call *call) {
        int r = space_sample_done(call->attachment, request->sample_done.ticket);

        if (r < 0)
                return client_store_failed(c, r);
        call->reply.sample_done_reply.done = (uint32_t)r;
        return 0;
}

static int import_profile(struct client *c, struct space *space, const struct kvd_msg_profile *m) {
        uint8_t depth[KVD_MOST_profile_depth];

        if (m->depth.size != sizeof depth)
                return client_refuse(
                        c, -EINVAL, "a table has 101 depths, for 0 to 100 percent; this one has %u",
                        m->depth.size);
        if (m->def == 0)
                return client_refuse(
                        c, -EINVAL,
                        "def is missing: 1: the ratio includes generated tokens, 2: it does not");
        memcpy(depth, m->depth.data, sizeof depth);
        return space_profile_import(space, depth, m->def);
}

enum { PROFILE_SHOW = 1, PROFILE_FORGET, PROFILE_BUILD, PROFILE_IMPORT };

static int change_profile(struct client *c, struct space *space, const struct kvd_msg_profile *m) {
        static const char *const what[] = {[PROFILE_FORGET] = "forgotten",
                                           [PROFILE_BUILD] = "built",
                                           [PROFILE_IMPORT] = "imported"};
        int r = 0;

        c->server->scratch->why.line[0] = 0;
        if (m->op == PROFILE_FORGET)
                space_profile_forget(space);
        else
                r = m->op == PROFILE_BUILD ? space_profile_build(space) :
                                             import_profile(c, space, m);
        if (r < 0)
                return c->server->scratch->why.line[0] ? r : client_store_failed(c, r);
        log_limited(LOG_INFO, "client %u of domain %s: the BiCache table of space '%s' was %s",
                    c->number, domain_config(c->domain)->name, space_name(space), what[m->op]);
        return 0;
}

static void tell_profile(struct scratch *s, struct space *space,
                         struct kvd_msg_profile_reply *reply) {
        struct profile_report *p = &s->profile;

        memset(p, 0, sizeof *p);
        space_profile(space, p);
        *reply = (struct kvd_msg_profile_reply){
                .layers = p->layers,
                .def = p->def,
                .depth = {p->depth, p->def ? sizeof p->depth : 0},
                .samples = {p->samples, sizeof p->samples},
                .similarity = {p->similarity, p->n_similarity * (uint32_t)sizeof *p->similarity},
        };
}

/* The reply always describes the profile as it is after the request. */
int handle_profile(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct kvd_msg_profile *m = &request->profile;
        int r;

        if (m->op == 0)
                return client_refuse(c, -EINVAL,
                                     "op is 0; 1 shows, 2 forgets, 3 builds, 4 imports");
        if (m->op != PROFILE_SHOW) {
                r = change_profile(c, call->space, m);
                if (r < 0)
                        return r;
        }
        tell_profile(c->server->scratch, call->space, &call->reply.profile_reply);
        return 0;
}
