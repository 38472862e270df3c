/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvctl opens no space: it asks the daemon for the index of one, and again if the daemon is
 * replaced. What is there and what has changed is libkvd's to find out (client/cache/follow.c).
 */

#include "tools/kvctl/follow.h"

#include <errno.h>
#include <sys/mman.h>

#include "ipc/base/shared_file.h"
#include "ipc/base/sys.h"

#define LOOK_NS UINT64_C(500000000) /* interval between checks of the connection */

struct follow {
        struct kvctl *kvctl;
        struct space_name name;
        struct kvd_follow *follower; /* owned */
        uint64_t look_ns;            /* when the connection is checked next */
        uint64_t instance;           /* of the daemon that owns the index */
        const struct kvd_index *ix;  /* owned mapping; NULL while there is no such space */
        uint64_t bytes;
};

/* ---- the index ------------------------------------------------------------------------------- */

static void unmap_index(struct follow *f) {
        if (f->ix)
                munmap((void *)f->ix, f->bytes);
        f->ix = NULL;
}

static int take_index(struct follow *f, int fd, uint64_t bytes) {
        void *at;
        int r = shared_file_map(fd, bytes, PROT_READ, &at);

        if (r < 0)
                return kvctl_fail(f->kvctl, KVCTL_NO, r, "the index cannot be mapped: %s",
                                  strerror(-r));
        if (bytes < KVD_INDEX_HEADER_BYTES || kvd_index_validate(at, bytes) < 0) {
                munmap(at, bytes);
                return kvctl_fail(
                        f->kvctl, KVCTL_NO, -EPROTO,
                        "the daemon's index has another layout; is it of another version?");
        }
        r = follower_take(f->follower, at);
        unmap_index(f);
        f->ix = at;
        f->bytes = bytes;
        return r < 0 ? kvctl_out_of_memory(f->kvctl) : 0;
}

static int open_index(struct follow *f) {
        struct kvd_msg_follow request = {.space = kvd_slice_of(f->name.name),
                                         .domain = kvd_slice_of(f->name.domain)};
        struct kvd_msg_follow_reply reply;
        struct kvd_fds fds = {.n = 0};
        int r = kvctl_call_fds(f->kvctl, KVD_MSG_follow, &request, &reply, &fds);

        if (r == 0)
                r = fds.n == 1 ? take_index(f, fds.fd[0], reply.bytes) :
                                 kvctl_fail(f->kvctl, KVCTL_NO, -EPROTO, "no index came");
        if (r == 0)
                f->instance = conn_peer(f->kvctl->conn)->instance;
        kvd_fds_close(&fds);
        return r;
}

/* ---- a daemon that is away ------------------------------------------------------------------- */

static void space_is_gone(struct follow *f) {
        follower_lose(f->follower);
        unmap_index(f);
}

/* A daemon or a space that is away may come back, which is no error. Other errors are final. */
static int open_again(struct follow *f) {
        int r = open_index(f);

        if (r < 0 && f->kvctl->exit == KVCTL_NO_DAEMON) {
                follower_away(f->follower, true);
                return 0;
        }
        if (r == -ENOENT && f->ix)
                space_is_gone(f);
        if (r == -ENOENT || r == 0)
                follower_away(f->follower, false);
        return r == -ENOENT ? 0 : r;
}

/* After a change of daemons, the old index is no longer updated. */
static bool is_served(const struct follow *f) {
        return f->ix && f->kvctl->conn && conn_peer(f->kvctl->conn)->instance == f->instance;
}

static int look_at_connection(struct follow *f) {
        uint64_t now = sys_now_ns();

        if (now < f->look_ns)
                return 0;
        f->look_ns = now + LOOK_NS;
        if (f->kvctl->conn && !conn_has_peer(f->kvctl->conn))
                kvctl_hang_up(f->kvctl);
        return is_served(f) ? 0 : open_again(f);
}

int follow_step(struct follow *f) {
        int r = look_at_connection(f);

        if (r < 0 || !f->ix)
                return r;
        follower_round(f->follower);
        if (!atomic_load(&f->ix->alive))
                space_is_gone(f);
        return 0;
}

const struct kvd_index *follow_index(const struct follow *f) {
        return f->ix;
}

int follow_tell_all(struct follow *f, const struct kvd_follow_ops *ops, void *arg) {
        int r = f->ix ? follower_tell_all(f->follower, ops, arg) : 0;

        return r < 0 ? kvctl_out_of_memory(f->kvctl) : 0;
}

/* ---- life ------------------------------------------------------------------------------------ */

static void ignore_stored(void *arg, const struct kvd_stored *block) {
        (void)arg;
        (void)block;
}

static const struct kvd_follow_ops ignore = {.stored = ignore_stored};

static int begin(struct follow *f, bool whole, bool quiet, const struct kvd_follow_ops *ops,
                 void *arg) {
        int r;

        f->follower = follower_new(whole, quiet ? &ignore : ops, arg);
        if (!f->follower)
                return kvctl_out_of_memory(f->kvctl);
        r = open_index(f);
        if (r == 0 && quiet)
                follower_round(f->follower);
        follower_report_to(f->follower, ops);
        f->look_ns = sys_now_ns() + LOOK_NS;
        return r;
}

int follow_begin(struct kvctl *kvctl, const struct space_name *space, bool whole, bool quiet,
                 const struct kvd_follow_ops *ops, void *arg, struct follow **ret) {
        struct follow *f = calloc(1, sizeof *f);
        int r;

        if (!f)
                return kvctl_out_of_memory(kvctl);
        *f = (struct follow){.kvctl = kvctl, .name = *space};
        r = begin(f, whole, quiet, ops, arg);
        if (r < 0)
                follow_end(f);
        else
                *ret = f;
        return r;
}

struct follow *follow_end(struct follow *f) {
        if (!f)
                return NULL;
        kvd_follow_end(f->follower);
        unmap_index(f);
        free(f);
        return NULL;
}

void follow_endp(struct follow **f) {
        follow_end(*f);
}
