/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The methods as a client of a daemon with a worker sees them: settings, labels, configurations and
 * profiles.
 */

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "client/internal.h"
#include "ipc/base/layout.h"
#include "ipc/base/summary.h"
#include "ipc/base/util.h"
#include "tests/daemon/blocks.h"
#include "tests/lib/sanitized.h"
#include "tests/lib/suite.h"

#define WAIT_NS UINT64_C(60000000000) /* more than a test may take */

static struct instance in;
static struct user u;

#define MSG(name_, ...) ((struct kvd_msg){.number = KVD_MSG_##name_, .name_ = {__VA_ARGS__}})
#define SPACE kvd_slice_of("s")
#define NONE \
        (const char *const[]) { \
                NULL \
        }

static void start(const char *const settings[]) {
        instance_start(&in, NULL);
        user_open(&u, in.socket, settings);
}

static void stop(void) {
        user_check(&u);
        user_close(&u);
        instance_end(&in);
}

/* ---- settings -------------------------------------------------------------------------------- */

static struct kvd_msg set(const char *key, const char *value) {
        return MSG(space_set, .space = SPACE, .key = kvd_slice_of(key),
                   .value = kvd_slice_of(value));
}

static double told(enum kvd_setting which) {
        struct kvd_slice settings = peer_ok(u.peer, MSG(space_info)).space_info_reply.settings;
        double value;

        ck_assert_uint_eq(settings.size, KVD_N_SETTINGS * sizeof value);
        memcpy(&value, (const uint8_t *)settings.data + which * sizeof value, sizeof value);
        return value;
}

static const char *refusal(const char *key, const char *value) {
        static char text[256];
        struct kvd_msg reply = peer_call(u.peer, set(key, value));

        ck_assert_uint_eq(reply.number, KVD_MSG_error);
        ck_assert_uint_eq(reply.error.code, EINVAL);
        return kvd_slice_copy(reply.error.text, text, sizeof text);
}

static void set_and_look(enum kvd_setting which, double value) {
        const struct kvd_setting_info *info = kvd_setting_info(which);
        char key[128], text[64];
        double seen;

        snprintf(key, sizeof key, "%s.%s", info->method, info->name);
        peer_ok(u.peer, set(key, kvd_setting_format(which, value, text, sizeof text)));
        ck_assert_msg(told(which) == value, "%s is %g, not %s", key, told(which), text);
        ck_assert_int_eq(kvd_space_setting(u.space, key, &seen), 0);
        ck_assert(seen == value);
}

START_TEST(every_setting_can_be_set_and_seen) {
        start(NONE);
        for (int i = 0; i < KVD_N_SETTINGS; i++) {
                const struct kvd_setting_info *info = kvd_setting_info((enum kvd_setting)i);

                ck_assert_msg(told((enum kvd_setting)i) == info->serve, "%s.%s at first",
                              info->method, info->name);
                set_and_look((enum kvd_setting)i, info->paper);
                set_and_look((enum kvd_setting)i, info->serve);
                if (info->words || i == KVD_hshare_channels)
                        continue;
                set_and_look((enum kvd_setting)i, info->least);
                set_and_look((enum kvd_setting)i, info->serve);
        }
        stop();
}
END_TEST

START_TEST(a_refusal_names_what_is_possible) {
        start(NONE);
        ck_assert(strstr(refusal("memshare.tau_step", "1.5"), "from 0 to 1"));
        ck_assert(strstr(refusal("memshare.tau_step", "nan"), "from 0 to 1"));
        ck_assert(strstr(refusal("memshare.tau_step", "0.5x"), "0.5x"));
        ck_assert(strstr(refusal("memshare.metric", "euclid"), "fro_norm mean_l2 relative"));
        ck_assert(strstr(refusal("memshare", "yes"), "off on"));
        ck_assert(strstr(refusal("policy", "mru"), "lru, fifo, priority"));
        ck_assert(strstr(refusal("hshare.channels", "16"), "fixed when a space is made; it is 32"));
        ck_assert(strstr(refusal("memshare.nothing", "1"), "no setting 'memshare.nothing'"));
        peer_ok(u.peer, set("policy", "priority"));
        ck_assert_uint_eq(peer_ok(u.peer, MSG(space_info)).space_info_reply.policy, KVD_PRIORITY);
        peer_ok(u.peer, set("hshare.channels", "32"));
        stop();
}
END_TEST

