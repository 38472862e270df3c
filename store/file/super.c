/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The superblock of a volume, of which each file has two copies. It is read from all of them, since
 * any may be missing, broken, new or another volume's, and written to all of them.
 */

#include "store/file/super.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "ipc/base/sys.h"

/* ---- sectors --------------------------------------------------------------------------------- */

void volume_begin_all(struct volume *v, struct disk_io *ios, uint32_t n, bool writes) {
        for (uint32_t i = 0; i < n; i++)
                v->disk->begin(v->disk, &ios[i], writes);
}

void volume_end_all(struct volume *v) {
        while (v->disk->end(v->disk))
                ;
}

static int move_sector(struct volume *v, struct disk_io io, bool writes) {
        io.bytes = DISK_SECTOR;
        volume_begin_all(v, &io, 1, writes);
        volume_end_all(v);
        return io.error;
}

int volume_read_sector(struct volume *v, uint32_t file, uint64_t at, void *to) {
        return move_sector(v, (struct disk_io){.file = file, .at = at, .data = to}, false);
}

int volume_write_sector(struct volume *v, uint32_t file, uint64_t at, void *from) {
        return move_sector(v, (struct disk_io){.file = file, .at = at, .data = from}, true);
}

int volume_flush(struct volume *v, uint32_t file) {
        int r = v->disk->flush(v->disk, file);

        if (r < 0)
                v->files[file].error = r;
        return r;
}

/* ---- writing --------------------------------------------------------------------------------- */

static uint64_t copy_at(uint32_t copy) {
        return copy * (FILE_HEAD / FILE_COPIES);
}

/* It is there to stay when it was read again: a disk may have put it elsewhere. */
static int write_copy(struct volume *v, uint32_t file, uint32_t copy) {
        int r = volume_write_sector(v, file, copy_at(copy), v->super);

        if (r == 0)
                r = volume_flush(v, file);
        if (r == 0)
                r = volume_read_sector(v, file, copy_at(copy), v->staging);
        if (r == 0 && memcmp(v->staging, v->super, DISK_SECTOR) != 0)
                r = -EIO;
        return r;
}

/* One copy after the other, so that one of them is whole at any time. */
static int write_file(struct volume *v, uint32_t file) {
        struct volume_file *f = &v->files[file];

        v->super->bytes = v->disk->bytes[file];
        v->super->extent_bytes = f->extent_bytes;
        v->super->life = f->life;
        file_sector_seal(v->super->secret, FILE_SUPER, &v->super->mark);
        for (uint32_t copy = 0; !f->error && copy < FILE_COPIES; copy++)
                f->error = write_copy(v, file, copy);
        return f->error;
}

/* Whatever kept it from being written, nothing could be erased there. */
int super_write(struct volume *v) {
        int r = volume_broken(v), error = 0;

        v->super->serial++;
        for (uint32_t i = 0; r == 0 && i < v->disk->n_files; i++)
                if (!v->files[i].error)
                        error = write_file(v, i) ?: error;
        if (r == 0 && volume_broken(v))
                r = volume_refuse(v, -EIO, "the superblock cannot be written: %s",
                                  strerror(-error));
        return r;
}

/* ---- reading --------------------------------------------------------------------------------- */

static bool all_zero(const uint8_t *sector) {
        return !sector[0] && memcmp(sector, sector + 1, DISK_SECTOR - 1) == 0;
}

static bool makes_sense(const struct file_super *s) {
        return file_sector_whole(s->secret, FILE_SUPER, &s->mark) &&
               s->n_namespaces <= FILE_NAMESPACES && s->extent_bytes > DISK_SECTOR &&
               s->extent_bytes % DISK_SECTOR == 0 && s->extent_bytes <= s->bytes;
}

/* What the copies of a file say, of which there may be none. */
struct copies {
        bool whole, ours, resized, other; /* is there one that is so? */
        struct file_super *newest; /* of those that are whole */
};

static void judge_copy(struct volume *v, uint32_t file, struct copies *seen) {
        const struct file_super *s = (const void *)v->staging;

        if (all_zero(v->staging))
                return;
        if (s->mark.magic != FILE_MAGIC || s->mark.version != FILE_VERSION) {
                seen->other = true;
        } else if (!makes_sense(s)) {
                seen->ours = true;
        } else if (s->bytes != v->disk->bytes[file]) {
                seen->resized = true;
        } else {
                if (!seen->whole || s->serial > seen->newest->serial)
                        memcpy(seen->newest, s, sizeof *s);
                seen->whole = true;
        }
}

static int look_at(struct volume *v, uint32_t file, uint64_t at) {
        int r = volume_read_sector(v, file, at, v->staging);

        return r == 0 && !all_zero(v->staging) ? -EMEDIUMTYPE : r;
}

#define LOOKS 64u

/* What has data, and no superblock, is not ours: here and there, and at powers of two, where others begin. */
static int look_for_data(struct volume *v, uint32_t file) {
        uint64_t sectors = v->disk->bytes[file] / DISK_SECTOR;
        int r = 0;

        for (uint64_t at = 1; r == 0 && at < sectors; at *= 2)
                r = look_at(v, file, at * DISK_SECTOR);
        for (uint32_t i = 1; r == 0 && i <= LOOKS; i++)
                r = look_at(v, file, (sectors - 1) * i / LOOKS * DISK_SECTOR);
        return r;
}

