/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Power cuts, with the file tier's own code. A volume on a simulated disk writes, reads, erases
 * and forgets at random. Then the power fails, and each of many images that may be left is opened,
 * scanned and read. A record that is read must have the contents that belong to its tokens, and a
 * record that was erased must not be there.
 *
 * With several files, each with its own volume, one of them may die, hang and be opened by another
 * process, be missing for a while, return in the state of some generations ago, or change places
 * with another.
 *
 *      crash [--images N] [--seconds N] [--seed N] [--files N] [--mutant]
 *
 * Without --files, their number depends on the seed. The last line of the output is the result.
 * --mutant: the code is broken on purpose, and the run succeeds if it detects that.
 */

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "tests/store/disk/volumes.h"

#define NAMESPACES 3u /* the last one has blocks of the same size as the first */
#define NODES 6u      /* blocks of a namespace: two roots with two children each, of equal tokens */
#define BYTES_MOST 5000u
#define EXTENTS 2u    /* of a file */
#define FILES VOLUMES /* maximum number of files */
#define SLOTS 4u      /* of an extent */
#define EXTENT_BYTES (DISK_SECTOR + SLOTS * 2 * DISK_SECTOR)
#define STAGING (16u * DISK_SECTOR)
#define OF_ONE (EXTENTS * SLOTS) /* places of a file */
#define PLACES (FILES * OF_ONE)
#define IMAGES 16u /* of one power cut */
#define ERASED 4096u

static const uint32_t payload_bytes[NAMESPACES] = {4096, BYTES_MOST, 4096};
static const uint32_t parent_of[NODES] = {NODES, NODES, 0, 0, 1, 1};
static const uint32_t token_of[NODES] = {100, 101, 7, 8, 7, 8};
static uint8_t contents[NAMESPACES][NODES][BYTES_MOST];

struct record { /* what a daemon would know of it */
        bool known;
        uint32_t place; /* counted through all files */
        uint32_t disk;  /* if erased: the disk of its file */
        uint32_t space, node;
        struct kvd_label label;
};

/* Records and epochs whose erasure succeeded. */
struct erased {
        struct record records[ERASED];
        uint32_t n;
        uint64_t epochs[ERASED];
        uint32_t n_epochs;
        uint32_t knowing; /* bits of the disks that were used all the time */
};

struct run {
        struct dice dice;
        uint32_t files;
        struct simulated disks[FILES], images[FILES];
        uint8_t (*old[FILES])[DISK_SECTOR]; /* a disk's contents of some generations ago */
        struct volumes open;
        uint32_t at[FILES]; /* number of each file's disk */
        bool hangs[FILES];
        uint64_t told[FILES];       /* serial of the file's superblock */
        uint64_t named[NAMESPACES]; /* serial of the first superblock that names it */
        uint64_t sequence;
        struct record records[PLACES];
        struct erased erased;
        uint64_t images_n, wrong, back, read, missed, lost, refused, left, aged, hung;
};

static uint64_t place_of(uint32_t place) {
        return place % OF_ONE / SLOTS * (uint64_t)FILE_SLOTS + place % SLOTS;
}

static uint32_t file_of(uint32_t place) {
        return place / OF_ONE;
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
        return (struct volume_item){.place = place_of(r->place),
                                    .label = &r->label,
                                    .tokens = &token_of[r->node],
                                    .payload = payload,
                                    .bytes = payload_bytes[r->space]};
}

/* Does the file take requests? */
static bool is_used(const struct run *run, uint32_t file) {
        return file < run->files && !run->open.set.files[file].error && !run->hangs[file];
}

static void tell(struct run *run, uint32_t file) {
        if (volumes_tell(&run->open, file) == 0)
                run->told[file] = run->open.set.super.serial;
}

static void tell_all(struct run *run) {
        for (uint32_t i = 0; i < run->files; i++)
                if (is_used(run, i))
                        tell(run, i);
}

/* The epoch of a namespace. If it is new, all files that take requests get the superblock. */
static uint64_t epoch_of(struct run *run, uint32_t space) {
        uint64_t serial = run->open.set.super.serial, epoch = 0;

        if (set_name(&run->open.set, id_of(space), &epoch) < 0)
                return 0;
        if (run->open.set.super.serial == serial)
                return epoch;
        run->named[space] = run->open.set.super.serial;
        tell_all(run);
        return epoch;
}

