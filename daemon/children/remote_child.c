/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Passes the store's requests for servers to the remote process, as messages with descriptors of
 * the pool's segments, and passes the replies back. Servers are polled regularly, so that it is
 * known which are away before a client waits for them.
 */

#include "daemon/children/remote_child.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/degraded.h"
#include "daemon/base/log.h"
#include "daemon/base/trusted.h"
#include "daemon/children/tier_errors.h"
#include "daemon/process/remote/dialect.h"
#include "daemon/process/remote/sealed.h"
#include "ipc/base/shared_file.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "store/remote_tier.h"

#define MOST_PAUSE_NS UINT64_C(1000000000)
#define LATER_NS UINT64_C(200000000)   /* between two checks for blocks to write */
#define HEALTH_NS UINT64_C(2000000000) /* between two polls of servers that answer */
#define FIRST_AGAIN_NS UINT64_C(100000000)
#define MOST_AGAIN_NS UINT64_C(10000000000)
#define PATIENCE_NS UINT64_C(30000000000)
/*
 * Fetches stop waiting for a reply after the longer of SLOW_NS and SLOW_TIMES remote_timeout, plus
 * SLOW_NS for each SLOW_BYTES of the request.
 */
#define SLOW_NS UINT64_C(1000000000)
#define SLOW_TIMES 10u
#define SLOW_BYTES (UINT64_C(32) << 20)
#define KEY_LEAST 16
#define KEY_MOST 4096u

struct remote_owner {
        struct child child;
        struct store *store;
        const struct config *config;
        uint8_t secret[KVD_REMOTE_KEY];
        char password[REMOTE_PASSWORD];
        struct tls_files files; /* owned */
        bool open;              /* the process has replied to remote_open */
        struct tier_errors tier_errors;
        uint64_t open_at_ns, pause_ns; /* when servers are polled next; the pause after that */
        struct kvd_remote_item items[KVD_REMOTE_ITEMS];
        uint32_t tokens[KVD_REMOTE_TOKENS];
        int32_t errors[KVD_REMOTE_ITEMS];
        uint64_t checksums[KVD_REMOTE_ITEMS];
        struct kvd_key names[KVD_REMOTE_ITEMS];
        struct shared_file chain; /* a struct kvd_remote_chain */
};

static struct remote_owner *owner_of(const struct child *child) {
        return container_of(child, struct remote_owner, child);
}

/* ---- requests -------------------------------------------------------------------------------- */

/* After this time without a reply, the process hangs, not just a server that it waits for. */
static void set_slow(struct remote_owner *o, uint64_t bytes) {
        uint64_t timeout = o->config->remote_timeout * UINT64_C(1000000);

        o->child.slow_ns = MAX(SLOW_NS, SLOW_TIMES * timeout) + bytes * SLOW_NS / SLOW_BYTES;
}

static int write_items(struct remote_owner *o, const struct store_remote_question *q,
                       struct kvd_fds *fds, uint32_t *n_tokens) {
        *n_tokens = 0;
        for (uint32_t i = 0; i < q->n; i++) {
                const struct store_remote_item *from = &q->items[i];
                struct kvd_remote_item *to = &o->items[i];
                int fd;

                *to = from->item;
                fd = store_remote_memory(o->store, i, &to->offset);
                if (fd < 0)
                        return fd;
                to->file = child_add_fd(fds, fd);
                memcpy(o->tokens + *n_tokens, from->tokens, to->n_tokens * sizeof *from->tokens);
                *n_tokens += to->n_tokens;
        }
        return 0;
}

static bool ask_to_move(struct remote_owner *o, const struct store_remote_question *q) {
        bool gets = q->what == STORE_REMOTE_GET;
        struct kvd_msg msg = {.number = gets ? KVD_MSG_remote_get : KVD_MSG_remote_put};
        struct kvd_slice tenant = kvd_slice_of(q->tenant),
                         content = {&q->content, sizeof q->content};
        struct kvd_slice items = {o->items, q->n * (uint32_t)sizeof *o->items}, tokens;
        uint64_t bytes = space_index(q->space)->block_bytes;
        struct kvd_fds fds = {.n = 0};
        uint32_t n_tokens;

        if (write_items(o, q, &fds, &n_tokens) < 0) {
                store_remote_lost(o->store);
                return true;
        }
        tokens = (struct kvd_slice){o->tokens, n_tokens * (uint32_t)sizeof *o->tokens};
        set_slow(o, q->n * bytes);
        if (gets)
                msg.remote_get = (struct kvd_msg_remote_get){tenant, content, bytes,
                                                             items,  tokens,  q->checksums};
        else
                msg.remote_put = (struct kvd_msg_remote_put){tenant, content, bytes, items, tokens};
        return child_ask_or_end(&o->child, &msg, &fds);
}

