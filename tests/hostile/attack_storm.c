/* SPDX-License-Identifier: Apache-2.0 */

/* Everything at once: random requests of all methods, settings that change beneath them, clients that do not answer. */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/sequence.h"
#include "ipc/base/util.h"
#include "tests/hostile/methods.h"
#include "tests/lib/oracle.h"

#define BT VICTIM_BT
#define MSG(name_, ...) ((struct kvd_msg){.number = KVD_MSG_##name_, .sequence = 1, .name_ = {__VA_ARGS__}})

/* ---- a storm of requests ---------------------------------------------------------------------------------------- */

#define SEQUENCES 6u
#define REFS 64u

struct storm {
        struct asker a;
        struct random random;
        uint32_t sequences[SEQUENCES]; /* some long closed */
        uint32_t n_changes[SEQUENCES]; /* of the last answer */
        kvd_ref refs[REFS];            /* that were ours at some time */
        uint32_t answered, refused;
};

static uint32_t below(struct storm *s, uint32_t n) {
        return random_below(&s->random, n);
}

/* Small and plausible, mostly. */
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

/* As a client should, but for what it says they hold. */
static struct kvd_msg append_fresh(struct storm *s, uint32_t sequence) {
        static uint32_t tokens[4 * BT];
        static kvd_ref refs[4];
        uint32_t n = raw_allocate(s->a.fd, s->a.space, 1 + below(s, 4), refs);

        memcpy(s->refs + below(s, REFS - 4), refs, n * sizeof *refs);
        return MSG(append, .space = s->a.space, .sequence = sequence, .own = 1, .blocks = {refs, n * 8},
                   .tokens = some_numbers(s, tokens, n * BT - (n && below(s, 6) == 0), 3));
}

static struct kvd_msg wish(struct storm *s, uint32_t space, uint32_t sequence) {
        static uint32_t numbers[8192];
        static kvd_ref refs[64];
        uint32_t n = below(s, 12), k = 1 + below(s, 16);

        switch (below(s, 12)) {
        case 0:
                return MSG(table, .space = space, .op = 1 + below(s, 40) / 39, .sequence = sequence,
                           .max_blocks = 1 + number(s, 200));
        case 1:
                return append_fresh(s, sequence);
        case 2:
                return append_fresh(s, sequence);
        case 3:
                return MSG(append, .space = space, .sequence = sequence, .own = below(s, 5) != 0,
                           .blocks = some_refs(s, refs, n ? 1 : 8),
                           .tokens = some_numbers(s, numbers, n ? BT : below(s, 9) * BT, 6));
        case 4:
                return MSG(share, .space = space, .sequence = sequence, .first = number(s, 100),
                           .tokens = number(s, 40));
        case 5:
        case 6:
                return MSG(cool, .space = space, .sequence = sequence, .how = 1 + below(s, 20) * 11 / 100,
                           .slots = some_numbers(s, numbers, k, 12));
        case 7:
                return MSG(revive, .space = space, .sequence = sequence, .how = 1 + below(s, 3),
                           .slots = some_numbers(s, numbers, k, 12));
        case 8:
                return MSG(critical, .space = space, .sequence = sequence, .op = 1 + below(s, 2),
                           .blocks = some_refs(s, refs, 2), .queries = 1 + below(s, 4), .words = 1 + below(s, 4),
                           .selected = 1 + below(s, 4));
        case 9:
                return MSG(sample, .space = space, .r = below(s, 101), .tokens = number(s, 9),
                           .blocks = some_refs(s, refs, 4));
        case 10:
                return below(s, 2) ? MSG(release, .space = space, .blocks = some_refs(s, refs, 3)) :
                                     MSG(seal, .space = space, .blocks = some_refs(s, refs, 1),
                                         .tokens = some_numbers(s, numbers, BT, 3));
        default:
                return MSG(profile, .space = kvd_slice_of(s->a.name), .op = 1 + below(s, 3));
        }
}

