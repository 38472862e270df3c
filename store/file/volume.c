/* SPDX-License-Identifier: Apache-2.0 */

/*
 * This file writes records to a disk and verifies everything that it reads there. An erasure is
 * flushed and read back before it returns. A write is neither, since a lost block is only a miss.
 */

#include "store/file/super.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "ipc/base/sys.h"

#define refuse volume_refuse

static uint8_t *pages(uint64_t bytes) {
        void *at = sys->mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                             0);

        return at == MAP_FAILED ? NULL : at;
}

static int broken(struct volume *v) {
        return v->broken ? refuse(v, -EIO, "the disk failed to flush: its contents are unknown") :
                           0;
}

/* ---- life ------------------------------------------------------------------------------------ */

static int copy_memory(const struct volume_item *item, void *staging, bool out) {
        memcpy(out ? item->payload : staging, out ? staging : item->payload, item->bytes);
        return 0;
}

int volume_begin(struct volume *v, struct disk *disk, uint64_t staging_bytes) {
        *v = (struct volume){.disk = disk, .copy = copy_memory, .staging_bytes = staging_bytes};
        v->staging = pages(staging_bytes);
        v->super = (void *)pages(DISK_SECTOR);
        if (!v->staging || !v->super)
                return refuse(v, -ENOMEM, "out of memory for the file");
        if (disk->staging)
                disk->staging(disk, v->staging, staging_bytes);
        return 0;
}

void volume_close(struct volume *v) {
        if (v->staging)
                munmap(v->staging, v->staging_bytes);
        if (v->super)
                munmap(v->super, DISK_SECTOR);
        free(v->slot_bytes);
        *v = (struct volume){0};
}

/* ---- superblock ------------------------------------------------------------------------------ */

static int lay_out(struct volume *v) {
        const struct file_super *s = v->super;

        v->n_extents = file_extents(s->bytes, s->extent_bytes);
        v->slot_bytes = sys->calloc(v->n_extents, sizeof *v->slot_bytes);
        if (!v->slot_bytes) {
                v->n_extents = 0;
                return refuse(v, -ENOMEM, "out of memory for the file's extents");
        }
        file_key_of_life(s->secret, s->life, v->key);
        return 0;
}

/* Extent size and key must not change once the volume is laid out. */
static bool is_for_it(const struct volume *v, const struct file_super *super) {
        uint8_t key[KVD_SECRET_BYTES];

        file_key_of_life(super->secret, super->life, key);
        return file_super_makes_sense(super) && super->bytes == v->disk->bytes &&
               (!v->n_extents || (super->extent_bytes == v->super->extent_bytes &&
                                  memcmp(key, v->key, sizeof key) == 0));
}

int volume_tell(struct volume *v, const struct file_super *super) {
        int r = broken(v);

        if (r == 0 && !is_for_it(v, super))
                r = refuse(v, -EPROTO, "the superblock is not one of this file");
        if (r < 0)
                return r;
        memcpy(v->super, super, sizeof *super);
        if (!v->n_extents)
                r = lay_out(v);
        return r < 0 ? r : super_write(v);
}

static bool epoch_lives(const struct file_super *s, uint64_t epoch) {
        for (uint32_t i = 0; i < s->n_namespaces; i++)
                if (s->namespaces[i].epoch == epoch)
                        return true;
        return false;
}

/* ---- extents --------------------------------------------------------------------------------- */

/* An I/O of one sector at the beginning of an extent, or at a place. */
static struct disk_io io_of_extent(const struct volume *v, uint32_t extent) {
        return (struct disk_io){.at = FILE_HEAD + extent * v->super->extent_bytes,
                                .bytes = DISK_SECTOR};
}

static struct disk_io io_of_place(const struct volume *v, uint64_t place) {
        uint32_t extent = (uint32_t)(place / FILE_SLOTS);
        struct disk_io io = io_of_extent(v, extent);

        io.at += DISK_SECTOR + place % FILE_SLOTS * v->slot_bytes[extent];
        return io;
}

static bool is_place(const struct volume *v, uint64_t place, uint32_t slot_bytes) {
        uint64_t bytes = v->super->extent_bytes;

        return place / FILE_SLOTS < v->n_extents && slot_bytes > DISK_SECTOR &&
               slot_bytes <= v->staging_bytes && slot_bytes < bytes &&
               place % FILE_SLOTS < file_slots(bytes, slot_bytes);
}

/*
 * Sets the size of the extent's slots. If this write is lost, the records found there later are at
 * the wrong place, and do not count, or are valid old ones.
 */
static int begin_extent(struct volume *v, uint32_t extent, uint32_t slot_bytes) {
        struct file_extent *e = (void *)v->staging;
        int r;

        if (v->slot_bytes[extent] == slot_bytes)
                return 0;
        *e = (struct file_extent){.number = extent, .slot_bytes = slot_bytes};
        file_sector_seal(v->key, FILE_EXTENT, &e->mark);
        r = volume_write_sector(v, io_of_extent(v, extent).at, e);
        if (r == 0)
                v->slot_bytes[extent] = slot_bytes;
        return r;
}

