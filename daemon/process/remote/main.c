/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The remote process forwards the daemon's requests to the servers, one request at a time, but all
 * blocks of a request at once. It compares the records that it receives with the items that were
 * requested. A block's memory is mapped only while the block is moved.
 */

#include "daemon/process/remote/main.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "daemon/process/child_end.h"
#include "daemon/process/remote/dialect.h"
#include "daemon/process/remote/sealed.h"
#include "ipc/base/mapped.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define FIND_NS UINT64_C(10000000000) /* no more blocks are looked for after this time */

struct remote_process {
        const struct dialect *dialect; /* of the servers; NULL: before remote_open */
        bool stale;                    /* as in struct dialect_state */
        uint8_t secret[KVD_REMOTE_KEY];
        char tenant[KVD_NAME_MAX + 1];
        struct sealed_keys keys; /* of the request's tenant and content */
        uint64_t block_bytes;

        uint32_t n;                                     /* items of the request */
        struct kvd_remote_item items[KVD_REMOTE_ITEMS]; /* aligned copies from the request */
        uint32_t tokens[KVD_REMOTE_TOKENS];
        const uint32_t *tokens_of[KVD_REMOTE_ITEMS];
        void *blocks[KVD_REMOTE_ITEMS];
        struct mapped mappings[KVD_REMOTE_ITEMS];
        struct kvd_key names[KVD_REMOTE_ITEMS];
        int32_t errors[KVD_REMOTE_FOUND];
        bool wants_checksums;
        uint64_t checksums[KVD_REMOTE_ITEMS]; /* of the blocks read */
};

static struct remote_process process; /* lives as long as the process */

/* ---- records --------------------------------------------------------------------------------- */

static const struct kvd_key *asked_names; /* of the blocks in the current request to servers */

static void write_key(uint32_t item, char ret[static RECORD_KEY]) {
        struct kvd_key name = asked_names[item];

        snprintf(ret, RECORD_KEY, "%s:%016llx%016llx", process.tenant, (unsigned long long)name.hi,
                 (unsigned long long)name.lo);
}

static uint64_t record_bytes(uint32_t item) {
        return sealed_bytes(process.items[item].n_tokens, process.block_bytes);
}

static int take_record(uint32_t item, const uint8_t *record, size_t size) {
        int r = sealed_open(&process.keys, &process.items[item], process.tokens_of[item], record,
                            size, process.blocks[item], process.block_bytes);

        if (r == 0 && process.wants_checksums)
                process.checksums[item] = XXH3_64bits(process.blocks[item], process.block_bytes);
        return r;
}

static bool make_record(uint32_t item, uint8_t *to) {
        return sealed_make(&process.keys, &process.items[item], process.tokens_of[item],
                           process.blocks[item], process.block_bytes, to);
}

static struct records records_of(const struct kvd_key *names, uint32_t n) {
        asked_names = names;
        return (struct records){.n = n,
                                .errors = process.errors,
                                .most = sealed_bytes(KVD_MAX_BLOCK_TOKENS, process.block_bytes),
                                .key = write_key,
                                .bytes = record_bytes,
                                .take = take_record,
                                .make = make_record};
}

/* errors: 0 for blocks that are stored. */
static void look_for(const struct kvd_key *names, uint32_t n) {
        struct records records = records_of(names, n);

        for (uint32_t i = 0; i < n; i++)
                process.errors[i] = -EINPROGRESS;
        process.dialect->look(&records);
}

/* ---- decoding requests ----------------------------------------------------------------------- */

static int begin(struct kvd_slice tenant, struct kvd_slice content) {
        struct kvd_remote_content of;

        if (!process.dialect || content.size != sizeof of || !tenant.size)
                return -EPROTO;
        kvd_slice_copy(tenant, process.tenant, sizeof process.tenant);
        memcpy(&of, content.data, sizeof of);
        sealed_keys(process.secret, process.tenant, &of, &process.keys);
        return 0;
}

static int take_tokens(struct kvd_slice tokens) {
        if (tokens.size > sizeof process.tokens)
                return -EPROTO;
        memcpy(process.tokens, tokens.data, tokens.size);
        return (int)(tokens.size / sizeof *process.tokens);
}

static int take_items(struct kvd_slice items, struct kvd_slice tokens) {
        int left = take_tokens(tokens);
        const uint32_t *at = process.tokens;

        process.n = items.size / (uint32_t)sizeof *process.items;
        if (left < 0 || items.size % sizeof *process.items || process.n > KVD_REMOTE_ITEMS)
                return -EPROTO;
        memcpy(process.items, items.data, items.size);
        for (uint32_t i = 0; i < process.n; i++) {
                uint32_t n = process.items[i].n_tokens;

                if (n > KVD_MAX_BLOCK_TOKENS || (int)n > left || process.items[i].behind > i)
                        return -EPROTO;
                process.tokens_of[i] = at;
                at += n;
                left -= (int)n;
        }
        return 0;
}

