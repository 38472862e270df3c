/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Every message of msg.def: round trips, and frames that are wrong in each possible way. The
 * refusal names what is wrong.
 */

#include <errno.h>
#include <malloc.h>
#include <msgpack.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/ipc/sample.h"
#include "tests/lib/suite.h"

static struct kvd_decoder *decoder;
static uint8_t *frame;

static void setup(void) {
        ck_assert_int_eq(kvd_decoder_new(&decoder), 0);
        frame = malloc(SAMPLE_FRAME_MAX);
        ck_assert_ptr_nonnull(frame);
}

static void teardown(void) {
        decoder = kvd_decoder_free(decoder);
        free(frame);
}

static size_t encode(const struct kvd_msg *msg) {
        ssize_t n = kvd_msg_encode(msg, frame, SAMPLE_FRAME_MAX);

        ck_assert_int_gt(n, 0);
        return (size_t)n;
}

/* One process for all messages: under a sanitizer, a process costs more than the test in it. */
#define FOR_EACH_MESSAGE(number) \
        for (uint32_t number = 1; number < 256; number++) \
                if (kvd_msg_info(number))

/* ---- round trips ----------------------------------------------------------------------------- */

static void round_trip(uint32_t number, enum sample_kind kind, uint64_t *seed) {
        struct kvd_msg sent, got;
        size_t n;

        sample_fill(&sent, number, kind, seed);
        n = encode(&sent);
        ck_assert_msg(kvd_msg_decode(decoder, frame, n, &got) == 0, "%s: %s",
                      kvd_msg_info(number)->name, kvd_decoder_why(decoder));
        ck_assert_ptr_null(sample_difference(&sent, &got));
}

START_TEST(every_message_round_trips) {
        uint64_t seed = 1;

        FOR_EACH_MESSAGE(number) {
                round_trip(number, SAMPLE_EMPTY, &seed);
                round_trip(number, SAMPLE_LARGEST, &seed);
                for (int i = 0; i < 200; i++)
                        round_trip(number, SAMPLE_RANDOM, &seed);
        }
}
END_TEST

START_TEST(nothing_is_allocated) {
        uint64_t seed = 1;
        struct mallinfo2 before;
        struct kvd_msg msg;
        size_t n;

        sample_fill(&msg, KVD_MSG_space_info_reply, SAMPLE_LARGEST, &seed);
        n = encode(&msg);
        before = mallinfo2();
        for (int i = 0; i < 10000; i++) {
                ck_assert_int_eq(kvd_msg_encode(&msg, frame, SAMPLE_FRAME_MAX), n);
                ck_assert_int_eq(kvd_msg_decode(decoder, frame, n, &msg), 0);
        }
        ck_assert_uint_eq(mallinfo2().uordblks, before.uordblks);
}
END_TEST

START_TEST(every_reply_has_a_request) {
        FOR_EACH_MESSAGE(number)
                ck_assert(number == KVD_MSG_error || number == KVD_MSG_post ||
                          kvd_msg_info(number ^ KVD_REPLY));
}
END_TEST

/* ---- encoder --------------------------------------------------------------------------------- */

START_TEST(encoder_keeps_its_bounds) {
        struct kvd_msg msg = {.number = KVD_MSG_allocate,
                              .serial = 7,
                              .allocate = {.space = 3, .count = 4096}};
        size_t n = encode(&msg);

        for (size_t room = 0; room < n; room++)
                ck_assert_int_eq(kvd_msg_encode(&msg, frame, room), -EMSGSIZE);
        msg.allocate.count = 4097;
        ck_assert_int_eq(kvd_msg_encode(&msg, frame, SAMPLE_FRAME_MAX), -EINVAL);
        msg.number = 127;
        ck_assert_int_eq(kvd_msg_encode(&msg, frame, SAMPLE_FRAME_MAX), -EINVAL);
}
END_TEST

/* ---- damaged frames -------------------------------------------------------------------------- */

static void cut(uint32_t number, uint64_t *seed) {
        struct kvd_msg msg;
        size_t n;

        sample_fill(&msg, number, SAMPLE_RANDOM, seed);
        n = encode(&msg);
        for (size_t left = 0; left < n; left++) {
                struct kvd_msg got = {.number = 1, .serial = 7};

                ck_assert_int_eq(kvd_msg_decode(decoder, frame, left, &got), -EBADMSG);
                ck_assert_uint_eq(got.number, 0);
                ck_assert_uint_eq(got.serial, 0);
        }
        frame[n] = 0;
        ck_assert_int_eq(kvd_msg_decode(decoder, frame, n + 1, &msg), -EBADMSG);
        ck_assert_str_eq(kvd_decoder_why(decoder), "there are bytes behind the message");
}

