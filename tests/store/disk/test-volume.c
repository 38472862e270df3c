/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A volume, step by step: records that were written are read back, a file that is no volume is not
 * touched, a failing disk loses only records, and a file that version 1 has written can be read.
 *
 *      test-volume --write      prints the file of version 1
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "tests/lib/suite.h"
#include "tests/store/disk/keeper.h"

#define BYTES 5000u
#define N 5u /* records of one chain */
#define EXTENT_BYTES (DISK_SECTOR + 3u * 3 * DISK_SECTOR)
#define STAGING (8u * DISK_SECTOR)
#define SPACE ((struct kvd_key){11, 12})
#define ROW 32u /* bytes of a line of the golden file */

static uint64_t extent_bytes;
static struct dice dice = {1};
static struct simulated disk;
static struct keeper file = {.disk = &disk, .staging_bytes = STAGING};
#define volume (file.volume)
static struct volume_item items[N];
static struct kvd_label labels[N];
static uint32_t n_tokens, tokens[N][KVD_MAX_BLOCK_TOKENS];
static uint8_t payloads[N][BYTES];

static void fill(uint8_t *payload, uint32_t i) {
        for (uint32_t at = 0; at < BYTES; at++)
                payload[at] = (uint8_t)(at * 7 + i * 31 + 1);
}

static int open_volume(void) {
        return keeper_open(&file, extent_bytes);
}

static uint64_t place_of(uint32_t i) {
        return i / 3 * (uint64_t)FILE_SLOTS + i % 3;
}

/* Fills in items for records of this opening. */
static void plan(uint64_t epoch) {
        uint64_t sequence = file_sequence_of(volume.super->opening);

        for (uint32_t i = 0; i < N; i++) {
                labels[i] = (struct kvd_label){.sequence = sequence + i,
                                               .parent = i ? sequence + i - 1 : 0,
                                               .epoch = epoch,
                                               .root = 5,
                                               .group = 2,
                                               .depth = i,
                                               .n_tokens = n_tokens};
                for (uint32_t t = 0; t < n_tokens; t++)
                        tokens[i][t] = i * 100 + t;
                fill(payloads[i], i);
                items[i] = (struct volume_item){.place = place_of(i),
                                                .label = &labels[i],
                                                .tokens = tokens[i],
                                                .payload = payloads[i],
                                                .bytes = BYTES};
        }
}

static uint64_t epoch_of_space(void) {
        uint64_t epoch = 0;

        if (head_name(&file.head, SPACE, &epoch) == 0)
                keeper_tell(&file);
        return epoch;
}

static int forget(struct kvd_key id) {
        head_forget(&file.head, id);
        return keeper_tell(&file);
}

/* Number of records that can be read. Fails if one has wrong contents. */
static uint32_t read_all(void) {
        static uint8_t right[BYTES];
        uint32_t n = 0;

        memset(payloads, 0, sizeof payloads);
        volume_read(&volume, items, N);
        for (uint32_t i = 0; i < N; i++) {
                fill(right, i);
                if (items[i].error)
                        memset(right, 0, BYTES);
                ck_assert_mem_eq(payloads[i], right, BYTES);
                n += !items[i].error;
        }
        return n;
}

static void write_all(void) {
        plan(epoch_of_space());
        volume_write(&volume, items, N);
}

static uint32_t scan_all(struct kvd_disk_found *found) {
        uint32_t n = 0;

        for (uint32_t extent = 0; extent < volume.n_extents; extent++) {
                int r = volume_scan(&volume, extent, 0, FILE_SLOTS, found + n);

                n += r > 0 ? (uint32_t)r : 0;
        }
        return n;
}

static void set_up(void) {
        extent_bytes = EXTENT_BYTES;
        n_tokens = 16;
        simulated_open(&disk, 2, extent_bytes, &dice);
}

