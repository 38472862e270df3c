/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Processes seal and read random blocks of one GPU in the order of their streams, and are killed at
 * random. No process reads a wrong byte that kvd_check_pin calls right, no process hangs, and
 * nothing is left over at the end.
 *
 *      device-soak [SECONDS [SEED [legacy | calm]]]
 *
 * Two spaces together need more memory than there is, so that blocks are evicted and memory moves
 * from one space to the other. With calm, it moves all the time, and no process is killed.
 */

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "ipc/base/layout.h"
#include "ipc/base/util.h"
#include "tests/gpu/device/peer.h"

#define WORKERS 5
#define DOCUMENTS 60u
#define LONGEST 8u

/* In memory shared by all processes. */
static struct tally {
        _Atomic bool stop;
        _Atomic uint64_t reads, blocks, seals, refused, poisoned, wrong, late, steps;
} * tally;

static const char *seed_text; /* the seed of the next worker */

static uint32_t draw(uint32_t below) {
        return (uint32_t)random() % below;
}

/* Extends the chain that was found to up to n blocks. */
static void extend(struct side *s, uint32_t doc, uint32_t n, struct kvd_pin *pin) {
        uint32_t have = pin->n_blocks, tokens[LONGEST * BT];
        struct kvd_block blocks[LONGEST];
        int got = kvd_alloc(s->space, n - have, blocks), r;

        if (got < 0) {
                tally->refused++;
                return;
        }
        make_tokens(doc, n, tokens);
        for (int i = 0; i < got; i++)
                put_fill(s, &blocks[i], word_of(doc, have + (uint32_t)i));
        r = kvd_seal_on(s->space, pin, (uint32_t)got, blocks, tokens + have * BT,
                        (uint32_t)got * BT, s->stream);
        if (r < 0 && r != -ESTALE)
                die("seal: %s", kvd_error());
        if (r < 0)
                kvd_free_on(s->space, (uint32_t)got, blocks, s->stream);
        else
                tally->seals += (uint32_t)got;
}

/* Reads the pinned blocks: if kvd_check_pin succeeds, all bytes must be right. */
static void read_all(struct side *s, uint32_t doc, const struct kvd_pin *pin, const uint32_t *ids) {
        uint64_t wrong;
        int r;

        must(kvd_wait_on(s->space, pin, s->stream));
        put_read(s, pin, ids, pin->n_blocks);
        sync_stream(s);
        r = kvd_check_pin(s->space, pin);
        tally->reads++;
        if (r == -EIO) {
                tally->poisoned++;
        } else if (r < 0) {
                tally->late++;
        } else {
                wrong = wrong_words(s, doc, pin->n_blocks);
                tally->wrong += wrong;
                tally->blocks += pin->n_blocks;
                if (wrong)
                        fprintf(stderr, "document %u: %llu words of %u blocks are wrong\n", doc,
                                (unsigned long long)wrong, pin->n_blocks);
        }
}

static void step(struct side *s) {
        uint32_t doc = draw(DOCUMENTS), n = 1 + draw(LONGEST), ids[LONGEST];
        struct kvd_pin pin = {0};

        find(s, doc, n, &pin, ids);
        if (pin.view && draw(4))
                read_all(s, doc, &pin, ids);
        if (pin.n_blocks < n)
                extend(s, doc, n, &pin);
        if (draw(3)) {
                kvd_unpin_on(s->space, &pin, s->stream);
        } else {
                sync_stream(s); /* kvd_unpin requires it */
                kvd_unpin(s->space, &pin);
        }
        if (!draw(16))
                kvd_settle(s->space);
        tally->steps++;
}

static void *work_beside(void *other) {
        struct side s;

        side_join(&s, other);
        while (!tally->stop)
                step(&s);
        sync_stream(&s);
        return NULL;
}

/* Two threads of one process, with a stream each. */
static void work(struct role *role) {
        pthread_t thread;
        struct side s;

        srandom((unsigned)strtoul(seed_text, NULL, 0));
        side_open(&s, role->socket, draw(2) ? "s" : "t");
        if (pthread_create(&thread, NULL, work_beside, &s) != 0)
                die("no thread");
        while (!tally->stop)
                step(&s);
        pthread_join(thread, NULL);
        for (int i = 0; i < 1000 && kvd_settle(s.space); i++)
                usleep(1000);
        side_close(&s);
}

static struct peer start(const struct instance *d) {
        static char slow[64], seed[32];
        const char *settings[] = {slow, NULL, NULL};

