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
#define HEARD_NOTHING UINT32_MAX

static_assert(KVD_DISK_FILES <= KVD_FRAME_FDS, "a question is one frame");

struct disk_owner {
        struct child child;
        struct store *store;
        uint32_t n_files;
        int fds[DISK_FILES];    /* owned; locked; -1: it cannot be opened */
        int64_t sizes[DISK_FILES]; /* ... why: a negative errno */
        uint32_t files_off;     /* as it was said last */
        struct kvd_disk_file files[DISK_FILES];
        bool open, said[DISK_FILES]; /* said: that it is off */
        uint32_t heard;         /* files that its process has heard of; HEARD_NOTHING: nor of it */
        uint32_t starts;        /* since it last answered */
        struct kvd_disk_item items[KVD_DISK_ITEMS];
        uint32_t tokens[KVD_DISK_TOKENS];
        int32_t errors[KVD_DISK_ITEMS];
        uint64_t checksums[KVD_DISK_ITEMS];
        struct kvd_disk_found found[KVD_DISK_FOUND];
        struct kvd_disk_namespace namespaces[256];
        uint8_t secret[KVD_SECRET_BYTES];
};

static struct disk_owner *owner_of(const struct child *child) {
        return container_of(child, struct disk_owner, child);
}

/* ---- off ------------------------------------------------------------------------------------- */

static bool is_off(const struct disk_owner *d) {
        return store_disk_state(d->store) == STORE_DISK_OFF;
}

static void say_file_is_off(struct disk_owner *d, uint32_t file) {
        struct store_disk_info info;

        store_disk_get_info(d->store, file, &info);
        if (info.state != STORE_DISK_OFF || d->said[file])
                return;
        d->said[file] = true;
        if (!is_off(d)) {
                log_error("%s of the file tier is off: %s", info.name, info.why);
                return;
        }
        log_error("the file tier is off: %s", info.why);
        memset(d->said, true, sizeof d->said);
}

/* The store may have found out. */
static void say_what_is_off(struct disk_owner *d) {
        uint32_t n = store_disk_files_off(d->store);

        if (n == d->files_off)
                return;
        d->files_off = n;
        degraded_set(file_tier, n);
        for (uint32_t i = 0; i < d->n_files; i++)
                say_file_is_off(d, i);
}

static void off(struct disk_owner *d, const char *why) {
        store_disk_off(d->store, why);
        say_what_is_off(d);
}

/* ---- questions ------------------------------------------------------------------------------- */