/* Blocks that cannot be mapped are not requested. */
static void map_blocks(const struct kvd_fds *fds, uint64_t bytes) {
        memset(process.mappings, 0, sizeof process.mappings);
        process.block_bytes = bytes;
        for (uint32_t i = 0; i < process.n; i++) {
                const struct kvd_remote_item *item = &process.items[i];

                process.blocks[i] = item->file >= fds->n ?
                                            NULL :
                                            mapped_begin(fds->fd[item->file], item->offset, bytes,
                                                         &process.mappings[i]);
                process.errors[i] = process.blocks[i] ? -EINPROGRESS : -EFAULT;
                process.names[i] = item->name;
        }
}

/* ---- get ------------------------------------------------------------------------------------- */

static int answer_remote_get(const struct kvd_msg_remote_get *m, const struct kvd_fds *fds) {
        int r = begin(m->tenant, m->content);
        struct records records;

        if (r == 0)
                r = take_items(m->items, m->tokens);
        if (r < 0)
                return r;
        process.wants_checksums = m->checksums;
        map_blocks(fds, m->block_bytes);
        records = records_of(process.names, process.n);
        process.dialect->get(&records);
        mapped_end(process.mappings, process.n);
        return 0;
}

/* ---- put ------------------------------------------------------------------------------------- */

/* A name depends on that of the block before it, which may be in the same request. */
static void name_items(void) {
        for (uint32_t i = 0; i < process.n; i++) {
                struct kvd_remote_item *item = &process.items[i];

                if (item->behind)
                        item->parent = process.names[item->behind - 1];
                item->name = sealed_name(&process.keys, item, process.tokens_of[i]);
                process.names[i] = item->name;
        }
}

/* Skips blocks that are already stored, perhaps by another machine. */
static void put_those_that_lack(const struct kvd_fds *fds, uint64_t bytes) {
        struct records records = records_of(process.names, process.n);
        bool there[KVD_REMOTE_ITEMS];
        uint32_t n = process.n;

        look_for(process.names, n);
        for (uint32_t i = 0; i < n; i++)
                there[i] = process.errors[i] == 0;
        map_blocks(fds, bytes);
        for (uint32_t i = 0; i < n; i++)
                if (there[i])
                        process.errors[i] = 0;
        process.dialect->put(&records);
        mapped_end(process.mappings, process.n);
}

static int answer_remote_put(const struct kvd_msg_remote_put *m, const struct kvd_fds *fds) {
        int r = begin(m->tenant, m->content);

        if (r == 0)
                r = take_items(m->items, m->tokens);
        if (r < 0)
                return r;
        name_items();
        put_those_that_lack(fds, m->block_bytes);
        return 0;
}

/* ---- find ------------------------------------------------------------------------------------ */

/*
 * Names up to KVD_REMOTE_FOUND blocks, behind the first n that were looked for: those before number
 * m->first are not. Returns the number of blocks named.
 */
static uint32_t name_some(const struct kvd_msg_remote_find *m, struct kvd_remote_chain *c,
                          uint32_t n) {
        uint32_t bt = m->block_tokens, end = m->whole ? m->n_tokens : m->n_tokens / bt * bt;
        uint32_t most = MIN(n + KVD_REMOTE_FOUND, KVD_WHOLE_BLOCKS), begin = n;
        struct kvd_remote_item item = {.root = m->root, .group = m->group};

        for (uint64_t at = n ? (m->first + (uint64_t)n) * bt : 0; at < end && n < most; at += bt) {
                item.parent = c->names[n];
                item.n_tokens = MIN(bt, end - (uint32_t)at);
                n += at / bt >= m->first;
                c->names[n] = sealed_name(&process.keys, &item, c->tokens + at);
        }
        return n - begin;
}

/* Counts blocks that are neither found nor missing, although their server answers. */
static uint32_t count_refused(uint32_t n) {
        uint32_t refused = 0;

        for (uint32_t i = 0; i < n; i++)
                refused += process.errors[i] && process.errors[i] != -ENOENT &&
                           process.errors[i] != -EHOSTUNREACH;
        return refused;
}

/*
 * Finds all blocks of a bidirectional prefix, if the servers are fast enough, and KVD_REMOTE_FOUND
 * of another chain.
 */
static void find(const struct kvd_msg_remote_find *m, struct kvd_remote_chain *c,
                 struct kvd_msg_remote_find_reply *reply) {
        uint64_t began = sys_now_ns();
        uint32_t n, i;

        c->names[0] = (struct kvd_key){0};
        if (m->behind.size == sizeof c->names[0])
                memcpy(c->names, m->behind.data, sizeof c->names[0]);
        if (m->whole)
                c->names[0] = sealed_prefix(&process.keys, c->tokens, m->n_tokens);
        do {
                n = name_some(m, c, reply->found);
                look_for(c->names + 1 + reply->found, n);
                reply->refused += count_refused(n);
                for (i = 0; i < n && process.errors[i] == 0; i++)
                        reply->found++;
        } while (m->whole && i == KVD_REMOTE_FOUND && sys_now_ns() - began < FIND_NS);
}

