/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What the store asks of the disk goes to the disk process as messages, with descriptors of the
 * pool's segments, and what it answers goes back.
 */

#include "daemon/disk.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/degraded.h"
#include "daemon/log.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "store/disk.h"

#define MOST_PAUSE_NS UINT64_C(1000000000)
#define LATER_NS UINT64_C(200000000)   /* between two looks for what could be written */
#define WHOLE_BYTES (UINT64_C(1) << 20)
#define LEAST_BYTES (UINT64_C(4) << 20)
#define MOST_STARTS 5u                 /* in a row without an answer: then it is off */

static_assert(KVD_DISK_FILES <= KVD_FRAME_FDS, "a question is one frame");

struct disk_owner {
        struct child child;
        struct store *store;
        int fd;                 /* owned; locked */
        uint64_t bytes;
        bool open, said;        /* said: that it is off */
        uint32_t starts;        /* since it last answered */
        struct kvd_disk_item items[KVD_DISK_ITEMS];
        uint32_t tokens[KVD_DISK_TOKENS];
        int32_t errors[KVD_DISK_ITEMS];
        struct kvd_disk_found found[KVD_DISK_FOUND];
        struct kvd_disk_namespace namespaces[256];
        uint8_t secret[KVD_SECRET_BYTES];
};

static struct disk_owner *owner_of(const struct child *child) {
        return container_of(child, struct disk_owner, child);
}

/* ---- off ------------------------------------------------------------------------------------- */

static bool is_off(const struct disk_owner *d) {
        struct store_disk_info info;

        store_disk_get_info(d->store, &info);
        return info.state == STORE_DISK_OFF;
}

/* The store may have found out. */
static void say_if_off(struct disk_owner *d) {
        struct store_disk_info info;

        store_disk_get_info(d->store, &info);
        if (info.state != STORE_DISK_OFF || d->said)
                return;
        d->said = true;
        log_error("the file tier is off: %s", info.why);
        degraded_set(file_tier, 1);
}

static void off(struct disk_owner *d, const char *why) {
        store_disk_off(d->store, why);
        say_if_off(d);
}

/* ---- questions ------------------------------------------------------------------------------- */

static int write_items(struct disk_owner *d, const struct store_disk_question *q,
                       struct kvd_fds *fds, uint32_t *n_tokens) {
        *n_tokens = 0;
        for (uint32_t i = 0; i < q->n; i++) {
                const struct store_disk_item *from = &q->items[i];
                struct kvd_disk_item *to = &d->items[i];
                int fd;

                *to = (struct kvd_disk_item){.place = from->place, .label = from->label};
                fd = space_disk_memory(q->space, from->block, &to->offset);
                if (fd < 0)
                        return fd;
                to->file = child_add_fd(fds, fd);
                memcpy(d->tokens + *n_tokens, from->tokens,
                       from->label.n_tokens * sizeof *from->tokens);
                *n_tokens += from->label.n_tokens;
        }
        return 0;
}

static bool ask_to_move(struct disk_owner *d, const struct store_disk_question *q) {
        bool reads = q->what == STORE_DISK_READ;
        struct kvd_msg msg = {.number = reads ? KVD_MSG_disk_read : KVD_MSG_disk_write};
        struct kvd_slice items = {d->items, q->n * (uint32_t)sizeof *d->items}, tokens;
        uint64_t bytes = space_index(q->space)->block_bytes;
        struct kvd_fds fds = {.n = 0};
        uint32_t n_tokens;

        if (write_items(d, q, &fds, &n_tokens) < 0) {
                store_disk_lost(d->store);
                return true;
        }
        tokens = (struct kvd_slice){d->tokens, n_tokens * (uint32_t)sizeof *d->tokens};
        if (reads)
                msg.disk_read = (struct kvd_msg_disk_read){bytes, items, tokens};
        else
                msg.disk_write = (struct kvd_msg_disk_write){bytes, items, tokens};
        return child_ask_or_end(&d->child, &msg, &fds);
}

static bool ask(struct disk_owner *d, const struct store_disk_question *q) {
        struct kvd_slice id = {&q->id, sizeof q->id};
        struct kvd_msg msg = {0};

        switch (q->what) {
        case STORE_DISK_SCAN:
                msg.number = KVD_MSG_disk_scan;
                msg.disk_scan = (struct kvd_msg_disk_scan){q->extent, q->first};
                break;
        case STORE_DISK_NAMESPACE:
                msg.number = KVD_MSG_disk_namespace;
                msg.disk_namespace.id = id;
                break;
        case STORE_DISK_FORGET:
                msg.number = KVD_MSG_disk_forget;
                msg.disk_forget.id = id;
                break;
        case STORE_DISK_READ:
        case STORE_DISK_WRITE:
                return ask_to_move(d, q);
        }
        return child_ask_or_end(&d->child, &msg, NULL);
}

