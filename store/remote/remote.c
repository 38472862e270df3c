/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The remote tier's life: which request the remote process gets next, and how its answers are
 * handled. Fetches come first, since clients wait for them, then writes, which are ahead of need.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/device.h"
#include "ipc/base/enums.h"
#include "ipc/base/place.h"
#include "ipc/base/sys.h"
#include "store/account.h"
#include "store/below/bring.h"
#include "store/file/host.h"
#include "store/hooks.h"
#include "store/remote/inside.h"

/* ---- life ------------------------------------------------------------------------------------ */

static void carried(struct carry *carry, bool failed);

/* Blocks of a pool on a GPU pass through host memory. */
static int make_carry(struct remote *remote) {
        struct carry *carry = remote->below.carry = sys->calloc(1, sizeof *carry);

        if (!carry)
                return -ENOMEM;
        carry->done = carried;
        carry->owner = remote;
        carry->most = STORE_CARRY_BYTES;
        carry_open(carry, remote->store);
        return 0;
}

int store_remote_begin(struct store *store, const struct store_remote_config *config) {
        struct remote *remote;

        remote = store->remote = sys->calloc(1, sizeof *remote);
        if (!remote)
                return store_refuse(store, -ENOMEM, "out of memory for the remote tier");
        below_begin(&remote->below, store, &remote_below);
        remote->store = store;
        remote->below.depth = config->depth;
        remote->state = STORE_REMOTE_CONNECTING;
        if (store->config.backend != KVD_BACKEND_HOST && make_carry(remote) < 0)
                return store_refuse(store, -ENOMEM, "out of memory for the remote tier");
        return 0;
}

void store_on_remote(struct store *store, void (*called)(void *data, bool soon), void *data) {
        if (!store->remote)
                return;
        store->remote->below.wanted = called;
        store->remote->below.data = data;
}

void remote_want(struct remote *remote, bool soon) {
        below_want(&remote->below, soon);
}

/* ---- servers --------------------------------------------------------------------------------- */

/* Sets the flag in the index by which clients know whether to fetch from the servers. */
static void tell_below(struct space *space) {
        space_set_below(space, KVD_BELOW_SERVERS, remote_for(space));
}

static void tell_all(struct remote *remote) {
        for (struct space *space = NULL; (space = store_space_after(remote->store, space));)
                tell_below(space);
}

static void store_ends(struct store *store) {
        struct remote *remote = STEAL(store->remote);

        if (!remote)
                return;
        if (remote->below.carry)
                carry_close(remote->below.carry, store);
        free(remote->below.carry);
        free(remote);
}

void store_remote_servers(struct store *store, uint32_t servers, uint32_t away, const char *why) {
        struct remote *remote = store->remote;
        bool fewer = away < remote->info.away || remote->state == STORE_REMOTE_CONNECTING;

        remote->info.servers = servers;
        remote->info.away = away;
        remote->state = !away                     ? STORE_REMOTE_ON :
                        servers && away < servers ? STORE_REMOTE_PARTLY :
                                                    STORE_REMOTE_AWAY;
        snprintf(remote->info.why, sizeof remote->info.why, "%s", away ? why : "");
        tell_all(remote);
        if (remote->state == STORE_REMOTE_AWAY) {
                fetches_miss(&remote->below, NULL);
        } else if (fewer) {
                remote->epoch++;
                below_changes(&remote->below); /* nothing was written while they were away */
        }
}

void store_remote_get_info(const struct store *store, struct store_remote_info *ret) {
        const struct remote *remote = store->remote;

        *ret = (struct store_remote_info){0};
        if (!remote)
                return;
        *ret = remote->info;
        ret->fetches = remote->below.n_fetches;
        ret->queue = remote->below.queue;
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
        r = account_charge(space, KVD_COST_overhead, remote_space_bytes(space_index(space)));
        if (r < 0)
                return r;
        space->parts.remote = sys->calloc(1, remote_space_bytes(space_index(space)));
        tell_below(space);
        return remote_space_of(space) ? 0 : -ENOMEM;
}

static void space_ends(struct space *space) {
        free(remote_space_of(space));
}

struct remote *remote_for(const struct space *space) {
        struct remote *remote = space_store(space)->remote;
        bool right = remote &&
                     (remote->state == STORE_REMOTE_ON || remote->state == STORE_REMOTE_PARTLY) &&
                     space_block_bytes(space) <= KVD_REMOTE_MOST &&
                     (!remote->below.carry || kvd_places(space_index(space)));

        return right ? remote : NULL;
}

/* ---- names ----------------------------------------------------------------------------------- */

