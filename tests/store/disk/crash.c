/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Power cuts, over the file tier's own code. A volume on a simulated disk stores, reads, erases and
 * forgets at random; then the power goes, and each of many images of what may be left is opened,
 * scanned and read. What is read must be what its tokens stand for, and what was erased must not be
 * there.
 *
 * With several files, one of them may die, be missing for a while, or be where another was.
 *
 *      crash [--images N] [--seconds N] [--seed N] [--files N] [--mutant]
 *
 * The last line is its figures. --mutant: the code is broken on purpose, and the run ends well if
 * that is seen.
 */

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "store/file/volume.h"
#include "tests/store/disk/simulated.h"

#define NAMESPACES 2u
#define NODES 6u      /* of a namespace: two roots, two blocks behind each, with the same tokens */
#define BYTES_MOST 5000u
#define EXTENTS 2u    /* of a file */
#define FILES 3u      /* most */
#define EXTENT_BYTES (DISK_SECTOR + 4u * 2 * DISK_SECTOR)
#define STAGING (16u * DISK_SECTOR)
#define PLACES (FILES * EXTENTS * 4u)
#define IMAGES 16u    /* of one power cut */
#define ERASED 4096u

static const uint32_t payload_bytes[NAMESPACES] = {4096, BYTES_MOST};
static const uint32_t parent_of[NODES] = {NODES, NODES, 0, 0, 1, 1};
static const uint32_t token_of[NODES] = {100, 101, 7, 8, 7, 8};
static uint8_t contents[NAMESPACES][NODES][BYTES_MOST];

struct record { /* that somebody knows */
        bool known;
        uint64_t place;
        uint32_t space, node;
        struct kvd_label label;
};

/* What was erased, and answered. */
struct erased {
        struct record records[ERASED];
        uint32_t n;
        uint64_t epochs[ERASED];
        uint32_t n_epochs;
        uint32_t knowing;     /* the files, as bits, that were used all the time */
};

struct run {
        struct dice dice;
        uint32_t files;
        struct simulated disk, image;
        struct volume volume;
        uint64_t sequence;
        struct record records[PLACES];
        struct erased erased;
        uint64_t images, wrong, back, read, missed, lost, refused, left;
};

static uint64_t place_of(uint32_t i) {
        return i / 4 * (uint64_t)FILE_SLOTS + i % 4;
}

static struct kvd_key id_of(uint32_t space) {
        return (struct kvd_key){space + 1, 77};
}

static void fill_contents(void) {
        struct dice dice = {4711};

        for (uint8_t *at = (uint8_t *)contents; at < (uint8_t *)(contents + NAMESPACES); at++)
                *at = (uint8_t)roll(&dice);
}

/* ---- one volume ------------------------------------------------------------------------------ */

static struct record *find(struct record *records, uint32_t space, uint32_t node) {
        for (uint32_t i = 0; i < PLACES; i++)
                if (records[i].known && records[i].space == space && records[i].node == node)
                        return &records[i];
        return NULL;
}

static struct volume_item item_of(const struct record *r, void *payload) {
        return (struct volume_item){.place = r->place,
                                    .label = &r->label,
                                    .tokens = &token_of[r->node],
                                    .payload = payload,
                                    .bytes = payload_bytes[r->space]};
}

/* The record of a block at a place, behind its parent's. False: that is not there. */
static bool plan(struct run *run, uint32_t space, uint32_t node, uint64_t place,
                 struct record *ret) {
        const struct record *parent = NULL;
        uint64_t epoch;

        if (parent_of[node] != NODES && !(parent = find(run->records, space, parent_of[node])))
                return false;
        if (volume_namespace(&run->volume, id_of(space), &epoch) < 0)
                return false;
        *ret = (struct record){.known = true, .place = place, .space = space, .node = node};
        ret->label = (struct kvd_label){.sequence = ++run->sequence,
                                         .parent = parent ? parent->label.sequence : 0,
                                         .epoch = epoch,
                                         .depth = parent ? 1 : 0,
                                         .n_tokens = 1};
        return true;
}

/* An extent holds records of one size. */
static void drop_others(struct run *run, uint32_t place, uint32_t space) {
        run->records[place].known = false;
        for (uint32_t i = place / 4 * 4; i < place / 4 * 4 + 4; i++)
                if (run->records[i].space != space)
                        run->records[i].known = false;
}

