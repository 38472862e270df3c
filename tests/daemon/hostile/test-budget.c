/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The budget of a turn: how much of the daemon's processor time one request, or one piece of
 * background work, may cost, whatever state clients have put the daemon in. Every message that a
 * client may send has a row here (a new message without a row fails), and is sent in an ordinary
 * and in two adversarial states. The test measures work that is done: a row whose requests are all
 * refused fails.
 *
 *      adversarial  everything pinned, all touch words set, one chain of a quarter of all blocks;
 *                   as many sequences as there may be, with copies on their way
 *      clustered    a space whose blocks' keys have both their buckets among the first eighth
 *
 *      test-budget          24 attachments, 128 spaces, 40,000 blocks
 *      test-budget --full   238 attachments, 4,096 spaces, 1,000,000 blocks
 *
 * The test measures the daemon's own processor time, and takes the shortest of some repetitions, so
 * that it does not fail on a busy machine. A slow machine has larger budgets. Work that is done in
 * pieces (the end of a process, of a space) is repeated if a piece seems too long: the test takes
 * the daemon's work between two answers, which is one piece or two. Times below half of their
 * budget are printed only on a terminal.
 */

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/enums.h"
#include "ipc/base/key.h"
#include "ipc/base/layout.h"
#include "ipc/base/sequence.h"
#include "ipc/base/util.h"
#include "tests/lib/peer.h"
#include "tests/lib/pins.h"
#include "tests/lib/sanitized.h"
#include "tests/lib/yard.h"

#define REQUEST_US (SANITIZED ? 60000u : 3000u)
/* measured between ticks of the daemon's clock, on a machine that may be busy */
#define PIECE_US (SANITIZED ? 800000u : 20000u)
#define ATTEMPTS 3u /* to stay below PIECE_US */
#define REPEATED 7
#define MOST_REPEATED 40 /* if over budget: a late measurement includes later work */
#define MANY 4096u       /* maximum number of blocks in a message */
#define CHAIN 8u         /* blocks of a short chain */
#define PART 2048u       /* blocks that are appended to a sequence at once */
#define NAMED (4 * PART) /* maximum number of entries in a message */
#define RANGES 4u        /* of that size; more than there is room for copies of */

struct scale {
        uint32_t peers, spaces, blocks;
};

static struct scale scale = {24, 128, 40000};
static struct instance d;
static struct peer_end *peers[256], *me; /* me: peers[0] */
static uint32_t handles[256];            /* of space "big", of each */
static const char *target = "big";       /* the space that requests are about, */
static uint32_t mine;                    /* ... its handle, of `me` */
static const struct kvd_index *index_of; /* ... its mapping where it matters, or NULL */
static struct kvd_pinpage *pages[256];   /* each peer's pins in "big" */
static uint32_t holder;                  /* number of a client that has pins there */
static uint64_t tokens_used = 1;
static int failed;

/* ---- time ------------------------------------------------------------------------------------ */

/*
 * The kernel updates the daemon's time when the daemon sleeps, or at a tick. Waits for that, for at
 * most 10 ms, and returns the time since `began`.
 */
static uint64_t since(uint64_t began) {
        for (int i = 0; i < 200 && instance_cpu_ns(&d) == began; i++)
                usleep(50);
        return instance_cpu_ns(&d) - began;
}

/* Measures the slowness again if a budget is exceeded: the machine may have slowed down. */
static void judge(const char *what, const char *state, uint64_t ns, uint32_t most_us, int error) {
        bool over = ns / 1000 > most_us && (double)ns / 1000 > most_us * slowness();

        failed |= over;
        if (ns / 500 < most_us && !error && !isatty(STDOUT_FILENO))
                return;
        printf("%-34s %-12s %8llu us%s%s%s\n", what, state, (unsigned long long)ns / 1000,
               error ? "  " : "", error ? strerror(error) : "", over ? "  ABOVE THE BUDGET" : "");
        fflush(stdout);
}

/* ---- requests -------------------------------------------------------------------------------- */

#define MSG(type, ...) ((struct kvd_msg){.number = KVD_MSG_##type, .type = {__VA_ARGS__}})
#define TARGET kvd_slice_of(target)

static kvd_ref refs[MANY];
static uint32_t n_refs, refs_handle; /* blocks that `me` fills, and their space's handle */
static uint32_t numbers[NAMED], sequence, seq_handle, serial;
static uint32_t last_sequence; /* the last one opened, if it may be closed */
static uint32_t n_entries;     /* of the sequence, after the last append */
static uint32_t n_changes;     /* in the last reply to sync */

