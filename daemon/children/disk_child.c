/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Passes the store's requests for a file to that file's process, as messages with descriptors of
 * the pool's segments, and passes the replies back. No process knows of another: the store decides
 * which files belong together.
 */

#include "daemon/children/disk_child.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/degraded.h"
#include "daemon/base/log.h"
#include "daemon/base/trusted.h"
#include "daemon/children/file_place.h"
#include "daemon/children/tier_errors.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "store/file_tier.h"

#define MOST_PAUSE_NS UINT64_C(1000000000)
#define LATER_NS UINT64_C(200000000) /* between two checks for blocks to write */
#define WHOLE_BYTES (UINT64_C(1) << 20)
#define PLACES_NS UINT64_C(2000000000) /* between two checks that files were not moved */
/*
 * Fetches stop waiting for a reply after the longer of SLOW_NS and file_timeout / SLOW_PART, plus
 * SLOW_NS for each SLOW_BYTES of the request.
 */
#define SLOW_NS UINT64_C(1000000000)
#define SLOW_PART 30u
#define SLOW_BYTES (UINT64_C(32) << 20)
#define MOST_STARTS 5u /* starts in a row without a reply; then the file is off */

static_assert(KVD_DISK_FILES <= KVD_FRAME_FDS, "a request is one frame");

struct disk_file {
        struct child child;
        struct disk_owner *owner;
        uint32_t number;
        int fd;        /* owned, locked; negative: it cannot be opened */
        int64_t bytes; /* its size; or a negative errno: why it cannot be opened */
        bool open;     /* its process has replied to disk_open */
        bool late;     /* its last process did not reply in time */
        bool said;     /* it was logged that it is off */
        struct tier_errors errors;
        struct file_place place;
        bool gone;       /* it is no longer at that place */
        uint32_t starts; /* since the last reply, other than to disk_open */
};

struct disk_owner {
        struct store *store;
        uint32_t n_files;
        struct disk_file files[DISK_FILES];
        uint32_t files_off;             /* as logged last */
        struct tier_errors host_errors; /* of copies in host memory */
        struct loop *loop;
        struct loop_timer places;
        /* buffers for the request or reply at hand */
        struct kvd_disk_item items[KVD_DISK_ITEMS];
        uint32_t tokens[KVD_DISK_TOKENS];
        int32_t errors[KVD_DISK_ITEMS];
        uint64_t checksums[KVD_DISK_ITEMS];
        struct kvd_disk_found found[KVD_DISK_FOUND];
};

static struct disk_file *file_of(const struct child *child) {
        return container_of(child, struct disk_file, child);
}

/* ---- off ------------------------------------------------------------------------------------- */

static bool is_off(const struct disk_file *f) {
        struct store_disk_info info;

        store_disk_get_info(f->owner->store, f->number, &info);
        return info.state == STORE_DISK_OFF;
}

static void say_file_is_off(struct disk_file *f) {
        struct store_disk_info info;

        store_disk_get_info(f->owner->store, f->number, &info);
        if (info.state != STORE_DISK_OFF || f->said)
                return;
        f->said = true;
        log_error("%s of the file tier is off: %s", info.name, info.why);
}

/* The store may have turned files off. */
static void say_what_is_off(struct disk_owner *d) {
        uint32_t n = store_disk_files_off(d->store);

        if (n == d->files_off)
                return;
        d->files_off = n;
        degraded_set(file_tier, n);
        for (uint32_t i = 0; i < d->n_files; i++)
                say_file_is_off(&d->files[i]);
}

static void say_errors(struct disk_file *f) {
        struct store_disk_info info;

        store_disk_get_info(f->owner->store, f->number, &info);
        if (info.errors)
                tier_errors_say(&f->errors, info.name, info.errors, info.last_error);
        if (store_host_get_info(f->owner->store, &info) && info.errors)
                tier_errors_say(&f->owner->host_errors, "host tier", info.errors, info.last_error);
}

/* ---- gone ------------------------------------------------------------------------------------ */

static void look_at_place(struct disk_file *f) {
        bool gone = !file_place_holds(&f->place, f->fd);
        struct store_disk_info info;

        if (gone == f->gone)
                return;
        f->gone = gone;
        store_disk_get_info(f->owner->store, f->number, &info);
        store_disk_note(f->owner->store, f->number,
                        gone ? "deleted, moved or replaced: its blocks are lost at the next start" :
                               "");
        if (gone)
                log_error("%s of the file tier was deleted, moved or replaced: its blocks are lost "
                          "at the next start; move it back to %s, or restart kvd",
                          info.name, f->place.path);
        else
                log_info("%s of the file tier is back", info.name);
}