/* Makes the record of a block at a place, after its parent's. False: the parent has none. */
static bool plan(struct run *run, uint32_t space, uint32_t node, uint32_t place,
                 struct record *ret) {
        const struct record *parent = NULL;
        uint64_t epoch;

        if (parent_of[node] != NODES && !(parent = find(run->records, space, parent_of[node])))
                return false;
        epoch = epoch_of(run, space);
        if (!epoch)
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
        for (uint32_t i = place / SLOTS * SLOTS; i < (place / SLOTS + 1) * SLOTS; i++)
                if (run->records[i].space != space)
                        run->records[i].known = false;
}

/* Writes up to three records to a file whose superblock has their namespace. */
static void write_some(struct run *run) {
        uint32_t at[3], n = 0, file = (uint32_t)roll(&run->dice) % run->files;
        struct volume_item items[3];

        for (uint32_t i = 0; i < ARRAY_SIZE(items); i++) {
                uint32_t space = (uint32_t)roll(&run->dice) % NAMESPACES;
                uint32_t node = (uint32_t)roll(&run->dice) % NODES;
                uint32_t place = file * OF_ONE + (uint32_t)roll(&run->dice) % OF_ONE;
                struct record *r = &run->records[place], planned;

                if (find(run->records, space, node) || (space == 1 && place % SLOTS == 3) ||
                    (n && (run->records[at[0]].space != space || at[0] == place ||
                           (n > 1 && at[1] == place))) ||
                    !plan(run, space, node, place, &planned) || !is_used(run, file) ||
                    run->told[file] < run->named[space])
                        continue;
                drop_others(run, place, space);
                *r = planned;
                at[n] = place;
                items[n++] = item_of(r, contents[space][node]);
        }
        if (n)
                volume_write(&run->open.volumes[file], items, n);
        for (uint32_t i = 0; i < n; i++)
                run->records[at[i]].known &= !items[i].error;
}

/* True: the record was there. */
static bool read_one(struct run *run, const struct record *r) {
        static uint8_t payload[BYTES_MOST];
        struct volume_item item = item_of(r, payload);

        if (!is_used(run, file_of(r->place)))
                return false;
        volume_read(&run->open.volumes[file_of(r->place)], &item, 1);
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
        uint64_t place;

        if (!r->known || run->erased.n == ERASED || !is_used(run, file_of(r->place)))
                return;
        r->known = false;
        place = place_of(r->place);
        if (volume_erase(&run->open.volumes[file_of(r->place)], &place, 1) < 0)
                return;
        r->disk = run->at[file_of(r->place)];
        run->erased.records[run->erased.n++] = *r;
}

/* Bits of the disks that are used in the state SET_FOUND, or else of those that are not used. */
static uint32_t files_that(const struct run *run, bool found) {
        const struct set_file *f = run->open.set.files;
        uint32_t bits = 0;

        for (uint32_t i = 0; i < run->files; i++)
                if (found ? !f[i].error && f[i].state == SET_FOUND : f[i].error != 0)
                        bits |= 1u << run->at[i];
        return bits;
}

/* A new process opens the file of one that hung. */
static void reopen(struct run *run, uint32_t file) {
        static uint8_t copies[FILE_COPIES * DISK_SECTOR];
        struct volume *v = &run->open.volumes[file];
        int r;

        run->hangs[file] = false;
        volume_close(v);
        r = volume_begin(v, &run->open.disks[file]->disk, STAGING) ?:
                    volume_look(v, copies)                         ?:
                    set_see_again(&run->open.set, file, copies);
        run->open.set.files[file].error = run->open.set.files[file].error ?: r;
        if (!run->open.set.files[file].error)
                tell(run, file);
}

/* May end some hangs: the file answers, or is off. True: all files in use have the superblock. */
static bool is_answered(struct run *run) {
        for (uint32_t i = 0; i < run->files; i++)
                if (run->hangs[i] && one_in(&run->dice, 2))
                        reopen(run, i);
                else if (run->hangs[i] && one_in(&run->dice, 2))
                        run->open.set.files[i].error = -ETIMEDOUT;
        for (uint32_t i = 0; i < run->files; i++)
                if (!run->open.set.files[i].error && run->told[i] < run->open.set.super.serial)
                        return false;
        return files_that(run, false) != (1u << run->files) - 1;
}

