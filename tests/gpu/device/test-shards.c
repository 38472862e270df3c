/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A pool on 1, 2 or 4 GPUs. An engine has a process (a rank) for each of them, which maps and writes
 * its shard of every block. Rank 0 allocates the blocks and publishes them. The ranks of another
 * engine find them, and each reads its own shard.
 */

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "ipc/base/layout.h"
#include "ipc/base/util.h"
#include "tests/gpu/device/peer.h"
#include "tests/lib/plays.h"

#define BLOCKS 3u
#define CHAIN 5u
#define MOST 4u /* GPUs */

static struct instance d;
static uint32_t n_gpus;

/* What the processes of an engine tell each other. */
static struct shared {
        uint32_t ids[BLOCKS];
        struct kvd_written written[MOST];
        _Atomic pid_t child; /* that a rank has forked */
} * shared;

/* ---- a rank ---------------------------------------------------------------------------------- */

static uint32_t rank;                       /* of the process that is started next */
static bool allocates = true, seals = true; /* rank 0 does that */
static uint32_t forks = MOST;               /* this rank does that */

static void open_shard(struct side *s, const struct role *role, const char *team,
                       const struct kvd_space_options *options) {
        const struct kvd_geometry divided = {.block_tokens = BT,
                                             .block_bytes = n_gpus * BLOCK_BYTES,
                                             .layout = "test",
                                             .vocab = 1u << 24};

        *s = (struct side){0};
        must(kvd_open(role->socket, &s->kvd));
        must(kvd_join(s->kvd, (const uint8_t *)team));
        must(kvd_space_open(s->kvd, "s", &divided, options, &s->space));
        must(kvd_space_place(s->space, &s->place));
}

static void attach(struct side *s, const struct role *role, const char *team) {
        const struct kvd_space_options options = {.shard = rank + 1};
        const char *why = "";
        struct side plain;

        open_shard(&plain, role, team, &options);
        plain.cuda = kvd_cuda_load(&why);
        if (plain.place.shard != rank || plain.place.shards != n_gpus ||
            plain.place.device != (int32_t)(n_gpus - 1 - rank))
                die("rank %u has shard %u of %u, on GPU %d", rank, plain.place.shard,
                    plain.place.shards, plain.place.device);
        side_join(s, &plain);
}

/* Each rank's words are those of a chain of its own. */
static uint32_t own_chain(void) {
        return CHAIN + 100 * rank;
}

static void fill(struct side *s) {
        struct kvd_space_memory memory;

        must(kvd_space_memory(s->space, &memory));
        if (memory.block_bytes != BLOCK_BYTES)
                die("a shard has %llu bytes", (unsigned long long)memory.block_bytes);
        for (uint32_t i = 0; i < BLOCKS; i++) {
                struct kvd_block shard = {.data = memory.base +
                                                  shared->ids[i] * memory.block_bytes};

                if (shared->ids[i] >= memory.mapped)
                        die("block %u is not mapped", shared->ids[i]);
                put_fill(s, &shard, word_of(own_chain(), i));
        }
}

static void allocate(struct side *s, struct kvd_block *blocks) {
        alloc(s, BLOCKS, blocks);
        for (uint32_t i = 0; i < BLOCKS; i++)
                shared->ids[i] = blocks[i].id;
}

static void seal(struct side *s, struct kvd_block *blocks, struct kvd_pin *pin) {
        uint32_t tokens[BLOCKS * BT], ids[BLOCKS];

        make_tokens(CHAIN, BLOCKS, tokens);
        if (n_gpus > 1 &&
            kvd_seal_on(s->space, pin, BLOCKS, blocks, tokens, BLOCKS * BT, s->stream) != -ENOTSUP)
                die("one stream publishes what others write");
        must(kvd_seal_written(s->space, pin, BLOCKS, blocks, tokens, BLOCKS * BT, ids,
                              shared->written, n_gpus));
}

/* The child has the GPU's descriptors, so that the rank's queued work may continue. */
static void fork_child(void) {
        pid_t pid = fork();

        if (pid < 0)
                die("fork: %s", strerror(errno));
        if (pid == 0) {
                close(STDOUT_FILENO);
                close(STDERR_FILENO);
                alarm(3 * PATIENCE_MS / 1000);
                shared->child = getpid();
                for (;;)
                        pause();
        }
        WAIT_UNTIL(shared->child);
}

