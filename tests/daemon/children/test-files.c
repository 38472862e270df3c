/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A file tier of two files, each with a share of the blocks. A file that is missing, moved, another
 * kvd's or named twice costs its own blocks and nothing else. Deletions while a file is missing are
 * made up for when it is back.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/daemon/children/file_tier.h"
#include "tests/lib/suite.h"

static char second[140];

static bool is_state(uint32_t number, const char *state) {
        struct kvd_msg_tier_info_reply t = tier_of(number);

        return t.state.size == strlen(state) && memcmp(t.state.data, state, t.state.size) == 0;
}

/* Whether its state is final. */
static bool is_settled(uint32_t number) {
        return !is_state(number, "opening") && !is_state(number, "scanning");
}

/* Starts with the files "a", "b" or both, in that order. first: expected state of the first one. */
static void start_with(const char *which, const char *first) {
        size_t n = 0;

        for (const char *c = which; *c; c++)
                n += (size_t)snprintf(files + n, sizeof files - n, "%s%s", n ? ", " : "",
                                      *c == 'a' ? file : second);
        instance_again(&in, settings());
        watcher = peer_attach(in.socket);
        WAIT_UNTIL(is_state(0, first) && (!which[1] || is_settled(1)));
        connect_to_it();
}

static void again_with(const char *which, bool kill) {
        leave_it();
        if (kill)
                instance_kill(&in);
        else
                instance_stop(&in);
        start_with(which, "on");
}

static void start_two(void) {
        start();
        snprintf(second, sizeof second, "%s-b", file);
        unlink(second);
        again_with("ab", false);
}

static void stop_two(void) {
        stop();
        unlink(second);
}

static void expect_all(uint32_t blocks) {
        evict_all();
        WAIT_UNTIL(below(tokens) == blocks * BLOCK_TOKENS);
        ck_assert_int_eq(fetch(tokens), blocks * BLOCK_TOKENS);
        ck_assert_uint_eq(resident(tokens), blocks);
}

/* Writes the chain again. Some of its blocks may be in a file, without the blocks before them. */
static void write_again(void) {
        WAIT_UNTIL((make_chain(tokens), usleep(20000), evict_all(),
                    below(tokens) == BLOCKS * BLOCK_TOKENS));
}

/* ---- tests ----------------------------------------------------------------------------------- */

START_TEST(both_have_the_same_share) {
        write_chain();
        ck_assert_uint_eq(tier_of(0).records, BLOCKS / 2);
        ck_assert_uint_eq(tier_of(1).records, BLOCKS / 2);
        ck_assert_uint_eq(tier_of(1).written_bytes, tier_of(0).written_bytes);
        expect_all(BLOCKS);
        ck_assert_uint_eq(tier_of(0).hits, BLOCKS / 2);
        ck_assert_uint_eq(tier_of(1).hits, BLOCKS / 2);
        again_with("ab", _i);
        ck_assert_uint_eq(tier_of(0).records, BLOCKS / 2);
        ck_assert_uint_eq(tier_of(1).records, BLOCKS / 2);
        expect_all(BLOCKS);
}
END_TEST

START_TEST(their_order_does_not_matter) {
        write_chain();
        again_with("ba", true);
        ck_assert_uint_eq(tier().records, BLOCKS);
        expect_all(BLOCKS);
}
END_TEST

START_TEST(a_second_file_is_added) {
        again_with("a", false);
        write_chain();
        again_with("ab", false);
        ck_assert_uint_eq(tier_of(0).records, BLOCKS);
        expect_all(BLOCKS);
        ck_assert_uint_eq(tier_of(1).records, 0);
        for (uint32_t i = 0; i < ARRAY_SIZE(tokens); i++)
                tokens[i] += 5000;
        make_chain(tokens);
        WAIT_UNTIL(tier().records == 2 * BLOCKS);
        ck_assert_uint_eq(tier_of(1).records, BLOCKS / 2);
}
END_TEST

/* While one file is missing, the other one records the deletion, which then applies to both. */
START_TEST(deleted_without_a_file_is_deleted_in_it) {
        write_chain();
        again_with(_i ? "a" : "b", true);
        ck_assert_uint_eq(tier().records, BLOCKS / 2);
        peer_ok(watcher, MSG(space_delete, .space = kvd_slice_of("s"), .force = 1));
        WAIT_UNTIL(is_erased());
        again_with("ab", true);
        ck_assert(is_state(0, "on") && is_state(1, "on"));
        ck_assert_uint_eq(tier().records, 0);
        WAIT_UNTIL(below(tokens) == 0);
        ck_assert_int_eq(fetch(tokens), 0);
        write_chain();
        expect_all(BLOCKS);
}
END_TEST