static void forget_one(struct run *run) {
        uint32_t space = (uint32_t)roll(&run->dice) % NAMESPACES;
        uint64_t epoch = run->erased.n_epochs == ERASED ? 0 : epoch_of(run, space);

        if (!epoch)
                return;
        for (uint32_t i = 0; i < PLACES; i++)
                if (run->records[i].space == space)
                        run->records[i].known = false;
        set_forget(&run->open.set, id_of(space));
        tell_all(run);
        if (!is_answered(run))
                return;
        run->erased.knowing &= ~files_that(run, false);
        run->erased.epochs[run->erased.n_epochs++] = epoch;
}

static void hang(struct run *run, uint32_t file) {
        if (run->hangs[file]) {
                reopen(run, file);
        } else if (run->files > 1 && is_used(run, file)) {
                run->hangs[file] = true;
                run->hung++;
        }
}

static void step(struct run *run) {
        uint64_t what = roll(&run->dice) % 16;
        const struct record *r = &run->records[roll(&run->dice) % PLACES];
        uint32_t file = (uint32_t)roll(&run->dice) % run->files;

        if (what < 8)
                write_some(run);
        else if (what < 11 && r->known)
                read_one(run, r);
        else if (what < 13)
                run->disks[file].disk.flush(&run->disks[file].disk); /* as disks do at any time */
        else if (what < 15)
                erase_one(run);
        else if (one_in(&run->dice, 3))
                forget_one(run);
        else if (one_in(&run->dice, 2))
                hang(run, file);
}

/* ---- images after a power cut ---------------------------------------------------------------- */

static bool was_erased(const struct erased *erased, const struct kvd_label *label) {
        for (uint32_t i = 0; i < erased->n; i++)
                if (erased->records[i].label.sequence == label->sequence)
                        return true;
        for (uint32_t i = 0; i < erased->n_epochs; i++)
                if (erased->epochs[i] == label->epoch)
                        return true;
        return false;
}

static uint32_t scan_one(struct run *run, uint32_t file, struct kvd_disk_found *found) {
        struct volume *v = &run->open.volumes[file];
        uint32_t n = 0;

        for (uint32_t extent = 0; extent < v->n_extents; extent++) {
                int r = volume_scan(v, extent, 0, FILE_SLOTS, found + n);

                n += r > 0 ? (uint32_t)r : 0;
        }
        for (uint32_t i = 0; i < n; i++)
                found[i].place = file * OF_ONE + found[i].place / FILE_SLOTS * SLOTS +
                                 found[i].place % FILE_SLOTS;
        return n;
}

/* Places are counted through all files, as in struct record. */
static uint32_t scan(struct run *run, struct kvd_disk_found *found) {
        uint32_t n = 0;

        for (uint32_t file = 0; file < run->files; file++)
                if (is_used(run, file))
                        n += scan_one(run, file, found + n);
        for (uint32_t i = 0; i < n; i++)
                run->back += was_erased(&run->erased, &found[i].label);
        return n;
}

/* Finds a block's record as the daemon does: by its key, after its parent's record. */
static void find_node(struct run *run, const struct kvd_disk_found *found, uint32_t n,
                      struct record *records, uint32_t space, uint32_t node) {
        struct record want = {.known = true, .space = space, .node = node};
        uint64_t tag;

        if (!plan(run, space, node, 0, &want))
                return;
        tag = file_tag(run->open.set.super.secret, &want.label, &token_of[node]);
        for (uint32_t i = 0; i < n; i++) {
                if (tag != found[i].key.tag)
                        continue;
                want.place = (uint32_t)found[i].place;
                want.label.sequence = found[i].label.sequence;
                if (read_one(run, &want))
                        records[want.place] = want;
                return;
        }
}

/* Also reads the records known before the cut: reading a wrong place must be a miss. */
static void look_around(struct run *run, const struct record *before) {
        static struct kvd_disk_found found[PLACES];
        uint32_t n = scan(run, found);

        memset(run->records, 0, sizeof run->records);
        for (uint32_t space = 0; space < NAMESPACES; space++)
                for (uint32_t node = 0; node < NODES; node++)
                        find_node(run, found, n, run->records, space, node);
        for (uint32_t i = 0; i < PLACES; i++)
                if (before[i].known)
                        read_one(run, &before[i]);
        for (uint32_t i = run->erased.n - MIN(run->erased.n, 8); i < run->erased.n; i++)
                run->back += read_one(run, &run->erased.records[i]);
}

