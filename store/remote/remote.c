/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The remote tier's life: what the remote process is asked next, and what becomes of its answers.
 * What somebody waits for comes first, then what is written ahead.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/device.h"
#include "ipc/base/enums.h"
#include "ipc/base/sys.h"
#include "store/account.h"
#include "store/hooks.h"
#include "store/remote/inside.h"

/* ---- life ------------------------------------------------------------------------------------ */

int store_remote_begin(struct store *store, const struct store_remote_config *config) {
        struct remote *remote;

        if (store->config.backend != KVD_BACKEND_HOST)
                return store_refuse(store, -EOPNOTSUPP,
                                    "remote is for pools in host memory; unset it, or set backend "
                                    "= host");
        remote = store->remote = sys->calloc(1, sizeof *remote);
        if (!remote)
                return store_refuse(store, -ENOMEM, "out of memory for the remote tier");
        remote->store = store;
        remote->config = *config;
        remote->state = STORE_REMOTE_CONNECTING;
        remote->all_pulls = sys->calloc(PULLS, sizeof *remote->all_pulls);
        if (!remote->all_pulls)
                return store_refuse(store, -ENOMEM, "out of memory for the remote tier");
        for (uint32_t i = 0; i < PULLS; i++)
                remote->all_pulls[i].to.fd = -1;
        return 0;
}

void store_on_remote(struct store *store, void (*called)(void *data, bool soon), void *data) {
        if (!store->remote)
                return;
        store->remote->wanted = called;
        store->remote->data = data;
}

void remote_want(struct remote *remote, bool soon) {
        if (remote->wanted)
                remote->wanted(remote->data, soon);
}

/* ---- servers --------------------------------------------------------------------------------- */

/* Clients ask for what is below while it can come. */
static void tell_below(struct space *space) {
        space_set_below(space, KVD_BELOW_SERVERS, remote_for(space));
}

static void tell_all(struct remote *remote) {
        struct space *space;

        for (uint32_t number = 0; (space = store_next_space(remote->store, number));
             number = space_number(space) + 1)
                tell_below(space);
}

/* What was put off while they were away is looked at again. */
static void look_at_all(struct remote *remote) {
        for (uint32_t number = 0;; number++) {
                struct space *space = store_next_space(remote->store, number);

                if (!space)
                        return;
                number = space_number(space);
                space->parts.remote->changes = UINT64_MAX;
                space_is_busy(space);
        }
}

static void end_all_pulls(struct remote *remote) {
        while (remote->pulls.first)
                pulls_end(remote, kvd_list_first(&remote->pulls, struct pull, to.waiting)->to.space,
                          NULL);
}

void store_remote_end(struct store *store) {
        struct remote *remote = STEAL(store->remote);

        if (!remote)
                return;
        if (remote->all_pulls)
                end_all_pulls(remote);
        free(remote->all_pulls);
        free(remote);
}

void store_remote_servers(struct store *store, uint32_t servers, uint32_t away, const char *why) {
        struct remote *remote = store->remote;
        bool fewer = away < remote->info.away || remote->state == STORE_REMOTE_CONNECTING;

        remote->info.servers = servers;
        remote->info.away = away;
        remote->state = !away                  ? STORE_REMOTE_ON :
                        servers && away < servers ? STORE_REMOTE_PARTLY :
                                                    STORE_REMOTE_AWAY;
        snprintf(remote->info.why, sizeof remote->info.why, "%s", away ? why : "");
        tell_all(remote);
        if (remote->state == STORE_REMOTE_AWAY) {
                end_all_pulls(remote);
        } else if (fewer) {
                remote->epoch++;
                look_at_all(remote);
        }
}

void store_remote_get_info(const struct store *store, struct store_remote_info *ret) {
        const struct remote *remote = store->remote;

        *ret = (struct store_remote_info){0};
        if (!remote)
                return;
        *ret = remote->info;
        ret->state = remote->state;
}

/* ---- spaces ---------------------------------------------------------------------------------- */

uint64_t remote_space_bytes(const struct kvd_index *ix) {
        return sizeof(struct remote_space) + ix->capacity * sizeof(struct remote_name);
}

static int space_begins(struct space *space) {
        int r;

        if (!space_store(space)->remote)
                return 0;
        r = account_charge(space, KVD_COST_overhead, remote_space_bytes(space->ix));
        if (r < 0)
                return r;
        space->parts.remote = sys->calloc(1, remote_space_bytes(space->ix));
        tell_below(space);
        return space->parts.remote ? 0 : -ENOMEM;
}

static void space_ends(struct space *space) {
        free(space->parts.remote);
}

