/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_STORE_FIXTURE_H
#define KVD_TESTS_STORE_FIXTURE_H

/*
 * A store, a worker that does its jobs in this process, and a client that keeps the table of a
 * sequence as a client would: it believes only what it was told, and compares every byte that it
 * may read with what must be there.
 */

#include <stdbool.h>
#include <stdint.h>

#include "store/file/record.h"
#include "store/file/super.h"
#include "store/methods/methods.h"
#include "store/store.h"

#define BT 4u /* tokens per block */
#define BLOCK_BYTES (2u * 2 * 1 * 8 * BT * 4)

extern struct store *store;
extern struct domain *domain;

void fixture_open(uint64_t pool_blocks, uint64_t spill_blocks);
void fixture_close(void);
struct space *fixture_space(const char *name, uint64_t max_blocks);
struct space *fixture_whole_space(const char *name); /* bidirectional */
struct attachment *fixture_attach(struct space *space); /* a process of its own */
struct attachment *fixture_attach_as(struct space *space, uint64_t process);
/* Of a file that there was: those that are new have larger extents. */
void fixture_super(struct file_super supers[], uint32_t file, uint32_t extents,
                   uint64_t extent_bytes);
void set(struct space *space, const char *key, const char *value);
void check_clean(struct space *space);
void idle(void); /* until there is nothing more to do */
uint64_t counter(struct space *space, enum kvd_space_counter which);
struct space_usage usage_of(struct space *space);

/* ---- worker ---------------------------------------------------------------------------------- */

extern struct kvd_job *worker_job; /* the arguments of the job that was taken */

bool worker_take(void);            /* false: there is none, or it has one */
void worker_do(void);              /* does what it took, and answers */
void worker_fail(int error);       /* does nothing, and says so */
void worker_die(void);             /* writes part of it, and is gone */
void worker_rest(void);            /* has done a piece of it, it says */
void worker_answer(const void *result, size_t bytes); /* says anything */
/* takes and does until there is nothing; returns how many jobs */
uint32_t work(void);
void worker_spoil(struct space *space, uint32_t slot); /* turns a bit of an exact copy */
extern int worker_verdict;         /* COMPARE: 0 as usual; otherwise nothing is ever alike */

/* ---- client ---------------------------------------------------------------------------------- */

#define TABLE_MAX 1536u

struct slot {
        kvd_ref ref; /* 0: not resident */
        uint32_t flags, position, n_tokens;
        int32_t delta;
};

struct table {
        struct attachment *a;
        uint32_t number, n, n_tokens;
        struct kvd_pin_words *words; /* NULL: this client pins nothing */
        struct slot slots[TABLE_MAX];
        uint32_t tokens[TABLE_MAX * BT];
};

void table_open(struct table *t, struct attachment *a, uint32_t max_blocks, bool pins);
/* what its client's attention says of a block; of a client that pins */
struct kvd_use *table_use(const struct table *t, kvd_ref ref);
/* tokens count up from it; 0 or -errno */
int table_append(struct table *t, uint32_t n_tokens, uint32_t first_token);
void table_close(struct table *t);
void table_forget(struct table *t); /* its process is gone */

/*
 * Syncs until there is nothing. which: does the client take a change? NULL: every one. Returns how
 * many were.
 */
uint32_t table_sync(struct table *t, bool (*takes)(const struct kvd_change *change));
bool takes_nothing(const struct kvd_change *change);
/* One answer, without taking or refusing anything: *ret has them. */
uint32_t table_peek(struct table *t, struct kvd_change *ret);

/* Every byte of every resident exact block, every flag, against the store's own idea. */
void table_check(const struct table *t);
void block_floats(struct space *space, kvd_ref ref, float ret[BLOCK_BYTES / 4]);
void fixture_write(struct space *space, kvd_ref ref, const void *from);
/* into token slot `at` of a block */
void token_floats(uint32_t token, uint32_t at, float ret[BLOCK_BYTES / 4]);

#endif
