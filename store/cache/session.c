/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A session is what an agent or its engine says about a conversation that pauses: which chains it
 * will continue, how strongly they should be kept, and for how long. It belongs to a user of the
 * domain, not to a connection, and ends when its time is over, or with the daemon.
 *
 * A session is written at the deepest block of each of its chains, since the blocks before that one
 * are evicted after it. There, it gives the leaf a higher rank (leaves.c), and keep = pinned is a
 * hold, too, so the block is never evicted. When a block leaves, or will never get its data, its
 * sessions move to a block before it. A space has room for a fixed number of sessions and chains;
 * what is pinned is charged to the domain, is at most half of the space, and a block that two
 * sessions pin counts twice.
 */

#include <errno.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "store/account.h"
#include "store/cache/inside.h"

/* ---- tables ---------------------------------------------------------------------------------- */

static const uint64_t tables_bytes = STORE_MAX_SESSIONS * sizeof(struct session) +
                                     STORE_SESSION_CHAINS * sizeof(struct session_chain);

uint64_t sessions_bytes(const struct space *space) {
        return space->leaves.sessions.at ? tables_bytes : 0;
}

/* Makes the tables with the first session of a space. */
static int open_tables(struct space *space) {
        struct sessions *all = &space->leaves.sessions;
        int r;

        if (all->at)
                return 0;
        r = account_charge(space, KVD_COST_overhead, tables_bytes);
        if (r < 0)
                return r;
        *all = (struct sessions){.at = sys->calloc(STORE_MAX_SESSIONS, sizeof *all->at),
                                 .chains = sys->calloc(STORE_SESSION_CHAINS, sizeof *all->chains),
                                 .unused = NONE};
        if (all->at && all->chains)
                return 0;
        sessions_close(space);
        account_discharge(space, KVD_COST_overhead, tables_bytes);
        return store_refuse(space_store(space), -ENOMEM, "out of memory for a session");
}

void sessions_close(struct space *space) {
        free(space->leaves.sessions.at);
        free(space->leaves.sessions.chains);
        space->leaves.sessions = (struct sessions){0};
}

/* ---- sessions -------------------------------------------------------------------------------- */

static struct session *find(struct space *space, uint32_t user, const char *name) {
        for (uint32_t i = 0; space->leaves.sessions.n && i < STORE_MAX_SESSIONS; i++) {
                struct session *s = &space->leaves.sessions.at[i];

                if (s->keep && s->user == user && strcmp(s->name, name) == 0)
                        return s;
        }
        return NULL;
}

/* What a user has. It leaves others a sixteenth, as one process does of leases. */
struct share {
        uint32_t sessions, chains;
        struct session *unused; /* an unused entry, or NULL */
};

static struct share share_of(struct space *space, uint32_t user) {
        struct share share = {0};

        for (uint32_t i = 0; i < STORE_MAX_SESSIONS; i++) {
                struct session *s = &space->leaves.sessions.at[i];

                if (!s->keep)
                        share.unused = s;
                else if (s->user == user) {
                        share.sessions++;
                        share.chains += s->n_chains;
                }
        }
        return share;
}

static uint64_t session_blocks(const struct space *space, const struct session *s) {
        uint64_t n = 0;

        for (uint32_t at = s->first; at != NONE; at = session_chain(space, at)->more)
                n += blocks_up_to(space, session_chain(space, at)->block);
        return n;
}

uint64_t session_pins(const struct space *space, const struct session *s) {
        return s->keep == KVD_keep_pinned ? session_blocks(space, s) * space->ix->block_bytes : 0;
}

static void begin_chain(struct space *space, struct session *s, uint32_t id) {
        if (!session_add_chain(space, s, id))
                return;
        if (s->keep == KVD_keep_pinned)
                block_hold(space, id);
        block_rank(space, id);
}

static void end_chains(struct space *space, struct session *s) {
        while (s->n_chains) {
                uint32_t id = session_take_chain(space, s);

                if (id == NONE)
                        continue;
                if (s->keep == KVD_keep_pinned)
                        block_let_go(space, id);
                block_rank(space, id);
        }
        space->leaves.sessions.moved += s->keep == KVD_keep_pinned;
}

