/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/client/killpoints/actor.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/client/killpoints/chains.h"
#include "tests/client/killpoints/elsewhere.h"
#include "tests/client/killpoints/hook.h"
#include "tests/lib/instance.h"

struct actor {
        const char *socket;
        struct kvd *handle;
        struct kvd_space *causal, *whole;
        struct kvd_pin pin;
        uint32_t tokens[CHAIN_TOKENS], whole_tokens[WHOLE_TOKENS], ids[CHAIN_BLOCKS];
        struct kvd_block blocks[CHAIN_BLOCKS];
        uint32_t n_blocks;
};

/* ---- preparations ---------------------------------------------------------------------------- */

static int opened(struct actor *a) {
        a->handle = open_spaces(a->socket, &a->causal, &a->whole);
        return 0;
}

static int connected(struct actor *a) {
        return kvd_open(a->socket, &a->handle);
}

static int run_lookup(struct actor *a) {
        return (int)kvd_lookup(a->causal, 0, a->tokens, CHAIN_TOKENS, a->ids, CHAIN_BLOCKS,
                               &a->pin);
}

static int findable(struct actor *a) {
        opened(a);
        return publish_elsewhere(a->socket, OPERATION_CHAIN, CHAIN_TOKENS);
}

/* As findable(), and the segments are mapped, so that the chain is found. */
static int mapped(struct actor *a) {
        int r = findable(a);

        return r < 0 ? r : kvd_catch_up(a->causal);
}

static int warm(struct actor *a) {
        int r = mapped(a);

        if (r < 0 || run_lookup(a) <= 0)
                return -ENOENT;
        kvd_unpin(a->causal, &a->pin);
        return r;
}

static int partly_there(struct actor *a) {
        opened(a);
        return publish_elsewhere(a->socket, OPERATION_CHAIN, 22 * BT + 2);
}

static int whole_there(struct actor *a) {
        opened(a);
        return publish_elsewhere(a->socket, WHOLE_CHAIN, WHOLE_TOKENS);
}

static int pinned(struct actor *a) {
        int r = mapped(a);

        return r < 0 ? r : run_lookup(a);
}

static int take(struct actor *a, struct kvd_space *space, uint32_t n) {
        a->n_blocks = n;
        return take_blocks(space, n, a->blocks);
}

static int one_taken(struct actor *a) { /* and some are left in the stock */
        opened(a);
        return take(a, a->causal, 1);
}

static int many_taken(struct actor *a) { /* more than fit into the stock again */
        opened(a);
        return take(a, a->causal, CHAIN_BLOCKS);
}

/* Takes and fills blocks of the chain from `first` on, to be sealed. */
static int filled(struct actor *a, uint32_t first, uint32_t n) {
        int r = take(a, a->causal, n);

        chain_fill(a->tokens, CHAIN_TOKENS, false, first, r < 0 ? 0 : n, a->blocks);
        return r;
}

static int filled_new(struct actor *a) {
        opened(a);
        return filled(a, 0, 20);
}

static int filled_behind_pin(struct actor *a) {
        opened(a);
        if (chain_publish(a->causal, &a->pin, a->tokens, 12 * BT, false) < 0)
                return -EIO;
        return filled(a, 12, 8);
}

static int filled_duplicates(struct actor *a) {
        int r = findable(a);

        return r < 0 ? r : filled(a, 0, 20);
}

static int filled_mixed(struct actor *a) {
        opened(a);
        return publish_elsewhere(a->socket, OPERATION_CHAIN + 1, CHAIN_TOKENS) < 0 ?
                       -EIO :
                       filled(a, 0, 20);
}

static int leased(struct actor *a) {
        opened(a);
        return kvd_lease(a->whole, a->whole_tokens, WHOLE_TOKENS, 0) == 1 ? 0 : -EBUSY;
}

