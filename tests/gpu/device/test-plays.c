/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Several processes use one GPU's pool in place: the order that streams give, and the effects of
 * deaths.
 */

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "client/conn/deadline.h"
#include "ipc/base/layout.h"
#include "ipc/base/util.h"
#include "tests/gpu/device/peer.h"
#include "tests/lib/plays.h"

#define DOC 7u /* first token of the chain that most plays are about */

static struct kvd_msg_space_info_reply facts(struct conn *conn) {
        struct kvd_msg_space_info_reply info;

        space_facts(conn, 0, &info);
        return info;
}

static uint64_t count_of(struct conn *conn, enum kvd_space_counter which) {
        struct kvd_msg_space_info_reply info = facts(conn);
        uint64_t value;

        memcpy(&value, (const uint8_t *)info.counters.data + which * sizeof value, sizeof value);
        return value;
}

#define CHECK(what) ((what) ? (void)0 : die("%s:%d: not %s", __FILE__, __LINE__, #what))

/* Makes the stream wait until this word is 1. The word is in memory that the driver knows. */
static void put_gate_at(struct side *s, cu_stream stream, void *word) {
        cu_address at;

        CHECK(s->cuda->cuMemHostGetDevicePointer(&at, word, 0) == CU_OK);
        CHECK(s->cuda->cuStreamWaitValue64(stream, at, 1, CU_WAIT_GEQ) == CU_OK);
}

/* Puts the gate into s->words. */
static void put_gate(struct side *s, cu_stream stream) {
        *(volatile uint64_t *)s->words = 0;
        put_gate_at(s, stream, s->words);
}

static void open_gate(struct side *s) {
        *(volatile uint64_t *)s->words = 1;
}

static void until_called(const char *function, uint32_t more_than) {
        while (driver_calls(function) <= more_than)
                usleep(1000);
}

/*
 * The side's stream must still wait for another stream, which waits at its gate. It gets 50 ms in
 * which it could wrongly continue.
 */
static void expect_waiting(const struct side *s) {
        usleep(50000);
        CHECK(s->cuda->cuStreamQuery(s->stream) == CU_NOT_READY);
}

/* ---- in place -------------------------------------------------------------------------------- */

/*
 * 1. The producer's stream waits at a gate before it fills two blocks. The producer seals them at
 *    once.
 * 2. The reader finds them and makes its stream wait. It must read only what the producer wrote. 3.
 * The producer finds its own blocks. Its stream comes after the writes anyway.
 */
static void late_producer(struct role *role) {
        struct kvd_pin pin = {0}, again = {0};
        uint32_t ids[2];
        struct side s;

        side_open(&s, role->socket, "s");
        put_gate(&s, s.stream);
        publish(&s, DOC, 2, &pin);
        CHECK(kvd_check_pin(s.space, &pin) == -EAGAIN); /* so no call has waited for the stream */
        CHECK(find(&s, DOC, 2, &again, ids) == 2);
        must(kvd_wait_on(s.space, &again, s.stream));
        put_read(&s, &again, ids, 2);
        say(role, 'p');
        hear(role, 'o');
        open_gate(&s);
        sync_stream(&s);
        CHECK(wrong_words(&s, DOC, 2) == 0);
        must(kvd_check_pin(s.space, &pin));
        kvd_unpin(s.space, &pin);
        kvd_unpin_on(s.space, &again, s.stream);
        hear(role, 'e');
        side_close(&s);
}

/*
 * Says 'w' once its stream waits. Without stream order, the call itself waits, so the reader says
 * 'w' before the call.
 */
static void reader(struct role *role) {
        struct kvd_pin pin = {0};
        uint32_t ids[2];
        struct side s;

        side_open(&s, role->socket, "s");
        say(role, 'o');
        hear(role, 'g');
        CHECK(find(&s, DOC, 2, &pin, ids) == 2);
        CHECK(kvd_check_pin(s.space, &pin) == -EAGAIN);
        if (!s.place.stream_order)
                say(role, 'w');
        must(kvd_wait_on(s.space, &pin, s.stream));
        put_read(&s, &pin, ids, 2);
        if (s.place.stream_order)
                say(role, 'w');
        sync_stream(&s);
        CHECK(wrong_words(&s, DOC, 2) == 0);
        must(kvd_check_pin(s.space, &pin));
        kvd_unpin_on(s.space, &pin, s.stream);
        side_close(&s);
}

static void in_place_with(const char *const *reader_settings) {
        const char *const slow[] = {"FAKECUDA_SLOW=set:50", NULL};
        struct peer a, b;
        struct instance d;
        struct conn *conn;

        start_daemon(&d, NULL);
        b = peer_start(reader, d.socket, reader_settings);
        expect(&b, 'o');
        a = peer_start(late_producer, d.socket, slow);
        expect(&a, 'p');
        cue(&b, 'g');
        expect(&b, 'w');
        cue(&a, 'o');
        peer_end(&b);
        cue(&a, 'e');
        peer_end(&a);
        conn = instance_connect(&d);
        CHECK(count_of(conn, KVD_SPACE_ORDERED) == 2);
        CHECK(count_of(conn, KVD_SPACE_POISONED) == 0);
        conn_close(conn);
        end_daemon(&d);
}

static void in_place(void) {
        in_place_with(NULL);
}

/* The reader's driver has no stream memory operations: the call waits, the stream does not. */
static void reader_without_streams(void) {
        const char *const none[] = {"FAKECUDA_STREAM_ORDER=0", NULL};

        in_place_with(none);
}

/* ---- handles of streams ---------------------------------------------------------------------- */

static void new_stream(struct side *s) {
        cu_stream old = s->stream;

        CHECK(s->cuda->cuStreamDestroy(old) == CU_OK);
        CHECK(s->cuda->cuStreamCreateWithPriority(&s->stream, CU_STREAM_NON_BLOCKING, 0) == CU_OK);
        CHECK(s->stream == old);
}

/*
 * A stream is destroyed while it still fills blocks, and a new stream gets its handle. The new
 * stream must wait for these blocks, and its promises are not kept before those of the old one.
 */
static void another_stream_with_that_handle(struct role *role) {
        struct kvd_pin pins[2] = {0}, again = {0};
        uint32_t ids[2];
        struct side s;

        side_open(&s, role->socket, "s");
        put_gate(&s, s.stream);
        publish(&s, DOC, 2, &pins[0]);
        new_stream(&s);
        CHECK(find(&s, DOC, 2, &again, ids) == 2);
        must(kvd_wait_on(s.space, &again, s.stream));
        put_read(&s, &again, ids, 2);
        expect_waiting(&s);
        open_gate(&s);
        sync_stream(&s);
        CHECK(wrong_words(&s, DOC, 2) == 0);
        kvd_unpin_on(s.space, &again, s.stream);

        put_gate(&s, s.stream);
        publish(&s, DOC + 1, 2, &pins[1]);
        new_stream(&s);
        kvd_unpin_on(s.space, &pins[0], s.stream);
        CHECK(s.cuda->cuStreamSynchronize(s.stream) == CU_OK);
        CHECK(kvd_check_pin(s.space, &pins[1]) == -EAGAIN);
        kvd_unpin_on(s.space, &pins[1], s.stream);
        open_gate(&s);
        side_close(&s);
}

static void stream_handle_used_again(void) {
        const char *const settings[] = {"FAKECUDA_REUSE=1", NULL};
        struct instance d;
        struct peer a;

        start_daemon(&d, NULL);
        a = peer_start(another_stream_with_that_handle, d.socket, settings);
        peer_end(&a);
        end_daemon(&d);
}

/* ---- without stream memory operations -------------------------------------------------------- */

static void waits_itself(struct role *role) {
        struct kvd_pin pin = {0};
        struct side s;

        side_open(&s, role->socket, "s");
        CHECK(!s.place.stream_order);
        publish(&s, DOC, 2, &pin); /* returns when the data is there */
        must(kvd_check_pin(s.space, &pin));
        kvd_unpin_on(s.space, &pin, s.stream);
        CHECK(kvd_settle(s.space) == 0);
        side_close(&s);
}

