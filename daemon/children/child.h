/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CHILDREN_CHILD_H
#define KVD_DAEMON_CHILDREN_CHILD_H

/*
 * A child: a process of the same program that does what the loop must not do itself. The daemon has
 * four kinds: the worker (worker_jobs.h), which computes, the exporter (exporter.h), which keeps
 * memory in a CUDA context, a disk process for each file (disk.h), and the remote process (remote.h).
 *
 *      nobody ──wanted──▶ runs ◀──answer──▶ asked
 *        ▲                  │ it ends, says nonsense, or says nothing until the deadline
 *        └─────pause────────┘
 */

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "daemon/base/loop.h"
#include "ipc/base/degraded.h"
#include "ipc/frame.h"
#include "ipc/msg.h"

#define CHILD_SOURCES 2u /* descriptors that the loop watches for one */

struct child;

/* The differences between one kind of child and the other. */
struct child_ops {
        const char *name;            /* in the log */
        enum kvd_degraded degraded;  /* it ended, or cannot be started */

        /* is there anything to start it for? NULL: always */
        bool (*wanted)(struct child *);
        int (*prepare)(struct child *);        /* before each start; sets arguments */
        void (*not_started)(struct child *);   /* NULL: nothing is to be done about it */
        /* it has said nothing for longer than slow_ns, and may still answer */
        void (*slow)(struct child *);
        void (*late)(struct child *);          /* it says nothing, and is killed; NULL: as above */
        /* the kernel says that the process is gone */
        void (*ended)(struct child *, uint32_t asked);

        /* Asks the next question, or finds that it cannot be asked: true; false: there is none. */
        bool (*next)(struct child *);
        /* does the reply belong to the question? NULL: always */
        bool (*fits)(const struct child *, const struct kvd_msg *);
        /* by a reply, or KVD_MSG_error */
        void (*answered)(struct child *, uint32_t asked, const struct kvd_msg *);
};

/* Part of the struct that its kind has: container_of finds that. */
struct child {
        const struct child_ops *ops;
        const char *program;
        char *arguments[5];           /* NULL ends them */
        struct loop *loop;
        struct kvd_decoder *decoder;  /* owned */
        uint8_t *frame;               /* owned; KVD_FRAME_MAX bytes */

        pid_t pid;                    /* 0: none */
        struct loop_source socket;    /* its fd is owned; -1 */
        struct loop_source process;   /* its pidfd is owned; -1 */
        struct loop_timer look, retry, deadline, doubt;
        bool stopped;
        uint32_t asked;               /* number of the message that is not answered yet; 0: none */
        uint64_t serial, starts;
        uint64_t patience_ns;         /* for an answer */
        uint64_t slow_ns;             /* ... before ops->slow is called; 0: it never is */
        /* before the next start; it doubles up to most_pause_ns */
        uint64_t pause_ns, most_pause_ns;

        uint32_t failures;            /* at making or clearing memory, since it last worked */
        char why[160];                /* of the last of them */
};

/* child_clear is to be called afterwards, on failure, too. */
int child_init(struct child *child, const struct child_ops *ops, const char *program,
               struct loop *loop);
void child_clear(struct child *child);
void child_stop(struct child *child); /* ends the process, and starts no more */

/* Looks soon whether there is something to ask. */
void child_look(struct child *child);
void child_look_after(struct child *child, uint64_t ns);

/* Sends a question. child_ask_or_end: true; a child that cannot be asked is replaced. */
int child_ask(struct child *child, struct kvd_msg *msg, const struct kvd_fds *fds);
bool child_ask_or_end(struct child *child, struct kvd_msg *msg, const struct kvd_fds *fds);

/* What a question or an answer is made of. */
/* which of the descriptors it is: those that are equal are the same file */
uint32_t child_add_fd(struct kvd_fds *fds, int fd);
/* an aligned copy of an array, of at most so many; returns how many */
uint32_t child_array(void *to, size_t size, uint32_t most, struct kvd_slice from);

/*
 * Kills it, since it is or does what why says. It has ended when the kernel says so (ops->ended),
 * not before.
 */
void child_end(struct child *child, const char *why);

/* Notes a failure, to be shown to whoever waits for memory; child_why then has it in words. */
void child_failed(struct child *child, struct kvd_slice why);
void child_worked(struct child *child); /* they are over */
const char *child_why(const struct child *child);

/*
 * The two steps below those: end is the other process' end of a connection, and is closed in any
 * case.
 */
pid_t child_spawn(const char *program, char *const arguments[], int end);
void child_kill(pid_t pid); /* and waits for its end */

#endif
