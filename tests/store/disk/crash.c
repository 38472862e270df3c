/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Power cuts, with the file tier's own code. A volume on a simulated disk writes, reads, erases
 * and forgets at random. Then the power fails, and each of many images that may be left is opened,
 * scanned and read. A record that is read must have the contents that belong to its tokens, and a
 * record that was erased must not be there.
 *
 * The file may hang. Then a new process opens it, or it is off until the next start.
 *
 *      crash [--images N] [--seconds N] [--seed N] [--mutant]
 *
 * The last line of the output is the result. --mutant: the code is broken on purpose, and the run
 * succeeds if it detects that.
 */

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "tests/store/disk/keeper.h"

#define NAMESPACES 3u /* the last one has blocks of the same size as the first */
#define NODES 6u      /* blocks of a namespace: two roots with two children each, of equal tokens */
#define BYTES_MOST 5000u
#define EXTENTS 2u
#define SLOTS 4u /* of an extent */
#define EXTENT_BYTES (DISK_SECTOR + SLOTS * 2 * DISK_SECTOR)
#define STAGING (16u * DISK_SECTOR)
#define PLACES (EXTENTS * SLOTS)
#define IMAGES 16u /* of one power cut */
#define ERASED 4096u

static const uint32_t payload_bytes[NAMESPACES] = {4096, BYTES_MOST, 4096};
static const uint32_t parent_of[NODES] = {NODES, NODES, 0, 0, 1, 1};
static const uint32_t token_of[NODES] = {100, 101, 7, 8, 7, 8};
static uint8_t contents[NAMESPACES][NODES][BYTES_MOST];

struct record { /* what a daemon would know of it */
        bool known;
        uint32_t place, space, node;
        struct kvd_label label;
};

/* Records and epochs whose erasure succeeded. */
struct erased {
        struct record records[ERASED];
        uint32_t n;
        uint64_t epochs[ERASED];
        uint32_t n_epochs;
};

struct run {
        struct dice dice;
        struct simulated disk, image;
        struct keeper open;
        bool hangs;
        uint64_t sequence;
        struct record records[PLACES];
        struct erased erased;
        uint64_t images_n, wrong, back, read, missed, lost, refused, hung, off;
};