static bool ask_to_open(struct disk_owner *d) {
        struct kvd_msg msg = {.number = KVD_MSG_disk_open, .disk_open = {d->bytes}};
        struct kvd_fds fds = {.fd = {d->fd}, .n = 1};

        return child_ask_or_end(&d->child, &msg, &fds);
}

static void wants(void *data, bool soon) {
        struct disk_owner *d = data;

        if (soon)
                child_look_after(&d->child, 0);
        else if (!loop_timer_is_set(&d->child.look))
                child_look_after(&d->child, LATER_NS);
}

static bool next(struct child *child) {
        struct disk_owner *d = owner_of(child);
        const struct store_disk_question *q;
        bool later;

        say_if_off(d);
        if (!d->open)
                return ask_to_open(d);
        q = store_disk_next(d->store, &later);
        if (q)
                return ask(d, q);
        if (later)
                wants(d, false);
        return false;
}

/* ---- answers --------------------------------------------------------------------------------- */

static void opened(struct disk_owner *d, const struct kvd_msg_disk_open_reply *m) {
        struct store_disk_opened o = {.extent_bytes = m->extent_bytes,
                                      .opening = m->opening,
                                      .n_extents = m->extents,
                                      .namespaces = d->namespaces,
                                      .secret = d->secret};

        if (m->more)
                return;
        d->open = true;
        if (m->state == 2)
                log_warning("both superblocks of the file were broken: it begins anew");
        o.n_namespaces = child_array(d->namespaces, sizeof *d->namespaces,
                                    ARRAY_SIZE(d->namespaces), m->namespaces);
        if (child_array(d->secret, 1, sizeof d->secret, m->secret) != sizeof d->secret ||
            store_disk_opened(d->store, &o) < 0)
                off(d, "what its process says of the file makes no sense");
        else
                degraded_set(file_tier, 0);
}

static void scanned(struct disk_owner *d, const struct kvd_msg_disk_scan_reply *m) {
        uint32_t n = child_array(d->found, sizeof *d->found, ARRAY_SIZE(d->found), m->found);

        store_disk_scanned(d->store, 0, m->slot_bytes, d->found, n);
}

static void moved(struct disk_owner *d, struct kvd_slice errors) {
        uint32_t n = child_array(d->errors, sizeof *d->errors, ARRAY_SIZE(d->errors), errors);

        store_disk_moved(d->store, d->errors, n);
}

/*
 * A flush that failed is the end of the tier; a file that cannot be opened is, too. An extent that
 * cannot be looked at is no more than empty.
 */
static void failed(struct disk_owner *d, uint32_t asked, const struct kvd_msg_error *error) {
        char why[160];

        kvd_slice_copy(error->text, why, sizeof why);
        if (asked == KVD_MSG_disk_open)
                off(d, why);
        else if (asked == KVD_MSG_disk_namespace)
                store_disk_named(d->store, -(int)error->code, 0);
        else if (asked == KVD_MSG_disk_forget)
                store_disk_forgotten(d->store, -(int)error->code);
        else if (asked == KVD_MSG_disk_scan)
                store_disk_scanned(d->store, -(int)error->code, 0, NULL, 0);
        else
                store_disk_moved(d->store, NULL, 0);
        if (asked != KVD_MSG_disk_open && asked != KVD_MSG_disk_scan && error->code == EIO)
                off(d, why);
}

static void answered(struct child *child, uint32_t asked, const struct kvd_msg *m) {
        struct disk_owner *d = owner_of(child);

        d->starts = 0;
        child->pause_ns = 0;
        if (m->number == KVD_MSG_error)
                failed(d, asked, &m->error);
        else if (asked == KVD_MSG_disk_open)
                opened(d, &m->disk_open_reply);
        else if (asked == KVD_MSG_disk_scan)
                scanned(d, &m->disk_scan_reply);
        else if (asked == KVD_MSG_disk_namespace)
                store_disk_named(d->store, 0, m->disk_namespace_reply.epoch);
        else if (asked == KVD_MSG_disk_forget)
                store_disk_forgotten(d->store, 0);
        else
                moved(d, asked == KVD_MSG_disk_read ? m->disk_read_reply.errors :
                                                      m->disk_write_reply.errors);
        say_if_off(d);
        loop_want_idle(child->loop);
}

/* ---- its process ----------------------------------------------------------------------------- */

static bool wanted(struct child *child) {
        return !is_off(owner_of(child));
}

static int prepare(struct child *child) {
        struct disk_owner *d = owner_of(child);

        if (++d->starts > MOST_STARTS)
                off(d, "its process ends again and again; see the log");
        memcpy(child->arguments, (char *[]){"kvd", "--disk", NULL}, 3 * sizeof *child->arguments);
        return is_off(d) ? -ECANCELED : 0;
}

/* As long as it is not gone, it may write to what it was asked to read. */
static void late(struct child *child) {
        log_limited(LOG_WARNING, "the disk of the file tier hangs: what it has is missed");
        degraded_set(file_tier, 1);
        store_disk_hangs(owner_of(child)->store);
}