/* 'a': rank 0 has allocated; 'f': fill; 'w': the stream has the work; 's': rank 0 seals; 'e' */
static void writer(struct role *role) {
        struct kvd_block blocks[BLOCKS];
        struct kvd_pin pin = {0};
        struct side s;

        attach(&s, role, "the writers' team");
        if (rank == 0 && allocates)
                allocate(&s, blocks);
        say(role, 'a');
        hear(role, 'f');
        fill(&s);
        must(kvd_write_on(s.space, s.stream, &shared->written[rank]));
        if (rank == forks)
                fork_child();
        say(role, 'w');
        if (rank == 0 && seals) {
                hear(role, 's');
                seal(&s, blocks, &pin);
                say(role, 's');
        }
        hear(role, 'e');
        kvd_unpin(s.space, &pin);
        side_close(&s);
}

/* A process that sees no GPU does what else rank 0 does. */
static void scheduler(struct role *role) {
        const struct kvd_space_options options = {.flags = KVD_SPACE_INDEX_ONLY};
        struct kvd_block blocks[BLOCKS];
        struct kvd_pin pin = {0};
        struct side s;

        open_shard(&s, role, "the writers' team", &options);
        if (s.place.memory != KVD_MEMORY_NONE || s.place.shards != n_gpus)
                die("a scheduler has memory %u of %u GPUs", s.place.memory, s.place.shards);
        allocate(&s, blocks);
        if (kvd_free_on(s.space, BLOCKS, blocks, NULL) != -ENOTSUP)
                die("a stream frees without a GPU");
        say(role, 'a');
        hear(role, 's');
        if (n_gpus == 1 &&
            kvd_seal_on(s.space, &pin, BLOCKS, blocks, NULL, BLOCKS * BT, NULL) != -ENOTSUP)
                die("a stream publishes without a GPU");
        seal(&s, blocks, &pin);
        if (kvd_unpin_on(s.space, &pin, NULL) != -ENOTSUP)
                die("a stream releases without a GPU");
        say(role, 's');
        hear(role, 'e');
        kvd_unpin(s.space, &pin);
        side_close(&s);
}

/* What a stream of it writes is in the pool of a daemon that is gone. 'k': that was killed */
static void survivor(struct role *role) {
        struct kvd_written written;
        struct side s;

        attach(&s, role, "the survivors' team");
        must(kvd_write_on(s.space, s.stream, &written));
        say(role, 'a');
        hear(role, 'k');
        WAIT_UNTIL(kvd_write_on(s.space, s.stream, &written) == -ESTALE);
        must(kvd_catch_up(s.space));
        must(kvd_write_on(s.space, s.stream, &written));
        say(role, 'y');
        hear(role, 'e');
        side_close(&s);
}

static const char *keepers_team = "the writers' team";

static uint32_t keeps = BLOCKS;
#define KEEPS_MOST 64u

/* Such a process that holds blocks. 'a': it has them; 'f': frees them; 'e' */
static void keeper(struct role *role) {
        const struct kvd_space_options options = {.flags = KVD_SPACE_INDEX_ONLY};
        struct kvd_block blocks[KEEPS_MOST];
        struct side s;

        open_shard(&s, role, keepers_team, &options);
        if (keeps > KEEPS_MOST)
                die("%u blocks to keep", keeps);
        alloc(&s, keeps, blocks);
        for (uint32_t i = 0; i < MIN(keeps, BLOCKS); i++)
                shared->ids[i] = blocks[i].id;
        say(role, 'a');
        hear(role, 'f');
        kvd_free(s.space, keeps, blocks);
        say(role, 'f');
        hear(role, 'e');
        side_close(&s);
}

/* Another engine than the writers'. 'y': its words are right; 'n': they were never written. */
static void reader(struct role *role) {
        uint32_t ids[BLOCKS], n;
        struct kvd_pin pin = {0};
        struct side s;
        int r;

        attach(&s, role, "the readers' team");
        n = find(&s, CHAIN, BLOCKS, &pin, ids);
        say(role, n == BLOCKS ? 'p' : '0');
        if (n == BLOCKS) {
                hear(role, 'r');
                must(kvd_wait_on(s.space, &pin, s.stream));
                put_read(&s, &pin, ids, BLOCKS);
                say(role, 'q');
                sync_stream(&s);
                r = kvd_check_pin(s.space, &pin);
                say(role, r == -EIO                            ? 'n' :
                          r < 0                                ? '?' :
                          wrong_words(&s, own_chain(), BLOCKS) ? 'x' :
                                                                 'y');
        }
        hear(role, 'e');
        kvd_unpin(s.space, &pin);
        side_close(&s);
}

