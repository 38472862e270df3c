/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_GPU_CHECK_H
#define KVD_TESTS_GPU_CHECK_H

/*
 * The checks: scripts for actors (actor.h). Each runs in a process of its own that never
 * initialises a driver, has a time limit, and prints its lines itself. The answer is what was
 * observed, even if it is a surprise.
 */

#include "tests/gpu/actor.h"
#include "tests/gpu/line.h"

#define MIB (1ull << 20)

struct check {
        const char *name, *about;
        void (*run)(void);
        unsigned seconds;
};

struct driver;

void check_driver(const struct driver *d); /* call this first */
/* seconds: 0 for the check's own limit. False: it did not end well */
bool check_run(const struct check *check, unsigned seconds);
/* only: names separated by commas; NULL: all */
bool check_is_wanted(const char *only, const char *name);

/* Bytes of memory that a check may use: `wanted`, or less on a stand-in or if little is free. */
uint64_t check_bytes(uint64_t wanted);
unsigned check_rounds(unsigned wanted);
/*
 * Selects a time for a GPU or for a stand-in. A stand-in answers at once, unless its machine is
 * busy. So an event that must come gets CHECK_PATIENCE_MS there, and a check for an event that must
 * not come ends soon.
 */
unsigned check_ms(unsigned on_a_gpu, unsigned on_a_stand_in);
bool check_on_stand_in(void);
#define CHECK_PATIENCE_MS 60000

/* If r is an error, answers that the question could not be asked. True: it did. */
bool cannot_ask(struct line *l, int r, const char *step, const struct actor *a);

/* A descriptor of host memory that can be registered, or -1. */
int host_page(uint64_t bytes, unsigned flags);

double median(double *x, unsigned n);
double ms_of(uint64_t ns);
double us_of(uint64_t ns);

void check_read_only(void);
void check_lifetime(void);
void check_users(void);
void check_order(void);
void check_owner(void);
void check_killed(void);
void check_latency(void);
void check_images(void);
void check_registering(void);

#endif
