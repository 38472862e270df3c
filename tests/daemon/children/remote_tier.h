/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_DAEMON_CHILDREN_REMOTE_TIER_H
#define KVD_TESTS_DAEMON_CHILDREN_REMOTE_TIER_H

/* Machines, each a daemon with a client, that share servers, and chains that go there and come. */

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

extern struct redis servers[REDIS_CLUSTER]; /* unless they are the stand-in of Mooncake */
extern uint32_t n_servers;

/* Of certificates that were made: "ca", which signs, and "server" by it; "": without TLS. */
extern char tls_folder[64];
extern const struct redis_tls server_tls; /* of it */
extern const char *tls_host; /* as which machines connect then */
void make_certificates(void);

bool on_mooncake(void);
bool on_tls(void);
bool servers_are_there(void); /* what they need is installed */
void servers_hang(bool hang);
void servers_fill(bool full); /* they take nothing */
void servers_forget(void);    /* all that they have, as if they had ended and begun anew */
uint32_t servers_change(size_t (*change)(uint8_t *value, size_t n)); /* all values; how many */
uint64_t servers_puts(void);  /* that they have had so far */
uint64_t servers_gets(void);

/* ---- machines -------------------------------------------------------------------------------- */

extern char key_file[MACHINES][64]; /* "": without */
extern char password_file[64];      /* "": without */
extern char library[128];           /* of Mooncake */
extern const char *more[6];         /* settings of all of them, the last one followed by NULL */
extern uint32_t remote_tier; /* its number: copies of the host come before it */
extern uint32_t kind;        /* of spaces; 0: causal */
extern uint32_t n_tokens;    /* of chains: those of all BLOCKS, but perhaps some of the last one's */
extern const struct kvd_geometry geometry;

struct kvd_msg_tier_info_reply tier(struct machine *m);
const char *why_away(struct machine *m); /* until the next call */
bool tier_is(struct machine *m, const char *state);
void open_space(struct machine *m, const char *name, const struct kvd_geometry *of);
void start_machine(struct machine *m, const char *state);
void stop_machine(struct machine *m);
void kill_machine(struct machine *m); /* and starts it again, without what it had */
/* The process that speaks to the servers; 0: there is none. */
pid_t remote_process(const struct machine *m);
void kill_remote_process(struct machine *m); /* and waits for the next one */

void start_a_server(void);
void start_all(void); /* a fixture: one server, all machines */
void start_whole(void); /* ... whose spaces are bidirectional */
void stop_all(void);
void make_key(uint32_t machine, uint8_t byte);

/* ---- chains ---------------------------------------------------------------------------------- */

extern uint32_t tokens[BLOCKS * BLOCK_TOKENS];

void make_tokens(void);
void make_chain(struct machine *m, const uint32_t *of);
/* The blocks that are resident; all of them must be right. */
uint32_t resident(struct machine *m, const uint32_t *of);
/* Waits until it has ended. False: there was nothing to wait for. */
bool fetch_of(struct machine *m, const uint32_t *of, uint64_t salt);
bool fetch(struct machine *m);
void evict_all(struct machine *m);
void write_chain(struct machine *m); /* tokens' chain, until the servers have it */

#endif
