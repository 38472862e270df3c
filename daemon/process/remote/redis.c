/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Redis and Valkey: a record is the string value of its key. The commands of all items of a request
 * are queued before any reply is awaited, each for the server that has the key's slot.
 */

#include <errno.h>
#include <openssl/ssl.h>
#include <stdio.h>
#include <string.h>

#include "daemon/process/remote/dialect.h"
#include "daemon/process/remote/servers.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

static struct servers servers; /* of the process */
static bool open;
static const struct records *asked; /* of the current talk */

/* ---- commands -------------------------------------------------------------------------------- */

static bool say_with_key(struct link *link, const char *command, uint32_t item) {
        char key[RECORD_KEY];

        asked->key(item, key);
        return link_say(link, 2, (const char *[]){command, key});
}

static void ask_all(struct talk *talk, const struct records *records) {
        char key[RECORD_KEY];

        talk->servers = &servers;
        servers.refusal.line[0] = 0;
        asked = records;
        for (uint32_t i = 0; i < records->n; i++) {
                if (records->errors[i] != -EINPROGRESS)
                        continue;
                records->key(i, key);
                talk_ask(talk, i, servers_slot(key));
        }
        talk_run(talk);
}

/* An error does not mean that the record is missing. */
static int error_of(struct talk *talk, const struct resp *reply) {
        if (!reply)
                return -EHOSTUNREACH;
        if (reply->type != RESP_ERROR)
                return 0;
        talk_refused(talk, reply);
        return resp_begins(reply, "OOM ") ? -ENOSPC : -EREMOTEIO;
}

/* ---- look ------------------------------------------------------------------------------------ */

static bool ask_exists(struct talk *talk, uint32_t item, struct link *link) {
        return say_with_key(link, "EXISTS", item);
}

static void answer_exists(struct talk *talk, uint32_t item, const struct resp *reply) {
        int error = error_of(talk, reply);

        if (!error && reply->type == RESP_NUMBER && reply->number == 1)
                asked->errors[item] = 0;
        else
                asked->errors[item] = error ? error : -ENOENT;
}

static void look(const struct records *records) {
        struct talk talk = {.most = RESP_LINE, .ask = ask_exists, .answer = answer_exists};

        ask_all(&talk, records);
}

/* ---- get ------------------------------------------------------------------------------------- */

static bool ask_get(struct talk *talk, uint32_t item, struct link *link) {
        return say_with_key(link, "GET", item);
}

static void answer_get(struct talk *talk, uint32_t item, const struct resp *reply) {
        int error = error_of(talk, reply);

        if (!error && reply->type == RESP_NIL)
                error = -ENOENT;
        else if (!error && reply->type != RESP_BULK)
                error = -EBADMSG;
        asked->errors[item] = error ? error : asked->take(item, reply->text, reply->size);
}

static void get(const struct records *records) {
        struct talk talk = {.most = records->most, .ask = ask_get, .answer = answer_get};

        ask_all(&talk, records);
}

/* ---- put ------------------------------------------------------------------------------------- */

static bool ask_set(struct talk *talk, uint32_t item, struct link *link) {
        uint64_t bytes = asked->bytes(item);
        char key[RECORD_KEY], text[RECORD_KEY + 3 * RESP_HEAD];
        uint8_t *to;
        int n;

        asked->key(item, key);
        n = snprintf(text, sizeof text, "*3\r\n$3\r\nSET\r\n$%zu\r\n%s\r\n$%llu\r\n", strlen(key),
                     key, (unsigned long long)bytes);
        to = link_room(link, (size_t)n + bytes + 2);
        if (!to)
                return false;
        memcpy(to, text, (size_t)n);
        memcpy(to + (size_t)n + bytes, "\r\n", 2);
        return asked->make(item, to + n);
}

static void answer_set(struct talk *talk, uint32_t item, const struct resp *reply) {
        int error = error_of(talk, reply);

        asked->errors[item] = error ? error : reply->type == RESP_TEXT ? 0 : -EREMOTEIO;
}

static void put(const struct records *records) {
        struct talk talk = {.most = RESP_LINE, .ask = ask_set, .answer = answer_set};

        ask_all(&talk, records);
}

/* ---- check and open -------------------------------------------------------------------------- */

/* Reads the TLS files to find errors in them. */
static int check_tls(const struct dialect_config *config, bool wanted, struct kvd_why *why) {
        const struct tls_files *files = &config->files;
        SSL_CTX *tls;
        int r;

        if (!wanted && (files->ca >= 0 || files->certificate >= 0 || files->key >= 0))
                return kvd_refuse(why, -EINVAL, TLS_ALONE);
        if ((files->certificate >= 0) != (files->key >= 0))
                return kvd_refuse(why, -EINVAL,
                                  "remote_certificate and remote_certificate_key need each other");
        r = wanted ? tls_context_new(files, &tls, why) : 0;
        if (wanted && r == 0)
                SSL_CTX_free(tls);
        return r;
}

static int check(const struct dialect_config *config, struct kvd_why *why) {
        struct servers *some;
        int r;

        if (config->library[0] || config->metadata[0] || config->devices[0])
                return kvd_refuse(
                        why, -EINVAL,
                        "remote_library, remote_metadata and remote_devices are for mooncake:// servers");
        some = sys->calloc(1, sizeof *some);
        r = some ? servers_parse(some, config->servers, why) :
                   kvd_refuse(why, -ENOMEM, "out of memory for the remote tier");
        if (r == 0)
                r = check_tls(config, some->wants_tls, why);
        free(some);
        return r;
}

static int open_all(const struct dialect_config *config, struct kvd_why *why) {
        int r = open ? 0 : servers_parse(&servers, config->servers, why);

        if (r == 0 && servers.wants_tls && !servers.tls)
                r = tls_context_new(&config->files, &servers.tls, why);
        if (r < 0)
                return r;
        open = true;
        servers.timeout_ns = config->timeout_ns;
        servers_password(&servers, config->password);
        servers_open(&servers);
        return 0;
}

static void state(struct dialect_state *ret) {
        ret->away = servers_away(&servers, &ret->servers);
        ret->why = servers_why(&servers);
        ret->refusal = servers.refusal.line;
        ret->stale = servers.stale;
}

const struct dialect dialect_redis = {.schemes = (const char *const[]){"redis://", "rediss://",
                                                                       NULL},
                                      .check = check,
                                      .open = open_all,
                                      .look = look,
                                      .get = get,
                                      .put = put,
                                      .state = state};
