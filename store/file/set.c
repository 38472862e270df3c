/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Judges the superblocks of several files, which its callers have read. Any may be missing, broken,
 * new or another volume's; the newest one of a set counts. Nothing here reads or writes a file.
 */

#include "store/file/set.h"

#include <errno.h>
#include <string.h>

#include "ipc/base/sys.h"

#define refuse(set, error, ...) kvd_refuse(&(set)->why, error, __VA_ARGS__)

#define EXTENT_BYTES (UINT64_C(64) << 20)
#define EXTENT_LEAST (UINT64_C(1) << 20)
#define EXTENTS_FEW 16u /* a small file has smaller extents, but about this many */

/* ---- superblocks of one file ----------------------------------------------------------------- */

void set_begin(struct set *set, uint32_t n_files, const uint64_t *bytes) {
        *set = (struct set){.n_files = n_files};
        for (uint32_t i = 0; i < n_files; i++)
                set->files[i].bytes = bytes[i];
}

static bool all_zero(const void *sector) {
        const uint8_t *at = sector;

        return !at[0] && memcmp(at, at + 1, DISK_SECTOR - 1) == 0;
}

struct copies { /* what a file's copies of the superblock include */
        bool resized, other;
};

static void judge_copy(struct set_file *f, const struct file_super *s, struct copies *seen) {
        if (all_zero(s))
                return;
        if (s->mark.magic != FILE_MAGIC || s->mark.version != FILE_VERSION) {
                seen->other = true;
        } else if (!file_super_makes_sense(s)) {
                f->ours = true;
        } else if (s->bytes != f->bytes) {
                seen->resized = true;
        } else {
                if (!f->whole || s->serial > f->newest.serial)
                        memcpy(&f->newest, s, sizeof *s);
                f->whole = true;
        }
}

static void judge_copies(struct set_file *f, const void *copies) {
        struct copies seen = {0};

        f->whole = f->ours = false;
        for (uint32_t copy = 0; copy < FILE_COPIES; copy++) {
                struct file_super s; /* the bytes are from a message and not aligned */

                memcpy(&s, (const uint8_t *)copies + copy * DISK_SECTOR, sizeof s);
                judge_copy(f, &s, &seen);
        }
        if (!f->whole && seen.resized)
                f->error = -ERANGE;
        else if (!f->whole && !f->ours && seen.other)
                f->error = -EMEDIUMTYPE;
}

void set_see(struct set *set, uint32_t file, int error, const void *copies) {
        struct set_file *f = &set->files[file];

        f->seen = true;
        f->error = error;
        if (!error)
                judge_copies(f, copies);
}

int set_see_again(struct set *set, uint32_t file, const void *copies) {
        struct set_file *f = &set->files[file];
        int error = f->error;

        if (!f->told)
                return 0;
        judge_copies(f, copies);
        f->error = error;
        return f->whole && f->newest.life == f->life &&
                               memcmp(f->newest.secret, set->super.secret,
                                      sizeof f->newest.secret) == 0 ?
                       0 :
                       -ESTALE;
}

bool set_is_seen(const struct set *set) {
        for (uint32_t i = 0; i < set->n_files; i++)
                if (!set->files[i].seen)
                        return false;
        return true;
}

const char *set_why(int error) {
        return error == -EMEDIUMTYPE ?
                       "the file is not kvd's, or of another version; empty it if it may go" :
               error == -ERANGE    ? "the file was made with another file_size; "
                                     "set that size, or empty the file if you do not need it" :
               error == -EINVAL    ? "the file is too small" :
               error == -ETIMEDOUT ? "its disk hangs" :
               error == -ESTALE    ? "the file was changed by somebody else" :
                                     strerror(-error);
}

/* ---- which files belong together ------------------------------------------------------------- */

static bool same_secret(const struct file_super *a, const struct file_super *b) {
        return memcmp(a->secret, b->secret, sizeof a->secret) == 0;
}

static bool is_newer(const struct file_super *a, const struct file_super *b) {
        return a->opening != b->opening ? a->opening > b->opening : a->serial > b->serial;
}

static bool has_any(const struct set_file *f) {
        return !f->error && f->whole;
}

/* If the files have two secrets, either may be the wrong one. */
static int refuse_strangers(struct set *set) {
        const struct set_file *f = set->files;
        uint32_t first = DISK_FILES;

        for (uint32_t i = 0; i < set->n_files; i++) {
                if (!has_any(&f[i]))
                        continue;
                if (first < i && !same_secret(&f[i].newest, &f[first].newest))
                        return refuse(
                                set, -EXDEV,
                                "files %u and %u of the list have caches that do not belong together; "
                                "list the files of one cache only, or empty the others",
                                first + 1, i + 1);
                first = MIN(first, i);
        }
        return 0;
}

/* NULL: no file has a superblock. */
static const struct file_super *find_newest(const struct set *set) {
        const struct file_super *newest = NULL;

        for (uint32_t i = 0; i < set->n_files; i++)
                if (has_any(&set->files[i]) && (!newest || is_newer(&set->files[i].newest, newest)))
                        newest = &set->files[i].newest;
        return newest;
}