/* What it had under way is as if it had failed; what it knew is found by another one. */
static void ended(struct child *child, uint32_t asked) {
        struct disk_owner *d = owner_of(child);

        d->open = false;
        store_disk_lost(d->store);
        loop_want_idle(child->loop);
}

static const struct child_ops ops = {
        .name = "disk process",
        .wanted = wanted,
        .prepare = prepare,
        .late = late,
        .ended = ended,
        .next = next,
        .answered = answered,
};

/* ---- life ------------------------------------------------------------------------------------ */

/* Without O_DIRECT where the file system has none. */
static int open_file(const char *path) {
        int flags = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW;
        int fd = open(path, flags | O_DIRECT, 0600);

        if (fd >= 0 || errno != EINVAL)
                return fd < 0 ? -errno : fd;
        log_warning("%s is on a file system without O_DIRECT: what is read is cached twice", path);
        fd = open(path, flags, 0600);
        return fd < 0 ? -errno : fd;
}

#define LOCK_TRIES 200u
#define LOCK_PAUSE_US 10000u

/* The disk process of a kvd that was killed has it a moment longer than that kvd. */
static int lock_file(int fd) {
        for (uint32_t i = 0; i < LOCK_TRIES; i++) {
                if (flock(fd, LOCK_EX | LOCK_NB) == 0)
                        return 0;
                if (errno != EWOULDBLOCK)
                        return -errno;
                usleep(LOCK_PAUSE_US);
        }
        return -EWOULDBLOCK;
}

static int size_of(int fd, const struct config *config, uint64_t *ret) {
        struct stat st;
        off_t end;

        if (fstat(fd, &st) < 0)
                return -errno;
        end = S_ISBLK(st.st_mode) ? lseek(fd, 0, SEEK_END) : 0;
        if (!S_ISREG(st.st_mode) && !S_ISBLK(st.st_mode))
                return -EMEDIUMTYPE;
        *ret = (config->file_size ?: (uint64_t)end) / WHOLE_BYTES * WHOLE_BYTES;
        if (S_ISBLK(st.st_mode))
                *ret = MIN(*ret, (uint64_t)end / WHOLE_BYTES * WHOLE_BYTES);
        return *ret >= LEAST_BYTES ? 0 : -EINVAL;
}

static int take_file(struct disk_owner *d, const struct config *config, struct kvd_why *why) {
        int r;

        d->fd = open_file(config->file);
        if (d->fd < 0)
                return kvd_refuse(why, d->fd, "file %s: %s", config->file, strerror(-d->fd));
        r = lock_file(d->fd);
        if (r < 0)
                return kvd_refuse(why, r, "file %s: another kvd has it open", config->file);
        r = size_of(d->fd, config, &d->bytes);
        if (r == -EINVAL)
                return kvd_refuse(why, r, "file %s: set file_size, at least 4M", config->file);
        return r < 0 ? kvd_refuse(why, r, "file %s: %s", config->file, strerror(-r)) : 0;
}

static int begin(struct disk_owner *d, const struct config *config, struct loop *loop,
                 struct kvd_why *why) {
        struct store_disk_config tier = {.depth = config->file_depth};
        int r = take_file(d, config, why);

        if (r < 0)
                return r;
        tier.bytes = d->bytes;
        r = store_disk_begin(d->store, &tier);
        if (r < 0)
                return kvd_refuse(why, r, "%s", store_why(d->store));
        r = child_init(&d->child, &ops, config->worker_program, loop);
        d->child.most_pause_ns = MOST_PAUSE_NS;
        d->child.patience_ns = config->file_timeout * UINT64_C(1000000000);
        store_on_disk(d->store, wants, d);
        return r < 0 ? kvd_refuse(why, r, "out of memory for the disk process") : 0;
}

int disk_owner_new(const struct config *config, struct loop *loop, struct store *store,
                   struct disk_owner **ret, struct kvd_why *why) {
        struct disk_owner *d;
        int r;

        *ret = NULL;
        if (!config->file[0])
                return 0;
        d = sys->calloc(1, sizeof *d);
        if (!d)
                return kvd_refuse(why, -ENOMEM, "out of memory for the disk process");
        d->store = store;
        d->fd = -1;
        d->child.socket.fd = d->child.process.fd = -1;
        r = begin(d, config, loop, why);
        if (r < 0) {
                disk_owner_free(d);
                return r;
        }
        *ret = d;
        return 0;
}

struct disk_owner *disk_owner_free(struct disk_owner *d) {
        if (!d)
                return NULL;
        store_on_disk(d->store, NULL, NULL);
        if (d->child.ops)
                child_clear(&d->child);
        closep(&d->fd);
        free(d);
        return NULL;
}

void disk_owner_start(struct disk_owner *d) {
        if (d)
                child_look(&d->child);
}