static bool ask_to_find(struct remote_owner *o, const struct store_remote_question *q) {
        struct kvd_msg msg = {.number = KVD_MSG_remote_find};
        const struct kvd_index *ix = space_index(q->space);
        uint32_t bt = kvd_full_tokens(&ix->geometry, q->group),
                 n = MIN(DIV_UP(q->n_tokens, bt), KVD_WHOLE_BLOCKS);
        bool whole = ix->kind == KVD_kind_bidirectional;
        struct kvd_remote_chain *chain = o->chain.at;
        struct kvd_fds fds = {.n = 0};

        memcpy(chain->tokens, q->tokens, q->n_tokens * sizeof *q->tokens);
        memset(chain->names, 0, (1 + n) * sizeof *chain->names);
        child_add_fd(&fds, o->chain.fd);
        if (whole)
                o->child.slow_ns *= 1 + n / KVD_REMOTE_FOUND;
        msg.remote_find = (struct kvd_msg_remote_find){.tenant = kvd_slice_of(q->tenant),
                                                       .content = {&q->content, sizeof q->content},
                                                       .group = q->group,
                                                       .root = q->root,
                                                       .block_tokens = bt,
                                                       .first = q->first,
                                                       .whole = whole,
                                                       .n_tokens = q->n_tokens};
        if (q->behind.lo || q->behind.hi)
                msg.remote_find.behind = (struct kvd_slice){&q->behind, sizeof q->behind};
        return child_ask_or_end(&o->child, &msg, &fds);
}

static uint32_t send_file(struct kvd_fds *fds, int fd) {
        return fd < 0 ? 0 : child_add_fd(fds, fd) + 1;
}

static bool ask_to_open(struct remote_owner *o) {
        struct kvd_fds fds = {.n = 0};
        struct kvd_msg msg = {.number = KVD_MSG_remote_open,
                              .remote_open = {.servers = kvd_slice_of(o->config->remote),
                                              .timeout_ms = o->config->remote_timeout,
                                              .secret = {o->secret, sizeof o->secret},
                                              .password = kvd_slice_of(o->password),
                                              .ca = send_file(&fds, o->files.ca),
                                              .certificate = send_file(&fds, o->files.certificate),
                                              .certificate_key = send_file(&fds, o->files.key),
                                              .library = kvd_slice_of(o->config->remote_library),
                                              .metadata = kvd_slice_of(o->config->remote_metadata),
                                              .devices = kvd_slice_of(o->config->remote_devices)}};

        return child_ask_or_end(&o->child, &msg, &fds);
}

/* Looks after ns, or before. */
static void look_by(struct remote_owner *o, uint64_t ns) {
        if (!loop_timer_is_set(&o->child.look) || o->child.look.at_ns > sys_now_ns() + ns)
                child_look_after(&o->child, ns);
}

/* A poll of the servers that is due comes first. */
static bool next(struct child *child) {
        struct remote_owner *o = owner_of(child);
        uint64_t now = sys_now_ns();
        const struct store_remote_question *q;
        bool later;

        set_slow(o, 0);
        if (!o->open || now >= o->open_at_ns)
                return ask_to_open(o);
        q = store_remote_next(o->store, &later);
        if (q)
                return (q->what == STORE_REMOTE_FIND ? ask_to_find : ask_to_move)(o, q);
        look_by(o, later ? MIN(LATER_NS, o->open_at_ns - now) : o->open_at_ns - now);
        return false;
}

/* ---- replies to remote_open ------------------------------------------------------------------ */

static void servers_are(struct remote_owner *o, uint32_t n, uint32_t away, struct kvd_slice text) {
        struct store_remote_info before;
        char why[128];

        store_remote_get_info(o->store, &before);
        kvd_slice_copy(text, why, sizeof why);
        if (away > before.away)
                log_limited(LOG_WARNING, "remote: %u of %u servers %s away: %s", away, n,
                            away == 1 ? "is" : "are", why);
        else if (away < before.away)
                log_info("remote: %u of %u servers answer", n - away, n);
        degraded_set(remote_tier, away);
        store_remote_servers(o->store, n, away, why);
}

