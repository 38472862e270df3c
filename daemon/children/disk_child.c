/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Passes the store's requests for the file to its process, as messages with descriptors of the
 * pool's segments, and passes the replies back.
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
#define PLACES_NS UINT64_C(2000000000) /* between two checks that the file was not moved */
/*
 * Fetches stop waiting for a reply after the longer of SLOW_NS and file_timeout / SLOW_PART, plus
 * SLOW_NS for each SLOW_BYTES of the request.
 */
#define SLOW_NS UINT64_C(1000000000)
#define SLOW_PART 30u
#define SLOW_BYTES (UINT64_C(32) << 20)
#define MOST_STARTS 5u /* starts in a row without a reply; then the file is off */

static_assert(KVD_DISK_FILES <= KVD_FRAME_FDS, "a request is one frame");

struct disk_owner {
        struct child child;
        struct store *store;
        int fd;                                 /* owned, locked */
        int64_t bytes;                          /* its size */
        bool open;                              /* its process has replied to disk_open */
        bool late;                              /* its last process did not reply in time */
        bool said;                              /* it was logged that it is off */
        bool was_off;                           /* as told last */
        struct tier_errors logged, host_logged; /* host_logged: of copies in host memory */
        struct file_place place;
        bool gone;       /* the file is no longer at that place */
        uint32_t starts; /* since the last reply, other than to disk_open */
        struct loop *loop;
        struct loop_timer places;
        /* buffers for the request or reply at hand */
        struct kvd_disk_item items[KVD_DISK_ITEMS];
        uint32_t tokens[KVD_DISK_TOKENS];
        int32_t errors[KVD_DISK_ITEMS];
        uint64_t checksums[KVD_DISK_ITEMS];
        struct kvd_disk_found found[KVD_DISK_FOUND];
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

/* The store may have turned the file off. */
static void say_whether_off(struct disk_owner *d) {
        bool off = store_disk_is_off(d->store);
        struct store_disk_info info;

        if (off != d->was_off)
                degraded_set(file_tier, off);
        d->was_off = off;
        if (d->said || !is_off(d))
                return;
        d->said = true;
        store_disk_get_info(d->store, &info);
        log_error("file of the file tier is off: %s", info.why);
}

static void say_errors(struct disk_owner *d) {
        struct store_disk_info info;

        store_disk_get_info(d->store, &info);
        if (info.errors)
                tier_errors_say(&d->logged, info.name, info.errors, info.last_error);
        if (store_host_get_info(d->store, &info) && info.errors)
                tier_errors_say(&d->host_logged, "host tier", info.errors, info.last_error);
}

/* ---- gone ------------------------------------------------------------------------------------ */

static void look_at_place(struct loop_timer *timer) {
        struct disk_owner *d = container_of(timer, struct disk_owner, places);
        bool gone = !file_place_holds(&d->place, d->fd);

        loop_timer_set(d->loop, timer, sys_now_ns() + PLACES_NS);
        if (gone == d->gone)
                return;
        d->gone = gone;
        degraded_set(file_gone, gone);
        store_disk_note(d->store, gone ? "deleted, moved or replaced: its blocks are lost at the "
                                         "next start" :
                                         "");
        if (gone)
                log_error("file of the file tier was deleted, moved or replaced: its blocks "
                          "are lost at the next start; move it back to %s, or restart kvd",
                          d->place.path);
        else
                log_info("file of the file tier is back");
}

/* ---- requests -------------------------------------------------------------------------------- */

static int write_items(struct disk_owner *d, const struct store_disk_question *q,
                       struct kvd_fds *fds, uint32_t *n_tokens) {
        *n_tokens = 0;
        for (uint32_t i = 0; i < q->n; i++) {
                const struct store_disk_item *from = &q->items[i];
                struct kvd_disk_item *to = &d->items[i];
                int fd;

                *to = (struct kvd_disk_item){.label = from->label};
                to->place = from->place;
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
                store_disk_moved(d->store, NULL, NULL, 0);
                return true;
        }
        tokens = (struct kvd_slice){d->tokens, n_tokens * (uint32_t)sizeof *d->tokens};
        d->child.slow_ns = MAX(SLOW_NS, d->child.patience_ns / SLOW_PART) +
                           q->n * bytes * SLOW_NS / SLOW_BYTES;
        if (reads)
                msg.disk_read = (struct kvd_msg_disk_read){bytes, items, tokens, q->checksums};
        else
                msg.disk_write = (struct kvd_msg_disk_write){bytes, items, tokens};
        return child_ask_or_end(&d->child, &msg, &fds);
}

static bool ask(struct disk_owner *d, const struct store_disk_question *q) {
        struct kvd_msg msg = {0};

        d->child.slow_ns = 0;
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
        case STORE_DISK_WRITE: return ask_to_move(d, q);
        }
        return child_ask_or_end(&d->child, &msg, NULL);
}