static void write_some(struct run *run) {
        struct volume_item items[3];
        uint32_t at[3], n = 0;

        for (uint32_t i = 0; i < ARRAY_SIZE(items); i++) {
                uint32_t space = (uint32_t)roll(&run->dice) % NAMESPACES;
                uint32_t node = (uint32_t)roll(&run->dice) % NODES;
                uint32_t place = (uint32_t)roll(&run->dice) % PLACES;
                struct record *r = &run->records[place], planned;

                if (find(run->records, space, node) || (space == 1 && place % 4 == 3) ||
                    (n && (run->records[at[0]].space != space || at[0] == place ||
                           (n > 1 && at[1] == place))) ||
                    !plan(run, space, node, place_of(place), &planned))
                        continue;
                drop_others(run, place, space);
                *r = planned;
                at[n] = place;
                items[n++] = item_of(r, contents[space][node]);
        }
        volume_write(&run->volume, items, n);
        for (uint32_t i = 0; i < n; i++)
                run->records[at[i]].known &= !items[i].error;
}

/* True: the record was there. */
static bool read_one(struct run *run, struct volume *v, const struct record *r) {
        static uint8_t payload[BYTES_MOST];
        struct volume_item item = item_of(r, payload);

        volume_read(v, &item, 1);
        if (item.error) {
                run->missed++;
                return false;
        }
        run->read++;
        if (memcmp(payload, contents[r->space][r->node], item.bytes) != 0)
                run->wrong++;
        return true;
}

static void erase_one(struct run *run) {
        struct record *r = &run->records[roll(&run->dice) % PLACES];

        if (!r->known || run->erased.n == ERASED)
                return;
        r->known = false;
        if (volume_erase(&run->volume, &r->place, 1) == 0)
                run->erased.records[run->erased.n++] = *r;
}

/* Which of the disk's files are used as they were found, or are not used. */
static uint32_t files_that(const struct run *run, const struct simulated *disk, bool found) {
        const struct volume_file *f = run->volume.files;
        uint32_t bits = 0;

        for (uint32_t i = 0; i < run->files; i++)
                if (found ? !f[i].error && f[i].state == VOLUME_FOUND : f[i].error != 0)
                        bits |= 1u << disk->at[i];
        return bits;
}

static void forget_one(struct run *run) {
        uint32_t space = (uint32_t)roll(&run->dice) % NAMESPACES;
        uint64_t epoch;

        if (run->erased.n_epochs == ERASED ||
            volume_namespace(&run->volume, id_of(space), &epoch) < 0)
                return;
        for (uint32_t i = 0; i < PLACES; i++)
                if (run->records[i].space == space)
                        run->records[i].known = false;
        if (volume_forget(&run->volume, id_of(space)) != 0)
                return;
        run->erased.knowing &= ~files_that(run, &run->disk, false);
        run->erased.epochs[run->erased.n_epochs++] = epoch;
}

static void step(struct run *run) {
        uint64_t what = roll(&run->dice) % 16;
        const struct record *r = &run->records[roll(&run->dice) % PLACES];
        uint32_t file = (uint32_t)roll(&run->dice) % run->files;

        if (what < 8)
                write_some(run);
        else if (what < 11 && r->known)
                read_one(run, &run->volume, r);
        else if (what < 13)
                run->disk.disk.flush(&run->disk.disk, file); /* as disks do when they like */
        else if (what < 15)
                erase_one(run);
        else if (one_in(&run->dice, 3))
                forget_one(run);
}

/* ---- what is left ---------------------------------------------------------------------------- */

static bool was_erased(const struct erased *erased, const struct kvd_label *label) {
        for (uint32_t i = 0; i < erased->n; i++)
                if (erased->records[i].label.sequence == label->sequence)
                        return true;
        for (uint32_t i = 0; i < erased->n_epochs; i++)
                if (erased->epochs[i] == label->epoch)
                        return true;
        return false;
}

static uint32_t scan(struct run *run, struct volume *v, struct kvd_disk_found *found) {
        uint32_t n = 0;

        for (uint32_t extent = 0; extent < v->n_extents; extent++) {
                int r = volume_scan(v, extent, 0, FILE_SLOTS, found + n);

                n += r > 0 ? (uint32_t)r : 0;
        }
        for (uint32_t i = 0; i < n; i++)
                run->back += was_erased(&run->erased, &found[i].label);
        return n;
}

