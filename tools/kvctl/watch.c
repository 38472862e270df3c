/* SPDX-License-Identifier: Apache-2.0 */

/* Polls the lookups of a space's clients, and the blocks that come and go. */

#include <errno.h>

#include "ipc/base/sys.h"
#include "tools/kvctl/follow.h"

#define POLL_S 0.01
#define FIND_NS UINT64_C(200000000) /* interval between searches for new clients */

struct watch {
        const struct watch_ops *ops;
        void *arg;
        struct follow *follow; /* owned */
        struct pages *pages;   /* owned */
        uint64_t find_ns;      /* when to look for clients again */
};

/* Lookups are reported before the changes that they cause. */
static int look(struct kvctl *kvctl, struct watch *w) {
        const struct kvd_index *ix = follow_index(w->follow);
        int r = 0;

        pages_read(w->pages, w->ops->lookups, w->arg);
        if (sys_now_ns() >= w->find_ns) {
                r = pages_find(w->pages, ix);
                w->find_ns = sys_now_ns() + FIND_NS;
        }
        if (r == 0)
                r = follow_step(w->follow);
        return r < 0 ? r : w->ops->looked(kvctl, w->arg);
}

static int look_on(struct kvctl *kvctl, struct watch *w) {
        double seconds = kvctl->args.seconds[FLAG_FOR];
        uint64_t end_ns = seconds > 0 ? sys_now_ns() + (uint64_t)(seconds * 1e9) : UINT64_MAX;
        int r;

        screen_watch_begin(&kvctl->screen, false, false);
        do {
                r = look(kvctl, w);
        } while (r == 0 && sys_now_ns() < end_ns && screen_wait(&kvctl->screen, POLL_S));
        screen_watch_end(&kvctl->screen);
        return r;
}

static int begin(struct kvctl *kvctl, struct watch *w) {
        struct space_name space;
        int r = kvctl_space(kvctl, &space);

        if (r == 0)
                r = follow_begin(kvctl, &space, false, true, w->ops->blocks, w->arg, &w->follow);
        if (r < 0)
                return r;
        w->pages = pages_new(kvctl, &space);
        if (!w->pages)
                return kvctl_out_of_memory(kvctl);
        r = pages_find(w->pages, follow_index(w->follow));
        if (r == 0)
                w->ops->began(w->arg, &space, follow_index(w->follow));
        return r;
}

int watch_space(struct kvctl *kvctl, const struct watch_ops *ops, void *arg) {
        struct watch w = {.ops = ops, .arg = arg};
        int r = begin(kvctl, &w);

        if (r == 0)
                r = look_on(kvctl, &w);
        follow_endp(&w.follow);
        pages_freep(&w.pages);
        return r;
}
