/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The common part of fetches from all tiers. A fetch holds the last resident block of its chain,
 * seals each block that arrives after it, and signals the caller's eventfd when it ends.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "store/account.h"
#include "store/file/admit.h"
#include "store/file/bring.h"

#include <sys/eventfd.h>

#define PLACES 512u /* fetches of a domain, in each tier */

static struct chain_at root_of(const struct space *space, const struct fetch_request *q) {
        return chain_begin(space, q->group, q->salt, q->tokens, q->n_tokens);
}

int bring_check(const struct space *space, const struct fetch_request *q) {
        const struct kvd_desc *desc;

        if (q->behind == KVD_ROOT)
                return 0;
        if (space_finds_whole(space))
                return store_refuse(space_store(space), -EINVAL,
                                    "a bidirectional prefix is fetched as a whole");
        if (kvd_ref_id(q->behind) < space_ids(space) && block_current(space, q->behind)) {
                desc = block_desc(space, kvd_ref_id(q->behind));
                if (admit_can_be_written(space, kvd_ref_id(q->behind)) && desc->group == q->group &&
                    desc->root == q->salt && desc->n_tokens == space_full_tokens(space, q->group))
                        return 0;
        }
        return store_refuse(space_store(space), -ESTALE,
                            "the block behind which tokens are fetched is not of their chain");
}

uint32_t bring_before(const struct space *space, const struct fetch_request *q) {
        return q->behind == KVD_ROOT ? 0 : block_desc(space, kvd_ref_id(q->behind))->depth + 1;
}

uint64_t bring_end_of(const struct space *space, const struct fetch_request *q) {
        return (uint64_t)bring_before(space, q) * space_full_tokens(space, q->group) + q->n_tokens;
}

static struct chain_at begin_of(const struct space *space, const struct fetch_request *q) {
        struct chain_at at = root_of(space, q);

        if (q->behind != KVD_ROOT) {
                at.leaf = q->behind;
                at.key = block_desc(space, kvd_ref_id(q->behind))->key;
                at.depth = bring_before(space, q);
        }
        return at;
}

/* Number of tokens from the chain's beginning to the end of the next block. */
static uint64_t next_end(const struct space *space, const struct chain_at *at) {
        return (uint64_t)at->depth * space_full_tokens(space, at->group) +
               tokens_at(space, at->group, at->root, at->depth);
}

struct chain_at bring_walk(const struct space *space, const struct fetch_request *q) {
        struct chain_at begin = begin_of(space, q), at = begin;
        uint32_t bt = space_full_tokens(space, q->group);

        while (at.depth - begin.depth < KVD_FETCH_DEPTH &&
               next_end(space, &at) <= bring_end_of(space, q) &&
               chain_step(space, &at, q->tokens + (uint64_t)(at.depth - begin.depth) * bt))
                ;
        return space_finds_whole(space) && tokens_at(space, at.group, at.root, at.depth) ? begin :
                                                                                           at;
}

bool bring_reaches(const struct space *space, const struct fetch_request *q,
                   const struct chain_at *at) {
        uint32_t bt = space_full_tokens(space, at->group);

        if (space_finds_whole(space))
                return tokens_at(space, at->group, at->root, at->depth) &&
                       kvd_fetch_takes(q->n_tokens, bt);
        return next_end(space, at) <= bring_end_of(space, q);
}

bool bring_is_needless(const struct bringing *b, const uint32_t *tokens) {
        const struct fetch_request q = {.group = b->chain.group,
                                        .n_tokens = (uint32_t)b->chain.root,
                                        .tokens = tokens};

        return !b->last && space_finds_whole(b->space) && bring_walk(b->space, &q).depth;
}

/* ---- the queue ------------------------------------------------------------------------------- */

static struct bringing *bringing_of(struct kvd_list_node *node) {
        return container_of(node, struct bringing, waiting);
}

/* -EBUSY: the client has at least as many fetches as its domain has places left. */
static int check_places(const struct kvd_list *queue, const struct attachment *a) {
        uint64_t n = 0, own = 0;

        for (struct kvd_list_node *node = queue->first; node; node = node->next) {
                const struct bringing *b = bringing_of(node);

                n += space_domain(b->space) == space_domain(a->space);
                own += b->attachment == a;
        }
        if (n + own >= PLACES)
                return store_refuse(space_store(a->space), -EBUSY,
                                    "%llu fetches of domain '%s' wait already, "
                                    "%llu of them this client's; ask again when some have ended",
                                    (unsigned long long)n, space_domain(a->space)->config.name,
                                    (unsigned long long)own);
        return 0;
}

/* The turn after the client's last fetch; or else the turn of its domain's first one. */
static void take_turn(const struct kvd_list *queue, struct bringing *b) {
        for (struct kvd_list_node *node = queue->last; node; node = node->prev) {
                const struct bringing *other = bringing_of(node);

                if (space_domain(other->space) != space_domain(b->space))
                        continue;
                b->turn = other->turn;
                if (other->attachment == b->attachment) {
                        b->turn++;
                        return;
                }
        }
}

