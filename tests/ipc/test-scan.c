/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The scan: every refusal by name, messages that must pass, and agreement with msgpack-c about
 * everything that passes.
 */

#include <msgpack.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "ipc/scan.h"
#include "tests/ipc/sample.h"
#include "tests/lib/suite.h"

#define BYTES(text) text, sizeof text - 1

static const struct {
        const char *bytes;
        size_t size;
        enum kvd_scan_result result;
} cases[] = {
        {BYTES(""), KVD_SCAN_EMPTY},
        {BYTES("\x00"), KVD_SCAN_OK},
        {BYTES("\xc0"), KVD_SCAN_OK},
        {BYTES("\xff"), KVD_SCAN_OK},
        {BYTES("\x93\x01\x02\x80"), KVD_SCAN_OK},
        {BYTES("\x81\xa1"
               "a\x01"),
         KVD_SCAN_OK},
        {BYTES("\xcf\x01\x02\x03\x04\x05\x06\x07\x08"), KVD_SCAN_OK},
        {BYTES("\xc4\x03"
               "abc"),
         KVD_SCAN_OK},
        {BYTES("\xdb\x00\x00\x00\x01"
               "a"),
         KVD_SCAN_OK},

        {BYTES("\xcf\x01\x02\x03\x04\x05\x06\x07"), KVD_SCAN_TRUNCATED},
        {BYTES("\xcc"), KVD_SCAN_TRUNCATED},
        {BYTES("\xc4"), KVD_SCAN_TRUNCATED},
        {BYTES("\xc6\x00\x00\x00"), KVD_SCAN_TRUNCATED},
        {BYTES("\xdd\x00\x00\x00"), KVD_SCAN_TRUNCATED},
        {BYTES("\xdf"), KVD_SCAN_TRUNCATED},
        {BYTES("\x92\xa0"), KVD_SCAN_COUNT},
        {BYTES("\x92\xa1"
               "a"),
         KVD_SCAN_TRUNCATED},

        {BYTES("\xc6\xff\xff\xff\xff"), KVD_SCAN_LENGTH},
        {BYTES("\xdb\xff\xff\xff\xff"), KVD_SCAN_LENGTH},
        {BYTES("\xa2"
               "a"),
         KVD_SCAN_LENGTH},
        {BYTES("\xc4\x01"), KVD_SCAN_LENGTH},

        {BYTES("\xdd\x1f\x00\x00\x00"), KVD_SCAN_COUNT},
        {BYTES("\xdf\x1f\x00\x00\x00"), KVD_SCAN_COUNT},
        {BYTES("\xdd\xff\xff\xff\xff"), KVD_SCAN_COUNT},
        {BYTES("\xdf\xff\xff\xff\xff"), KVD_SCAN_COUNT},
        {BYTES("\xdf\x80\x00\x00\x00"), KVD_SCAN_COUNT}, /* twice this is 0 in 32 bits */
        {BYTES("\xdc\xff\xff"), KVD_SCAN_COUNT},
        {BYTES("\x82\xa1"
               "a\x01"),
         KVD_SCAN_COUNT},
        {BYTES("\x91"), KVD_SCAN_COUNT},

        {BYTES("\x91\x91\x91\x91\x91\x91\x91\x90"), KVD_SCAN_OK},
        {BYTES("\x91\x91\x91\x91\x91\x91\x91\x91\x90"), KVD_SCAN_DEPTH},
        {BYTES("\x91\x91\x91\x91\x91\x91\x91\x91\x01"), KVD_SCAN_OK},

        {BYTES("\x01\x01"), KVD_SCAN_TRAILING},
        {BYTES("\x90\x90"), KVD_SCAN_TRAILING},

        {BYTES("\xc1"), KVD_SCAN_TYPE},
        {BYTES("\xca\x00\x00\x00\x00"), KVD_SCAN_TYPE},
        {BYTES("\xcb\x00\x00\x00\x00\x00\x00\x00\x00"), KVD_SCAN_TYPE},
        {BYTES("\xd4\x01\x01"), KVD_SCAN_TYPE},
        {BYTES("\xc7\x01\x01\x01"), KVD_SCAN_TYPE},
        {BYTES("\xc9\xff\xff\xff\xff\x01"), KVD_SCAN_TYPE},

        {BYTES("\x81\x01\x02"), KVD_SCAN_KEY},
        {BYTES("\x81\xc4\x01"
               "a\x02"),
         KVD_SCAN_KEY},
        {BYTES("\x81\x90\x02"), KVD_SCAN_KEY},

        {BYTES("\x82\xa1"
               "a\x01\xa1"
               "a\x02"),
         KVD_SCAN_DUPLICATE},
        /* the same key with a length of another size */
        {BYTES("\x82\xa1"
               "a\x01\xd9\x01"
               "a\x02"),
         KVD_SCAN_DUPLICATE},
        {BYTES("\x82\xa0\x01\xa0\x02"), KVD_SCAN_DUPLICATE},
        /* the inner key a belongs to another map */
        {BYTES("\x82\xa1"
               "a\x81\xa1"
               "a\x01\xa1"
               "b\x01"),
         KVD_SCAN_OK},
        {BYTES("\x82\xa1"
               "a\x81\xa1"
               "b\x01\xa1"
               "a\x01"),
         KVD_SCAN_DUPLICATE},
        {BYTES("\x82\xa1"
               "a\x81\xa1"
               "b\x01\xa1"
               "b\x01"),
         KVD_SCAN_OK},
};

