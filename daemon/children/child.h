/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CHILDREN_CHILD_H
#define KVD_DAEMON_CHILDREN_CHILD_H

/*
 * A child: a process of the same program that does what the loop must not do itself. The daemon has
 * four kinds: the worker (worker_jobs.h), which computes, the exporter (exporter_child.h), which
 * holds memory in a CUDA context, the disk process (disk_child.h), and the remote
 * process (remote_child.h).
 *
 *      none ──wanted──▶ runs ◀──request, reply──▶ asked
 *        ▲                │ it ends, sends an invalid reply, or misses the deadline
 *        └─────pause──────┘
 */

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "daemon/base/loop.h"
#include "ipc/base/degraded.h"
#include "ipc/frame.h"
#include "ipc/msg.h"

#define CHILD_SOURCES 2u /* number of descriptors of a child that the loop watches */

struct child;

/* What distinguishes a kind of child. */
struct child_ops {
        const char *name;           /* in the log */
        enum kvd_degraded degraded; /* noted if it ended, or cannot be started */

        /* is there a reason to start it? NULL: always */
        bool (*wanted)(struct child *);
        /* before each start; sets arguments. -ECANCELED: it is not wanted any more */
        int (*prepare)(struct child *);
        void (*not_started)(struct child *); /* a start failed; may be NULL */
        /* there was no reply for slow_ns; it may still come */
        void (*slow)(struct child *);
        void (*late)(struct child *); /* no reply for patience_ns: killed; may be NULL */
        /* the process is gone, according to the kernel; asked: its unanswered request, or 0 */
        void (*ended)(struct child *, uint32_t asked);

        /* True: sent the next request, or could not send it; false: no request was left. */
        bool (*next)(struct child *);
        /* does the reply match the request? NULL: always */
        bool (*fits)(const struct child *, const struct kvd_msg *);
        /* with a reply, or with KVD_MSG_error */
        void (*answered)(struct child *, uint32_t asked, const struct kvd_msg *);
};

/* Embedded in the struct of its kind, which container_of finds. */
struct child {
        const struct child_ops *ops;
        const char *program;
        char *arguments[5]; /* NULL-terminated */
        struct loop *loop;
        struct kvd_decoder *decoder; /* owned */
        uint8_t *frame;              /* owned; KVD_FRAME_MAX bytes */

        pid_t pid;                  /* 0: none */
        struct loop_source socket;  /* its fd is owned; -1: none */
        struct loop_source process; /* its pidfd is owned; -1: none */
        struct loop_timer look, retry, deadline, doubt;
        bool stopped;
        uint32_t asked; /* message number of the request in flight; 0: none */
        uint64_t serial, starts;
        uint64_t patience_ns; /* time for a reply; then it is killed */
        uint64_t slow_ns;     /* time for a reply; then ops->slow is called; 0: never */
        /* before the next start; doubles up to most_pause_ns */
        uint64_t pause_ns, most_pause_ns;

        uint32_t failures; /* failures to allocate or clear memory since a success */
        char why[160];     /* error of the last one */
};

/* Call child_clear afterwards, even on failure. */
int child_init(struct child *child, const struct child_ops *ops, const char *program,
               struct loop *loop);
void child_clear(struct child *child);
void child_stop(struct child *child); /* ends the process, and starts no other */

/* Checks soon, or after ns, whether there is a request; starts the process if needed. */
void child_look(struct child *child);
void child_look_after(struct child *child, uint64_t ns);

/* Sends a request. child_ask_or_end replaces a child that does not take it, and returns true. */
int child_ask(struct child *child, struct kvd_msg *msg, const struct kvd_fds *fds);
bool child_ask_or_end(struct child *child, struct kvd_msg *msg, const struct kvd_fds *fds);

/* Adds a descriptor, unless fds has it already; returns its index. */
uint32_t child_add_fd(struct kvd_fds *fds, int fd);
/* Copies an array to aligned memory, up to most elements; returns their number. */
uint32_t child_array(void *to, size_t size, uint32_t most, struct kvd_slice from);

/* Kills the child, and logs why ("accepts no messages"). ops->ended is called once it is gone. */
void child_end(struct child *child, const char *why);

/* Records a failure to allocate or clear memory; child_why returns its text. */
void child_failed(struct child *child, struct kvd_slice why);
void child_worked(struct child *child); /* resets the failures */
const char *child_why(const struct child *child);

/* Lower-level steps. end: the child's end of its connection, which is always closed here. */
pid_t child_spawn(const char *program, char *const arguments[], int end);
void child_kill(pid_t pid); /* and waits for its end */

#endif