START_TEST(no_beginning_of_a_frame_is_a_message) {
        uint64_t seed = 2;

        FOR_EACH_MESSAGE(number)
                cut(number, &seed);
}
END_TEST

static void damage(uint32_t number, uint64_t *seed) {
        struct kvd_msg msg;
        size_t n;

        sample_fill(&msg, number, sample_random(seed) % 4 ? SAMPLE_EMPTY : SAMPLE_RANDOM, seed);
        n = encode(&msg);
        for (uint64_t k = sample_random(seed) % 4 + 1; k > 0; k--)
                frame[sample_random(seed) % MIN(n, 64)] = (uint8_t)sample_random(seed);
        if (kvd_msg_decode(decoder, frame, n, &msg) == 0)
                ck_assert_int_gt(kvd_msg_encode(&msg, frame + SAMPLE_FRAME_MAX / 2,
                                                SAMPLE_FRAME_MAX / 2),
                                 0);
}

/* A randomly damaged frame is refused, or gives a message within all limits, which encodes again. */
START_TEST(damage_never_passes_a_limit) {
        uint64_t seed = 3;

        FOR_EACH_MESSAGE(number)
                for (int i = 0; i < 500; i++)
                        damage(number, &seed);
}
END_TEST

/* ---- wrong on purpose ------------------------------------------------------------------------ */

struct writer {
        msgpack_sbuffer out;
        msgpack_packer pk;
};

static void begin(struct writer *w, uint32_t number, size_t fields) {
        msgpack_sbuffer_init(&w->out);
        msgpack_packer_init(&w->pk, &w->out, msgpack_sbuffer_write);
        msgpack_pack_array(&w->pk, 3);
        msgpack_pack_uint32(&w->pk, number);
        msgpack_pack_uint64(&w->pk, 99);
        msgpack_pack_map(&w->pk, fields);
}

static void key(struct writer *w, const char *name) {
        msgpack_pack_str_with_body(&w->pk, name, strlen(name));
}

static void refused(struct writer *w, int error, const char *why) {
        struct kvd_msg msg;

        ck_assert_int_eq(kvd_msg_decode(decoder, w->out.data, w->out.size, &msg), error);
        ck_assert_str_eq(kvd_decoder_why(decoder), why);
        if (error != -EBADMSG)
                ck_assert_uint_eq(msg.serial, 99);
        msgpack_sbuffer_destroy(&w->out);
}

START_TEST(unknown_field) {
        struct writer w;

        begin(&w, KVD_MSG_allocate, 1);
        key(&w, "cuont");
        msgpack_pack_uint8(&w.pk, 1);
        refused(&w, -EINVAL, "unknown field 'cuont' of 'allocate'; is the peer newer?");
        begin(&w, KVD_MSG_daemon_info, 1);
        key(&w, "\x1b[31m");
        msgpack_pack_uint8(&w.pk, 1);
        refused(&w, -EINVAL, "unknown field '...' of 'daemon_info'; is the peer newer?");
}
END_TEST

START_TEST(unknown_message) {
        struct writer w;

        begin(&w, 127, 0);
        refused(&w, -ENOSYS, "message number 127 is unknown; is the peer newer?");
        begin(&w, UINT32_MAX, 0);
        refused(&w, -ENOSYS, "message number 4294967295 is unknown; is the peer newer?");
}
END_TEST

START_TEST(over_the_limit) {
        struct writer w;

        begin(&w, KVD_MSG_allocate, 1);
        key(&w, "count");
        msgpack_pack_uint32(&w.pk, 5000);
        refused(&w, -EINVAL, "field 'count' of 'allocate' is 5000, at most 4096");
        begin(&w, KVD_MSG_allocate, 1);
        key(&w, "space");
        msgpack_pack_uint64(&w.pk, UINT64_C(1) << 32);
        refused(&w, -EINVAL, "field 'space' of 'allocate' is 4294967296, at most 4294967295");
        begin(&w, KVD_MSG_lease, 1);
        key(&w, "prefix_key");
        msgpack_pack_bin_with_body(&w.pk, "01234567890123456", 17);
        refused(&w, -EINVAL, "field 'prefix_key' of 'lease' has 17 bytes, at most 16");
}
END_TEST