const struct kvd_key *remote_name_of(const struct remote *remote, const struct space *space,
                                     uint32_t id) {
        const struct remote_name *name = &remote_space_of(space)->names[id];

        return name->epoch == remote->epoch && name->block == block_ref(space, id) ? &name->name :
                                                                                     NULL;
}

void remote_note(const struct remote *remote, struct space *space, uint32_t id,
                 struct kvd_key name) {
        remote_space_of(space)->names[id] = (struct remote_name){.name = name,
                                                                 .block = block_ref(space, id),
                                                                 .epoch = remote->epoch};
}

/* ---- requests -------------------------------------------------------------------------------- */

static bool has_fingerprint(const struct kvd_shape *shape) {
        return shape->fingerprint[0] || shape->fingerprint[1];
}

void remote_begin_question(struct remote *remote, enum store_remote_ask what, struct space *space) {
        struct store_remote_question *q = &remote->question;
        const struct domain_config *domain = &space_domain(space)->config;

        q->what = what;
        q->space = space;
        q->n = 0;
        q->behind = (struct kvd_key){0};
        q->checksums = remote->below.carry && what == STORE_REMOTE_GET;
        q->tenant = domain->remote_prefix[0] ? domain->remote_prefix : domain->name;
        memset(&q->content, 0, sizeof q->content);
        memcpy(&q->content.geometry, space_geometry(space), sizeof q->content.geometry);
        if (!has_fingerprint(&q->content.geometry))
                snprintf(q->content.space, sizeof q->content.space, "%s", space_name(space));
}

static bool is_full(const struct below *b) {
        const struct remote *remote = remote_of(b);
        const struct kvd_index *ix = space_index(remote->question.space);
        uint32_t n = remote->question.n;

        return remote->looking || n == KVD_REMOTE_ITEMS ||
               (n + 1) * ix->geometry.block_tokens > KVD_REMOTE_TOKENS ||
               (n && (n + 1) * ix->block_bytes > KVD_REMOTE_BYTES);
}

bool remote_may_begin(struct below *b, struct space *space) {
        struct remote *remote = remote_of(b);

        if (!remote->below.carry || carry_may_begin(remote->below.carry, space))
                return true;
        remote_want(remote, true);
        return false;
}

bool remote_has_room(const struct remote *remote) {
        const struct space *space = remote->question.space;

        while (remote->below.carry && !carry_has_room(remote->below.carry, space))
                if (!host_gives_way(remote->store->file, space))
                        return false;
        return true;
}

void remote_question_add(struct remote *remote, const struct store_remote_item *item) {
        struct store_remote_question *q = &remote->question;

        if (remote->below.carry && !q->n)
                carry_begin(remote->below.carry, q->space);
        if (remote->below.carry)
                carry_add(remote->below.carry, item->block);
        q->items[q->n++] = *item;
}

static struct below_space *state(const struct space *space) {
        return &remote_space_of(space)->below;
}

static bool serves(const struct below *b, const struct space *space) {
        return remote_for(space);
}

const struct below_ops remote_below = {.state = state,
                                       .serves = serves,
                                       .may_begin = remote_may_begin,
                                       .is_full = is_full,
                                       .find = remote_find,
                                       .ask_names = remote_ask_names,
                                       .begin_read = remote_begin_read,
                                       .may_read = remote_may_read,
                                       .add_read = remote_add_read,
                                       .was_read = remote_was_read,
                                       .begin_write = remote_begin_write,
                                       .has = remote_has,
                                       .add_write = remote_add_write,
                                       .add_prefix = remote_add_prefix,
                                       .end_write = remote_end_write,
                                       .note = remote_note_name};

/* A PUT's blocks are copied to host memory by a worker first, if the pool is on a GPU. */
static const struct store_remote_question *make_question(struct remote *remote, bool *later) {
        remote->asked = below_next(&remote->below, later);
        remote->asked_ns = sys_now_ns();
        if (!remote->asked && remote->below.carry)
                *later |= carry_shrink(remote->below.carry);
        if (remote->asked && remote->below.carry && remote->question.what == STORE_REMOTE_PUT)
                carry_down(remote->below.carry);
        else if (remote->asked)
                return &remote->question;
        return NULL;
}

const struct store_remote_question *store_remote_next(struct store *store, bool *later) {
        struct remote *remote = store->remote;

        *later = false;
        if (remote->asked)
                return NULL;
        if (!remote->ready)
                return make_question(remote, later);
        remote->ready = false;
        remote->asked = true;
        return &remote->question;
}

int store_remote_memory(struct store *store, uint32_t item, uint64_t *offset) {
        const struct store_remote_question *q = &store->remote->question;

        return carry_memory(store->remote->below.carry, item, q->space, q->items[item].block,
                            offset);
}

/* ---- errors ---------------------------------------------------------------------------------- */

