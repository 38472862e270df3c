/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Prefetches what is stored below the pool. The daemon starts loading and replies at once. The
 * descriptor becomes readable when loading has ended; a lookup then finds what was loaded.
 */

#include <errno.h>

#include "client/internal.h"
#include "ipc/base/util.h"

static_assert(KVD_MOST_fetch_tokens == KVD_FETCH_TOKENS * sizeof(uint32_t),
              "a request holds all tokens that a fetch can load");

static int ask(struct kvd_space *space, struct kvd_msg_fetch *request,
               struct kvd_msg_fetch_reply *reply, int *fd) {
        struct kvd_fds fds = {.n = 0};
        struct view *view;
        int r = view_attach(space, &view);

        if (r < 0)
                return r;
        request->space = view->handle;
        r = handle_call(space->handle, KVD_MSG_fetch, request, reply, &fds);
        if (r == 0 && fds.n)
                *fd = fds.fd[--fds.n];
        kvd_fds_close(&fds);
        return r;
}

int64_t fetch_chain(struct kvd_space *space, uint32_t group, uint64_t salt, const uint32_t *tokens,
                    uint32_t n_tokens, int *fd) {
        struct kvd_msg_fetch request = {.group = group,
                                        .salt = salt,
                                        .tokens = {tokens, n_tokens * (uint32_t)sizeof *tokens}};
        struct kvd_msg_fetch_reply reply;
        int r = handle_lock(space->handle);

        if (r < 0)
                return r;
        r = ask(space, &request, &reply, fd);
        handle_unlock(space->handle);
        return r < 0 ? r : (int64_t)reply.tokens;
}

int64_t kvd_fetch(struct kvd_space *space, uint32_t group, uint64_t salt, const uint32_t *tokens,
                  uint32_t n_tokens, int *fd) {
        uint32_t n = MIN(n_tokens, KVD_FETCH_TOKENS);

        *fd = -1;
        if (space_check(space) < 0)
                return -ECHILD;
        if (group == KVD_GROUP_KEYED)
                return client_fail(-EINVAL, "there is no layer group %u", group);
        if (space->options.kind == KVD_BIDIRECTIONAL && salt)
                return client_fail(-EINVAL,
                                   "salts are for causal spaces: a bidirectional prefix is "
                                   "found by all of its tokens");
        if (space->options.kind == KVD_BIDIRECTIONAL && n < n_tokens)
                return kvd_match(space, group, tokens, n_tokens); /* no tier stores one that long */
        return fetch_chain(space, group, salt, tokens, n, fd);
}