START_TEST(a_profile_sets_its_method_only) {
        start(NONE);
        peer_ok(u.peer, set("memshare", "on"));
        peer_ok(u.peer, set("keydiff.recent_frac", "0.5"));
        peer_ok(u.peer, set("memshare.profile", "paper"));
        peer_ok(u.peer, set("hshare.profile", "paper"));
        ck_assert(told(KVD_memshare_tau_block) == 0.8);
        ck_assert(told(KVD_memshare_on) == 1);
        ck_assert(told(KVD_keydiff_recent_frac) == 0.5);
        ck_assert(told(KVD_hshare_channels) == 32);
        stop();
}
END_TEST

/* ---- requests -------------------------------------------------------------------------------- */

START_TEST(requests_are_checked) {
        struct peer_end *p;
        uint32_t handle, other, sequence, slots[] = {0, 99};

        start((const char *const[]){"kvreviver=on", "memshare=on", NULL});
        p = peer_attach(in.socket);
        handle = peer_open_space(p, "t");
        peer_refused(p, MSG(table, .space = handle + 1, .op = 1, .max_blocks = 4), -EBADF);
        peer_refused(p, MSG(table, .space = handle, .max_blocks = 4), -EINVAL);
        peer_refused(p, MSG(table, .space = handle, .op = 1), -EINVAL);
        sequence = peer_ok(p, MSG(table, .space = handle, .op = 1, .max_blocks = 4))
                           .table_reply.sequence;
        peer_refused(p,
                     MSG(append, .space = handle, .sequence = sequence, .own = 1,
                         .blocks = {"12345", 5}),
                     -EINVAL);
        peer_refused(p, MSG(append, .space = handle, .sequence = sequence, .own = 1), -EINVAL);
        peer_refused(p, MSG(cool, .space = handle, .sequence = sequence, .slots = {slots, 4}),
                     -EINVAL);
        peer_refused(p,
                     MSG(cool, .space = handle, .sequence = sequence, .how = 1,
                         .slots = {slots, 8}),
                     -EINVAL);
        peer_refused(p,
                     MSG(cool, .space = handle, .sequence = sequence, .how = 1,
                         .slots = {slots, 3}),
                     -EINVAL);
        peer_refused(p, MSG(revive, .space = handle, .sequence = sequence, .slots = {slots, 4}),
                     -EINVAL);
        peer_refused(p,
                     MSG(revive, .space = handle, .sequence = sequence, .how = 1,
                         .slots = {slots, 4}),
                     -EINVAL);
        peer_refused(p, MSG(sync, .space = handle, .sequence = sequence, .taken = {slots, 2}),
                     -EINVAL);
        peer_refused(p, MSG(critical, .space = handle, .sequence = sequence), -EINVAL);
        peer_refused(p, MSG(critical, .space = handle, .sequence = sequence, .op = 2), -ENODATA);
        peer_refused(p,
                     MSG(critical, .space = handle, .sequence = sequence, .op = 1, .queries = 1,
                         .words = 1),
                     -EINVAL);
        peer_refused(p, MSG(sample, .space = handle, .r = 3, .tokens = 1), -EINVAL);
        peer_refused(p, MSG(sample_done, .space = handle, .ticket = 1), -ENOENT);
        peer_refused(p, MSG(profile, .space = SPACE), -EINVAL);
        peer_refused(p, MSG(profile, .space = SPACE, .op = 3), -ENODATA);
        other = peer_open_space(u.peer, "t"); /* another client */
        peer_refused(u.peer, MSG(sync, .space = other, .sequence = sequence), -ENOENT);
        peer_refused(u.peer, MSG(table, .space = other, .op = 2, .sequence = sequence), -ENOENT);
        peer_ok(p, MSG(table, .space = handle, .op = 2, .sequence = sequence));
        peer_refused(p, MSG(table, .space = handle, .op = 2, .sequence = sequence), -ENOENT);
        peer_refused(p, MSG(work, .id = 1, .bytes = 1), -ENOSYS);
        peer_close(p);
        stop();
}
END_TEST

/* ---- labels ---------------------------------------------------------------------------------- */