static void one_setting(struct storm *s) {
        static const char *const settings[][2] = {
                {"kvreviver", "off"}, {"kvreviver", "on"}, {"kvreviver.spill", "off"}, {"kvreviver.spill", "on"},
                {"kvreviver.drop", "on"}, {"kvreviver.epoch", "1"}, {"kvreviver.epoch", "2048"},
                {"kvreviver.rows", "1"}, {"kvreviver.rows", "8"}, {"kvreviver.vague", "0"}, {"kvreviver.vague", "1"},
                {"kvreviver.budget", "0"}, {"kvreviver.budget", "0.3"}, {"kvreviver.key_mode", "unsigned"},
                {"kvreviver.hash", "uniform"}, {"kvreviver.delete", "estimate"}, {"kvreviver.max_load", "0"},
                {"kvreviver.max_load", "1e9"}, {"memshare", "off"}, {"memshare", "on"}, {"memshare.cross_seq", "on"},
                {"memshare.tau_block", "1e9"}, {"memshare.profile", "paper"}, {"memshare.profile", "serve"},
                {"pressure.high", "0.01"}, {"pressure.low", "0"}, {"pressure.high", "0.9"}, {"policy", "priority"},
                {"policy", "lru"}, {"hshare", "off"}, {"hshare", "on"}, {"keydiff.sink_blocks", "65536"},
                {"keydiff.sink_blocks", "0"}, {"bicache.sim", "flat"}, {"bicache.b_mode", "mean_b_floor"},
                {"model.rope_theta", "1e12"}, {"model.rope_dims", "7"}, {"kvreviver.profile", "paper"},
                {"kvreviver.profile", "serve"}, {"max_blocks", "40"}, {"max_blocks", "400"}};
        uint32_t i = below(s, ARRAY_SIZE(settings));

        methods_set(&s->a, settings[i][0], settings[i][1]);
}

/* Like one who listens, mostly: otherwise sequences would never change. */
static void answer(struct storm *s, uint32_t i) {
        uint32_t taken[KVD_SYNC_CHANGES], n = below(s, 10) ? s->n_changes[i] : below(s, KVD_SYNC_CHANGES);
        struct kvd_msg m, reply;

        m = MSG(sync, .space = s->a.space, .sequence = s->sequences[i], .taken = some_numbers(s, taken, n, 2));
        if (below(s, 4))
                for (uint32_t k = 0; k < n; k++)
                        taken[k] = 1;
        if (raw_call(s->a.fd, &m, &reply, NULL) != 1)
                die("the connection has ended");
        s->n_changes[i] = reply.number == KVD_MSG_sync_reply ?
                                  reply.sync_reply.changes.size / (uint32_t)sizeof(struct kvd_change) : 0;
}