        snprintf(slow, sizeof slow, "FAKECUDA_SLOW=set:%u,copy:%u,write:%u", draw(3), draw(2),
                 draw(2) * draw(4));
        snprintf(seed, sizeof seed, "%ld", random());
        seed_text = seed;
        if (!draw(5))
                settings[1] = "FAKECUDA_STREAM_ORDER=0";
        return peer_start(work, d->socket, settings);
}

/* Makes memory move from one space to the other. The space may not exist yet. */
static void squeeze(struct conn *conn) {
        char value[16];
        struct kvd_msg_space_set request = {.space = kvd_slice_of(draw(2) ? "s" : "t"),
                                            .key = kvd_slice_of("max_blocks")};

        snprintf(value, sizeof value, "%u", 64 * (1 + draw(6)));
        request.value = kvd_slice_of(value);
        conn_call(conn, KVD_MSG_space_set, &request, NULL);
}

static uint64_t segments_returned(struct conn *conn) {
        struct kvd_msg_space_info request = {0};
        struct kvd_msg_space_info_reply info;
        uint64_t sum = 0, value;

        for (; conn_call(conn, KVD_MSG_space_info, &request, &info) == 0;
             request.cursor = info.next) {
                memcpy(&value,
                       (const uint8_t *)info.counters.data +
                               KVD_SPACE_SEGMENTS_RETURNED * sizeof value,
                       sizeof value);
                sum += value;
        }
        return sum;
}

static void kill_one(const struct instance *d, struct peer *worker) {
        if (waitpid(worker->pid, NULL, WNOHANG) != 0)
                die("a worker has ended by itself");
        peer_kill(worker);
        *worker = start(d);
}

/* A busy machine may need longer. With calm, memory must also have changed hands. */
static bool has_done_enough(struct conn *conn, bool calm) {
        return tally->blocks >= 100 && tally->seals >= 100 && (!calm || segments_returned(conn));
}

static void run(const struct instance *d, uint32_t seconds, bool calm) {
        uint64_t end = now_ms() + seconds * UINT64_C(1000), given_up = end + PATIENCE_MS;
        struct conn *conn = instance_connect(d);
        struct peer workers[WORKERS];
        uint64_t returned;
        uint32_t kills = 0;

        for (uint32_t i = 0; i < WORKERS; i++)
                workers[i] = start(d);
        while (!tally->wrong &&
               (now_ms() < end || (now_ms() < given_up && !has_done_enough(conn, calm)))) {
                usleep(calm ? 10000 : 50000 + draw(200000));
                squeeze(conn);
                if (!calm)
                        kill_one(d, &workers[draw(WORKERS)]);
                kills += !calm;
        }
        tally->stop = true;
        returned = segments_returned(conn);
        conn_close(conn);
        for (uint32_t i = 0; i < WORKERS; i++)
                peer_end(&workers[i]);
        printf("%llu steps, %u kills: %llu reads of %llu blocks, %llu sealed, %llu allocations "
               "refused, %llu reads of "
               "what a dead producer left; %llu wrong words, %llu reads that had not waited\n",
               (unsigned long long)tally->steps, kills, (unsigned long long)tally->reads,
               (unsigned long long)tally->blocks, (unsigned long long)tally->seals,
               (unsigned long long)tally->refused, (unsigned long long)tally->poisoned,
               (unsigned long long)tally->wrong, (unsigned long long)tally->late);
        printf("%llu segments went back to the pool\n", (unsigned long long)returned);
        if (calm && !returned)
                die("no memory changed hands");
}

int main(int argc, char **argv) {
        const char *const settings[] = {"daemon.pool=12M", "daemon.quarantine_ms=50", NULL};
        uint32_t seconds = argc > 1 ? (uint32_t)atoi(argv[1]) : 10;
        struct instance d;

        if (argc > 3 && strcmp(argv[3], "legacy") == 0) {
                legacy_handles = true;
                setenv("FAKECUDA_VMM", "0", 1);
        }
        srandom(argc > 2 ? (unsigned)atoi(argv[2]) : 1);
        tally = mmap(NULL, sizeof *tally, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                     0);
        if (tally == MAP_FAILED)
                die("mmap: %s", strerror(errno));
        start_daemon(&d, settings);
        run(&d, seconds, argc > 3 && strcmp(argv[3], "calm") == 0);
        end_daemon(&d);
        return tally->wrong || tally->late || tally->blocks < 100 || tally->seals < 100;
}