static struct kvd_slice taken(void) {
        return (struct kvd_slice){refs, n_refs * (uint32_t)sizeof *refs};
}

static void give_back(void) {
        if (n_refs)
                peer_call(me, MSG(release, refs_handle, taken()));
        n_refs = 0;
}

/* Stores what a reply gave to `me`. */
static void forget(const struct kvd_msg *reply) {
        if (reply->number == KVD_MSG_allocate_reply) {
                n_refs = reply->allocate_reply.blocks.size / (uint32_t)sizeof *refs;
                if (n_refs)
                        memcpy(refs, reply->allocate_reply.blocks.data, n_refs * sizeof *refs);
        }
        if (reply->number == KVD_MSG_append_reply)
                n_refs = 0;
        if (reply->number == KVD_MSG_seal_reply) {
                n_refs = reply->seal_reply.fresh.size / (uint32_t)sizeof *refs;
                if (n_refs)
                        memcpy(refs, reply->seal_reply.fresh.data, n_refs * sizeof *refs);
        }
        if (reply->number == KVD_MSG_append_reply)
                n_entries = reply->append_reply.first + PART;
        if (reply->number == KVD_MSG_table_reply)
                last_sequence = reply->table_reply.sequence;
        if (reply->number == KVD_MSG_sync_reply)
                n_changes = reply->sync_reply.changes.size / (uint32_t)sizeof(struct kvd_change);
}

/* Repeats the request where the daemon paused to serve others. */
static void take(uint32_t from, uint32_t n) {
        struct kvd_msg reply;

        give_back();
        refs_handle = from;
        do {
                reply = peer_call(me, MSG(allocate, from, n));
                forget(&reply);
        } while (reply.number != KVD_MSG_error && reply.allocate_reply.more);
}

static struct kvd_msg send_attach(void) {
        return MSG(attach, KVD_PROTOCOL, kvd_slice_of("again"));
}

static struct kvd_msg send_lifeline(void) {
        return MSG(lifeline, 1);
}

static struct kvd_msg send_join(void) {
        static const uint8_t team[16] = {1};

        return MSG(join, {team, sizeof team});
}

static struct kvd_msg space_message(const char *name, uint64_t blocks, uint32_t create) {
        return MSG(space, .name = kvd_slice_of(name), .create = create, .layers = 1, .kv_heads = 1,
                   .head_dim = 1, .block_tokens = 1, .dtype = 4, .vocab = 1000000,
                   .max_blocks = blocks);
}

static struct kvd_msg send_space(void) {
        static char name[32];

        snprintf(name, sizeof name, "new%u", serial++);
        return space_message(name, 1000, 2);
}

static struct kvd_msg send_detach(void) {
        return MSG(detach, peer_ok(me, space_message("big", 0, 0)).space_reply.space);
}

static struct kvd_msg send_segments(void) {
        return MSG(segments, mine, 0, 0);
}

static struct kvd_msg send_drain(void) {
        return MSG(drain, mine, {numbers, sizeof numbers});
}

static struct kvd_msg send_space_set(void) {
        static const char *const policies[] = {"fifo", "priority", "lru"};

        return MSG(space_set, TARGET, {0}, kvd_slice_of("policy"),
                   kvd_slice_of(policies[serial++ % 3]));
}

static struct kvd_msg send_space_delete(void) {
        struct kvd_msg m = send_space();

        peer_ok(me, m);
        return MSG(space_delete, m.space.name, {0}, 1);
}

static struct kvd_msg send_allocate(void) {
        give_back();
        refs_handle = mine;
        return MSG(allocate, mine, MANY);
}

static struct kvd_msg send_release(void) {
        struct kvd_msg m;

        take(mine, MANY);
        m = MSG(release, mine, taken());
        n_refs = 0;
        return m;
}

static bool is_clustered(struct kvd_key key) {
        uint32_t slots = index_of->table_slots;

        return kvd_bucket(slots, key, 0) < slots / 8 && kvd_bucket(slots, key, 1) < slots / 8;
}

/* Chooses the next tokens of a chain whose blocks all lie in one corner of the table. */
static void choose_numbers(uint64_t root, uint32_t n) {
        struct kvd_key key, parent = kvd_key_root(index_of, 0, root);
        uint32_t token = 0;

        for (uint32_t i = 0; i < n; i++, parent = key) {
                do {
                        token = (token + 1) % 999983;
                        key = kvd_key_block(index_of, parent, &token, 1);
                } while (!is_clustered(key));
                numbers[i] = token;
        }
}