START_TEST(deleted_is_deleted_in_both) {
        write_chain();
        peer_ok(watcher, MSG(space_delete, .space = kvd_slice_of("s"), .force = 1));
        WAIT_UNTIL(is_erased());
        for (uint32_t i = 0; i < 2; i++) {
                again_with(i ? "a" : "b", true);
                ck_assert_uint_eq(tier().records, 0);
                ck_assert_int_eq(fetch(tokens), 0);
        }
}
END_TEST

static void put(const char *to, const char *from) {
        char command[400];

        snprintf(command, sizeof command, "cp %s %s", from, to);
        ck_assert_int_eq(system(command), 0);
}

/* A copy of a file is no backup: its records are dropped, and it is used as a new file. */
START_TEST(a_copy_is_a_new_file) {
        write_chain();
        again_with("a", false);
        ck_assert_uint_eq(tier().records, BLOCKS / 2);
        leave_it();
        instance_stop(&in);
        put(second, file);
        instance_again(&in, settings());
        watch();
        connect_to_it();
        again_with("ab", false);
        ck_assert(is_state(1, "on"));
        ck_assert_uint_eq(tier_of(1).records, 0);
        write_again();
        ck_assert_uint_gt(tier_of(1).records, 0);
        expect_all(BLOCKS);
}
END_TEST

static void compare(const char *kept, const char *with) {
        char command[400];

        snprintf(command, sizeof command, "cmp %s %s", kept, with);
        ck_assert_int_eq(system(command), 0);
}

static bool is_off_for(uint32_t number, const char *why) {
        struct kvd_msg_tier_info_reply t = tier_of(number);

        return is_state(number, "off") && memmem(t.why.data, t.why.size, why, strlen(why));
}

/* Expects that the second file, named first, is off and unchanged, and the other one is used. */
static void expect_left(const char *which, const char *why, const char *copy) {
        start_with(which, "off");
        ck_assert(is_off_for(0, why));
        WAIT_UNTIL(!which[1] || is_state(1, "on"));
        leave_it();
        instance_stop(&in);
        compare(copy, second);
}

/* kvd cannot know which of the two files is foreign, so it changes neither. */
START_TEST(a_file_of_another_kvd_stays) {
        char copy_of_first[150], copy_of_second[150];

        write_chain();
        unlink(second);
        again_with("b", false);
        write_chain();
        leave_it();
        instance_stop(&in);
        snprintf(copy_of_first, sizeof copy_of_first, "%s-copy", file);
        snprintf(copy_of_second, sizeof copy_of_second, "%s-copy", second);
        put(copy_of_first, file);
        put(copy_of_second, second);
        start_with(_i ? "ba" : "ab", "off");
        ck_assert(is_off_for(0, "files 1 and 2 of the list"));
        ck_assert(is_off_for(1, "do not belong together"));
        leave_it();
        instance_stop(&in);
        compare(copy_of_first, file);
        compare(copy_of_second, second);
        unlink(copy_of_first);
        unlink(copy_of_second);
        start_with("b", "on");
        ck_assert_uint_eq(tier().records, BLOCKS);
        expect_all(BLOCKS);
}
END_TEST

/*
 * kvd used to cut or extend it to the configured size before it looked at it, and took a file of
 * another size for an unused one.
 */
START_TEST(a_file_of_another_kvd_and_size_stays) {
        char copy[150];

        snprintf(copy, sizeof copy, "%s-copy", second);
        unlink(second);
        file_size = _i ? "daemon.file_size=8M" : "daemon.file_size=32M";
        again_with("b", false);
        write_chain();
        leave_it();
        instance_stop(&in);
        put(copy, second);
        file_size = "daemon.file_size=16M";
        expect_left("ba", "another file_size", copy);
        expect_left("b", "another file_size", copy);
        unlink(copy);
        start_with("a", "on");
}
END_TEST