/* ---- engines --------------------------------------------------------------------------------- */

struct engine {
        struct peer ranks[MOST];
        uint32_t gone; /* rank that was killed; MOST: none */
};

static const char *others; /* a setting of the stand-in for other ranks; NULL: none */

/* special: the same for one rank */
static struct engine start(void (*play)(struct role *), uint32_t which, const char *special) {
        struct engine engine = {.gone = MOST};

        for (rank = 0; rank < n_gpus; rank++)
                engine.ranks[rank] =
                        peer_start(play, d.socket,
                                   (const char *const[]){rank == which ? special : others, NULL});
        return engine;
}

static void cue_all(struct engine *e, char what) {
        for (uint32_t i = 0; i < n_gpus; i++)
                if (i != e->gone)
                        cue(&e->ranks[i], what);
}

static void expect_all(struct engine *e, char what) {
        for (uint32_t i = 0; i < n_gpus; i++)
                if (i != e->gone)
                        expect(&e->ranks[i], what);
}

static void kill_rank(struct engine *e, uint32_t which) {
        peer_kill(&e->ranks[which]);
        e->gone = which;
}

static void end(struct engine *e) {
        cue_all(e, 'e');
        for (uint32_t i = 0; i < n_gpus; i++)
                if (i != e->gone)
                        peer_end(&e->ranks[i]);
}

/* Up to the seal, with which the streams need not be done. */
static struct engine start_writers(uint32_t which, const char *special) {
        struct engine e = start(writer, which, special);

        expect_all(&e, 'a');
        cue_all(&e, 'f');
        expect_all(&e, 'w');
        cue(&e.ranks[0], 's');
        expect(&e.ranks[0], 's');
        return e;
}

static void expect_right(void) {
        struct engine readers = start(reader, 0, NULL);

        expect_all(&readers, 'p');
        cue_all(&readers, 'r');
        expect_all(&readers, 'q');
        expect_all(&readers, 'y');
        end(&readers);
}

static void expect_nothing(void) {
        struct engine readers = start(reader, 0, NULL);

        expect_all(&readers, '0');
        end(&readers);
}

/* ---- plays ----------------------------------------------------------------------------------- */

/* Ranks use the GPUs in another order than the driver numbers them. */
static const char *device_setting(void) {
        static char text[64];
        int at = sprintf(text, "daemon.device=");

        for (uint32_t i = n_gpus; i > 0; i--)
                at += sprintf(text + at, "%s%u", i == n_gpus ? "" : ",", i - 1);
        return text;
}

static void start_on_gpus(void) {
        start_daemon(&d, (const char *const[]){device_setting(), NULL});
}

static void a_scheduler_sees_no_gpu(void) {
        const char *const blind[] = {"FAKECUDA_DEVICES=0", NULL};
        struct engine hands;
        struct peer head;

        start_on_gpus();
        allocates = seals = false;
        hands = start(writer, 0, "FAKECUDA_SLOW=set:100");
        expect_all(&hands, 'a');
        head = peer_start(scheduler, d.socket, blind);
        expect(&head, 'a');
        cue_all(&hands, 'f');
        expect_all(&hands, 'w');
        cue(&head, 's');
        expect(&head, 's');
        expect_right();
        end(&hands);
        expect_right();
        cue(&head, 'e');
        peer_end(&head);
        end_daemon(&d);
}

/* Readers begin before a rank's stream has written its shard, and wait for it. */
static void a_rank_is_late(void) {
        for (uint32_t i = 0; i < n_gpus; i++) {
                struct engine writers;

                start_on_gpus();
                writers = start_writers(i, "FAKECUDA_SLOW=set:100");
                expect_right();
                end(&writers);
                expect_right();
                end_daemon(&d);
        }
}

static void kill_kvd(void) {
        pid_t pid = 0;

        WAIT_UNTIL((pid = child_of(d.pid, NULL)) > 0);
        kill(pid, SIGKILL);
        WAIT_UNTIL(kill(pid, 0) < 0 && child_of(d.pid, NULL) > 0);
}

/* While the streams of readers wait for its shards, a rank dies, perhaps after the daemon. */
static void dies_before_readers(struct engine *writers, uint32_t which, bool daemon_first) {
        struct engine readers = start(reader, 0, NULL);

        expect_all(&readers, 'p');
        cue_all(&readers, 'r');
        expect_all(&readers, 'q');
        if (daemon_first)
                kill_kvd();
        kill_rank(writers, which);
        expect_all(&readers, 'n');
        end(&readers);
}

