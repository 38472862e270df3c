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

static void open_it(void) {
        ck_assert_int_eq(catalog_open(&catalog, DISK_SECTOR + SLOTS * SLOT, EXTENTS), 0);
        namespace = catalog_space(&catalog, (struct kvd_key){1, 2}, true);
        ck_assert_int_ge(namespace, 0);
}

static void add(uint32_t number) {
        struct kvd_record_key key = {.tag = number + 1, .hint = number};
        struct kvd_label label = {.sequence = number + 1};
        uint32_t place = catalog_take(&catalog, SLOT, namespace, UINT64_MAX, UINT64_MAX);

        ck_assert_uint_ne(place, CATALOG_NOWHERE);
        catalog_enter(&catalog, place, key, &label, CATALOG_NOWHERE, namespace);
        catalog_written(&catalog, place);
        ck_assert_uint_eq(catalog_find(&catalog, key.tag), place);
}

/* If it is full, the coldest record is evicted. */
START_TEST(the_coldest_goes) {
        uint32_t room = EXTENTS * SLOTS;

        open_it();
        for (uint32_t i = 0; i < 2 * room; i++) {
                add(i);
                ck_assert_uint_eq(catalog.records, MIN(i + 1, room));
                if (i >= room)
                        ck_assert_uint_eq(catalog_find(&catalog, i - room + 1), CATALOG_NOWHERE);
        }
        ck_assert_uint_eq(catalog.evicted, room);
        catalog_close(&catalog);
}
END_TEST

/* Not checked with a sanitizer, which maps memory of its own all the time. */
START_TEST(what_is_closed_is_not_mapped) {
        long before = 0;

        for (uint32_t i = 0; i < 104; i++) {
                if (i == 4) /* libc has mapped what it keeps */
                        before = address_space_pages();
                open_it();
                add(i);
                catalog_close(&catalog);
        }
        if (!SANITIZED)
                ck_assert_int_le(address_space_pages(), before);
}
END_TEST

SUITE("catalog", TESTS(the_coldest_goes, what_is_closed_is_not_mapped))