START_TEST(labels_are_there_for_reading) {
        struct kvd_label_shape shape;
        const uint8_t *labels = NULL;
        uint32_t handle;
        uint64_t bytes;

        start((const char *const[]){"hshare=on", NULL});
        user_append(&u, 4);
        WAIT_UNTIL((labels = kvd_sequence_labels(u.sequence, 3, &shape)) != NULL);
        ck_assert_uint_eq(shape.channels, 32);
        ck_assert_uint_eq(shape.label_bytes, 20);
        for (uint32_t c = 1; c < 32; c++)
                ck_assert_uint_gt(shape.channel[c], shape.channel[c - 1]);
        for (uint32_t i = 0, set_bytes = 0; i < 16 * 20; i++)
                ck_assert((set_bytes += labels[i] != 0) > 0 || i < 20);
        WAIT_UNTIL(user_counter(&u, KVD_SPACE_SUMMARISED) == 4);
        handle = peer_ok(u.peer, MSG(space, .name = SPACE)).space_reply.space;
        bytes = peer_ok(u.peer, MSG(summaries, .space = handle)).summaries_reply.bytes;
        ck_assert_uint_eq(u.peer->fds.n, 1);
        ck_assert(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, u.peer->fds.fd[0], 0) ==
                  MAP_FAILED);
        ck_assert(mmap(NULL, bytes, PROT_READ, MAP_SHARED, u.peer->fds.fd[0], 0) != MAP_FAILED);
        stop();
}
END_TEST

static void wait_for(int changes) {
        int r = kvd_sequence_wait(u.sequence, WAIT_NS);

        ck_assert_msg(r == changes, "%d, not %d: %s", r, changes, kvd_error());
}

static void expect_labels(uint32_t n, const uint8_t (*want)[320]) {
        struct kvd_label_shape shape;

        for (uint32_t i = 0; i < n; i++) {
                const uint8_t *labels = kvd_sequence_labels(u.sequence, i, &shape);

                ck_assert_msg(labels, "no labels of entry %u", i);
                ck_assert_mem_eq(labels, want[i], 320);
        }
}

/* Queries need labels most for entries that are not resident, so these keep them on every way. */
START_TEST(labels_survive_spills_and_revivals) {
        static const uint32_t slots[] = {0, 1, 2, 3};
        struct kvd_label_shape shape;
        uint8_t want[4][320];

        start((const char *const[]){"hshare=on", "kvreviver=on", "kvreviver.budget=1",
                                    "kvreviver.vague=1", NULL});
        user_append(&u, 4);
        wait_for(0);
        for (uint32_t i = 0; i < 4; i++)
                memcpy(want[i], kvd_sequence_labels(u.sequence, i, &shape), 320);
        for (int round = 0; round < 3; round++) {
                ck_assert_int_eq(kvd_sequence_cool(u.sequence, 4, slots, KVD_COOL_VAGUE), 4);
                wait_for(4);
                expect_labels(4, want);
                if (round == 0) {
                        ck_assert_int_eq(kvd_sequence_revive(u.sequence, 4, slots,
                                                             KVD_REVIVE_APPROX),
                                         4);
                        wait_for(4);
                        expect_labels(4, want);
                }
                ck_assert_int_eq(kvd_sequence_revive(u.sequence, 4, slots, KVD_REVIVE_EXACT), 4);
                wait_for(4);
                expect_labels(4, want);
                ck_assert_uint_eq(user_resident(&u), 4);
        }
        stop();
}
END_TEST

/* A block that an entry has no more must not stay pinned: the daemon could never free it. */
static void expect_a_pin_per_entry(void) {
        const struct view *view = u.sequence->view;
        uint32_t pins = 0, resident = 0, n;
        const struct kvd_entry *entries = kvd_sequence_entries(u.sequence, &n);

        for (uint32_t i = 0; i < view->ix->capacity; i++)
                pins += view->words[i].pins;
        for (uint32_t i = 0; i < n; i++)
                resident += entries[i].data != NULL;
        ck_assert_uint_eq(pins, resident);
}