static void look_once(struct role *role) {
        struct kvd_pin pin = {0};
        uint32_t ids[2];
        struct side s;

        side_open(&s, role->socket, "s");
        CHECK(find(&s, DOC, 2, &pin, ids) == 2);
        must(kvd_check_pin(s.space, &pin));
        put_read(&s, &pin, ids, 2);
        sync_stream(&s);
        CHECK(wrong_words(&s, DOC, 2) == 0);
        kvd_unpin(s.space, &pin);
        side_close(&s);
}

static void without_streams(void) {
        const char *const settings[] = {"FAKECUDA_STREAM_ORDER=0", "FAKECUDA_SLOW=set:50", NULL};
        struct peer a, b;
        struct instance d;
        struct conn *conn;

        start_daemon(&d, NULL);
        a = peer_start(waits_itself, d.socket, settings);
        peer_end(&a);
        b = peer_start(look_once, d.socket, NULL);
        peer_end(&b);
        conn = instance_connect(&d);
        CHECK(count_of(conn, KVD_SPACE_ORDERED) == 0);
        conn_close(conn);
        end_daemon(&d);
}

/* ---- many streams ---------------------------------------------------------------------------- */

#define STREAMS 70u /* more than there are semaphores */

/*
 * A chain whose blocks come from different streams. Then more streams than semaphores, all with
 * work under way.
 */
static void uses_many_streams(struct role *role) {
        uint32_t tokens[SIDE_BLOCKS * BT], ids[SIDE_BLOCKS];
        struct kvd_pin chain = {0}, found = {0}, pins[STREAMS] = {0};
        cu_stream streams[STREAMS], own;
        struct kvd_block block;
        struct side s;

        side_open(&s, role->socket, "s");
        own = s.stream;
        for (uint32_t i = 0; i < STREAMS; i++)
                streams[i] = make_stream(&s);
        make_tokens(DOC, SIDE_BLOCKS, tokens);
        for (uint32_t i = 0; i < SIDE_BLOCKS; i++) {
                s.stream = streams[i];
                alloc(&s, 1, &block);
                put_gate(&s, s.stream);
                put_fill(&s, &block, word_of(DOC, i));
                must(kvd_seal_on(s.space, &chain, 1, &block, tokens + i * BT, BT, s.stream));
        }
        s.stream = own;
        CHECK(find(&s, DOC, SIDE_BLOCKS, &found, ids) == SIDE_BLOCKS);
        CHECK(kvd_check_pin(s.space, &found) == -EAGAIN);
        must(kvd_wait_on(s.space, &found, own));
        put_read(&s, &found, ids, SIDE_BLOCKS);
        open_gate(&s);
        sync_stream(&s);
        must(kvd_check_pin(s.space, &found));
        CHECK(wrong_words(&s, DOC, SIDE_BLOCKS) == 0);
        kvd_unpin_on(s.space, &found, own);
        for (uint32_t i = 0; i < STREAMS; i++) {
                s.stream = streams[i];
                publish(&s, 100 + i, 1, &pins[i]);
        }
        s.stream = own;
        for (uint32_t i = 0; i < STREAMS; i++) {
                must(kvd_wait_on(s.space, &pins[i], own));
                CHECK(find(&s, 100 + i, 1, &found, ids) == 1);
                put_read(&s, &found, ids, 1);
                sync_stream(&s);
                CHECK(wrong_words(&s, 100 + i, 1) == 0);
                kvd_unpin(s.space, &found);
                kvd_unpin_on(s.space, &pins[i], streams[STREAMS - 1 - i]);
        }
        kvd_unpin(s.space, &chain);
        side_close(&s);
}

static void many_streams(void) {
        const char *const slow[] = {"FAKECUDA_SLOW=set:100", NULL};
        struct instance d;
        struct peer a;

        start_daemon(&d, NULL);
        a = peer_start(uses_many_streams, d.socket, slow);
        peer_end(&a);
        end_daemon(&d);
}

/*
 * A stream that waits makes more promises than there are semaphores, and needs only one. No call
 * waits for it. A forked child settles none of its promises.
 */
static void promises_often(struct role *role) {
        struct kvd_pin pins[STREAMS] = {0};
        struct side s;
        int status;
        pid_t pid;

        side_open(&s, role->socket, "s");
        put_gate(&s, s.stream);
        for (uint32_t i = 0; i < STREAMS; i++)
                publish(&s, 100 + i, 1, &pins[i]);
        for (uint32_t i = 0; i < STREAMS; i++) {
                CHECK(kvd_check_pin(s.space, &pins[i]) == -EAGAIN);
                kvd_unpin_on(s.space, &pins[i], s.stream);
        }
        CHECK(kvd_settle(s.space) == STREAMS);
        pid = fork();
        if (pid == 0)
                _exit(kvd_settle(s.space) == 0 ? 0 : 1);
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
        CHECK(kvd_settle(s.space) == STREAMS);
        open_gate(&s);
        sync_stream(&s);
        CHECK(kvd_settle(s.space) == 0);
        side_close(&s);
}

static void one_stream(void) {
        struct instance d;
        struct peer a;

        start_daemon(&d, NULL);
        a = peer_start(promises_often, d.socket, NULL);
        peer_end(&a);
        end_daemon(&d);
}

/* ---- death ----------------------------------------------------------------------------------- */

/*
 * 1. The producer seals blocks that its stream would need minutes to fill, and is killed. 2. The
 * reader's stream already waits for them. It continues, and the reader learns that the data
 *    never came.
 * 3. The blocks are no longer found, and the reader computes them again.
 */
static void never_writes(struct role *role) {
        struct kvd_pin pin = {0};
        struct side s;

        side_open(&s, role->socket, "s");
        publish(&s, DOC, 2, &pin);
        say(role, 'p');
        pause();
}

static void survivor(struct role *role) {
        struct kvd_pin pin = {0}, again = {0};
        uint32_t ids[2];
        struct side s;

        side_open(&s, role->socket, "s");
        CHECK(find(&s, DOC, 2, &pin, ids) == 2);
        say(role, 'f');
        must(kvd_wait_on(s.space, &pin, s.stream));
        put_read(&s, &pin, ids, 2);
        say(role, 'w');
        sync_stream(&s);
        CHECK(kvd_check_pin(s.space, &pin) == -EIO);
        CHECK(find(&s, DOC, 2, &again, ids) == 0);
        kvd_unpin_on(s.space, &pin, s.stream);
        publish(&s, DOC, 2, &again);
        sync_stream(&s);
        must(kvd_check_pin(s.space, &again));
        kvd_unpin(s.space, &again);
        side_close(&s);
}

static void death_with(const char *const *reader_settings) {
        const char *const slow[] = {"FAKECUDA_SLOW=set:600000", NULL};
        struct peer a, b;
        struct instance d;
        struct conn *conn;

        start_daemon(&d, NULL);
        a = peer_start(never_writes, d.socket, slow);
        expect(&a, 'p');
        b = peer_start(survivor, d.socket, reader_settings);
        expect(&b, 'f');
        expect(&b, 'w');
        peer_kill(&a);
        peer_end(&b);
        conn = instance_connect(&d);
        CHECK(count_of(conn, KVD_SPACE_POISONED) == 2);
        WAIT_UNTIL(count_of(conn, KVD_SPACE_CLIENTS_REAPED)); /* after its blocks were poisoned */
        CHECK(count_of(conn, KVD_SPACE_CLIENTS_REAPED) == 1);
        conn_close(conn);
        end_daemon(&d);
}

static void producer_killed(void) {
        death_with(NULL);
}

/*
 * On a driver where a plain store wakes no stream, a worker writes the semaphore with its own
 * stream.
 */
static void producer_killed_and_stores_wake_nobody(void) {
        const char *const settings[] = {"FAKECUDA_WAKE=write", NULL};

        death_with(settings);
}