/*
 * A file that was not used for a while learns from a file that was which records are erased. If it
 * is used alone, it does not know that, and uses the same numbers for something else.
 */
static void note_who_knows(struct run *run) {
        if (!(files_that(run, true) & run->erased.knowing))
                run->erased.n = run->erased.n_epochs = 0;
        run->erased.knowing = ~files_that(run, false);
}

static int open_files(struct run *run, struct simulated *disks) {
        struct set *set = &run->open.set;
        int r;

        run->open.n = run->files;
        for (uint32_t i = 0; i < run->files; i++)
                run->open.disks[i] = &disks[run->at[i]];
        r = volumes_open(&run->open, EXTENT_BYTES, STAGING);
        if (r >= 0)
                note_who_knows(run);
        for (uint32_t i = 0; i < run->files; i++) {
                run->left += !set->files[i].error && set->files[i].state == SET_LEFT;
                run->told[i] = set->files[i].error ? 0 : set->super.serial;
                run->hangs[i] = false;
        }
        for (uint32_t i = 0; i < NAMESPACES; i++)
                run->named[i] = set->super.serial;
        run->lost += r == SET_LOST;
        run->refused += r == -EMEDIUMTYPE;
        run->sequence = r < 0 ? 0 : file_sequence_of(set->super.opening);
        return r;
}

/* A file may be missing, and two files may change places. */
static void move_files(struct run *run) {
        uint32_t a = (uint32_t)roll(&run->dice) % run->files;
        uint32_t b = (uint32_t)roll(&run->dice) % run->files, was = run->at[a];

        run->at[a] = run->at[b];
        run->at[b] = was;
        memset(run->open.missing, 0, sizeof run->open.missing);
        if (run->files > 1 && one_in(&run->dice, 4))
                run->open.missing[a] = -ENODEV;
}

/*
 * The disk returns in the state of some generations ago. Records that were erased from it since
 * may be there again, but only there.
 */
static void age(struct run *run, uint32_t disk) {
        struct simulated *image = &run->images[disk];
        struct erased *e = &run->erased;
        uint32_t n = 0;

        memcpy(image->stable, run->old[disk], image->n_sectors * DISK_SECTOR);
        memcpy(image->seen, run->old[disk], image->n_sectors * DISK_SECTOR);
        e->knowing &= ~(1u << disk);
        for (uint32_t i = 0; i < e->n; i++)
                if (e->records[i].disk != disk)
                        e->records[n++] = e->records[i];
        e->n = n;
        run->aged++;
}

static void make_image(struct run *run) {
        bool ages = run->files > 1 && one_in(&run->dice, 8);

        for (uint32_t i = 0; i < run->files; i++)
                simulated_cut(&run->disks[i],
                              one_in(&run->dice, 4) ? 1 + (uint32_t)roll(&run->dice) % 3 : 0,
                              one_in(&run->dice, 8), &run->images[i]);
        if (ages)
                age(run, (uint32_t)roll(&run->dice) % run->files);
        move_files(run);
}

static void misread(struct run *run, bool misreads) {
        for (uint32_t i = 0; i < run->files; i++)
                run->images[i].misreads = misreads;
}

/* Returns the result of opening. A file that starts empty has another secret, and counts from 1. */
static int try_image(struct run *run, const struct record *before, bool last) {
        static struct erased erased;
        bool misreads = one_in(&run->dice, 8);
        int state;

        memcpy(&erased, &run->erased, sizeof erased);
        make_image(run);
        state = open_files(run, run->images);
        misread(run, misreads);
        if (state == SET_FOUND)
                look_around(run, before);
        misread(run, false);
        volumes_close(&run->open);
        run->images_n++;
        if (!last)
                memcpy(&run->erased, &erased, sizeof erased);
        return state;
}

/* ---- generations ----------------------------------------------------------------------------- */