START_TEST(each_refusal_by_name) {
        ck_assert_str_eq(kvd_scan_text(kvd_scan(cases[_i].bytes, cases[_i].size)),
                         kvd_scan_text(cases[_i].result));
}
END_TEST

START_TEST(more_than_256_values) {
        uint8_t frame[3 + 300] = {0xdc, 0, 255};

        ck_assert_int_eq(kvd_scan(frame, 3 + 255), KVD_SCAN_OK);
        frame[1] = 1;
        frame[2] = 0;
        ck_assert_int_eq(kvd_scan(frame, 3 + 256), KVD_SCAN_OBJECTS);
}
END_TEST

START_TEST(a_map_of_127_keys) {
        uint8_t frame[3 + 127 * 4] = {0xde, 0, 127}, *p = frame + 3;

        for (uint8_t i = 0; i < 127; i++) {
                memcpy(p, "\xa2xx\x01", 4);
                p[1] = i;
                p += 4;
        }
        ck_assert_int_eq(kvd_scan(frame, sizeof frame), KVD_SCAN_OK);
        frame[3 + 126 * 4 + 1] = 7;
        ck_assert_int_eq(kvd_scan(frame, sizeof frame), KVD_SCAN_DUPLICATE);
}
END_TEST

/* ---- against msgpack-c ----------------------------------------------------------------------- */

static void pack_random(msgpack_packer *pk, unsigned depth, uint64_t *seed) {
        uint32_t n = (uint32_t)(sample_random(seed) % 4);
        char key[2] = "a";

        switch (sample_random(seed) % (depth ? 8 : 6)) {
        case 0: msgpack_pack_uint64(pk, sample_random(seed) >> sample_random(seed) % 64); break;
        case 1:
                msgpack_pack_int64(pk, -(int64_t)(sample_random(seed) >>
                                                  (1 + sample_random(seed) % 63)));
                break;
        case 2: msgpack_pack_str_with_body(pk, "hello", n); break;
        case 3: msgpack_pack_bin_with_body(pk, "\0\1\2\3", n); break;
        case 4: msgpack_pack_nil(pk); break;
        case 5: msgpack_pack_true(pk); break;
        case 6:
                msgpack_pack_array(pk, n);
                for (uint32_t i = 0; i < n; i++)
                        pack_random(pk, depth - 1, seed);
                break;
        case 7:
                msgpack_pack_map(pk, n);
                for (uint32_t i = 0; i < n; i++, key[0]++) {
                        msgpack_pack_str_with_body(pk, key, 1);
                        pack_random(pk, depth - 1, seed);
                }
                break;
        }
}

static void unpack_whole(const char *data, size_t size) {
        msgpack_unpacked result;
        size_t off = 0;

        msgpack_unpacked_init(&result);
        ck_assert_int_eq(msgpack_unpack_next(&result, data, size, &off), MSGPACK_UNPACK_SUCCESS);
        ck_assert_uint_eq(off, size);
        msgpack_unpacked_destroy(&result);
}

/*
 * All that msgpack-c wrote passes. A damaged copy that passes can be read completely by msgpack-c.
 */
START_TEST(msgpack_c_agrees) {
        uint64_t seed = (uint64_t)_i;
        msgpack_sbuffer out;
        msgpack_packer pk;

        msgpack_sbuffer_init(&out);
        msgpack_packer_init(&pk, &out, msgpack_sbuffer_write);
        for (int round = 0; round < 500; round++) {
                enum kvd_scan_result scan;

                msgpack_sbuffer_clear(&out);
                pack_random(&pk, 3, &seed);
                ck_assert_str_eq(kvd_scan_text(kvd_scan(out.data, out.size)),
                                 kvd_scan_text(KVD_SCAN_OK));
                unpack_whole(out.data, out.size);
                for (size_t n = 0; n < out.size; n++)
                        ck_assert_int_ne(kvd_scan(out.data, n), KVD_SCAN_OK);
                for (int i = 0; i < 20; i++) {
                        out.data[sample_random(&seed) % out.size] = (char)sample_random(&seed);
                        scan = kvd_scan(out.data, out.size);
                        if (scan == KVD_SCAN_OK)
                                unpack_whole(out.data, out.size);
                }
        }
        msgpack_sbuffer_destroy(&out);
}
END_TEST

SUITE("scan", LOOPS(ARRAY_SIZE(cases), each_refusal_by_name),
      TESTS(more_than_256_values, a_map_of_127_keys), LOOPS(8, msgpack_c_agrees))