static void one_request(struct storm *s) {
        uint32_t i = below(s, SEQUENCES), number_of_new;
        struct kvd_msg m, reply;

        if (below(s, 5) == 0)
                raw_allocate(s->a.fd, s->a.space, 1 + below(s, 3), s->refs + below(s, REFS - 3));
        if (below(s, 6) == 0)
                answer(s, i);
        m = wish(s, s->a.space, s->sequences[i]);
        if (raw_call(s->a.fd, &m, &reply, NULL) != 1)
                die("message %u ended the connection", m.number);
        s->answered += reply.number != KVD_MSG_error;
        s->refused += reply.number == KVD_MSG_error;
        if (reply.number != KVD_MSG_table_reply || m.table.op != 1)
                return;
        number_of_new = reply.table_reply.sequence;
        m = MSG(table, .space = s->a.space, .op = 2, .sequence = s->sequences[i]);
        if (below(s, 20))
                raw_call(s->a.fd, &m, &reply, NULL);
        s->n_changes[i] = 0;
        s->sequences[i] = number_of_new;
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

static void storm(const struct hostile *h, const char *name, uint64_t seed, uint32_t requests) {
        struct storm s = {.a = methods_open(h, name), .random = {seed}};

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
        printf("  seed %llu: %u requests were answered, %u refused\n", (unsigned long long)seed, s.answered, s.refused);
}

/* Four at once, three of them in one space. SEED in the environment makes them others. */
static void storms(const struct hostile *h) {
        uint64_t seed = getenv("SEED") ? strtoull(getenv("SEED"), NULL, 0) : 100;
        int status;

        for (uint64_t i = 0; i < 4; i++)
                if (fork() == 0) {
                        storm(h, i < 3 ? "storm" : "storm2", seed + i, 12000);
                        fflush(stdout);
                        _exit(0);
                }
        for (int i = 0; i < 4; i++)
                if (wait(&status) < 0 || status)
                        die("a storm ended with %#x", status);
}

/* ---- many small sketches ---------------------------------------------------------------------------------------- */

/* One for every block: they are the daemon's descriptors, which are for everybody. */
static void a_sketch_for_every_block(const struct hostile *h) {
        struct asker a = methods_open(h, "sketches");
        uint32_t slots[64], before = daemon_fds(&h->daemon), most = before;

        methods_set(&a, "kvreviver.epoch", "1");
        for (uint32_t i = 0; i < 64; i++)
                slots[i] = i;
        for (uint32_t k = 0; k < 40; k++) {
                uint32_t q = methods_sequence(&a, 64), n = methods_append(&a, q, 60);

                methods_ask(&a, MSG(cool, .space = a.space, .sequence = q, .how = KVD_COOL_VAGUE,
                                    .slots = {slots, n * 4}));
                methods_sync(&a, q, 1, 20);
                most = MAX(most, daemon_fds(&h->daemon));
        }
        if (most > before + 2048)
                die("the daemon had %u descriptors and has %u", before, most);
        printf("  descriptors of the daemon: %u, at most %u\n", before, most);
}

/* ---- clients that do not listen --------------------------------------------------------------------------------- */

static void press(const struct asker *a) {
        methods_set(a, "pressure.high", "0.01");
        methods_set(a, "pressure.low", "0");
        methods_set(a, "kvreviver.budget", "0");
        methods_set(a, "keydiff.sink_blocks", "0");
        methods_set(a, "memshare.recent_guard", "0");
}

/* Relief proposes, nobody answers: what was proposed stays, and the sequence is as it was. */
static void never_answers(const struct hostile *h) {
        struct asker a = methods_open(h, "deaf"), b = methods_open(h, "deaf");
        uint32_t q = methods_sequence(&a, 200), other;

        press(&a);
        for (uint32_t i = 0; i < 10; i++) {
                methods_append(&a, q, 10);
                usleep(20000);
        }
        other = methods_sequence(&b, 64); /* who listens is served */
        for (uint32_t i = 0; i < 20; i++) {
                methods_append(&b, other, 2);
                methods_sync(&b, other, 1, 2);
        }
        methods_ask(&b, MSG(table, .space = b.space, .op = 2, .sequence = other));
}

/* Stopped while changes are on their way to it, then killed. */
static void stopped_with_changes(const struct hostile *h) {
        pid_t pids[4];
        int ready[2], status;
        char byte;

        if (pipe(ready) < 0)
                die("pipe");
        for (uint32_t i = 0; i < ARRAY_SIZE(pids); i++) {
                pids[i] = fork();
                if (pids[i] == 0) {
                        struct asker a = methods_open(h, "halted");
                        uint32_t q = methods_sequence(&a, 64), slots[8] = {0, 1, 2, 3, 4, 5, 6, 7};

                        methods_append(&a, q, 16);
                        methods_ask(&a, MSG(cool, .space = a.space, .sequence = q, .how = KVD_COOL_VAGUE,
                                            .slots = {slots, sizeof slots}));
                        methods_ask(&a, MSG(cool, .space = a.space, .sequence = q, .how = KVD_COOL_DROP,
                                            .slots = {slots, sizeof slots}));
                        if (write(ready[1], "r", 1) != 1)
                                die("pipe");
                        raise(SIGSTOP);
                        _exit(0);
                }
                if (read(ready[0], &byte, 1) != 1 || waitpid(pids[i], &status, WUNTRACED) != pids[i])
                        die("a client did not stop");
        }
        usleep(200000);
        for (uint32_t i = 0; i < ARRAY_SIZE(pids); i++) {
                kill(pids[i], i % 2 ? SIGKILL : SIGCONT);
                waitpid(pids[i], &status, 0);
        }
}

/* What it says of its attention is noise, all the time; pins, too. */
static void noise_about_use(const struct hostile *h) {
        struct kvd_msg request = victim_space_message(), reply;
        struct asker a = methods_open(h, "noise");
        struct random random = {99};
        uint32_t q = methods_sequence(&a, 200), second;
        const struct kvd_index *index;
        struct kvd_fds fds;
        uint32_t *words;
        uint64_t bytes, use;

        press(&a);
        request.space.name = kvd_slice_of(a.name);
        second = raw_attach(h->daemon.socket);
        if (raw_call((int)second, &request, &reply, &fds) != 1 || fds.n != 2)
                die("the space cannot be opened");
        bytes = reply.space_reply.pin_bytes;
        words = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds.fd[1], 0);
        index = mmap(NULL, reply.space_reply.index_bytes, PROT_READ, MAP_SHARED, fds.fd[0], 0);
        if (words == MAP_FAILED || index == MAP_FAILED)
                die("mmap");
        use = kvd_use_off(index->capacity) / 4;
        methods_set(&a, "policy", "priority");
        for (uint32_t i = 0; i < 30; i++) {
                methods_append(&a, q, 5);
                for (uint32_t k = 0; k < 20000; k++)
                        __atomic_store_n(&words[use + random_below(&random, (uint32_t)(bytes / 4 - use))],
                                         random_below(&random, UINT32_MAX), __ATOMIC_RELAXED);
                methods_sync(&a, q, random_below(&random, 2), 2);
        }
}