static struct kvd_msg seal_message(kvd_ref parent, uint64_t root, uint32_t n) {
        if (index_of)
                choose_numbers(root, n);
        else
                for (uint32_t i = 0; i < n; i++)
                        numbers[i] = (uint32_t)(tokens_used % 999983);
        return MSG(seal, mine, 0, parent, root, {0}, {refs, n * (uint32_t)sizeof *refs},
                   {numbers, n * (uint32_t)sizeof *numbers});
}

static struct kvd_msg send_seal(void) {
        struct kvd_msg m;

        take(mine, MANY);
        m = seal_message(0, 2 + tokens_used++, n_refs);
        m.seal.fresh = KVD_MOST_seal_reply_fresh / sizeof(kvd_ref);
        return m;
}

/* Fills the ring with posts, each the start of a chain. */
static void fill_ring(void) {
        uint64_t stride = kvd_post_stride(1), posted = atomic_load(&pages[0]->posted);

        take(handles[0], KVD_POSTS);
        for (uint32_t i = 0; i < n_refs; i++) {
                struct kvd_post *post = (void *)((uint8_t *)pages[0] +
                                                 kvd_posts_off(pages[0]->capacity) +
                                                 (posted + i) % KVD_POSTS * stride);

                *post = (struct kvd_post){.block = refs[i], .root = 2 + tokens_used++};
                post->tokens[0] = i;
        }
        atomic_store(&pages[0]->posted, posted + n_refs);
        n_refs = 0;
}

static struct kvd_msg send_flush(void) {
        fill_ring();
        return MSG(flush, handles[0]);
}

static struct kvd_msg send_post(void) {
        fill_ring();
        return (struct kvd_msg){.number = KVD_MSG_post};
}

static struct kvd_msg send_lease(void) {
        static uint64_t key[2];

        key[0]++;
        return MSG(lease, mine, 1, {key, sizeof key}, 1);
}

/* Of as many chains as it may have; the daemon looks at all clients' uses of each end. */
static struct kvd_msg send_session(void) {
        static kvd_ref ends[KVD_MOST_session_blocks / sizeof(kvd_ref)];
        struct kvd_msg reply;

        take(mine, ARRAY_SIZE(ends));
        reply = peer_ok(me, seal_message(0, 2 + tokens_used++, n_refs));
        memcpy(ends, reply.seal_reply.blocks.data, n_refs * sizeof *ends);
        n_refs = 0;
        return MSG(session, mine, kvd_slice_of("agent"), KVD_keep_high, 60,
                   {ends, reply.seal_reply.blocks.size});
}

/* Evicts a block at which many sessions end, each with many chains, as they do at the one before. */
static struct kvd_msg send_evict_ends(void) {
        enum { SESSIONS = 896, EQUAL = 8 };
        struct kvd_msg reply;
        kvd_ref ends[2 * EQUAL];
        char name[16];

        take(mine, 2);
        reply = peer_ok(me, seal_message(0, 2 + tokens_used++, n_refs));
        for (uint32_t i = 0; i < 2 * EQUAL; i++)
                memcpy(ends + i, (const kvd_ref *)reply.seal_reply.blocks.data + i % 2,
                       sizeof *ends);
        n_refs = 0;
        for (uint32_t i = 0; i < SESSIONS; i++) {
                snprintf(name, sizeof name, "%u", i);
                peer_ok(me, MSG(session, mine, kvd_slice_of(name), KVD_keep_high, 60,
                                {ends, sizeof ends}));
        }
        return MSG(evict, TARGET, {0}, 0, ends[1]);
}

static struct kvd_msg send_session_info(void) {
        struct kvd_msg m = send_session();

        peer_ok(me, m);
        return MSG(session_info, TARGET, {0}, 0);
}

static struct kvd_msg send_session_end(void) {
        struct kvd_msg m = send_session();

        peer_ok(me, m);
        return MSG(session_end, TARGET, {0}, kvd_slice_of("agent"), 0);
}

static struct kvd_msg send_evict(void) {
        return MSG(evict, TARGET, {0}, MANY);
}

/* Opens one more table. Closes the previous one first, to make room. */
static struct kvd_msg send_table(void) {
        if (last_sequence)
                peer_ok(me, MSG(table, seq_handle, 2, last_sequence));
        last_sequence = 0;
        return MSG(table, seq_handle, 1, 0, MANY);
}

static struct kvd_msg send_append(void) {
        take(seq_handle, PART);
        return MSG(append, seq_handle, sequence, 1, taken(), {numbers, 4 * n_refs * 4});
}

/* One step after another, each of which is compared with all previous ones. */
static struct kvd_msg send_share(void) {
        static uint32_t step;