/* The rest of the engine lives on: readers must not wait until it ends. */
static void a_rank_dies(void) {
        for (uint32_t i = 0; i < n_gpus; i++) {
                struct engine writers;

                start_on_gpus();
                writers = start_writers(i, "FAKECUDA_SLOW=set:3600000");
                dies_before_readers(&writers, i, false);
                expect_nothing();
                end(&writers);
                writers = start_writers(0, NULL);
                expect_right();
                end(&writers);
                end_daemon(&d);
        }
}

/* Blocks wait for others first, which are written after it has died. */
static void a_rank_dies_while_others_write(void) {
        for (uint32_t i = 0; i < n_gpus; i++) {
                struct engine writers;

                start_on_gpus();
                others = "FAKECUDA_SLOW=set:200";
                writers = start_writers(i, "FAKECUDA_SLOW=set:3600000");
                others = NULL;
                dies_before_readers(&writers, i, false);
                expect_nothing();
                end(&writers);
                end_daemon(&d);
        }
}

static struct kvd_msg_space_info_reply facts(struct conn *conn) {
        struct kvd_msg_space_info_reply info;

        space_facts(conn, 0, &info);
        return info;
}

static uint64_t in_limbo(struct conn *conn) {
        return facts(conn).limbo;
}

static struct peer start_keeper(const char *team) {
        const char *const blind[] = {"FAKECUDA_DEVICES=0", NULL};
        struct peer peer;

        keepers_team = team;
        peer = peer_start(keeper, d.socket, blind);
        expect(&peer, 'a');
        return peer;
}

/*
 * Returns when the quarantine of a process that dies now is over, and so that of each that has died
 * before, unless a child keeps it from ending.
 */
static void a_quarantine_passes(struct conn *conn) {
        uint64_t filling = facts(conn).filling, limbo = in_limbo(conn);
        struct peer stranger;

        keeps = (uint32_t)limbo + 1; /* so that these are not taken for the team's */
        stranger = start_keeper("a strangers' team");
        keeps = BLOCKS;
        peer_kill(&stranger);
        WAIT_UNTIL(facts(conn).filling <= filling && in_limbo(conn) <= limbo);
}

/* The last rank has a child that keeps its GPU work going, and is killed with work in its stream. */
static struct engine start_hands(void) {
        struct engine hands;

        allocates = seals = false;
        forks = n_gpus - 1;
        hands = start(writer, forks, "FAKECUDA_SLOW=set:3600000");
        expect_all(&hands, 'a');
        return hands;
}

static void fill_and_die(struct engine *hands) {
        cue_all(hands, 'f');
        expect_all(hands, 'w');
        kill_rank(hands, forks);
}

/* A scheduler frees what a dead rank's GPU work may still write. */
static void a_scheduler_frees_what_the_dead_write(void) {
        struct engine hands;
        struct conn *conn;
        struct peer head;

        start_on_gpus();
        hands = start_hands();
        head = start_keeper("the writers' team");
        conn = instance_connect(&d);
        fill_and_die(&hands);
        cue(&head, 'f');
        expect(&head, 'f');
        if (in_limbo(conn) != BLOCKS)
                die("blocks are free that a dead rank may write");
        a_quarantine_passes(conn);
        if (in_limbo(conn) != BLOCKS)
                die("blocks are free although a child keeps a dead rank's work going");
        kill(shared->child, SIGKILL);
        WAIT_UNTIL(!in_limbo(conn));
        conn_close(conn);
        cue(&head, 'e');
        peer_end(&head);
        end(&hands);
        end_daemon(&d);
}

/* The scheduler dies after a rank, and before the rank's work is over. */
static void a_scheduler_dies_after_a_rank(void) {
        struct engine hands;
        struct conn *conn;
        struct peer head;

        start_on_gpus();
        hands = start_hands();
        head = start_keeper("the writers' team");
        conn = instance_connect(&d);
        fill_and_die(&hands);
        end(&hands);
        peer_kill(&head);
        WAIT_UNTIL(in_limbo(conn) >= BLOCKS);
        a_quarantine_passes(conn);
        if (in_limbo(conn) < BLOCKS)
                die("a dead scheduler's blocks are free, and a dead rank may write them");
        kill(shared->child, SIGKILL);
        WAIT_UNTIL(!in_limbo(conn));
        conn_close(conn);
        end_daemon(&d);
}

