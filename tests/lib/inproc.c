/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/inproc.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/conn.h"
#include "client/kvd.h"
#include "daemon/daemon.h"

_Noreturn void give_up(const char *format, ...) {
        va_list args;

        va_start(args, format);
        vfprintf(stderr, format, args);
        va_end(args);
        fputc('\n', stderr);
        exit(1);
}

/* ---- the daemon --------------------------------------------------------------------------------------------- */

static void set(struct config *config, const char *assignment) {
        char why[CONFIG_WHY];

        if (config_set(config, assignment, why) < 0)
                give_up("%s: %s", assignment, why);
}

static void configure(struct inproc *d, struct config *config, const char *const *settings) {
        static const char *const common[] = {"daemon.loop=epoll", "daemon.log=error", "daemon.pages=small",
                                             "daemon.pool=4M", "daemon.segment=256K", NULL};
        char socket[128];

        if (config_init(config) < 0)
                give_up("config_init");
        snprintf(socket, sizeof socket, "daemon.socket=%s", d->socket);
        set(config, socket);
        for (uint32_t i = 0; common[i]; i++)
                set(config, common[i]);
        for (uint32_t i = 0; settings && settings[i]; i++)
                set(config, settings[i]);
}

static void *run(void *arg) {
        struct inproc *d = arg;

        d->result = daemon_run(d->daemon);
        return NULL;
}

void inproc_start(struct inproc *d, const char *const *settings) {
        inproc_start_with_worker(d, settings, "");
}

void inproc_start_with_worker(struct inproc *d, const char *const *settings, const char *program) {
        char why[DAEMON_WHY];
        struct config config;

        strcpy(d->dir, "/tmp/kvd-inproc-XXXXXX");
        if (!mkdtemp(d->dir))
                give_up("mkdtemp: %s", strerror(errno));
        snprintf(d->socket, sizeof d->socket, "%s/kvd.sock", d->dir);
        configure(d, &config, settings);
        snprintf(config.worker_program, sizeof config.worker_program, "%s", program);
        if (daemon_new(&config, &d->daemon, why) < 0 || daemon_listen(d->daemon, -1, why) < 0)
                give_up("%s", why);
        if (pthread_create(&d->thread, NULL, run, d) != 0)
                give_up("pthread_create");
}

void inproc_stop(struct inproc *d) {
        daemon_stop(d->daemon);
        pthread_join(d->thread, NULL);
        d->daemon = daemon_free(d->daemon);
        rmdir(d->dir);
        if (d->result < 0)
                give_up("the daemon's loop ended: %s", strerror(-d->result));
}

/* ---- what it holds ------------------------------------------------------------------------------------------ */

static void check_space(struct conn *conn, const char *name) {
        struct kvd_msg_check request = {.space = kvd_slice_of(name)};
        struct kvd_msg_check_reply reply;
        char first[256];

        do {
                if (conn_call(conn, KVD_MSG_check, &request, &reply) < 0)
                        give_up("check of %s: %s", name, kvd_error());
                if (reply.broken)
                        give_up("space %s: %u invariants broken, first: %s", name, reply.broken,
                                kvd_slice_copy(reply.first, first, sizeof first));
                request.cursor = reply.next;
        } while (reply.next);
}

void inproc_expect_clean(const struct inproc *d) {
        struct kvd_msg_space_info_reply info = {0};
        struct conn *conn;
        char name[64];

        if (conn_open(d->socket, "check", &conn) < 0)
                give_up("%s", kvd_error());
        for (;;) {
                struct kvd_msg_space_info request = {info.next};

                if (conn_call(conn, KVD_MSG_space_info, &request, &info) < 0)
                        break;
                kvd_slice_copy(info.name, name, sizeof name);
                if (info.filling || info.limbo || info.leases || info.clients)
                        give_up("space %s: %llu filling, %llu in limbo, %llu leases, %u clients are left", name,
                                (unsigned long long)info.filling, (unsigned long long)info.limbo,
                                (unsigned long long)info.leases, info.clients);
                if (info.free + info.sealed != info.total)
                        give_up("space %s: free + sealed is not total", name);
                check_space(conn, name);
        }
        conn_close(conn);
}