        return MSG(share, seq_handle, sequence, step++ * 256 % (7 * PART), 256);
}

/* Takes all proposed changes. */
static struct kvd_msg sync_message(void) {
        for (uint32_t i = 0; i < n_changes; i++)
                numbers[i] = 1;
        return MSG(sync, seq_handle, sequence, {numbers, n_changes * (uint32_t)sizeof *numbers});
}

/* Waits until nothing of the sequence is in progress. */
static void settle(void) {
        struct kvd_msg reply;

        do {
                usleep(1000);
                reply = peer_ok(me, sync_message());
                forget(&reply);
        } while (n_changes || reply.sync_reply.pending);
}

static struct kvd_slice entries(uint32_t first, uint32_t n) {
        for (uint32_t i = 0; i < n; i++)
                numbers[i] = first + i;
        return (struct kvd_slice){numbers, n * (uint32_t)sizeof *numbers};
}

static struct kvd_msg cool_message(uint32_t first, uint32_t n) {
        return MSG(cool, seq_handle, sequence, 1, entries(first, n));
}

/* Returns how many entries will leave; 0 also if the memory for copies is used up. */
static uint32_t cool(struct kvd_msg m) {
        struct kvd_msg reply = peer_call(me, m);

        if (reply.number == KVD_MSG_cool_reply)
                return reply.cool_reply.cooling;
        if (reply.number != KVD_MSG_error ||
            (reply.error.code != EDQUOT && reply.error.code != ENOBUFS))
                die("cool: message %u", reply.number);
        return 0;
}

static struct kvd_msg revive_message(uint32_t first, uint32_t n) {
        return MSG(revive, seq_handle, sequence, 1, entries(first, n));
}

static struct kvd_msg send_cool(void) {
        settle();
        peer_ok(me, revive_message(0, NAMED));
        settle();
        return cool_message(0, NAMED);
}

static struct kvd_msg send_revive(void) {
        settle();
        peer_ok(me, cool_message(0, NAMED));
        settle();
        return revive_message(0, NAMED);
}

/* Takes as many changes as fit, while as many again are proposed. */
static struct kvd_msg send_sync(void) {
        struct kvd_msg reply;

        peer_ok(me, send_cool());
        instance_rest(&d);
        reply = peer_ok(me, sync_message());
        forget(&reply);
        return sync_message();
}

#define BITS_BLOCKS 2048u

/* Entries that no earlier request has named, and blocks for their scores. */
static struct kvd_msg send_compact(void) {
        static uint32_t at = NAMED;

        settle();
        take(seq_handle, BITS_BLOCKS);
        at += KVD_SYNC_CHANGES;
        return MSG(compact, seq_handle, sequence, at - KVD_SYNC_CHANGES, KVD_SYNC_CHANGES, 64,
                   taken());
}

/* Selections of 64 queries, in blocks of 256 bytes. */
static struct kvd_msg send_critical(void) {
        struct kvd_msg reply;

        do {
                usleep(1000);
                reply = peer_call(me, MSG(critical, seq_handle, sequence, 2));
        } while (reply.number != KVD_MSG_error && !reply.critical_reply.ready);
        take(seq_handle, BITS_BLOCKS);
        return MSG(critical, seq_handle, sequence, 1, taken(), 64, n_refs / 2, 8);
}

static struct kvd_msg send_summaries(void) {
        return MSG(summaries, seq_handle);
}

static struct kvd_msg send_sample(void) {
        take(seq_handle, BITS_BLOCKS);
        return MSG(sample, seq_handle, 50, BITS_BLOCKS, taken());
}

static struct kvd_msg send_sample_done(void) {
        return MSG(sample_done, seq_handle, 1);
}

static struct kvd_msg send_profile(void) {
        return MSG(profile, TARGET, {0}, 1, {0}, 0);
}

static struct kvd_msg send_block_map(void) {
        return MSG(block_map, TARGET, {0}, 0, 1, 1);
}

static struct kvd_msg send_pins(void) {
        return MSG(pins, TARGET, {0}, holder, {0}, 0);
}

static struct kvd_msg send_chain_info(void) {
        return MSG(chain_info, TARGET, {0}, 0, 0);
}

/* The check of a part of the blocks, which takes longest. */
static struct kvd_msg send_check(void) {
        return MSG(check, TARGET, {0}, UINT64_C(1) << 48 | (serial++ % 7) * 100);
}

static struct kvd_msg send_daemon_info(void) {
        return (struct kvd_msg){.number = KVD_MSG_daemon_info};
}

