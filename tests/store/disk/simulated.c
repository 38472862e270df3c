/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The simulated disk keeps each sector that was written since the last flush, in order. A power cut
 * decides the fate of each. There are no sectors between superblocks and extents, so an image has
 * only a few sectors, and a hundred thousand images are made in a second.
 */

#include "tests/store/disk/simulated.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"

#define UNIT 512u

static uint32_t sector_at(uint64_t at) {
        if (at < SIMULATED_HEAD)
                return at < SIMULATED_HEAD / 2 ? 0 : 1;
        return (uint32_t)(2 + (at - SIMULATED_HEAD) / DISK_SECTOR);
}

/* ---- calls ----------------------------------------------------------------------------------- */

static bool fails(struct simulated *s, enum simulated_call call) {
        if (!(s->fails & call) || !s->fail_at)
                return false;
        s->calls++;
        return s->forever ? s->calls >= s->fail_at : s->calls == s->fail_at;
}

static void read_sectors(struct simulated *s, struct disk_io *io) {
        uint32_t first = sector_at(io->at), sectors = io->bytes / DISK_SECTOR;

        io->error = fails(s, SIMULATED_READ) ? -EIO : 0;
        if (io->error)
                return;
        if (s->misreads && one_in(s->dice, 4))
                first = (uint32_t)(roll(s->dice) % (s->n_sectors - sectors + 1));
        memcpy(io->data, s->seen[first], io->bytes);
}

static void keep(struct simulated *s, uint32_t sector, const uint8_t *data) {
        struct pending *p = &s->pending[s->n_pending++];

        memcpy(s->seen[sector], data, DISK_SECTOR);
        if (s->n_pending > SIMULATED_PENDING)
                abort();
        p->sector = sector;
        p->io = s->n_ios;
        memcpy(p->data, data, DISK_SECTOR);
}

static void write_sectors(struct simulated *s, struct disk_io *io) {
        uint32_t first = sector_at(io->at), sectors = io->bytes / DISK_SECTOR;

        io->error = fails(s, SIMULATED_WRITE) ? -EIO : 0;
        /* a failed write may have written some sectors */
        if (io->error)
                sectors = (uint32_t)(roll(s->dice) % (sectors + 1));
        for (uint32_t j = 0; j < sectors; j++)
                keep(s, first + j, (uint8_t *)io->data + j * DISK_SECTOR);
        s->n_ios++;
}

static void begin(struct disk *disk, struct disk_io *io, bool writes) {
        struct simulated *s = container_of(disk, struct simulated, disk);

        if (writes)
                write_sectors(s, io);
        else
                read_sectors(s, io);
        if (s->n_begun == DISK_DEPTH)
                abort();
        s->begun[s->n_begun++] = io;
}

static struct disk_io *end(struct disk *disk) {
        struct simulated *s = container_of(disk, struct simulated, disk);

        return s->n_begun ? s->begun[--s->n_begun] : NULL;
}

/* A failed flush writes some sectors, and the others are lost. */
static int flush(struct disk *disk) {
        struct simulated *s = container_of(disk, struct simulated, disk);
        bool failed = fails(s, SIMULATED_FLUSH);

        for (uint32_t i = 0; i < s->n_pending; i++)
                if (!failed || one_in(s->dice, 2))
                        memcpy(s->stable[s->pending[i].sector], s->pending[i].data, DISK_SECTOR);
        s->n_pending = 0;
        return failed ? -EIO : 0;
}

/* ---- power cuts ------------------------------------------------------------------------------ */

static void persist(struct simulated *image, const struct pending *p, uint32_t sector) {
        uint64_t fate = roll(image->dice);

        if (fate % 3 == 0)
                return;
        if (fate % 3 == 1) {
                memcpy(image->stable[sector], p->data, DISK_SECTOR);
                return;
        }
        for (uint32_t unit = 0; unit < DISK_SECTOR / UNIT; unit++)
                if (fate >> (8 + unit) & 1)
                        memcpy(image->stable[sector] + unit * UNIT, p->data + unit * UNIT, UNIT);
}

#define BEGINNING 256u /* bytes of a sector with its header: every other flip is there */

static void flip(struct simulated *image) {
        uint64_t where = roll(image->dice), sector = where % image->n_sectors;
        uint64_t bits = (one_in(image->dice, 2) ? BEGINNING : DISK_SECTOR) * 8;
        uint64_t bit = roll(image->dice) % bits;

        image->stable[sector][bit / 8] ^= (uint8_t)(1u << bit % 8);
}

void simulated_cut(const struct simulated *s, uint32_t flips, bool astray,
                   struct simulated *image) {
        uint32_t n = s->n_pending, io = s->n_ios + 1, by = 0;
        uint32_t turn = n ? (uint32_t)roll(s->dice) % n : 0;
        bool ordered = one_in(s->dice, 2);

        memcpy(image->stable, s->stable, s->n_sectors * DISK_SECTOR);
        if (astray && n) {
                io = s->pending[turn].io;
                by = (uint32_t)roll(s->dice) % s->n_sectors;
        }
        for (uint32_t i = 0; i < n; i++) {
                const struct pending *p = &s->pending[ordered ? i : (turn + n - i) % n];
                uint32_t sector = p->io == io ? (p->sector + by) % s->n_sectors : p->sector;

                persist(image, p, sector);
        }
        while (flips--)
                flip(image);
        memcpy(image->seen, image->stable, s->n_sectors * DISK_SECTOR);
        image->n_pending = image->n_ios = 0;
}

/* ---- life ------------------------------------------------------------------------------------ */

static void *room(size_t n, size_t bytes) {
        return calloc(n, bytes) ?: (abort(), NULL);
}

void simulated_open(struct simulated *s, uint32_t extents, uint64_t extent_bytes,
                    struct dice *dice) {
        uint64_t bytes = SIMULATED_HEAD + extents * extent_bytes;

        *s = (struct simulated){.dice = dice, .n_sectors = sector_at(bytes)};
        s->disk = (struct disk){.bytes = bytes, .begin = begin, .end = end, .flush = flush};
        s->stable = room(s->n_sectors, DISK_SECTOR);
        s->seen = room(s->n_sectors, DISK_SECTOR);
        s->pending = room(SIMULATED_PENDING, sizeof *s->pending);
}

void simulated_close(struct simulated *s) {
        free(s->stable);
        free(s->seen);
        free(s->pending);
        *s = (struct simulated){0};
}

void simulated_clear(struct simulated *s) {
        memset(s->stable, 0, s->n_sectors * DISK_SECTOR);
        memset(s->seen, 0, s->n_sectors * DISK_SECTOR);
        s->n_pending = s->n_ios = 0;
}