static int filled_whole(struct actor *a) {
        int r = leased(a);

        if (r == 0)
                r = take(a, a->whole, WHOLE_TOKENS / BT);
        chain_fill(a->whole_tokens, WHOLE_TOKENS, true, 0, r < 0 ? 0 : a->n_blocks, a->blocks);
        return r;
}

/* Publishes chains until the pool is full. */
static int crowded(struct actor *a) {
        int r = 0;

        opened(a);
        for (uint32_t chain = 100; chain < 100 + 4 * CAUSAL_BLOCKS / CHAIN_BLOCKS && r >= 0;
             chain += 4)
                r = publish_elsewhere(a->socket, chain, CHAIN_TOKENS);
        return r;
}

static int busy(struct actor *a) { /* holds a bit of everything */
        int r = pinned(a);

        return r < 0 ? r : take(a, a->causal, OBSERVER_BLOCKS);
}

/* ---- operations ------------------------------------------------------------------------------ */

static int run_space_open(struct actor *a) {
        return kvd_space_open(a->handle, CAUSAL_SPACE, &chain_geometry, &causal_options,
                              &a->causal);
}

static int run_lookup_whole(struct actor *a) {
        return (int)kvd_lookup(a->whole, 0, a->whole_tokens, WHOLE_TOKENS, a->ids, CHAIN_BLOCKS,
                               &a->pin);
}

static int run_match(struct actor *a) {
        return (int)kvd_match(a->causal, 0, a->tokens, CHAIN_TOKENS);
}

static int run_use(struct actor *a) { /* of the first blocks: others are used alike */
        struct kvd_pin some = a->pin;

        some.n_blocks = 3;
        return chain_wrong(&some, a->ids, a->tokens, false) ? -EILSEQ : 0;
}

static int run_unpin(struct actor *a) {
        kvd_unpin(a->causal, &a->pin);
        return 0;
}

static int run_alloc(struct actor *a) {
        return kvd_alloc(a->causal, 4, a->blocks + a->n_blocks);
}

static int run_fill(struct actor *a) {
        chain_fill(a->tokens, CHAIN_TOKENS, false, 0, 2, a->blocks);
        return 0;
}

static int seal(struct actor *a, uint32_t n_tokens) {
        return kvd_seal(a->causal, &a->pin, a->n_blocks, a->blocks, a->tokens + a->pin.n_tokens,
                        n_tokens);
}

static int run_seal(struct actor *a) {
        return seal(a, a->n_blocks * BT);
}

static int run_seal_tail(struct actor *a) {
        return seal(a, a->n_blocks * BT - 2);
}

static int run_seal_whole(struct actor *a) {
        return kvd_seal(a->whole, &a->pin, a->n_blocks, a->blocks, a->whole_tokens, WHOLE_TOKENS);
}

static int run_free(struct actor *a) {
        kvd_free(a->causal, a->n_blocks, a->blocks);
        return 0;
}

static int post(struct actor *a) {
        return kvd_post(a->causal, &a->pin, a->n_blocks, a->blocks, a->tokens, a->n_blocks * BT);
}

/* The post may also be refused, if other clients' blocks that precede it were evicted meanwhile. */
static int run_post(struct actor *a) {
        int r = post(a);

        if (r >= 0)
                r = kvd_flush(a->causal);
        return r == -ECANCELED ? 0 : r;
}

/* Frees the blocks; the daemon may not have seen the posts yet. */
static int run_post_free(struct actor *a) {
        int r = post(a);

        return r < 0 ? r : run_free(a);
}

static int run_lease(struct actor *a) {
        return kvd_lease(a->whole, a->whole_tokens, WHOLE_TOKENS, 0);
}

/* May also be granted, if this process is so slow that the partner has ended. */
static int run_lease_refused(struct actor *a) {
        int r = run_lease(a);

        return r == -EBUSY ? 0 : r;
}

static int run_lease_wait(struct actor *a) {
        return kvd_lease(a->whole, a->whole_tokens, WHOLE_TOKENS, PATIENCE_MS);
}