static void end(struct space *space, struct session *s) {
        end_chains(space, s);
        account_discharge(space, KVD_COST_session_pins, s->pinned);
        account_discharge(space, KVD_COST_sessions, 1);
        space->leaves.sessions.n--;
        s->keep = 0;
}

/* ---- requests -------------------------------------------------------------------------------- */

static int check(struct space *space, const struct session_request *q) {
        size_t n = strlen(q->name);
        bool named = n > 0 && n <= KVD_NAME_MAX;

        for (size_t i = 0; i < n; i++)
                named &= q->name[i] > 0x20 && q->name[i] < 0x7f && !strchr("'\"\\`", q->name[i]);
        if (!named)
                return store_refuse(space_store(space), -EINVAL,
                                    "a session's name has 1 to %d printable ASCII characters, "
                                    "without spaces and quotes",
                                    KVD_NAME_MAX);
        if (q->keep < 1 || q->keep > KVD_keep_max || q->ttl_s < 1 || q->ttl_s > STORE_SESSION_TTL_S)
                return store_refuse(space_store(space), -EINVAL,
                                    "a session has keep (" KVD_LIST(keep) ") and lasts 1 to %u "
                                                                          "seconds",
                                    STORE_SESSION_TTL_S);
        if (!q->n_blocks)
                return store_refuse(space_store(space), -EINVAL,
                                    "a session names at least one chain that is stored");
        return 0;
}

/* The cached block that the caller means, or NONE. */
static uint32_t block_meant(const struct attachment *a, kvd_ref named) {
        kvd_ref ref = content_of(a, named);
        const struct block *b;

        if (!block_current(a->space, ref))
                return NONE;
        b = &a->space->blocks[kvd_ref_id(ref)];
        return b->private || b->poisoned ? NONE : kvd_ref_id(ref);
}

/* What a session would have. */
struct need {
        uint32_t chains;
        uint64_t pins; /* bytes */
};

static int add_need(const struct attachment *a, const struct session_request *q, kvd_ref named,
                    struct need *need) {
        uint32_t id = block_meant(a, named);

        if (id == NONE)
                return store_refuse(space_store(a->space), -ESTALE,
                                    "a block of the session is not in the cache (any more); look "
                                    "up again");
        if (a->space->blocks[id].marked)
                return 0;
        a->space->blocks[id].marked = true;
        need->chains++;
        if (q->keep == KVD_keep_pinned)
                need->pins += blocks_up_to(a->space, id) * a->space->ix->block_bytes;
        return 0;
}

/* A block that is named twice counts once. -ESTALE: one of them is not cached. */
static int check_blocks(const struct attachment *a, const struct session_request *q,
                        struct need *need) {
        int r = 0;

        *need = (struct need){0};
        for (uint32_t i = 0; r == 0 && i < q->n_blocks; i++)
                r = add_need(a, q, q->blocks[i], need);
        for (uint32_t i = 0; i < q->n_blocks; i++) {
                uint32_t id = block_meant(a, q->blocks[i]);

                if (id != NONE)
                        a->space->blocks[id].marked = false;
        }
        return r;
}

/* Sessions pin at most half of the blocks that the space may have. */
static uint64_t room_in_space(const struct space *space) {
        return less(space->memory.max_blocks / 2 * (uint64_t)space->ix->block_bytes,
                    space->account.used[KVD_COST_session_pins]);
}

static int check_pins(struct space *space, const struct session_request *q, uint64_t more) {
        uint64_t room = account_room(space->domain, KVD_COST_session_pins),
                 here = room_in_space(space);
        bool of_space = here < room;

        if (more <= MIN(room, here))
                return 0;
        return store_refuse(space_store(space), -EDQUOT,
                            "session '%s' would pin %llu KiB more, and sessions of %s '%s' may "
                            "pin %llu KiB more (see kvctl %s): keep = high, or end others",
                            q->name, (unsigned long long)(more >> 10),
                            of_space ? "space" : "domain",
                            of_space ? space->name : space->domain->config.name,
                            (unsigned long long)(MIN(room, here) >> 10),
                            of_space ? "sessions" : "domain");
}