static int answer_remote_find(const struct kvd_msg_remote_find *m, const struct kvd_fds *fds,
                              struct kvd_msg_remote_find_reply *reply) {
        int r = begin(m->tenant, m->content);
        struct kvd_remote_chain *chain;
        struct mapped mapped;

        if (r < 0 || !fds->n || !m->block_tokens || m->block_tokens > KVD_MAX_BLOCK_TOKENS)
                return -EPROTO;
        chain = mapped_begin(fds->fd[0], 0, sizeof *chain, &mapped);
        if (!chain)
                return -EFAULT;
        find(m, chain, reply);
        mapped_end(&mapped, 1);
        return 0;
}

/* ---- open, and the serving of requests ------------------------------------------------------- */

static int file_of(const struct kvd_fds *fds, uint32_t number) {
        return number ? fds->fd[number - 1] : -1;
}

/* A missing descriptor must not be mistaken for a file that is not configured. */
static bool files_came(const struct kvd_msg_remote_open *m, const struct kvd_fds *fds) {
        return m->ca <= fds->n && m->certificate <= fds->n && m->certificate_key <= fds->n;
}

static int answer_remote_open(const struct kvd_msg_remote_open *m, const struct kvd_fds *fds,
                              struct kvd_why *why) {
        char servers[KVD_MOST_remote_open_servers + 1], password[KVD_MOST_remote_open_password + 1],
                library[KVD_MOST_remote_open_library + 1],
                metadata[KVD_MOST_remote_open_metadata + 1],
                devices[KVD_MOST_remote_open_devices + 1];
        struct dialect_config config =
                {.servers = kvd_slice_copy(m->servers, servers, sizeof servers),
                 .password = kvd_slice_copy(m->password, password, sizeof password),
                 .files = {.ca = file_of(fds, m->ca),
                           .certificate = file_of(fds, m->certificate),
                           .key = file_of(fds, m->certificate_key)},
                 .library = kvd_slice_copy(m->library, library, sizeof library),
                 .metadata = kvd_slice_copy(m->metadata, metadata, sizeof metadata),
                 .devices = kvd_slice_copy(m->devices, devices, sizeof devices),
                 .timeout_ns = m->timeout_ms * UINT64_C(1000000)};

        if (m->secret.size != sizeof process.secret)
                return -EPROTO;
        memcpy(process.secret, m->secret.data, sizeof process.secret);
        process.dialect = dialect_of(servers);
        return process.dialect ? process.dialect->open(&config, why) : -EPROTO;
}

static struct kvd_slice errors_slice(void) {
        return (struct kvd_slice){process.errors, process.n * (uint32_t)sizeof *process.errors};
}

static struct kvd_slice checksums_slice(void) {
        uint32_t n = process.wants_checksums ? process.n : 0;

        return (struct kvd_slice){process.checksums, n * (uint32_t)sizeof *process.checksums};
}

/* Returns the error of a server that is away. */
static struct kvd_slice state_of_servers(uint32_t *servers, uint32_t *away,
                                         struct kvd_slice *refusal) {
        struct dialect_state state = {.why = "", .refusal = ""};

        if (process.dialect)
                process.dialect->state(&state);
        process.stale = state.stale;
        *servers = state.servers;
        *away = state.away;
        *refusal = kvd_slice_cut(state.refusal, KVD_MOST_remote_find_reply_refusal);
        return kvd_slice_cut(state.why, KVD_MOST_remote_open_reply_why);
}

static int do_question(const struct kvd_msg *q, struct kvd_fds *fds, struct kvd_msg *reply,
                       struct kvd_why *why) {
        struct kvd_msg_remote_open_reply *opened = &reply->remote_open_reply;
        struct kvd_msg_remote_find_reply *found = &reply->remote_find_reply;
        struct kvd_msg_remote_get_reply *got = &reply->remote_get_reply;
        struct kvd_msg_remote_put_reply *put = &reply->remote_put_reply;
        struct kvd_slice none;
        int r;

        switch (q->number) {
        case KVD_MSG_remote_open:
                if (!files_came(&q->remote_open, fds))
                        return -EPROTO;
                r = answer_remote_open(&q->remote_open, fds, why);
                opened->why = state_of_servers(&opened->servers, &opened->away, &none);
                return r;
        case KVD_MSG_remote_find:
                r = answer_remote_find(&q->remote_find, fds, found);
                found->why = state_of_servers(&found->servers, &found->away, &found->refusal);
                found->stale = process.stale;
                return r;
        case KVD_MSG_remote_get:
                r = answer_remote_get(&q->remote_get, fds);
                got->errors = errors_slice();
                got->checksums = checksums_slice();
                got->why = state_of_servers(&got->servers, &got->away, &got->refusal);
                return r;
        case KVD_MSG_remote_put:
                r = answer_remote_put(&q->remote_put, fds);
                put->errors = errors_slice();
                put->names = (struct kvd_slice){process.names,
                                                process.n * (uint32_t)sizeof *process.names};
                put->why = state_of_servers(&put->servers, &put->away, &put->refusal);
                return r;
        default: return -EPROTO;
        }
}

int remote_main(void) {
        return asked_begin("kvd-remote", "--remote", "remote process") ?: asked_serve(do_question);
}
