/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The superblock of a file: which of its copies counts, which files are not touched, and that one
 * copy is intact at any time. Judging writes nothing.
 */

#include <errno.h>
#include <string.h>

#include "tests/lib/suite.h"
#include "tests/store/disk/keeper.h"

#define EXTENTS 2u
#define EXTENT_BYTES (DISK_SECTOR + 4u * 2 * DISK_SECTOR)
#define UNIT 512u /* bytes that a disk writes atomically */

static struct dice dice = {1};
static struct simulated disk;
static struct keeper file = {.disk = &disk, .staging_bytes = 8u * DISK_SECTOR};

/* A copy of the superblock as it is on the simulated disk. */
static uint8_t *copy_of(uint32_t copy) {
        return disk.seen[copy];
}

static struct file_super *super_of(uint32_t copy) {
        return (void *)copy_of(copy);
}

/* Makes the checksum of a copy right again after a change. */
static void seal(uint32_t copy) {
        struct file_super *s = super_of(copy);

        file_sector_seal(s->secret, FILE_SUPER, &s->mark);
}

static int judge(void) {
        int r;

        keeper_close(&file);
        disk.n_ios = 0;
        r = keeper_judge(&file, EXTENT_BYTES);
        ck_assert_uint_eq(disk.n_ios, 0);
        return r;
}

static void set_up(void) {
        simulated_open(&disk, EXTENTS, EXTENT_BYTES, &dice);
        ck_assert_int_eq(keeper_open(&file, EXTENT_BYTES), KEEPER_NEW);
}

static void tear_down(void) {
        keeper_close(&file);
        simulated_close(&disk);
}

/* ---- which counts ---------------------------------------------------------------------------- */

START_TEST(both_copies_are_written) {
        struct file_super before;

        memcpy(&before, copy_of(0), DISK_SECTOR);
        ck_assert_mem_eq(&before, copy_of(1), DISK_SECTOR);
        ck_assert_int_eq(judge(), KEEPER_FOUND);
        ck_assert_mem_eq(file.head.super.secret, before.secret, KVD_SECRET_BYTES);
        ck_assert_uint_eq(file.head.super.opening, before.opening + 1);
        ck_assert_uint_eq(file.head.super.serial, before.serial + 1);
        ck_assert_uint_ne(file.head.super.set, before.set);
}
END_TEST

START_TEST(the_newer_copy_counts) {
        uint64_t serial = super_of(0)->serial;

        super_of((uint32_t)_i)->serial = serial + 10;
        super_of((uint32_t)_i)->next_epoch = 50;
        seal((uint32_t)_i);
        ck_assert_int_eq(judge(), KEEPER_FOUND);
        ck_assert_uint_eq(file.head.super.serial, serial + 11);
        ck_assert_uint_eq(file.head.super.next_epoch, 50);
}
END_TEST

/* If any byte of one copy is broken, the other copy counts; if of both, the file starts empty. */
START_TEST(a_checksum_is_of_every_byte) {
        uint32_t at = sizeof(struct file_mark) + (uint32_t)_i * 127;
        uint8_t secret[KVD_SECRET_BYTES];

        memcpy(secret, super_of(0)->secret, sizeof secret);
        copy_of(0)[at] ^= 1;
        ck_assert_int_eq(judge(), KEEPER_FOUND);
        copy_of(1)[at] ^= 1;
        ck_assert_int_eq(judge(), KEEPER_LOST);
        ck_assert_mem_ne(file.head.super.secret, secret, sizeof secret);
        ck_assert_uint_eq(file.head.super.n_namespaces, 0);
}
END_TEST

/*
 * The power failed while a copy was written: some units of it are new, others are old. The other
 * copy counts, whether it is the old or the new one.
 */
START_TEST(a_torn_copy_does_not_count) {
        uint8_t before[DISK_SECTOR], after[DISK_SECTOR];
        uint64_t serial = super_of(0)->serial;

        memcpy(before, copy_of(0), DISK_SECTOR);
        file.head.super.rest[0] = 1; /* in its last unit */
        file.head.super.serial++;
        ck_assert_int_eq(keeper_tell(&file), 0);
        memcpy(after, copy_of(0), DISK_SECTOR);
        for (uint32_t copy = 0; copy < FILE_COPIES; copy++) {
                memcpy(copy_of(0), copy == 0 ? before : after, DISK_SECTOR);
                memcpy(copy_of(1), before, DISK_SECTOR);
                for (uint32_t unit = 0; unit < DISK_SECTOR / UNIT; unit++)
                        memcpy(copy_of(copy) + unit * UNIT,
                               (_i >> unit & 1 ? after : before) + unit * UNIT, UNIT);
                ck_assert_int_eq(judge(), KEEPER_FOUND);
                ck_assert_uint_eq(file.head.super.serial, serial + copy + 1); /* this opening's */
        }
}
END_TEST

START_TEST(what_makes_no_sense_is_no_superblock) {
        for (uint32_t copy = 0; copy < FILE_COPIES; copy++) {
                struct file_super *s = super_of(copy);

                if (_i == 0)
                        s->n_namespaces = FILE_NAMESPACES + 1;
                else
                        s->extent_bytes = _i == 1 ? DISK_SECTOR :
                                          _i == 2 ? s->bytes + DISK_SECTOR :
                                                    2 * DISK_SECTOR + 1;
                seal(copy);
        }
        ck_assert_int_eq(judge(), KEEPER_LOST);
}
END_TEST