/* As long as a child keeps the rank's work going, nobody knows that it will not be done. */
static void a_dead_rank_has_a_child(void) {
        struct kvd_msg_space_info_reply info;
        struct engine writers, readers;
        struct conn *conn;

        start_on_gpus();
        forks = n_gpus - 1;
        writers = start_writers(forks, "FAKECUDA_SLOW=set:3600000");
        readers = start(reader, 0, NULL);
        expect_all(&readers, 'p');
        cue_all(&readers, 'r');
        expect_all(&readers, 'q');
        kill_rank(&writers, forks);
        conn = instance_connect(&d);
        a_quarantine_passes(conn);
        a_quarantine_passes(conn);
        space_facts(conn, 0, &info);
        if (info.pending != BLOCKS || info.poisoned)
                die("of %u blocks, %llu are pending", BLOCKS, (unsigned long long)info.pending);
        conn_close(conn);
        kill(shared->child, SIGKILL);
        expect_all(&readers, 'n');
        end(&readers);
        end(&writers);
        end_daemon(&d);
}

/* What was written before is not lost. */
static void a_rank_dies_afterwards(void) {
        for (uint32_t i = 0; i < n_gpus; i++) {
                struct engine writers;

                start_on_gpus();
                writers = start_writers(0, NULL);
                expect_right();
                kill_rank(&writers, i);
                expect_right();
                end(&writers);
                expect_right();
                end_daemon(&d);
        }
}

/* The blocks stay taken until the last rank is gone, and are free then. */
static void a_rank_dies_before_the_seal(void) {
        for (uint32_t i = 0; i < n_gpus; i++) {
                struct conn *conn;
                struct kvd_msg_space_info_reply info;
                struct engine writers;

                start_on_gpus();
                seals = false;
                writers = start(writer, 0, NULL);
                expect_all(&writers, 'a');
                cue_all(&writers, 'f');
                expect_all(&writers, 'w');
                kill_rank(&writers, i);
                expect_nothing();
                end(&writers);
                conn = instance_connect(&d);
                WAIT_UNTIL((space_facts(conn, 0, &info), !info.filling && !info.limbo));
                conn_close(conn);
                end_daemon(&d);
        }
}

/*
 * A rank's context fails when its stream is about to keep its promise: behind the two pieces of work
 * with which libkvd tries streams, and those that fill the blocks.
 */
static void a_gpu_fails(void) {
        for (uint32_t i = 0; i < n_gpus; i++) {
                struct engine writers;

                start_on_gpus();
                writers = start_writers(i, "FAKECUDA_FAIL=execute:6=700");
                dies_before_readers(&writers, i, false);
                end(&writers);
                end_daemon(&d);
        }
}

/* One rank's pin holds all shards. */
static void a_reader_is_slow(void) {
        struct engine writers, readers;
        struct conn *conn;

        start_on_gpus();
        conn = instance_connect(&d);
        writers = start_writers(0, NULL);
        expect_right();
        end(&writers);
        readers = start(reader, n_gpus - 1, "FAKECUDA_SLOW=copy:100");
        expect_all(&readers, 'p');
        cue_all(&readers, 'r');
        for (uint32_t i = 0; i + 1 < n_gpus; i++) {
                expect(&readers.ranks[i], 'q');
                expect(&readers.ranks[i], 'y');
                cue(&readers.ranks[i], 'e');
                peer_end(&readers.ranks[i]);
        }
        if (evict_all(conn))
                die("a block is evicted that the last rank reads");
        expect(&readers.ranks[n_gpus - 1], 'q');
        expect(&readers.ranks[n_gpus - 1], 'y');
        cue(&readers.ranks[n_gpus - 1], 'e');
        peer_end(&readers.ranks[n_gpus - 1]);
        WAIT_UNTIL(evict_all(conn) == BLOCKS);
        conn_close(conn);
        end_daemon(&d);
}

/* Another program has 54 of the last GPU's 64 MiB. */
static void hog(struct role *role) {
        const char *why = "";
        const struct kvd_cuda *cuda = kvd_cuda_load(&why);
        cu_context context;
        cu_address at;

        if (!cuda || cuda->cuInit(0) || cuda->cuDevicePrimaryCtxRetain(&context, (int)n_gpus - 1) ||
            cuda->cuCtxPushCurrent(context) || cuda->cuMemAlloc(&at, (size_t)54 << 20))
                die("no memory to take: %s", why);
        say(role, 'h');
        hear(role, 'e');
}