START_TEST(a_block_that_is_replaced_is_let_go) {
        static const uint32_t slot = 0;

        start((const char *const[]){"kvreviver=on", "kvreviver.budget=1", "kvreviver.vague=1",
                                    NULL});
        user_append(&u, 2);
        ck_assert_int_eq(kvd_sequence_cool(u.sequence, 1, &slot, KVD_COOL_VAGUE), 1);
        wait_for(1);
        expect_a_pin_per_entry();
        ck_assert_int_eq(kvd_sequence_revive(u.sequence, 1, &slot, KVD_REVIVE_APPROX), 1);
        wait_for(1);
        ck_assert_uint_eq(user_flags(&u, KVD_ENTRY_APPROX), 1);
        ck_assert_int_eq(kvd_sequence_revive(u.sequence, 1, &slot, KVD_REVIVE_EXACT), 1);
        wait_for(1);
        ck_assert_uint_eq(user_flags(&u, KVD_ENTRY_APPROX), 0);
        expect_a_pin_per_entry();
        stop();
}
END_TEST

static struct kvd_use use_of(uint32_t slot) {
        const struct kvd_entry *entries;
        struct kvd_use use;
        uint32_t n;

        entries = kvd_sequence_entries(u.sequence, &n);
        memcpy(&use,
               (uint8_t *)u.sequence->view->page + kvd_use_off(u.sequence->view->ix->capacity) +
                       entries[slot].block * sizeof use,
               sizeof use);
        return use;
}

/* A moving average by default; a sum, as in H2O and KVReviver, with the paper's profile. */
START_TEST(attention_is_averaged_or_summed) {
        uint32_t slot = 0;

        start((const char *const[]){"kvreviver=on", NULL});
        user_append(&u, 1);
        ck_assert_uint_eq(use_of(0).mass, 0);
        for (int i = 0; i < 100; i++)
                kvd_sequence_use(u.sequence, 0, 2, 0.5f);
        ck_assert(use_of(0).mass > 500 && use_of(0).mass <= 512 && use_of(0).hits > 120 &&
                  use_of(0).hits <= 128);
        peer_ok(u.peer, set("kvreviver.profile", "paper"));
        peer_ok(u.peer, set("kvreviver.spill", "on"));
        user_append(&u, 1); /* it does not inherit the mass of its block's last user */
        for (int i = 0; i < 10; i++)
                kvd_sequence_use(u.sequence, 1, 2, 1);
        ck_assert_uint_eq(use_of(1).mass, 320);
        ck_assert_uint_eq(use_of(1).hits, 160);
        ck_assert_int_eq(kvd_sequence_cool(u.sequence, 1, &slot, KVD_COOL_SPILL), 1);
        wait_for(1);
        ck_assert_int_eq(kvd_sequence_revive(u.sequence, 1, &slot, KVD_REVIVE_EXACT), 1);
        wait_for(1);
        ck_assert_uint_eq(use_of(0).mass, 256); /* that of a revived block */
        stop();
}
END_TEST

/* A packed block does not inherit the attention of earlier contents of its block. */
START_TEST(attention_begins_anew_in_a_packed_block) {
        struct kvd_use *uses;

        start((const char *const[]){"keydiff=on", NULL});
        user_append(&u, 8);
        wait_for(0);
        uses = (struct kvd_use *)(void *)((uint8_t *)u.sequence->view->page +
                                          kvd_use_off(u.sequence->view->ix->capacity));
        for (uint32_t i = 0; i < u.sequence->view->ix->capacity; i++)
                uses[i] = (struct kvd_use){7, 7};
        ck_assert_int_eq(kvd_sequence_compact(u.sequence, 0, 8, 30, NULL), 8);
        wait_for(8);
        for (uint32_t slot = 0; slot < 2; slot++) {
                ck_assert_uint_eq(use_of(slot).mass, 0);
                ck_assert_uint_eq(use_of(slot).hits, 0);
        }
        stop();
}
END_TEST

/* ---- a sharing configuration ----------------------------------------------------------------- */

