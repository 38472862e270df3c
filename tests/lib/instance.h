/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_INSTANCE_H
#define KVD_TESTS_LIB_INSTANCE_H

/*
 * A kvd of the test's own: the program $KVD, started with --private in a new directory. Both are
 * removed at the end. These calls do not return failures: a failure ends the test with a line.
 */

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <unistd.h>

#include "ipc/msg.h"

/* Also the deadline of libkvd's calls (deadline_ms) in programs that are linked with this. */
#define PATIENCE_MS 60000 /* anything that takes longer hangs, even on a busy machine */

struct conn;

struct instance {
        pid_t pid;
        char dir[64], socket[96];
};

/* ---- life ------------------------------------------------------------------------------------ */

/*
 * settings: "daemon.pool=4M" and the like, the last one followed by NULL; NULL: none. They override
 * the defaults of tests: a pool of 64 MiB in segments of 1 MiB, small pages (a test beside this one
 * may reserve huge pages for a while), a quarantine of 20 ms, and the backend $KVD_TEST_BACKEND, or
 * host.
 */
void instance_start(struct instance *in, const char *const *settings);
/* in the same directory, after it ended */
void instance_again(struct instance *in, const char *const *settings);
/* the same, not --private: every user may connect */
void instance_start_public(struct instance *in, const char *const *settings);
void instance_stop(struct instance *in);      /* SIGTERM; it must exit with 0 and leave no socket */
void instance_kill(struct instance *in);      /* SIGKILL */
void instance_sweep(struct instance *in);     /* removes the directory */
void instance_end(struct instance *in);       /* stop and sweep */
void instance_end_clean(struct instance *in); /* instance_expect_clean, then instance_end */
#define SETTINGS(...) ((const char *const[]){__VA_ARGS__, NULL})

void instance_make_dir(struct instance *in);
/* makes kvd's process: fork, unless a test replaces it */
extern pid_t (*instance_fork)(void);
/*
 * Runs kvd with exactly these arguments behind the program's name, and waits for readiness only if
 * ready is set.
 */
void instance_run(struct instance *in, const char *const *arguments, bool ready);
/* Call before the start. Returns a descriptor on which kvd reports its state (sd_notify). */
int instance_notified(struct instance *in);
const char *next_state(int fd); /* the next state but WATCHDOG=1; valid until the next call */
/* A child of a process with this name, or any child if name is NULL; 0 if none now. */
pid_t child_of(pid_t parent, const char *name);

bool instance_on_gpu(void); /* $KVD_TEST_BACKEND names a backend other than host */
/* How often this process has called a function of the stand-in driver, by its log $FAKECUDA_LOG. */
uint32_t driver_calls(const char *function);
int wait_status(pid_t pid); /* exit status; 128 + signal */
/* makes this process another user's; it can become root again (root only) */
void become_user(uid_t user);

/* ---- resources of the process ---------------------------------------------------------------- */

uint32_t fds_of(pid_t pid); /* open descriptors; 0: of this process */
uint32_t instance_fds(const struct instance *in);
uint64_t instance_rss_kib(const struct instance *in);
uint64_t instance_shared_kib(const struct instance *in); /* indexes, pin pages */
/*
 * Processor time of the process. While a thread runs, the figure may advance only with the
 * machine's ticks, 4 ms apart.
 */
uint64_t instance_cpu_ns(const struct instance *in);
/*
 * Waits until kvd has finished what it does ahead of need or after its last answer: it sleeps, and
 * has used no time. Time alone is not enough: a process that waits for a processor uses none
 * either.
 */
void instance_rest(const struct instance *in);
/*
 * The daemon's processor time since work_begin, minus the time for which this thread has waited for
 * a processor: a busy machine must not count as work of the daemon. The result is too small, never
 * too large, if this thread loses the processor between two readings.
 */
struct work_begun {
        uint64_t delay_ns, cpu_ns;
};
struct work_begun work_begin(const struct instance *in);
int64_t work_since(const struct instance *in, const struct work_begun *begun);

/*
 * The daemon's work between two answers. It is within the budget if only a few times exceed the
 * cost of a few turns of the loop, and none exceeds four times that: the kernel's clocks advance in
 * ticks of 4 ms, and late. The budget is larger on a slow machine.
 */
struct work_seen {
        _Atomic uint64_t most_ns;
        _Atomic uint32_t n_over;
};
void work_see(struct work_seen *seen, int64_t worked_ns);
bool work_is_bounded(const struct work_seen *seen);

/* ---- questions to it ------------------------------------------------------------------------- */

struct conn *instance_connect(const struct instance *in);

/* The facts of the nth space. The reply's slices are valid until the next call on conn. */
void space_facts(struct conn *conn, uint32_t nth, struct kvd_msg_space_info_reply *ret);

/*
 * Walks every invariant of every space; ends the test with the first broken one. Sums over a space
 * that changes meanwhile are not compared.
 */
void expect_clean(struct conn *conn);

/* Waits until no space has clients, leases, or blocks that are filled or in limbo. */
void expect_quiet(struct conn *conn);

void instance_expect_clean(const struct instance *in); /* both */

/* ---- the end of a test ----------------------------------------------------------------------- */

_Noreturn __attribute__((format(printf, 1, 2))) void die(const char *format, ...);
/* called before the test ends, to describe the circumstances on standard error; may be NULL */
extern void (*before_death)(void);

/* Evaluates the condition once a millisecond until it is true. */
#define WAIT_UNTIL(condition) \
        do { \
                for (int tries_ = 0; !(condition); tries_++) { \
                        if (tries_ == PATIENCE_MS) \
                                die("%s:%d: still not: %s", __FILE__, __LINE__, #condition); \
                        usleep(1000); \
                } \
        } while (0)

#endif
