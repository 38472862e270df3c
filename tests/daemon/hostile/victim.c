/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/daemon/hostile/victim.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/lib/instance.h"
#include "tests/lib/oracle.h"

const struct kvd_geometry victim_geometry = {.layers = 1,
                                             .kv_heads = 2,
                                             .head_dim = 128,
                                             .block_tokens = VICTIM_BT,
                                             .dtype = KVD_F32,
                                             .vocab = 50000,
                                             .fingerprint = {1, 2}};

struct kvd_msg victim_space_message(void) {
        const struct kvd_geometry *g = &victim_geometry;

        return (struct kvd_msg){.number = KVD_MSG_space,
                                .serial = 2,
                                .space = {.name = kvd_slice_of("victim"),
                                          .create = 1,
                                          .layers = g->layers,
                                          .kv_heads = g->kv_heads,
                                          .head_dim = g->head_dim,
                                          .block_tokens = g->block_tokens,
                                          .dtype = g->dtype,
                                          .vocab = g->vocab,
                                          .fingerprint0 = g->fingerprint[0],
                                          .fingerprint1 = g->fingerprint[1]}};
}

/* ---- content --------------------------------------------------------------------------------- */

void victim_tokens(uint32_t chain, uint32_t *ret) {
        for (uint32_t i = 0; i < VICTIM_BLOCKS * VICTIM_BT; i++)
                ret[i] = i / VICTIM_BT < 8 ? i : chain * 100 + i;
}

static uint64_t seed_of(uint32_t chain, uint32_t nth) {
        uint32_t tokens[VICTIM_BLOCKS * VICTIM_BT];

        victim_tokens(chain, tokens);
        return oracle_seed(11, tokens, (nth + 1) * VICTIM_BT);
}

bool victim_block_is_right(const uint8_t *data, uint32_t chain, uint32_t nth) {
        return oracle_wrong(data, kvd_block_bytes(&victim_geometry), seed_of(chain, nth)) == 0;
}

void victim_block_fill(uint8_t *data, uint32_t chain, uint32_t nth) {
        oracle_fill(data, kvd_block_bytes(&victim_geometry), seed_of(chain, nth));
}

/* ---- work ------------------------------------------------------------------------------------ */

struct worker {
        const struct instance *daemon;
        struct victim_facts *facts;
        struct kvd_space *space;
        struct random random;
};

static bool went_well(struct worker *w, int64_t r, const char *what) {
        if (r >= 0)
                return true;
        if (r == -ENOBUFS || r == -EDQUOT) {
                w->facts->refusals++;
                return false;
        }
        w->facts->errors++;
        fprintf(stderr, "victim: %s: %s\n", what, kvd_error());
        return false;
}

static void check(struct worker *w, const struct kvd_pin *pin, const uint32_t *ids,
                  uint32_t chain) {
        for (uint32_t i = 0; i < pin->n_blocks; i++) {
                w->facts->bytes_checked += pin->block_bytes;
                if (!victim_block_is_right(kvd_pin_block(pin, ids[i]), chain, i))
                        w->facts->bytes_wrong += pin->block_bytes;
        }
}

static void extend(struct worker *w, struct kvd_pin *pin, uint32_t *ids, uint32_t chain) {
        uint32_t tokens[VICTIM_BLOCKS * VICTIM_BT], first = pin->n_blocks;
        struct kvd_block blocks[VICTIM_BLOCKS];
        int r = kvd_alloc(w->space, 1 + random_below(&w->random, VICTIM_BLOCKS - first), blocks),
            n = r;

        if (!went_well(w, r, "kvd_alloc"))
                return;
        for (int i = 0; i < n; i++)
                victim_block_fill(blocks[i].data, chain, first + (uint32_t)i);
        victim_tokens(chain, tokens);
        r = kvd_seal(w->space, pin, (uint32_t)n, blocks, tokens + first * VICTIM_BT,
                     (uint32_t)n * VICTIM_BT);
        if (!went_well(w, r, "kvd_seal")) {
                kvd_free(w->space, (uint32_t)n, blocks);
                return;
        }
        for (int i = 0; i < n; i++)
                ids[first + (uint32_t)i] = blocks[i].id;
}

static void operation(struct worker *w) {
        uint32_t tokens[VICTIM_BLOCKS * VICTIM_BT], ids[VICTIM_BLOCKS],
                chain = random_below(&w->random, 60);
        struct work_begun began = work_begin(w->daemon);
        struct kvd_pin pin = {0};
        int64_t n;

        victim_tokens(chain, tokens);
        n = kvd_lookup(w->space, 0, tokens, VICTIM_BLOCKS * VICTIM_BT, ids, VICTIM_BLOCKS, &pin);
        w->facts->hits += n > 0;
        if (went_well(w, n, "kvd_lookup") && pin.n_blocks < VICTIM_BLOCKS)
                extend(w, &pin, ids, chain);
        check(w, &pin, ids, chain);
        kvd_unpin(w->space, &pin);
        work_see(&w->facts->work, work_since(w->daemon, &began));
        w->facts->operations++;
}

static int work(struct victim_facts *facts, const struct instance *daemon) {
        struct worker w = {.daemon = daemon, .facts = facts, .random = {5}};
        struct kvd *handle;

        if (kvd_open(daemon->socket, &handle) < 0 ||
            kvd_space_open(handle, "victim", &victim_geometry, NULL, &w.space) < 0)
                die("victim: %s", kvd_error());
        while (!facts->stop) {
                operation(&w);
                usleep(200);
        }
        kvd_space_close(w.space);
        kvd_close(handle);
        return 0;
}

/* ---- life ------------------------------------------------------------------------------------ */

void victim_start(struct victim *v, const struct instance *daemon, uid_t user) {
        v->facts = mmap(NULL, sizeof *v->facts, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                        -1, 0);
        v->pid = fork();
        if (v->pid == 0) {
                if (user)
                        become_user(user);
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                _exit(work(v->facts, daemon));
        }
        while (v->facts->operations < 20)
                usleep(1000);
}

void victim_stop(struct victim *v) {
        int status;

        v->facts->stop = true;
        waitpid(v->pid, &status, 0);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
                die("the victim ended with status %#x", status);
}