static int read_extent(struct volume *v, uint32_t extent) {
        const struct file_extent *e = (const void *)v->staging;
        int r = volume_read_sector(v, io_of_extent(v, extent).at, v->staging);

        v->slot_bytes[extent] = 0;
        if (r < 0)
                return r;
        if (file_sector_whole(v->key, FILE_EXTENT, &e->mark) && e->number == extent &&
            is_place(v, extent * (uint64_t)FILE_SLOTS, e->slot_bytes))
                v->slot_bytes[extent] = e->slot_bytes;
        return 0;
}

/* ---- scanning -------------------------------------------------------------------------------- */

static uint32_t batch_of(const struct volume *v, uint32_t n, uint64_t bytes) {
        return (uint32_t)MIN(MIN(n, VOLUME_ITEMS), v->staging_bytes / bytes);
}

static bool counts(const struct volume *v, const struct file_record *record, uint64_t place) {
        return file_record_lies_right(v->key, record, place) &&
               epoch_lives(v->super, record->label.epoch) &&
               record->label.sequence < file_sequence_of(v->super->opening);
}

/* The records of n slots from a place on. */
static uint32_t look_at(struct volume *v, uint64_t place, uint32_t n, struct kvd_disk_found *ret) {
        struct disk_io ios[VOLUME_ITEMS];
        uint32_t found = 0;

        for (uint32_t i = 0; i < n; i++) {
                ios[i] = io_of_place(v, place + i);
                ios[i].data = v->staging + i * DISK_SECTOR;
        }
        volume_begin_all(v, ios, n, false);
        volume_end_all(v);
        for (uint32_t i = 0; i < n; i++) {
                const struct file_record *record = ios[i].data;

                if (ios[i].error || !counts(v, record, place + i))
                        continue;
                ret[found++] =
                        (struct kvd_disk_found){.label = record->label,
                                                .key = file_record_key(v->super->secret, record),
                                                .place = place + i};
        }
        return found;
}

int volume_scan(struct volume *v, uint32_t extent, uint32_t first, uint32_t n,
                struct kvd_disk_found *ret) {
        int r = extent < v->n_extents ? broken(v) : -EINVAL, found = 0;
        uint32_t slots, some;

        if (r == 0 && first == 0)
                r = read_extent(v, extent);
        if (r < 0 || !v->slot_bytes[extent])
                return r;
        slots = file_slots(v->super->extent_bytes, v->slot_bytes[extent]);
        for (uint32_t end = MIN(first + n, slots); first < end; first += some) {
                some = batch_of(v, end - first, DISK_SECTOR);
                found += (int)look_at(v, extent * (uint64_t)FILE_SLOTS + first, some, ret + found);
        }
        return found;
}

/* ---- records --------------------------------------------------------------------------------- */

static uint32_t slot_bytes_of(const struct volume_item *item) {
        return file_slot_bytes(item->bytes, item->label->n_tokens);
}

static struct file_contents contents_of(const struct volume_item *item) {
        return (struct file_contents){item->label, item->tokens, item->place, item->bytes};
}

static int pack(const struct volume *v, const struct volume_item *item, uint8_t *to) {
        uint8_t *payload = to + file_head_bytes(item->label->n_tokens);
        struct file_contents contents = contents_of(item);
        int r = v->copy(item, payload, false);

        if (r < 0)
                return r;
        memset(payload + item->bytes, 0, to + slot_bytes_of(item) - payload - item->bytes);
        file_record_make(v->key, v->super->secret, &contents, (struct file_record *)to);
        return 0;
}

/* Verifies the bytes in staging, which clients cannot change, before it copies them. */
static void unpack(const struct volume *v, struct volume_item *item, uint8_t *from) {
        struct file_contents contents = contents_of(item);

        if (file_record_is(v->key, (const struct file_record *)from, &contents))
                item->error = v->copy(item, from + file_head_bytes(item->label->n_tokens), true);
        else
                item->error = -EBADMSG;
}

/* Reads the extent's sector if that was not done yet. */
static int check_extent(struct volume *v, uint32_t extent, uint32_t slot_bytes) {
        int r = v->slot_bytes[extent] ? 0 : read_extent(v, extent);

        return r == 0 && v->slot_bytes[extent] != slot_bytes ? -EBADMSG : r;
}

static int check_item(struct volume *v, const struct volume_item *item, bool writes) {
        uint32_t slot_bytes, extent;
        int r = broken(v);

        if (r < 0)
                return r;
        if (!item->bytes || item->bytes > v->staging_bytes ||
            item->label->n_tokens > KVD_MAX_BLOCK_TOKENS)
                return -EINVAL;
        slot_bytes = slot_bytes_of(item);
        if (slot_bytes > v->staging_bytes || !is_place(v, item->place, slot_bytes))
                return -EINVAL;
        extent = (uint32_t)(item->place / FILE_SLOTS);
        return writes ? begin_extent(v, extent, slot_bytes) : check_extent(v, extent, slot_bytes);
}

