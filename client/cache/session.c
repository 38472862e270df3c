/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sessions of agents: the daemon gets the deepest block of each chain. The pins hold these blocks
 * until it has them.
 */

#include <errno.h>
#include <string.h>

#include "client/internal.h"
#include "ipc/base/util.h"

static_assert(KVD_MOST_session_blocks == KVD_SESSION_PINS * sizeof(kvd_ref),
              "a request holds the ends of all chains of a session");

/* Returns the number of chains, or -ESTALE if a pin is of another daemon. */
static int ends_of(const struct view *view, const struct kvd_pin *pins, uint32_t n_pins,
                   kvd_ref *ret) {
        int n = 0;

        for (uint32_t i = 0; i < n_pins; i++) {
                if (!pins[i].view)
                        continue;
                if (pins[i].view != view)
                        return client_fail(-ESTALE, "a pin is of a daemon that was replaced");
                ret[n++] = chain_end(&pins[i]);
        }
        return n;
}

static int begin_session(struct kvd_space *space, const struct kvd_msg_session *asked,
                         const struct kvd_pin *pins, uint32_t n_pins) {
        struct kvd_msg_session request = *asked;
        kvd_ref ends[KVD_SESSION_PINS];
        struct view *view;
        int r = view_attach(space, &view);

        if (r < 0)
                return r;
        r = ends_of(view, pins, n_pins, ends);
        if (r < 0)
                return r;
        request.space = view->handle;
        request.blocks = (struct kvd_slice){ends, (uint32_t)r * (uint32_t)sizeof *ends};
        return handle_call(space->handle, KVD_MSG_session, &request, NULL, NULL);
}

static int end_session(struct kvd_space *space, struct kvd_slice name) {
        struct kvd_msg_session_end request = {.space = kvd_slice_of(space->name), .name = name};

        return handle_call(space->handle, KVD_MSG_session_end, &request, NULL, NULL);
}

/* Locks the handle for a request about a session of that name. */
static int session_lock(struct kvd_space *space, const char *name) {
        if (space_check(space) < 0)
                return -ECHILD;
        if (strlen(name) > KVD_NAME_MAX)
                return client_fail(-EINVAL, "a session's name has at most %d characters",
                                   KVD_NAME_MAX);
        deadline_begin();
        return handle_lock(space->handle);
}

int kvd_session(struct kvd_space *space, const char *name, uint32_t keep, uint32_t seconds,
                struct kvd_pin *pins, uint32_t n_pins) {
        struct kvd_msg_session request = {.keep = keep, .seconds = seconds};
        int r;

        if (keep < KVD_KEEP_HIGH || keep > KVD_KEEP_PINNED || n_pins > KVD_SESSION_PINS)
                return client_fail(-EINVAL,
                                   "keep is a value of enum kvd_keep, not %u, and there "
                                   "are at most %u pins, not %u",
                                   keep, KVD_SESSION_PINS, n_pins);
        r = session_lock(space, name);
        if (r < 0)
                return r;
        request.name = kvd_slice_of(name);
        r = begin_session(space, &request, pins, n_pins);
        handle_unlock(space->handle);
        for (uint32_t i = 0; r == 0 && i < n_pins; i++)
                unpin_unused(space, &pins[i]);
        return r;
}

int kvd_session_end(struct kvd_space *space, const char *name) {
        int r = session_lock(space, name);

        if (r < 0)
                return r;
        r = end_session(space, kvd_slice_of(name));
        handle_unlock(space->handle);
        return r;
}
