/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The remote process asks the servers what the daemon asks it, one question after the other, but
 * all blocks of a question at once. What comes is compared with what was asked for, and a block's
 * memory is mapped while it is moved.
 */

#include "daemon/remote/main.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "daemon/asked.h"
#include "daemon/remote/sealed.h"
#include "daemon/remote/servers.h"
#include "ipc/base/mapped.h"
#include "ipc/base/util.h"

#define MOST_TOKENS (KVD_MOST_remote_find_tokens / (uint32_t)sizeof(uint32_t))
#define KEY_BYTES (KVD_NAME_MAX + 34u)

struct remote_process {
        struct servers servers;
        bool open;
        uint8_t secret[KVD_REMOTE_KEY];
        char tenant[KVD_NAME_MAX + 1];
        struct sealed_keys keys; /* of the question's tenant and space */
        uint64_t block_bytes;

        uint32_t n;              /* items of the question, blocks of a chain */
        struct kvd_remote_item items[KVD_REMOTE_ITEMS]; /* aligned copies of what came */
        uint32_t tokens[MOST_TOKENS];
        const uint32_t *tokens_of[KVD_REMOTE_ITEMS];
        void *blocks[KVD_REMOTE_ITEMS];
        struct mapped mappings[KVD_REMOTE_ITEMS];
        struct kvd_key names[KVD_REMOTE_FOUND + 1];
        int32_t errors[KVD_REMOTE_FOUND];
        bool wants_checksums;
        uint64_t checksums[KVD_REMOTE_ITEMS]; /* of what came */
};

static struct remote_process process; /* lives as long as the process */

/* ---- commands -------------------------------------------------------------------------------- */

static void write_key(struct kvd_key name, char ret[static KEY_BYTES]) {
        snprintf(ret, KEY_BYTES, "%s:%016llx%016llx", process.tenant, (unsigned long long)name.hi,
                 (unsigned long long)name.lo);
}

static bool say_with_key(struct link *link, const char *command, struct kvd_key name) {
        char key[KEY_BYTES];

        write_key(name, key);
        return link_say(link, 2, (const char *[]){command, key});
}

static void ask_all(struct talk *talk, const struct kvd_key *names, uint32_t n) {
        char key[KEY_BYTES];

        talk->servers = &process.servers;
        for (uint32_t i = 0; i < n; i++) {
                if (process.errors[i] != -EINPROGRESS)
                        continue;
                write_key(names[i], key);
                talk_ask(talk, i, servers_slot(key));
        }
        talk_run(talk);
}

/* A server that refuses is not one that has nothing. */
static int error_of(const struct resp *reply) {
        if (!reply)
                return -EHOSTUNREACH;
        if (reply->type != RESP_ERROR)
                return 0;
        return resp_begins(reply, "OOM ") ? -ENOSPC : -EREMOTEIO;
}

/* ---- is it there? ---------------------------------------------------------------------------- */

static const struct kvd_key *asked_names; /* of the talk that is going on */

static bool ask_exists(struct talk *talk, uint32_t item, struct link *link) {
        return say_with_key(link, "EXISTS", asked_names[item]);
}

static void answer_exists(struct talk *talk, uint32_t item, const struct resp *reply) {
        int error = error_of(reply);

        if (!error && reply->type == RESP_NUMBER && reply->number == 1)
                process.errors[item] = 0;
        else
                process.errors[item] = error ? error : -ENOENT;
}

/* errors: 0 for those that are there. */
static void look_for(const struct kvd_key *names, uint32_t n) {
        struct talk talk = {.most = RESP_LINE, .ask = ask_exists, .answer = answer_exists};

        asked_names = names;
        for (uint32_t i = 0; i < n; i++)
                process.errors[i] = -EINPROGRESS;
        ask_all(&talk, names, n);
}

/* ---- what a question says -------------------------------------------------------------------- */