static int run_lease_end(struct actor *a) {
        return kvd_lease_end(a->whole, a->whole_tokens, WHOLE_TOKENS);
}

static int run_space_close(struct actor *a) {
        kvd_unpin(a->causal, &a->pin);
        a->causal = kvd_space_close(a->causal);
        return 0;
}

static int run_close(struct actor *a) {
        a->handle = kvd_close(a->handle);
        return 0;
}

/* Releases the old daemon's pin and blocks after the new daemon has provided others. */
static int run_reconnect(struct actor *a) {
        struct kvd_block fresh[2];
        int r = -ECONNRESET;

        for (int i = 0; i < 3 && r < 0; i++)
                r = kvd_alloc(a->causal, 2, fresh);
        kvd_unpin(a->causal, &a->pin);
        kvd_free(a->causal, a->n_blocks, a->blocks);
        return r;
}

/* A client's whole life. */
static int run_session(struct actor *a) {
        opened(a);
        if (run_lookup(a) < 0 || filled(a, a->pin.n_blocks, 18) < 0 || seal(a, 18 * BT - 1) < 0)
                return -EIO;
        kvd_unpin(a->causal, &a->pin);
        if (run_lookup(a) < 0 || take(a, a->causal, 2) < 0)
                return -EIO;
        run_free(a);
        kvd_unpin(a->causal, &a->pin);
        if (run_lease(a) < 0 || take(a, a->whole, WHOLE_TOKENS / BT) < 0)
                return -EIO;
        chain_fill(a->whole_tokens, WHOLE_TOKENS, true, 0, a->n_blocks, a->blocks);
        if (run_seal_whole(a) < 0 || run_lease_end(a) < 0)
                return -EIO;
        kvd_unpin(a->whole, &a->pin);
        a->whole = kvd_space_close(a->whole);
        a->causal = kvd_space_close(a->causal);
        return run_close(a);
}

/* ---- wrong bytes held afterwards ------------------------------------------------------------- */

static size_t wrong_found(struct actor *a) {
        return chain_wrong(&a->pin, a->ids, a->tokens, false);
}

static size_t wrong_found_whole(struct actor *a) {
        return chain_wrong(&a->pin, a->ids, a->whole_tokens, true);
}

/* The blocks may also be sealed: these, or other clients' with the same content. */
static size_t wrong_filled(struct actor *a) {
        uint32_t before = a->pin.n_blocks > a->n_blocks ? a->pin.n_blocks - a->n_blocks : 0;

        return blocks_wrong(a->tokens, a->pin.n_tokens ? a->pin.n_tokens : CHAIN_TOKENS, false,
                            before, a->n_blocks, a->blocks);
}

static size_t wrong_filled_whole(struct actor *a) {
        return blocks_wrong(a->whole_tokens, WHOLE_TOKENS, true, 0, a->n_blocks, a->blocks);
}

/* ---- the list -------------------------------------------------------------------------------- */

