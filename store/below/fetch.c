/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The beginning and the end of a fetch: how far its chain is resident, which tier has the blocks
 * behind that, and the memory that the fetch takes.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "store/account.h"
#include "store/below/admit.h"
#include "store/below/bring.h"
#include "store/below/prefix.h"

#include <sys/eventfd.h>

/* ---- the chain ------------------------------------------------------------------------------- */

static struct chain_at root_of(const struct space *space, const struct fetch_request *q) {
        return chain_begin(space, q->group, q->salt, q->tokens, q->n_tokens);
}

/* Is the block behind which tokens are fetched one of the chain? */
static int check_behind(const struct space *space, const struct fetch_request *q) {
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
        uint32_t most = space_finds_whole(space) ? KVD_WHOLE_BLOCKS : KVD_FETCH_DEPTH;

        while (at.depth - begin.depth < most && next_end(space, &at) <= bring_end_of(space, q) &&
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

bool fetch_is_needless(const struct fetch *f) {
        const struct fetch_request q = {.group = f->chain.group,
                                        .n_tokens = (uint32_t)f->chain.root,
                                        .tokens = f->tokens};

        return !f->last && space_finds_whole(f->space) && bring_walk(f->space, &q).depth;
}

const uint32_t *fetch_tokens(const struct fetch *f, uint32_t i) {
        return f->tokens + (size_t)(f->first + i) * space_full_tokens(f->space, f->chain.group);
}

uint32_t fetch_n_tokens(const struct fetch *f, uint32_t i) {
        return tokens_at(f->space, f->chain.group, f->chain.root, f->depth + i);
}

/* ---- its memory ------------------------------------------------------------------------------ */

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

static struct fetch *make(struct space *space, size_t bytes) {
        struct fetch *f = sys->calloc(1, bytes);
        int r = f ? sys->eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : -1;

        if (r < 0) {
                r = f ? negative_errno() : -ENOMEM;
                free(f);
                store_refuse(space_store(space), r, "no memory or descriptor for a fetch: %s",
                             strerror(-r));
                errno = -r;
                return NULL;
        }
        f->fd = r;
        f->bytes = bytes;
        f->space = space;
        return f;
}

/* ---- its beginning --------------------------------------------------------------------------- */

/* The tokens of the n blocks up to q->behind, then those of the request. */
static void keep_tokens(struct fetch *f, const struct fetch_request *q) {
        uint32_t bt = space_full_tokens(f->space, q->group), before = bring_before(f->space, q);
        uint32_t begin = f->depth - f->first, n = before - MIN(before, begin), id;

        id = n ? kvd_ref_id(q->behind) : NONE;
        for (uint32_t i = n; i-- > 0; id = block_of(f->space, id)->parent)
                memcpy(f->tokens + (size_t)i * bt, block_desc(f->space, id)->tokens,
                       bt * sizeof *f->tokens);
        memcpy(f->tokens + (size_t)n * bt, q->tokens + (size_t)(begin + n - before) * bt,
               (f->n_tokens - (size_t)n * bt) * sizeof *f->tokens);
}

static void fill_in(struct fetch *f, struct attachment *a, const struct fetch_request *q,
                    const struct chain_at *at, const struct below_found *found) {
        f->begun_ns = sys_now_ns();
        f->attachment = a;
        f->chain = root_of(a->space, q);
        f->last = at->leaf;
        if (f->last)
                block_hold(f->space, kvd_ref_id(f->last));
        f->depth = at->depth;
        f->first = found->first;
        f->n_tokens = found->n_tokens;
        f->found = found->names;
        f->n = found->n;
        f->names[0] = found->before;
        if (f->found)
                memcpy(f->names + 1, found->names, f->n * sizeof *f->names);
        f->tokens = (uint32_t *)(f->names + f->n + 1);
        keep_tokens(f, q);
}

static int begin(struct below *b, struct attachment *a, const struct fetch_request *q,
                 const struct chain_at *at, const struct below_found *found, int *fd) {
        size_t bytes = sizeof(struct fetch) + (found->n + 1) * sizeof(struct below_name) +
                       found->n_tokens * sizeof(uint32_t);
        struct fetch *f;
        int r = turns_check(&b->fetches, a);

        if (r == 0)
                r = charge(a->space, bytes);
        if (r < 0)
                return r;
        f = make(a->space, bytes);
        if (!f) {
                discharge(a->space, bytes);
                return -errno;
        }
        f->from = b;
        fill_in(f, a, q, at, found);
        turns_enqueue(&b->fetches, f);
        b->n_fetches++;
        b->queue++;
        *fd = f->fd;
        below_want(b, true);
        return 0;
}

static int check(const struct space *space, const struct fetch_request *q) {
        if (!kvd_has_group(space->ix, q->group))
                return store_refuse(space_store(space), -EINVAL, "there is no such layer group");
        if (q->salt && space_finds_whole(space))
                return store_refuse(space_store(space), -EINVAL, "salts are for causal spaces");
        return check_behind(space, q);
}

static int64_t fetch(struct attachment *a, const struct fetch_request *q, int *fd) {
        struct space *space = a->space;
        struct below_found found = {0};
        struct chain_at at = bring_walk(space, q);
        int r = 0;

        for (struct below *b = space_store(space)->below; b && r == 0 && *fd < 0; b = b->next)
                if (bring_reaches(space, q, &at) && b->ops->find(b, space, q, &at, &found))
                        r = begin(b, a, q, &at, &found, fd);
        if (r < 0)
                return r;
        if (*fd >= 0 && found.names)
                at.depth += found.n;
        return (int64_t)MIN((uint64_t)at.depth * space_full_tokens(space, q->group),
                            bring_end_of(space, q));
}

/* The tokens of a long bidirectional prefix come with several requests. */
static int64_t fetch_in_parts(struct attachment *a, const struct fetch_request *part, int *fd) {
        struct fetch_request q = *part;
        int64_t r = prefix_append(a, &q);

        if (r == 0 && q.more)
                return 0;
        if (r == 0)
                r = fetch(a, &q, fd);
        prefix_free(a);
        return r;
}

int64_t space_fetch(struct attachment *a, const struct fetch_request *q, int *fd) {
        int r = check(a->space, q);

        *fd = -1;
        if (r < 0)
                return r;
        return (q->before || q->more ? fetch_in_parts : fetch)(a, q, fd);
}

/* ---- its end --------------------------------------------------------------------------------- */

/* The result of write does not matter: it fails only if the eventfd is readable already. */
static void tell(struct fetch *f) {
        uint64_t one = 1;

        if (f->fd < 0)
                return;
        space_count_latency(f->space, KVD_LATENCY_FETCH, sys_now_ns() - f->begun_ns);
        (void)!write(f->fd, &one, sizeof one);
        closep(&f->fd);
        f->fd = -1;
}

/* Only a part of a bidirectional prefix arrived. */
static bool is_useless(const struct fetch *f) {
        const struct kvd_desc *last = block_desc(f->space, kvd_ref_id(f->last));

        return space_finds_whole(f->space) &&
               tokens_at(f->space, last->group, last->root, last->depth + 1);
}

void fetch_end(struct fetch *f) {
        if (f->from->reading == f)
                f->from->reading = NULL;
        f->from->queue--;
        kvd_list_remove(&f->waiting);
        if (f->last) {
                block_let_go(f->space, kvd_ref_id(f->last));
                if (is_useless(f))
                        block_condemn(f->space, kvd_ref_id(f->last));
        }
        tell(f);
        discharge(f->space, f->bytes);
        free(f);
}

/* The client is told now, but a request that is outstanding goes on. */
static void cancel(struct fetch *f) {
        if (f->from->reading != f) {
                fetch_end(f);
                return;
        }
        f->attachment = NULL;
        tell(f);
}

static struct fetch *fetch_of(struct kvd_list_node *node) {
        return container_of(node, struct fetch, waiting);
}

void fetches_end(struct below *b, const struct space *space, const struct attachment *a) {
        struct kvd_list_node *next;

        for (struct kvd_list_node *node = b->fetches.first; node; node = next) {
                struct fetch *f = fetch_of(node);

                next = node->next;
                if (f->space == space && (!a || f->attachment == a))
                        (a ? cancel : fetch_end)(f);
        }
}

void fetches_miss(struct below *b, const struct fetch *but) {
        struct kvd_list_node *next;

        for (struct kvd_list_node *node = b->fetches.first; node; node = next) {
                next = node->next;
                if (fetch_of(node) != but)
                        cancel(fetch_of(node));
        }
}

void fetches_close(struct below *b) {
        b->reading = NULL;
        fetches_miss(b, NULL);
}
