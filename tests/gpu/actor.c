/* SPDX-License-Identifier: Apache-2.0 */
/* Starts actors, and passes notes between them and the script */
#include "tests/gpu/actor.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "ipc/base/util.h"

static int patience_ms = 70000;
static uid_t user;
static action_function *const *more_actions;

void actor_more(action_function *const *more) {
        more_actions = more;
}

void actor_user(uid_t uid) {
        user = uid;
}

uint64_t now_ns(void) {
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void sleep_ms(unsigned ms) {
        nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000l}, NULL);
}

/* ---- notes ----------------------------------------------------------------------------------- */

static int note_send(int socket, const struct note *note, int fd) {
        union {
                char room[CMSG_SPACE(sizeof fd)];
                struct cmsghdr align;
        } control = {0};
        struct iovec part = {(void *)note, sizeof *note};
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

        if (fd >= 0) {
                struct cmsghdr *c = &control.align;

                *c = (struct cmsghdr){CMSG_LEN(sizeof fd), SOL_SOCKET, SCM_RIGHTS};
                memcpy(CMSG_DATA(c), &fd, sizeof fd);
                message.msg_control = &control;
                message.msg_controllen = sizeof control;
        }
        return sendmsg(socket, &message, MSG_NOSIGNAL) == sizeof *note ? 0 : ACTOR_GONE;
}

static int note_take(int socket, struct note *note, int *fd) {
        union {
                char room[CMSG_SPACE(sizeof *fd)];
                struct cmsghdr align;
        } control;
        struct iovec part = {note, sizeof *note};
        struct msghdr message = {.msg_iov = &part,
                                 .msg_iovlen = 1,
                                 .msg_control = &control,
                                 .msg_controllen = sizeof control};

        if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != sizeof *note)
                return ACTOR_GONE;
        if (CMSG_FIRSTHDR(&message)) {
                if (*fd >= 0)
                        close(*fd);
                memcpy(fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof *fd);
        }
        return 0;
}

/* ---- the script's side ----------------------------------------------------------------------- */

void actor_tell(struct actor *a, struct note note) {
        note_send(a->socket, &note, a->fd);
        if (a->fd >= 0)
                close(a->fd);
        a->fd = -1;
}

int actor_hear(struct actor *a, int ms) {
        struct pollfd p = {a->socket, POLLIN, 0};

        memset(&a->note, 0, sizeof a->note);
        if (poll(&p, 1, ms) != 1)
                return a->note.result = ACTOR_LATE;
        if (note_take(a->socket, &a->note, &a->fd) < 0)
                a->note.result = ACTOR_GONE;
        return a->note.result;
}

int actor_ask(struct actor *a, struct note note) {
        actor_tell(a, note);
        return actor_hear(a, patience_ms);
}

void actor_patience(int ms) {
        patience_ms = ms;
}

void actor_lend(struct actor *to, int fd) {
        if (to->fd >= 0)
                close(to->fd);
        to->fd = fd < 0 ? -1 : dup(fd);
}

const char *actor_word(int result) {
        static char texts[4][120]; /* several may be used in one line */
        static unsigned turn;
        const char *why, *name = NULL;
        char *text = texts[turn++ % 4];

        if (result == ACTOR_GONE)
                return "the process is gone";
        if (result == ACTOR_LATE)
                return "no answer";
        if (result == CU_OK)
                return "CUDA_SUCCESS";
        /*
         * Names need the driver's library, but not an initialised driver, which the script must not
         * have.
         */
        if (!kvd_cuda_load(&why) || kvd_cuda_load(&why)->cuGetErrorName(result, &name) || !name)
                snprintf(text, sizeof texts[0], "error %d", result);
        else
                snprintf(text, sizeof texts[0], "%s (%d)", name, result);
        return text;
}

/* ---- the actor's side ------------------------------------------------------------------------ */

static void act(struct stage *s, struct note *note) {
        action_function *function = NULL;

        if (note->action < N_ACTIONS) {
                function = actions_of_memory[note->action];
                function = function ? function : actions_of_order[note->action];
                function = function ? function : actions_of_images[note->action];
                function = function || !more_actions ? function : more_actions[note->action];
        }
        if (function)
                function(s, note);
        else
                note->result = CU_NOT_SUPPORTED;
}

_Noreturn static void actor_live(int socket) {
        struct stage s = {.fd = -1};
        struct note note;

        if (user && setuid(user) != 0)
                _exit(1);
        prctl(PR_SET_DUMPABLE, 1);        /* else root owns /proc/self, which drivers read */
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* after setuid, which would clear it */
        while (note_take(socket, &note, &s.fd) == 0) {
                act(&s, &note);
                if (note_send(socket, &note, s.fd) < 0)
                        break;
                if (s.fd >= 0)
                        close(s.fd);
                s.fd = -1;
        }
        _exit(0);
}

struct actor actor_start(void) {
        struct actor a = {.fd = -1};
        int ends[2];

        fflush(stdout);
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
                abort();
        a.pid = fork();
        if (a.pid < 0)
                abort();
        if (a.pid == 0) {
                close(ends[0]);
                actor_live(ends[1]);
        }
        close(ends[1]);
        a.socket = ends[0];
        return a;
}

void actor_stop(struct actor *a) {
        if (a->pid <= 0)
                return;
        kill(a->pid, SIGKILL);
        waitpid(a->pid, NULL, 0);
        close(a->socket);
        if (a->fd >= 0)
                close(a->fd);
        *a = (struct actor){.fd = -1};
}