static int write_items(struct disk_owner *d, const struct store_disk_question *q,
                       struct kvd_fds *fds, uint32_t *n_tokens) {
        *n_tokens = 0;
        for (uint32_t i = 0; i < q->n; i++) {
                const struct store_disk_item *from = &q->items[i];
                struct kvd_disk_item *to = &d->items[i];
                int fd;

                *to = (struct kvd_disk_item){.label = from->label};
                to->place = store_disk_place(d->store, from->place, &to->disk);
                fd = store_disk_memory(d->store, i, &to->offset);
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
                msg.disk_read = (struct kvd_msg_disk_read){bytes, items, tokens, q->checksums};
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
                msg.disk_scan = (struct kvd_msg_disk_scan){q->file, q->extent, q->first};
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
        struct kvd_msg msg = {.number = KVD_MSG_disk_open};
        struct kvd_fds fds = {.n = 0};

        msg.disk_open.sizes =
                (struct kvd_slice){d->sizes, d->n_files * (uint32_t)sizeof *d->sizes};
        for (uint32_t i = 0; i < d->n_files; i++)
                if (d->sizes[i] >= 0)
                        fds.fd[fds.n++] = d->fds[i];
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

        say_what_is_off(d);
        if (is_off(d))
                return false;
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

/* The store learns of each file that is not used. */
static void take_files(struct disk_owner *d, struct kvd_slice files) {
        uint32_t n = child_array(d->files, sizeof *d->files, ARRAY_SIZE(d->files), files);

        store_disk_files(d->store, d->files, n);
}

static void say_how_found(const struct disk_owner *d, uint32_t n) {
        struct store_disk_info info;

        for (uint32_t i = 0; i < n; i++) {
                store_disk_get_info(d->store, i, &info);
                if (!d->files[i].error && d->files[i].state == 2)
                        log_warning("%s: both superblocks of the file were broken: it begins anew",
                                    info.name);
                if (!d->files[i].error && d->files[i].state == 3)
                        log_warning("%s was used without the other files, or is a copy: it begins "
                                    "anew",
                                    info.name);
        }
}

static void opened(struct disk_owner *d, const struct kvd_msg_disk_open_reply *m) {
        struct store_disk_opened o = {.opening = m->opening,
                                      .files = d->files,
                                      .namespaces = d->namespaces,
                                      .secret = d->secret};

        d->heard = m->files.size / (uint32_t)sizeof *d->files;
        if (m->more)
                return;
        d->starts = 0;
        d->open = true;
        o.n_files = child_array(d->files, sizeof *d->files, ARRAY_SIZE(d->files), m->files);
        o.n_namespaces = child_array(d->namespaces, sizeof *d->namespaces,
                                    ARRAY_SIZE(d->namespaces), m->namespaces);
        say_how_found(d, o.n_files);
        if (child_array(d->secret, 1, sizeof d->secret, m->secret) != sizeof d->secret ||
            store_disk_opened(d->store, &o) < 0)
                off(d, "what its process says of the file makes no sense");
        else
                store_disk_files(d->store, d->files, o.n_files);
        d->files_off = UINT32_MAX; /* it may hang no more */
}

static void scanned(struct disk_owner *d, const struct kvd_msg_disk_scan_reply *m) {
        uint32_t n = child_array(d->found, sizeof *d->found, ARRAY_SIZE(d->found), m->found);

        store_disk_scanned(d->store, 0, m->slot_bytes, d->found, n);
}

static void wrote(struct disk_owner *d, const struct kvd_msg_disk_write_reply *m) {
        uint32_t n = child_array(d->errors, sizeof *d->errors, ARRAY_SIZE(d->errors), m->errors);

        store_disk_moved(d->store, d->errors, NULL, n);
        take_files(d, m->files);
}

/* A checksum that is missing is that of another block, and will be wrong. */
static void has_read(struct disk_owner *d, const struct kvd_msg_disk_read_reply *m) {
        uint32_t n = child_array(d->errors, sizeof *d->errors, ARRAY_SIZE(d->errors), m->errors);

        child_array(d->checksums, sizeof *d->checksums, ARRAY_SIZE(d->checksums), m->checksums);
        store_disk_moved(d->store, d->errors, d->checksums, n);
        take_files(d, m->files);
}

static void named(struct disk_owner *d, const struct kvd_msg_disk_namespace_reply *m) {
        store_disk_named(d->store, 0, m->epoch);
        take_files(d, m->files);
}

static void forgotten(struct disk_owner *d, const struct kvd_msg_disk_forget_reply *m) {
        store_disk_forgotten(d->store, 0);
        take_files(d, m->files);
}

/*
 * A flush that failed in all files is the end of the tier; a file that cannot be opened is, too. An extent that
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
                store_disk_moved(d->store, NULL, NULL, 0);
        if (asked != KVD_MSG_disk_open && asked != KVD_MSG_disk_scan && error->code == EIO)
                off(d, why);
}

static void answered(struct child *child, uint32_t asked, const struct kvd_msg *m) {
        struct disk_owner *d = owner_of(child);

        if (asked != KVD_MSG_disk_open)
                d->starts = 0;
        child->pause_ns = 0;
        if (m->number == KVD_MSG_error)
                failed(d, asked, &m->error);
        else if (asked == KVD_MSG_disk_open)
                opened(d, &m->disk_open_reply);
        else if (asked == KVD_MSG_disk_scan)
                scanned(d, &m->disk_scan_reply);
        else if (asked == KVD_MSG_disk_namespace)
                named(d, &m->disk_namespace_reply);
        else if (asked == KVD_MSG_disk_forget)
                forgotten(d, &m->disk_forget_reply);
        else if (asked == KVD_MSG_disk_read)
                has_read(d, &m->disk_read_reply);
        else
                wrote(d, &m->disk_write_reply);
        say_what_is_off(d);
        loop_want_idle(child->loop);
}

/* ---- its process ----------------------------------------------------------------------------- */

static bool wanted(struct child *child) {
        return !is_off(owner_of(child));
}

static int prepare(struct child *child) {
        struct disk_owner *d = owner_of(child);

        d->heard = HEARD_NOTHING;
        if (++d->starts > MOST_STARTS)
                off(d, "its process ends again and again; see the log");
        memcpy(child->arguments, (char *[]){"kvd", "--disk", NULL}, 3 * sizeof *child->arguments);
        return is_off(d) ? -ECANCELED : 0;
}

/* One that did not answer when it was opened is left out, if there are others. */
static void leave_out_hanging(struct disk_owner *d) {
        bool others = false;

        if (d->open || d->heard >= d->n_files)
                return;
        for (uint32_t i = 0; i < d->n_files; i++)
                others = others || (i != d->heard && d->sizes[i] >= 0);
        if (others)
                d->sizes[d->heard] = -ETIMEDOUT;
}

/* As long as it is not gone, it may write to what it was asked to read. */
static void late(struct child *child) {
        leave_out_hanging(owner_of(child));
        log_limited(LOG_WARNING, "the disk of the file tier hangs: what it has is missed");
        degraded_set(file_tier, owner_of(child)->n_files);
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

/* 0: as large as it is. */
static int size_of(int fd, uint64_t wanted, int64_t *ret) {
        struct stat st;
        uint64_t end;
        off_t at;

        if (fstat(fd, &st) < 0)
                return -errno;
        if (!S_ISREG(st.st_mode) && !S_ISBLK(st.st_mode))
                return -EMEDIUMTYPE;
        at = lseek(fd, 0, SEEK_END);
        end = at < 0 ? 0 : (uint64_t)at;
        *ret = (int64_t)((S_ISBLK(st.st_mode) ? MIN(wanted ?: end, end) : wanted ?: end) /
                         WHOLE_BYTES * WHOLE_BYTES);
        return (uint64_t)*ret >= LEAST_BYTES ? 0 : -EINVAL;
}

/* By another name, too: its lock would be ours. */
static bool is_taken(const struct disk_owner *d, uint32_t n, int fd) {
        struct stat st, other;

        if (fstat(fd, &st) < 0)
                return false;
        for (uint32_t i = 0; i < n; i++)
                if (d->fds[i] >= 0 && fstat(d->fds[i], &other) == 0 &&
                    (S_ISBLK(st.st_mode) ? st.st_rdev == other.st_rdev :
                                           st.st_dev == other.st_dev && st.st_ino == other.st_ino))
                        return true;
        return false;
}

/* One that cannot be opened is off, if there are others. */
static int take_file(struct disk_owner *d, uint32_t i, const char *path, uint64_t bytes,
                     struct kvd_why *why) {
        int fd = d->fds[i] = open_file(path), r;

        if (fd < 0) {
                d->sizes[i] = fd;
                return d->n_files > 1 ? 0 :
                                        kvd_refuse(why, fd, "file %s: %s", path, strerror(-fd));
        }
        if (is_taken(d, i, fd))
                return kvd_refuse(why, -EEXIST, "file %s is named twice", path);
        r = lock_file(fd);
        if (r < 0)
                return kvd_refuse(why, r, "file %s: another kvd has it open", path);
        r = size_of(fd, bytes, &d->sizes[i]);
        if (r == -EINVAL)
                return kvd_refuse(why, r, "file %s: set file_size, at least 4M", path);
        return r < 0 ? kvd_refuse(why, r, "file %s: %s", path, strerror(-r)) : 0;
}

/* By the end of its path, if that is long. */
static void name_file(char to[static STORE_DISK_NAME], const char *path) {
        size_t most = STORE_DISK_NAME - sizeof "file ", n = strlen(path);

        snprintf(to, STORE_DISK_NAME, "file%s%s", n ? " " : "", path + n - MIN(n, most));
}

static int take_all(struct disk_owner *d, const struct config *config,
                    struct store_disk_config *tier, struct kvd_why *why) {
        uint32_t there = 0;
        int r = 0;

        d->n_files = tier->n_files = config->files.n;
        for (uint32_t i = 0; r == 0 && i < d->n_files; i++) {
                const char *path = config->files.paths[i];

                name_file(tier->names[i], d->n_files > 1 ? path : "");
                r = take_file(d, i, path, config->file_size, why);
                there += d->fds[i] >= 0;
                tier->bytes[i] = (uint64_t)MAX(d->sizes[i], 0);
        }
        if (r == 0 && !there)
                r = kvd_refuse(why, (int)d->sizes[0], "none of the files can be opened: %s",
                               strerror(-(int)d->sizes[0]));
        return r;
}

static int begin(struct disk_owner *d, const struct config *config, struct loop *loop,
                 struct kvd_why *why) {
        struct store_disk_config tier = {.depth = config->file_depth, .host = config->host_tier};
        int r = take_all(d, config, &tier, why);

        if (r < 0)
                return r;
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
        if (!config->files.n)
                return 0;
        d = sys->calloc(1, sizeof *d);
        if (!d)
                return kvd_refuse(why, -ENOMEM, "out of memory for the disk process");
        d->store = store;
        for (uint32_t i = 0; i < DISK_FILES; i++)
                d->fds[i] = -1;
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
        for (uint32_t i = 0; i < DISK_FILES; i++)
                closep(&d->fds[i]);
        free(d);
        return NULL;
}

void disk_owner_start(struct disk_owner *d) {
        if (d)
                child_look(&d->child);
}
