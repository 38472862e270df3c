/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_REMOTE_TIER_H
#define KVD_STORE_REMOTE_TIER_H

/*
 * The remote tier, as the daemon sees it: servers that several machines share. The store decides
 * which blocks are written and read; a remote process (daemon/process/remote) talks to the servers, and
 * gets one request at a time. Only a request can tell what the servers have.
 *
 *      connecting ──► on ◄──► partly, away     as the process reports
 *
 * While all servers are away there are no requests, and no client waits. The rules for writing are
 * those of the file tier (store/file_tier.h). Blocks that neither the pool nor the file has are
 * fetched from here.
 */

#include "ipc/base/remote.h"
#include "store/file_tier.h"

struct store_remote_config {
        uint32_t depth; /* tokens; blocks ending there or later are written at first use */
};

enum store_remote_ask {
        STORE_REMOTE_FIND, /* how many blocks of a chain are on the servers? */
        STORE_REMOTE_GET,
        STORE_REMOTE_PUT,
};

struct store_remote_item {
        struct kvd_remote_item item; /* without file and offset */
        kvd_ref block;               /* held until the reply */
        const uint32_t *tokens;
};

struct store_remote_question {
        enum store_remote_ask what;
        struct space *space;
        const char *tenant;
        struct kvd_remote_content content;
        /* FIND: tokens of a chain, behind the block of that name (0: from its beginning); first:
           number of resident blocks of these */
        uint32_t group, first, n_tokens;
        uint64_t root;
        struct kvd_key behind;
        const uint32_t *tokens;
        bool checksums; /* GET: the reply brings checksums */
        uint32_t n;     /* GET, PUT: number of items */
        struct store_remote_item items[KVD_REMOTE_ITEMS];
};

/*
 * Creates the tier; call it before clients connect. Without this call the functions below do
 * nothing.
 */
int store_remote_begin(struct store *store, const struct store_remote_config *config);
/* Sets a function that is called when there is a request; soon: a client waits for it. */
void store_on_remote(struct store *store, void (*called)(void *data, bool soon), void *data);

/* The number of servers, and of those that do not answer; why: error of one of these. */
void store_remote_servers(struct store *store, uint32_t servers, uint32_t away, const char *why);

/* The next request; NULL: none. *later: there may be one after a while. */
const struct store_remote_question *store_remote_next(struct store *store, bool *later);

/*
 * Call it before the reply: n blocks were refused by servers (FIND), with the error of one of them;
 * "": none was refused.
 */
void store_remote_refused(struct store *store, uint32_t n, const char *refusal);
/*
 * The reply, by the kind of the request. FIND: names are those of the block before the first one
 * looked for, and of the blocks found; PUT: of all items. Errors are 0 or negative.
 */
void store_remote_found(struct store *store, const struct kvd_key *names, uint32_t n);
/* checksums: XXH3-64 of each block received; NULL if not requested. */
void store_remote_got(struct store *store, const int32_t *errors, const uint64_t *checksums,
                      uint32_t n);
void store_remote_put(struct store *store, const struct kvd_key *names, const int32_t *errors,
                      uint32_t n);
void store_remote_lost(struct store *store); /* the process is gone, and with it the request */
/* The memory of a request's item: a descriptor and the offset in it; or a negative errno. */
int store_remote_memory(struct store *store, uint32_t item, uint64_t *offset);

enum store_remote_state {
        STORE_REMOTE_NONE,
        STORE_REMOTE_CONNECTING,
        STORE_REMOTE_ON,
        STORE_REMOTE_PARTLY,
        STORE_REMOTE_AWAY,
};

struct store_remote_info {
        enum store_remote_state state;
        uint32_t servers, away;
        uint64_t fetches, queue;
        uint64_t hits, misses; /* number of blocks received; number requested but not received */
        uint64_t wrong;        /* number of blocks received damaged */
        uint64_t read_bytes, written_bytes, errors;
        uint64_t read_ns, write_ns; /* time for which reads, and writes, were under way */
        char why[128];              /* error of a server that is away */
        char last_error[128];
};
void store_remote_get_info(const struct store *store, struct store_remote_info *ret);

#endif