const struct operation operations[] = {
        {.name = "open", .run = connected},
        {.name = "space open", .prepare = connected, .run = run_space_open},
        {.name = "lookup, hit, first time",
         .prepare = findable,
         .run = run_lookup,
         .wrong = wrong_found},
        {.name = "lookup, hit", .prepare = warm, .run = run_lookup, .wrong = wrong_found},
        {.name = "lookup, partial",
         .prepare = partly_there,
         .run = run_lookup,
         .wrong = wrong_found},
        {.name = "lookup, miss", .prepare = opened, .run = run_lookup, .wrong = wrong_found},
        {.name = "lookup, bidirectional",
         .prepare = whole_there,
         .run = run_lookup_whole,
         .wrong = wrong_found_whole},
        {.name = "match", .prepare = warm, .run = run_match},
        {.name = "use in place", .prepare = pinned, .run = run_use, .wrong = wrong_found},
        {.name = "unpin", .prepare = pinned, .run = run_unpin},
        {.name = "alloc, from the daemon", .prepare = opened, .run = run_alloc},
        {.name = "alloc, evicting", .prepare = crowded, .run = run_alloc},
        {.name = "alloc, from stock", .prepare = one_taken, .run = run_alloc},
        {.name = "fill", .prepare = many_taken, .run = run_fill},
        {.name = "free", .prepare = many_taken, .run = run_free},
        {.name = "seal, new", .prepare = filled_new, .run = run_seal, .wrong = wrong_filled},
        {.name = "seal, behind a pin",
         .prepare = filled_behind_pin,
         .run = run_seal,
         .wrong = wrong_filled},
        {.name = "seal, all duplicates",
         .prepare = filled_duplicates,
         .run = run_seal,
         .wrong = wrong_filled},
        {.name = "seal, mixed", .prepare = filled_mixed, .run = run_seal, .wrong = wrong_filled},
        {.name = "seal, tail", .prepare = filled_new, .run = run_seal_tail},
        {.name = "seal, bidirectional",
         .prepare = filled_whole,
         .run = run_seal_whole,
         .wrong = wrong_filled_whole},
        {.name = "post, new", .prepare = filled_new, .run = run_post, .wrong = wrong_filled},
        {.name = "post, all duplicates",
         .prepare = filled_duplicates,
         .run = run_post,
         .wrong = wrong_filled},
        {.name = "post, mixed", .prepare = filled_mixed, .run = run_post, .wrong = wrong_filled},
        {.name = "post, then free", .prepare = filled_new, .run = run_post_free},
        {.name = "lease", .prepare = opened, .run = run_lease},
        {.name = "lease, refused",
         .prepare = opened,
         .run = run_lease_refused,
         .partner = gives_up},
        {.name = "lease, wait, given up",
         .prepare = opened,
         .run = run_lease_wait,
         .partner = gives_up},
        {.name = "lease, wait, finished",
         .prepare = opened,
         .run = run_lease_wait,
         .partner = finishes},
        {.name = "lease, end", .prepare = leased, .run = run_lease_end},
        {.name = "space close", .prepare = busy, .run = run_space_close},
        {.name = "close", .prepare = connected, .run = run_close},
        {.name = "reconnect", .prepare = busy, .run = run_reconnect, .restart = true},
        {.name = "a whole session", .run = run_session},
        {.name = NULL},
};

/* ---- the process ----------------------------------------------------------------------------- */

static void take_turn(int fd) {
        char byte = 't';

        if (fd >= 0 && (write(fd, &byte, 1) != 1 || read(fd, &byte, 1) != 1))
                die("the test ended");
}

static void prepare(const struct operation *op, struct actor *a, int turn) {
        chain_tokens(OPERATION_CHAIN, CHAIN_TOKENS, a->tokens);
        chain_tokens(WHOLE_CHAIN, WHOLE_TOKENS, a->whole_tokens);
        if (op->prepare && op->prepare(a) < 0)
                die("%s: preparation: %s", op->name, kvd_error());
        take_turn(turn);
}

_Noreturn static void act(const struct operation *op, struct actor *a, struct stage *stage,
                          uint64_t nth, int signal) {
        uint64_t points;
        int r;

        hook_signal_at(nth, signal);
        stage->prepared = true;
        hook_start();
        r = op->run(a);
        points = hook_stop();
        if (r < 0)
                die("%s: %s (%d)", op->name, kvd_error(), r);
        if (nth)
                stage->survived++;
        else
                stage->points = points;
        if (op->wrong)
                stage->bytes_wrong += op->wrong(a);
        hook_signal(SIGKILL);
        abort();
}

pid_t actor_start(const struct operation *op, const char *socket, struct stage *stage, uint64_t nth,
                  int signal, int turn, uint64_t shake) {
        struct actor a = {.socket = socket};
        pid_t pid = fork();

        if (pid)
                return pid;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        prepare(op, &a, turn);
        if (shake)
                hook_shake(shake);
        act(op, &a, stage, nth, signal);
}