/* ---- what is not touched --------------------------------------------------------------------- */

/* A file of another version is not touched. A single copy of another version is a broken one. */
START_TEST(another_version_is_left_alone) {
        for (uint32_t copy = 0; copy < FILE_COPIES; copy++) {
                super_of(copy)->mark.version += 1 + (uint32_t)_i;
                ck_assert_int_eq(judge(), copy ? -EMEDIUMTYPE : KEEPER_FOUND);
        }
        ck_assert_int_eq(keeper_tell(&file), -EMEDIUMTYPE);
        ck_assert_uint_eq(disk.n_ios, 0);
}
END_TEST

/* This also holds if one of its copies is torn: it may be another kvd's. */
START_TEST(one_of_another_size_is_left_alone) {
        disk.disk.bytes += _i ? -DISK_SECTOR : DISK_SECTOR;
        ck_assert_int_eq(judge(), -ERANGE);
        copy_of(0)[300] ^= 1;
        ck_assert_int_eq(judge(), -ERANGE);
        ck_assert_ptr_nonnull(strstr(file.head.why.line, "another file_size"));
}
END_TEST

/* It has no room for an extent. One with a superblock has, since that tells the extents' size. */
START_TEST(one_that_is_too_small_is_left_alone) {
        simulated_clear(&disk);
        disk.disk.bytes = FILE_HEAD + EXTENT_BYTES - DISK_SECTOR;
        ck_assert_int_eq(judge(), -EINVAL);
        disk.disk.bytes += DISK_SECTOR;
        ck_assert_int_eq(judge(), KEEPER_NEW);
}
END_TEST

/* ---- a new process --------------------------------------------------------------------------- */

START_TEST(a_new_process_opens_it_again) {
        file.head.super.serial++;
        copy_of(0)[300] ^= 1;
        ck_assert_int_eq(keeper_reopen(&file), 0);
        ck_assert_uint_eq(super_of(0)->serial, file.head.super.serial);
        ck_assert_mem_eq(copy_of(0), copy_of(1), DISK_SECTOR);
}
END_TEST

/* Others may have emptied it, made another one, or broken it. */
START_TEST(a_new_process_does_not_open_another_file) {
        uint8_t before[DISK_SECTOR];

        for (uint32_t copy = 0; copy < FILE_COPIES; copy++) {
                if (_i == 0)
                        super_of(copy)->secret[7] ^= 1;
                else if (_i == 1)
                        super_of(copy)->life ^= 1;
                else
                        memset(copy_of(copy), _i == 2 ? 0 : 1, DISK_SECTOR);
                if (_i < 2)
                        seal(copy);
        }
        memcpy(before, copy_of(0), DISK_SECTOR);
        ck_assert_int_eq(keeper_reopen(&file), -ESTALE);
        ck_assert_mem_eq(copy_of(0), before, DISK_SECTOR);
        ck_assert_int_eq(keeper_reopen(&file), -ESTALE);
}
END_TEST

/* The first process wrote no superblock that the next one could compare. */
START_TEST(a_new_process_opens_a_new_file) {
        simulated_clear(&disk);
        ck_assert_int_eq(judge(), KEEPER_NEW);
        ck_assert_int_eq(keeper_reopen(&file), 0);
        ck_assert_int_eq(judge(), KEEPER_FOUND);
}
END_TEST

/* ---- writing --------------------------------------------------------------------------------- */

/* One copy is intact at any time. */
START_TEST(a_file_that_does_not_take_it_is_off) {
        uint64_t serial = file.head.super.serial++;

        disk.fails = SIMULATED_READ | SIMULATED_WRITE | SIMULATED_FLUSH;
        disk.fail_at = 1 + (uint32_t)_i;
        disk.forever = true;
        ck_assert_int_eq(keeper_tell(&file), -EIO);
        ck_assert(file.volume.broken);
        disk.fail_at = 0;
        ck_assert_int_eq(keeper_tell(&file), -EIO);
        ck_assert_int_eq(judge(), KEEPER_FOUND);
        ck_assert_uint_ge(file.head.super.serial, serial + 1); /* this opening's */
        ck_assert_uint_le(file.head.super.serial, serial + 2);
}
END_TEST

START_TEST(behind_a_copy_that_failed_the_other_stays) {
        uint64_t serial = file.head.super.serial++;

        disk.fails = SIMULATED_WRITE;
        disk.fail_at = 1;
        ck_assert_int_eq(keeper_tell(&file), -EIO);
        ck_assert_uint_eq(super_of(1)->serial, serial);
}
END_TEST

SUITE("super", FIXTURE(set_up, tear_down),
      TESTS(both_copies_are_written, one_that_is_too_small_is_left_alone,
            a_new_process_opens_it_again, a_new_process_opens_a_new_file,
            behind_a_copy_that_failed_the_other_stays),
      LOOPS(2, the_newer_copy_counts, another_version_is_left_alone,
            one_of_another_size_is_left_alone),
      LOOPS(128, a_torn_copy_does_not_count), LOOPS(31, a_checksum_is_of_every_byte),
      LOOPS(4, what_makes_no_sense_is_no_superblock, a_new_process_does_not_open_another_file),
      LOOPS(6, a_file_that_does_not_take_it_is_off))