/* The longer servers are away, the less often they are polled. */
static void opened(struct remote_owner *o, const struct kvd_msg_remote_open_reply *m) {
        o->open = true;
        o->open_at_ns = sys_now_ns() + (m->away ? o->pause_ns : HEALTH_NS);
        o->pause_ns = m->away ? MIN(o->pause_ns * 2, MOST_AGAIN_NS) : FIRST_AGAIN_NS;
        servers_are(o, m->servers, m->away, m->why);
}

/* ---- errors ---------------------------------------------------------------------------------- */

/* The text of a refusal must reach the store before the reply that counts it. */
static void refused(struct remote_owner *o, uint32_t n, struct kvd_slice refusal) {
        char text[128];

        store_remote_refused(o->store, n, kvd_slice_copy(refusal, text, sizeof text));
}

/* Servers refused items, and no item was transferred, missing or damaged. */
static bool refused_all(const int32_t *errors, uint32_t n) {
        bool refusals = false;

        for (uint32_t i = 0; i < n; i++) {
                if (!errors[i] || errors[i] == -ENOENT || errors[i] == -EBADMSG)
                        return false;
                refusals |= errors[i] == -EREMOTEIO || errors[i] == -ENOSPC;
        }
        return refusals;
}

static void say_errors(struct remote_owner *o, bool all_refused) {
        struct store_remote_info info;

        if (all_refused)
                degraded_note(remote_refused);
        store_remote_get_info(o->store, &info);
        tier_errors_say(&o->tier_errors, "remote", info.errors, info.last_error);
}

/* ---- replies to the store -------------------------------------------------------------------- */

/* soon: which server has which blocks has changed; remote_open finds out. */
static void moved(struct remote_owner *o, uint32_t n, uint32_t away, struct kvd_slice why,
                  bool soon) {
        struct store_remote_info before;

        store_remote_get_info(o->store, &before);
        if (away > before.away || soon)
                o->open_at_ns = MIN(o->open_at_ns, sys_now_ns() + FIRST_AGAIN_NS);
        servers_are(o, n, away, why);
}

static void found(struct remote_owner *o, const struct kvd_msg_remote_find_reply *m) {
        const struct kvd_remote_chain *chain = o->chain.at;

        refused(o, m->refused, m->refusal);
        store_remote_found(o->store, chain->names, 1 + m->found);
        say_errors(o, m->refused && !m->found);
        moved(o, m->servers, m->away, m->why, m->stale);
}

/* In place of a missing checksum there is that of another block, which does not match. */
static void got(struct remote_owner *o, const struct kvd_msg_remote_get_reply *m) {
        uint32_t n = child_array(o->errors, sizeof *o->errors, ARRAY_SIZE(o->errors), m->errors);

        child_array(o->checksums, sizeof *o->checksums, ARRAY_SIZE(o->checksums), m->checksums);
        refused(o, 0, m->refusal);
        store_remote_got(o->store, o->errors, o->checksums, n);
        say_errors(o, refused_all(o->errors, n));
        moved(o, m->servers, m->away, m->why, false);
}

static void put(struct remote_owner *o, const struct kvd_msg_remote_put_reply *m) {
        uint32_t n = child_array(o->errors, sizeof *o->errors, ARRAY_SIZE(o->errors), m->errors);
        uint32_t k = child_array(o->names, sizeof *o->names, ARRAY_SIZE(o->names), m->names);

        refused(o, 0, m->refusal);
        store_remote_put(o->store, o->names, o->errors, MIN(n, k));
        say_errors(o, refused_all(o->errors, MIN(n, k)));
        moved(o, m->servers, m->away, m->why, false);
}

static void nobody_is_there(struct remote_owner *o, struct kvd_slice why) {
        struct store_remote_info info;

        store_remote_get_info(o->store, &info);
        info.servers = MAX(info.servers, 1);
        servers_are(o, info.servers, info.servers, why);
}

