/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/daemon_process.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/conn.h"
#include "client/kvd.h"
#include "daemon/daemon.h"

enum { EXIT_REFUSED = 3, EXIT_LOOP = 4, EXIT_LEAK = 5 };

_Noreturn void daemon_process_wrong(const struct fault_state *s, const char *what) {
        fprintf(stderr, "\nfailing call %u of %s, errno %d%s: %s\n", s->fault.nth, fault_name(s->fault.call),
                s->fault.error, s->fault.forever ? ", for good" : "", what);
        exit(1);
}

/* ---- in the process ----------------------------------------------------------------------------------------- */

static void configure(const struct daemon_process *d, struct config *config) {
        const char *const settings[] = {"daemon.loop=epoll", "daemon.log=error", "daemon.pages=small", "daemon.pool=4M",
                                        "daemon.segment=256K", "daemon.max_clients=16", NULL};
        char socket[128], why[CONFIG_WHY];

        snprintf(socket, sizeof socket, "daemon.socket=%s", d->socket);
        if (config_init(config) < 0 || config_set(config, socket, why) < 0)
                exit(EXIT_FAILURE);
        for (uint32_t i = 0; settings[i]; i++)
                if (config_set(config, settings[i], why) < 0)
                        exit(EXIT_FAILURE);
        if (d->worker)
                snprintf(config->worker_program, sizeof config->worker_program, "%s", d->worker);
}

static int serve(struct config *config, int ready) {
        struct daemon *daemon;
        char why[DAEMON_WHY];
        int r;

        if (daemon_new(config, &daemon, why) < 0)
                return EXIT_REFUSED;
        if (daemon_handle_signals(daemon, NULL) < 0 || daemon_listen(daemon, -1, why) < 0) {
                daemon_free(daemon);
                return EXIT_REFUSED;
        }
        if (write(ready, "r", 1) != 1)
                exit(EXIT_FAILURE);
        r = daemon_run(daemon);
        daemon_free(daemon);
        return r < 0 ? EXIT_LOOP : EXIT_SUCCESS;
}

static _Noreturn void be_daemon(const struct daemon_process *d, struct fault_state *s, int ready) {
        struct config config;
        uint32_t fds;
        sigset_t set;
        int r;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        alarm(600);
        sigemptyset(&set);
        sigaddset(&set, SIGTERM);
        sigprocmask(SIG_BLOCK, &set, NULL);
        configure(d, &config);
        fds = open_fds();
        if (s->fault.call < N_FAULT_CALLS) { /* otherwise its system is well */
                fault_install(s);
                s->on = !d->later;
        }
        r = serve(&config, ready);
        s->on = false;
        exit(open_fds() != fds ? EXIT_LEAK : r);
}

/* ---- from outside ------------------------------------------------------------------------------------------- */

/* Its end was clean: no leak that it or a sanitizer noticed, and the loop ended because it was told to. */
static void expect_end(struct daemon_process *d, const struct fault_state *s, int expected) {
        char text[80];
        int status;

        waitpid(d->pid, &status, 0);
        d->pid = 0;
        if (WIFEXITED(status) && WEXITSTATUS(status) == expected)
                return;
        snprintf(text, sizeof text, "the daemon ended with status %#x%s", status,
                 WIFEXITED(status) && WEXITSTATUS(status) == EXIT_LEAK ? ": descriptors are left over" : "");
        daemon_process_wrong(s, text);
}

bool daemon_process_start(struct daemon_process *d, struct fault_state *s) {
        int ready[2];
        char byte;

        strcpy(d->dir, "/tmp/kvd-faults-XXXXXX");
        if (!mkdtemp(d->dir) || pipe(ready) < 0)
                daemon_process_wrong(s, strerror(errno));
        snprintf(d->socket, sizeof d->socket, "%s/kvd.sock", d->dir);
        fflush(stdout);
        d->pid = fork();
        if (d->pid == 0) {
                close(ready[0]);
                be_daemon(d, s, ready[1]);
        }
        close(ready[1]);
        if (read(ready[0], &byte, 1) == 1) {
                close(ready[0]);
                return true;
        }
        close(ready[0]);
        expect_end(d, s, EXIT_REFUSED);
        return false;
}

void daemon_process_stop(struct daemon_process *d, struct fault_state *s) {
        kill(d->pid, SIGTERM);
        expect_end(d, s, EXIT_SUCCESS);
}

void daemon_process_sweep(struct daemon_process *d) {
        unlink(d->socket);
        rmdir(d->dir);
}

uint32_t process_fds(pid_t pid) {
        char path[64];
        uint32_t n = 0;
        DIR *dir;

        snprintf(path, sizeof path, "/proc/%d/fd", pid);
        dir = opendir(path);
        while (dir && readdir(dir))
                n++;
        if (dir)
                closedir(dir);
        return n;
}

/* ---- questions to it ------------------------------------------------------------------------------------------ */

static bool next_space(struct conn *conn, struct kvd_msg_space_info_reply *info) {
        struct kvd_msg_space_info request = {info->next};

        return conn_call(conn, KVD_MSG_space_info, &request, info) == 0;
}

static bool is_quiet(struct conn *conn) {
        struct kvd_msg_space_info_reply info = {0};

        while (next_space(conn, &info))
                if (info.filling || info.limbo || info.leases || info.clients)
                        return false;
        return conn_is_open(conn);
}

bool daemon_is_quiet(struct conn *conn, uint32_t ms) {
        for (uint32_t i = 0; i < ms && !is_quiet(conn); i++)
                usleep(1000);
        return is_quiet(conn);
}

static void check_space(const struct fault_state *s, struct conn *conn, const char *name) {
        struct kvd_msg_check request = {.space = kvd_slice_of(name)};
        struct kvd_msg_check_reply reply;
        char first[256];

        do {
                if (conn_call(conn, KVD_MSG_check, &request, &reply) < 0)
                        daemon_process_wrong(s, kvd_error());
                if (reply.broken)
                        daemon_process_wrong(s, kvd_slice_copy(reply.first, first, sizeof first));
                request.cursor = reply.next;
        } while (reply.next);
}

void daemon_expect_sound(const struct fault_state *s, struct conn *conn) {
        struct kvd_msg_space_info_reply info = {0};
        char name[64];

        while (next_space(conn, &info)) {
                kvd_slice_copy(info.name, name, sizeof name);
                if (info.free + info.filling + info.sealed + info.limbo != info.total)
                        daemon_process_wrong(s, "free + filling + sealed + limbo is not total");
                check_space(s, conn, name);
        }
}