/* As the daemon does: by the key of what is looked for, behind what was found before it. */
static void find_node(struct run *run, struct volume *v, const struct kvd_disk_found *found,
                      uint32_t n, struct record *records, uint32_t space, uint32_t node) {
        struct record want = {.known = true, .space = space, .node = node};
        uint64_t tag;

        if (!plan(run, space, node, 0, &want))
                return;
        tag = file_tag(v->super->secret, &want.label, &token_of[node]);
        for (uint32_t i = 0; i < n; i++) {
                uint32_t at = (uint32_t)(found[i].place / FILE_SLOTS * 4 +
                                         found[i].place % FILE_SLOTS);

                if (tag != found[i].key.tag)
                        continue;
                want.place = found[i].place;
                want.label.sequence = found[i].label.sequence;
                if (read_one(run, v, &want))
                        records[at] = want;
                return;
        }
}

/* Also what was known before the cut: a place that is asked for wrongly is a miss. */
static void look_around(struct run *run, const struct record *before) {
        static struct kvd_disk_found found[PLACES];
        struct volume *v = &run->volume;
        uint32_t n = scan(run, v, found);

        memset(run->records, 0, sizeof run->records);
        for (uint32_t space = 0; space < NAMESPACES; space++)
                for (uint32_t node = 0; node < NODES; node++)
                        find_node(run, v, found, n, run->records, space, node);
        for (uint32_t i = 0; i < PLACES; i++)
                if (before[i].known)
                        read_one(run, v, &before[i]);
        for (uint32_t i = run->erased.n - MIN(run->erased.n, 8); i < run->erased.n; i++)
                run->back += read_one(run, v, &run->erased.records[i]);
}

/*
 * A file that was not used for a while learns of what was erased meanwhile from one that was; alone
 * it knows nothing of it, and gives the same numbers to something else.
 */
static void note_who_knows(struct run *run, const struct simulated *disk) {
        if (!(files_that(run, disk, true) & run->erased.knowing))
                run->erased.n = run->erased.n_epochs = 0;
        run->erased.knowing = ~files_that(run, disk, false);
}

static int open_volume(struct run *run, struct simulated *disk) {
        int r = volume_judge(&run->volume, &disk->disk, EXTENT_BYTES, STAGING) ?:
                volume_open(&run->volume);

        if (r >= 0)
                note_who_knows(run, disk);
        for (uint32_t i = 0; i < run->files; i++)
                run->left += !run->volume.files[i].error &&
                             run->volume.files[i].state == VOLUME_LEFT;
        run->lost += r == VOLUME_LOST;
        run->refused += r == -EMEDIUMTYPE;
        run->sequence = r < 0 ? 0 : file_sequence_of(run->volume.super->opening);
        return r;
}

/* One may be missing, and two may have changed places. */
static void move_files(struct run *run, struct simulated *disk) {
        uint32_t a = (uint32_t)roll(&run->dice) % run->files;
        uint32_t b = (uint32_t)roll(&run->dice) % run->files, was = disk->at[a];

        disk->at[a] = disk->at[b];
        disk->at[b] = was;
        for (uint32_t i = 0; i < run->files; i++)
                disk->disk.error[i] = 0;
        if (run->files > 1 && one_in(&run->dice, 4))
                disk->disk.error[a] = -ENODEV;
}

/* Returns what volume_open did. One that begins anew has another secret, and counts from 1. */
static int try_image(struct run *run, const struct record *before, bool last) {
        bool misreads = one_in(&run->dice, 8);
        uint32_t n = run->erased.n, n_epochs = run->erased.n_epochs, knowing = run->erased.knowing;
        int state;

        simulated_cut(&run->disk, one_in(&run->dice, 4) ? 1 + (uint32_t)roll(&run->dice) % 3 : 0,
                      one_in(&run->dice, 8), &run->image);
        move_files(run, &run->image);
        state = open_volume(run, &run->image);
        run->image.misreads = misreads;
        if (state == VOLUME_FOUND)
                look_around(run, before);
        run->image.misreads = false;
        volume_close(&run->volume);
        run->images++;
        if (!last) {
                run->erased.n = n;
                run->erased.n_epochs = n_epochs;
                run->erased.knowing = knowing;
        }
        return state;
}

/* ---- generations ----------------------------------------------------------------------------- */

static void break_disk(struct run *run) {
        run->disk.calls = 0;
        run->disk.fail_at = one_in(&run->dice, 4) ? 1 + (uint32_t)roll(&run->dice) % 40 : 0;
        run->disk.fails = SIMULATED_READ | SIMULATED_WRITE | SIMULATED_FLUSH;
        run->disk.forever = one_in(&run->dice, 2);
        run->disk.dies = (uint32_t)roll(&run->dice) % run->files;
        run->disk.dies_at = run->files > 1 && one_in(&run->dice, 4) ?
                                    2 + (uint32_t)roll(&run->dice) % 100 :
                                    0;
}

