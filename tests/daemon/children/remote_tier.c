/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Daemons and clients for tests of the remote tier. $KVD_TEST_REMOTE selects their servers: the
 * stand-in for Mooncake ("mooncake"), or real Redis servers with TLS ("tls") or without.
 */

#include "tests/daemon/children/remote_tier.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/daemon/children/fetched.h"
#include "tests/lib/certificates.h"
#include "tests/lib/mark.h"
#include "tests/lib/mooncake.h"
#include "tests/lib/oracle.h"

struct machine machines[MACHINES];
struct redis servers[REDIS_CLUSTER];
uint32_t n_servers;
char tls_folder[64];
const struct redis_tls server_tls = {.folder = tls_folder, .name = "server"};
const char *tls_host = "127.0.0.1";
char key_file[MACHINES][64], password_file[64];
const char *more[6];
uint32_t remote_tier;
uint32_t kind, n_tokens = BLOCKS * BLOCK_TOKENS;
uint32_t tokens[BLOCKS * BLOCK_TOKENS];
char library[128];
const struct kvd_geometry geometry = {.layers = 1,
                                      .kv_heads = 2,
                                      .head_dim = 64,
                                      .block_tokens = BLOCK_TOKENS,
                                      .dtype = KVD_F32,
                                      .vocab = 1u << 20};

/* ---- servers --------------------------------------------------------------------------------- */

bool on_mooncake(void) {
        const char *what = getenv("KVD_TEST_REMOTE");

        return what && strcmp(what, "mooncake") == 0;
}

bool on_tls(void) {
        const char *what = getenv("KVD_TEST_REMOTE");

        return what && strcmp(what, "tls") == 0;
}

bool servers_are_there(void) {
        return on_mooncake() || (on_tls() ? redis_has_tls() : redis_is_there());
}