static struct kvd_msg send_space_info(void) {
        return MSG(space_info, scale.spaces / 2);
}

static struct kvd_msg send_client_info(void) {
        return MSG(client_info, scale.peers - 1);
}

static struct kvd_msg send_domain_info(void) {
        return MSG(domain_info, 0);
}

/* A long chain that is resident, unless others have evicted it. */
static struct kvd_msg send_fetch(void) {
        static uint32_t tokens[MANY];
        static uint32_t n;

        if (!n) {
                struct kvd_msg m = send_seal();

                n = m.seal.tokens.size / (uint32_t)sizeof *tokens;
                memcpy(tokens, numbers, n * sizeof *tokens);
                forget(&(struct kvd_msg){.number = peer_call(me, m).number});
        }
        return MSG(fetch, mine, 0, 1 + tokens_used, {tokens, n * (uint32_t)sizeof *tokens});
}

static struct kvd_msg send_follow(void) {
        return MSG(follow, TARGET, {0}, 1); /* the page of the first client that uses it */
}

static struct kvd_msg send_tier_info(void) {
        return MSG(tier_info, 0);
}

#define ENDED_BLOCKS 128u /* more than are cleared at once */

/* A new client each time, which fills blocks. */
static struct kvd_msg send_client_end(void) {
        static struct peer_end *other;
        uint32_t number, handle;

        if (other)
                peer_close(other);
        other = peer_connect(d.socket);
        number = peer_ok(other, send_attach()).attach_reply.client;
        handle = peer_ok(other, space_message("sequences", 0, 0)).space_reply.space;
        peer_ok(other, MSG(allocate, handle, ENDED_BLOCKS));
        return MSG(client_end, number);
}

/* ---- every message --------------------------------------------------------------------------- */

#define FIRST_OF_WORKERS 64u /* messages between the daemon and its own processes */

typedef struct kvd_msg request(void);

/* The messages that a client may send. measure_all() reports one that is missing here. */
#define ROW(message) [KVD_MSG_##message] = send_##message
static request *const rows[FIRST_OF_WORKERS] = {
        ROW(attach),      ROW(join),         ROW(space),       ROW(detach),       ROW(segments),
        ROW(drain),       ROW(space_set),    ROW(seal),        ROW(allocate),     ROW(release),
        ROW(lease),       ROW(evict),        ROW(table),       ROW(append),       ROW(share),
        ROW(sync),        ROW(cool),         ROW(revive),      ROW(compact),      ROW(critical),
        ROW(summaries),   ROW(sample),       ROW(sample_done), ROW(profile),      ROW(block_map),
        ROW(pins),        ROW(chain_info),   ROW(check),       ROW(daemon_info),  ROW(space_info),
        ROW(client_info), ROW(client_end),   ROW(domain_info), ROW(space_delete), ROW(fetch),
        ROW(tier_info),   ROW(follow),       ROW(post),        ROW(flush),        ROW(lifeline),
        ROW(session),     ROW(session_info), ROW(session_end),
};

/*
 * The error of a reply. ENODATA if the reply says that there was nothing to do. Two errors count as
 * success: a sample whose blocks were freed before a worker measured it, and a lifeline that is not
 * needed.
 */
static int error_of(const struct kvd_msg *asked, const struct kvd_msg *reply) {
        switch (reply->number) {
        case KVD_MSG_error:
                return (asked->number == KVD_MSG_sample_done && reply->error.code == EIO) ||
                                       (asked->number == KVD_MSG_lifeline &&
                                        reply->error.code == EALREADY) ?
                               0 :
                               (int)reply->error.code;
        case KVD_MSG_cool_reply: return reply->cool_reply.cooling ? 0 : ENODATA;
        case KVD_MSG_revive_reply: return reply->revive_reply.exact ? 0 : ENODATA;
        case KVD_MSG_sync_reply: return reply->sync_reply.changes.size ? 0 : ENODATA;
        case KVD_MSG_compact_reply: return reply->compact_reply.entries ? 0 : ENODATA;
        case KVD_MSG_share_reply: return reply->share_reply.queued ? 0 : ENODATA;
        default: return 0;
        }
}

/* A message without a reply is done before the next request. */
static struct kvd_msg answer_to(struct peer_end *p, struct kvd_msg *m) {
        if (m->number != KVD_MSG_post)
                return peer_call(p, *m);
        peer_send(p, m);
        return peer_call(p, send_daemon_info());
}

