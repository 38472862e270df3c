/* SPDX-License-Identifier: Apache-2.0 */

/*
 * events: tells routers which blocks a space has, in the form that vLLM (0.32,
 * distributed/kv_events.py) uses for its own blocks: batches in msgpack, published by ZeroMQ.
 *
 *      message   topic | number of the batch, 8 bytes, big-endian | batch
 *      batch     [time, [event, ...], nil]
 *      event     {"type": "BlockStored", ...}, "BlockRemoved" or "AllBlocksCleared"
 *      replay    the request is a number; the answer is every batch from it on, and then number -1
 *
 * The first batches clear the space and then list all its blocks. A request for batches that are
 * no longer kept, or that a previous publisher sent, is answered with one batch under the last
 * number, which also clears the space and lists all its blocks.
 */

#include <errno.h>
#include <msgpack.h>
#include <time.h>

#include "ipc/base/device.h"
#include "ipc/base/enums.h"
#include "ipc/base/sys.h"
#include "tools/kvctl/follow.h"
#include "tools/kvctl/publish.h"
#include "tools/kvctl/replays.h"

#define POLL_S 0.01
#define KEPT 10000u /* batches, as many as vLLM keeps */
#define KEPT_BYTES (UINT64_C(64) << 20)
#define BATCH_BLOCKS 4096u /* blocks in one batch, about */

/* Blocks of one event; each follows the previous one in its chain. */
struct row {
        msgpack_sbuffer hashes, tokens;
        uint64_t parent, last, root;
        uint32_t n, n_tokens, depth;
};

/* Events that are not published yet. */
struct batch {
        msgpack_sbuffer events;
        uint32_t n_events, n_blocks;
        struct row row;
};

struct kept_batch {
        void *data; /* owned */
        size_t size;
};

struct events {
        const char *topic;
        struct publisher *publisher; /* owned */
        struct follow *follow;       /* owned */
        struct batch batch;
        uint64_t n; /* batches published, of which the last n_kept are in kept */
        uint32_t n_kept;
        uint64_t kept_bytes;
        struct kept_batch kept[KEPT]; /* by number, modulo KEPT */
        struct kvd_list replays;      /* of struct replay, owned */
};

/* ---- batches --------------------------------------------------------------------------------- */

static void batch_begin(struct batch *b) {
        msgpack_sbuffer_init(&b->events);
        msgpack_sbuffer_init(&b->row.hashes);
        msgpack_sbuffer_init(&b->row.tokens);
        b->n_events = b->n_blocks = b->row.n = b->row.n_tokens = 0;
}

static void batch_clear(struct batch *b) {
        msgpack_sbuffer_clear(&b->events);
        msgpack_sbuffer_clear(&b->row.hashes);
        msgpack_sbuffer_clear(&b->row.tokens);
        b->n_events = b->n_blocks = b->row.n = b->row.n_tokens = 0;
}

static void batch_end(struct batch *b) {
        msgpack_sbuffer_destroy(&b->events);
        msgpack_sbuffer_destroy(&b->row.hashes);
        msgpack_sbuffer_destroy(&b->row.tokens);
}

static msgpack_packer packer(msgpack_sbuffer *to) {
        msgpack_packer pk;

        msgpack_packer_init(&pk, to, msgpack_sbuffer_write);
        return pk;
}

static void put_text(msgpack_packer *pk, const char *text) {
        msgpack_pack_str_with_body(pk, text, strlen(text));
}

static void put_raw(msgpack_packer *pk, const msgpack_sbuffer *raw) {
        pk->callback(pk->data, raw->data, raw->size);
}

static msgpack_packer begin_event(struct batch *b, const char *type, uint32_t members) {
        msgpack_packer pk = packer(&b->events);

        b->n_events++;
        msgpack_pack_map(&pk, members + 1);
        put_text(&pk, "type");
        put_text(&pk, type);
        return pk;
}

/* ---- events ---------------------------------------------------------------------------------- */

/* As vLLM does with a request's cache_salt: only the first block of a chain has it. */
static void put_salt(msgpack_packer *pk, const struct row *row) {
        char salt[24];

        snprintf(salt, sizeof salt, "%llu", (unsigned long long)row->root);
        put_text(pk, "extra_keys");
        msgpack_pack_array(pk, row->n);
        for (uint32_t i = 0; i < row->n; i++)
                if (row->depth + i > 0) {
                        msgpack_pack_nil(pk);
                } else {
                        msgpack_pack_array(pk, 1);
                        put_text(pk, salt);
                }
}

/* vLLM's word for where the blocks are. */
static const char *medium_of(const struct events *e) {
        return follow_index(e->follow)->backend == KVD_BACKEND_HOST ? "CPU" : "GPU";
}