/* Two layers and two heads, which all select the same blocks. */
START_TEST(a_sharing_configuration_is_made) {
        uint8_t layer[2] = {9, 9}, head[4] = {9, 9, 9, 9};
        struct kvd_block block;
        uint64_t *bits;

        start((const char *const[]){"hshare=on", "hshare.dense_layers=0", "hshare.layer_ratio=0.5",
                                    "hshare.head_ratio=0.5", NULL});
        user_append(&u, 1);
        ck_assert_int_eq(kvd_sequence_sharing(u.sequence, layer, head), -ENODATA);
        ck_assert_int_eq(kvd_alloc(u.space, 1, &block), 1);
        bits = (uint64_t *)block.data;
        for (uint32_t row = 0; row < 2 * 2 * 3; row++)
                for (uint32_t w = 0; w < 2; w++)
                        bits[row * 2 + w] = 0x1111 << row % 3;
        ck_assert_msg(kvd_sequence_critical(u.sequence, 1, &block, 3, 2, 8) == 0, "%s",
                      kvd_error());
        WAIT_UNTIL(kvd_sequence_sharing(u.sequence, layer, head) == 1);
        ck_assert_mem_eq(layer, ((uint8_t[]){0, 0}), 2);
        ck_assert_mem_eq(head, ((uint8_t[]){0, 0, 0, 0}), 4);
        ck_assert_int_eq(kvd_sequence_critical(u.sequence, 1, &block, 3, 6000, 8), -EINVAL);
        kvd_free(u.space, 1, &block);
        stop();
}
END_TEST

/* ---- a table and its figures ----------------------------------------------------------------- */

START_TEST(figures_are_sums_over_entries) {
        struct kvd_sequence_stats stats;
        uint32_t gone[] = {1, 4};

        start((const char *const[]){"kvreviver=on", NULL});
        user_append(&u, 6);
        ck_assert_int_eq(kvd_sequence_cool(u.sequence, 2, gone, KVD_COOL_DROP), 2);
        WAIT_UNTIL((user_sync(&u), user_flags(&u, KVD_ENTRY_DROPPED)) == 2);
        kvd_sequence_stats(u.sequence, &stats);
        ck_assert_uint_eq(stats.blocks, 6);
        ck_assert_uint_eq(stats.dropped, 2);
        ck_assert_uint_eq(stats.resident, 4);
        ck_assert_uint_eq(stats.own, user_flags(&u, KVD_ENTRY_OWN));
        ck_assert_uint_eq(stats.spilled + stats.vague + stats.approximate + stats.compacted, 0);
        ck_assert_uint_eq(stats.borrowed + stats.shared + stats.bytes_saved, 0);
        stop();
}
END_TEST

START_TEST(a_table_that_cannot_be_is_refused) {
        kvd_sequence *none = NULL;

        start((const char *const[]){NULL});
        ck_assert_int_eq(kvd_sequence_open(u.space, 0, &none), -EINVAL);
        if (!SANITIZED) /* sanitizers abort on such an allocation */
                ck_assert_int_lt(kvd_sequence_open(u.space, UINT32_MAX, &none), 0);
        ck_assert_ptr_null(none);
        stop();
}
END_TEST

/* ---- MemShare -------------------------------------------------------------------------------- */

/* All steps have the same words. Their contents are as similar as their scales. */
static void append_step(float scale) {
        struct kvd_block blocks[2];
        uint32_t tokens[32], n, n_tokens;
        struct kvd_sequence_stats stats;

        kvd_sequence_stats(u.sequence, &stats);
        n_tokens = (uint32_t)stats.tokens;
        ck_assert_int_eq(kvd_alloc(u.space, 2, blocks), 2);
        for (uint32_t b = 0; b < 2; b++)
                for (uint32_t i = 0; i < 4096; i++)
                        ((float *)blocks[b].data)[i] = scale * sinf((float)(i * (b + 1)));
        for (uint32_t i = 0; i < 32; i++)
                tokens[i] = 100 + i;
        n = (uint32_t)kvd_sequence_append(u.sequence, 2, blocks, tokens, 32);
        ck_assert_msg((int)n >= 0, "%s", kvd_error());
        ck_assert_msg(kvd_sequence_step(u.sequence, n_tokens, 32) >= 0, "%s", kvd_error());
}