static void producer_killed_and_the_reader_waits_itself(void) {
        const char *const none[] = {"FAKECUDA_STREAM_ORDER=0", NULL};
        const char *const slow[] = {"FAKECUDA_SLOW=set:600000", NULL};
        struct peer a, b;
        struct instance d;

        start_daemon(&d, NULL);
        a = peer_start(never_writes, d.socket, slow);
        expect(&a, 'p');
        /* kvd_wait_on returns when the producer is dead */
        b = peer_start(survivor, d.socket, none);
        expect(&b, 'f');
        usleep(50000); /* the call probably waits by then; if not, this checks less */
        peer_kill(&a);
        expect(&b, 'w');
        peer_end(&b);
        end_daemon(&d);
}

/*
 * A client is killed while its stream fills blocks that are not sealed. During the quarantine they
 * belong to no client, as if the GPU were still writing. Then they are free. The first quarantine
 * lasts longer than the test looks at it. The second one ends soon.
 */
static void fills(struct role *role) {
        struct kvd_block blocks[8];
        struct side s;

        side_open(&s, role->socket, "s");
        alloc(&s, 8, blocks);
        for (uint32_t i = 0; i < 8; i++)
                put_fill(&s, &blocks[i], 1);
        say(role, 'f');
        pause();
}

/*
 * The number of blocks in state FILLING or LIMBO. Both come from one reply, so that a block that
 * changes its state is not missed.
 */
static uint64_t not_free(struct conn *conn) {
        struct kvd_msg_space_info_reply info = facts(conn);

        return info.limbo + info.filling;
}

static void expect_quarantine(struct conn *conn) {
        for (uint32_t i = 0; i < 5; i++) {
                CHECK(not_free(conn) >= 8);
                usleep(100000);
        }
        WAIT_UNTIL(facts(conn).limbo >= 8);
}

static struct conn *kill_while_it_fills(struct instance *d, const char *quarantine) {
        const char *const slow[] = {"FAKECUDA_SLOW=set:600000", NULL};
        struct conn *conn;
        struct peer a;

        start_daemon(d, SETTINGS(quarantine));
        conn = instance_connect(d);
        a = peer_start(fills, d->socket, slow);
        expect(&a, 'f');
        CHECK(facts(conn).filling >= 8);
        peer_kill(&a);
        return conn;
}

static void quarantine(void) {
        struct instance d;
        struct conn *conn = kill_while_it_fills(&d, "daemon.quarantine_ms=60000");

        expect_quarantine(conn);
        expect_clean(conn);
        conn_close(conn);
        instance_end(&d);
        conn = kill_while_it_fills(&d, "daemon.quarantine_ms=100");
        WAIT_UNTIL(not_free(conn) == 0);
        conn_close(conn);
        end_daemon(&d);
}

/*
 * The client forks a process, which outlives it. The child has the GPU's descriptors, so queued
 * work may continue. While the child lives, and during the quarantine after that, the blocks are
 * not reused.
 */
static struct forked {
        _Atomic uint64_t gate;
        _Atomic pid_t pid; /* the child's process id, once it runs */
} * forked;                /* a page shared by the director, the client and its child */

static void share_forked(void) {
        forked = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(forked != MAP_FAILED);
}

static void fork_one(void) {
        pid_t pid = fork();

        CHECK(pid >= 0);
        if (pid == 0) {
                close(STDOUT_FILENO);
                close(STDERR_FILENO);
                alarm(3 * PATIENCE_MS / 1000);
                forked->pid = getpid();
                for (;;)
                        pause();
        }
        WAIT_UNTIL(forked->pid);
}

static void fill_some(struct side *s) {
        struct kvd_block blocks[8];

        alloc(s, 8, blocks);
        for (uint32_t i = 0; i < 8; i++)
                put_fill(s, &blocks[i], 1);
}

static void forks_and_fills(struct role *role) {
        struct side s;

        side_open(&s, role->socket, "s");
        fill_some(&s);
        fork_one();
        say(role, 'f');
        pause();
}

/* The child has the GPU's descriptors, but not the connection that allocates the blocks. */
static void connects_once_more(struct role *role) {
        struct side first, s;

        side_attach(&first, role->socket, "s");
        fork_one();
        side_open(&s, role->socket, "s");
        fill_some(&s);
        say(role, 'f');
        pause();
}

/* Kills the child, so that the quarantine can end. */
static void end_forked(struct conn *conn) {
        CHECK(kill(forked->pid, SIGKILL) == 0);
        WAIT_UNTIL(not_free(conn) == 0);
        CHECK(munmap(forked, 4096) == 0);
}

static void child_keeps_quarantine(void (*forks)(struct role *role)) {
        const char *const slow[] = {"FAKECUDA_SLOW=set:600000", NULL};
        struct instance d;
        struct conn *conn;
        struct peer a;

        share_forked();
        start_daemon(&d, SETTINGS("daemon.quarantine_ms=100"));
        conn = instance_connect(&d);
        a = peer_start(forks, d.socket, slow);
        expect(&a, 'f');
        peer_kill(&a);
        expect_quarantine(conn);
        end_forked(conn);
        conn_close(conn);
        end_daemon(&d);
}

static void forked_child_keeps_quarantine(void) {
        child_keeps_quarantine(forks_and_fills);
}

static void forked_child_of_another_connection(void) {
        child_keeps_quarantine(connects_once_more);
}

/* The stream fills blocks only after the director opens the gate. The client is dead by then. */
static void forks_and_fills_later(struct role *role) {
        struct side s;

        side_open(&s, role->socket, "s");
        CHECK(s.cuda->cuMemHostRegister(forked, 4096, CU_REGISTER_PORTABLE | CU_REGISTER_MAPPED) ==
              CU_OK);
        put_gate_at(&s, s.stream, &forked->gate);
        fill_some(&s);
        fork_one();
        say(role, 'f');
        pause();
}

#define NEARLY_ALL 900u /* blocks of the pool */

/* Allocates and fills as many blocks as it can get, until told to end. Returns their number. */
static uint32_t take_all(struct role *role, struct side *s, struct kvd_block *blocks) {
        struct pollfd told = {role->from, POLLIN, 0};
        uint32_t n = 0;

        while (poll(&told, 1, n < NEARLY_ALL ? 0 : 2) == 0) {
                if (kvd_alloc(s->space, 1, &blocks[n]) != 1)
                        continue;
                put_fill(s, &blocks[n], 5);
                if (++n == NEARLY_ALL)
                        say(role, 'a');
        }
        return n;
}

/* Checks that no other client's stream has written into its blocks. */
static void takes_all(struct role *role) {
        static struct kvd_block blocks[2000];
        struct side s;
        uint32_t n;

        side_open(&s, role->socket, "s");
        say(role, 'o');
        hear(role, 'g');
        n = take_all(role, &s, blocks);
        for (uint32_t i = 0; i < n; i++) {
                CHECK(s.cuda->cuMemcpyDtoHAsync(s.words, (cu_address)blocks[i].data, BLOCK_BYTES,
                                                s.stream) == CU_OK);
                sync_stream(&s);
                for (uint32_t k = 0; k < BLOCK_WORDS; k++)
                        CHECK(s.words[k] == 5);
        }
        kvd_free(s.space, n, blocks);
        hear(role, 'e');
        side_close(&s);
}

static uint32_t threads_of(pid_t pid) {
        char path[64], line[128];
        uint32_t n = 0;
        FILE *f;

        snprintf(path, sizeof path, "/proc/%d/status", pid);
        f = fopen(path, "re");
        CHECK(f);
        while (fgets(line, sizeof line, f) && sscanf(line, "Threads: %u", &n) != 1)
                ;
        fclose(f);
        return n;
}

/*
 * Opens the gate. The driver's thread in the child does the work that was queued after it, and
 * ends.
 */
static void let_the_child_write(void) {
        uint32_t before = threads_of(forked->pid);

        forked->gate = 1;
        WAIT_UNTIL(threads_of(forked->pid) < before);
}

/*
 * The same, but the queued work is really done, several quarantines later. It must not write to
 * memory that another client has got in the meantime.
 */