static int read_copies(struct volume *v, uint32_t file, struct copies *seen) {
        int r = v->files[file].error;

        for (uint32_t copy = 0; r == 0 && copy < FILE_COPIES; copy++) {
                r = volume_read_sector(v, file, copy_at(copy), v->staging);
                if (r == 0)
                        judge_copy(v, file, seen);
        }
        if (r == 0 && !seen->whole && seen->resized)
                r = -ERANGE;
        else if (r == 0 && !seen->whole && !seen->ours)
                r = seen->other ? -EMEDIUMTYPE : look_for_data(v, file);
        return v->files[file].error = r;
}

/* ---- what belongs together ------------------------------------------------------------------- */

static bool same_secret(const struct file_super *a, const struct file_super *b) {
        return memcmp(a->secret, b->secret, sizeof a->secret) == 0;
}

static bool is_newer(const struct file_super *a, const struct file_super *b) {
        return a->opening != b->opening ? a->opening > b->opening : a->serial > b->serial;
}

/* Whose the list is cannot be told where there are two secrets: any may be the wrong one. */
static int refuse_strangers(struct volume *v, const struct copies *seen) {
        uint32_t first = DISK_FILES;

        for (uint32_t i = 0; i < v->disk->n_files; i++) {
                if (v->files[i].error || !seen[i].whole)
                        continue;
                if (first < i && !same_secret(seen[i].newest, seen[first].newest))
                        return volume_refuse(v, -EXDEV,
                                             "files %u and %u of the list have caches that do not "
                                             "belong together; name one's files only, or empty "
                                             "what may go",
                                             first + 1, i + 1);
                first = MIN(first, i);
        }
        return 0;
}

/* NULL: nobody has any. */
static const struct file_super *find_newest(const struct volume *v, const struct copies *seen) {
        const struct file_super *newest = NULL;

        for (uint32_t i = 0; i < v->disk->n_files; i++)
                if (!v->files[i].error && seen[i].whole &&
                    (!newest || is_newer(seen[i].newest, newest)))
                        newest = seen[i].newest;
        return newest;
}

/* Has a file before it that life? Then one is a copy of the other. */
static bool life_is_taken(const struct volume *v, uint32_t file, uint64_t life) {
        for (uint32_t i = 0; i < file; i++)
                if (!v->files[i].error && v->files[i].life == life)
                        return true;
        return false;
}

int super_random(struct volume *v, void *ret, size_t bytes) {
        if (sys->getrandom(ret, bytes, 0) != (ssize_t)bytes)
                return volume_refuse(v, -EIO, "the kernel gives no random numbers for the file");
        return 0;
}

/* newest: NULL: there is none, and the first file's life is the secret's first. */
static void judge_file(struct volume *v, uint32_t file, const struct copies *seen,
                      const struct file_super *newest) {
        struct volume_file *f = &v->files[file];

        f->state = !seen->whole ? (seen->ours ? VOLUME_LOST : VOLUME_NEW) :
                   seen->newest->set != newest->set ? VOLUME_LEFT : VOLUME_FOUND;
        if (f->state == VOLUME_FOUND && life_is_taken(v, file, seen->newest->life))
                f->state = VOLUME_LEFT;
        if (f->state == VOLUME_FOUND) {
                f->extent_bytes = seen->newest->extent_bytes;
                f->life = seen->newest->life;
        }
        while (f->state != VOLUME_FOUND && (newest || file) && !f->life && !f->error)
                f->error = super_random(v, &f->life, sizeof f->life);
}

static int choose(struct volume *v, const struct copies *seen) {
        const struct file_super *newest = find_newest(v, seen);

        if (newest)
                memcpy(v->super, newest, sizeof *newest);
        else
                *v->super = (struct file_super){.next_epoch = 1};
        for (uint32_t i = 0; i < v->disk->n_files; i++)
                if (!v->files[i].error)
                        judge_file(v, i, &seen[i], newest ? v->super : NULL);
        return newest ? 0 : super_random(v, v->super->secret, sizeof v->super->secret);
}

int super_read(struct volume *v, uint64_t extent_bytes) {
        struct copies seen[DISK_FILES] = {0};
        uint64_t bytes = v->disk->n_files * sizeof *v->super, least = FILE_HEAD + extent_bytes;
        struct file_super *room = sys->mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        int r;

        if (room == MAP_FAILED)
                return volume_refuse(v, -ENOMEM, "out of memory for the file");
        for (uint32_t i = 0; i < v->disk->n_files; i++) {
                seen[i].newest = room + i;
                v->files[i] = (struct volume_file){.extent_bytes = extent_bytes,
                                                   .error = v->disk->error[i]};
                if (v->disk->bytes[i] < least)
                        v->files[i].error = v->files[i].error ?: -EINVAL;
                read_copies(v, i, &seen[i]);
        }
        r = refuse_strangers(v, seen);
        if (r == 0)
                r = choose(v, seen);
        munmap(room, bytes);
        for (uint32_t i = 0; r == 0 && i < v->disk->n_files; i++)
                file_key_of_life(v->super->secret, v->files[i].life, v->files[i].key);
        return r;
}