START_TEST(a_repeated_step_is_shared) {
        const struct kvd_entry *entries;
        struct kvd_sequence_stats stats;
        uint32_t n;

        start((const char *const[]){"memshare=on", "memshare.align=none", "memshare.recent_guard=0",
                                    NULL});
        append_step(1.0f);
        append_step(50.0f); /* equal words, other contents */
        append_step(1.01f);
        ck_assert_int_eq(kvd_sequence_wait(u.sequence, WAIT_NS), 2);
        entries = kvd_sequence_entries(u.sequence, &n);
        ck_assert_uint_eq(n, 6);
        for (uint32_t i = 0; i < 6; i++)
                ck_assert_int_eq(!!(entries[i].flags & KVD_ENTRY_SHARED), i >= 4);
        ck_assert_uint_eq(entries[4].block, entries[0].block);
        ck_assert_int_eq(entries[4].delta, 0);
        expect_a_pin_per_entry();
        kvd_sequence_stats(u.sequence, &stats);
        ck_assert_uint_ge(stats.shared, 1);
        user_check(&u);
        user_close(&u);
        instance_end(&in);
}
END_TEST

static float noise(uint32_t seed, uint32_t i) {
        uint32_t x = (seed * 7919 + i) * 2654435761u;

        x ^= x >> 15;
        x *= 2246822519u;
        return (float)(int32_t)(x ^ x >> 13) / 2147483648.0f;
}

static uint32_t another; /* added to the last word of each block */

/* A step of two blocks whose contents have a share of another's mixed in; words are independent. */
static void append_noisy(uint32_t contents, uint32_t other, float share, uint32_t words) {
        struct kvd_sequence_stats stats;
        struct kvd_block blocks[2];
        uint32_t tokens[32];

        kvd_sequence_stats(u.sequence, &stats);
        ck_assert_int_eq(kvd_alloc(u.space, 2, blocks), 2);
        for (uint32_t b = 0; b < 2; b++)
                for (uint32_t i = 0; i < 4096; i++)
                        ((float *)blocks[b].data)[i] = noise(2 * contents + b, i) +
                                                       share * noise(2 * other + b, i);
        for (uint32_t i = 0; i < 32; i++)
                tokens[i] = words * 32 % 900 + i + (i % 16 == 15 ? another : 0);
        ck_assert_int_eq(kvd_sequence_append(u.sequence, 2, blocks, tokens, 32), 2);
        ck_assert_int_ge(kvd_sequence_step(u.sequence, (uint32_t)stats.tokens, 32), 0);
}

static uint32_t shared_of(uint32_t first, uint32_t n) {
        const struct kvd_entry *entries;
        uint32_t all, shared = 0;

        entries = kvd_sequence_entries(u.sequence, &all);
        for (uint32_t i = first; i < first + n; i++)
                shared += !!(entries[i].flags & KVD_ENTRY_SHARED);
        return shared;
}

/*
 * In the paper's metric, repeats are 0.41 apart here and strangers 0.82. A threshold that suits one
 * model is wrong for another; a measured one lies between the two distances.
 */
START_TEST(a_measured_threshold_tells_repeats_from_strangers) {
        start((const char *const[]){"memshare=on", "memshare.align=none", "memshare.recent_guard=0",
                                    "memshare.metric=fro_norm", "memshare.tau_block=0.35", NULL});
        for (uint32_t i = 0; i < 12; i++)
                append_noisy(i, 0, 0, i);
        append_noisy(3, 100, 0.7f, 3); /* a repeat */
        kvd_sequence_wait(u.sequence, WAIT_NS);
        ck_assert_uint_eq(user_flags(&u, KVD_ENTRY_SHARED), 0);
        user_set(&u, "memshare.tau_block=1");
        append_noisy(200, 0, 0, 4); /* the same words, other contents */
        kvd_sequence_wait(u.sequence, WAIT_NS);
        ck_assert_uint_eq(shared_of(26, 2), 2); /* strangers are shared, too */
        user_set(&u, "memshare.calibrate=0.01");
        append_noisy(5, 101, 0.7f, 5);
        append_noisy(201, 0, 0, 6);
        append_noisy(7, 102, 0.7f, 7);
        kvd_sequence_wait(u.sequence, WAIT_NS);
        ck_assert_uint_eq(shared_of(28, 2), 2);
        ck_assert_uint_eq(shared_of(30, 2), 0);
        ck_assert_uint_eq(shared_of(32, 2), 2);
        ck_assert_uint_gt(user_counter(&u, KVD_SPACE_TAU_BLOCK), 500000);
        ck_assert_uint_lt(user_counter(&u, KVD_SPACE_TAU_BLOCK), 816000);
        user_check(&u);
        user_close(&u);
        instance_end(&in);
}
END_TEST

