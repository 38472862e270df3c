/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_REMOTE_H
#define KVD_STORE_REMOTE_H

/*
 * The remote tier, as the daemon sees it: servers that several machines share. The store decides
 * what goes there and what is asked for; a remote process (daemon/process/remote) speaks to the servers.
 * Nobody knows what lies there without asking, and one question is out at a time.
 *
 *      connecting ──► on ◄──► partly, away     by what the process says of its servers
 *
 * While all are away nothing is asked, and nobody waits. What is written follows the rules of the
 * file (store/disk.h); what comes is asked for where neither pool nor file has it.
 */

#include "ipc/base/remote.h"
#include "store/disk.h"

struct store_remote_config {
        uint32_t depth;       /* tokens that end with a block which is written at first use */
};

enum store_remote_ask {
        STORE_REMOTE_FIND,    /* how many blocks of a chain are there behind the first ones? */
        STORE_REMOTE_GET,
        STORE_REMOTE_PUT,
};

struct store_remote_item {
        struct kvd_remote_item item; /* without file and offset */
        kvd_ref block;               /* held until the answer */
        const uint32_t *tokens;
};

struct store_remote_question {
        enum store_remote_ask what;
        struct space *space;
        const char *tenant;
        struct kvd_remote_content content;
        /* FIND: a chain from its beginning on, and how many of its blocks are resident */
        uint32_t group, first, n_tokens;
        uint64_t root;
        const uint32_t *tokens;
        bool checksums;       /* GET: the answer has some */
        uint32_t n;           /* GET, PUT */
        struct store_remote_item items[KVD_REMOTE_ITEMS];
};

/* Before clients come. Without it there is no remote tier, and nothing below does anything. */
int store_remote_begin(struct store *store, const struct store_remote_config *config);
/* Calls back when there is something to ask; soon: somebody waits for it. */
void store_on_remote(struct store *store, void (*called)(void *data, bool soon), void *data);

/* How many servers there are, and how many do not answer; why: one of those. */
void store_remote_servers(struct store *store, uint32_t servers, uint32_t away, const char *why);

/* What to ask next; NULL: nothing. later: there may be something, in a while. */
const struct store_remote_question *store_remote_next(struct store *store, bool *later);

/*
 * Of the answer that follows: how many blocks servers refused to look for (FIND), and what one said
 * to what it refused; "": nothing was.
 */
void store_remote_refused(struct store *store, uint32_t n, const char *refusal);
/*
 * Its answer, of the kind of the question. names: of the block before the first that was looked
 * for, and of those that are there (FIND); of all items (PUT). Errors are 0 or negative.
 */
void store_remote_found(struct store *store, const struct kvd_key *names, uint32_t n);
/* checksums: XXH3-64 of what came; NULL if they were not asked for. */
void store_remote_got(struct store *store, const int32_t *errors, const uint64_t *checksums,
                      uint32_t n);
void store_remote_put(struct store *store, const struct kvd_key *names, const int32_t *errors,
                      uint32_t n);
void store_remote_lost(struct store *store); /* the process is gone, and with it the question */
/* Where a question's block is for them: a descriptor, and where in there; or a negative errno. */
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
        uint64_t hits, misses;   /* blocks that came, and that were asked for and did not */
        uint64_t wrong;          /* blocks that came, and were not what they should be */
        uint64_t read_bytes, written_bytes, errors;
        uint64_t read_ns, write_ns; /* that they were asked for them, and given them */
        char why[128];           /* a server is away */
        char last_error[128];
};
void store_remote_get_info(const struct store *store, struct store_remote_info *ret);

/*
 * space_fetch for what neither the pool nor the file has: the tokens that are resident, and a
 * descriptor if the servers are asked for more.
 */
int64_t space_fetch_remote(struct attachment *attachment, const struct fetch_request *q, int *fd);

#endif