/* Judges the shortest of the repetitions that succeeded, or the error if none did. */
static void measure(const char *name, request *make, const char *state) {
        struct peer_end *half = NULL;
        uint64_t least = UINT64_MAX;
        int error = 0;

        for (int i = 0; i < REPEATED || (i < MOST_REPEATED && least / 1000 > REQUEST_US); i++) {
                struct kvd_msg m = make(), reply;
                uint64_t began;
                int r;

                if (m.number == KVD_MSG_attach)
                        half = peer_connect(d.socket);
                instance_rest(&d);
                began = instance_cpu_ns(&d);
                reply = answer_to(half ?: me, &m);
                began = since(began);
                r = error_of(&m, &reply);
                error = r ?: error;
                least = r ? least : MIN(least, began);
                forget(&reply);
                half = half ? peer_close(half) : NULL;
        }
        failed |= least == UINT64_MAX;
        judge(name, state, least == UINT64_MAX ? 0 : least, REQUEST_US,
              least == UINT64_MAX ? error : 0);
}

static void measure_all(const char *state) {
        for (uint32_t number = 1; number < FIRST_OF_WORKERS; number++) {
                const struct kvd_msg_info *info = kvd_msg_info(number);

                if (!info || !info->name)
                        continue;
                if (!rows[number])
                        die("message %s has no row in test-budget.c", info->name);
                measure(info->name, rows[number], state);
        }
}

/* ---- states ---------------------------------------------------------------------------------- */

static void *map_pins(struct peer_end *p) {
        uint64_t bytes = p->fds.n > 1 ? (uint64_t)lseek(p->fds.fd[1], 0, SEEK_END) : 0;
        void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, p->fds.fd[1], 0);

        if (at == MAP_FAILED)
                die("a pin page cannot be mapped");
        pins_everywhere(at);
        return at;
}

static uint32_t big_blocks(void) {
        return scale.blocks + MANY * 3 / 2;
}

static void open_big(uint32_t peer) {
        handles[peer] =
                peer_ok(peers[peer], space_message("big", big_blocks(), 1)).space_reply.space;
}

static struct kvd_pin_words *words_of(uint32_t peer) {
        return (struct kvd_pin_words *)((uint8_t *)pages[peer] + KVD_PINS_OFF);
}

static void connect_all(void) {
        for (uint32_t i = 0; i < scale.peers; i++) {
                peers[i] = peer_attach(d.socket);
                open_big(i);
                pages[i] = map_pins(peers[i]);
        }
        me = peers[0];
        mine = handles[0];
        holder = scale.peers;
}

/* A deep chain, and short ones. */
static void fill(void) {
        kvd_ref parent = 0;

        for (uint32_t done = 0; done < scale.blocks;) {
                bool deep = done < scale.blocks / 4;
                struct kvd_msg reply;

                take(mine, deep ? MANY : CHAIN);
                if (!n_refs)
                        die("the pool is too small for %u blocks", scale.blocks);
                reply = peer_ok(me, deep ? seal_message(parent, 2, n_refs) :
                                           seal_message(0, 2 + tokens_used++, n_refs));
                memcpy(&parent, (const kvd_ref *)reply.seal_reply.blocks.data + n_refs - 1,
                       sizeof parent);
                done += n_refs;
        }
        n_refs = 0;
}

/*
 * Chains whose blocks all lie in one corner of the table, which is full long before the space is.
 */
static void fill_a_corner(void) {
        struct kvd_pinpage *page;

        target = "clustered";
        mine = peer_ok(me, space_message(target, scale.blocks / 4 + MANY, 1)).space_reply.space;
        index_of = mmap(NULL, (size_t)lseek(me->fds.fd[0], 0, SEEK_END), PROT_READ, MAP_SHARED,
                        me->fds.fd[0], 0);
        if (index_of == MAP_FAILED)
                die("an index cannot be mapped");
        page = map_pins(me);
        *(uint32_t *)((uint8_t *)page + KVD_PINS_OFF) = 1;
        holder = 1;
        for (uint32_t done = 0; done < scale.blocks / 4; done += n_refs) {
                n_refs = 0;
                take(mine, MANY);
                if (!n_refs)
                        die("the pool is too small for a second space");
                peer_ok(me, seal_message(0, 2 + tokens_used++, n_refs));
        }
        n_refs = 0;
}

static void big_again(void) {
        give_back();
        target = "big";
        mine = handles[0];
        index_of = NULL;
}

#define MOST_SPACES 4096u
#define SPACES_TO_COME (2 * (3 * MOST_REPEATED + 2))