static void look_at_places(struct loop_timer *timer) {
        struct disk_owner *d = container_of(timer, struct disk_owner, places);
        uint32_t n = 0;

        for (uint32_t i = 0; i < d->n_files; i++) {
                if (d->files[i].fd < 0)
                        continue;
                look_at_place(&d->files[i]);
                n += d->files[i].gone;
        }
        degraded_set(file_gone, n);
        loop_timer_set(d->loop, timer, sys_now_ns() + PLACES_NS);
}

/* ---- requests -------------------------------------------------------------------------------- */

static int write_items(struct disk_file *f, const struct store_disk_question *q,
                       struct kvd_fds *fds, uint32_t *n_tokens) {
        struct disk_owner *d = f->owner;

        *n_tokens = 0;
        for (uint32_t i = 0; i < q->n; i++) {
                const struct store_disk_item *from = &q->items[i];
                struct kvd_disk_item *to = &d->items[i];
                int fd;

                *to = (struct kvd_disk_item){.label = from->label};
                to->place = store_disk_place(d->store, from->place);
                fd = store_disk_memory(d->store, f->number, i, &to->offset);
                if (fd < 0)
                        return fd;
                to->file = child_add_fd(fds, fd);
                memcpy(d->tokens + *n_tokens, from->tokens,
                       from->label.n_tokens * sizeof *from->tokens);
                *n_tokens += from->label.n_tokens;
        }
        return 0;
}

static bool ask_to_move(struct disk_file *f, const struct store_disk_question *q) {
        struct disk_owner *d = f->owner;
        bool reads = q->what == STORE_DISK_READ;
        struct kvd_msg msg = {.number = reads ? KVD_MSG_disk_read : KVD_MSG_disk_write};
        struct kvd_slice items = {d->items, q->n * (uint32_t)sizeof *d->items}, tokens;
        uint64_t bytes = space_index(q->space)->block_bytes;
        struct kvd_fds fds = {.n = 0};
        uint32_t n_tokens;

        if (write_items(f, q, &fds, &n_tokens) < 0) {
                store_disk_moved(d->store, f->number, NULL, NULL, 0);
                return true;
        }
        tokens = (struct kvd_slice){d->tokens, n_tokens * (uint32_t)sizeof *d->tokens};
        f->child.slow_ns = MAX(SLOW_NS, f->child.patience_ns / SLOW_PART) +
                           q->n * bytes * SLOW_NS / SLOW_BYTES;
        if (reads)
                msg.disk_read = (struct kvd_msg_disk_read){bytes, items, tokens, q->checksums};
        else
                msg.disk_write = (struct kvd_msg_disk_write){bytes, items, tokens};
        return child_ask_or_end(&f->child, &msg, &fds);
}

static bool ask(struct disk_file *f, const struct store_disk_question *q) {
        struct kvd_msg msg = {0};

        f->child.slow_ns = 0;
        switch (q->what) {
        case STORE_DISK_SUPER:
                msg.number = KVD_MSG_disk_super;
                msg.disk_super.super = (struct kvd_slice){q->super, q->super_bytes};
                break;
        case STORE_DISK_SCAN:
                msg.number = KVD_MSG_disk_scan;
                msg.disk_scan = (struct kvd_msg_disk_scan){q->extent, q->first};
                break;
        case STORE_DISK_READ:
        case STORE_DISK_WRITE: return ask_to_move(f, q);
        }
        return child_ask_or_end(&f->child, &msg, NULL);
}

static bool ask_to_open(struct disk_file *f) {
        struct kvd_msg msg = {.number = KVD_MSG_disk_open};
        struct kvd_fds fds = {.n = 1, .fd = {f->fd}};

        msg.disk_open.bytes = (uint64_t)f->bytes;
        f->child.slow_ns = 0;
        return child_ask_or_end(&f->child, &msg, &fds);
}

static void wants_of(struct disk_file *f, bool soon) {
        if (f->fd < 0)
                return;
        if (soon)
                child_look_after(&f->child, 0);
        else if (!loop_timer_is_set(&f->child.look))
                child_look_after(&f->child, LATER_NS);
}

