/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_STORE_FIXTURE_H
#define KVD_TESTS_STORE_FIXTURE_H

/*
 * A store, a worker that does its jobs in this process, and a client that keeps the table of a
 * sequence. The client knows only what the store told it, and compares every byte that it may read
 * with the right one.
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
struct space *fixture_whole_space(const char *name);    /* bidirectional */
struct attachment *fixture_attach(struct space *space); /* as a process of its own */
struct attachment *fixture_attach_as(struct space *space, uint64_t process);
/* A superblock as of an existing file; a new file would get larger extents. */
void fixture_super(struct file_super *super, uint32_t extents, uint64_t extent_bytes);
void set(struct space *space, const char *key, const char *value);
void check_clean(struct space *space);
void idle(void); /* does idle work until there is none */
uint64_t counter(struct space *space, enum kvd_space_counter which);
struct space_usage usage_of(struct space *space);

/* ---- worker ---------------------------------------------------------------------------------- */

extern struct kvd_job *worker_job; /* arguments of the job that was taken */

bool worker_take(void);      /* takes a job; false: no job, or it has one already */
void worker_do(void);        /* does the job, and answers */
void worker_fail(int error); /* answers this error */
void worker_die(void);       /* writes part of the result, and dies */
void worker_rest(void);      /* answers that a piece is done */
void worker_answer(const void *result, size_t bytes); /* answers anything */
/* takes and does jobs until there is none; returns how many */
uint32_t work(void);
uint64_t worker_checksum(const void *block);           /* of a copy */
void worker_spoil(struct space *space, uint32_t slot); /* flips a bit of an exact copy */
extern int worker_verdict; /* COMPARE: 0: by the bytes; otherwise no blocks are alike */

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
/* the attention that the client reports for a block; only for a client that pins */
struct kvd_use *table_use(const struct table *t, kvd_ref ref);
/* tokens count up from first_token; 0 or -errno */
int table_append(struct table *t, uint32_t n_tokens, uint32_t first_token);
void table_close(struct table *t);
void table_forget(struct table *t); /* its process has ended */

/*
 * Syncs until there are no changes. takes: does the client take this change? NULL: it takes all.
 * Returns the number of changes taken.
 */
uint32_t table_sync(struct table *t, bool (*takes)(const struct kvd_change *change));
bool takes_nothing(const struct kvd_change *change);
/* The answer to a sync that takes and refuses nothing: *ret gets the changes. Returns how many. */
uint32_t table_peek(struct table *t, struct kvd_change *ret);

/* Compares every byte of resident exact blocks, and every flag, with the store's. */
void table_check(const struct table *t);
void block_floats(struct space *space, kvd_ref ref, float ret[BLOCK_BYTES / 4]);
void fixture_write(struct space *space, kvd_ref ref, const void *from);
/* writes the token's floats at token `at` of a block */
void token_floats(uint32_t token, uint32_t at, float ret[BLOCK_BYTES / 4]);

#endif