static void forked_child_writes_on(void) {
        const char *const outlives[] = {"FAKECUDA_OUTLIVES=1", NULL};
        struct instance d;
        struct conn *conn;
        struct peer a, b;
        char users[64];

        snprintf(users, sizeof users, "domain d.users=%u", getuid());
        share_forked();
        start_daemon(&d, SETTINGS("daemon.quarantine_ms=100", "domain d.client_quota=1T", users));
        conn = instance_connect(&d);
        b = peer_start(takes_all, d.socket, NULL);
        expect(&b, 'o');
        a = peer_start(forks_and_fills_later, d.socket, outlives);
        expect(&a, 'f');
        peer_kill(&a);
        cue(&b, 'g');
        expect(&b, 'a');
        WAIT_UNTIL(facts(conn).limbo >= 8);
        usleep(300000);
        let_the_child_write();
        CHECK(facts(conn).limbo >= 8);
        cue(&b, 'e');
        peer_end(&b);
        end_forked(conn);
        conn_close(conn);
        end_daemon(&d);
}

/* ---- eviction -------------------------------------------------------------------------------- */

static void slow_producer(struct role *role) {
        struct kvd_pin pin = {0};
        struct side s;

        side_open(&s, role->socket, "s");
        put_gate(&s, s.stream);
        publish(&s, DOC, 4, &pin);
        kvd_unpin_on(s.space, &pin, s.stream);
        say(role, 'p');
        hear(role, 'o');
        open_gate(&s);
        sync_stream(&s);
        CHECK(kvd_settle(s.space) == 0);
        say(role, 'w');
        hear(role, 'e');
        side_close(&s);
}

static void pending_is_not_evicted(void) {
        struct instance d;
        struct conn *conn;
        struct peer a;

        start_daemon(&d, NULL);
        conn = instance_connect(&d);
        a = peer_start(slow_producer, d.socket, NULL);
        expect(&a, 'p');
        CHECK(evict_all(conn) == 0);
        CHECK(facts(conn).pending == 4);
        cue(&a, 'o');
        expect(&a, 'w');
        CHECK(evict_all(conn) == 4);
        CHECK(facts(conn).pending == 0);
        cue(&a, 'e');
        peer_end(&a);
        conn_close(conn);
        end_daemon(&d);
}

/* The reader unpins at once, and its stream still reads: the blocks stay until it has finished. */
static void reads_slowly(struct role *role) {
        struct kvd_pin pin = {0};
        uint32_t ids[4];
        struct side s;

        side_open(&s, role->socket, "s");
        CHECK(find(&s, DOC, 4, &pin, ids) == 4);
        must(kvd_wait_on(s.space, &pin, s.stream));
        put_gate(&s, s.stream);
        put_read(&s, &pin, ids, 4);
        kvd_unpin_on(s.space, &pin, s.stream);
        CHECK(kvd_settle(s.space) == 1);
        say(role, 'r');
        hear(role, 'o');
        open_gate(&s);
        sync_stream(&s);
        CHECK(wrong_words(&s, DOC, 4) == 0);
        say(role, 'd');
        hear(role, 's');
        CHECK(kvd_settle(s.space) == 0);
        say(role, 's');
        hear(role, 'e');
        side_close(&s);
}

static void unpin_waits_for_the_stream(void) {
        struct peer a, b;
        struct instance d;
        struct conn *conn;

        start_daemon(&d, NULL);
        conn = instance_connect(&d);
        a = peer_start(slow_producer, d.socket, NULL);
        expect(&a, 'p');
        cue(&a, 'o');
        expect(&a, 'w');
        b = peer_start(reads_slowly, d.socket, NULL);
        expect(&b, 'r');
        CHECK(evict_all(conn) == 0);
        cue(&b, 'o');
        expect(&b, 'd');
        cue(&b, 's');
        expect(&b, 's');
        CHECK(evict_all(conn) == 4);
        cue(&b, 'e');
        peer_end(&b);
        cue(&a, 'e');
        peer_end(&a);
        conn_close(conn);
        end_daemon(&d);
}

/*
 * The same content is filled twice. The second copies are not reused while the stream writes them.
 */
static void duplicates(struct role *role) {
        struct kvd_pin first = {0}, second = {0};
        uint32_t ids[2];
        struct side s;

        side_open(&s, role->socket, "s");
        put_gate(&s, s.stream);
        publish(&s, DOC, 2, &first);
        publish(&s, DOC, 2, &second);
        CHECK(first.leaf == second.leaf);
        CHECK(kvd_settle(s.space) == 2);
        open_gate(&s);
        sync_stream(&s);
        CHECK(kvd_settle(s.space) == 0);
        CHECK(find(&s, DOC, 2, &(struct kvd_pin){0}, ids) == 2);
        put_read(&s, &first, ids, 2);
        sync_stream(&s);
        CHECK(wrong_words(&s, DOC, 2) == 0);
        kvd_unpin(s.space, &first);
        kvd_unpin(s.space, &second);
        side_close(&s);
}

static void duplicates_wait(void) {
        struct instance d;
        struct peer a;

        start_daemon(&d, NULL);
        a = peer_start(duplicates, d.socket, NULL);
        peer_end(&a);
        end_daemon(&d);
}

/* ---- memory that changes hands --------------------------------------------------------------- */

/*
 * Fills the space with chains of one block each until the pool is full. Returns the number of
 * chains.
 */
static uint32_t fill_pool(struct side *s) {
        struct kvd_block block;
        uint32_t n = 0;

        for (; kvd_alloc(s->space, 1, &block) == 1 && n < 2000; n++) {
                struct kvd_pin pin = {0};
                uint32_t tokens[BT];

                make_tokens(100 + n, 1, tokens);
                put_fill(s, &block, word_of(100 + n, 0));
                must(kvd_seal_on(s->space, &pin, 1, &block, tokens, BT, s->stream));
                if (n < 900) {
                        kvd_unpin_on(s->space, &pin, s->stream);
                        kvd_settle(s->space);
                } else {
                        sync_stream(s);
                        kvd_unpin(s->space, &pin);
                        break;
                }
        }
        sync_stream(s);
        while (kvd_settle(s->space))
                ;
        return n;
}

static void first_owner(struct role *role) {
        struct pollfd told = {role->from, POLLIN, 0};
        struct kvd_pin pin = {0};
        uint32_t id, wrong = 0;
        struct side s;

        side_open(&s, role->socket, "s");
        fill_pool(&s);
        say(role, 'f');
        while (poll(&told, 1, 2) == 0) /* gives memory back when the daemon asks */
                kvd_settle(s.space);
        hear(role, 'd');
        publish(&s, DOC, 1, &pin); /* there is room again, in any segment */
        kvd_unpin_on(s.space, &pin, s.stream);
        CHECK(find(&s, DOC, 1, &pin, &id) == 1);
        must(kvd_wait_on(s.space, &pin, s.stream));
        put_read(&s, &pin, &id, 1);
        sync_stream(&s);
        wrong = (uint32_t)wrong_words(&s, DOC, 1);
        CHECK(wrong == 0);
        kvd_unpin(s.space, &pin);
        side_close(&s);
}

static void second_owner(struct role *role) {
        struct kvd_pin pin = {0};
        uint64_t end = now_ms() + PATIENCE_MS;
        struct kvd_block blocks[256];
        uint32_t n = 0, ids[8];
        struct side s;

        side_open(&s, role->socket, "t");
        say(role, 'o');
        while (n < 256) {
                int r = kvd_alloc(s.space, 256 - n, blocks + n);

                if (r > 0)
                        n += (uint32_t)r;
                else
                        usleep(2000);
                CHECK(now_ms() < end);
        }
        say(role, 'n');
        for (uint32_t i = 0; i < n; i++) /* the bytes of the other space were cleared */
                put_fill(&s, &blocks[i], 5);
        sync_stream(&s);
        kvd_free(s.space, n, blocks);
        publish(&s, DOC, 8, &pin);
        kvd_unpin(s.space, &pin);
        CHECK(find(&s, DOC, 8, &pin, ids) == 8);
        must(kvd_wait_on(s.space, &pin, s.stream));
        put_read(&s, &pin, ids, 8);
        sync_stream(&s);
        CHECK(wrong_words(&s, DOC, 8) == 0);
        kvd_unpin(s.space, &pin);
        side_close(&s);
}

