/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One process computes a prefix while the others wait. The daemon replies at once; a process that
 * does not get the lease sleeps on the index's lease_epoch, which moves whenever any lease ends. If
 * the daemon dies, a waiter still times out by its own clock.
 */

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "client/internal.h"
#include "ipc/base/key.h"
#include "ipc/base/sys.h"

#define LOOK_AGAIN_NS UINT64_C(100000000) /* a daemon that is killed does not wake waiters */

static int lease_call(struct kvd_space *space, uint32_t op, const uint32_t *tokens,
                      uint32_t n_tokens, struct kvd_msg_lease_reply *reply) {
        struct kvd_msg_lease request = {.op = op, .prefix_tokens = n_tokens};
        struct kvd_key prefix;
        struct view *view;
        int r;

        deadline_begin(); /* one for each request; the time between requests does not count */
        r = handle_lock(space->handle);
        if (r < 0)
                return r;
        r = view_attach(space, &view);
        if (r == 0) {
                prefix = kvd_key_prefix(view->ix, tokens, n_tokens);
                request.space = view->handle;
                request.prefix_key = (struct kvd_slice){&prefix, sizeof prefix};
                r = handle_call(space->handle, KVD_MSG_lease, &request, reply, NULL);
        }
        handle_unlock(space->handle);
        return r;
}

static void sleep_on(const shm_u32 *word, uint32_t seen, uint64_t ns) {
        struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};

        syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0);
}

/* True: a lease has ended since lease_epoch was `seen`, or the space was deleted. */
static bool wait_for_end(struct kvd_space *space, uint32_t seen, uint64_t deadline_ns) {
        struct view *view = view_get(space);
        const shm_u32 *epoch = &view->ix->lease_epoch;
        bool moved = false;

        for (uint64_t now; (now = sys_now_ns()) < deadline_ns;) {
                moved = atomic_load(epoch) != seen || !atomic_load(&view->ix->alive);
                if (moved)
                        break;
                sleep_on(epoch, seen, MIN(deadline_ns - now, LOOK_AGAIN_NS));
        }
        view_put(view);
        return moved;
}

static int check(const struct kvd_space *space, uint32_t n_tokens) {
        if (space_check(space) < 0)
                return -ECHILD;
        if (space->options.kind != KVD_BIDIRECTIONAL || n_tokens == 0)
                return client_fail(-EINVAL, "leases are for prefixes of bidirectional spaces, "
                                            "of at least one token");
        return 0;
}

int kvd_lease(struct kvd_space *space, const uint32_t *tokens, uint32_t n_tokens,
              uint32_t timeout_ms) {
        uint64_t deadline_ns = sys_now_ns() + timeout_ms * UINT64_C(1000000);
        struct kvd_msg_lease_reply reply = {0};
        int r = check(space, n_tokens);
        bool waited = false;

        if (r < 0)
                return r;
        for (;;) {
                r = lease_call(space, 1, tokens, n_tokens, &reply);
                if (r < 0)
                        return r;
                if (reply.granted && waited && kvd_match(space, 0, tokens, n_tokens) == n_tokens) {
                        /* another process finished it while we waited */
                        lease_call(space, 2, tokens, n_tokens, NULL);
                        return 0;
                }
                if (reply.granted)
                        return 1;
                if (!wait_for_end(space, reply.epoch, deadline_ns))
                        return client_fail(-EBUSY, "another process is computing this prefix");
                waited = true;
                if (kvd_match(space, 0, tokens, n_tokens) == n_tokens)
                        return 0;
        }
}

int kvd_lease_end(struct kvd_space *space, const uint32_t *tokens, uint32_t n_tokens) {
        int r = check(space, n_tokens);

        return r < 0 ? r : lease_call(space, 2, tokens, n_tokens, NULL);
}