void make_certificates(void) {
        strcpy(tls_folder, "/tmp/kvd-tls-XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(tls_folder));
        certificate_make(tls_folder, "ca", NULL, NULL, 30);
        certificate_make(tls_folder, "server", "DNS:localhost,IP:127.0.0.1", "ca", 30);
}

static void remove_certificates(void) {
        char command[96];

        snprintf(command, sizeof command, "rm -rf %s", tls_folder);
        ck_assert_int_eq(system(command), 0);
}

void start_a_server(void) {
        make_tokens();
        if (on_mooncake()) {
                snprintf(library, sizeof library, "%s", getenv("KVD_TEST_MOONCAKE"));
                mooncake_start();
        } else {
                if (on_tls())
                        make_certificates();
                n_servers = 1;
                redis_start(&servers[0], on_tls() ? &server_tls : NULL);
        }
}

static void stop_servers(void) {
        if (on_mooncake())
                mooncake_stop();
        for (uint32_t i = 0; i < n_servers; i++)
                redis_stop(&servers[i]);
}

void servers_hang(bool hang) {
        if (on_mooncake())
                mooncake_fails(hang ? "hang" : "");
        else
                ck_assert_int_eq(kill(servers[0].pid, hang ? SIGSTOP : SIGCONT), 0);
}

void servers_fill(bool full) {
        if (on_mooncake()) {
                mooncake_fails(full ? "full" : "");
        } else {
                REDIS(&servers[0], "CONFIG", "SET", "maxmemory-policy", "noeviction");
                REDIS(&servers[0], "CONFIG", "SET", "maxmemory", full ? "1" : "0");
        }
}

void servers_forget(void) {
        if (on_mooncake()) {
                mooncake_fails("dead");
                mooncake_forget();
                for (uint32_t i = 0; i < MACHINES; i++)
                        WAIT_UNTIL(!machines[i].watcher || tier_is(&machines[i], "away"));
                mooncake_fails("");
        } else {
                REDIS(&servers[0], "FLUSHALL");
                REDIS(&servers[0], "CLIENT", "KILL", "TYPE", "normal");
        }
}

uint32_t servers_change(size_t (*change)(uint8_t *value, size_t n)) {
        return on_mooncake() ? mooncake_change(change) : redis_change(&servers[0], "", change);
}

uint64_t servers_puts(void) {
        return on_mooncake() ? mooncake_calls("put") : redis_calls(&servers[0], "set");
}

uint64_t servers_gets(void) {
        return on_mooncake() ? mooncake_calls("get") : redis_calls(&servers[0], "get");
}

/* ---- machines -------------------------------------------------------------------------------- */

const char *why_away(struct machine *m) {
        static char line[160];

        return kvd_slice_copy(tier(m).why, line, sizeof line);
}

struct kvd_msg_tier_info_reply tier(struct machine *m) {
        return peer_ok(m->watcher, MSG(tier_info, .tier = remote_tier)).tier_info_reply;
}

bool tier_is(struct machine *m, const char *state) {
        struct kvd_msg_tier_info_reply t = tier(m);

        return t.state.size == strlen(state) && memcmp(t.state.data, state, t.state.size) == 0;
}

void open_space(struct machine *m, const char *name, const struct kvd_geometry *of) {
        const struct kvd_space_options options = {.kind = kind};

        ck_assert_msg(kvd_space_open(m->handle, name, of, &options, &m->space) == 0, "%s",
                      kvd_error());
}

void make_tokens(void) {
        for (uint32_t i = 0; i < ARRAY_SIZE(tokens); i++)
                tokens[i] = 1000 + i;
}

/* Returns the machine's settings, valid until the next call. */
static const char *const *settings(const struct machine *m) {
        static char remote[128], key[160], password[160], from[192], ca[128];
        uint32_t number = (uint32_t)(m - machines);
        static const char *list[16];
        const char *own[] = {"daemon.pool=4M",
                             "daemon.segment=1M",
                             "daemon.remote_depth=0",
                             "daemon.remote_timeout=10000",
                             "daemon.host_tier_depth=0",
                             remote,
                             key,
                             password,
                             from,
                             ca};

        if (on_mooncake())
                strcpy(remote, "daemon.remote=mooncake://127.0.0.1:50051");
        else
                snprintf(remote, sizeof remote, "daemon.remote=%s://%s:%u",
                         tls_folder[0] ? "rediss" : "redis", tls_folder[0] ? tls_host : "127.0.0.1",
                         servers[0].port);
        snprintf(key, sizeof key, "daemon.remote_key=%s", key_file[number]);
        snprintf(password, sizeof password, "daemon.remote_password=%s", password_file);
        snprintf(from, sizeof from, "daemon.remote_library=%s", library);
        snprintf(ca, sizeof ca, "daemon.remote_ca=%s%s", tls_folder,
                 tls_folder[0] ? "/ca.pem" : "");
        memcpy(list, own, sizeof own);
        memcpy(list + ARRAY_SIZE(own), more, sizeof more);
        return list;
}

/* Connects a client to a machine whose daemon runs. */
static void use_machine(struct machine *m, const char *state) {
        m->watcher = peer_attach(m->in.socket);
        WAIT_UNTIL(tier_is(m, state));
        ck_assert_msg(kvd_open(m->in.socket, &m->handle) == 0, "%s", kvd_error());
        open_space(m, "s", &geometry);
}

void start_machine(struct machine *m, const char *state) {
        instance_start(&m->in, settings(m));
        use_machine(m, state);
}

static void leave_machine(struct machine *m) {
        m->space = kvd_space_close(m->space);
        m->handle = kvd_close(m->handle);
        m->watcher = peer_close(m->watcher);
}

void kill_machine(struct machine *m) {
        instance_kill(&m->in);
        leave_machine(m);
        instance_again(&m->in, settings(m));
        use_machine(m, "on");
}

void stop_machine(struct machine *m) {
        if (!m->watcher)
                return;
        leave_machine(m);
        instance_end_clean(&m->in);
}

void start_all(void) {
        start_a_server();
        for (uint32_t i = 0; i < MACHINES; i++)
                start_machine(&machines[i], "on");
}

void start_whole(void) {
        kind = KVD_BIDIRECTIONAL;
        n_tokens = BLOCKS * BLOCK_TOKENS - 5; /* its last block is filled in part */
        start_all();
}

void stop_all(void) {
        for (uint32_t i = 0; i < MACHINES; i++)
                stop_machine(&machines[i]);
        stop_servers();
        for (uint32_t i = 0; i < MACHINES; i++)
                if (key_file[i][0])
                        unlink(key_file[i]);
        if (tls_folder[0])
                remove_certificates();
}

pid_t remote_process(const struct machine *m) {
        return child_of(m->in.pid, "kvd-remote");
}

void kill_remote_process(struct machine *m) {
        pid_t pid = remote_process(m);

        ck_assert_int_gt(pid, 0);
        kill(pid, SIGKILL);
        WAIT_UNTIL(remote_process(m) > 0 && remote_process(m) != pid && tier_is(m, "on"));
}

/* ---- files ----------------------------------------------------------------------------------- */

void make_key(uint32_t machine, uint8_t byte) {
        uint8_t key[32];
        int fd;

        memset(key, byte, sizeof key);
        snprintf(key_file[machine], sizeof key_file[machine], "/var/tmp/kvd-remote-key-%d-%u",
                 getpid(), machine);
        fd = open(key_file[machine], O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        ck_assert_int_eq(write(fd, key, sizeof key), sizeof key);
        close(fd);
}

/* ---- chains ---------------------------------------------------------------------------------- */

/* Seed of a block's bytes, which in a bidirectional space depend on all tokens of the prefix. */
static uint64_t seed_of(const uint32_t *of, uint32_t block) {
        return kind == KVD_BIDIRECTIONAL ? oracle_seed(SEED + block, of, n_tokens) :
                                           oracle_seed(SEED, of, (block + 1) * BLOCK_TOKENS);
}

void make_chain(struct machine *m, const uint32_t *of) {
        struct kvd_block blocks[BLOCKS];
        struct kvd_pin pin = {0};
        uint32_t n = 0;

        while (n < BLOCKS) {
                int r = kvd_alloc(m->space, BLOCKS - n, blocks + n);

                ck_assert_msg(r > 0, "%s", kvd_error());
                n += (uint32_t)r;
        }
        for (uint32_t i = 0; i < BLOCKS; i++)
                oracle_fill(blocks[i].data, BLOCK_BYTES, seed_of(of, i));
        ck_assert_msg(kvd_seal(m->space, &pin, BLOCKS, blocks, of, n_tokens) >= 0, "%s",
                      kvd_error());
        kvd_unpin(m->space, &pin);
}

/* Returns the number of resident blocks; checks their bytes. */
uint32_t resident(struct machine *m, const uint32_t *of) {
        struct kvd_pin pin = {0};
        uint32_t ids[BLOCKS], n_blocks;
        int64_t n;

        kvd_catch_up(m->space);
        n = kvd_lookup(m->space, 0, of, n_tokens, ids, BLOCKS, &pin);
        ck_assert_int_ge(n, 0);
        n_blocks = DIV_UP((uint32_t)n, BLOCK_TOKENS);
        for (uint32_t i = 0; i < n_blocks; i++)
                ck_assert_uint_eq(oracle_wrong(kvd_pin_block(&pin, ids[i]), BLOCK_BYTES,
                                               seed_of(of, i)),
                                  0);
        kvd_unpin(m->space, &pin);
        return n_blocks;
}

/* Waits until the fetch has ended. Returns false if there was nothing to wait for. */
bool fetch_of(struct machine *m, const uint32_t *of, uint64_t salt) {
        int fd;
        int64_t n = kvd_fetch(m->space, 0, salt, of, n_tokens, &fd);

        return fetch_ended(n, fd);
}

bool fetch(struct machine *m) {
        return fetch_of(m, tokens, 0);
}

static void evict(struct machine *m) {
        struct kvd_msg_evict_reply r;

        do {
                r = peer_ok(m->watcher, MSG(evict, .space = kvd_slice_of("s"))).evict_reply;
        } while (r.more);
}

/* Blocks that are being sent to servers stay until that has ended. */
void evict_all(struct machine *m) {
        WAIT_UNTIL((evict(m), resident(m, tokens) == 0));
}

void write_chain(struct machine *m) {
        make_chain(m, tokens);
        WAIT_UNTIL(tier(m).written_bytes >= BLOCKS * (uint64_t)BLOCK_BYTES);
}