/*
 * 1. Space s fills the pool. Its client has every segment mapped. 2. A client of space t needs a
 * quarter of it. Segments of s are emptied, its client unmaps them, and
 *    t gets the memory.
 * 3. Both clients continue.
 */
static void memory_changes_hands(void) {
        struct peer a, b;
        struct instance d;

        start_daemon(&d, NULL);
        a = peer_start(first_owner, d.socket, NULL);
        expect(&a, 'f');
        b = peer_start(second_owner, d.socket, NULL);
        expect(&b, 'o');
        expect(&b, 'n');
        cue(&a, 'd');
        peer_end(&b);
        peer_end(&a);
        end_daemon(&d);
}

/* ---- isolation = arena ----------------------------------------------------------------------- */

static void victim(struct role *role) {
        struct kvd_pin pin = {0};
        uint32_t ids[2];
        struct side s;

        side_open(&s, role->socket, "s");
        publish(&s, DOC, 2, &pin);
        sync_stream(&s);
        say(role, 'p');
        hear(role, 'c');
        CHECK(find(&s, DOC, 2, &(struct kvd_pin){0}, ids) == 2);
        put_read(&s, &pin, ids, 2);
        sync_stream(&s);
        CHECK(wrong_words(&s, DOC, 2) == 0);
        kvd_unpin(s.space, &pin);
        side_close(&s);
}

/* A copy engine or a kernel does a memset, so drivers report its fault in several ways. */
static bool is_fault(cu_result r) {
        enum { LAUNCH_FAILED = 719 };

        return r == CU_ILLEGAL_ADDRESS || (int)r == LAUNCH_FAILED || r == CU_UNKNOWN;
}

static void writes_where_it_must_not(struct role *role) {
        struct kvd_pin pin = {0};
        uint32_t ids[2];
        struct side s;

        side_open(&s, role->socket, "s");
        CHECK(find(&s, DOC, 2, &pin, ids) == 2);
        put_read(&s, &pin, ids, 2);
        sync_stream(&s);
        CHECK(wrong_words(&s, DOC, 2) == 0);
        /* refused at once, or breaks only its own context */
        if (s.cuda->cuMemsetD32Async((cu_address)kvd_pin_block(&pin, ids[0]), 0, 16, s.stream) ==
            CU_OK)
                CHECK(is_fault(s.cuda->cuStreamSynchronize(s.stream)));
        kvd_unpin_on(s.space, &pin, s.stream);
        kvd_space_close(s.space);
        kvd_close(s.kvd);
}

static void arena_is_read_only(void) {
        char users[64];
        const char *const settings[] = {"domain d.isolation=arena", users, NULL};
        struct peer a, b;
        struct instance d;

        snprintf(users, sizeof users, "domain d.users=%u", getuid());
        start_daemon(&d, settings);
        a = peer_start(victim, d.socket, NULL);
        expect(&a, 'p');
        b = peer_start(writes_where_it_must_not, d.socket, NULL);
        peer_end(&b);
        cue(&a, 'c');
        peer_end(&a);
        end_daemon(&d);
}

/* ---- daemons --------------------------------------------------------------------------------- */

/* The connection, and blocks in the magazine, may still be those of the previous daemon. */
static void publish_anew(struct side *s, uint32_t first, struct kvd_pin *pin) {
        struct kvd_block block;
        uint32_t tokens[BT];
        int r;

        make_tokens(first, 1, tokens);
        for (int i = 0; i < 100; i++) {
                r = kvd_alloc(s->space, 1, &block);
                if (r == -ECONNRESET)
                        continue;
                must(r);
                put_fill(s, &block, word_of(first, 0));
                r = kvd_seal_on(s->space, pin, 1, &block, tokens, BT, s->stream);
                if (r == 1)
                        return;
                CHECK(r == -ECONNRESET || r == -ESTALE);
                kvd_free_on(s->space, 1, &block, s->stream);
        }
        die("nothing can be sealed: %s", kvd_error());
}

/*
 * The daemon is killed while a pin is held and a stream reads. The bytes stay, and libkvd
 * reconnects to the next daemon by itself.
 */
static void outlives_the_daemon(struct role *role) {
        struct kvd_pin pin = {0}, fresh = {0};
        uint32_t ids[2];
        struct side s;

        side_open(&s, role->socket, "s");
        publish(&s, DOC, 2, &pin);
        say(role, 'p');
        hear(role, 'k');
        CHECK(find(&s, DOC, 2, &fresh, ids) == 2); /* found as long as they are mapped */
        kvd_unpin(s.space, &fresh);
        must(kvd_wait_on(s.space, &pin, s.stream));
        put_read(&s, &pin, ids, 2);
        kvd_unpin_on(s.space, &pin, s.stream);
        sync_stream(&s);
        CHECK(wrong_words(&s, DOC, 2) == 0);
        say(role, 'r');
        hear(role, 'n');
        publish_anew(&s, DOC + 1, &fresh);
        CHECK(kvd_settle(s.space) >= 0);
        sync_stream(&s);
        CHECK(kvd_settle(s.space) == 0);
        must(kvd_check_pin(s.space, &fresh));
        kvd_unpin(s.space, &fresh);
        side_close(&s);
}

static void daemon_killed(void) {
        const char *const slow[] = {"FAKECUDA_SLOW=set:50", NULL};
        struct instance d;
        struct peer a;

        start_daemon(&d, NULL);
        a = peer_start(outlives_the_daemon, d.socket, slow);
        expect(&a, 'p');
        instance_kill(&d);
        cue(&a, 'k');
        expect(&a, 'r');
        again_daemon(&d, NULL);
        cue(&a, 'n');
        peer_end(&a);
        end_daemon(&d);
}

static char second_socket[96];

/* Sees the devices in another order than the daemons do. */
static void uses_both(struct role *role) {
        struct kvd_pin pin = {0};
        struct side one, two;

        side_open(&one, role->socket, "s");
        CHECK(one.place.device == 1);
        publish(&one, DOC, 2, &pin);
        sync_stream(&one);
        kvd_unpin(one.space, &pin);
        side_close(&one);
        side_open(&two, second_socket, "s");
        CHECK(two.place.device == 0 && memcmp(one.place.uuid, two.place.uuid, 16) != 0);
        publish(&two, DOC, 2, &pin);
        sync_stream(&two);
        kvd_unpin(two.space, &pin);
        side_close(&two);
}

static void sees_only_one(struct role *role) {
        kvd_space *space;
        kvd *handle;

        must(kvd_open(second_socket, &handle));
        CHECK(kvd_space_open(handle, "s", &geometry, NULL, &space) == -ENODEV);
        CHECK(strstr(kvd_error(), "the pool is on the GPU with UUID 66616b65-") &&
              strstr(kvd_error(), "cannot see"));
        kvd_close(handle);
}

static void two_daemons_on_two_devices(void) {
        const char *const first[] = {"daemon.device=0", NULL}, *const second[] = {"daemon.device=1",
                                                                                  NULL};
        const char *const turned[] = {"CUDA_VISIBLE_DEVICES=1,0", NULL};
        const char *const one[] = {"CUDA_VISIBLE_DEVICES=0", NULL};
        struct instance d, e;
        struct peer a;

        setenv("FAKECUDA_DEVICES", "2", 1);
        start_daemon(&d, first);
        start_daemon(&e, second);
        memcpy(second_socket, e.socket, sizeof second_socket);
        a = peer_start(uses_both, d.socket, turned);
        peer_end(&a);
        a = peer_start(look_once, e.socket, NULL);
        peer_end(&a);
        a = peer_start(sees_only_one, d.socket, one);
        peer_end(&a);
        end_daemon(&e);
        end_daemon(&d);
}

/* ---- two clients in one process -------------------------------------------------------------- */

/*
 * Both have the pool mapped. With a legacy handle they share one address, which some drivers unmap
 * when one of the two closes it.
 */
