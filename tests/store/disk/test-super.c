/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Superblocks of three files: which files belong together, which superblock counts, whose records
 * do not count any more, and which files are not touched. Judging writes nothing.
 */

#include <errno.h>
#include <string.h>

#include "tests/lib/suite.h"
#include "tests/store/disk/volumes.h"

#define FILES VOLUMES
#define EXTENTS 2u
#define EXTENT_BYTES (DISK_SECTOR + 4u * 2 * DISK_SECTOR)
#define STAGING (8u * DISK_SECTOR)
#define UNIT 512u /* bytes that a disk writes atomically */

static struct dice dice = {1};
static struct simulated disks[FILES];
static struct volumes all;

/* A copy of the superblock as it is on the simulated disk. */
static uint8_t *copy_of(uint32_t file, uint32_t copy) {
        return disks[file].seen[copy];
}

static struct file_super *super_of(uint32_t file, uint32_t copy) {
        return (void *)copy_of(file, copy);
}

/* Makes the checksum of a copy right again after a change. */
static void seal(uint32_t file, uint32_t copy) {
        struct file_super *s = super_of(file, copy);

        file_sector_seal(s->secret, FILE_SUPER, &s->mark);
}

static int judge(void) {
        volumes_close(&all);
        for (uint32_t i = 0; i < FILES; i++)
                disks[i].n_ios = 0;
        return volumes_judge(&all, EXTENT_BYTES, STAGING);
}

static int judge_and_open(void) {
        volumes_close(&all);
        return volumes_open(&all, EXTENT_BYTES, STAGING);
}

static uint32_t writes(void) {
        uint32_t n = 0;

        for (uint32_t i = 0; i < FILES; i++)
                n += disks[i].n_ios;
        return n;
}

static enum set_state state_of(uint32_t file) {
        ck_assert_int_eq(all.set.files[file].error, 0);
        return all.set.files[file].state;
}

static void expect_all(enum set_state state) {
        for (uint32_t i = 0; i < FILES; i++)
                ck_assert_int_eq(state_of(i), state);
}

static void set_up(void) {
        all = (struct volumes){.n = FILES};
        for (uint32_t i = 0; i < FILES; i++) {
                simulated_open(&disks[i], EXTENTS, EXTENT_BYTES, &dice);
                all.disks[i] = &disks[i];
        }
        ck_assert_int_eq(judge_and_open(), SET_NEW);
}

static void tear_down(void) {
        volumes_close(&all);
        for (uint32_t i = 0; i < FILES; i++)
                simulated_close(&disks[i]);
}

/* ---- one file -------------------------------------------------------------------------------- */

START_TEST(all_files_have_both_copies) {
        for (uint32_t file = 0; file < FILES; file++)
                ck_assert_mem_eq(copy_of(file, 0), copy_of(file, 1), DISK_SECTOR);
        ck_assert_int_eq(judge(), 0);
        ck_assert_uint_eq(writes(), 0);
        expect_all(SET_FOUND);
        for (uint32_t file = 0; file < FILES; file++)
                for (uint32_t other = 0; other < file; other++)
                        ck_assert_uint_ne(all.set.files[file].life, all.set.files[other].life);
}
END_TEST

/* A file of another version is not touched. A single copy of another version is a broken one. */
START_TEST(another_version_is_left_alone) {
        for (uint32_t copy = 0; copy < FILE_COPIES; copy++) {
                super_of(1, copy)->mark.version += 1 + (uint32_t)_i;
                ck_assert_int_eq(judge(), 0);
                ck_assert_int_eq(all.set.files[1].error, copy ? -EMEDIUMTYPE : 0);
        }
        ck_assert_int_eq(state_of(0), SET_FOUND);
        ck_assert_int_eq(state_of(2), SET_FOUND);
        ck_assert_int_eq(volumes_tell_all(&all), 0);
        ck_assert_uint_eq(super_of(1, 0)->mark.version, FILE_VERSION + 1 + (uint32_t)_i);
}
END_TEST

/* If any byte of one copy is broken, the other copy counts; if of both, the file starts empty. */
START_TEST(a_checksum_is_of_every_byte) {
        uint32_t at = sizeof(struct file_mark) + (uint32_t)_i * 127;

        copy_of(2, 0)[at] ^= 1;
        ck_assert_int_eq(judge(), 0);
        expect_all(SET_FOUND);
        copy_of(2, 1)[at] ^= 1;
        ck_assert_int_eq(judge(), 0);
        ck_assert_int_eq(state_of(0), SET_FOUND);
        ck_assert_int_eq(state_of(2), SET_LOST);
        ck_assert_uint_ne(all.set.files[2].life, super_of(2, 0)->life);
}
END_TEST

/*
 * The power failed while a copy was written: some units of it are new, others are old. The other
 * copy counts, whether it is the old or the new one.
 */