static const char *text_of(const struct remote *remote, int error) {
        switch (error) {
        case -EREMOTEIO:
        case -ENOSPC: return remote->refusal[0] ? remote->refusal : "an answer made no sense";
        case -EHOSTUNREACH: return "a server did not answer";
        case -EBUSY: return "another client has begun to write a block there, and has not finished";
        case -ECANCELED:
                return "a process that works for the daemon ended, or could not do its part";
        default: return strerror(-error);
        }
}

void remote_failed(struct remote *remote, int error) {
        remote->info.errors++;
        snprintf(remote->info.last_error, sizeof remote->info.last_error, "%s",
                 text_of(remote, error));
}

void store_remote_refused(struct store *store, uint32_t n, const char *refusal) {
        struct remote *remote = store->remote;

        snprintf(remote->refusal, sizeof remote->refusal, "%s", refusal);
        for (uint32_t i = 0; i < n; i++)
                remote_failed(remote, -EREMOTEIO);
}

/* ---- answers --------------------------------------------------------------------------------- */

static void end_question(struct remote *remote) {
        if (remote->below.carry)
                carry_end(remote->below.carry);
        remote->asked = remote->ready = false;
        remote->question.n = 0;
}

void store_remote_found(struct store *store, const struct kvd_key *names, uint32_t n) {
        store->remote->asked = false;
        (store->remote->looking ? remote_prefix_found : remote_named)(store->remote, names, n);
}

static void got(struct remote *remote, const int32_t *errors, uint32_t n) {
        remote->info.read_ns += sys_now_ns() - remote->asked_ns;
        remote->asked = false;
        bring_done(&remote->below, errors, n);
        end_question(remote);
}

/* A worker copies the blocks to the GPU. False: there are none, or the space is gone. */
static bool carry_got(struct remote *remote, const int32_t *errors, const uint64_t *checksums,
                      uint32_t n) {
        return remote->below.carry && remote->below.carry->space &&
               carry_up_written(remote->below.carry, errors, checksums, n);
}

void store_remote_got(struct store *store, const int32_t *errors, const uint64_t *checksums,
                      uint32_t n) {
        if (!carry_got(store->remote, errors, checksums, n))
                got(store->remote, errors, n);
}

void store_remote_put(struct store *store, const struct kvd_key *names, const int32_t *errors,
                      uint32_t n) {
        struct remote *remote = store->remote;

        remote->info.write_ns += sys_now_ns() - remote->asked_ns;
        remote_written(remote, names, errors, n);
        end_question(remote);
}

static void lost(struct remote *remote) {
        if (remote->question.what == STORE_REMOTE_FIND)
                store_remote_found(remote->store, NULL, 0);
        else if (remote->question.what == STORE_REMOTE_GET)
                got(remote, NULL, 0);
        else
                store_remote_put(remote->store, NULL, NULL, 0);
}

void store_remote_lost(struct store *store) {
        struct remote *remote = store->remote;

        if (!remote->asked || (remote->below.carry && carry_is_under_way(remote->below.carry)))
                return;
        remote_failed(remote, -ECANCELED);
        lost(remote);
}

/* ---- answers of a worker --------------------------------------------------------------------- */

/* If all blocks have arrived in host memory, the request is sent to the servers next. */
static void carried_down(struct remote *remote, bool failed) {
        struct remote_space *rs = remote_space_of(remote->below.carry->space);

        if (carry_is_whole(remote->below.carry)) {
                remote->asked = false;
                remote->ready = true;
                return;
        }
        if (failed)
                sweep_again(&rs->below); /* the worker failed, not the servers */
        lost(remote);
}

static void carried_up(struct remote *remote) {
        for (uint32_t i = 0; i < remote->below.carry->n; i++)
                remote->errors[i] = remote->below.carry->items[i].error;
        got(remote, remote->errors, remote->below.carry->n);
}

static void carried(struct carry *carry, bool failed) {
        struct remote *remote = carry->owner;

        if (remote->question.what == STORE_REMOTE_PUT)
                carried_down(remote, failed);
        else
                carried_up(remote);
        remote_want(remote, true);
}

/* ---- a space is deleted ---------------------------------------------------------------------- */

static void space_leaves(struct space *space) {
        struct remote *remote = space_store(space)->remote;
        bool waits;

        if (!remote)
                return;
        if (remote->question.space == space)
                remote->question.space = NULL;
        if (!remote->below.carry || remote->below.carry->last != space)
                return;
        waits = remote->ready || carry_is_under_way(remote->below.carry);
        carry_forget(remote->below.carry);
        if (waits)
                lost(remote);
}

const struct hooks remote_hooks = {.space_begins = space_begins,
                                   .space_leaves = space_leaves,
                                   .space_ends = space_ends,
                                   .store_ends = store_ends};