/* The wrong values for a field: every type of msgpack except the right one. */
static void pack_wrong(struct writer *w, int which, const struct kvd_field *f) {
        bool number = f->type == KVD_FIELD_u32 || f->type == KVD_FIELD_u64;

        if (which == 0)
                msgpack_pack_nil(&w->pk);
        else if (which == 1)
                msgpack_pack_int8(&w->pk, -1);
        else if (which == 2)
                msgpack_pack_array(&w->pk, 0);
        else if (which == 3)
                msgpack_pack_map(&w->pk, 0);
        else if (which == 4 && !number)
                msgpack_pack_uint8(&w->pk, 1);
        else if (f->type == KVD_FIELD_bin)
                msgpack_pack_str_with_body(&w->pk, "a", 1);
        else
                msgpack_pack_bin_with_body(&w->pk, "a", 1);
}

static void mistype(uint32_t number, const struct kvd_field *f) {
        char why[128];

        snprintf(why, sizeof why, "field '%s' of '%s' must be a %s", f->name,
                 kvd_msg_info(number)->name, kvd_field_type_name(f->type));
        for (int which = 0; which < 6; which++) {
                struct writer w;

                begin(&w, number, 1);
                key(&w, f->name);
                pack_wrong(&w, which, f);
                refused(&w, -EINVAL, why);
        }
}

START_TEST(wrong_type_of_every_field) {
        FOR_EACH_MESSAGE(number)
                for (const struct kvd_field *f = kvd_msg_info(number)->fields; f->name; f++)
                        mistype(number, f);
}
END_TEST

START_TEST(envelopes) {
        static const struct {
                const char *bytes;
                size_t size;
        } bad[] = {
                {"\x80", 1},         /* a map */
                {"\x01", 1},         /* a number */
                {"\x90", 1},         /* an empty array */
                {"\x92\x01\x02", 3}, /* no fields */
                {"\x94\x01\x02\x80\xc0", 5},
                {"\x93\xff\x02\x80", 4}, /* number is negative */
                {"\x93\x01\xff\x80", 4},
                {"\x93\x01\x02\x90", 4},                  /* fields are an array */
                {"\x93\xcf\0\0\0\1\0\0\0\1\x02\x80", 12}, /* 2^32 + 1 is not message 1 */
        };
        struct kvd_msg msg;

        for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
                ck_assert_int_eq(kvd_msg_decode(decoder, bad[i].bytes, bad[i].size, &msg),
                                 -EBADMSG);
                ck_assert_str_eq(kvd_decoder_why(decoder), "a message must be an array of number, "
                                                           "serial and a map of fields");
        }
}
END_TEST

START_TEST(strings) {
        static const char *const good[] = {"llama-3.1_8B", "caf\xc3\xa9", "\xe2\x82\xac",
                                           "\xf0\x9f\x98\x80", "a b"};
        static const struct kvd_slice bad[] = {
                {"a\0b", 3},         {"a\nb", 3},
                {"\x1b[2J", 4},      {"\x7f", 1},
                {"\x80", 1},         {"\xc2\x9b", 2}, /* C1: a terminal takes it for an escape */
                {"\xc0\xaf", 2},     {"\xe0\x80\xaf", 3}, /* overlong */
                {"\xed\xa0\x80", 3}, {"\xf4\x90\x80\x80", 4},
                {"\xc3", 1},         {"\xff", 1},
                {"\xc3(", 2},
        };
        struct kvd_msg msg = {.number = KVD_MSG_attach}, got;

        for (size_t i = 0; i < ARRAY_SIZE(good); i++) {
                msg.attach.name = kvd_slice_of(good[i]);
                ck_assert_int_eq(kvd_msg_decode(decoder, frame, encode(&msg), &got), 0);
        }
        for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
                msg.attach.name = bad[i];
                ck_assert_int_eq(kvd_msg_decode(decoder, frame, encode(&msg), &got), -EINVAL);
                ck_assert_str_eq(kvd_decoder_why(decoder),
                                 "field 'name' of 'attach' has bytes that are not printable UTF-8");
        }
}
END_TEST

START_TEST(slices) {
        char small[4];

        ck_assert_str_eq(kvd_slice_copy(kvd_slice_of("llama"), small, sizeof small), "lla");
        ck_assert_str_eq(kvd_slice_copy((struct kvd_slice){0}, small, sizeof small), "");
        ck_assert(kvd_slice_is(kvd_slice_of("llama"), "llama"));
        ck_assert(!kvd_slice_is(kvd_slice_of("llama"), "llam"));
        ck_assert(kvd_slice_is((struct kvd_slice){0}, ""));
}
END_TEST

SUITE("msg", FIXTURE(setup, teardown),
      TESTS(every_message_round_trips, nothing_is_allocated, every_reply_has_a_request,
            encoder_keeps_its_bounds, no_beginning_of_a_frame_is_a_message,
            damage_never_passes_a_limit, unknown_field, unknown_message, over_the_limit,
            wrong_type_of_every_field, envelopes, strings, slices))
