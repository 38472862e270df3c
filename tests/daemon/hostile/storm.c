/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Random requests, most of them plausible, about existing or closed sequences, while settings
 * change.
 */

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/sequence.h"
#include "ipc/base/util.h"
#include "tests/daemon/hostile/methods.h"
#include "tests/lib/oracle.h"

#define BT VICTIM_BT
#define MSG(name_, ...) \
        ((struct kvd_msg){.number = KVD_MSG_##name_, .serial = 1, .name_ = {__VA_ARGS__}})

#define SEQUENCES 6u
#define REFS 64u

struct storm {
        struct asker a;
        struct random random;
        uint32_t sequences[SEQUENCES]; /* some of them closed long ago */
        uint32_t n_changes[SEQUENCES]; /* in the last reply */
        uint32_t n_entries[SEQUENCES];
        kvd_ref refs[REFS]; /* that the client once filled */
        uint32_t answered, refused;
};

static uint32_t below(struct storm *s, uint32_t n) {
        return random_below(&s->random, n);
}

/* Mostly a small, plausible number. */
static uint32_t number(struct storm *s, uint32_t usual) {
        return below(s, 20) ? below(s, usual) : below(s, UINT32_MAX);
}

static struct kvd_slice some_refs(struct storm *s, kvd_ref *to, uint32_t most) {
        uint32_t n = 1 + below(s, most), first = below(s, REFS);

        for (uint32_t i = 0; i < n; i++)
                to[i] = s->refs[(first + i) % REFS] + (below(s, 300) == 0);
        return (struct kvd_slice){to, n * 8};
}

static struct kvd_slice some_numbers(struct storm *s, uint32_t *to, uint32_t n, uint32_t usual) {
        for (uint32_t i = 0; i < n; i++)
                to[i] = below(s, usual) + (below(s, 500) == 0) * UINT32_MAX / 2;
        return (struct kvd_slice){to, n * 4};
}

/* Releases the blocks that it overwrites, or all if none could be allocated. */
static uint32_t fresh_blocks(struct storm *s, uint32_t n, kvd_ref *ret) {
        uint32_t got = raw_allocate(s->a.fd, s->a.space, n, ret), first = below(s, REFS - 4);

        raw_release(s->a.fd, s->a.space, got ? s->refs + first : s->refs, got ? got : REFS);
        memcpy(s->refs + first, ret, got * sizeof *ret);
        return got;
}

/* A mostly correct append, with random tokens. */
static struct kvd_msg append_fresh(struct storm *s, uint32_t sequence) {
        static uint32_t tokens[4 * BT];
        static kvd_ref refs[4];
        uint32_t n = fresh_blocks(s, 1 + below(s, 4), refs);

        return MSG(append, .space = s->a.space, .sequence = sequence, .own = 1,
                   .blocks = {refs, n * 8},
                   .tokens = some_numbers(s, tokens, n * BT - (n && below(s, 6) == 0), 3));
}

static struct kvd_msg growth(struct storm *s, uint32_t space, uint32_t sequence) {
        static uint32_t tokens[9 * BT];
        static kvd_ref refs[8];

        if (below(s, 60) == 0)
                return MSG(table, .space = space, .op = 1 + below(s, 2), .sequence = sequence,
                           .max_blocks = 1 + number(s, 200));
        if (below(s, 10))
                return append_fresh(s, sequence);
        return MSG(append, .space = space, .sequence = sequence, .own = below(s, 5) != 0,
                   .blocks = some_refs(s, refs, 8),
                   .tokens = some_numbers(s, tokens, below(s, 9) * BT, 6));
}

static struct kvd_msg wish(struct storm *s, uint32_t i) {
        uint32_t space = s->a.space, sequence = s->sequences[i], n = s->n_entries[i] + 1,
                 k = 1 + below(s, 16);
        static uint32_t numbers[16];
        static kvd_ref refs[4];

        switch (below(s, 13)) {
        case 0 ... 3: return growth(s, space, sequence);
        case 4:
                return MSG(share, .space = space, .sequence = sequence, .first = number(s, n * BT),
                           .tokens = 1 + number(s, 4 * BT));
        case 5:
        case 6:
                return MSG(cool, .space = space, .sequence = sequence,
                           .how = 1 + below(s, 20) * 11 / 100,
                           .slots = some_numbers(s, numbers, k, n));
        case 7:
        case 8:
                return MSG(revive, .space = space, .sequence = sequence, .how = 1 + below(s, 3),
                           .slots = some_numbers(s, numbers, k, n));
        case 9:
                return MSG(critical, .space = space, .sequence = sequence, .op = 1 + below(s, 2),
                           .blocks = some_refs(s, refs, 2), .queries = 1 + below(s, 4),
                           .words = 1 + below(s, 4), .selected = 1 + below(s, 4));
        case 10:
                return MSG(compact, .space = space, .sequence = sequence, .first = number(s, n),
                           .entries = number(s, n + 1), .keep = number(s, n * BT),
                           .scores = below(s, 2) ? some_refs(s, refs, 3) : (struct kvd_slice){0});
        case 11:
                if (below(s, 2))
                        return MSG(profile, .space = kvd_slice_of(s->a.name),
                                   .op = 1 + below(s, 3));
                return MSG(sample, .space = space, .r = below(s, 101), .tokens = 1 + number(s, 9),
                           .blocks = some_refs(s, refs, 4));
        default:
                if (below(s, 2))
                        return MSG(release, .space = space, .blocks = some_refs(s, refs, 3));
                return MSG(seal, .space = space, .blocks = some_refs(s, refs, 1),
                           .parent = below(s, 2) ? refs[0] : 0,
                           .tokens = some_numbers(s, numbers, BT, 3));
        }
}

static void one_setting(struct storm *s) {
        static const char *const settings[][2] = {{"kvreviver", "off"},
                                                  {"kvreviver", "on"},
                                                  {"kvreviver.spill", "off"},
                                                  {"kvreviver.spill", "on"},
                                                  {"kvreviver.drop", "on"},
                                                  {"kvreviver.epoch", "1"},
                                                  {"kvreviver.epoch", "2048"},
                                                  {"kvreviver.rows", "1"},
                                                  {"kvreviver.rows", "8"},
                                                  {"kvreviver.vague", "0"},
                                                  {"kvreviver.vague", "1"},
                                                  {"kvreviver.budget", "0"},
                                                  {"kvreviver.budget", "0.3"},
                                                  {"kvreviver.key_mode", "unsigned"},
                                                  {"kvreviver.hash", "uniform"},
                                                  {"kvreviver.delete", "estimate"},
                                                  {"kvreviver.max_load", "0"},
                                                  {"kvreviver.max_load", "1e9"},
                                                  {"memshare", "off"},
                                                  {"memshare", "on"},
                                                  {"memshare.cross_seq", "on"},
                                                  {"memshare.tau_block", "1e9"},
                                                  {"memshare.profile", "paper"},
                                                  {"memshare.profile", "serve"},
                                                  {"pressure.high", "0.01"},
                                                  {"pressure.low", "0"},
                                                  {"pressure.high", "0.9"},
                                                  {"policy", "priority"},
                                                  {"policy", "lru"},
                                                  {"hshare", "off"},
                                                  {"hshare", "on"},
                                                  {"keydiff.sink_blocks", "65536"},
                                                  {"keydiff.sink_blocks", "0"},
                                                  {"bicache.sim", "flat"},
                                                  {"bicache.b_mode", "mean_b_floor"},
                                                  {"model.rope_theta", "1e12"},
                                                  {"model.rope_dims", "7"},
                                                  {"kvreviver.profile", "paper"},
                                                  {"kvreviver.profile", "serve"},
                                                  {"keydiff", "on"},
                                                  {"keydiff", "on"},
                                                  {"keydiff", "off"},
                                                  {"memshare.calibrate", "0.01"},
                                                  {"memshare.calibrate", "0"},
                                                  {"max_blocks", "40"},
                                                  {"max_blocks", "400"}};
        uint32_t i = below(s, ARRAY_SIZE(settings));

        methods_set(&s->a, settings[i][0], settings[i][1]);
}

/* Usually answers as a client should. Otherwise sequences would never change. */
static void answer(struct storm *s, uint32_t i) {
        uint32_t taken[KVD_SYNC_CHANGES],
                n = below(s, 10) ? s->n_changes[i] : below(s, KVD_SYNC_CHANGES);
        struct kvd_msg m, reply;

        m = MSG(sync, .space = s->a.space, .sequence = s->sequences[i],
                .taken = some_numbers(s, taken, n, 2));
        if (below(s, 4))
                for (uint32_t k = 0; k < n; k++)
                        taken[k] = 1;
        if (raw_call(s->a.fd, &m, &reply, NULL) != 1)
                die("the connection has ended");
        s->n_changes[i] = reply.number == KVD_MSG_sync_reply ?
                                  reply.sync_reply.changes.size /
                                          (uint32_t)sizeof(struct kvd_change) :
                                  0;
}

static void begin_anew(struct storm *s, uint32_t i, uint32_t sequence) {
        struct kvd_msg close = MSG(table, .space = s->a.space, .op = 2,
                                   .sequence = s->sequences[i]),
                       reply;

        raw_call(s->a.fd, &close, &reply, NULL);
        s->sequences[i] = sequence;
        s->n_changes[i] = s->n_entries[i] = 0;
}

static void one_request(struct storm *s) {
        uint32_t i = below(s, SEQUENCES);
        struct kvd_msg m, reply;
        kvd_ref fresh[4];

        if (below(s, 5) == 0)
                fresh_blocks(s, 1 + below(s, 4), fresh);
        if (below(s, 4) == 0)
                answer(s, i);
        m = wish(s, i);
        if (raw_call(s->a.fd, &m, &reply, NULL) != 1)
                die("message %u ended the connection", m.number);
        s->answered += reply.number != KVD_MSG_error;
        s->refused += reply.number == KVD_MSG_error;
        if (reply.number == KVD_MSG_append_reply)
                s->n_entries[i] = reply.append_reply.first + m.append.blocks.size / 8;
        if (reply.number == KVD_MSG_table_reply && m.table.op == 1)
                begin_anew(s, i, reply.table_reply.sequence);
        else if (reply.number == KVD_MSG_table_reply)
                begin_anew(s, i, methods_sequence(&s->a, 64));
}

static void check_now(struct storm *s) {
        struct kvd_msg reply = {0};
        char first[256];

        do {
                reply = methods_ask(&s->a, MSG(check, .space = kvd_slice_of(s->a.name),
                                               .cursor = reply.check_reply.next));
                if (reply.check_reply.broken)
                        die("%s", kvd_slice_copy(reply.check_reply.first, first, sizeof first));
        } while (reply.check_reply.next);
}

void methods_storm(const char *socket, const char *space, uint64_t seed, uint32_t requests) {
        struct storm s = {.a = methods_open(socket, space), .random = {seed}};

        for (uint32_t i = 0; i < SEQUENCES; i++)
                s.sequences[i] = methods_sequence(&s.a, 64);
        for (uint32_t i = 0; i < requests; i++) {
                one_request(&s);
                if (below(&s, 200) == 0)
                        one_setting(&s);
                if (below(&s, 1000) == 0)
                        usleep(20000);
                if (below(&s, 2000) == 0)
                        check_now(&s);
        }
        printf("  seed %llu: %u requests were answered, %u refused\n", (unsigned long long)seed,
               s.answered, s.refused);
}