static void tear_down(void) {
        keeper_close(&file);
        simulated_close(&disk);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static struct kvd_disk_found found[2 * FILE_SLOTS];

static void write_and_read(void) {
        ck_assert_int_eq(open_volume(), KEEPER_NEW);
        write_all();
        ck_assert_uint_eq(read_all(), N);
        keeper_close(&file);
        ck_assert_int_eq(open_volume(), KEEPER_FOUND);
        ck_assert_uint_eq(scan_all(found), N);
        ck_assert_uint_eq(read_all(), N);
        for (uint32_t i = 0; i < N; i++) {
                struct kvd_record_key key = file_key(volume.super->secret, &labels[i], tokens[i]);

                ck_assert_mem_eq(&found[i].key, &key, sizeof key);
                ck_assert_mem_eq(&found[i].label, &labels[i], sizeof labels[i]);
                ck_assert_uint_eq(found[i].place, place_of(i));
        }
}

START_TEST(what_is_written_is_read) {
        write_and_read();
}
END_TEST

/* Tokens that a record's sector has no room for are in sectors of their own, and compared. */
START_TEST(records_have_all_tokens) {
        static const uint32_t sizes[] = {FILE_RECORD_TOKENS, FILE_RECORD_TOKENS + 1, 1024, 1025,
                                         KVD_MAX_BLOCK_TOKENS};

        simulated_close(&disk);
        n_tokens = sizes[_i];
        extent_bytes = DISK_SECTOR + 3u * file_slot_bytes(BYTES, n_tokens);
        simulated_open(&disk, 2, extent_bytes, &dice);
        write_and_read();
        for (uint32_t at = 0; at < n_tokens; at += n_tokens - 1) {
                tokens[3][at]++;
                ck_assert_uint_eq(read_all(), N - 1);
                ck_assert_int_eq(items[3].error, -EBADMSG);
                tokens[3][at]--;
        }
        ck_assert_uint_eq(read_all(), N);
}
END_TEST

/* An extent has more slots than fit into the staging buffer at once. */
START_TEST(many_are_found_in_pieces) {
        static const uint32_t places[N] = {0, 2, STAGING / DISK_SECTOR - 1,
                                           STAGING / DISK_SECTOR + 1, STAGING / DISK_SECTOR + 3};

        simulated_close(&disk);
        extent_bytes = DISK_SECTOR + 3u * DISK_SECTOR * (STAGING / DISK_SECTOR + 4);
        simulated_open(&disk, 2, extent_bytes, &dice);
        ck_assert_int_eq(open_volume(), KEEPER_NEW);
        plan(epoch_of_space());
        for (uint32_t i = 0; i < N; i++)
                items[i].place = places[i];
        volume_write(&volume, items, N);
        keeper_close(&file);
        ck_assert_int_eq(open_volume(), KEEPER_FOUND);
        ck_assert_uint_eq(scan_all(found), N);
        for (uint32_t i = 0; i < N; i++)
                ck_assert_uint_eq(found[i].place, places[i]);
}
END_TEST

START_TEST(erased_is_erased) {
        ck_assert_int_eq(open_volume(), KEEPER_NEW);
        write_all();
        ck_assert_int_eq(volume_erase(&volume, (uint64_t[]){place_of(1), place_of(4)}, 2), 0);
        ck_assert_uint_eq(read_all(), N - 2);
        ck_assert_int_eq(items[1].error, -EBADMSG);
        ck_assert_int_eq(forget(SPACE), 0);
        keeper_close(&file);
        ck_assert_int_eq(open_volume(), KEEPER_FOUND);
        ck_assert_uint_eq(scan_all(found), 0);
        ck_assert_uint_ne(epoch_of_space(), labels[0].epoch);
        ck_assert_uint_eq(scan_all(found), 0);
}
END_TEST

/* Exact copies have no tokens. Their writer can read them, but a scan does not find them. */
START_TEST(what_has_no_epoch_is_its_writers_alone) {
        ck_assert_int_eq(open_volume(), KEEPER_NEW);
        epoch_of_space();
        plan(FILE_NO_EPOCH);
        for (uint32_t i = 0; i < N; i++)
                labels[i] = (struct kvd_label){.sequence = labels[i].sequence};
        volume_write(&volume, items, N);
        ck_assert_uint_eq(read_all(), N);
        labels[2].sequence++;
        ck_assert_uint_eq(read_all(), N - 1);
        keeper_close(&file);
        ck_assert_int_eq(open_volume(), KEEPER_FOUND);
        ck_assert_uint_eq(scan_all(found), 0);
}
END_TEST

/* More records than fit into the staging buffer at once. */
START_TEST(many_are_erased_in_pieces) {
        uint64_t places[STAGING / DISK_SECTOR + 2];

        ck_assert_int_eq(open_volume(), KEEPER_NEW);
        write_all();
        for (uint32_t i = 0; i < ARRAY_SIZE(places); i++)
                places[i] = place_of(i < STAGING / DISK_SECTOR ? 0 : i % 2 ? 1 : 4);
        ck_assert_int_eq(volume_erase(&volume, places, ARRAY_SIZE(places)), 0);
        ck_assert_uint_eq(read_all(), N - 3);
}
END_TEST

START_TEST(what_does_not_fit_is_refused) {
        ck_assert_int_eq(open_volume(), KEEPER_NEW);
        write_all();
        items[0].place = 3;
        items[1].place = 2 * (uint64_t)FILE_SLOTS;
        items[2].bytes = STAGING;
        items[3].bytes = 0;
        volume_write(&volume, items, N);
        for (uint32_t i = 0; i < N; i++)
                ck_assert_int_eq(items[i].error, i < 4 ? -EINVAL : 0);
        ck_assert_int_eq(volume_erase(&volume, (uint64_t[]){3}, 1), -EINVAL);
        ck_assert_int_eq(volume_scan(&volume, 2, 0, 1, found), -EINVAL);
}
END_TEST

START_TEST(there_are_so_many_spaces) {
        uint64_t epoch;

        ck_assert_int_eq(open_volume(), KEEPER_NEW);
        for (uint64_t i = 0; i < FILE_NAMESPACES; i++)
                ck_assert_int_eq(head_name(&file.head, (struct kvd_key){i, 0}, &epoch), 0);
        ck_assert_int_eq(head_name(&file.head, SPACE, &epoch), -ENOSPC);
        ck_assert_int_eq(forget((struct kvd_key){7, 0}), 0);
        ck_assert_int_eq(head_name(&file.head, SPACE, &epoch), 0);
        ck_assert_uint_eq(epoch, FILE_NAMESPACES + 1);
}
END_TEST

/* The wrong file was configured. */
START_TEST(what_is_not_ours_stays) {
        uint8_t before[DISK_SECTOR];

        for (uint32_t i = 0; i < DISK_SECTOR; i++)
                disk.stable[0][i] = disk.seen[0][i] = before[i] = (uint8_t)(i + 1);
        ck_assert_int_eq(open_volume(), -EMEDIUMTYPE);
        ck_assert_mem_eq(disk.seen[0], before, DISK_SECTOR);
        ck_assert_uint_eq(disk.n_ios, 0);
}
END_TEST

/* A file with data is not new, even if there are zeros in place of superblocks. */
START_TEST(data_behind_zeros_stays) {
        const uint32_t sectors[] = {1, 2, (uint32_t)disk.n_sectors / 2,
                                    (uint32_t)disk.n_sectors - 1};
        uint8_t *sector = disk.seen[sectors[_i]];

        disk.stable[sectors[_i]][7] = sector[7] = 1;
        ck_assert_int_eq(open_volume(), -EMEDIUMTYPE);
        ck_assert_uint_eq(disk.n_ios, 0);
        ck_assert_uint_eq(sector[7], 1);
        keeper_close(&file);
        disk.stable[sectors[_i]][7] = sector[7] = 0;
        ck_assert_int_eq(open_volume(), KEEPER_NEW);
}
END_TEST

/* One copy is enough, and both are intact again afterwards. */
START_TEST(a_superblock_rots) {
        ck_assert_int_eq(open_volume(), KEEPER_NEW);
        write_all();
        for (uint32_t copy = 0; copy < FILE_COPIES; copy++) {
                keeper_close(&file);
                disk.seen[copy][300] ^= 4;
                ck_assert_int_eq(open_volume(), KEEPER_FOUND);
                ck_assert_uint_eq(scan_all(found), N);
                ck_assert_mem_eq(disk.seen[0], disk.seen[1], DISK_SECTOR);
        }
        keeper_close(&file);
        disk.seen[0][300] ^= 4;
        disk.seen[1][300] ^= 4;
        ck_assert_int_eq(open_volume(), KEEPER_LOST);
        ck_assert_uint_eq(scan_all(found), 0);
}
END_TEST

START_TEST(a_staging_that_cannot_be_had_is_said) {
        ck_assert_int_eq(volume_begin(&volume, &disk.disk, UINT64_C(1) << 60), -ENOMEM);
}
END_TEST

static void *no_memory(size_t n, size_t size) {
        return NULL;
}

/* Slot sizes of extents would be written to nowhere. */
START_TEST(extents_without_memory_are_refused) {
        struct kvd_sys failing = kvd_sys_real;
        int r;

        failing.calloc = no_memory;
        ck_assert_int_eq(keeper_judge(&file, extent_bytes), KEEPER_NEW);
        sys = &failing;
        r = keeper_tell(&file);
        sys = &kvd_sys_real;
        ck_assert_int_eq(r, -ENOMEM);
        ck_assert_uint_eq(volume.n_extents, 0);
}
END_TEST

/* ---- a disk that fails ----------------------------------------------------------------------- */

/* A read error after erasing does not prove that the record is gone. */
START_TEST(a_disk_that_does_nothing_has_erased_nothing) {
        ck_assert_int_eq(open_volume(), KEEPER_NEW);
        write_all();
        disk.fails = SIMULATED_READ | SIMULATED_WRITE;
        disk.fail_at = 1;
        disk.forever = true;
        ck_assert_int_eq(volume_erase(&volume, (uint64_t[]){place_of(2)}, 1), -EIO);
}
END_TEST

/* If the error were taken for an extent without records, its records would be lost. */
START_TEST(an_extent_that_cannot_be_read_is_said) {
        ck_assert_int_eq(open_volume(), KEEPER_NEW);
        write_all();
        keeper_close(&file);
        ck_assert_int_eq(open_volume(), KEEPER_FOUND);
        disk.fails = SIMULATED_READ;
        disk.calls = 0;
        disk.fail_at = 1;
        ck_assert_int_eq(volume_scan(&volume, 0, 0, FILE_SLOTS, found), -EIO);
        ck_assert_int_eq(volume_scan(&volume, 0, 0, FILE_SLOTS, found), 3);
}
END_TEST

/* All operations of a volume. A record whose erasure succeeded must not be there afterwards. */
static void one_life(void) {
        bool erased = false, forgotten = false;

        if (open_volume() >= 0) {
                scan_all(found);
                write_all();
                read_all();
                erased = volume_erase(&volume, (uint64_t[]){place_of(2)}, 1) == 0;
                if (erased)
                        ck_assert_uint_lt(read_all(), N);
                forgotten = forget(SPACE) == 0;
        }
        keeper_close(&file);
        disk.fail_at = 0;
        ck_assert_int_ge(open_volume(), 0);
        ck_assert(!forgotten || scan_all(found) == 0);
        keeper_close(&file);
}

START_TEST(each_call_fails) {
        static const unsigned kinds[] = {SIMULATED_READ, SIMULATED_WRITE, SIMULATED_FLUSH};
        uint32_t places = 0;

        for (uint32_t nth = 1, met = 1; met; nth++) {
                simulated_clear(&disk);
                disk.fails = kinds[_i % 3];
                disk.forever = _i >= 3;
                disk.calls = 0;
                disk.fail_at = nth;
                one_life();
                met = disk.calls >= nth;
                places += met;
        }
        printf("%s of kind %u failed at %u places\n", _i < 3 ? "one" : "all", kinds[_i % 3],
               places);
        ck_assert_uint_gt(places, 3);
}
END_TEST

/* ---- the file of version 1 ------------------------------------------------------------------- */

static void print_file(void) {
        for (uint32_t sector = 0; sector < disk.n_sectors; sector++)
                for (uint32_t at = 0; at < DISK_SECTOR; at += ROW) {
                        const uint8_t *row = disk.seen[sector] + at, none[ROW] = {0};

                        if (memcmp(row, none, ROW) == 0)
                                continue;
                        printf("%u %u ", sector, at);
                        for (uint32_t i = 0; i < ROW; i++)
                                printf("%02x", row[i]);
                        printf("\n");
                }
}

static void write_golden(void) {
        set_up();
        if (open_volume() != KEEPER_NEW)
                abort();
        write_all();
        print_file();
        tear_down();
}

static void read_golden(const char *path) {
        FILE *f = fopen(path, "re");
        char row[2 * ROW + 1];
        unsigned sector, at, byte;

        ck_assert_msg(f != NULL, "%s", path);
        while (fscanf(f, "%u %u %64s", &sector, &at, row) == 3)
                for (uint32_t i = 0; i < ROW; i++) {
                        ck_assert_int_eq(sscanf(row + 2 * i, "%2x", &byte), 1);
                        disk.stable[sector][at + i] = disk.seen[sector][at + i] = (uint8_t)byte;
                }
        fclose(f);
}

static const char *golden;

START_TEST(version_1_is_read) {
        uint64_t epoch;

        read_golden(golden);
        ck_assert_int_eq(open_volume(), KEEPER_FOUND);
        ck_assert_int_eq(head_name(&file.head, SPACE, &epoch), 0);
        ck_assert_uint_eq(epoch, 1);
        ck_assert_uint_eq(scan_all(found), N);
        volume.super->opening--;
        plan(epoch);
        volume.super->opening++;
        ck_assert_uint_eq(read_all(), N);
}
END_TEST

/* A file that older versions used together with others has a life, and keeps its records. */
START_TEST(one_file_of_several_is_read) {
        const struct file_super *s = (const void *)disk.seen[1];
        uint64_t epoch;

        ck_assert_int_eq(keeper_judge(&file, extent_bytes), KEEPER_NEW);
        file.head.super.life = 77;
        file.head.super.set = 99;
        write_all();
        ck_assert_uint_eq(s->set, 99);
        keeper_close(&file);
        ck_assert_int_eq(open_volume(), KEEPER_FOUND);
        ck_assert_uint_eq(s->life, 77);
        ck_assert_uint_ne(s->set, 99);
        ck_assert_int_eq(head_name(&file.head, SPACE, &epoch), 0);
        ck_assert_uint_eq(epoch, labels[0].epoch);
        ck_assert_uint_eq(scan_all(found), N);
        ck_assert_uint_eq(read_all(), N);
}
END_TEST

SUITE("volume", WHEN(argc > 1 && strcmp(argv[1], "--write") == 0, (write_golden(), exit(0))),
      golden = argc > 1 ? argv[1] : "version-1.txt", FIXTURE(set_up, tear_down),
      TESTS(what_is_written_is_read, many_are_found_in_pieces, erased_is_erased,
            what_has_no_epoch_is_its_writers_alone, many_are_erased_in_pieces,
            what_does_not_fit_is_refused, there_are_so_many_spaces, what_is_not_ours_stays,
            a_superblock_rots, a_staging_that_cannot_be_had_is_said,
            extents_without_memory_are_refused, a_disk_that_does_nothing_has_erased_nothing,
            an_extent_that_cannot_be_read_is_said, version_1_is_read, one_file_of_several_is_read),
      LOOPS(4, data_behind_zeros_stays), LOOPS(6, each_call_fails),
      LOOPS(5, records_have_all_tokens))