static void answered(struct child *child, uint32_t asked, const struct kvd_msg *m) {
        struct remote_owner *o = owner_of(child);

        child->pause_ns = 0;
        if (m->number == KVD_MSG_error) {
                store_remote_lost(o->store);
                nobody_is_there(o, m->error.text);
                o->open = true;
                o->open_at_ns = sys_now_ns() + MOST_AGAIN_NS;
        } else if (asked == KVD_MSG_remote_open) {
                opened(o, &m->remote_open_reply);
        } else if (asked == KVD_MSG_remote_find) {
                found(o, &m->remote_find_reply);
        } else if (asked == KVD_MSG_remote_get) {
                got(o, &m->remote_get_reply);
        } else {
                put(o, &m->remote_put_reply);
        }
        loop_want_idle(child->loop);
}

/* ---- its process ----------------------------------------------------------------------------- */

static int prepare(struct child *child) {
        memcpy(child->arguments, (char *[]){"kvd", "--remote", NULL}, 3 * sizeof *child->arguments);
        return 0;
}

static void not_there(struct child *child) {
        nobody_is_there(owner_of(child),
                        kvd_slice_of("its process cannot be started; see the log"));
}

/* Its request counts as failed. */
static void ended(struct child *child, uint32_t asked) {
        struct remote_owner *o = owner_of(child);

        o->open = false;
        store_remote_lost(o->store);
        nobody_is_there(o, kvd_slice_of("its process ended; see the log"));
        loop_want_idle(child->loop);
}

/* Otherwise fetches would wait, as long as their clients do, until the process is killed. */
static void slow(struct child *child) {
        nobody_is_there(owner_of(child), kvd_slice_of("its process does not answer"));
}

static const struct child_ops ops = {
        .name = "remote process",
        .degraded = KVD_DEGRADED_remote_process,
        .prepare = prepare,
        .not_started = not_there,
        .slow = slow,
        .ended = ended,
        .next = next,
        .answered = answered,
};

static void wants(void *data, bool soon) {
        look_by(data, soon ? 0 : LATER_NS);
}

/* ---- life ------------------------------------------------------------------------------------ */

/* Returns the number of bytes read. */
static int read_secret(const struct config *config, const char *setting, const char *path,
                       uint8_t *to, size_t most, struct kvd_why *why) {
        const struct trusted file = {setting, path, TRUST_SECRET, config->owner};
        _cleanup_(closep) int fd = trusted_open(&file, O_RDONLY, why);
        ssize_t got = fd < 0 ? fd : read(fd, to, most);

        if (fd >= 0 && got < 0)
                return kvd_refuse(why, negative_errno(), "%s %s: %s", setting, path,
                                  strerror(errno));
        return (int)got;
}

static int take_key(struct remote_owner *o, struct kvd_why *why) {
        const char *path = o->config->remote_key;
        uint8_t key[KEY_MOST];
        int n = path[0] ? read_secret(o->config, "remote_key", path, key, sizeof key, why) : 0;

        if (path[0] && n >= 0 && (n < KEY_LEAST || n == KEY_MOST))
                n = kvd_refuse(why, -EINVAL,
                               "remote_key %s: it must have %d to %u random bytes; head -c 32 "
                               "/dev/urandom makes some",
                               path, KEY_LEAST, KEY_MOST - 1);
        if (n >= 0)
                sealed_secret(key, (size_t)n, o->secret);
        explicit_bzero(key, sizeof key);
        return MIN(n, 0);
}

/* The file has one line. */
static int take_password(struct remote_owner *o, struct kvd_why *why) {
        const char *path = o->config->remote_password;
        uint8_t *text = (uint8_t *)o->password;
        bool fits;
        int n;

        if (!path[0])
                return 0;
        n = read_secret(o->config, "remote_password", path, text, sizeof o->password, why);
        fits = n < (int)sizeof o->password; /* otherwise it was truncated */
        while (n > 0 && (text[n - 1] == '\n' || text[n - 1] == '\r'))
                text[--n] = 0;
        if (n >= 0 &&
            (n == 0 || !fits || memchr(text, '\n', (size_t)n) || memchr(text, 0, (size_t)n)))
                n = kvd_refuse(why, -EINVAL,
                               "remote_password %s: it must have one line of at most %u bytes, "
                               "PASSWORD or USER:PASSWORD",
                               path, REMOTE_PASSWORD - 1);
        return MIN(n, 0);
}

/* Leaves *to unchanged if no file is configured. */
static int open_file(const struct trusted *file, int *to, struct kvd_why *why) {
        if (!file->path[0])
                return 0;
        *to = trusted_open(file, O_RDONLY, why);
        return MIN(*to, 0);
}