static void wants(void *data, bool soon) {
        struct disk_owner *d = data;

        for (uint32_t i = 0; i < d->n_files; i++)
                wants_of(&d->files[i], soon);
}

static bool next(struct child *child) {
        struct disk_file *f = file_of(child);
        const struct store_disk_question *q;
        bool later;

        say_what_is_off(f->owner);
        if (is_off(f))
                return false;
        if (!f->open)
                return ask_to_open(f);
        q = store_disk_next(f->owner->store, f->number, &later);
        if (q)
                return ask(f, q);
        if (later)
                wants_of(f, false);
        return false;
}

/* ---- replies --------------------------------------------------------------------------------- */

static void opened(struct disk_file *f, const struct kvd_msg_disk_open_reply *m) {
        f->open = true;
        store_disk_looked(f->owner->store, f->number, 0, m->copies.data, m->copies.size);
}

/* If there is more to fill, the store repeats the request; the superblock may have changed. */
static void told(struct disk_file *f, const struct kvd_msg_disk_super_reply *m) {
        store_disk_told(f->owner->store, f->number, m->more ? -EAGAIN : 0);
}

static void scanned(struct disk_file *f, const struct kvd_msg_disk_scan_reply *m) {
        struct disk_owner *d = f->owner;
        uint32_t n = child_array(d->found, sizeof *d->found, ARRAY_SIZE(d->found), m->found);

        store_disk_scanned(d->store, f->number, 0, m->slot_bytes, d->found, n);
}

static void wrote(struct disk_file *f, const struct kvd_msg_disk_write_reply *m) {
        struct disk_owner *d = f->owner;
        uint32_t n = child_array(d->errors, sizeof *d->errors, ARRAY_SIZE(d->errors), m->errors);

        store_disk_moved(d->store, f->number, d->errors, NULL, n);
}

/* In place of a missing checksum there is that of another block, which does not match. */
static void has_read(struct disk_file *f, const struct kvd_msg_disk_read_reply *m) {
        struct disk_owner *d = f->owner;
        uint32_t n = child_array(d->errors, sizeof *d->errors, ARRAY_SIZE(d->errors), m->errors);

        child_array(d->checksums, sizeof *d->checksums, ARRAY_SIZE(d->checksums), m->checksums);
        store_disk_moved(d->store, f->number, d->errors, d->checksums, n);
}

/*
 * A file is turned off if it cannot be opened, or if writing its superblock or a flush fails. An
 * extent that cannot be read counts as empty.
 */
static void failed(struct disk_file *f, uint32_t asked, const struct kvd_msg_error *error) {
        struct store *store = f->owner->store;
        char why[160];

        kvd_slice_copy(error->text, why, sizeof why);
        f->open = true; /* even if it cannot be opened: disk_open is not repeated */
        if (asked == KVD_MSG_disk_open)
                store_disk_looked(store, f->number, -(int)error->code, NULL, 0);
        else if (asked == KVD_MSG_disk_super)
                store_disk_file_off(store, f->number, why);
        else if (asked == KVD_MSG_disk_scan)
                store_disk_scanned(store, f->number, -(int)error->code, 0, NULL, 0);
        else
                store_disk_moved(store, f->number, NULL, NULL, 0);
        if ((asked == KVD_MSG_disk_read || asked == KVD_MSG_disk_write) && error->code == EIO)
                store_disk_file_off(store, f->number, why);
}

static void answered(struct child *child, uint32_t asked, const struct kvd_msg *m) {
        struct disk_file *f = file_of(child);

        f->late = false;
        if (asked != KVD_MSG_disk_open)
                f->starts = 0;
        child->pause_ns = 0;
        if (m->number == KVD_MSG_error)
                failed(f, asked, &m->error);
        else if (asked == KVD_MSG_disk_open)
                opened(f, &m->disk_open_reply);
        else if (asked == KVD_MSG_disk_super)
                told(f, &m->disk_super_reply);
        else if (asked == KVD_MSG_disk_scan)
                scanned(f, &m->disk_scan_reply);
        else if (asked == KVD_MSG_disk_read)
                has_read(f, &m->disk_read_reply);
        else
                wrote(f, &m->disk_write_reply);
        say_what_is_off(f->owner);
        say_errors(f);
        loop_want_idle(child->loop);
}

/* ---- its process ----------------------------------------------------------------------------- */

