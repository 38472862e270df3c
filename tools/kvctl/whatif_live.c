/* SPDX-License-Identifier: Apache-2.0 */

/* whatif --live: the requests are the lookups of a space's clients from now on. */

#include <errno.h>

#include "tools/kvctl/follow.h"
#include "tools/kvctl/whatif.h"

struct live {
        struct requests *to;
        const char *trouble; /* why no more requests fit; NULL if they do */
        uint64_t n_missed;   /* number of times that lookups were not read in time */
};

/* ---- blocks that come and go: ignored -------------------------------------------------------- */

static void pass_stored(void *arg, const struct kvd_stored *block) {
        (void)arg;
        (void)block;
}

static void pass_removed(void *arg, uint64_t hash) {
        (void)arg;
        (void)hash;
}

static void pass_cleared(void *arg) {
        (void)arg;
}

static const struct kvd_follow_ops block_ops = {.stored = pass_stored,
                                                .removed = pass_removed,
                                                .cleared = pass_cleared};

/* ---- lookups --------------------------------------------------------------------------------- */

static void take_asked(void *arg, uint32_t client, const struct kvd_asked *note) {
        struct live *live = arg;

        (void)client;
        if (note->n_keys && !live->trouble)
                live->trouble = requests_add(live->to, note->keys, note->n_keys);
}

static void count_missed(void *arg, uint32_t client) {
        struct live *live = arg;

        (void)client;
        live->n_missed++;
}

static const struct asked_ops lookup_ops = {.asked = take_asked, .missed = count_missed};

static void begin(void *arg, const struct space_name *space, const struct kvd_index *ix) {
        (void)arg;
        (void)space;
        (void)ix;
}

/* Ends the watch when no more requests fit; those seen until then are answered for. */
static int go_on(struct kvctl *kvctl, void *arg) {
        const struct live *live = arg;

        (void)kvctl;
        return live->trouble ? 1 : 0;
}

static const struct watch_ops live_ops = {.blocks = &block_ops,
                                          .lookups = &lookup_ops,
                                          .began = begin,
                                          .looked = go_on};

int whatif_follow(struct kvctl *kvctl, struct requests *ret, uint64_t *n_missed) {
        struct live live = {.to = ret};
        int r = watch_space(kvctl, &live_ops, &live);

        *n_missed = live.n_missed;
        if (r < 0)
                return r;
        return ret->n ? 0 :
                        kvctl_fail(kvctl, KVCTL_NO, -ENODATA,
                                   "nobody looked anything up in space \"%s\" meanwhile",
                                   kvctl->args.operand[0]);
}
