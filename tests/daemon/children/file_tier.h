/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_DAEMON_CHILDREN_FILE_TIER_H
#define KVD_TESTS_DAEMON_CHILDREN_FILE_TIER_H

/* A daemon with a file tier, a client of it, and chains that go there and come back. */

#include "client/kvd.h"
#include "tests/lib/peer.h"

#define MSG(name_, ...) ((struct kvd_msg){.number = KVD_MSG_##name_, .name_ = {__VA_ARGS__}})
#define BLOCK_TOKENS 16u
#define BLOCKS 24u /* of a chain: more than a run */
#define BLOCK_BYTES 16384u
#define RECORD_BYTES (BLOCK_BYTES + 4096) /* what is written of a block: its head, too */
#define SEED 17u

extern struct instance in;
extern struct peer_end *watcher;
/* file: the first one; files: all of them, as in the setting */
extern char file[128], files[512];
extern const char *pool, *file_size, *depth, *timeout;
extern kvd *handle;
extern kvd_space *space;
extern bool opaque;         /* are its blocks? */
extern uint32_t max_blocks; /* of it; 0: as many as there are */
extern uint32_t kind;       /* 0: causal */
extern uint32_t n_tokens;   /* of chains: those of all BLOCKS, but perhaps some of the last one's */
extern uint32_t tokens[BLOCKS * BLOCK_TOKENS];

const char *const *settings(void);
struct kvd_msg_tier_info_reply tier_of(uint32_t number);
/* of all files; the texts are the first one's */
struct kvd_msg_tier_info_reply tier(void);
bool tier_is(const char *state); /* the first one's */
void watch(void);
void connect_to_it(void);
void leave_it(void);

/* A fixture with one file. */
void start(void);
void stop(void);
void restart(bool kill);

void make_chain(const uint32_t *of);
/* The blocks that are resident; all of them must be right. */
uint32_t resident(const uint32_t *of);
/* The tokens that were promised. Waits until it has ended. */
int64_t fetch(const uint32_t *of);
/* What a lookup says, without asking, of what is behind what it finds. */
uint32_t below_salted(const uint32_t *of, uint64_t salt);
uint32_t below(const uint32_t *of);
void evict_all(void);
/* tokens' chain, until all of it is in the file */
void write_chain(void);
/* Flips a bit of a block of that chain in the file. */
void rot(const uint32_t *of, uint32_t block);
/* Is the space deleted, and erased? */
bool is_erased(void);

#endif