static bool wanted(struct child *child) {
        return !is_off(file_of(child));
}

static int prepare(struct child *child) {
        struct disk_file *f = file_of(child);

        if (++f->starts > MOST_STARTS)
                store_disk_file_off(f->owner->store, f->number,
                                    f->late ? "its disk hangs" :
                                              "its process ends again and again; see the log");
        say_what_is_off(f->owner);
        memcpy(child->arguments, (char *[]){"kvd", "--disk", NULL}, 3 * sizeof *child->arguments);
        return is_off(f) ? -ECANCELED : 0;
}

/* Otherwise fetches would wait, as long as their clients do, until the process is late. */
static void slow(struct child *child) {
        struct disk_file *f = file_of(child);
        struct store_disk_info info;

        store_disk_get_info(f->owner->store, f->number, &info);
        log_limited(LOG_WARNING,
                    "%s of the file tier does not answer: its blocks are skipped until it does",
                    info.name);
        store_disk_slow(f->owner->store, f->number);
        say_what_is_off(f->owner);
}

/* Until the process is gone, it may still write to the blocks that it was to read. */
static void late(struct child *child) {
        struct disk_file *f = file_of(child);
        struct store_disk_info info;

        f->late = true;
        store_disk_get_info(f->owner->store, f->number, &info);
        log_limited(LOG_WARNING, "%s of the file tier hangs: its blocks are skipped", info.name);
        store_disk_hangs(f->owner->store, f->number);
        say_what_is_off(f->owner);
}

/* Its request counts as failed. The next process opens the file again. */
static void ended(struct child *child, uint32_t asked) {
        struct disk_file *f = file_of(child);

        f->open = false;
        store_disk_lost(f->owner->store, f->number);
        loop_want_idle(child->loop);
}

static const struct child_ops ops = {
        .name = "disk process",
        .degraded = KVD_DEGRADED_disk_process,
        .wanted = wanted,
        .prepare = prepare,
        .slow = slow,
        .late = late,
        .ended = ended,
        .next = next,
        .answered = answered,
};

/* ---- life ------------------------------------------------------------------------------------ */

/* Omits O_DIRECT if the file system does not support it. */
static int open_file(const struct config *config, const char *path, struct kvd_why *why) {
        const struct trusted file = {"file", path, TRUST_DATA, config->owner};
        int flags = O_RDWR | (config->only_checked ? 0 : O_CREAT);
        int fd = trusted_open(&file, flags | O_DIRECT, why);

        if (fd != -EINVAL)
                return fd;
        log_warning("%s is on a file system without O_DIRECT: what it reads is cached twice", path);
        return trusted_open(&file, flags, why);
}

/* --check-config: a memfd stands in for the file that a start would create. */
static int open_missing(const char *path, struct kvd_why *why) {
        char folder[108], *slash;
        int fd;

        snprintf(folder, sizeof folder, "%s", path);
        slash = strrchr(folder, '/');
        slash[slash == folder] = 0;
        if (faccessat(AT_FDCWD, folder, W_OK | X_OK, AT_EACCESS) < 0)
                return kvd_refuse(why, negative_errno(), "file %s: it cannot be created: %s", path,
                                  strerror(errno));
        fd = sys->memfd_create("kvd-check", MFD_CLOEXEC);
        return fd < 0 ? kvd_refuse(why, negative_errno(), "file %s: %s", path, strerror(errno)) :
                        fd;
}

#define LOCK_TRIES 200u
#define LOCK_PAUSE_US 10000u

/* Retries, since the disk process of a killed kvd holds the lock a moment longer than that kvd. */
static int lock_file(int fd, const char *path, struct kvd_why *why) {
        for (uint32_t i = 0; i < LOCK_TRIES; i++) {
                if (sys->flock(fd, LOCK_EX | LOCK_NB) == 0)
                        return 0;
                if (errno != EWOULDBLOCK)
                        return kvd_refuse(
                                why, negative_errno(),
                                "file %s: it cannot be locked, so a second kvd could open "
                                "it: %s; use a local file system",
                                path, strerror(errno));
                usleep(LOCK_PAUSE_US);
        }
        return kvd_refuse(why, -EWOULDBLOCK, "file %s: another kvd has it open", path);
}