static void break_disk(struct run *run, struct simulated *disk) {
        disk->calls = 0;
        disk->fail_at = one_in(&run->dice, 4) ? 1 + (uint32_t)roll(&run->dice) % 40 : 0;
        disk->fails = SIMULATED_READ | SIMULATED_WRITE | SIMULATED_FLUSH;
        disk->forever = one_in(&run->dice, 2);
        disk->dies_at = run->files > 1 && one_in(&run->dice, 8) ?
                                2 + (uint32_t)roll(&run->dice) % 100 :
                                0;
}

static void begin_anew(struct run *run) {
        for (uint32_t i = 0; i < run->files; i++) {
                simulated_clear(&run->disks[i]);
                memset(run->old[i], 0, run->disks[i].n_sectors * DISK_SECTOR);
        }
        memset(run->records, 0, sizeof run->records);
        run->erased.n = run->erased.n_epochs = 0;
}

static void live(struct run *run) {
        static struct kvd_disk_found found[PLACES];
        int state;

        if (one_in(&run->dice, 64) || run->erased.n == ERASED)
                begin_anew(run);
        for (uint32_t i = 0; i < run->files; i++) {
                break_disk(run, &run->disks[i]);
                if (one_in(&run->dice, 4))
                        memcpy(run->old[i], run->disks[i].stable,
                               run->disks[i].n_sectors * DISK_SECTOR);
        }
        state = open_files(run, run->disks);
        if (state >= 0) {
                scan(run, found);
                for (uint64_t n = roll(&run->dice) % 32; n; n--)
                        step(run);
        }
        volumes_close(&run->open);
}

/* The next generation begins with the last image. */
static void generation(struct run *run) {
        struct record before[PLACES];
        int state = 0;

        live(run);
        memcpy(before, run->records, sizeof before);
        for (uint32_t i = 0; i < IMAGES; i++)
                state = try_image(run, before, i + 1 == IMAGES);
        for (uint32_t i = 0; i < run->files; i++) {
                struct simulated *to = &run->disks[i];

                memcpy(to->stable, run->images[i].seen, to->n_sectors * DISK_SECTOR);
                memcpy(to->seen, run->images[i].seen, to->n_sectors * DISK_SECTOR);
                to->n_pending = 0;
        }
        if (state != SET_FOUND)
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
        if (limits->images && run->images_n >= limits->images)
                return false;
        return !limits->end || run->images_n % 1024 || time(NULL) < limits->end;
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

static void open_disk(struct run *run, uint32_t i) {
        simulated_open(&run->disks[i], EXTENTS, EXTENT_BYTES, &run->dice);
        simulated_open(&run->images[i], EXTENTS, EXTENT_BYTES, &run->dice);
        run->old[i] = calloc(run->disks[i].n_sectors, DISK_SECTOR) ?: (abort(), NULL);
        run->at[i] = i;
}

static void close_disk(struct run *run, uint32_t i) {
        simulated_close(&run->disks[i]);
        simulated_close(&run->images[i]);
        free(run->old[i]);
}

int main(int argc, char **argv) {
        static struct run run;
        uint64_t seed = 1;
        struct limits limits = read_options(argc, argv, &seed, &run.files);
        bool found;

        if (!run.files)
                run.files = 1 + (uint32_t)(seed % FILES);

        run.dice.state = seed * UINT64_C(0x9e3779b97f4a7c15) | 1;
        fill_contents();
        for (uint32_t i = 0; i < run.files; i++)
                open_disk(&run, i);
        while (goes_on(&run, &limits))
                generation(&run);
        for (uint32_t i = 0; i < run.files; i++)
                close_disk(&run, i);
        found = run.wrong || run.back;
        printf("{\"seed\": %llu, \"images\": %llu, \"records_read\": %llu, "
               "\"records_missed\": %llu, \"volumes_lost\": %llu, \"volumes_refused\": %llu, "
               "\"files_left\": %llu, \"files_aged\": %llu, \"files_hung\": %llu, "
               "\"records_wrong\": %llu, "
               "\"records_back\": %llu}\n",
               (unsigned long long)seed, (unsigned long long)run.images_n,
               (unsigned long long)run.read, (unsigned long long)run.missed,
               (unsigned long long)run.lost, (unsigned long long)run.refused,
               (unsigned long long)run.left, (unsigned long long)run.aged,
               (unsigned long long)run.hung, (unsigned long long)run.wrong,
               (unsigned long long)run.back);
        return found != limits.mutant;
}
