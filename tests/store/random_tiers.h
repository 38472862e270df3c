/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_STORE_RANDOM_TIERS_H
#define KVD_TESTS_STORE_RANDOM_TIERS_H

/*
 * The process of a tier below the pool, played at random: a disk, or servers. It does what it is
 * asked, late, in part or not at all, and checks that each request makes sense: what is read must
 * have been written, under that name and with these tokens.
 *
 * Chains are such that a token tells its chain and where it is in it, so one token tells all before
 * it. The bytes of a block follow from its tokens.
 */

#include "store/below/below.h"
#include "tests/lib/oracle.h"
#include "tests/store/fixture.h"

#define TIERS_LONGEST 100u /* blocks of a chain */
#define TIERS_SHARED 20u   /* causal: a chain begins with so many blocks of a colleague's */

enum tiers_kind {
        TIERS_FILE,
        TIERS_SERVERS,
        TIERS_FILE_GPU, /* as below a pool on a GPU: a worker carries blocks through host memory */
        TIERS_HOST,     /* host memory without a disk */
        TIERS_SERVERS_GPU,
        N_TIERS,
};

/* A store of so many blocks, with that tier. The tier draws from *chance. */
void tiers_open(enum tiers_kind kind, uint32_t blocks, struct random *chance);
bool tiers_are_files(void);
void tiers_pass_time(uint64_t ns); /* the store's clock is the test's */

/* Takes the next request. Returns whether there was one, and in *later whether to ask again. */
bool tiers_ask(bool *later);
void tiers_answer(void);  /* answers it */
bool tiers_trouble(void); /* something fails, or works again. True: no fetch may wait for it */
void tiers_calm(void);    /* everything works from now on */
bool tiers_are_off(void); /* for good */

/* Compares what the tier has of requests and fetches. */
void tiers_check(void);

/* A token of a chain, and its predecessor in that chain, or 0 for the first token. */
uint32_t tiers_token(bool whole, uint32_t chain, uint32_t nth);
uint32_t tiers_token_before(bool whole, uint32_t token);
/* Seed of a block's bytes. root: as in struct kvd_desc. */
uint64_t tiers_content(const struct space *space, uint64_t root, const uint32_t *tokens,
                       uint32_t n_tokens);
/* The space is deleted: a file must not bring any of its blocks back. */
void tiers_bury(const struct space *space);

#endif