/* After the fetches of the same round, which came first. */
static void insert(struct kvd_list *queue, struct bringing *b) {
        struct kvd_list_node *before = NULL, *last = queue->last;

        while (last && bringing_of(last)->round > b->round) {
                before = last;
                last = last->prev;
        }
        kvd_list_insert(queue, before, &b->waiting);
}

/*
 * Takes the position of the domain's first fetch with a later turn. Each displaced fetch takes the
 * position of the domain's next one.
 */
static void enqueue(struct kvd_list *queue, struct bringing *b) {
        const struct domain *domain = space_domain(b->space);
        uint64_t round = queue->first ? bringing_of(queue->first)->round : 0;
        bool displaces = false;
        struct kvd_list_node *next;

        for (struct kvd_list_node *node = queue->first; node; node = next) {
                struct bringing *other = bringing_of(node);

                next = node->next;
                if (space_domain(other->space) != domain)
                        continue;
                round = other->round + 1;
                displaces = displaces || other->turn > b->turn;
                if (!displaces)
                        continue;
                b->round = other->round;
                kvd_list_insert(queue, node, &b->waiting);
                kvd_list_remove(node);
                b = other;
        }
        b->round = round;
        insert(queue, b);
}

/* ---- its beginning --------------------------------------------------------------------------- */

static int charge(struct space *space, uint64_t bytes) {
        int r = account_charge(space, KVD_COST_files, 1);

        if (r < 0)
                return r;
        r = account_charge(space, KVD_COST_overhead, bytes);
        if (r < 0)
                account_discharge(space, KVD_COST_files, 1);
        return r;
}

static void discharge(struct space *space, uint64_t bytes) {
        account_discharge(space, KVD_COST_files, 1);
        account_discharge(space, KVD_COST_overhead, bytes);
}

static int make(struct space *space, size_t bytes, struct bringing **ret) {
        struct bringing *b;
        int r = charge(space, bytes);

        if (r < 0)
                return r;
        b = sys->calloc(1, bytes);
        r = b ? sys->eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : -1;
        if (r < 0) {
                r = b ? negative_errno() : -ENOMEM;
                free(b);
                discharge(space, bytes);
                return store_refuse(space_store(space), r,
                                    "no memory or descriptor for a fetch: %s", strerror(-r));
        }
        b->fd = r;
        b->bytes = bytes;
        *ret = b;
        return 0;
}

int bring_begin(struct kvd_list *queue, size_t bytes, struct attachment *a,
                const struct fetch_request *q, const struct chain_at *at, struct bringing **ret) {
        struct bringing *b = NULL;
        int r = check_places(queue, a);

        if (r == 0)
                r = make(a->space, bytes, &b);
        if (!b)
                return r;
        b->begun_ns = sys_now_ns();
        b->space = a->space;
        b->attachment = a;
        b->chain = root_of(a->space, q);
        b->last = at->leaf;
        if (b->last)
                block_hold(b->space, kvd_ref_id(b->last));
        take_turn(queue, b);
        enqueue(queue, b);
        *ret = b;
        return 0;
}

/* ---- its end --------------------------------------------------------------------------------- */

/* The result of write does not matter: it fails only if the eventfd is readable already. */
void bring_tell(struct bringing *b) {
        uint64_t one = 1;

        if (b->fd < 0)
                return;
        space_count_latency(b->space, KVD_LATENCY_FETCH, sys_now_ns() - b->begun_ns);
        (void)!write(b->fd, &one, sizeof one);
        closep(&b->fd);
        b->fd = -1;
}

/* Only a part of a bidirectional prefix arrived. */
static bool is_useless(const struct bringing *b) {
        const struct kvd_desc *last = block_desc(b->space, kvd_ref_id(b->last));

        return space_finds_whole(b->space) &&
               tokens_at(b->space, last->group, last->root, last->depth + 1);
}

void bring_end(struct bringing *b) {
        kvd_list_remove(&b->waiting);
        if (b->last) {
                block_let_go(b->space, kvd_ref_id(b->last));
                if (is_useless(b))
                        block_condemn(b->space, kvd_ref_id(b->last));
        }
        bring_tell(b);
        discharge(b->space, b->bytes);
        free(b);
}

kvd_ref bring_settle(struct bringing *b, kvd_ref block, const uint32_t *tokens, bool filled) {
        struct arrival arrival = {.block = block,
                                  .parent = b->last,
                                  .chain = &b->chain,
                                  .tokens = tokens};
        kvd_ref there;

        block_let_go(b->space, kvd_ref_id(block));
        if (!filled || bring_is_needless(b, tokens)) {
                block_discard(b->space, kvd_ref_id(block));
                return 0;
        }
        there = block_arrives(b->space, &arrival);
        if (!there)
                return 0;
        if (b->last)
                block_let_go(b->space, kvd_ref_id(b->last));
        b->last = there;
        block_hold(b->space, kvd_ref_id(there));
        return there;
}
