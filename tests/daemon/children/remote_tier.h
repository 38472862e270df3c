/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_DAEMON_CHILDREN_REMOTE_TIER_H
#define KVD_TESTS_DAEMON_CHILDREN_REMOTE_TIER_H

/* Machines, each a daemon with a client, that share chains through common servers. */

#include "client/kvd.h"
#include "tests/lib/peer.h"
#include "tests/lib/redis.h"

#define MSG(name_, ...) ((struct kvd_msg){.number = KVD_MSG_##name_, .name_ = {__VA_ARGS__}})
#define BLOCK_TOKENS 16u
#define BLOCKS 48u
#define BLOCK_BYTES 16384u
#define SEED 17u
#define MACHINES 2u

extern struct machine { /* a daemon and a client of it */
        struct instance in;
        struct peer_end *watcher;
        kvd *handle;
        kvd_space *space;
} machines[MACHINES];

/* ---- servers --------------------------------------------------------------------------------- */

extern struct redis servers[REDIS_CLUSTER]; /* unused with the stand-in for Mooncake */
extern uint32_t n_servers;

/* Folder with the certificates "ca" and "server", which "ca" has signed; "" without TLS. */
extern char tls_folder[64];
extern const struct redis_tls server_tls; /* with the certificate "server" */
extern const char *tls_host;              /* the server's host, as machines name it with TLS */
void make_certificates(void);

bool on_mooncake(void);
bool on_tls(void);
bool servers_are_there(void); /* whether the servers are installed */
void servers_hang(bool hang);
void servers_fill(bool full); /* full servers refuse all writes */
void servers_forget(void);    /* loses all data, as a restart does */
uint32_t servers_change(size_t (*change)(uint8_t *value, size_t n)); /* returns number of values */
uint64_t servers_puts(void);                                         /* number of puts so far */
uint64_t servers_gets(void);

/* ---- machines -------------------------------------------------------------------------------- */

extern char key_file[MACHINES][64]; /* "" if none */
extern char password_file[64];      /* "" if none */
extern char library[128];           /* path of Mooncake's library */
extern const char *more[6];         /* settings of all machines, terminated by NULL */
extern uint32_t remote_tier;        /* number of the remote tier; the host tier comes before it */
extern uint32_t kind;               /* of spaces; 0: causal */
extern uint32_t n_tokens;           /* of a chain, whose last block may be filled in part */
extern const struct kvd_geometry geometry;

struct kvd_msg_tier_info_reply tier(struct machine *m);
const char *why_away(struct machine *m); /* valid until the next call */
bool tier_is(struct machine *m, const char *state);
void open_space(struct machine *m, const char *name, const struct kvd_geometry *of);
void start_machine(struct machine *m, const char *state);
void stop_machine(struct machine *m);
void kill_machine(struct machine *m); /* and starts it again, with an empty pool */
/* Process id of the remote process; 0 if none. */
pid_t remote_process(const struct machine *m);
void kill_remote_process(struct machine *m); /* and waits for the next one */

void start_a_server(void);
void start_all(void);   /* a fixture: one server, all machines */
void start_whole(void); /* the same with bidirectional spaces */
void stop_all(void);
void make_key(uint32_t machine, uint8_t byte);

/* ---- chains ---------------------------------------------------------------------------------- */

extern uint32_t tokens[BLOCKS * BLOCK_TOKENS];

void make_tokens(void);
void make_chain(struct machine *m, const uint32_t *of);
/* Returns the number of resident blocks; checks their bytes. */
uint32_t resident(struct machine *m, const uint32_t *of);
/* Waits until the fetch has ended. Returns false if there was nothing to wait for. */
bool fetch_of(struct machine *m, const uint32_t *of, uint64_t salt);
bool fetch(struct machine *m);
void evict_all(struct machine *m);
void write_chain(struct machine *m); /* makes the chain of tokens; waits until servers have it */

#endif