static void opens_twice(struct role *role) {
        struct kvd_pin pin = {0}, found = {0};
        struct side first, second;
        uint32_t ids[2];

        side_open(&first, role->socket, "s");
        side_open(&second, role->socket, "s");
        publish(&first, DOC, 2, &pin);
        sync_stream(&first);
        CHECK(find(&second, DOC, 2, &found, ids) == 2);
        kvd_unpin(first.space, &pin);
        side_close(&first);
        put_read(&second, &found, ids, 2);
        sync_stream(&second);
        CHECK(wrong_words(&second, DOC, 2) == 0);
        kvd_unpin(second.space, &found);
        side_close(&second);
}

static void two_clients_in_one_process(void) {
        struct instance d;
        struct peer a;

        start_daemon(&d, NULL);
        a = peer_start(opens_twice, d.socket, NULL);
        peer_end(&a);
        end_daemon(&d);
}

/* ---- layers ---------------------------------------------------------------------------------- */

static void views_layers(struct role *role) {
        struct kvd_layer_view view, other;
        struct kvd_pin pin = {0};
        uint32_t ids[2];
        struct side s;

        side_open(&s, role->socket, "s");
        publish(&s, DOC, 2, &pin);
        CHECK(find(&s, DOC, 2, &(struct kvd_pin){0}, ids) == 2);
        must(kvd_layer_view(s.space, 1, &view));
        must(kvd_layer_view(s.space, 0, &other));
        CHECK(other.keys == pin.base && other.values == pin.base + BLOCK_BYTES / 4);
        CHECK(view.keys == pin.base + BLOCK_BYTES / 2 && view.blocks > ids[0] &&
              view.blocks > ids[1]);
        CHECK(view.block_stride == BLOCK_BYTES && view.element == 4 && view.token_stride == 256 &&
              view.head_stride == BT * 256 && view.group == 0);
        CHECK(kvd_layer_view(s.space, 2, &view) == -EINVAL);
        kvd_unpin_on(s.space, &pin, s.stream);
        side_close(&s);
}

static void layers(void) {
        struct instance d;
        struct peer a;

        start_daemon(&d, NULL);
        a = peer_start(views_layers, d.socket, NULL);
        peer_end(&a);
        end_daemon(&d);
}

/* ---- in doubt -------------------------------------------------------------------------------- */

static uint32_t n_synchronized; /* calls before the expected one */

static void *opens_when_it_is_waited_for(void *data) {
        until_called("cuStreamSynchronize", n_synchronized);
        open_gate(data);
        return NULL;
}

/* kvd_free_on must wait for the stream: the gate opens only once the call waits. */
static void free_behind_a_gate(struct side *s, struct kvd_block *block) {
        pthread_t thread;

        CHECK(s->cuda->cuStreamQuery(s->stream) == CU_NOT_READY);
        n_synchronized = driver_calls("cuStreamSynchronize");
        CHECK(pthread_create(&thread, NULL, opens_when_it_is_waited_for, s) == 0);
        kvd_free_on(s->space, 1, block, s->stream);
        CHECK(s->cuda->cuStreamQuery(s->stream) == CU_OK);
        CHECK(pthread_join(thread, NULL) == 0);
}

/*
 * The daemon is stopped while it should seal. It is unknown whether the blocks were sealed, and the
 * daemon may free them once it continues. So they are given back only when the stream that fills
 * them has finished.
 */
static void seals_in_doubt(struct role *role) {
        struct kvd_pin pin = {0};
        struct kvd_block block;
        uint32_t tokens[BT];
        struct side s;

        side_open(&s, role->socket, "s");
        alloc(&s, 1, &block);
        make_tokens(DOC, 1, tokens);
        say(role, 'a');
        hear(role, 's');
        put_gate(&s, s.stream);
        put_fill(&s, &block, word_of(DOC, 0));
        deadline_ms = 300;
        CHECK(kvd_seal_on(s.space, &pin, 1, &block, tokens, BT, s.stream) == -ETIMEDOUT);
        deadline_ms = PATIENCE_MS;
        CHECK(!block.data);
        say(role, 'd');
        hear(role, 'g');
        free_behind_a_gate(&s, &block);
        side_close(&s);
}

static void in_doubt_waits_for_the_stream(void) {
        char log[256];
        const char *const settings[] = {log, NULL};
        struct instance d;
        struct peer a;

        start_daemon(&d, NULL);
        snprintf(log, sizeof log, "FAKECUDA_LOG=%s.log", d.socket);
        a = peer_start(seals_in_doubt, d.socket, settings);
        expect(&a, 'a');
        CHECK(kill(d.pid, SIGSTOP) == 0);
        cue(&a, 's');
        expect(&a, 'd');
        CHECK(kill(d.pid, SIGCONT) == 0);
        cue(&a, 'g');
        peer_end(&a);
        unlink(log + strlen("FAKECUDA_LOG="));
        end_daemon(&d);
}

/* ---- capture --------------------------------------------------------------------------------- */

static bool is_refused(int r) {
        return r == -EBUSY && strstr(kvd_error(), "captured");
}

/* Every call that would queue work on the stream is refused, and changes nothing. */
static void refuses(struct side *s, struct kvd_pin *pin, struct kvd_block *block,
                    cu_stream stream) {
        struct kvd_pin fresh = {0};
        uint32_t tokens[BT];

        make_tokens(DOC + 1, 1, tokens);
        CHECK(is_refused(kvd_wait_on(s->space, pin, stream)));
        CHECK(is_refused(kvd_seal_on(s->space, &fresh, 1, block, tokens, BT, stream)));
        CHECK(is_refused(kvd_unpin_on(s->space, pin, stream)));
        CHECK(is_refused(kvd_free_on(s->space, 1, block, stream)));
        CHECK(pin->view && block->view && block->data && !fresh.view);
}

static void seal_again(struct side *s, struct kvd_block *block) {
        struct kvd_pin pin = {0};
        uint32_t tokens[BT];

        make_tokens(DOC + 1, 1, tokens);
        must(kvd_seal_on(s->space, &pin, 1, block, tokens, BT, s->stream));
        must(kvd_unpin_on(s->space, &pin, s->stream));
}

static void delete_tensor(struct DLManagedTensor *tensor) {
        void (*deleter)(struct DLManagedTensor * self);

        memcpy(&deleter, (uint8_t *)tensor + 56, sizeof deleter); /* after the context */
        deleter(tensor);
}

/*
 * The producer's stream waits at a gate, so that there is something to wait for. Meanwhile another
 * stream of the process, which synchronises with the default one, is captured. Only the engine's
 * work becomes a node, even if tensors are deleted during the capture.
 */
static void captures(struct role *role) {
        struct DLManagedTensor *tensors[2];
        struct kvd_pin pin = {0}, again = {0};
        struct kvd_block block;
        cu_stream captured;
        uint32_t ids[2];
        struct side s;

        side_open(&s, role->socket, "s");
        CHECK(s.cuda->cuStreamCreateWithPriority(&captured, 0, 0) == CU_OK);
        put_gate(&s, s.stream);
        publish(&s, DOC, 2, &pin);
        CHECK(find(&s, DOC, 2, &again, ids) == 2);
        alloc(&s, 1, &block);
        for (int i = 0; i < 2; i++)
                must(kvd_dlpack_block(s.space, &again, ids[i], &tensors[i]));
        kvd_dlpack_release_on(tensors[1], captured);

        capture_begin(captured, 0);
        CHECK(s.cuda->cuMemsetD8Async((cu_address)block.data, 1, 1, captured) == CU_OK);
        refuses(&s, &again, &block, captured);
        refuses(&s, &again, &block, NULL);
        delete_tensor(tensors[0]);
        delete_tensor(tensors[1]);
        CHECK(kvd_settle(s.space) == 2);
        CHECK(capture_end(captured) == 1);

        must(kvd_wait_on(s.space, &again, captured));
        open_gate(&s);
        put_fill(&s, &block, word_of(DOC + 1, 0));
        seal_again(&s, &block);
        must(kvd_unpin_on(s.space, &again, captured));
        kvd_settle(s.space);
        sync_stream(&s);
        CHECK(s.cuda->cuStreamSynchronize(captured) == CU_OK);
        CHECK(s.cuda->cuStreamSynchronize(NULL) == CU_OK);
        CHECK(kvd_settle(s.space) == 0);
        kvd_unpin(s.space, &pin);
        say(role, 'e');
        hear(role, 'e');
        side_close(&s);
}

