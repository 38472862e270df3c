/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/inproc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/identity.h"
#include "daemon/main/activation.h"
#include "daemon/main/daemon.h"

static void set(struct config *config, const char *assignment) {
        struct kvd_why why;

        if (config_set(config, assignment, &why) < 0)
                die("%s: %s", assignment, why.line);
}

void inproc_configure(struct config *config, const char *socket_path, const char *const *settings) {
        static const char *const common[] = {"daemon.loop=epoll",   "daemon.log=error",
                                             "daemon.pages=small",  "daemon.pool=4M",
                                             "daemon.segment=256K", NULL};
        char socket[128];

        if (config_init(config) < 0)
                die("config_init");
        snprintf(socket, sizeof socket, "daemon.socket=%s", socket_path);
        set(config, socket);
        for (uint32_t i = 0; common[i]; i++)
                set(config, common[i]);
        for (uint32_t i = 0; settings && settings[i]; i++)
                set(config, settings[i]);
        config->worker_program[0] = 0;
}

static void *run(void *arg) {
        struct inproc *d = arg;

        d->result = daemon_run(d->daemon);
        return NULL;
}

void inproc_start_with_worker(struct inproc *d, const char *const *settings, const char *program) {
        const struct identity same = {.stays = true};
        struct kvd_why why;
        struct config config;

        instance_make_dir(&d->in);
        inproc_configure(&config, d->in.socket, settings);
        snprintf(config.worker_program, sizeof config.worker_program, "%s", program);
        if (daemon_new(&config, &d->daemon, &why) < 0 ||
            daemon_listen(d->daemon, &ACTIVATION_NONE, &same, &why) < 0)
                die("%s", why.line);
        if (pthread_create(&d->thread, NULL, run, d) != 0)
                die("pthread_create");
}

void inproc_start(struct inproc *d, const char *const *settings) {
        inproc_start_with_worker(d, settings, "");
}

void inproc_stop(struct inproc *d) {
        daemon_stop(d->daemon);
        pthread_join(d->thread, NULL);
        d->daemon = daemon_free(d->daemon);
        if (access(d->in.socket, F_OK) == 0)
                die("the daemon left its socket");
        instance_sweep(&d->in);
        if (d->result < 0)
                die("the daemon's loop ended: %s", strerror(-d->result));
}
