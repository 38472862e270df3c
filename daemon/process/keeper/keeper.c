/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A service manager for systems that have none. It runs one daemon and keeps its descriptors, by
 * the protocol of systemd's file descriptor store, so that kvd works the same with both. It maps
 * none of them and reads messages of its own daemon only, so little can make it crash.
 *
 *      starts ──READY=1──▶ serves ──killed, crashed──▶ pause ──▶ starts
 *         │                  └──── SIGTERM, exit 0 ──▶ the end
 *         └── dies MOST_FAILURES times in a row, or exits before any was ready ──▶ the end
 */

#include "daemon/process/keeper/keeper.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/wait.h>

#include "daemon/base/log.h"
#include "daemon/base/memory_limit.h"
#include "daemon/base/notify.h"
#include "daemon/process/keeper/kept.h"
#include "daemon/process/keeper/mailbox.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define FIRST_PAUSE_NS UINT64_C(100000000)
#define MOST_PAUSE_NS UINT64_C(1000000000)
#define MOST_FAILURES 10u
/* after so many deaths before it is ready, kept descriptors may be the cause: they are closed */
#define STARTS_TO_LET_GO 5u
/* after so many out-of-memory kills too, since they hold most of the memory */
#define KILLS_TO_LET_GO 3u
#define KILLS_APART_NS UINT64_C(3600000000000) /* kills further apart are not counted together */
/* a kvd that served for this long resets the count of failures */
#define STEADY_NS UINT64_C(250000000)
#define NOTIFY_WAIT_MS 1000
#define FAILED 2 /* kvd's exit status if the system refuses something */

struct keeper {
        const char *program;
        char **arguments;
        int ready_fd;        /* owned; -1 */
        struct kept kept;    /* owned */
        struct mailbox box;  /* owned */
        struct notify above; /* owned: the keeper's own service manager, if it has one */
        struct pollfd signals;

        pid_t pid;          /* 0: none runs */
        bool was_ready;     /* some kvd was ready */
        bool ending, again; /* the keeper ends with this kvd; this kvd is being restarted */
        uint64_t ready_ns;  /* when this kvd became ready; 0: not yet */
        uint64_t start_ns;  /* if pid is 0: when the next one is started */
        unsigned failures;  /* in a row; failed_starts: in a row before it was ready */
        unsigned failed_starts;
        uint64_t oom_kills; /* kernel's count of out-of-memory kills when this kvd was started */
        unsigned starved;   /* out-of-memory kills in a row */
        int status;         /* the keeper's exit status; -1: not ended */
};

/* ---- start ----------------------------------------------------------------------------------- */

static void set_environment(const struct keeper *k) {
        char usec[32];

        setenv("NOTIFY_SOCKET", k->box.path, 1);
        if (!k->above.watchdog_ns)
                return;
        snprintf(usec, sizeof usec, "%" PRIu64, k->above.watchdog_ns / 1000);
        setenv("WATCHDOG_USEC", usec, 1);
}

/* Signals that kvd itself blocks stay blocked, so that none is lost, or kills it before that. */
static void unblock_signals(void) {
        sigset_t set;

        sigemptyset(&set);
        sigaddset(&set, SIGCHLD);
        sigaddset(&set, SIGUSR2);
        sigprocmask(SIG_UNBLOCK, &set, NULL);
}

static _Noreturn void become_kvd(const struct keeper *k) {
        int r;

        set_environment(k);
        unblock_signals();
        r = kept_hand_over(&k->kept);
        if (r == 0) {
                execv(k->program, k->arguments);
                r = negative_errno();
        }
        log_error("%s: cannot be started: %s", k->program, strerror(-r));
        _exit(FAILED);
}

static void died(struct keeper *k, int status, bool by_itself);

static void start(struct keeper *k) {
        int r = mailbox_open(&k->box);

        k->again = false;
        k->ready_ns = 0;
        k->oom_kills = memory_oom_kills("");
        if (r == 0) {
                k->pid = fork();
                r = k->pid < 0 ? negative_errno() : 0;
        }
        if (r < 0) {
                log_error("no kvd can be started: %s", strerror(-r));
                k->pid = 0;
                died(k, FAILED, true);
                return;
        }
        if (k->pid == 0)
                become_kvd(k);
}

/* ---- end ------------------------------------------------------------------------------------- */

static uint64_t pause_ns(unsigned failures) {
        return failures < 2 ? 0 : MIN(FIRST_PAUSE_NS << (failures - 2), MOST_PAUSE_NS);
}

/*
 * Kept memory stays charged to the cgroup, whether a kvd runs or not: the next kvd would be killed
 * as soon as clients fill it again.
 */