START_TEST(a_torn_copy_does_not_count) {
        uint8_t before[DISK_SECTOR], after[DISK_SECTOR];
        uint64_t serial = super_of(0, 0)->serial;

        memcpy(before, copy_of(0, 0), DISK_SECTOR);
        all.set.super.rest[0] = 1; /* in its last unit */
        all.set.super.serial++;
        ck_assert_int_eq(volumes_tell_all(&all), 0);
        memcpy(after, copy_of(0, 0), DISK_SECTOR);
        for (uint32_t copy = 0; copy < FILE_COPIES; copy++) {
                memcpy(copy_of(0, 0), copy == 0 ? before : after, DISK_SECTOR);
                memcpy(copy_of(0, 1), before, DISK_SECTOR);
                for (uint32_t unit = 0; unit < DISK_SECTOR / UNIT; unit++)
                        memcpy(copy_of(0, copy) + unit * UNIT,
                               (_i >> unit & 1 ? after : before) + unit * UNIT, UNIT);
                for (uint32_t file = 1; file < FILES; file++)
                        memset(copy_of(file, 0), 0, 2 * DISK_SECTOR);
                ck_assert_int_eq(judge(), 0);
                ck_assert_int_eq(state_of(0), SET_FOUND);
                ck_assert_uint_eq(all.set.super.serial, serial + copy + 1); /* this opening's */
        }
}
END_TEST

/* This also holds for the only file, and if one of its copies is torn: it may be another kvd's. */
START_TEST(one_of_another_size_is_left_alone) {
        disks[0].disk.bytes += _i ? -DISK_SECTOR : DISK_SECTOR;
        ck_assert_int_eq(judge(), 0);
        ck_assert_int_eq(all.set.files[0].error, -ERANGE);
        ck_assert_int_eq(state_of(1), SET_FOUND);
        copy_of(0, 0)[300] ^= 1;
        all.n = 1;
        ck_assert_int_eq(judge_and_open(), -ERANGE);
        ck_assert_ptr_nonnull(strstr(all.set.why.line, "another file_size"));
        ck_assert_uint_eq(writes(), 0);
        all.n = FILES;
}
END_TEST

START_TEST(what_makes_no_sense_is_no_superblock) {
        for (uint32_t copy = 0; copy < FILE_COPIES; copy++) {
                struct file_super *s = super_of(1, copy);

                if (_i == 0)
                        s->n_namespaces = FILE_NAMESPACES + 1;
                else
                        s->extent_bytes = _i == 1 ? DISK_SECTOR :
                                          _i == 2 ? s->bytes + DISK_SECTOR :
                                                    2 * DISK_SECTOR + 1;
                seal(1, copy);
        }
        ck_assert_int_eq(judge(), 0);
        ck_assert_int_eq(state_of(1), SET_LOST);
}
END_TEST

/* ---- several --------------------------------------------------------------------------------- */

/* A file keeps its life wherever it is in the list, and its extents move with it. */
START_TEST(a_files_place_in_the_list_is_nothing) {
        uint64_t lives[FILES];

        for (uint32_t i = 0; i < FILES; i++)
                lives[i] = super_of(i, 0)->life;
        volumes_close(&all);
        for (uint32_t i = 0; i < FILES; i++)
                all.disks[i] = &disks[(i + 1 + (uint32_t)_i) % FILES];
        ck_assert_int_eq(judge_and_open(), SET_FOUND);
        expect_all(SET_FOUND);
        for (uint32_t i = 0; i < FILES; i++) {
                ck_assert_uint_eq(all.set.files[i].life, lives[all.disks[i] - disks]);
                ck_assert_uint_eq(all.volumes[i].n_extents, EXTENTS);
        }
}
END_TEST

/* If one file was opened alone, its superblock counts, and the others begin new lives. */
START_TEST(the_newest_of_a_set_counts) {
        uint32_t alone = (uint32_t)_i;
        uint64_t epoch, life = super_of((alone + 1) % FILES, 0)->life;

        for (uint32_t i = 0; i < FILES; i++)
                all.missing[i] = i == alone ? 0 : -ENODEV;
        ck_assert_int_eq(judge_and_open(), SET_FOUND);
        ck_assert_int_eq(set_name(&all.set, (struct kvd_key){1, 2}, &epoch), 0);
        ck_assert_int_eq(volumes_tell_all(&all), 0);
        memset(all.missing, 0, sizeof all.missing);
        ck_assert_int_eq(judge_and_open(), SET_FOUND);
        ck_assert_uint_eq(all.set.super.n_namespaces, 1);
        for (uint32_t i = 0; i < FILES; i++)
                ck_assert_int_eq(state_of(i), i == alone ? SET_FOUND : SET_LEFT);
        ck_assert_uint_ne(all.set.files[(alone + 1) % FILES].life, life);
        for (uint32_t i = 0; i < FILES; i++)
                ck_assert_uint_eq(super_of(i, 0)->n_namespaces, 1);
}
END_TEST