struct remote *remote_for(const struct space *space) {
        struct remote *remote = space_store(space)->remote;
        bool right = remote &&
                     (remote->state == STORE_REMOTE_ON || remote->state == STORE_REMOTE_PARTLY) &&
                     space->ix->kind == KVD_kind_causal &&
                     space->ix->block_bytes <= KVD_REMOTE_MOST;

        return right ? remote : NULL;
}

/* What has changed is looked at when the servers have time. */
static bool idle(struct space *space) {
        struct remote_space *rs = space->parts.remote;
        struct remote *remote = remote_for(space);

        if (!remote || rs->changes == space->audit.changes)
                return false;
        rs->changes = space->audit.changes;
        rs->looked = 0;
        if (!rs->unswept)
                remote_want(remote, false);
        rs->unswept = true;
        return false;
}

static void space_leaves(struct space *space) {
        struct remote *remote = space_store(space)->remote;

        if (!remote)
                return;
        pulls_end(remote, space, NULL);
        if (remote->question.space == space)
                remote->question.space = NULL;
}

static void attachment_ends(struct attachment *a) {
        if (space_store(a->space)->remote)
                pulls_end(space_store(a->space)->remote, a->space, a);
}

/* ---- names ----------------------------------------------------------------------------------- */

const struct kvd_key *remote_name_of(const struct remote *remote, const struct space *space,
                                     uint32_t id) {
        const struct remote_name *name = &space->parts.remote->names[id];

        return name->epoch == remote->epoch && name->block == block_ref(space, id) ? &name->name :
                                                                                     NULL;
}

void remote_note(const struct remote *remote, struct space *space, uint32_t id,
                 struct kvd_key name) {
        space->parts.remote->names[id] = (struct remote_name){
                .name = name, .block = block_ref(space, id), .epoch = remote->epoch};
}

/* ---- questions ------------------------------------------------------------------------------- */

static bool has_fingerprint(const struct kvd_shape *shape) {
        return shape->fingerprint[0] || shape->fingerprint[1];
}

void remote_begin_question(struct remote *remote, enum store_remote_ask what,
                           struct space *space) {
        struct store_remote_question *q = &remote->question;
        const struct domain_config *domain = &space->domain->config;

        q->what = what;
        q->space = space;
        q->n = 0;
        q->tenant = domain->remote_prefix[0] ? domain->remote_prefix : domain->name;
        memset(&q->content, 0, sizeof q->content);
        memcpy(&q->content.geometry, &space->ix->geometry, sizeof q->content.geometry);
        if (!has_fingerprint(&q->content.geometry))
                snprintf(q->content.space, sizeof q->content.space, "%s", space->name);
}

bool remote_question_is_full(const struct remote *remote) {
        const struct kvd_index *ix = remote->question.space->ix;
        uint32_t n = remote->question.n;

        return n == KVD_REMOTE_ITEMS || (n + 1) * ix->geometry.block_tokens > KVD_REMOTE_TOKENS ||
               (n && (n + 1) * ix->block_bytes > KVD_REMOTE_BYTES);
}

const struct store_remote_question *store_remote_next(struct store *store, bool *later) {
        struct remote *remote = store->remote;

        *later = false;
        if (remote->asked)
                return NULL;
        remote->asked = pull_next(remote, later) || push_next(remote, later);
        remote->asked_ns = sys_now_ns();
        return remote->asked ? &remote->question : NULL;
}

void store_remote_found(struct store *store, const struct kvd_key *names, uint32_t n) {
        store->remote->asked = false;
        pull_found(store->remote, names, n);
}

void store_remote_got(struct store *store, const int32_t *errors, uint32_t n) {
        store->remote->asked = false;
        store->remote->info.read_ns += sys_now_ns() - store->remote->asked_ns;
        pull_done(store->remote, errors, n);
        store->remote->question.n = 0;
}

void store_remote_put(struct store *store, const struct kvd_key *names, const int32_t *errors,
                      uint32_t n) {
        store->remote->asked = false;
        store->remote->info.write_ns += sys_now_ns() - store->remote->asked_ns;
        push_done(store->remote, names, errors, n);
        store->remote->question.n = 0;
}

void store_remote_lost(struct store *store) {
        struct remote *remote = store->remote;

        if (!remote->asked)
                return;
        remote->info.errors++;
        if (remote->question.what == STORE_REMOTE_FIND)
                store_remote_found(store, NULL, 0);
        else if (remote->question.what == STORE_REMOTE_GET)
                store_remote_got(store, NULL, 0);
        else
                store_remote_put(store, NULL, NULL, 0);
}

const struct hooks remote_hooks = {.space_begins = space_begins,
                                   .idle = idle,
                                   .space_leaves = space_leaves,
                                   .space_ends = space_ends,
                                   .attachment_ends = attachment_ends};
