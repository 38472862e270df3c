/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/handlers.h"

#include <errno.h>
#include <string.h>

#include "daemon/log.h"
#include "daemon/arrays.h"
#include "daemon/worker_jobs.h"
#include "ipc/base/summary.h"
#include "ipc/base/util.h"

/* ---- HShare ---------------------------------------------------------------------------------------------------- */

static int make_configuration(struct client *c, struct attachment *attachment, const struct kvd_msg_critical *m) {
        struct critical_request critical = {.blocks = c->server->scratch->blocks, .queries = m->queries,
                                            .words = m->words, .selected = m->selected};
        int64_t n;
        int r;

        if (!worker_is_on(c->server->worker))
                return client_refuse(c, -EOPNOTSUPP, "a sharing configuration needs a worker, and this daemon runs "
                                     "none; see worker in kvd.conf");
        n = array_of_blocks(c, m->blocks);
        if (n < 0)
                return (int)n;
        critical.n_blocks = (uint32_t)n;
        r = sequence_critical(attachment, m->sequence, &critical);
        return r < 0 ? client_store_failed(c, r) : 0;
}

static int tell_configuration(struct client *c, struct attachment *attachment, uint32_t sequence,
                              struct kvd_msg_critical_reply *reply) {
        const struct kvd_geometry *g = &space_index(attachment_space(attachment))->geometry;
        struct scratch *s = c->server->scratch;
        int r;

        if (g->layers > sizeof s->layers || (uint64_t)g->layers * g->kv_heads > sizeof s->heads)
                return client_refuse(c, -E2BIG, "the answer would not fit: at most %zu layers and %zu heads of them",
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

int handle_critical(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        const struct kvd_msg_critical *m = &request->critical;
        struct attachment *attachment;
        int r;

        r = client_find_space(c, m->space, &attachment);
        if (r < 0)
                return r;
        if (m->op == 1)
                return make_configuration(c, attachment, m);
        if (m->op == 2)
                return tell_configuration(c, attachment, m->sequence, &reply->msg.critical_reply);
        return client_refuse(c, -EINVAL, "op is %u; 1 makes a configuration, 2 asks for it", m->op);
}

int handle_summaries(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        struct attachment *attachment;
        struct space *space;
        int r;

        r = client_find_space(c, request->summaries.space, &attachment);
        if (r < 0)
                return r;
        space = attachment_space(attachment);
        r = space_summary_fd(space, false);
        if (r < 0)
                return client_store_failed(c, r);
        reply->fds.fd[0] = r;
        reply->fds.n = 1;
        reply->msg.summaries_reply.bytes = kvd_summary_of(space_index(space)).size;
        return 0;
}

/* ---- BiCache --------------------------------------------------------------------------------------------------- */

int handle_sample(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        const struct kvd_msg_sample *m = &request->sample;
        struct attachment *attachment;
        int64_t n;
        int r;

        r = client_find_space(c, m->space, &attachment);
        if (r < 0)
                return r;
        if (!worker_is_on(c->server->worker))
                return client_refuse(c, -EOPNOTSUPP, "a profile needs a worker, and this daemon runs none; see worker "
                                     "in kvd.conf");
        n = array_of_blocks(c, m->blocks);
        if (n < 0)
                return (int)n;
        r = space_sample(attachment, m->r, m->tokens, c->server->scratch->blocks, (uint32_t)n,
                         &reply->msg.sample_reply.ticket);
        return r < 0 ? client_store_failed(c, r) : 0;
}

int handle_sample_done(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        struct attachment *attachment;
        int r;

        r = client_find_space(c, request->sample_done.space, &attachment);
        if (r < 0)
                return r;
        r = space_sample_done(attachment, request->sample_done.ticket);
        if (r < 0)
                return client_store_failed(c, r);
        reply->msg.sample_done_reply.done = (uint32_t)r;
        return 0;
}

static int import_profile(struct client *c, struct space *space, const struct kvd_msg_profile *m) {
        uint8_t depth[101];

        if (m->depth.size != sizeof depth)
                return client_refuse(c, -EINVAL, "a table has 101 depths, for 0 to 100 percent; this one has %u",
                                     m->depth.size);
        if (m->def == 0)
                return client_refuse(c, -EINVAL, "def is missing: 1 the ratio includes generated tokens, 2 not");
        memcpy(depth, m->depth.data, sizeof depth);
        return space_profile_import(space, depth, m->def);
}

enum { PROFILE_SHOW = 1, PROFILE_FORGET, PROFILE_BUILD, PROFILE_IMPORT };

static int change_profile(struct client *c, struct space *space, const struct kvd_msg_profile *m) {
        static const char *const what[] = {[PROFILE_FORGET] = "forgotten", [PROFILE_BUILD] = "built",
                                           [PROFILE_IMPORT] = "imported"};
        int r = 0;

        c->server->scratch->why[0] = 0;
        if (m->op == PROFILE_FORGET)
                space_profile_forget(space);
        else
                r = m->op == PROFILE_BUILD ? space_profile_build(space) : import_profile(c, space, m);
        if (r < 0)
                return c->server->scratch->why[0] ? r : client_store_failed(c, r);
        log_info("client %u of domain %s: the BiCache table of space '%s' was %s", c->number,
                 domain_config(c->domain)->name, space_name(space), what[m->op]);
        return 0;
}

static void tell_profile(struct scratch *s, struct space *space, struct kvd_msg_profile_reply *reply) {
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

/* Whatever was asked for, the answer says how things are now. */
int handle_profile(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        const struct kvd_msg_profile *m = &request->profile;
        struct space *space;
        int r;

        r = client_find_named(c, m->domain, m->space, &space);
        if (r < 0)
                return r;
        if (m->op == 0)
                return client_refuse(c, -EINVAL, "op is 0; 1 shows, 2 forgets, 3 builds, 4 imports");
        if (m->op != PROFILE_SHOW) {
                r = change_profile(c, space, m);
                if (r < 0)
                        return r;
        }
        tell_profile(c->server->scratch, space, &reply->msg.profile_reply);
        return 0;
}