static void shed_if_starved(struct keeper *k, int status) {
        bool late = k->ready_ns && sys_now_ns() - k->ready_ns > KILLS_APART_NS;

        if (status != 128 + SIGKILL || memory_oom_kills("") == k->oom_kills)
                return;
        k->starved = late ? 1 : k->starved + 1;
        if (k->starved < KILLS_TO_LET_GO || k->kept.n <= 1)
                return;
        log_warning(
                "the kernel killed kvd %u times for lack of memory: the next one starts with an "
                "empty cache; set pool below the available memory, or raise the cgroup's limit",
                k->starved);
        k->starved = 0;
        kept_cut(&k->kept, 1);
}

static void start_later(struct keeper *k) {
        bool steady = k->again || (k->ready_ns && sys_now_ns() - k->ready_ns >= STEADY_NS);

        k->failures = steady ? 0 : k->failures + 1;
        k->failed_starts = k->ready_ns ? 0 : k->failed_starts + 1;
        k->start_ns = sys_now_ns() + pause_ns(k->failures);
        if (k->failed_starts == STARTS_TO_LET_GO && k->kept.n > 1) {
                log_warning("kvd died %u times before it was ready: the next one starts with an "
                            "empty cache",
                            k->failed_starts);
                kept_cut(&k->kept, 1);
        }
}

/* by_itself: it exited, as it does if the configuration is wrong. */
static void died(struct keeper *k, int status, bool by_itself) {
        bool hopeless = by_itself && !k->was_ready;

        mailbox_close(&k->box);
        if (k->ending || hopeless || (by_itself && status == 0 && !k->again)) {
                k->status = k->ending && status == 128 + SIGTERM ? 0 : status;
                return;
        }
        shed_if_starved(k, status);
        start_later(k);
        if (k->failures < MOST_FAILURES)
                return;
        log_error("kvd died %u times in a row, and is not started again; its lines above say why",
                  k->failures);
        k->status = status;
}

static void say_end(const struct keeper *k, int status) {
        bool killed = WIFSIGNALED(status);

        if (!k->ending && status != 0)
                log_warning("kvd %d %s %d; %u descriptors are kept for the next one", k->pid,
                            killed ? "was ended by signal" : "ended with status",
                            killed ? WTERMSIG(status) : WEXITSTATUS(status), k->kept.n);
}

static void take_mails(struct keeper *k);

static void reap(struct keeper *k) {
        int status;
        bool killed;

        if (k->pid == 0 || waitpid(k->pid, &status, WNOHANG) != k->pid)
                return;
        take_mails(k); /* its last messages */
        say_end(k, status);
        killed = WIFSIGNALED(status);
        k->pid = 0;
        died(k, killed ? 128 + WTERMSIG(status) : WEXITSTATUS(status), !killed);
}

/* ---- messages -------------------------------------------------------------------------------- */

static void keep(struct keeper *k, const char *name, int fd) {
        int r = fd < 0 ? -EBADF : kept_add(&k->kept, name, fd);

        if (r < 0)
                log_limited(LOG_WARNING, "'%s' is not kept: %s", name, strerror(-r));
}

/* When it says that it became ready: on a busy machine, that may be long ago. */
static uint64_t ready_since(const struct mail *mail) {
        uint64_t now = sys_now_ns(), then;
        char usec[24];

        mail_value(mail, "MONOTONIC_USEC", usec, sizeof usec);
        then = strtoull(usec, NULL, 10) * 1000;
        return then && then < now ? then : now;
}

static void became_ready(struct keeper *k, const struct mail *mail) {
        if (!k->ready_ns)
                k->ready_ns = ready_since(mail);
        k->was_ready = true;
        if (k->ready_fd >= 0 && write(k->ready_fd, "\n", 1) < 0)
                log_warning("--ready-fd: %s", strerror(errno));
        closep(&k->ready_fd);
        k->ready_fd = -1;
}

/* STOPPING=1 is passed on only if the keeper ends, too. */
static void pass_on(struct keeper *k, const struct mail *mail) {
        if (mail_has(mail, "READY=1"))
                became_ready(k, mail);
        if (!mail_has(mail, "STOPPING=1") || k->ending)
                notify_send(&k->above, mail->text, NOTIFY_WAIT_MS);
}