static bool ask_to_open(struct disk_owner *d) {
        struct kvd_msg msg = {.number = KVD_MSG_disk_open};
        struct kvd_fds fds = {.n = 1, .fd = {d->fd}};

        msg.disk_open.bytes = (uint64_t)d->bytes;
        d->child.slow_ns = 0;
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

        say_whether_off(d);
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

/* ---- replies --------------------------------------------------------------------------------- */

static void opened(struct disk_owner *d, const struct kvd_msg_disk_open_reply *m) {
        d->open = true;
        store_disk_looked(d->store, 0, m->copies.data, m->copies.size);
}

/* If there is more to fill, the store repeats the request; the superblock may have changed. */
static void told(struct disk_owner *d, const struct kvd_msg_disk_super_reply *m) {
        store_disk_told(d->store, m->more ? -EAGAIN : 0);
}

static void scanned(struct disk_owner *d, const struct kvd_msg_disk_scan_reply *m) {
        uint32_t n = child_array(d->found, sizeof *d->found, ARRAY_SIZE(d->found), m->found);

        store_disk_scanned(d->store, 0, m->slot_bytes, d->found, n);
}

static void wrote(struct disk_owner *d, const struct kvd_msg_disk_write_reply *m) {
        uint32_t n = child_array(d->errors, sizeof *d->errors, ARRAY_SIZE(d->errors), m->errors);

        store_disk_moved(d->store, d->errors, NULL, n);
}

/* In place of a missing checksum there is that of another block, which does not match. */
static void has_read(struct disk_owner *d, const struct kvd_msg_disk_read_reply *m) {
        uint32_t n = child_array(d->errors, sizeof *d->errors, ARRAY_SIZE(d->errors), m->errors);

        child_array(d->checksums, sizeof *d->checksums, ARRAY_SIZE(d->checksums), m->checksums);
        store_disk_moved(d->store, d->errors, d->checksums, n);
}

/*
 * A file is turned off if it cannot be opened, or if writing its superblock or a flush fails. An
 * extent that cannot be read counts as empty.
 */
static void failed(struct disk_owner *d, uint32_t asked, const struct kvd_msg_error *error) {
        struct store *store = d->store;
        char why[160];

        kvd_slice_copy(error->text, why, sizeof why);
        d->open = true; /* even if it cannot be opened: disk_open is not repeated */
        if (asked == KVD_MSG_disk_open)
                store_disk_looked(store, -(int)error->code, NULL, 0);
        else if (asked == KVD_MSG_disk_super)
                store_disk_off(store, why);
        else if (asked == KVD_MSG_disk_scan)
                store_disk_scanned(store, -(int)error->code, 0, NULL, 0);
        else
                store_disk_moved(store, NULL, NULL, 0);
        if ((asked == KVD_MSG_disk_read || asked == KVD_MSG_disk_write) && error->code == EIO)
                store_disk_off(store, why);
}

static void answered(struct child *child, uint32_t asked, const struct kvd_msg *m) {
        struct disk_owner *d = owner_of(child);

        d->late = false;
        if (asked != KVD_MSG_disk_open)
                d->starts = 0;
        child->pause_ns = 0;
        if (m->number == KVD_MSG_error)
                failed(d, asked, &m->error);
        else if (asked == KVD_MSG_disk_open)
                opened(d, &m->disk_open_reply);
        else if (asked == KVD_MSG_disk_super)
                told(d, &m->disk_super_reply);
        else if (asked == KVD_MSG_disk_scan)
                scanned(d, &m->disk_scan_reply);
        else if (asked == KVD_MSG_disk_read)
                has_read(d, &m->disk_read_reply);
        else
                wrote(d, &m->disk_write_reply);
        say_whether_off(d);
        say_errors(d);
        loop_want_idle(child->loop);
}

/* ---- its process ----------------------------------------------------------------------------- */

static bool wanted(struct child *child) {
        return !is_off(owner_of(child));
}

static int prepare(struct child *child) {
        struct disk_owner *d = owner_of(child);

        if (++d->starts > MOST_STARTS)
                store_disk_off(d->store, d->late ? "its disk hangs" :
                                                   "its process ends again and again; see the log");
        say_whether_off(d);
        memcpy(child->arguments, (char *[]){"kvd", "--disk", NULL}, 3 * sizeof *child->arguments);
        return is_off(d) ? -ECANCELED : 0;
}

/* Otherwise fetches would wait, as long as their clients do, until the process is late. */
static void slow(struct child *child) {
        struct disk_owner *d = owner_of(child);

        log_limited(LOG_WARNING,
                    "file of the file tier does not answer: its blocks are skipped until it does");
        store_disk_slow(d->store);
        say_whether_off(d);
}

/* Until the process is gone, it may still write to the blocks that it was to read. */
static void late(struct child *child) {
        struct disk_owner *d = owner_of(child);

        d->late = true;
        log_limited(LOG_WARNING, "file of the file tier hangs: its blocks are skipped");
        store_disk_hangs(d->store);
        say_whether_off(d);
}

/* Its request counts as failed. The next process opens the file again. */
static void ended(struct child *child, uint32_t asked) {
        struct disk_owner *d = owner_of(child);

        d->open = false;
        store_disk_lost(d->store);
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

static int take_file(struct disk_owner *d, const struct config *config, struct kvd_why *why) {
        const char *path = config->file;
        int r;

        d->fd = open_file(config, path, why);
        if (d->fd == -ENOENT && config->only_checked)
                d->fd = open_missing(path, why);
        if (d->fd < 0)
                return d->fd;
        r = config->only_checked ? 0 : lock_file(d->fd, path, why);
        if (r < 0)
                return r;
        r = size_of(d->fd, config->file_size, &d->bytes);
        if (r == -ERANGE)
                return kvd_refuse(why, -EINVAL, "file %s: set file_size, at least 4M", path);
        return r < 0 ? kvd_refuse(why, r, "file %s: %s", path, strerror(-r)) : 0;
}

static int begin(struct disk_owner *d, const struct config *config, struct kvd_why *why) {
        struct store_disk_config tier = {.there = true,
                                         .depth = config->file_depth,
                                         .host = config->host_tier};
        int r = take_file(d, config, why);

        if (r < 0)
                return r;
        tier.bytes = (uint64_t)d->bytes;
        r = store_disk_begin(d->store, &tier);
        if (r < 0)
                return kvd_refuse(why, r, "%s", store_why(d->store));
        file_place_note(&d->place, d->fd);
        r = child_init(&d->child, &ops, config->worker_program, d->loop);
        d->child.most_pause_ns = MOST_PAUSE_NS;
        d->child.patience_ns = config->file_timeout * UINT64_C(1000000000);
        store_on_disk(d->store, wants, d);
        return r < 0 ? kvd_refuse(why, r, "out of memory for a disk process") : 0;
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
        d->loop = loop;
        d->places.fire = look_at_place;
        d->fd = -1;
        r = begin(d, config, why);
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
        if (d->child.ops)
                child_clear(&d->child);
        closep(&d->fd);
        free(d);
        return NULL;
}

void disk_owner_start(struct disk_owner *d) {
        if (!d)
                return;
        child_look(&d->child);
        look_at_place(&d->places);
}