/* The file may be shorter than the part that kvd reads, or longer than file_size. */
START_TEST(foreign_files_are_not_changed) {
        static const char *const bytes[] = {"100", "5000", "70000", "20000000"};
        char copy[150], command[400];

        leave_it();
        instance_stop(&in);
        snprintf(copy, sizeof copy, "%s-copy", second);
        snprintf(command, sizeof command, "yes precious | head -c %s >%s", bytes[_i], second);
        ck_assert_int_eq(system(command), 0);
        put(copy, second);
        expect_left("ba", "not kvd's", copy);
        unlink(copy);
        start_with("a", "on");
}
END_TEST

/* kvd was killed while it filled the file with zeros, or another program cut it. */
START_TEST(a_file_that_is_too_short_is_filled) {
        struct stat st;

        write_chain();
        leave_it();
        instance_stop(&in);
        ck_assert_int_eq(truncate(second, _i ? 6 << 20 : 0), 0);
        ck_assert_int_eq(truncate(second, 6 << 20), 0);
        start_with("ab", "on");
        WAIT_UNTIL(is_state(1, "on"));
        ck_assert_int_eq(stat(second, &st), 0);
        ck_assert_int_eq(st.st_size, 16 << 20);
        write_again();
        expect_all(BLOCKS);
}
END_TEST

START_TEST(a_file_that_cannot_be_opened_is_off) {
        char there[sizeof second];

        write_chain();
        memcpy(there, second, sizeof there);
        snprintf(second, sizeof second, "/var/tmp/kvd-no-such-folder/file");
        again_with("ab", false);
        ck_assert(is_state(0, "on") && is_state(1, "off"));
        write_again();
        ck_assert_uint_ge(tier_of(0).records, BLOCKS);
        expect_all(BLOCKS);
        memcpy(second, there, sizeof there);
}
END_TEST

/* The same file may have one name or two. */
START_TEST(a_file_is_named_once) {
        char command[600], line[400] = "";
        FILE *f;

        leave_it();
        instance_stop(&in);
        unlink(second);
        if (_i)
                ck_assert_int_eq(link(file, second), 0);
        snprintf(command, sizeof command,
                 "%s --set daemon.socket=%s --set daemon.pool=4M --set daemon.file_size=16M "
                 "--set daemon.backend=host --set 'daemon.file=%s,%s' 2>&1",
                 getenv("KVD"), in.socket, file, _i ? second : file);
        f = popen(command, "re");
        ck_assert(f != NULL);
        while (fgets(line, sizeof line, f) && !strstr(line, "named twice"))
                ;
        ck_assert_int_ne(pclose(f), 0);
        ck_assert_msg(strstr(line, "named twice") != NULL, "%s", line);
        unlink(second);
        instance_again(&in, settings());
        watch();
        connect_to_it();
}
END_TEST

/* ---- bidirectional prefixes ------------------------------------------------------------------ */

static void start_two_whole(void) {
        kind = KVD_BIDIRECTIONAL;
        start_two();
}

static void expect_nothing(void) {
        WAIT_UNTIL(below(tokens) == 0);
        ck_assert_int_eq(fetch(tokens), 0);
        ck_assert_uint_eq(resident(tokens), 0);
}

/* Half of a prefix is a miss, and is not reused when the prefix is written again. */
START_TEST(a_prefix_is_in_both_or_missed) {
        write_chain();
        ck_assert_uint_eq(tier_of(0).records, BLOCKS / 2);
        ck_assert_uint_eq(tier_of(1).records, BLOCKS / 2);
        expect_all(BLOCKS);
        ck_assert_uint_eq(tier_of(1).hits, BLOCKS / 2);
        again_with("ba", true);
        expect_all(BLOCKS);
        again_with(_i ? "a" : "b", true);
        ck_assert_uint_eq(tier().records, BLOCKS / 2);
        expect_nothing();
        write_again();
        expect_all(BLOCKS);
        again_with("ab", true);
        expect_all(BLOCKS);
}
END_TEST

SUITE("files", FIXTURE(start_two, stop_two),
      LOOPS(2, both_have_the_same_share, deleted_without_a_file_is_deleted_in_it,
            a_file_is_named_once, a_file_that_is_too_short_is_filled, a_file_of_another_kvd_stays,
            a_file_of_another_kvd_and_size_stays),
      LOOPS(4, foreign_files_are_not_changed),
      TESTS(their_order_does_not_matter, a_second_file_is_added, deleted_is_deleted_in_both,
            a_copy_is_a_new_file, a_file_that_cannot_be_opened_is_off),
      CASE("whole"), FIXTURE(start_two_whole, stop_two), LOOPS(2, a_prefix_is_in_both_or_missed))