static void put_row_members(msgpack_packer *pk, const struct events *e, const struct row *row) {
        put_text(pk, "block_hashes");
        msgpack_pack_array(pk, row->n);
        put_raw(pk, &row->hashes);
        put_text(pk, "parent_block_hash");
        if (row->parent)
                msgpack_pack_uint64(pk, row->parent);
        else
                msgpack_pack_nil(pk);
        put_text(pk, "token_ids");
        msgpack_pack_array(pk, row->n_tokens);
        put_raw(pk, &row->tokens);
        put_text(pk, "block_size");
        msgpack_pack_uint32(pk, follow_index(e->follow)->geometry.block_tokens);
        put_text(pk, "lora_id");
        msgpack_pack_nil(pk);
        put_text(pk, "medium");
        put_text(pk, medium_of(e));
        put_text(pk, "lora_name");
        msgpack_pack_nil(pk);
}

static void end_row(struct events *e) {
        struct row *row = &e->batch.row;
        msgpack_packer pk;

        if (!row->n)
                return;
        pk = begin_event(&e->batch, "BlockStored", row->root ? 8 : 7);
        put_row_members(&pk, e, row);
        if (row->root)
                put_salt(&pk, row);
        msgpack_sbuffer_clear(&row->hashes);
        msgpack_sbuffer_clear(&row->tokens);
        row->n = row->n_tokens = 0;
}

static void begin_row(struct row *row, const struct kvd_stored *block) {
        row->parent = block->parent;
        row->depth = block->depth;
        row->root = block->salt;
}

static void on_stored(void *arg, const struct kvd_stored *block) {
        struct events *e = arg;
        struct row *row = &e->batch.row;
        msgpack_packer hashes = packer(&row->hashes), tokens = packer(&row->tokens);

        if (row->n && row->last != block->parent)
                end_row(e);
        if (!row->n)
                begin_row(row, block);
        msgpack_pack_uint64(&hashes, block->hash);
        for (uint32_t i = 0; i < block->n_tokens; i++)
                msgpack_pack_uint32(&tokens, block->tokens[i]);
        row->n++;
        row->n_tokens += block->n_tokens;
        row->last = block->hash;
        e->batch.n_blocks++;
}

static void on_removed(void *arg, uint64_t hash) {
        struct events *e = arg;
        msgpack_packer pk;

        end_row(e);
        pk = begin_event(&e->batch, "BlockRemoved", 2);
        put_text(&pk, "block_hashes");
        msgpack_pack_array(&pk, 1);
        msgpack_pack_uint64(&pk, hash);
        put_text(&pk, "medium");
        put_text(&pk, medium_of(e));
        e->batch.n_blocks++;
}

static void on_cleared(void *arg) {
        struct events *e = arg;

        end_row(e);
        begin_event(&e->batch, "AllBlocksCleared", 0);
}

/* ---- publishing ------------------------------------------------------------------------------ */

