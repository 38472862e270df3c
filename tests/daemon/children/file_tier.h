/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_DAEMON_CHILDREN_FILE_TIER_H
#define KVD_TESTS_DAEMON_CHILDREN_FILE_TIER_H

/* A daemon with a file tier, its client, and chains that are written to the file and fetched. */

#include "client/kvd.h"
#include "tests/lib/peer.h"

#define MSG(name_, ...) ((struct kvd_msg){.number = KVD_MSG_##name_, .name_ = {__VA_ARGS__}})
#define BLOCK_TOKENS 16u
#define BLOCKS 24u /* of a chain; more than a run has */
#define BLOCK_BYTES 16384u
#define RECORD_BYTES (BLOCK_BYTES + 4096) /* of a block in the file, with its header */
#define SEED 17u

extern struct instance in;
extern struct peer_end *watcher;
extern char file[128]; /* its path */
extern const char *pool, *file_size, *depth, *timeout;
extern kvd *handle;
extern kvd_space *space;
extern bool opaque;         /* whether the space's blocks are opaque */
extern uint32_t max_blocks; /* of the space; 0: no limit */
extern uint32_t kind;       /* 0: causal */
extern uint32_t n_tokens;   /* of a chain, whose last block may be filled in part */
extern uint32_t tokens[BLOCKS * BLOCK_TOKENS];

const char *const *settings(void);
struct kvd_msg_tier_info_reply tier_of(uint32_t number);
struct kvd_msg_tier_info_reply tier(void); /* the first tier */
bool tier_is(const char *state);
void connect_to_it(void);
/* Starts kvd, waits until the tier has that state, and connects. */
void start_again(const char *state);
void leave_it(void);

/* A fixture with one file. */
void start(void);
void stop(void);
void restart(bool kill);

void make_chain(const uint32_t *of);
/* Returns the number of resident blocks; checks their bytes. */
uint32_t resident(const uint32_t *of);
/* Waits until the fetch has ended. Returns the number of tokens that kvd_fetch promised. */
int64_t fetch(const uint32_t *of);
/* Returns the tokens that lower tiers have behind the resident ones, as a lookup reports them. */
uint32_t below_salted(const uint32_t *of, uint64_t salt);
uint32_t below(const uint32_t *of);
void evict_all(void);
/* Makes the chain of tokens, and waits until the file has all of it. */
void write_chain(void);
/* Flips a bit of a block of that chain in the file. */
void rot(const uint32_t *of, uint32_t block);
/* Whether the space is deleted and its records are erased. */
bool is_erased(void);

#endif