/*
 * A step that is said again is about 0.4 apart, as with SmolLM2, whose strangers are 0.9 apart. With
 * one word changed, a fact may have changed.
 */
START_TEST(blocks_of_the_same_tokens_may_differ_more) {
        start((const char *const[]){"memshare=on", "memshare.align=none", NULL});
        append_noisy(3, 0, 0, 3);
        another = 50;
        append_noisy(3, 100, 0.4f, 3);
        another = 0;
        append_noisy(3, 101, 0.7f, 3);
        append_noisy(3, 102, 0.4f, 3);
        append_noisy(60, 0, 0, 20); /* the last two blocks are spared until there are newer ones */
        kvd_sequence_wait(u.sequence, WAIT_NS);
        ck_assert_uint_eq(shared_of(0, 6), 0);
        ck_assert_uint_eq(shared_of(6, 2), 2);
        user_set(&u, "memshare.tau_same=0");
        append_noisy(3, 103, 0.4f, 3);
        append_noisy(61, 0, 0, 21);
        kvd_sequence_wait(u.sequence, WAIT_NS);
        ck_assert_uint_eq(shared_of(8, 6), 0);
        user_check(&u);
        user_close(&u);
        instance_end(&in);
}
END_TEST

/* ---- BiCache's profile ----------------------------------------------------------------------- */

/* A block computed alone and one with its prefix, which differ by angle in layer 1. */
static void take_sample(uint32_t r, double angle) {
        struct kvd_block blocks[2];

        ck_assert_int_eq(kvd_alloc(u.space, 2, blocks), 2);
        for (uint32_t i = 0; i < 4096; i++) {
                bool deep = i >= 2048;
                float *alone = (float *)blocks[0].data + i, *whole = (float *)blocks[1].data + i;

                *alone = i % 2 ? 1.0f : 0.0f;
                *whole = (float)(deep ? (i % 2 ? cos(angle) : sin(angle)) : *alone);
        }
        ck_assert_msg(kvd_prefix_sample(u.space, r, 1, blocks, 16) == 0, "%s", kvd_error());
        kvd_free(u.space, 2, blocks);
}

/* The caller must hear that its sample does not count. */
START_TEST(a_sample_that_cannot_be_measured_is_an_error) {
        struct kvd_block blocks[2];

        start((const char *const[]){"bicache=on", NULL});
        ck_assert_int_eq(kvd_alloc(u.space, 2, blocks), 2);
        for (uint32_t i = 0; i < 4096; i++)
                ((float *)blocks[0].data)[i] = ((float *)blocks[1].data)[i] = NAN;
        ck_assert_int_eq(kvd_prefix_sample(u.space, 50, 1, blocks, 16), -EIO);
        ck_assert_ptr_nonnull(strstr(kvd_error(), "not finite"));
        kvd_free(u.space, 2, blocks);
        stop();
}
END_TEST

static struct kvd_msg_profile_reply profile(uint32_t op) {
        return peer_ok(u.peer, MSG(profile, .space = SPACE, .op = op)).profile_reply;
}

static void expect_depths(const struct kvd_msg_profile_reply *p, const uint32_t (*steps)[2],
                          uint32_t n) {
        const uint8_t *depth = p->depth.data;
        uint32_t now = 1;

        ck_assert_uint_eq(p->depth.size, 101);
        for (uint32_t r = 0, i = 0; r <= 100; r++) {
                if (i < n && steps[i][0] == r)
                        now = steps[i++][1];
                ck_assert_msg(depth[r] == now, "%u layers at %u percent, not %u", depth[r], r, now);
        }
}