static uint64_t place_of(uint32_t place) {
        return place / SLOTS * (uint64_t)FILE_SLOTS + place % SLOTS;
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
static bool is_used(const struct run *run) {
        return !run->open.head.error && !run->hangs;
}

static void tell(struct run *run) {
        if (is_used(run))
                keeper_tell(&run->open);
}

/* The epoch of a namespace. If it is new, the superblock is written. */
static uint64_t epoch_of(struct run *run, uint32_t space) {
        uint64_t serial = run->open.head.super.serial, epoch = 0;

        if (head_name(&run->open.head, id_of(space), &epoch) < 0)
                return 0;
        if (run->open.head.super.serial != serial)
                tell(run);
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

/* Writes up to three records. */
static void write_some(struct run *run) {
        uint32_t at[3], n = 0;
        struct volume_item items[3];

        for (uint32_t i = 0; i < ARRAY_SIZE(items); i++) {
                uint32_t space = (uint32_t)roll(&run->dice) % NAMESPACES;
                uint32_t node = (uint32_t)roll(&run->dice) % NODES;
                uint32_t place = (uint32_t)roll(&run->dice) % PLACES;
                struct record *r = &run->records[place], planned;

                if (find(run->records, space, node) || (space == 1 && place % SLOTS == 3) ||
                    (n && (run->records[at[0]].space != space || at[0] == place ||
                           (n > 1 && at[1] == place))) ||
                    !plan(run, space, node, place, &planned) || !is_used(run))
                        continue;
                drop_others(run, place, space);
                *r = planned;
                at[n] = place;
                items[n++] = item_of(r, contents[space][node]);
        }
        if (n)
                volume_write(&run->open.volume, items, n);
        for (uint32_t i = 0; i < n; i++)
                run->records[at[i]].known &= !items[i].error;
}

/* True: the record was there. */
static bool read_one(struct run *run, const struct record *r) {
        static uint8_t payload[BYTES_MOST];
        struct volume_item item = item_of(r, payload);

        if (!is_used(run))
                return false;
        volume_read(&run->open.volume, &item, 1);
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

        if (!r->known || run->erased.n == ERASED || !is_used(run))
                return;
        r->known = false;
        place = place_of(r->place);
        if (volume_erase(&run->open.volume, &place, 1) == 0)
                run->erased.records[run->erased.n++] = *r;
}

static void begin_hang(struct run *run) {
        run->hangs = true;
        run->hung++;
}

/* A hang may end: a new process opens the file, or it is off. */
static void end_hang(struct run *run) {
        if (!run->hangs || one_in(&run->dice, 2))
                return;
        run->hangs = false;
        if (!one_in(&run->dice, 4)) {
                keeper_reopen(&run->open);
        } else {
                run->open.head.error = run->open.head.error ?: -ETIMEDOUT;
                run->off++;
        }
}

static void forget_one(struct run *run) {
        uint32_t space = (uint32_t)roll(&run->dice) % NAMESPACES;
        uint64_t epoch = run->erased.n_epochs == ERASED ? 0 : epoch_of(run, space);

        if (!epoch)
                return;
        for (uint32_t i = 0; i < PLACES; i++)
                if (run->records[i].space == space)
                        run->records[i].known = false;
        head_forget(&run->open.head, id_of(space));
        tell(run);
        end_hang(run);
        if (is_used(run))
                run->erased.epochs[run->erased.n_epochs++] = epoch;
}

static void step(struct run *run) {
        uint64_t what = roll(&run->dice) % 16;
        const struct record *r = &run->records[roll(&run->dice) % PLACES];

        end_hang(run);
        if (what < 8)
                write_some(run);
        else if (what < 11 && r->known)
                read_one(run, r);
        else if (what < 13)
                run->disk.disk.flush(&run->disk.disk); /* as disks do at any time */
        else if (what < 15)
                erase_one(run);
        else if (one_in(&run->dice, 3))
                forget_one(run);
        else if (is_used(run) && one_in(&run->dice, 2))
                begin_hang(run);
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

static uint32_t scan(struct run *run, struct kvd_disk_found *found) {
        struct volume *v = &run->open.volume;
        uint32_t n = 0;

        for (uint32_t extent = 0; extent < v->n_extents; extent++) {
                int r = volume_scan(v, extent, 0, FILE_SLOTS, found + n);

                n += r > 0 ? (uint32_t)r : 0;
        }
        for (uint32_t i = 0; i < n; i++) {
                found[i].place = found[i].place / FILE_SLOTS * SLOTS + found[i].place % FILE_SLOTS;
                run->back += was_erased(&run->erased, &found[i].label);
        }
        return n;
}

/* Finds a block's record as the daemon does: by its key, after its parent's record. */
static void find_node(struct run *run, const struct kvd_disk_found *found, uint32_t n,
                      struct record *records, uint32_t space, uint32_t node) {
        struct record want = {.known = true, .space = space, .node = node};
        uint64_t tag;

        if (!plan(run, space, node, 0, &want))
                return;
        tag = file_tag(run->open.head.super.secret, &want.label, &token_of[node]);
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

/* A file that starts empty has none of its records, and uses the same numbers again. */
static void forget_all(struct run *run) {
        memset(run->records, 0, sizeof run->records);
        run->erased.n = run->erased.n_epochs = 0;
}

static int open_file(struct run *run, struct simulated *disk) {
        int state;

        run->open = (struct keeper){.disk = disk, .staging_bytes = STAGING};
        state = keeper_judge(&run->open, EXTENT_BYTES);
        run->lost += state == KEEPER_LOST;
        run->refused += state == -EMEDIUMTYPE;
        if (state == KEEPER_NEW || state == KEEPER_LOST)
                forget_all(run);
        if (state >= 0 && keeper_tell(&run->open) < 0)
                state = run->open.head.error;
        run->hangs = false;
        run->sequence = state < 0 ? 0 : file_sequence_of(run->open.head.super.opening);
        return state;
}

static void break_superblocks(struct simulated *image) {
        for (uint32_t copy = 0; copy < FILE_COPIES; copy++) {
                image->stable[copy][100] ^= 1;
                image->seen[copy][100] ^= 1;
        }
}

static void make_image(struct run *run) {
        simulated_cut(&run->disk, one_in(&run->dice, 4) ? 1 + (uint32_t)roll(&run->dice) % 3 : 0,
                      one_in(&run->dice, 8), &run->image);
        if (one_in(&run->dice, 32))
                break_superblocks(&run->image);
}

/* Returns the result of opening. */
static int try_image(struct run *run, const struct record *before, bool last) {
        static struct erased erased;
        bool misreads = one_in(&run->dice, 8);
        int state;

        memcpy(&erased, &run->erased, sizeof erased);
        make_image(run);
        state = open_file(run, &run->image);
        run->image.misreads = misreads;
        if (state == KEEPER_FOUND)
                look_around(run, before);
        run->image.misreads = false;
        keeper_close(&run->open);
        run->images_n++;
        if (!last)
                memcpy(&run->erased, &erased, sizeof erased);
        return state;
}

/* ---- generations ----------------------------------------------------------------------------- */

static void break_disk(struct run *run) {
        run->disk.calls = 0;
        run->disk.fail_at = one_in(&run->dice, 4) ? 1 + (uint32_t)roll(&run->dice) % 40 : 0;
        run->disk.fails = SIMULATED_READ | SIMULATED_WRITE | SIMULATED_FLUSH;
        run->disk.forever = one_in(&run->dice, 2);
}

static void begin_anew(struct run *run) {
        simulated_clear(&run->disk);
        forget_all(run);
}

static void live(struct run *run) {
        static struct kvd_disk_found found[PLACES];

        if (one_in(&run->dice, 64) || run->erased.n == ERASED)
                begin_anew(run);
        break_disk(run);
        if (open_file(run, &run->disk) >= 0) {
                scan(run, found);
                for (uint64_t n = roll(&run->dice) % 32; n; n--)
                        step(run);
        }
        keeper_close(&run->open);
}

/* The next generation begins with the last image. */
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
        if (state < 0)
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

static struct limits read_options(int argc, char **argv, uint64_t *seed) {
        static const struct option options[] = {{"images", required_argument, NULL, 'i'},
                                                {"seconds", required_argument, NULL, 's'},
                                                {"seed", required_argument, NULL, 'r'},
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
        static struct run run;
        uint64_t seed = 1;
        struct limits limits = read_options(argc, argv, &seed);
        bool found;

        run.dice.state = seed * UINT64_C(0x9e3779b97f4a7c15) | 1;
        fill_contents();
        simulated_open(&run.disk, EXTENTS, EXTENT_BYTES, &run.dice);
        simulated_open(&run.image, EXTENTS, EXTENT_BYTES, &run.dice);
        while (goes_on(&run, &limits))
                generation(&run);
        simulated_close(&run.disk);
        simulated_close(&run.image);
        found = run.wrong || run.back;
        printf("{\"seed\": %llu, \"images\": %llu, \"records_read\": %llu, "
               "\"records_missed\": %llu, \"volumes_lost\": %llu, \"volumes_refused\": %llu, "
               "\"hangs\": %llu, \"hangs_off\": %llu, \"records_wrong\": %llu, "
               "\"records_back\": %llu}\n",
               (unsigned long long)seed, (unsigned long long)run.images_n,
               (unsigned long long)run.read, (unsigned long long)run.missed,
               (unsigned long long)run.lost, (unsigned long long)run.refused,
               (unsigned long long)run.hung, (unsigned long long)run.off,
               (unsigned long long)run.wrong, (unsigned long long)run.back);
        return found != limits.mutant;
}