/* ---- memory that is only read ----------------------------------------------------------------------------------- */

static void refused(bool done, const char *what) {
        if (done)
                die("%s was not refused", what);
}

/* By a user who is not the daemon's: the daemon's own may do as he likes with its processes anyway. */
static void write_summaries(const struct hostile *h) {
        struct asker a = methods_open(h, "summaries");
        struct kvd_msg request = MSG(summaries, .space = a.space), reply;
        struct kvd_fds fds;
        char path[64];
        uint64_t bytes;

        if (raw_call(a.fd, &request, &reply, &fds) != 1 || reply.number != KVD_MSG_summaries_reply || fds.n != 1)
                die("no summaries");
        bytes = reply.summaries_reply.bytes;
        refused(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds.fd[0], 0) != MAP_FAILED, "mapping to write");
        refused(pwrite(fds.fd[0], "x", 1, 0) == 1, "writing the summaries");
        refused(ftruncate(fds.fd[0], 0) == 0, "shrinking the summaries");
        refused(fallocate(fds.fd[0], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == 0, "punching a hole");
        if (mmap(NULL, bytes, PROT_READ, MAP_SHARED, fds.fd[0], 0) == MAP_FAILED)
                die("the summaries cannot be read");
        request.summaries.space = 1234;
        raw_expect_refusal(a.fd, &request, EBADF);
        if (getuid() == 0 && (setresgid(65534, 65534, 65534) < 0 || setresuid(65534, 65534, 65534) < 0))
                die("cannot become nobody");
        if (getuid() != 65534)
                return;
        snprintf(path, sizeof path, "/proc/self/fd/%d", fds.fd[0]);
        refused(open(path, O_RDWR) >= 0, "opening the summaries again, to write");
}

const struct attack_row storm_attacks[] = {
        {"storms of requests about sequences", storms, 8},
        {"a sketch for every block", a_sketch_for_every_block, 1},
        {"a client that never answers proposals", never_answers, 2},
        {"clients stopped with changes on the way", stopped_with_changes, 4},
        {"noise about what is used", noise_about_use, 2},
        {"writing the summaries", write_summaries, 1},
        {0}};