START_TEST(a_profile_becomes_a_table) {
        struct kvd_msg_profile_reply p;
        uint32_t samples[101];
        float similarity[4];

        start((const char *const[]){"bicache=on", "bicache.tau=0.9", NULL});
        ck_assert_int_eq(kvd_prefix_depth(u.space, 90, 10, 0), 0);
        take_sample(50, 0.6);
        take_sample(80, 0.1);
        take_sample(80, 0.6); /* cosines 0.995 and 0.825: their mean is above tau */
        p = profile(1);
        ck_assert_uint_eq(p.layers, 2);
        ck_assert_uint_eq(p.def, 0);
        memcpy(samples, p.samples.data, sizeof samples);
        ck_assert_uint_eq(samples[50], 1);
        ck_assert_uint_eq(samples[80], 2);
        ck_assert_uint_eq(p.similarity.size, sizeof similarity);
        memcpy(similarity, p.similarity.data, sizeof similarity);
        ck_assert(fabs(similarity[0] - 1) < 1e-6 && fabs(similarity[1] - cos(0.6)) < 1e-5);
        ck_assert(fabs(similarity[2] - 1) < 1e-6 &&
                  fabs(similarity[3] - (cos(0.6) + cos(0.1)) / 2) < 1e-5);
        p = profile(3);
        ck_assert_uint_eq(p.def, 1);
        expect_depths(&p, (const uint32_t[][2]){{80, 2}}, 1);
        ck_assert_int_eq(kvd_prefix_depth(u.space, 90, 10, 0), 2);
        ck_assert_int_eq(kvd_prefix_depth(u.space, 90, 10, 100), 1);
        /* depths 2 and 1: their mean is 1 */
        peer_ok(u.peer, set("bicache.b_mode", "mean_b_floor"));
        p = profile(3);
        expect_depths(&p, NULL, 0);
        peer_ok(u.peer, set("bicache.tau", "0.8"));
        peer_refused(u.peer, MSG(profile, .space = SPACE, .op = 3), -ENODATA);
        peer_ok(u.peer, set("bicache.b_mode", "takewhile_of_mean"));
        p = profile(3);
        expect_depths(&p, (const uint32_t[][2]){{50, 2}}, 1);
        p = profile(2);
        ck_assert_uint_eq(p.def, 0);
        ck_assert_int_eq(kvd_prefix_depth(u.space, 90, 10, 0), 0);
        /* the samples are gone, too */
        peer_refused(u.peer, MSG(profile, .space = SPACE, .op = 3), -ENODATA);
        stop();
}
END_TEST

START_TEST(a_table_can_be_set) {
        uint8_t depth[101];
        struct kvd_msg_profile_reply p;

        start((const char *const[]){"bicache=on", NULL});
        memset(depth, 1, sizeof depth);
        depth[100] = 2;
        peer_refused(u.peer, MSG(profile, .space = SPACE, .op = 4, .depth = {depth, 100}, .def = 1),
                     -EINVAL);
        peer_refused(u.peer, MSG(profile, .space = SPACE, .op = 4, .depth = {depth, 101}), -EINVAL);
        peer_refused(u.peer, MSG(profile, .space = SPACE, .op = 4, .depth = {depth, 101}, .def = 2),
                     -EINVAL);
        p = peer_ok(u.peer, MSG(profile, .space = SPACE, .op = 4, .depth = {depth, 101}, .def = 1))
                    .profile_reply;
        expect_depths(&p, (const uint32_t[][2]){{100, 2}}, 1);
        depth[99] = 3; /* more layers than there are */
        peer_refused(u.peer, MSG(profile, .space = SPACE, .op = 4, .depth = {depth, 101}, .def = 1),
                     -EINVAL);
        depth[99] = 1;
        depth[50] = 2; /* decreases, which is refused */
        peer_refused(u.peer, MSG(profile, .space = SPACE, .op = 4, .depth = {depth, 101}, .def = 1),
                     -EINVAL);
        stop();
}
END_TEST

SUITE("methods",
      TESTS(every_setting_can_be_set_and_seen, a_refusal_names_what_is_possible,
            a_profile_sets_its_method_only, requests_are_checked, labels_are_there_for_reading,
            labels_survive_spills_and_revivals, a_block_that_is_replaced_is_let_go,
            attention_is_averaged_or_summed, attention_begins_anew_in_a_packed_block,
            a_sharing_configuration_is_made, figures_are_sums_over_entries,
            a_table_that_cannot_be_is_refused, a_repeated_step_is_shared,
            a_measured_threshold_tells_repeats_from_strangers,
            blocks_of_the_same_tokens_may_differ_more, a_sample_that_cannot_be_measured_is_an_error,
            a_profile_becomes_a_table, a_table_can_be_set))