static void capturing(void) {
        struct instance d;
        struct conn *conn;
        struct peer a;

        start_daemon(&d, NULL);
        conn = instance_connect(&d);
        a = peer_start(captures, d.socket, NULL);
        expect(&a, 'e');
        CHECK(evict_all(conn) == 3); /* no pin is left */
        cue(&a, 'e');
        peer_end(&a);
        conn_close(conn);
        end_daemon(&d);
}

/* ---- other streams of the process ------------------------------------------------------------ */

/*
 * An engine captures one stream, and another of its streams waits for something unrelated to kvd.
 * Meanwhile a space is opened, filled and closed while its own stream works. Closing waits for that
 * stream and for no other, and breaks no capture.
 */
static void closes_beside_others(struct role *role) {
        struct kvd_pin pin = {0};
        cu_stream captured;
        struct side s, t;

        side_open(&s, role->socket, "s");
        captured = make_stream(&s);
        put_gate(&s, make_stream(&s));
        t = s;
        capture_begin(captured, 0);
        must(kvd_space_open(t.kvd, "t", &geometry, NULL, &t.space));
        must(kvd_space_place(t.space, &t.place));
        CHECK(t.place.stream_order);
        publish(&t, DOC, 2, &pin);
        must(kvd_unpin_on(t.space, &pin, t.stream));
        kvd_space_close(t.space);
        CHECK(s.cuda->cuStreamQuery(t.stream) == CU_OK);
        CHECK(capture_end(captured) == 0);
        open_gate(&s);
        side_close(&s);
}

static void closing_beside_others(void) {
        const char *const slow[] = {"FAKECUDA_SLOW=set:100", NULL};
        struct instance d;
        struct peer a;

        start_daemon(&d, NULL);
        a = peer_start(closes_beside_others, d.socket, slow);
        peer_end(&a);
        end_daemon(&d);
}

static _Atomic uint32_t n_filled;

/* The number of pieces that a waiting stream's queue holds. A call that queues more waits. */
#define FITS "5" /* the gate, a fill with its two promises, and another fill; or four fills */

static void *promises_until_full(void *data) {
        struct side *main_side = data, s;

        side_join(&s, main_side);
        put_gate(main_side, s.stream);
        for (uint32_t i = 0; i < 4; i++) {
                struct kvd_pin pin = {0};
                struct kvd_block block;
                uint32_t tokens[BT];

                make_tokens(10 + i, 1, tokens);
                alloc(&s, 1, &block);
                put_fill(&s, &block, word_of(10 + i, 0));
                n_filled++;
                must(kvd_seal_on(s.space, &pin, 1, &block, tokens, BT, s.stream));
                must(kvd_unpin_on(s.space, &pin, s.stream));
        }
        CHECK(s.cuda->cuStreamSynchronize(s.stream) == CU_OK);
        return NULL;
}

/*
 * A thread waits in the driver because the queue of its waiting stream is full. Another thread of
 * the process continues with a stream of its own.
 */
static void goes_on_beside_a_full_queue(struct role *role) {
        pthread_t thread;
        struct side s;

        side_open(&s, role->socket, "s");
        CHECK(pthread_create(&thread, NULL, promises_until_full, &s) == 0);
        while (n_filled < 2)
                usleep(1000);
        usleep(50000); /* until the thread waits in the driver, or this checks nothing */
        for (uint32_t i = 0; i < 4; i++) {
                struct kvd_pin pin = {0};

                publish(&s, 100 + i, 1, &pin);
                must(kvd_unpin_on(s.space, &pin, s.stream));
                CHECK(kvd_settle(s.space) >= 0);
                sync_stream(&s);
        }
        CHECK(n_filled == 2);
        open_gate(&s);
        CHECK(pthread_join(thread, NULL) == 0);
        side_close(&s);
}

static void beside_a_full_queue(void) {
        const char *const shallow[] = {"FAKECUDA_DEPTH=" FITS, NULL};
        struct instance d;
        struct peer a;

        start_daemon(&d, NULL);
        a = peer_start(goes_on_beside_a_full_queue, d.socket, shallow);
        peer_end(&a);
        end_daemon(&d);
}

static void *promises_into_a_full_queue(void *data) {
        struct side *main_side = data, s;
        struct kvd_pin pin = {0};
        struct kvd_block block;
        uint32_t tokens[BT];

        side_join(&s, main_side);
        put_gate(main_side, s.stream);
        make_tokens(DOC, 1, tokens);
        alloc(&s, 1, &block);
        for (uint32_t i = 0; i < 4; i++)
                put_fill(&s, &block, word_of(DOC, 0));
        must(kvd_seal_on(s.space, &pin, 1, &block, tokens, BT, s.stream));
        must(kvd_unpin_on(s.space, &pin, s.stream));
        CHECK(s.cuda->cuStreamSynchronize(s.stream) == CU_OK);
        return NULL;
}

/*
 * A thread waits in the driver while it queues its stream's first promise. Meanwhile more streams
 * of another thread than there are semaphores make promises. None gets the semaphore being written.
 */
static void leaves_a_writers_semaphore(struct role *role) {
        pthread_t thread;
        uint32_t before;
        struct side s;

        side_open(&s, role->socket, "s");
        before = driver_calls("cuStreamWriteValue64");
        CHECK(pthread_create(&thread, NULL, promises_into_a_full_queue, &s) == 0);
        until_called("cuStreamWriteValue64", before);
        for (uint32_t i = 0; i < STREAMS; i++) {
                struct kvd_pin pin = {0};

                s.stream = make_stream(&s);
                publish(&s, 100 + i, 1, &pin);
                must(kvd_unpin_on(s.space, &pin, s.stream));
                sync_stream(&s);
        }
        open_gate(&s);
        CHECK(pthread_join(thread, NULL) == 0);
        side_close(&s);
}

static void beside_a_writer(void) {
        char log[256];
        const char *const shallow[] = {"FAKECUDA_DEPTH=" FITS, log, NULL};
        struct instance d;
        struct peer a;

        start_daemon(&d, NULL);
        snprintf(log, sizeof log, "FAKECUDA_LOG=%s.log", d.socket);
        a = peer_start(leaves_a_writers_semaphore, d.socket, shallow);
        peer_end(&a);
        unlink(log + strlen("FAKECUDA_LOG="));
        end_daemon(&d);
}

static _Atomic bool enough;
static _Atomic uint32_t n_settled;

static void *gives_back(void *data) {
        struct side *s = data;

        for (; !enough; n_settled++) {
                kvd_settle(s->space);
                usleep(1000);
        }
        return NULL;
}

/*
 * One thread unmaps memory for the daemon, and its driver waits for a stream that waits at a gate.
 * The other thread's calls continue.
 */
static void goes_on_beside_unmapping(struct role *role) {
        struct kvd_layer_view layer;
        pthread_t thread;
        uint32_t settled;
        struct side s;

        side_open(&s, role->socket, "s");
        fill_pool(&s);
        put_gate(&s, s.stream);
        CHECK(pthread_create(&thread, NULL, gives_back, &s) == 0);
        say(role, 'f');
        until_called("cuMemUnmap", 0);
        settled = n_settled;
        for (uint32_t i = 0; i < 4; i++) {
                must(kvd_layer_view(s.space, 0, &layer));
                CHECK(kvd_settle(s.space) >= 0);
        }
        CHECK(n_settled == settled); /* the thread was in the driver all the time */
        open_gate(&s);
        hear(role, 'e');
        enough = true;
        CHECK(pthread_join(thread, NULL) == 0);
        CHECK(n_settled > settled);
        side_close(&s);
}

