/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_FAULT_H
#define KVD_TESTS_FAULT_H

/*
 * A table of system calls in which the n-th call of one kind fails, once or for good, and a loop
 * over all n, as in SQLite's tests: n grows until a run ends without having met the failure.
 */

#include <stdbool.h>
#include <stdint.h>

#include "ipc/base/sys.h"

enum fault_call {
#define FAULT_ENUM(type, name, parameters, arguments) FAULT_##name,
        KVD_SYS_CALLS(FAULT_ENUM)
#undef FAULT_ENUM
                N_FAULT_CALLS
};

/* Instead of an errno: the call transfers half; the call does not return. */
#define FAULT_SHORT (-1)
#define FAULT_HANG (-2)

struct fault {
        enum fault_call call;
        int error;    /* errno, FAULT_SHORT or FAULT_HANG */
        uint32_t nth; /* 1: the first call */
        bool forever;
};

/* In memory that the test and the process under test share. */
struct fault_state {
        struct fault fault;
        _Atomic bool on;                       /* calls are counted and fail only then */
        _Atomic uint32_t seen;                 /* calls of the failing kind so far */
        _Atomic uint32_t injected;             /* number of those that failed */
        uint64_t began_ms;                     /* time of the first failure */
        _Atomic uint64_t calls[N_FAULT_CALLS]; /* of each kind so far */
};

/* Makes state's failures happen from now on in this process. */
void fault_install(struct fault_state *state);
void fault_set(struct fault_state *state, const struct fault *fault);

/*
 * For each call and each error that it may return, once as a single failure and once as a permanent
 * one: calls run(state, arg) for n = 1, 2, ... until no failure was injected. run ends the test
 * itself if something is wrong. Prints the number of places of each call. Tests every stride-th
 * place, and other places with each error, so that each place fails with some of the errors. With
 * $KVD_TEST_LONG in the environment, each place fails with all of them.
 */
void fault_sweep(struct fault_state *state, const char *who, uint32_t stride,
                 void (*run)(struct fault_state *, void *), void *arg);

struct fault_state *fault_state_new(void); /* shared with processes forked later */
/* fd: of a file, so that programs started later can share it, too (fault_state_of) */
struct fault_state *fault_state_of(int fd);

/* Calls run in a process of its own, for at most so many seconds. Returns 0, or ends the test. */
int fault_fork(struct fault_state *state, void (*run)(struct fault_state *, void *), void *arg,
               unsigned seconds);

#endif
