/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sessions of agents (store/cache/session.c). They belong to the user of the connection, which the
 * kernel reports, and only that user and administrators see and end them.
 */

#include "daemon/handlers/handlers.h"

#include <errno.h>

#include "client/kvd.h"
#include "daemon/handlers/arrays.h"

static_assert(KVD_SESSION_SECONDS == STORE_SESSION_TTL_S, "kvd.h and store.h differ");

int handle_session(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct kvd_msg_session *m = &request->session;
        int64_t n = array_of_blocks(c, m->blocks), r;
        char name[KVD_MOST_session_name + 1];

        if (n < 0)
                return (int)n;
        kvd_slice_copy(m->name, name, sizeof name);
        r = space_session(call->attachment,
                          &(struct session_request){.name = name,
                                                    .user = c->peer.uid,
                                                    .keep = m->keep,
                                                    .ttl_s = m->seconds,
                                                    .n_blocks = (uint32_t)n,
                                                    .blocks = c->server->scratch->blocks});
        return r < 0 ? client_store_failed(c, (int)r) : 0;
}

int handle_session_end(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct kvd_msg_session_end *m = &request->session_end;
        uint32_t user = m->user ? (uint32_t)(m->user - 1) : c->peer.uid;
        char name[KVD_MOST_session_end_name + 1];
        int r;

        if (user != c->peer.uid && !c->admin)
                return client_refuse(c, -EPERM,
                                     "only administrators may end sessions of other users; see "
                                     "admins in kvd.conf");
        kvd_slice_copy(m->name, name, sizeof name);
        r = space_session_end(call->space, user, name);
        return r < 0 ? client_store_failed(c, r) : 0;
}

int handle_session_info(struct client *c, const struct kvd_msg *request, struct call *call) {
        struct session_info *info = &c->server->scratch->session;
        uint32_t cursor = request->session_info.cursor;

        if (!space_next_session(call->space, c->admin ? NULL : &c->peer.uid, &cursor, info))
                return client_refuse(c, -ENOENT, "there are no more sessions");
        call->reply.session_info_reply = (struct kvd_msg_session_info_reply){
                .next = cursor,
                .name = kvd_slice_of(info->name),
                .uid = info->user,
                .keep = info->keep,
                .blocks = info->blocks,
                .bytes = info->blocks * space_index(call->space)->block_bytes,
                .left_ms = info->left_ms,
        };
        return 0;
}