static int begin(struct kvd_slice tenant, struct kvd_slice content) {
        struct kvd_remote_content of;

        if (!process.open || content.size != sizeof of || !tenant.size)
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

/* Those that cannot be mapped are not asked for. */
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

static bool ask_get(struct talk *talk, uint32_t item, struct link *link) {
        return say_with_key(link, "GET", process.items[item].name);
}

static void answer_get(struct talk *talk, uint32_t item, const struct resp *reply) {
        int error = error_of(reply);

        if (!error && reply->type == RESP_NIL)
                error = -ENOENT;
        else if (!error && reply->type != RESP_BULK)
                error = -EBADMSG;
        process.errors[item] = error ? error :
                                       sealed_open(&process.keys, &process.items[item],
                                                   process.tokens_of[item], reply->text,
                                                   reply->size, process.blocks[item],
                                                   process.block_bytes);
        if (!process.errors[item] && process.wants_checksums)
                process.checksums[item] = XXH3_64bits(process.blocks[item], process.block_bytes);
}

static int answer_remote_get(const struct kvd_msg_remote_get *m, const struct kvd_fds *fds) {
        struct talk talk = {.most = sealed_bytes(KVD_MAX_BLOCK_TOKENS, m->block_bytes),
                            .ask = ask_get,
                            .answer = answer_get};
        int r = begin(m->tenant, m->content);

        if (r == 0)
                r = take_items(m->items, m->tokens);
        if (r < 0)
                return r;
        process.wants_checksums = m->checksums;
        map_blocks(fds, m->block_bytes);
        ask_all(&talk, process.names, process.n);
        mapped_end(process.mappings, process.n);
        return 0;
}

/* ---- put ------------------------------------------------------------------------------------- */

static bool ask_set(struct talk *talk, uint32_t item, struct link *link) {
        const struct kvd_remote_item *of = &process.items[item];
        uint64_t bytes = sealed_bytes(of->n_tokens, process.block_bytes);
        char key[KEY_BYTES], text[KEY_BYTES + 3 * RESP_HEAD];
        uint8_t *to;
        int n;

        write_key(of->name, key);
        n = snprintf(text, sizeof text, "*3\r\n$3\r\nSET\r\n$%zu\r\n%s\r\n$%llu\r\n", strlen(key),
                     key, (unsigned long long)bytes);
        to = link_room(link, (size_t)n + bytes + 2);
        if (!to)
                return false;
        memcpy(to, text, (size_t)n);
        memcpy(to + (size_t)n + bytes, "\r\n", 2);
        return sealed_make(&process.keys, of, process.tokens_of[item], process.blocks[item],
                           process.block_bytes, to + n);
}

static void answer_set(struct talk *talk, uint32_t item, const struct resp *reply) {
        int error = error_of(reply);

        process.errors[item] = error ? error : reply->type == RESP_TEXT ? 0 : -EREMOTEIO;
}

/* Each name needs that of the block before it, which may be in the same question. */
static void name_items(void) {
        for (uint32_t i = 0; i < process.n; i++) {
                struct kvd_remote_item *item = &process.items[i];

                if (item->behind)
                        item->parent = process.names[item->behind - 1];
                item->name = sealed_name(&process.keys, item, process.tokens_of[i]);
                process.names[i] = item->name;
        }
}

/* What another machine has put there is not sent again. */
static void put_those_that_lack(const struct kvd_fds *fds, uint64_t bytes) {
        struct talk talk = {.most = RESP_LINE, .ask = ask_set, .answer = answer_set};
        bool there[KVD_REMOTE_ITEMS];

        look_for(process.names, process.n);
        for (uint32_t i = 0; i < process.n; i++)
                there[i] = process.errors[i] == 0;
        map_blocks(fds, bytes);
        for (uint32_t i = 0; i < process.n; i++)
                if (there[i])
                        process.errors[i] = 0;
        ask_all(&talk, process.names, process.n);
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

/* Names of a chain, block by block: those that are resident are gone through. */
static uint32_t name_chain(const struct kvd_msg_remote_find *m, uint32_t n_blocks) {
        struct kvd_remote_item item = {
                .root = m->root, .group = m->group, .n_tokens = m->block_tokens};
        uint32_t n = 0;

        process.names[0] = (struct kvd_key){0};
        for (uint32_t i = 0; i < n_blocks && n < KVD_REMOTE_FOUND; i++) {
                item.parent = process.names[n];
                n += i >= m->first;
                process.names[n] =
                        sealed_name(&process.keys, &item, process.tokens + i * m->block_tokens);
        }
        return n;
}

static int answer_remote_find(const struct kvd_msg_remote_find *m,
                              struct kvd_msg_remote_find_reply *reply) {
        int r = begin(m->tenant, m->content);
        uint32_t n, found = 0;

        if (r == 0)
                r = take_tokens(m->tokens);
        if (r < 0 || !m->block_tokens || m->block_tokens > KVD_MAX_BLOCK_TOKENS)
                return r < 0 ? r : -EPROTO;
        n = name_chain(m, (uint32_t)r / m->block_tokens);
        look_for(process.names + 1, n);
        while (found < n && process.errors[found] == 0)
                found++;
        reply->names = (struct kvd_slice){process.names, (found + 1) *
                                                                 (uint32_t)sizeof *process.names};
        return 0;
}

/* ---- the rest -------------------------------------------------------------------------------- */

static int answer_remote_open(const struct kvd_msg_remote_open *m,
                              struct kvd_msg_remote_open_reply *reply, struct kvd_why *why) {
        char text[KVD_MOST_remote_open_servers + 1];
        int r = 0;

        if (m->secret.size != sizeof process.secret)
                return -EPROTO;
        memcpy(process.secret, m->secret.data, sizeof process.secret);
        process.servers.timeout_ns = m->timeout_ms * UINT64_C(1000000);
        if (!process.open)
                r = servers_parse(&process.servers, kvd_slice_copy(m->servers, text, sizeof text),
                                  why);
        if (r < 0)
                return r;
        servers_password(&process.servers, kvd_slice_copy(m->password, text, sizeof text));
        process.open = true;
        servers_open(&process.servers, &reply->servers, &reply->away);
        reply->why = kvd_slice_cut(servers_why(&process.servers), KVD_MOST_remote_open_reply_why);
        return 0;
}

static struct kvd_slice errors_slice(void) {
        return (struct kvd_slice){process.errors,
                                  process.n * (uint32_t)sizeof *process.errors};
}

static struct kvd_slice checksums_slice(void) {
        uint32_t n = process.wants_checksums ? process.n : 0;

        return (struct kvd_slice){process.checksums, n * (uint32_t)sizeof *process.checksums};
}

static struct kvd_slice state_of_servers(uint32_t *servers, uint32_t *away) {
        *away = servers_away(&process.servers, servers);
        return kvd_slice_cut(servers_why(&process.servers), KVD_MOST_remote_open_reply_why);
}

static int do_question(const struct kvd_msg *q, struct kvd_fds *fds, struct kvd_msg *reply,
                       struct kvd_why *why) {
        struct kvd_msg_remote_find_reply *found = &reply->remote_find_reply;
        struct kvd_msg_remote_get_reply *got = &reply->remote_get_reply;
        struct kvd_msg_remote_put_reply *put = &reply->remote_put_reply;
        int r;

        switch (q->number) {
        case KVD_MSG_remote_open:
                return answer_remote_open(&q->remote_open, &reply->remote_open_reply, why);
        case KVD_MSG_remote_find:
                r = answer_remote_find(&q->remote_find, found);
                found->why = state_of_servers(&found->servers, &found->away);
                found->stale = process.servers.stale;
                return r;
        case KVD_MSG_remote_get:
                r = answer_remote_get(&q->remote_get, fds);
                got->errors = errors_slice();
                got->checksums = checksums_slice();
                got->why = state_of_servers(&got->servers, &got->away);
                return r;
        case KVD_MSG_remote_put:
                r = answer_remote_put(&q->remote_put, fds);
                put->errors = errors_slice();
                put->names = (struct kvd_slice){process.names,
                                                process.n * (uint32_t)sizeof *process.names};
                put->why = state_of_servers(&put->servers, &put->away);
                return r;
        default:
                return -EPROTO;
        }
}

int remote_main(void) {
        return asked_begin("kvd-remote", "--remote", "remote process") ?: asked_serve(do_question);
}