/* Refuses only a file that is not trusted. The loader opens the path, and reports other errors. */
static int check_library(const struct config *c, struct kvd_why *why) {
        _cleanup_(closep) int fd = -1;

        return open_file(&(struct trusted){"remote_library", c->remote_library, TRUST_LIBRARY,
                                           c->owner},
                         &fd, why) == TRUSTED_NOT ?
                       TRUSTED_NOT :
                       0;
}

/* Opens them now, since the process that reads them may run as another user. */
static int open_files(const struct config *c, struct tls_files *files, struct kvd_why *why) {
        const struct trusted ca = {"remote_ca", c->remote_ca, TRUST_PUBLIC, c->owner};
        const struct trusted certificate = {"remote_certificate", c->remote_certificate,
                                            TRUST_PUBLIC, c->owner};
        const struct trusted key = {"remote_certificate_key", c->remote_certificate_key,
                                    TRUST_SECRET, c->owner};
        int r = open_file(&ca, &files->ca, why);

        if (r == 0)
                r = open_file(&certificate, &files->certificate, why);
        if (r == 0)
                r = open_file(&key, &files->key, why);
        return r < 0 ? r : check_library(c, why);
}

static void close_files(struct tls_files *files) {
        closep(&files->ca);
        closep(&files->certificate);
        closep(&files->key);
        *files = TLS_NO_FILES;
}

/* Reports errors of the configuration before the process starts, which parses it again. */
static int check(const struct remote_owner *o, struct kvd_why *why) {
        const struct dialect_config servers = {.servers = o->config->remote,
                                               .password = o->config->remote_password,
                                               .files = o->files,
                                               .library = o->config->remote_library,
                                               .metadata = o->config->remote_metadata,
                                               .devices = o->config->remote_devices};

        return dialect_check(&servers, why);
}

static int begin(struct remote_owner *o, struct loop *loop, struct kvd_why *why) {
        struct store_remote_config tier = {.depth = o->config->remote_depth};
        int r = open_files(o->config, &o->files, why);

        if (r == 0)
                r = check(o, why);
        if (r == 0)
                r = take_key(o, why);
        if (r == 0)
                r = take_password(o, why);
        if (r < 0)
                return r;
        r = shared_file_new("kvd-remote", sizeof(struct kvd_remote_chain), SHARED_MAPPED,
                            &o->chain);
        if (r < 0)
                return kvd_refuse(why, r, "no memory for the remote process: %s", strerror(-r));
        r = store_remote_begin(o->store, &tier);
        if (r < 0)
                return kvd_refuse(why, r, "%s", store_why(o->store));
        r = child_init(&o->child, &ops, o->config->worker_program, loop);
        o->child.most_pause_ns = MOST_PAUSE_NS;
        o->child.patience_ns = PATIENCE_NS;
        o->pause_ns = FIRST_AGAIN_NS;
        store_on_remote(o->store, wants, o);
        return r < 0 ? kvd_refuse(why, r, "out of memory for the remote process") : 0;
}

int remote_owner_new(const struct config *config, struct loop *loop, struct store *store,
                     struct remote_owner **ret, struct kvd_why *why) {
        struct remote_owner *o;
        int r;

        *ret = NULL;
        if (!config->remote[0])
                return 0;
        o = sys->calloc(1, sizeof *o);
        if (!o)
                return kvd_refuse(why, -ENOMEM, "out of memory for the remote process");
        o->store = store;
        o->config = config;
        o->child.socket.fd = o->child.process.fd = -1;
        o->files = TLS_NO_FILES;
        o->chain = SHARED_FILE_NONE;
        r = begin(o, loop, why);
        if (r < 0) {
                remote_owner_free(o);
                return r;
        }
        *ret = o;
        return 0;
}

struct remote_owner *remote_owner_free(struct remote_owner *o) {
        if (!o)
                return NULL;
        store_on_remote(o->store, NULL, NULL);
        if (o->child.ops)
                child_clear(&o->child);
        explicit_bzero(o->secret, sizeof o->secret);
        explicit_bzero(o->password, sizeof o->password);
        close_files(&o->files);
        shared_file_close(&o->chain);
        free(o);
        return NULL;
}

void remote_owner_start(struct remote_owner *o) {
        if (!o)
                return;
        if (!o->config->remote_key[0])
                log_warning(
                        "remote: remote_key is not set, so anyone with access to the servers can "
                        "read blocks and forge them; set remote_key");
        child_look(&o->child);
}