/* Where one GPU has no room for a segment, no other has its shards. */
static void a_gpu_is_full(void) {
        struct engine writers;
        struct peer other;

        setenv("FAKECUDA_MEMORY", "64M", 1); /* of all processes together */
        other = peer_start(hog, "", NULL);
        expect(&other, 'h');
        start_on_gpus();
        writers = start_writers(0, NULL);
        expect_right();
        end(&writers);
        expect_right();
        cue(&other, 'e');
        peer_end(&other);
        expect_right();
        end_daemon(&d);
}

/* ---- restarts -------------------------------------------------------------------------------- */

static void start_kept(void) {
        instance_make_dir(&d);
        setenv("TMPDIR", d.dir, 1);
        instance_run(&d,
                     (const char *const[]){"--keep", "--private", d.dir, "--backend", "cuda",
                                           "--pool", "32M", "--set", "daemon.segment=2M", "--set",
                                           "daemon.quarantine_ms=20", "--set", "daemon.reserve=1M",
                                           "--set", device_setting(), NULL},
                     true);
}

static void end_kept(void) {
        instance_expect_clean(&d);
        instance_stop(&d);
        instance_sweep(&d);
}

/* All shards outlive it, once it has seen them arrive. */
static void the_daemon_is_killed(void) {
        struct engine writers, readers;
        struct conn *conn;

        start_kept();
        writers = start_writers(0, NULL);
        expect_right();
        conn = instance_connect(&d);
        WAIT_UNTIL(!facts(conn).pending);
        conn_close(conn);
        readers = start(reader, 0, NULL);
        expect_all(&readers, 'p');
        kill_kvd();
        cue_all(&readers, 'r');
        expect_all(&readers, 'q');
        expect_all(&readers, 'y');
        end(&readers);
        end(&writers);
        expect_right();
        end_kept();
}

/* What its processes' streams promise to one is not passed to the next. */
static void a_stream_outlives_the_daemon(void) {
        struct engine survivors;

        start_kept();
        survivors = start(survivor, 0, NULL);
        expect_all(&survivors, 'a');
        kill_kvd();
        cue_all(&survivors, 'k');
        expect_all(&survivors, 'y');
        end(&survivors);
        end_kept();
}

/* Incomplete blocks are dropped, and clients that wait for them are told. */
static void the_daemon_and_a_rank_are_killed(void) {
        for (uint32_t i = 0; i < n_gpus; i++) {
                struct engine writers;

                start_kept();
                writers = start_writers(i, "FAKECUDA_SLOW=set:3600000");
                dies_before_readers(&writers, i, true);
                expect_nothing();
                end(&writers);
                end_kept();
        }
}

static const struct play plays[] = {
        {"late", a_rank_is_late},
        {"scheduler", a_scheduler_sees_no_gpu},
        {"dies", a_rank_dies},
        {"dies-while-others-write", a_rank_dies_while_others_write},
        {"dead-with-a-child", a_dead_rank_has_a_child},
        {"freed-of-the-dead", a_scheduler_frees_what_the_dead_write},
        {"scheduler-dies-after-a-rank", a_scheduler_dies_after_a_rank},
        {"dies-afterwards", a_rank_dies_afterwards},
        {"dies-before-the-seal", a_rank_dies_before_the_seal},
        {"gpu-fails", a_gpu_fails},
        {"slow-reader", a_reader_is_slow},
        {"gpu-full", a_gpu_is_full},
        {"daemon-killed", the_daemon_is_killed},
        {"stream-outlives", a_stream_outlives_the_daemon},
        {"both-killed", the_daemon_and_a_rank_are_killed},
};

/* test-shards GPUS [--legacy] PLAY... */
int main(int argc, char **argv) {
        n_gpus = argc > 1 ? (uint32_t)atoi(argv[1]) : 0;
        if (n_gpus == 0 || n_gpus > MOST)
                die("the first argument is the number of GPUs, up to %u", MOST);
        setenv("FAKECUDA_DEVICES", argv[1], 1);
        shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                      0);
        if (shared == MAP_FAILED)
                die("mmap: %s", strerror(errno));
        if (argc > 2 && strcmp(argv[2], "--legacy") == 0) {
                legacy_handles = true;
                setenv("FAKECUDA_VMM", "0", 1);
                argv++;
                argc--;
        }
        return plays_run(plays, ARRAY_SIZE(plays), argv + MIN(argc, 2));
}