static void beside_unmapping(void) {
        char log[256];
        const char *const waits[] = {"FAKECUDA_WAITS=cuMemUnmap", log, NULL};
        struct peer a, b;
        struct instance d;

        start_daemon(&d, NULL);
        snprintf(log, sizeof log, "FAKECUDA_LOG=%s.log", d.socket);
        a = peer_start(goes_on_beside_unmapping, d.socket, waits);
        expect(&a, 'f');
        b = peer_start(second_owner, d.socket, NULL);
        expect(&b, 'o');
        peer_end(&b);
        cue(&a, 'e');
        peer_end(&a);
        unlink(log + strlen("FAKECUDA_LOG="));
        end_daemon(&d);
}

#define MORE 96u /* blocks: more than a segment has, or are allocated ahead */

static void *wants_segments(void *data) {
        static struct kvd_block blocks[2][MORE];
        static _Atomic uint32_t n_threads;
        uint32_t me = n_threads++;
        struct side *s = data;

        alloc(s, MORE, blocks[me]);
        kvd_free(s->space, MORE, blocks[me]);
        return NULL;
}

static void *wants_a_space(void *data) {
        const struct side *s = data;
        kvd_space *space;

        must(kvd_space_open(s->kvd, "another", &geometry, NULL, &space));
        kvd_space_close(space);
        return NULL;
}

/* Does what needs no memory that is not mapped yet. */
static void use_what_is_there(struct side *s, struct kvd_block *block, uint32_t first) {
        struct kvd_pin pin = {0}, found = {0};
        uint32_t tokens[BT], id;

        make_tokens(first, 1, tokens);
        put_fill(s, block, word_of(first, 0));
        must(kvd_seal_on(s->space, &pin, 1, block, tokens, BT, s->stream));
        CHECK(find(s, first, 1, &found, &id) == 1);
        must(kvd_wait_on(s->space, &found, s->stream));
        must(kvd_unpin_on(s->space, &found, s->stream));
        kvd_unpin(s->space, &pin);
        CHECK(kvd_settle(s->space) >= 0);
}

/*
 * Two threads make calls for which the driver waits for a stream that waits at a gate. The calls of
 * the main thread continue, even those that send a request to the daemon.
 */
static void goes_on_beside(struct role *role, const char *function, void *(*wants)(void *)) {
        struct kvd_block blocks[4];
        pthread_t threads[2];
        uint32_t before;
        struct side s;

        side_open(&s, role->socket, "s");
        alloc(&s, 4, blocks);
        put_gate(&s, make_stream(&s));
        before = driver_calls(function);
        for (uint32_t i = 0; i < 2; i++)
                CHECK(pthread_create(&threads[i], NULL, wants, &s) == 0);
        until_called(function, before);
        for (uint32_t i = 0; i < 4; i++)
                use_what_is_there(&s, &blocks[i], 100 + i);
        open_gate(&s);
        for (uint32_t i = 0; i < 2; i++)
                CHECK(pthread_join(threads[i], NULL) == 0);
        side_close(&s);
}

static void goes_on_beside_mapping(struct role *role) {
        goes_on_beside(role, "cuMemMap", wants_segments);
}

static void goes_on_beside_opening(struct role *role) {
        goes_on_beside(role, "cuMemHostRegister", wants_a_space);
}

static _Atomic bool caught_up;

static void *catches_up(void *data) {
        struct side *s = data;

        must(kvd_catch_up(s->space));
        caught_up = true;
        return NULL;
}

/*
 * One thread finds that the daemon was replaced, and unmaps the old daemon's memory: its driver
 * waits for a stream that waits at a gate. The other thread's calls continue with the new daemon.
 */
static void goes_on_beside_a_restart(struct role *role) {
        struct kvd_pin pin = {0};
        pthread_t thread;
        uint32_t before;
        struct side s;

        side_open(&s, role->socket, "s");
        publish(&s, DOC, 2, &pin);
        kvd_unpin(s.space, &pin);
        sync_stream(&s);
        say(role, 'p');
        hear(role, 'n');
        before = driver_calls("cuMemUnmap");
        put_gate(&s, make_stream(&s));
        CHECK(pthread_create(&thread, NULL, catches_up, &s) == 0);
        until_called("cuMemUnmap", before);
        for (uint32_t i = 0; i < 4; i++) {
                publish_anew(&s, 100 + i, &pin);
                must(kvd_unpin_on(s.space, &pin, s.stream));
                CHECK(kvd_settle(s.space) >= 0);
        }
        CHECK(!caught_up); /* the thread was in the driver all the time */
        open_gate(&s);
        CHECK(pthread_join(thread, NULL) == 0);
        side_close(&s);
}

static void beside_a_restart(void) {
        char log[256];
        const char *const waits[] = {"FAKECUDA_WAITS=cuMemUnmap", log, NULL};
        struct instance d;
        struct peer a;

        start_daemon(&d, NULL);
        snprintf(log, sizeof log, "FAKECUDA_LOG=%s.log", d.socket);
        a = peer_start(goes_on_beside_a_restart, d.socket, waits);
        expect(&a, 'p');
        instance_kill(&d);
        again_daemon(&d, NULL);
        cue(&a, 'n');
        peer_end(&a);
        unlink(log + strlen("FAKECUDA_LOG="));
        end_daemon(&d);
}

static void beside(const char *setting, void (*play)(struct role *)) {
        const char *settings[3] = {setting};
        char log[256];
        struct instance d;
        struct peer a;

        start_daemon(&d, NULL);
        snprintf(log, sizeof log, "FAKECUDA_LOG=%s.log", d.socket);
        settings[1] = log;
        a = peer_start(play, d.socket, settings);
        peer_end(&a);
        unlink(log + strlen("FAKECUDA_LOG="));
        end_daemon(&d);
}

static void beside_mapping(void) {
        beside("FAKECUDA_WAITS=cuMemMap,cuMemSetAccess", goes_on_beside_mapping);
}

static void beside_opening(void) {
        beside("FAKECUDA_WAITS=cuMemHostRegister", goes_on_beside_opening);
}

/* ----------------------------------------------------------------------------------------------------------------- */

int main(int argc, char **argv) {
        static const struct play plays[] = {
                {"in-place", in_place},
                {"reader-without-streams", reader_without_streams},
                {"stream-handle-used-again", stream_handle_used_again},
                {"without-streams", without_streams},
                {"many-streams", many_streams},
                {"one-stream", one_stream},
                {"producer-killed", producer_killed},
                {"stores-wake-nobody", producer_killed_and_stores_wake_nobody},
                {"reader-waits-itself", producer_killed_and_the_reader_waits_itself},
                {"quarantine", quarantine},
                {"forked-child-keeps-quarantine", forked_child_keeps_quarantine},
                {"forked-child-of-another-connection", forked_child_of_another_connection},
                {"forked-child-writes-on", forked_child_writes_on},
                {"pending-is-not-evicted", pending_is_not_evicted},
                {"unpin-waits", unpin_waits_for_the_stream},
                {"duplicates-wait", duplicates_wait},
                {"memory-changes-hands", memory_changes_hands},
                {"beside-unmapping", beside_unmapping},
                {"beside-mapping", beside_mapping},
                {"beside-opening", beside_opening},
                {"beside-a-restart", beside_a_restart},
                {"arena-is-read-only", arena_is_read_only},
                {"daemon-killed", daemon_killed},
                {"two-devices", two_daemons_on_two_devices},
                {"two-clients", two_clients_in_one_process},
                {"layers", layers},
                {"in-doubt-waits", in_doubt_waits_for_the_stream},
                {"capturing", capturing},
                {"closing-beside-others", closing_beside_others},
                {"beside-a-full-queue", beside_a_full_queue},
                {"beside-a-writer", beside_a_writer},
        };

        if (argc > 1 && strcmp(argv[1], "--legacy") == 0) {
                legacy_handles = true;
                setenv("FAKECUDA_VMM", "0", 1);
                argv++;
        }
        return plays_run(plays, ARRAY_SIZE(plays), argv + 1);
}