static double now_s(void) {
        struct timespec now;

        clock_gettime(CLOCK_REALTIME, &now);
        return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void put_batch(struct events *e, msgpack_sbuffer *to) {
        msgpack_packer pk = packer(to);

        end_row(e);
        msgpack_pack_array(&pk, 3);
        msgpack_pack_double(&pk, now_s());
        msgpack_pack_array(&pk, e->batch.n_events);
        put_raw(&pk, &e->batch.events);
        msgpack_pack_nil(&pk); /* data_parallel_rank */
}

static struct kept_batch *kept_at(struct events *e, uint64_t seq) {
        return &e->kept[seq % KEPT];
}

static void drop_oldest(struct events *e) {
        struct kept_batch *oldest = kept_at(e, e->n - e->n_kept--);

        e->kept_bytes -= oldest->size;
        free(oldest->data);
        *oldest = (struct kept_batch){0};
}

/* Takes ownership of the bytes. */
static void keep(struct events *e, msgpack_sbuffer *batch) {
        while (e->n_kept && (e->n_kept == KEPT || e->kept_bytes + batch->size > KEPT_BYTES))
                drop_oldest(e);
        e->kept_bytes += batch->size;
        e->n_kept++;
        *kept_at(e, e->n++) = (struct kept_batch){batch->data, batch->size};
}

static void publish_batch(struct events *e) {
        msgpack_sbuffer to;

        if (!e->batch.n_events && !e->batch.row.n)
                return;
        msgpack_sbuffer_init(&to);
        put_batch(e, &to);
        batch_clear(&e->batch);
        publish(e->publisher, e->topic, e->n, to.data, to.size);
        keep(e, &to);
}

static void on_stored_live(void *arg, const struct kvd_stored *block) {
        struct events *e = arg;

        on_stored(e, block);
        if (e->batch.n_blocks >= BATCH_BLOCKS)
                publish_batch(e);
}

static const struct kvd_follow_ops live_ops = {.stored = on_stored_live,
                                               .removed = on_removed,
                                               .cleared = on_cleared};

/* ---- replay ---------------------------------------------------------------------------------- */

static const struct kvd_follow_ops all_ops = {.stored = on_stored};

/* One batch that replaces all batches so far: it clears the space and lists all its blocks. */
static int answer_anew(struct events *e) {
        msgpack_sbuffer to;
        int r;

        on_cleared(e);
        r = follow_tell_all(e->follow, &all_ops, e);
        msgpack_sbuffer_init(&to);
        put_batch(e, &to);
        batch_clear(&e->batch);
        if (r == 0)
                publisher_answer(e->publisher, e->topic, e->n - 1, to.data, to.size);
        msgpack_sbuffer_destroy(&to);
        return r;
}

static int answer(void *arg, struct replay *replay) {
        struct events *e = arg;
        const struct kept_batch *kept = kept_at(e, replay->next);

        if (replay->next < e->n - e->n_kept || replay->next > e->n) {
                replay->next = e->n;
                return answer_anew(e);
        }
        if (replay->next < e->n) {
                publisher_answer(e->publisher, e->topic, replay->next++, kept->data, kept->size);
                return 0;
        }
        publisher_answer(e->publisher, "", UINT64_MAX, "", 0);
        return 1;
}

/* ---- the verb -------------------------------------------------------------------------------- */

static int check_kind(struct kvctl *kvctl, const struct follow *follow) {
        const struct kvd_index *ix = follow_index(follow);

        if (!ix || (ix->kind == KVD_kind_causal && ix->geometry.layer_groups == 1))
                return 0;
        return kvctl_fail(kvctl, KVCTL_NO, -EOPNOTSUPP,
                          "routers look for the longest prefix, so a bidirectional space, or one "
                          "with several layer groups, cannot be published");
}

static int step(struct kvctl *kvctl, struct events *e) {
        struct asker asker;
        uint64_t seq;
        int r = follow_step(e->follow);

        if (r == 0)
                r = check_kind(kvctl, e->follow);
        publish_batch(e);
        while (r == 0 && publisher_asked(e->publisher, &asker, &seq))
                if (!replays_add(&e->replays, &asker, seq))
                        r = kvctl_out_of_memory(kvctl);
        return r < 0 ? r : replays_send(&e->replays, e->publisher, answer, e);
}

static int run(struct kvctl *kvctl, struct events *e) {
        double seconds = kvctl->args.seconds[FLAG_FOR];
        uint64_t end_ns = seconds > 0 ? sys_now_ns() + (uint64_t)(seconds * 1e9) : UINT64_MAX;
        int r;

        on_cleared(e);
        screen_watch_begin(&kvctl->screen, false, false);
        do {
                r = step(kvctl, e);
        } while (r == 0 && sys_now_ns() < end_ns && screen_wait(&kvctl->screen, POLL_S));
        screen_watch_end(&kvctl->screen);
        return r;
}

/* There is no password, and the published batches contain tokens. */
static int check_reach(struct kvctl *kvctl, const char *endpoint) {
        static const char *const near[] = {"tcp://127.",
                                           "tcp://localhost:", "tcp://[::1]:", "ipc://"};

        for (size_t i = 0; i < ARRAY_SIZE(near); i++)
                if (strncmp(endpoint, near[i], strlen(near[i])) == 0)
                        return 0;
        if (args_has(&kvctl->args, FLAG_PUBLIC))
                return 0;
        return kvctl_fail(
                kvctl, KVCTL_USAGE, -EINVAL,
                "%s: other machines could reach that and read the requests' tokens; add --public if they may",
                endpoint);
}

static int open_sockets(struct kvctl *kvctl, struct events *e) {
        const struct args *args = &kvctl->args;
        const char *at = args_has(args, FLAG_PUBLISH) ? args->text[FLAG_PUBLISH] :
                                                        "tcp://127.0.0.1:5557";
        int r = check_reach(kvctl, at);

        if (r == 0 && args_has(args, FLAG_REPLAY))
                r = check_reach(kvctl, args->text[FLAG_REPLAY]);
        if (r < 0)
                return r;
        kvctl->exit = KVCTL_NO;
        return publisher_new(at, args->text[FLAG_REPLAY], &e->publisher, &kvctl->why);
}

static int begin(struct kvctl *kvctl, struct events *e, const struct space_name *space) {
        const struct args *args = &kvctl->args;
        int r = follow_begin(kvctl, space, true, false, &live_ops, e, &e->follow);

        if (r == 0)
                r = check_kind(kvctl, e->follow);
        if (r == 0)
                r = open_sockets(kvctl, e);
        if (r < 0)
                return r;
        e->topic = args_has(args, FLAG_TOPIC) ? args->text[FLAG_TOPIC] : "";
        printf("Publishing %s at %s", space->name, publisher_endpoint(e->publisher));
        if (args_has(args, FLAG_REPLAY))
                printf(", replays at %s", publisher_replay_endpoint(e->publisher));
        putchar('\n');
        return kvctl_flush(kvctl);
}

static void events_free(struct events *e) {
        while (e->n_kept)
                drop_oldest(e);
        replays_clear(&e->replays);
        batch_end(&e->batch);
        follow_end(e->follow);
        publisher_free(e->publisher);
        free(e);
}

int verb_events(struct kvctl *kvctl, struct answer *answer) {
        struct events *e = calloc(1, sizeof *e);
        struct space_name space;
        int r = e ? kvctl_space(kvctl, &space) : kvctl_out_of_memory(kvctl);

        (void)answer;
        kvctl->streams = true;
        if (!e)
                return r;
        batch_begin(&e->batch);
        if (r == 0)
                r = begin(kvctl, e, &space);
        if (r == 0)
                r = run(kvctl, e);
        events_free(e);
        return r;
}
