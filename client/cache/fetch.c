/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Prefetches what is stored below the pool. The daemon starts loading and replies at once. The
 * descriptor becomes readable when loading has ended; a lookup then finds what was loaded.
 */

#include <errno.h>

#include "client/internal.h"
#include "ipc/base/util.h"

static_assert(KVD_MOST_fetch_tokens == KVD_FETCH_TOKENS * sizeof(uint32_t),
              "a request holds all tokens that a fetch of a causal chain can load");

/* pinned: the view of the chain that the request continues, or NULL. */
static int ask(struct kvd_space *space, const struct view *pinned, struct kvd_msg_fetch *request,
               struct kvd_msg_fetch_reply *reply, int *fd) {
        struct kvd_fds fds = {.n = 0};
        struct view *view;
        int r = view_attach(space, &view);

        if (r < 0)
                return r;
        if (pinned && pinned != view)
                return client_fail(-ESTALE, "the daemon was replaced");
        request->space = view->handle;
        r = handle_call(space->handle, KVD_MSG_fetch, request, reply, &fds);
        if (r == 0 && fds.n)
                *fd = fds.fd[--fds.n];
        kvd_fds_close(&fds);
        return r;
}

/* Fetches tokens behind the pinned chain. */
static int64_t fetch_behind(struct kvd_space *space, const struct kvd_pin *pin,
                            const uint32_t *tokens, uint32_t n_tokens, int *fd) {
        struct kvd_msg_fetch request = {.group = pin->group,
                                        .salt = pin->salt,
                                        .behind = chain_end(pin),
                                        .tokens = {tokens, n_tokens * (uint32_t)sizeof *tokens}};
        struct kvd_msg_fetch_reply reply;
        int r = handle_lock(space->handle);

        if (r < 0)
                return r;
        r = ask(space, pin->view, &request, &reply, fd);
        handle_unlock(space->handle);
        return r < 0 ? r : (int64_t)reply.tokens;
}

int64_t fetch_chain(struct kvd_space *space, uint32_t group, uint64_t salt, const uint32_t *tokens,
                    uint32_t n_tokens, int *fd) {
        const struct kvd_pin none = {.group = group, .salt = salt};

        return fetch_behind(space, &none, tokens, n_tokens, fd);
}

/* Does a request for all tokens of a chain end before some of them? */
static bool is_long(const struct kvd_space *space, uint32_t n_tokens) {
        return space->options.kind != KVD_BIDIRECTIONAL &&
               (n_tokens > KVD_FETCH_TOKENS ||
                n_tokens / space->geometry.block_tokens > KVD_FETCH_DEPTH);
}

/* Sends only the tokens behind the resident ones, which are held meanwhile. */
static int64_t fetch_rest(struct kvd_space *space, uint32_t group, uint64_t salt,
                          const uint32_t *tokens, uint32_t n_tokens, int *fd) {
        struct kvd_pin pin = {.group = group, .salt = salt};
        int64_t r = -ESTALE;

        if (lookup_hold(space, tokens, n_tokens, &pin)) {
                r = fetch_behind(space, &pin, tokens + pin.n_tokens,
                                 MIN(n_tokens - pin.n_tokens, KVD_FETCH_TOKENS), fd);
                kvd_unpin(space, &pin);
        }
        return r != -ESTALE ?
                       r :
                       fetch_chain(space, group, salt, tokens, MIN(n_tokens, KVD_FETCH_TOKENS), fd);
}

/* Sends the tokens of a long bidirectional prefix, as much at a time as a request holds. */
static int64_t send_parts(struct kvd_space *space, uint32_t group, const uint32_t *tokens,
                          uint32_t n_tokens, int *fd) {
        struct kvd_msg_fetch_reply reply = {0};
        int r = 0;

        for (uint32_t at = 0, n; r == 0 && at < n_tokens; at += n) {
                n = MIN(n_tokens - at, KVD_FETCH_TOKENS);
                r = ask(space, NULL,
                        &(struct kvd_msg_fetch){.group = group,
                                                .tokens = {tokens + at,
                                                           n * (uint32_t)sizeof *tokens},
                                                .before = at,
                                                .more = at + n < n_tokens},
                        &reply, fd);
        }
        return r < 0 ? r : (int64_t)reply.tokens;
}

static int64_t fetch_in_parts(struct kvd_space *space, uint32_t group, const uint32_t *tokens,
                              uint32_t n_tokens, int *fd) {
        int64_t r = handle_lock(space->handle);

        if (r < 0)
                return r;
        r = send_parts(space, group, tokens, n_tokens, fd);
        handle_unlock(space->handle);
        return r;
}

int64_t kvd_fetch(struct kvd_space *space, uint32_t group, uint64_t salt, const uint32_t *tokens,
                  uint32_t n_tokens, int *fd) {
        *fd = -1;
        if (space_check(space) < 0)
                return -ECHILD;
        if (group == KVD_GROUP_KEYED)
                return client_fail(-EINVAL, "there is no layer group %u", group);
        if (space->options.kind == KVD_BIDIRECTIONAL && salt)
                return client_fail(-EINVAL,
                                   "salts are for causal spaces: a bidirectional prefix is "
                                   "found by all of its tokens");
        if (space->options.kind == KVD_BIDIRECTIONAL && n_tokens > KVD_WHOLE_TOKENS)
                return kvd_match(space, group, tokens, n_tokens); /* no tier stores one that long */
        if (space->options.kind == KVD_BIDIRECTIONAL && n_tokens > KVD_FETCH_TOKENS)
                return fetch_in_parts(space, group, tokens, n_tokens, fd);
        return (is_long(space, n_tokens) ? fetch_rest : fetch_chain)(space, group, salt, tokens,
                                                                     n_tokens, fd);
}
