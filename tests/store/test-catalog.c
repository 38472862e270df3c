/* SPDX-License-Identifier: Apache-2.0 */

/* The daemon's catalog of a volume, without a volume: where records go, and what they evict. */

#include <string.h>

#include "ipc/base/util.h"
#include "store/file/catalog.h"
#include "tests/lib/addresses.h"
#include "tests/lib/sanitized.h"
#include "tests/lib/suite.h"

#define SLOT (64u << 10)
#define EXTENTS 2u
#define SLOTS 8u /* per extent */

static struct catalog catalog;
static int namespace;

static void open_files(uint32_t n) {
        struct catalog_size sizes[DISK_FILES];

        for (uint32_t i = 0; i < n; i++)
                sizes[i] = (struct catalog_size){.extent_bytes = DISK_SECTOR + SLOTS * SLOT,
                                                 .n_extents = EXTENTS};
        ck_assert_int_eq(catalog_open(&catalog, sizes, n), 0);
        namespace = catalog_space(&catalog, (struct kvd_key){1, 2}, true);
        ck_assert_int_ge(namespace, 0);
}

/* Adds a record. Returns the file that it went to. */
static struct catalog_file *add(uint32_t number) {
        struct kvd_record_key key = {.tag = number + 1, .hint = number};
        struct kvd_label label = {.sequence = number + 1};
        uint32_t place = catalog_take(&catalog, SLOT, namespace, UINT64_MAX, UINT64_MAX);

        ck_assert_uint_ne(place, CATALOG_NOWHERE);
        catalog_enter(&catalog, place, key, &label, CATALOG_NOWHERE, namespace);
        catalog_written(&catalog, place);
        ck_assert_uint_eq(catalog_find(&catalog, key.tag), place);
        return catalog_file(&catalog, place);
}

/* Records go to the files in turn until all are full. Then the coldest are evicted, in any file. */
START_TEST(as_many_files_as_there_may_be) {
        uint32_t room = DISK_FILES * EXTENTS * SLOTS;

        open_files(DISK_FILES);
        ck_assert_uint_eq(catalog.n_extents, DISK_FILES * EXTENTS);
        for (uint32_t i = 0; i < room; i++)
                ck_assert_ptr_eq(add(i), &catalog.files[i % DISK_FILES]);
        for (uint32_t i = room; i < 2 * room; i++)
                add(i);
        for (uint32_t i = 0; i < DISK_FILES; i++) {
                ck_assert_uint_eq(catalog.files[i].records, EXTENTS * SLOTS);
                ck_assert_uint_eq(catalog.files[i].evicted, EXTENTS * SLOTS);
        }
        catalog_close(&catalog);
}
END_TEST

/* Not checked with a sanitizer, which maps memory of its own all the time. */
START_TEST(what_is_closed_is_not_mapped) {
        long before = 0;

        for (uint32_t i = 0; i < 104; i++) {
                if (i == 4) /* libc has mapped what it keeps */
                        before = address_space_pages();
                open_files(DISK_FILES);
                add(i);
                catalog_close(&catalog);
        }
        if (!SANITIZED)
                ck_assert_int_le(address_space_pages(), before);
}
END_TEST

SUITE("catalog", TESTS(as_many_files_as_there_may_be, what_is_closed_is_not_mapped))