/* wanted: a size; 0: the present size of the file or device. */
static int size_of(int fd, uint64_t wanted, int64_t *ret) {
        struct stat st;
        uint64_t end;
        off_t at;

        if (fstat(fd, &st) < 0)
                return negative_errno();
        at = lseek(fd, 0, SEEK_END);
        if (at < 0)
                return negative_errno();
        end = (uint64_t)at;
        *ret = (int64_t)((S_ISBLK(st.st_mode) ? MIN(wanted ?: end, end) :
                          wanted              ?:
                                                end) /
                         WHOLE_BYTES * WHOLE_BYTES);
        return (uint64_t)*ret >= CONFIG_FILE_MIN ? 0 : -ERANGE;
}

/* Finds the same file under another name, too: its lock would be ours, not another kvd's. */
static bool is_taken(const struct disk_owner *d, uint32_t n, int fd) {
        struct stat st, other;

        if (fstat(fd, &st) < 0)
                return false;
        for (uint32_t i = 0; i < n; i++)
                if (d->files[i].fd >= 0 && fstat(d->files[i].fd, &other) == 0 &&
                    (S_ISBLK(st.st_mode) ? st.st_rdev == other.st_rdev :
                                           st.st_dev == other.st_dev && st.st_ino == other.st_ino))
                        return true;
        return false;
}

/* If there are several files, one that cannot be opened is off, unless it is not trusted. */
static int take_file(struct disk_owner *d, uint32_t i, const struct config *config,
                     struct kvd_why *why) {
        struct disk_file *f = &d->files[i];
        const char *path = config->files.paths[i];
        int fd = open_file(config, path, why), r;

        if (fd == -ENOENT && config->only_checked)
                fd = open_missing(path, why);
        f->fd = fd;
        if (fd < 0) {
                f->bytes = fd;
                return d->n_files > 1 && fd != TRUSTED_NOT ? 0 : fd;
        }
        if (is_taken(d, i, fd))
                return kvd_refuse(why, -EEXIST, "file %s is named twice", path);
        r = config->only_checked ? 0 : lock_file(fd, path, why);
        if (r < 0)
                return r;
        r = size_of(fd, config->file_size, &f->bytes);
        if (r == -ERANGE)
                return kvd_refuse(why, -EINVAL, "file %s: set file_size, at least 4M", path);
        return r < 0 ? kvd_refuse(why, r, "file %s: %s", path, strerror(-r)) : 0;
}

/* Names a file by the end of its path, if the path is long. */
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
                r = take_file(d, i, config, why);
                there += d->files[i].fd >= 0;
                tier->bytes[i] = (uint64_t)MAX(d->files[i].bytes, 0);
        }
        if (r == 0 && !there)
                r = kvd_refuse(why, (int)d->files[0].bytes, "none of the files can be opened: %s",
                               strerror(-(int)d->files[0].bytes));
        return r;
}

static int begin_file(struct disk_file *f, const struct config *config, struct loop *loop) {
        int r;

        if (f->fd < 0) {
                store_disk_looked(f->owner->store, f->number, (int)f->bytes, NULL, 0);
                return 0;
        }
        file_place_note(&f->place, f->fd);
        r = child_init(&f->child, &ops, config->worker_program, loop);
        f->child.most_pause_ns = MOST_PAUSE_NS;
        f->child.patience_ns = config->file_timeout * UINT64_C(1000000000);
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
        for (uint32_t i = 0; r == 0 && i < d->n_files; i++)
                r = begin_file(&d->files[i], config, loop);
        store_on_disk(d->store, wants, d);
        return r < 0 ? kvd_refuse(why, r, "out of memory for a disk process") : 0;
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
                return kvd_refuse(why, -ENOMEM, "out of memory for the disk processes");
        d->store = store;
        d->loop = loop;
        d->places.fire = look_at_places;
        for (uint32_t i = 0; i < DISK_FILES; i++)
                d->files[i] = (struct disk_file){.owner = d, .number = i, .fd = -1};
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
        loop_timer_stop(&d->places);
        for (uint32_t i = 0; i < DISK_FILES; i++) {
                if (d->files[i].child.ops)
                        child_clear(&d->files[i].child);
                closep(&d->files[i].fd);
        }
        free(d);
        return NULL;
}

void disk_owner_start(struct disk_owner *d) {
        if (!d)
                return;
        for (uint32_t i = 0; i < d->n_files; i++)
                if (d->files[i].fd >= 0)
                        child_look(&d->files[i].child);
        look_at_places(&d->places);
}
