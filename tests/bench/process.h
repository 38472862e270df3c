/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BENCH_PROCESS_H
#define KVD_BENCH_PROCESS_H

/*
 * Processes that a benchmark needs. Each dies with it, however it ends. They stay on the
 * benchmark's processor, where a socket peer is fastest, because no other processor has to wake up.
 */

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct process {
        pid_t pid; /* 0 if none */
        int fd;    /* process_fork: our end of the socket; -1 if none */
};

#define NO_PROCESS ((struct process){.pid = 0, .fd = -1})

/* argv[0] is searched for in PATH; output goes to log. */
int process_start(char *const argv[], const char *log, struct process *ret);

/*
 * Like process_start, then waits up to a minute until the process writes to or closes descriptor
 * ready_fd. Returns -EIO if the process ended.
 */
int process_start_ready(char *const argv[], const char *log, int ready_fd, struct process *ret);

/*
 * A child that answers requests on a SOCK_SEQPACKET socket: respond returns the size of the answer.
 */
int process_fork(size_t (*respond)(void *ctx, void *message, size_t n), void *ctx,
                 struct process *ret);

/* A child that runs a function until it is ended. */
int process_run(void (*function)(void *ctx), void *ctx, struct process *ret);

void process_end(struct process *process);

/*
 * Waits up to a minute until the process has been idle for 100 ms: by then, its background work
 * after a start or a fill is done.
 */
void process_settle(const struct process *process);

/* Processor time of the process. */
uint64_t process_cpu_ns(const struct process *process);

/* Keeps this process, and children that it makes from now on, on the last processor it may use. */
int process_stay(void);

/* Lets this process, and all children that it makes from now on, use all processors again. */
void process_go_anywhere(void);

#endif