/* I/Os in flight and their items. Staging is divided into parts, each for one I/O at a time. */
struct moving {
        struct disk_io ios[DISK_DEPTH];
        struct volume_item *items[DISK_DEPTH];
        struct disk_io *free[DISK_DEPTH];
        uint32_t n_free;
};

static void begin_moving(const struct volume *v, struct moving *m, const struct volume_item *items,
                         uint32_t n) {
        uint64_t part = DISK_SECTOR;

        for (uint32_t i = 0; i < n; i++)
                if (!items[i].error)
                        part = MAX(part, slot_bytes_of(&items[i]));
        m->n_free = (uint32_t)MIN(v->staging_bytes / part, DISK_DEPTH);
        for (uint32_t i = 0; i < m->n_free; i++) {
                m->ios[i].data = v->staging + i * part;
                m->free[m->n_free - 1 - i] = &m->ios[i];
        }
}

static struct disk_io *take_part(const struct volume *v, struct moving *m,
                                 struct volume_item *item) {
        struct disk_io *io = m->free[--m->n_free];

        void *part = io->data;

        m->items[io - m->ios] = item;
        *io = io_of_place(v, item->place);
        io->data = part;
        io->bytes = slot_bytes_of(item);
        return io;
}

/* Waits for an I/O to complete and returns its item. NULL: none is in flight. */
static struct volume_item *end_one(struct volume *v, struct moving *m, struct disk_io **io) {
        struct volume_item *item;

        *io = v->disk->end(v->disk);
        if (!*io)
                return NULL;
        item = m->items[*io - m->ios];
        item->error = (*io)->error;
        m->free[m->n_free++] = *io;
        return item;
}

static void check_items(struct volume *v, struct volume_item *items, uint32_t n, bool writes) {
        for (uint32_t i = 0; i < n; i++)
                items[i].error = check_item(v, &items[i], writes);
}

/* Makes a record while the disk writes others. */
void volume_write(struct volume *v, struct volume_item *items, uint32_t n) {
        struct moving m;
        struct disk_io *io;

        check_items(v, items, n, true);
        begin_moving(v, &m, items, n);
        for (uint32_t i = 0; i < n; i++) {
                if (items[i].error)
                        continue;
                if (!m.n_free)
                        end_one(v, &m, &io);
                io = take_part(v, &m, &items[i]);
                items[i].error = pack(v, &items[i], io->data);
                if (!items[i].error)
                        v->disk->begin(v->disk, io, true);
                else
                        m.free[m.n_free++] = io;
        }
        while (end_one(v, &m, &io))
                ;
}

/* Verifies a record while the disk reads others. */
void volume_read(struct volume *v, struct volume_item *items, uint32_t n) {
        struct volume_item *item;
        struct moving m;
        struct disk_io *io;
        uint32_t at = 0;

        check_items(v, items, n, false);
        begin_moving(v, &m, items, n);
        do {
                for (; at < n && m.n_free; at++)
                        if (!items[at].error)
                                v->disk->begin(v->disk, take_part(v, &m, &items[at]), false);
                item = end_one(v, &m, &io);
                if (item && !item->error)
                        unpack(v, item, io->data);
        } while (item);
}

/* ---- erasing --------------------------------------------------------------------------------- */

static int each_sector(struct volume *v, const uint64_t *places, uint32_t n, bool writes) {
        struct disk_io ios[VOLUME_ITEMS];
        int r = 0;

        for (uint32_t i = 0; i < n; i++) {
                ios[i] = io_of_place(v, places[i]);
                ios[i].data = v->staging + i * DISK_SECTOR;
        }
        volume_begin_all(v, ios, n, writes);
        volume_end_all(v);
        for (uint32_t i = 0; i < n; i++)
                r = r ?: ios[i].error;
        return r;
}

static bool all_zero(const uint8_t *sector) {
        return !sector[0] && memcmp(sector, sector + 1, DISK_SECTOR - 1) == 0;
}

static int erase_some(struct volume *v, const uint64_t *places, uint32_t n) {
        int r;

        memset(v->staging, 0, n * DISK_SECTOR);
        r = each_sector(v, places, n, true);
        if (r == 0)
                r = volume_flush(v);
        if (r == 0)
                r = each_sector(v, places, n, false);
        for (uint32_t i = 0; r == 0 && i < n; i++)
                if (!all_zero(v->staging + i * DISK_SECTOR))
                        r = -EIO;
        return r;
}

int volume_erase(struct volume *v, const uint64_t *places, uint32_t n) {
        int r = broken(v);

        for (uint32_t i = 0; r == 0 && i < n; i++)
                if (places[i] / FILE_SLOTS >= v->n_extents ||
                    !is_place(v, places[i], v->slot_bytes[places[i] / FILE_SLOTS]))
                        r = -EINVAL;
        for (uint32_t at = 0, some; r == 0 && at < n; at += some) {
                some = batch_of(v, n - at, DISK_SECTOR);
                r = erase_some(v, places + at, some);
        }
        return r;
}
