/* SPDX-License-Identifier: Apache-2.0 */

/* Sequences and methods: each message with other clients' objects, and with impossible ones. */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/kvd_methods.h"
#include "ipc/base/sequence.h"
#include "ipc/base/util.h"
#include "tests/daemon/hostile/methods.h"
#include "tests/lib/oracle.h"

#define BT VICTIM_BT
#define MSG(name_, ...) \
        ((struct kvd_msg){.number = KVD_MSG_##name_, .serial = 1, .name_ = {__VA_ARGS__}})

static void refused(const struct asker *a, struct kvd_msg request, int error) {
        raw_expect_refusal(a->fd, &request, error);
}

static struct kvd_msg slots_message(const struct asker *a, uint32_t number, uint32_t sequence,
                                    uint32_t how, const uint32_t *slots, uint32_t n) {
        if (number == KVD_MSG_cool)
                return MSG(cool, .space = a->space, .sequence = sequence, .how = how,
                           .slots = {slots, n * 4});
        return MSG(revive, .space = a->space, .sequence = sequence, .how = how,
                   .slots = {slots, n * 4});
}

static const uint32_t some_tokens[4 * BT] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3};

void methods_warm_up(const struct hostile *h) {
        struct asker a = methods_open(h->daemon.socket, "warm");
        uint32_t number = methods_sequence(&a, 64), slots[16];

        for (uint32_t i = 0; i < ARRAY_SIZE(slots); i++)
                slots[i] = i;
        methods_append(&a, number, 40);
        methods_ask(&a, MSG(share, .space = a.space, .sequence = number, .first = 0, .tokens = 40));
        methods_ask(&a,
                    MSG(share, .space = a.space, .sequence = number, .first = 40, .tokens = 40));
        methods_ask(&a, slots_message(&a, KVD_MSG_cool, number, KVD_COOL_VAGUE, slots, 16));
        while (methods_sync(&a, number, 1, 200) == 0)
                ;
        methods_ask(&a, slots_message(&a, KVD_MSG_revive, number, KVD_REVIVE_BOTH, slots, 16));
        methods_sync(&a, number, 1, PATIENCE_MS);
        close(a.fd);
}

/* ---- other clients' sequences ---------------------------------------------------------------- */

/* Every message that names a sequence. */
static void none_of_that_number(const struct asker *a, uint32_t sequence) {
        static const uint32_t slot = 0;
        kvd_ref block;

        refused(a, MSG(table, .space = a->space, .op = 2, .sequence = sequence), ENOENT);
        refused(a, MSG(share, .space = a->space, .sequence = sequence, .first = 0, .tokens = 1),
                ENOENT);
        refused(a, MSG(sync, .space = a->space, .sequence = sequence), ENOENT);
        refused(a, slots_message(a, KVD_MSG_cool, sequence, KVD_COOL_DROP, &slot, 1), ENOENT);
        refused(a, slots_message(a, KVD_MSG_revive, sequence, KVD_REVIVE_BOTH, &slot, 1), ENOENT);
        refused(a, MSG(compact, .space = a->space, .sequence = sequence, .entries = 1, .keep = 1),
                ENOENT);
        refused(a, MSG(critical, .space = a->space, .sequence = sequence, .op = 2), ENOENT);
        if (raw_allocate(a->fd, a->space, 1, &block) != 1)
                die("no block");
        refused(a, methods_append_message(a, sequence, &block, 1, some_tokens), ENOENT);
        refused(a,
                MSG(compact, .space = a->space, .sequence = sequence, .entries = 1, .keep = 1,
                    .scores = {&block, 8}),
                ENOENT);
        refused(a,
                MSG(critical, .space = a->space, .sequence = sequence, .op = 1,
                    .blocks = {&block, 8}, .queries = 1, .words = 1, .selected = 1),
                ENOENT);
        if (raw_release(a->fd, a->space, &block, 1) != 1)
                die("a block of a refused request is lost");
}

static void sequences_of_others(const struct hostile *h) {
        struct asker a = methods_open(h->daemon.socket, "mine"),
                     b = methods_open(h->daemon.socket, "mine");
        struct asker c = {.fd = a.fd, .name = "second"};
        uint32_t number = methods_sequence(&a, 8);
        struct random random = {3};

        c.space = raw_open_space(c.fd, c.name);
        methods_append(&a, number, 4);
        none_of_that_number(&b, number); /* another client's */
        none_of_that_number(&c, number); /* another space's */
        for (uint32_t i = 0; i < 64; i++)
                none_of_that_number(&a, i < 8  ? number + (i + 1) * KVD_MAX_SEQUENCES :
                                        i < 16 ? i - 8 :
                                        i < 24 ? UINT32_MAX - i :
                                                 random_below(&random, UINT32_MAX));
        methods_ask(&a, MSG(table, .space = a.space, .op = 2, .sequence = number));
        none_of_that_number(&a, number); /* closed */
        if (methods_sequence(&a, 8) == number)
                die("a number was reused at once");
        none_of_that_number(&a, number);
        b.space = 77;
        refused(&b, MSG(table, .space = b.space, .op = 1, .max_blocks = 1), EBADF);
}

/* ---- tables ---------------------------------------------------------------------------------- */

static void tables_that_cannot_be(const struct hostile *h) {
        struct asker a = methods_open(h->daemon.socket, "tables");
        uint32_t rss = (uint32_t)instance_rss_kib(&h->daemon), n = 0, numbers[KVD_MAX_SEQUENCES];

        refused(&a, MSG(table, .space = a.space, .op = 0), EINVAL);
        refused(&a, MSG(table, .space = a.space, .op = 1, .max_blocks = 0), EINVAL);
        refused(&a, MSG(table, .space = a.space, .op = 1, .max_blocks = UINT32_MAX), EDQUOT);
        refused(&a, MSG(table, .space = a.space, .op = 1, .max_blocks = 1u << 31), EDQUOT);
        for (uint32_t round = 0; round < 3; round++) { /* as large and as many as allowed */
                for (; n < KVD_MAX_SEQUENCES - KVD_MAX_SEQUENCES / 16; n++)
                        numbers[n] = methods_sequence(&a, 2000);
                refused(&a, MSG(table, .space = a.space, .op = 1, .max_blocks = 1), EUSERS);
                while (n > round * 300) {
                        uint32_t i = n-- - 1;

                        methods_ask(&a,
                                    MSG(table, .space = a.space, .op = 2, .sequence = numbers[i]));
                }
        }
        printf("  1,024 tables of 2,000 entries: memory of the daemon %u to %llu KiB\n", rss,
               (unsigned long long)instance_rss_kib(&h->daemon));
}

static void appends(const struct hostile *h) {
        struct asker a = methods_open(h->daemon.socket, "appends"),
                     b = methods_open(h->daemon.socket, "appends");
        struct asker c = {.fd = a.fd, .name = "appends2"};
        uint32_t number = methods_sequence(&a, 4), tokens[8 * BT] = {0};
        kvd_ref refs[8], of_b, of_c, bad[4];
        struct kvd_msg m;

        c.space = raw_open_space(c.fd, c.name);
        if (raw_allocate(a.fd, a.space, 6, refs) != 6 ||
            raw_allocate(b.fd, b.space, 1, &of_b) != 1 ||
            raw_allocate(c.fd, c.space, 1, &of_c) != 1)
                die("no blocks");
        memcpy(bad, refs, sizeof bad);
        if (of_c == refs[4] || of_c == refs[5]) /* numbers of two spaces may be the same */
                of_c = refs[0];
        for (uint32_t i = 0; i < 5; i++) {
                const kvd_ref wrong[] = {of_b, of_c, refs[0], refs[2] + (UINT64_C(1) << 32),
                                         UINT64_MAX};

                /* another client's, another space's, a duplicate, another generation, none */
                bad[2] = wrong[i];
                if (bad[2] != refs[2])
                        refused(&a, methods_append_message(&a, number, bad, 4, tokens), ESTALE);
        }
        refused(&a, methods_append_message(&a, number, refs, 5, tokens), ENOSPC);
        for (uint32_t n = 0; n <= 4 * BT; n++) {
                m = methods_append_message(&a, number, refs, 2, tokens);
                m.append.tokens.size = n * 4;
                if (n <= BT || n > 2 * BT)
                        refused(&a, m, EINVAL);
        }
        m = methods_append_message(&a, number, refs, 0, tokens);
        refused(&a, m, EINVAL);
        m = methods_append_message(&a, number, refs, 2, tokens);
        for (uint32_t bytes = 1; bytes < 16; bytes++) {
                m.append.blocks.size = bytes;
                refused(&a, m, EINVAL);
        }
        tokens[3] = victim_geometry.vocab;
        refused(&a, methods_append_message(&a, number, refs, 2, tokens), EINVAL);
        tokens[3] = UINT32_MAX;
        refused(&a, methods_append_message(&a, number, refs, 2, tokens), EINVAL);
        tokens[3] = 0;
        m = methods_append_message(&a, number, refs, 2, tokens);
        m.append.own = 0;
        refused(&a, m, ESTALE); /* borrowed, but not sealed */
        methods_ask(&a, methods_append_message(&a, number, refs, 2, tokens));
        /* private by now */
        refused(&a, methods_append_message(&a, number, refs, 1, tokens), ESTALE);
        m.append.blocks.size = 8;
        m.append.tokens.size = BT * 4;
        refused(&a, m, ESTALE); /* and not to be borrowed */
        m = (struct kvd_msg){.number = KVD_MSG_seal,
                             .serial = 1,
                             .seal = {.space = a.space,
                                      .blocks = {refs, 8},
                                      .tokens = {tokens, BT * 4}}};
        refused(&a, m, ESTALE); /* and not to be published */
        m.seal.parent = refs[0];
        m.seal.blocks.data = refs + 4;
        refused(&a, m, ESTALE); /* and not to be a parent */
        m = MSG(evict, .space = kvd_slice_of(a.name), .chain = refs[0]);
        if (methods_ask(&a, m).evict_reply.evicted)
                die("a private block was evicted from under its sequence");
        if (raw_release(a.fd, a.space, refs, 6) != 4)
                die("private blocks were released");
}

/* Unpinned blocks of the prefix cache, which the daemon then evicts. */
static void borrowed_without_a_pin(const struct hostile *h) {
        struct asker a = methods_open(h->daemon.socket, "borrowed");
        uint32_t number = methods_sequence(&a, 16), tokens[4 * BT] = {9, 8, 7, 6, 5, 4},
                 slots[4] = {0, 1, 2, 3};
        struct kvd_msg m, reply;
        kvd_ref refs[4];

        if (raw_allocate(a.fd, a.space, 4, refs) != 4)
                die("no blocks");
        m = MSG(seal, .space = a.space, .blocks = {refs, 32}, .tokens = {tokens, sizeof tokens});
        methods_ask(&a, m);
        m = methods_append_message(&a, number, refs, 4, tokens);
        m.append.own = 0;
        tokens[1]++;
        refused(&a, m, EINVAL); /* other tokens */
        tokens[1]--;
        m.append.blocks = (struct kvd_slice){refs + 1, 24};
        m.append.tokens = (struct kvd_slice){tokens + BT, 3 * BT * 4};
        refused(&a, m, EINVAL); /* not at its place */
        m.append.blocks = (struct kvd_slice){refs, 32};
        m.append.tokens = (struct kvd_slice){tokens, sizeof tokens};
        methods_ask(&a, m);
        do
                reply = methods_ask(&a, MSG(evict, .space = kvd_slice_of(a.name)));
        while (reply.evict_reply.more);
        if (methods_ask(&a, slots_message(&a, KVD_MSG_cool, number, KVD_COOL_DROP, slots, 4))
                    .cool_reply.cooling)
                die("borrowed blocks were cooled");
        if (methods_ask(&a, slots_message(&a, KVD_MSG_revive, number, KVD_REVIVE_BOTH, slots, 4))
                    .revive_reply.exact)
                die("borrowed blocks are revived");
        for (uint32_t i = 0; i < 8; i++)
                methods_append(&a, number, 1); /* in the very blocks that the table still names */
        methods_ask(&a,
                    MSG(share, .space = a.space, .sequence = number, .first = 0, .tokens = 4 * BT));
        methods_ask(&a, MSG(share, .space = a.space, .sequence = number, .first = 4 * BT,
                            .tokens = 8 * BT));
        methods_ask(&a, slots_message(&a, KVD_MSG_cool, number, KVD_COOL_SPILL, slots, 4));
        methods_sync(&a, number, 1, 50);
        methods_ask(&a, MSG(table, .space = a.space, .op = 2, .sequence = number));
}

/* ---- steps, answers, requests to cool and revive --------------------------------------------- */

static void steps_outside(const struct hostile *h) {
        static const uint32_t steps[][2] = {{0, 0},
                                            {0, 33},
                                            {32, 1},
                                            {33, 0},
                                            {33, 1},
                                            {1, UINT32_MAX},
                                            {UINT32_MAX, 1},
                                            {UINT32_MAX, UINT32_MAX},
                                            {31, UINT32_MAX - 30}};
        struct asker a = methods_open(h->daemon.socket, "steps");
        uint32_t number = methods_sequence(&a, 16);

        methods_append(&a, number, 8);
        for (uint32_t i = 0; i < ARRAY_SIZE(steps); i++)
                refused(&a,
                        MSG(share, .space = a.space, .sequence = number, .first = steps[i][0],
                            .tokens = steps[i][1]),
                        EINVAL);
        /* overlapping steps, more of them than the table has entries */
        for (uint32_t i = 0; i < 200; i++)
                methods_ask(&a, MSG(share, .space = a.space, .sequence = number, .first = i % 32,
                                    .tokens = 1 + i % (32 - i % 32)));
        methods_sync(&a, number, 1, 20);
}

static void answers_to_nothing(const struct hostile *h) {
        static const uint32_t taken[KVD_SYNC_CHANGES + 1] = {1, 0, 77, UINT32_MAX, 1, 1, 2};
        struct asker a = methods_open(h->daemon.socket, "answers");
        uint32_t number = methods_sequence(&a, 64),
                 slots[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        struct kvd_msg m = MSG(sync, .space = a.space, .sequence = number);

        methods_append(&a, number, 16);
        for (uint32_t n = 1; n <= ARRAY_SIZE(taken); n = n * 2 + 1) {
                m.sync.taken = (struct kvd_slice){taken, n * 4};
                refused(&a, m, EINVAL);
        }
        methods_ask(&a, slots_message(&a, KVD_MSG_cool, number, KVD_COOL_DROP, slots, 16));
        m.sync.taken = (struct kvd_slice){taken, 4};
        refused(&a, m, EINVAL); /* proposed, but not sent yet */
        m.sync.taken.size = 0;
        if (methods_ask(&a, m).sync_reply.changes.size != 16 * sizeof(struct kvd_change))
                die("not all changes were proposed");
        m.sync.taken.size = 17 * 4;
        refused(&a, m, EINVAL);
        for (uint32_t bytes = 1; bytes < 4; bytes++) {
                m.sync.taken.size = bytes;
                refused(&a, m, EINVAL);
        }
        /* part of the changes: three are taken, and values other than 0 and 1 count as no */
        m.sync.taken.size = 7 * 4;
        if (methods_ask(&a, m).sync_reply.changes.size != 9 * sizeof(struct kvd_change))
                die("unanswered changes are not proposed again");
        m.sync.taken.size = 10 * 4;
        refused(&a, m, EINVAL);
        methods_append(&a, number, 1);
}

/* Requests for entries in any state, and for the same entry many times. */
static void wishes(const struct hostile *h) {
        struct asker a = methods_open(h->daemon.socket, "wishes");
        uint32_t number = methods_sequence(&a, 64), same[8192] = {0}, slots[16], out[2] = {0, 16};
        struct random random = {5};
        uint32_t n;

        for (uint32_t i = 0; i < ARRAY_SIZE(slots); i++)
                slots[i] = i;
        if (methods_append(&a, number, 16) != 16)
                die("no blocks");
        for (uint32_t i = 0; i < 2; i++) {
                uint32_t message = i ? KVD_MSG_revive : KVD_MSG_cool;

                refused(&a, slots_message(&a, message, number, 1, out, 2), EINVAL);
                out[1] = UINT32_MAX;
                refused(&a, slots_message(&a, message, number, 1, out, 2), EINVAL);
                refused(&a, slots_message(&a, message, number, 0, slots, 1), EINVAL);
        }
        n = methods_ask(&a, slots_message(&a, KVD_MSG_cool, number, KVD_COOL_SPILL, same, 8192))
                    .cool_reply.cooling;
        if (n != 1)
                die("one entry named 8,192 times counts as %u that cool", n);
        for (uint32_t i = 0; i < 3000; i++) {
                uint32_t message = random_below(&random, 2) ? KVD_MSG_cool : KVD_MSG_revive;
                uint32_t how = 1 +
                               random_below(&random, message == KVD_MSG_cool && i % 100 ? 2 : 3);
                struct kvd_msg m = slots_message(&a, message, number, how,
                                                 slots + random_below(&random, 8),
                                                 1 + random_below(&random, 8)),
                               reply;

                if (raw_call(a.fd, &m, &reply, NULL) != 1)
                        die("the connection has ended");
                if (random_below(&random, 4) == 0)
                        methods_sync(&a, number, random_below(&random, 3), 1);
        }
        methods_sync(&a, number, 1, 50);
}

/* ---- selections, samples, tables of depths --------------------------------------------------- */

static void selections(const struct hostile *h) {
        struct asker a = methods_open(h->daemon.socket, "selections"),
                     b = methods_open(h->daemon.socket, "selections");
        uint32_t number = methods_sequence(&a, 64);
        kvd_ref refs[16], foreign, twice[2];
        struct kvd_msg m;

        if (raw_allocate(a.fd, a.space, 16, refs) != 16 ||
            raw_allocate(b.fd, b.space, 1, &foreign) != 1)
                die("no blocks");
        twice[0] = twice[1] = refs[0];
        m = MSG(critical, .space = a.space, .sequence = number, .op = 1, .blocks = {refs, 8},
                .queries = 4096, .words = 65536, .selected = 1);
        refused(&a, m, EINVAL); /* more bits than blocks have */
        m.critical.blocks.size = 128;
        refused(&a, m, EINVAL);
        m.critical.queries = 1;
        m.critical.words = 0;
        refused(&a, m, EINVAL);
        m.critical.words = 1;
        m.critical.queries = 0;
        refused(&a, m, EINVAL);
        m.critical.queries = 1;
        m.critical.selected = 0;
        refused(&a, m, EINVAL);
        m.critical.selected = UINT32_MAX;
        m.critical.blocks = (struct kvd_slice){&foreign, 8};
        refused(&a, m, ESTALE);
        m.critical.blocks = (struct kvd_slice){twice, 16};
        refused(&a, m, ESTALE);
        m.critical.op = 0;
        refused(&a, m, EINVAL);
        m.critical.op = 2;
        refused(&a, m, ENODATA);
        m.critical.op = 1;
        /* freed, refilled or made private while a worker reads the block */
        for (uint32_t i = 0; i < 300; i++) {
                struct kvd_msg reply;
                kvd_ref block;

                if (raw_allocate(a.fd, a.space, 1, &block) != 1)
                        continue;
                m.critical.blocks = (struct kvd_slice){&block, 8};
                if (raw_call(a.fd, &m, &reply, NULL) != 1)
                        die("the connection has ended");
                if (i % 3 == 0 && i < 90)
                        methods_ask(&a, methods_append_message(&a, number, &block, 1, some_tokens));
                else if (i % 3 == 1)
                        raw_release(a.fd, a.space, &block, 1);
                else
                        usleep(300), raw_release(a.fd, a.space, &block, 1);
        }
        m.critical.blocks = (struct kvd_slice){refs, 8};
        for (int i = 0; i < PATIENCE_MS; i++) {
                struct kvd_msg reply, ask = m;

                ask.critical.op = 2;
                if (raw_call(a.fd, &ask, &reply, NULL) == 1 &&
                    reply.number == KVD_MSG_critical_reply && reply.critical_reply.ready)
                        return;
                if (reply.number == KVD_MSG_error)
                        raw_call(a.fd, &m, &reply, NULL);
                usleep(1000);
        }
        die("no answer to a sound selection");
}

static void samples(const struct hostile *h) {
        struct asker a = methods_open(h->daemon.socket, "samples"),
                     b = methods_open(h->daemon.socket, "samples");
        kvd_ref refs[8], foreign[2], twice[2];
        uint64_t ticket;
        struct kvd_msg m, reply;
        uint32_t waiting = 0;

        if (raw_allocate(a.fd, a.space, 8, refs) != 8 ||
            raw_allocate(b.fd, b.space, 2, foreign) != 2)
                die("no blocks");
        twice[0] = twice[1] = refs[0];
        m = MSG(sample, .space = a.space, .r = 50, .tokens = BT, .blocks = {refs, 8});
        refused(&a, m, EINVAL); /* no second side */
        m.sample.blocks.size = 0;
        refused(&a, m, EINVAL);
        m.sample.blocks = (struct kvd_slice){foreign, 16};
        refused(&a, m, ESTALE);
        m.sample.blocks = (struct kvd_slice){twice, 16};
        refused(&a, m, ESTALE);
        m.sample.blocks = (struct kvd_slice){refs, 16};
        m.sample.tokens = BT + 1;
        refused(&a, m, EINVAL);
        m.sample.tokens = UINT32_MAX;
        refused(&a, m, EINVAL);
        m.sample.tokens = 0;
        refused(&a, m, EINVAL);
        m.sample.tokens = BT;
        ticket = methods_ask(&a, m).sample_reply.ticket;
        /* until the queue is full, while the blocks are freed and reallocated */
        for (uint32_t i = 0; i < 2000; i++) {
                if (raw_call(a.fd, &m, &reply, NULL) != 1)
                        die("the connection has ended");
                waiting += reply.number == KVD_MSG_sample_reply;
                if (i % 50 == 49 && raw_release(a.fd, a.space, refs, 2) == 2 &&
                    raw_allocate(a.fd, a.space, 2, refs) != 2)
                        die("no blocks");
        }
        m = MSG(sample_done, .space = a.space, .ticket = ticket);
        for (uint64_t i = 0; i < 4; i++) {
                m.sample_done.ticket = i ? UINT64_MAX / i : 0;
                raw_call(a.fd, &m, &reply, NULL);
        }
        if (!waiting)
                die("no sample was taken");
}

static void tables_of_depths(const struct hostile *h) {
        struct asker a = methods_open(h->daemon.socket, "depths");
        struct kvd_msg m = MSG(profile, .space = kvd_slice_of(a.name), .op = 4, .def = 1), reply;
        uint8_t depth[101];

        memset(depth, 1, sizeof depth);
        for (uint32_t size = 0; size < 101; size += 50) {
                m.profile.depth = (struct kvd_slice){depth, size};
                refused(&a, m, EINVAL);
        }
        m.profile.depth.size = 101;
        for (uint32_t value = 0; value < 256; value += 85) {
                depth[50] = (uint8_t)value;
                refused(&a, m, EINVAL); /* falls, or is deeper than the model */
        }
        depth[50] = 1;
        m.profile.def = 0;
        refused(&a, m, EINVAL);
        m.profile.def = 2;
        refused(&a, m, EINVAL);
        m.profile.op = 3;
        refused(&a, m, ENODATA);
        m.profile.op = 0;
        refused(&a, m, EINVAL);
        m.profile.op = 4;
        m.profile.def = 1;
        methods_ask(&a, m);
        m.profile.space = kvd_slice_of("nowhere");
        refused(&a, m, ENOENT);
        m.profile.op = 2;
        m.profile.space = kvd_slice_of(a.name);
        reply = methods_ask(&a, m);
        if (reply.profile_reply.def)
                die("a deleted table is still there");
}

static void settings(const struct hostile *h) {
        static const char *const keys[] = {"",
                                           ".",
                                           "memshare.",
                                           "kvreviver.budget ",
                                           "keydiff.budget\n",
                                           "model",
                                           "memshare.tau_step.x",
                                           "hshare.channels",
                                           "kvreviver.rows"};
        static const char *const values[] = {"nan", "-nan", "inf", "-1",  "1e999", "0x",
                                             "",    " ",    "9",   "1 2", "on off"};
        struct asker a = methods_open(h->daemon.socket, "settings");
        struct kvd_msg m, reply;

        for (uint32_t i = 0; i < ARRAY_SIZE(keys); i++)
                for (uint32_t k = 0; k < ARRAY_SIZE(values); k++)
                        refused(&a,
                                MSG(space_set, .space = kvd_slice_of(a.name),
                                    .key = kvd_slice_of(keys[i]), .value = kvd_slice_of(values[k])),
                                EINVAL);
        m = MSG(space_set, .space = kvd_slice_of("nowhere"), .key = kvd_slice_of("memshare"),
                .value = kvd_slice_of("on"));
        refused(&a, m, ENOENT);
        m.space_set.domain = kvd_slice_of("nowhere");
        if (raw_call(a.fd, &m, &reply, NULL) != 1 || reply.number != KVD_MSG_error)
                die("another domain's space was set");
}

const struct attack_row method_attacks[] =
        {{"sequences of other clients", sequences_of_others, 2},
         {"impossible tables, and too many", tables_that_cannot_be, 1},
         {"appends of other clients' blocks", appends, 2},
         {"blocks borrowed without a pin", borrowed_without_a_pin, 1},
         {"steps outside their sequence", steps_outside, 1},
         {"answers to no question", answers_to_nothing, 1},
         {"requests for entries in any state", wishes, 1},
         {"selections that do not fit, or are freed", selections, 2},
         {"samples that do not fit, or are freed", samples, 2},
         {"impossible tables of depths", tables_of_depths, 1},
         {"invalid settings", settings, 1},
         {0}};