static void begin_anew(struct run *run) {
        simulated_clear(&run->disk);
        memset(run->records, 0, sizeof run->records);
        run->erased.n = run->erased.n_epochs = 0;
}

static void live(struct run *run) {
        static struct kvd_disk_found found[PLACES];
        int state;

        if (one_in(&run->dice, 64) || run->erased.n == ERASED)
                begin_anew(run);
        break_disk(run);
        state = open_volume(run, &run->disk);
        if (state >= 0) {
                scan(run, &run->volume, found);
                for (uint64_t n = roll(&run->dice) % 32; n; n--)
                        step(run);
        }
        volume_close(&run->volume);
}

/* What the last image was is what the next generation begins with. */
static void generation(struct run *run) {
        struct record before[PLACES];
        int state = 0;

        live(run);
        memcpy(before, run->records, sizeof before);
        for (uint32_t i = 0; i < IMAGES; i++)
                state = try_image(run, before, i + 1 == IMAGES);
        memcpy(run->disk.stable, run->image.seen, run->disk.n_sectors * DISK_SECTOR);
        memcpy(run->disk.seen, run->image.seen, run->disk.n_sectors * DISK_SECTOR);
        run->disk.n_pending = 0;
        memcpy(run->disk.at, run->image.at, sizeof run->disk.at);
        memcpy(run->disk.disk.error, run->image.disk.error, sizeof run->disk.disk.error);
        if (state != VOLUME_FOUND)
                begin_anew(run);
}

struct limits {
        uint64_t images;
        time_t end;
        bool mutant;
};

static bool goes_on(const struct run *run, const struct limits *limits) {
        if (limits->mutant && (run->wrong || run->back))
                return false;
        if (limits->images && run->images >= limits->images)
                return false;
        return !limits->end || run->images % 1024 || time(NULL) < limits->end;
}

static struct limits read_options(int argc, char **argv, uint64_t *seed, uint32_t *files) {
        static const struct option options[] = {{"images", required_argument, NULL, 'i'},
                                                {"seconds", required_argument, NULL, 's'},
                                                {"seed", required_argument, NULL, 'r'},
                                                {"files", required_argument, NULL, 'f'},
                                                {"mutant", no_argument, NULL, 'm'},
                                                {0}};
        struct limits limits = {0};
        int c;

        while ((c = getopt_long(argc, argv, "", options, NULL)) >= 0) {
                if (c == 'i')
                        limits.images = strtoull(optarg, NULL, 10);
                else if (c == 's')
                        limits.end = time(NULL) + atol(optarg);
                else if (c == 'r')
                        *seed = strtoull(optarg, NULL, 10);
                else if (c == 'f')
                        *files = MIN((uint32_t)atoi(optarg), FILES);
                else if (c == 'm')
                        limits.mutant = true;
                else
                        exit(2);
        }
        if (!limits.images && !limits.end)
                limits.images = 100000;
        return limits;
}

int main(int argc, char **argv) {
        static struct run run = {.files = 1};
        uint64_t seed = 1;
        struct limits limits = read_options(argc, argv, &seed, &run.files);
        bool found;

        run.dice.state = seed * UINT64_C(0x9e3779b97f4a7c15) | 1;
        fill_contents();
        simulated_open_several(&run.disk, run.files, EXTENTS, EXTENT_BYTES, &run.dice);
        simulated_open_several(&run.image, run.files, EXTENTS, EXTENT_BYTES, &run.dice);
        while (goes_on(&run, &limits))
                generation(&run);
        simulated_close(&run.disk);
        simulated_close(&run.image);
        found = run.wrong || run.back;
        printf("{\"seed\": %llu, \"images\": %llu, \"records_read\": %llu, "
               "\"records_missed\": %llu, \"volumes_lost\": %llu, \"volumes_refused\": %llu, "
               "\"files_left\": %llu, \"records_wrong\": %llu, "
               "\"records_back\": %llu}\n",
               (unsigned long long)seed, (unsigned long long)run.images,
               (unsigned long long)run.read, (unsigned long long)run.missed,
               (unsigned long long)run.lost, (unsigned long long)run.refused,
               (unsigned long long)run.left,
               (unsigned long long)run.wrong, (unsigned long long)run.back);
        return found != limits.mutant;
}