/* Does a file before this one have the same life? Then one is a copy of the other. */
static bool life_is_taken(const struct set *set, uint32_t file, uint64_t life) {
        for (uint32_t i = 0; i < file; i++)
                if (!set->files[i].error && set->files[i].life == life)
                        return true;
        return false;
}

static int draw(struct set *set, void *ret, size_t bytes) {
        if (sys->getrandom(ret, bytes, 0) != (ssize_t)bytes)
                return refuse(set, -EIO, "the kernel gives no random numbers for the file");
        return 0;
}

/* newest: NULL if none; then the first file gets life 0. */
static void judge_file(struct set *set, uint32_t file, uint64_t extent_bytes,
                       const struct file_super *newest) {
        struct set_file *f = &set->files[file];
        const struct file_super *s = &f->newest;

        f->state = !f->whole             ? (f->ours ? SET_LOST : SET_NEW) :
                   s->set != newest->set ? SET_LEFT :
                                           SET_FOUND;
        if (f->state == SET_FOUND && life_is_taken(set, file, s->life))
                f->state = SET_LEFT;
        f->extent_bytes = extent_bytes;
        if (f->state == SET_FOUND) {
                f->extent_bytes = s->extent_bytes;
                f->life = s->life;
        }
        while (f->state != SET_FOUND && (newest || file) && !f->life && !f->error)
                f->error = draw(set, &f->life, sizeof f->life);
}

static uint64_t extent_bytes_for(const struct set *set) {
        uint64_t bytes = UINT64_MAX, part;

        for (uint32_t i = 0; i < set->n_files; i++)
                if (!set->files[i].error)
                        bytes = MIN(bytes, set->files[i].bytes);
        part = (bytes - MIN(bytes, FILE_HEAD)) / EXTENTS_FEW / DISK_SECTOR * DISK_SECTOR;
        return MIN(MAX(part, EXTENT_LEAST), EXTENT_BYTES);
}

static void refuse_small(struct set *set, uint64_t extent_bytes) {
        for (uint32_t i = 0; i < set->n_files; i++) {
                struct set_file *f = &set->files[i];

                if (!f->error && !f->whole && f->bytes < FILE_HEAD + extent_bytes)
                        f->error = -EINVAL;
        }
}

/* Makes the superblock of this opening, with numbers that no superblock had before. */
static int begin_opening(struct set *set, const struct file_super *newest) {
        struct file_super *s = &set->super;
        int r = 0;

        if (newest)
                memcpy(s, newest, sizeof *s);
        else
                *s = (struct file_super){.next_epoch = 1};
        if (!newest)
                r = draw(set, s->secret, sizeof s->secret);
        if (r == 0)
                r = draw(set, &s->set, sizeof s->set);
        s->opening++;
        s->serial++;
        return r;
}

/* Fails with the first file's error if no file is usable. */
static int find_usable(struct set *set) {
        for (uint32_t i = 0; i < set->n_files; i++)
                if (!set->files[i].error)
                        return 0;
        return refuse(set, set->files[0].error, "%s", set_why(set->files[0].error));
}

int set_judge(struct set *set, uint64_t extent_bytes) {
        const struct file_super *newest;
        int r;

        extent_bytes = extent_bytes ?: extent_bytes_for(set);
        refuse_small(set, extent_bytes);
        r = refuse_strangers(set);
        if (r < 0)
                return r;
        newest = find_newest(set);
        for (uint32_t i = 0; i < set->n_files; i++)
                if (!set->files[i].error)
                        judge_file(set, i, extent_bytes, newest);
        r = set->n_files ? find_usable(set) : 0;
        return r < 0 ? r : begin_opening(set, newest);
}

/* ---- the shared superblock ------------------------------------------------------------------- */

static struct kvd_disk_namespace *find_namespace(struct file_super *s, struct kvd_key id) {
        for (uint32_t i = 0; i < s->n_namespaces; i++)
                if (kvd_key_equal(s->namespaces[i].id, id))
                        return &s->namespaces[i];
        return NULL;
}

int set_name(struct set *set, struct kvd_key id, uint64_t *epoch) {
        struct file_super *s = &set->super;
        struct kvd_disk_namespace *n = find_namespace(s, id);

        if (!n && s->n_namespaces == FILE_NAMESPACES)
                return refuse(set, -ENOSPC, "the file has %u spaces already", FILE_NAMESPACES);
        if (!n) {
                n = &s->namespaces[s->n_namespaces++];
                *n = (struct kvd_disk_namespace){.id = id, .epoch = s->next_epoch++};
                s->serial++;
        }
        *epoch = n->epoch;
        return 0;
}

void set_forget(struct set *set, struct kvd_key id) {
        struct file_super *s = &set->super;
        struct kvd_disk_namespace *n = find_namespace(s, id);

        if (!n)
                return;
        *n = s->namespaces[--s->n_namespaces];
        s->namespaces[s->n_namespaces] = (struct kvd_disk_namespace){0};
        s->serial++;
}

void set_tell(const struct set *set, uint32_t file, struct file_super *ret) {
        const struct set_file *f = &set->files[file];

        memcpy(ret, &set->super, sizeof *ret);
        ret->bytes = f->bytes;
        ret->extent_bytes = f->extent_bytes;
        ret->life = f->life;
        file_sector_seal(ret->secret, FILE_SUPER, &ret->mark);
}