/* old: the session that is replaced, or NULL. */
static int check_share(struct space *space, const struct share *share, const struct session *old,
                       uint32_t n) {
        uint32_t chains = share->chains + n - (old ? old->n_chains : 0);
        uint32_t all = space->leaves.sessions.n_chains + n - (old ? old->n_chains : 0);

        if ((old || (share->unused && share->sessions < tenant_most(STORE_MAX_SESSIONS))) &&
            chains <= tenant_most(STORE_SESSION_CHAINS) && all <= STORE_SESSION_CHAINS)
                return 0;
        return store_refuse(space_store(space), -ENOBUFS,
                            "space '%s' has %u sessions with %u chains, as many as it may: end "
                            "some",
                            space->name, space->leaves.sessions.n, space->leaves.sessions.n_chains);
}

static int check_room(struct space *space, const struct session_request *q,
                      const struct session *old, const struct need *need, struct session **unused) {
        struct share share = share_of(space, q->user);
        int r = check_share(space, &share, old, need->chains);

        if (r == 0)
                r = check_pins(space, q, less(need->pins, old ? old->pinned : 0));
        *unused = share.unused;
        return r < 0 || old ? r : account_charge(space, KVD_COST_sessions, 1);
}

static void begin(struct space *space, struct session *s, const struct session_request *q) {
        *s = (struct session){.user = q->user, .first = NONE};
        memcpy(s->name, q->name, strlen(q->name) + 1);
        space->leaves.sessions.n++;
}

static void replace(const struct attachment *a, struct session *s, const struct session_request *q,
                    uint64_t bytes) {
        struct space *space = a->space;

        end_chains(space, s);
        account_discharge(space, KVD_COST_session_pins, s->pinned);
        account_add(space, KVD_COST_session_pins, bytes);
        s->pinned = bytes;
        s->keep = q->keep;
        s->until_ns = sys_now_ns() + q->ttl_s * UINT64_C(1000000000);
        for (uint32_t i = 0; i < q->n_blocks; i++)
                begin_chain(space, s, block_meant(a, q->blocks[i]));
        space->leaves.sessions.moved += s->keep == KVD_keep_pinned;
}

int space_session(struct attachment *a, const struct session_request *q) {
        struct space *space = a->space;
        struct session *old, *unused;
        struct need need = {0};
        int r = check(space, q);

        if (r == 0)
                r = check_blocks(a, q, &need);
        if (r == 0)
                r = open_tables(space);
        if (r < 0)
                return r;
        old = find(space, q->user, q->name);
        r = check_room(space, q, old, &need, &unused);
        if (r < 0)
                return r;
        if (!old)
                begin(space, unused, q);
        replace(a, old ? old : unused, q, need.pins);
        return 0;
}

int space_session_end(struct space *space, uint32_t user, const char *name) {
        struct session *s = find(space, user, name);

        if (!s)
                return store_refuse(space_store(space), -ENOENT,
                                    "user %u has no session of that name in space '%s'", user,
                                    space->name);
        end(space, s);
        return 0;
}

#define LOOKS 128u  /* sessions looked at in one call ... */
#define CHAINS 512u /* ... unless those that end have more chains */

void sessions_expire(struct space *space) {
        struct sessions *all = &space->leaves.sessions;
        uint64_t now = all->n ? sys_now_ns() : 0;
        uint32_t chains = 0;

        for (uint32_t i = 0; all->n && i < LOOKS && chains < CHAINS; i++) {
                struct session *s = &all->at[all->hand++ % STORE_MAX_SESSIONS];

                if (!s->keep || s->until_ns > now)
                        continue;
                chains += 1 + s->n_chains;
                end(space, s);
        }
}

bool space_next_session(const struct space *space, const uint32_t *user, uint32_t *cursor,
                        struct session_info *ret) {
        uint64_t now = sys_now_ns();

        for (; space->leaves.sessions.n && *cursor < STORE_MAX_SESSIONS; (*cursor)++) {
                const struct session *s = &space->leaves.sessions.at[*cursor];

                if (!s->keep || s->until_ns <= now || (user && s->user != *user))
                        continue;
                *ret = (struct session_info){.user = s->user,
                                             .keep = s->keep,
                                             .blocks = session_blocks(space, s),
                                             .left_ms = (s->until_ns - now) / 1000000};
                memcpy(ret->name, s->name, sizeof ret->name);
                ++*cursor;
                return true;
        }
        return false;
}