static void take_mail(struct keeper *k, struct mail *mail) {
        char name[KEPT_NAME_MAX + 2];

        mail_value(mail, "FDNAME", name, sizeof name);
        if (mail_has(mail, "FDSTORE=1")) {
                keep(k, name, STEAL_FD(mail->fd));
                return;
        }
        closep(&mail->fd);
        if (!mail_has(mail, "FDSTOREREMOVE=1"))
                pass_on(k, mail);
        else if (strcmp(name, k->kept.names[0]) != 0)
                kept_remove(&k->kept, name);
}

static void take_mails(struct keeper *k) {
        struct mail mail;
        int r;

        while ((r = mailbox_receive(&k->box, k->pid, &mail)) == 0 || r == -EPERM)
                if (r == 0)
                        take_mail(k, &mail);
                else
                        log_limited(LOG_WARNING, "dropped a message that is invalid or not kvd's");
}

/* ---- signals --------------------------------------------------------------------------------- */

static void end(struct keeper *k, int signal) {
        k->ending = true;
        if (k->pid)
                kill(k->pid, signal);
        else
                k->status = 0;
}

static void restart(struct keeper *k) {
        log_info("SIGUSR2: kvd is restarted");
        k->again = true;
        if (k->pid)
                kill(k->pid, SIGTERM);
        else
                k->start_ns = 0;
}

static void take_signal(struct keeper *k) {
        struct signalfd_siginfo info;

        if (read(k->signals.fd, &info, sizeof info) != sizeof info)
                return;
        if (info.ssi_signo == SIGCHLD)
                reap(k);
        else if (info.ssi_signo == SIGUSR2)
                restart(k);
        else if (info.ssi_signo == SIGHUP && k->pid)
                kill(k->pid, SIGHUP);
        else if (info.ssi_signo != SIGHUP)
                end(k, (int)info.ssi_signo);
}

static int open_signals(struct keeper *k) {
        sigset_t set;

        sigemptyset(&set);
        sigaddset(&set, SIGTERM);
        sigaddset(&set, SIGINT);
        sigaddset(&set, SIGHUP);
        sigaddset(&set, SIGUSR2);
        sigaddset(&set, SIGCHLD);
        if (sigprocmask(SIG_BLOCK, &set, NULL) < 0)
                return negative_errno();
        k->signals.fd = sys->signalfd(&set, SFD_CLOEXEC | SFD_NONBLOCK);
        return k->signals.fd < 0 ? negative_errno() : 0;
}

/* ---- run ------------------------------------------------------------------------------------- */

static int wait_ms(const struct keeper *k) {
        uint64_t now = sys_now_ns();

        if (k->pid)
                return -1;
        return k->start_ns <= now ? 0 : (int)((k->start_ns - now) / 1000000 + 1);
}

static void turn(struct keeper *k) {
        struct pollfd ready[] = {k->signals, {k->box.fd, POLLIN, 0}};

        if (sys->poll(ready, ARRAY_SIZE(ready), wait_ms(k)) < 0 && errno != EINTR)
                usleep(MOST_PAUSE_NS / 1000);
        if (k->pid)
                take_mails(k);
        take_signal(k);
        if (k->pid == 0 && k->status < 0 && k->start_ns <= sys_now_ns())
                start(k);
}

/* kept_init closes all descriptors from KEPT_FIRST on, so these move below it. */
static int prepare(struct keeper *k, int listen_fd, int ready_fd) {
        int socket = dup(listen_fd), r;

        if (ready_fd >= 0)
                k->ready_fd = fcntl(ready_fd, F_DUPFD_CLOEXEC, 3);
        closep(&ready_fd);
        if (socket < 0 || socket >= KEPT_FIRST || k->ready_fd >= KEPT_FIRST)
                return -EMFILE;
        r = kept_init(&k->kept);
        if (r >= 0)
                r = kept_add(&k->kept, "listen", socket);
        return r < 0 ? r : open_signals(k);
}

static void clear(struct keeper *k) {
        mailbox_close(&k->box);
        kept_clear(&k->kept);
        closep(&k->signals.fd);
        closep(&k->ready_fd);
        notify_close(&k->above);
}

int keeper_run(const char *program, char **arguments, int listen_fd, int ready_fd) {
        struct keeper k = {.program = program,
                           .arguments = arguments,
                           .ready_fd = -1,
                           .box = MAILBOX_CLOSED,
                           .signals = {-1, POLLIN, 0},
                           .status = -1};
        int r = prepare(&k, listen_fd, ready_fd);

        if (r < 0) {
                log_error("the keeper cannot start: %s", strerror(-r));
                k.status = FAILED;
        } else if (notify_open(&k.above) < 0) {
                log_warning("cannot report the state to the service manager");
        }
        while (k.status < 0)
                turn(&k);
        clear(&k);
        return k.status;
}