/* Makes as many spaces as wanted or allowed, less those that requests will make. */
static void make_spaces(void) {
        struct kvd_msg reply;
        char name[32];
        uint32_t most = MIN(scale.spaces, MOST_SPACES - SPACES_TO_COME), n = 2;

        for (; n < most; n++) {
                snprintf(name, sizeof name, "space%u", n);
                reply = peer_call(me, space_message(name, 1000, 2));
                if (reply.number == KVD_MSG_error)
                        break;
        }
        if (n == most)
                return;
        printf("only %u spaces: the machine allows no more descriptors\n", n);
        for (uint32_t i = n - SPACES_TO_COME; i < n; i++) {
                snprintf(name, sizeof name, "space%u", i);
                peer_ok(me, MSG(space_delete, kvd_slice_of(name), {0}, 1));
        }
        scale.spaces = n;
}

static void set_method(const char *name) {
        peer_ok(me, MSG(space_set, kvd_slice_of("sequences"), {0}, kvd_slice_of(name),
                        kvd_slice_of("on")));
}

static void open_sequence(void) {
        struct kvd_msg m = MSG(space, .name = kvd_slice_of("sequences"), .create = 1, .layers = 1,
                               .kv_heads = 1, .head_dim = 8, .block_tokens = 4, .dtype = 1,
                               .vocab = 1000000, .max_blocks = 100000);

        seq_handle = peer_ok(me, m).space_reply.space;
        set_method("memshare");
        set_method("keydiff");
        set_method("kvreviver");
        sequence = peer_ok(me, MSG(table, seq_handle, 1, 0, 90000)).table_reply.sequence;
}

/* Opens as many sequences as allowed; each has copies on their way. */
static void open_more_sequences(void) {
        for (uint32_t i = 1; i < KVD_MAX_SEQUENCES; i++) {
                struct kvd_msg reply = peer_call(me, MSG(table, seq_handle, 1, 0, 64));
                uint32_t all[] = {0, 1, 2, 3}, number = reply.table_reply.sequence;

                if (reply.number == KVD_MSG_error && i < KVD_MAX_SEQUENCES / 2)
                        die("only %u sequences", i);
                if (reply.number == KVD_MSG_error)
                        break;
                last_sequence = number;
                take(seq_handle, ARRAY_SIZE(all));
                reply = peer_ok(me, MSG(append, seq_handle, number, 1, taken(),
                                        {numbers, 4 * n_refs * 4}));
                forget(&reply);
                cool(MSG(cool, seq_handle, number, 1, {all, sizeof all}));
        }
}

/* The last client pins all blocks except for those that `me` fills, and marks all as just used. */
static void pin_everything(void) {
        struct kvd_pin_words *words = words_of(scale.peers - 1);

        take(mine, MANY);
        for (uint32_t id = 0; id < big_blocks(); id++) {
                words[id].pins = 1;
                words[id].touch = 1;
        }
        for (uint32_t i = 0; i < n_refs; i++)
                words[kvd_ref_id(refs[i])].pins = 0;
}

/*
 * Copies fill all memory and files that they may have. Then a request asks for as many more as it
 * can name.
 */
static void no_room_for_copies(void) {
        uint32_t first = n_entries, full = 0;
        uint64_t least = UINT64_MAX;
        struct kvd_msg reply;

        for (uint32_t i = 0; i < (RANGES + 1) * NAMED / PART; i++) {
                reply = peer_ok(me, send_append());
                forget(&reply);
        }
        for (uint32_t i = 0; full < RANGES && i < 4000; i++) {
                settle();
                instance_rest(&d);
                full = cool(cool_message(first + i % RANGES * NAMED, NAMED)) ? 0 : full + 1;
        }
        for (uint32_t i = 0, n = 0; i < 4 * MOST_REPEATED && n < MOST_REPEATED &&
                                    (n < REPEATED || least / 1000 > REQUEST_US);
             i++) {
                uint64_t began;

                settle();
                instance_rest(&d);
                began = instance_cpu_ns(&d);
                /* the worker has freed room meanwhile: retry */
                if (cool(cool_message(first + RANGES * NAMED, NAMED)))
                        continue;
                least = MIN(least, since(began));
                n++;
        }
        judge("cool", "no room", least, REQUEST_US, 0);
}

/* ---- background work ------------------------------------------------------------------------- */

/*
 * Runs with real-time priority where that is allowed: while the caller waits for a processor, the
 * daemon would do piece after piece.
 */
static void go_first(bool on) {
        const struct sched_param p = {.sched_priority = on};

        sched_setscheduler(0, on ? SCHED_FIFO : SCHED_OTHER, &p);
}