/* Both have the same life, so only their order tells which one is the copy. */
START_TEST(of_a_file_and_its_copy_the_second_begins_anew) {
        for (uint32_t copy = 0; copy < FILE_COPIES; copy++)
                memcpy(copy_of(2, copy), copy_of(1, copy), DISK_SECTOR);
        ck_assert_int_eq(judge(), 0);
        ck_assert_int_eq(state_of(1), SET_FOUND);
        ck_assert_int_eq(state_of(2), SET_LEFT);
        ck_assert_uint_ne(all.set.files[2].life, all.set.files[1].life);
}
END_TEST

/* The first file used to count, whichever volume it was of, and that broke its own set. */
START_TEST(files_of_two_volumes_are_all_left_alone) {
        uint32_t stranger = (uint32_t)_i;

        for (uint32_t copy = 0; copy < FILE_COPIES; copy++) {
                super_of(stranger, copy)->secret[7] ^= 1;
                seal(stranger, copy);
        }
        ck_assert_int_eq(judge(), -EXDEV);
        ck_assert_ptr_nonnull(
                strstr(all.set.why.line, stranger == 2 ? "files 1 and 3 of" : "files 1 and 2 of"));
        ck_assert_uint_eq(writes(), 0);
        all.missing[stranger] = -ENODEV;
        ck_assert_int_eq(judge_and_open(), SET_FOUND);
}
END_TEST

START_TEST(a_new_file_joins) {
        for (uint32_t copy = 0; copy < FILE_COPIES; copy++)
                memset(copy_of(0, copy), 0, DISK_SECTOR);
        ck_assert_int_eq(judge_and_open(), SET_FOUND);
        ck_assert_int_eq(state_of(0), SET_NEW);
        ck_assert_mem_eq(super_of(0, 0)->secret, super_of(1, 0)->secret, KVD_SECRET_BYTES);
        ck_assert_uint_eq(super_of(0, 0)->set, super_of(1, 0)->set);
        ck_assert_int_eq(judge(), 0);
        expect_all(SET_FOUND);
}
END_TEST

/* ---- writing --------------------------------------------------------------------------------- */

/* The file is off, and the others get the superblock. One of the file's own copies is intact. */
START_TEST(a_file_that_does_not_take_it_is_off) {
        uint64_t serial = all.set.super.serial;

        all.set.super.serial++;
        disks[1].dies_at = 2 + (uint32_t)_i;
        ck_assert_int_eq(volumes_tell_all(&all), 0);
        ck_assert_int_eq(all.set.files[1].error, -EIO);
        disks[1].dies_at = 0;
        ck_assert_uint_eq(super_of(0, 1)->serial, serial + 1);
        ck_assert_uint_eq(super_of(2, 1)->serial, serial + 1);
        ck_assert_int_eq(judge(), 0);
        expect_all(SET_FOUND);
        ck_assert_uint_eq(all.set.super.serial, serial + 2); /* this opening's */
}
END_TEST

/* One copy is intact at any time. */
START_TEST(behind_a_copy_that_failed_the_other_stays) {
        uint64_t serial = all.set.super.serial;

        all.set.super.serial++;
        disks[1].fails = SIMULATED_WRITE;
        disks[1].fail_at = 1;
        ck_assert_int_eq(volumes_tell_all(&all), 0);
        ck_assert_int_eq(all.set.files[1].error, -EIO);
        ck_assert_uint_eq(super_of(1, 1)->serial, serial);
        ck_assert_uint_eq(super_of(2, 1)->serial, serial + 1);
}
END_TEST

START_TEST(without_any_file_nothing_is_there_to_stay) {
        for (uint32_t i = 0; i < FILES; i++) {
                disks[i].fails = SIMULATED_FLUSH;
                disks[i].fail_at = 1;
        }
        ck_assert_int_eq(volumes_tell_all(&all), -EIO);
        for (uint32_t i = 0; i < FILES; i++)
                ck_assert(all.volumes[i].broken);
}
END_TEST

SUITE("super", FIXTURE(set_up, tear_down),
      TESTS(all_files_have_both_copies, of_a_file_and_its_copy_the_second_begins_anew,
            a_new_file_joins, behind_a_copy_that_failed_the_other_stays,
            without_any_file_nothing_is_there_to_stay),
      LOOPS(2, another_version_is_left_alone, one_of_another_size_is_left_alone,
            a_files_place_in_the_list_is_nothing),
      LOOPS(128, a_torn_copy_does_not_count), LOOPS(31, a_checksum_is_of_every_byte),
      LOOPS(4, what_makes_no_sense_is_no_superblock),
      LOOPS(3, the_newest_of_a_set_counts, files_of_two_volumes_are_all_left_alone),
      LOOPS(6, a_file_that_does_not_take_it_is_off))