/* Watches the daemon until it rests. Returns its longest work between two answers. */
static uint64_t watch(void) {
        struct work_begun begun = work_begin(&d);
        int64_t most = 0;

        go_first(true);
        for (int idle = 0; idle < 20;) {
                peer_ok(peers[1], send_daemon_info());
                most = MAX(most, work_since(&d, &begun));
                begun = work_begin(&d);
                usleep(500);
                idle = instance_cpu_ns(&d) == begun.cpu_ns ? idle + 1 : 0;
        }
        go_first(false);
        return (uint64_t)most;
}

/* Gives the daemon something to do. attempt: 0 the first time, 1 the second, ... */
typedef void behind(uint32_t attempt);

/* Fails only if a piece is too long in every attempt. */
static void watch_all(const char *what, behind *begin) {
        uint64_t least = UINT64_MAX;

        for (uint32_t i = 0; i < ATTEMPTS && least / 1000 > PIECE_US; i++) {
                begin(i);
                least = MIN(least, watch());
        }
        judge(what, "pieces", least, PIECE_US, 0);
}

static void flood_of_policies(uint32_t attempt) {
        for (int i = 0; i < 50; i++)
                peer_ok(me, send_space_set());
}

static void touching_client_leaves(uint32_t attempt) {
        uint32_t last = scale.peers - 1 - attempt;

        for (uint32_t id = 0; id < big_blocks(); id++)
                words_of(last)[id].touch = 1;
        peer_ok(peers[last], MSG(detach, handles[last]));
}

#define ATTACHMENTS 64u

/* A process with as many attachments as a connection may have, and blocks that it fills. */
static void process_dies(uint32_t attempt) {
        pid_t pid = fork();
        int status;

        if (pid == 0) {
                struct peer_end *p = peer_attach(d.socket);

                prctl(PR_SET_PDEATHSIG, SIGKILL);
                for (uint32_t i = 0; i < ATTACHMENTS && scale.peers + i < 255; i++) {
                        uint32_t handle = peer_ok(p, space_message("big", 0, 0)).space_reply.space;

                        peer_call(p, MSG(allocate, handle, MANY / ATTACHMENTS));
                }
                raise(SIGKILL);
        }
        waitpid(pid, &status, 0);
}

static void make_big_again(void) {
        for (uint32_t i = 0; i < scale.peers - ATTEMPTS; i++)
                open_big(i);
        mine = handles[0];
        fill();
}

static void space_goes(uint32_t attempt) {
        if (attempt)
                make_big_again();
        peer_ok(me, MSG(space_delete, TARGET, {0}, 1));
}

/* ---- all of it ------------------------------------------------------------------------------- */

/* The daemon inherits the limit. It has about five descriptors for each space. */
static bool allow_descriptors(rlim_t n) {
        struct rlimit limit;

        getrlimit(RLIMIT_NOFILE, &limit);
        limit.rlim_cur = limit.rlim_max = MAX(limit.rlim_max, n);
        return setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

int main(int argc, char **argv) {
        char file[64], setting[96];

        if (argc > 1 && strcmp(argv[1], "--full") == 0)
                scale = (struct scale){238, 4096, 1000000};
        unsetenv("MALLOC_PERTURB_"); /* it makes glibc write all memory that is requested */
        if (!allow_descriptors(8 * scale.spaces + 1024)) {
                printf("skip: its daemon needs %u descriptors\n", 8 * scale.spaces + 1024);
                return 77;
        }
        snprintf(file, sizeof file, "/var/tmp/kvd-test-budget-%d", getpid());
        snprintf(setting, sizeof setting, "daemon.file=%s", file);
        instance_start(&d,
                       SETTINGS("daemon.pool=192M", setting, "daemon.file_size=64M",
                                "daemon.log=error", "daemon.pages=small", "daemon.max_spaces=4096",
                                "daemon.overhead=64G", "daemon.spill=4M", "domain other.users=4002",
                                "domain other.guarantee=32M"));
        printf("the machine is %.1f times as slow as a fast one\n", slowness());
        connect_all();
        open_sequence();
        fill();
        make_spaces();
        measure_all("ordinary");
        measure("evict", send_evict_ends, "sessions with equal ends");
        pin_everything();
        open_more_sequences();
        measure_all("adversarial");
        give_back();
        fill_a_corner();
        measure_all("clustered");
        big_again();
        no_room_for_copies();
        watch_all("50 changes of policy", flood_of_policies);
        watch_all("detach, all touch words set", touching_client_leaves);
        watch_all("death of a process", process_dies);
        watch_all("space_delete --force", space_goes);
        instance_stop(&d);
        instance_sweep(&d);
        unlink(file);
        return failed;
}
