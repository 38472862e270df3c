/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Puts the parts together: backend, store, loop, server and listener are made in this order and
 * freed in the reverse one. Signals come through the loop, so that a reload happens between two
 * requests.
 */

#include "daemon/daemon.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>

#include "daemon/backend.h"
#include "daemon/gpu_clear.h"
#include "daemon/listener.h"
#include "daemon/log.h"
#include "daemon/notify.h"
#include "daemon/options.h"
#include "daemon/server.h"
#include "daemon/setting.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define NOTIFY_WAIT_MS 1000

struct daemon {
        struct config config;         /* owned */
        struct backend backend;
        struct loop *loop;            /* owned */
        struct store *store;          /* owned */
        struct server *server;        /* owned */
        struct listener listener;     /* owned */
        struct notify notify;         /* owned */
        struct loop_timer watchdog;
        struct gpu_clear gpu_clear;
        bool ending;
        struct loop_source signals;   /* its fd is owned; -1 */
        struct loop_source stop;      /* its fd is owned; -1 */
        const struct options *options; /* what a reload loads */
};

/* ---- start ----------------------------------------------------------------------------------- */

static const int log_levels[] = {[CONFIG_ERROR] = LOG_ERR,
                                 [CONFIG_WARNING] = LOG_WARNING,
                                 [CONFIG_INFO] = LOG_INFO,
                                 [CONFIG_DEBUG] = LOG_DEBUG};

static int open_store(struct daemon *d, struct kvd_why *why) {
        struct store_config config = {.pool_bytes = d->config.pool,
                                      .segment_bytes = d->config.segment,
                                      .spill_bytes = d->config.spill,
                                      .backend = d->backend.backend,
                                      .cuda = d->backend.cuda,
                                      .device = d->backend.ordinal,
                                      .pages = d->config.pages,
                                      .max_attachments = d->config.max_clients};
        int r;

        memcpy(config.uuid, d->backend.uuid.bytes, sizeof config.uuid);
        r = store_new(&config, &d->store);
        if (r < 0)
                return kvd_refuse(why, r, "%s", d->store ? store_why(d->store) : strerror(-r));
        return 0;
}

static int choose_backend(struct daemon *d, struct kvd_why *why) {
        int r = backend_choose(&d->config, &d->backend);

        if (r < 0)
                return kvd_refuse(why, r,
                                  "the GPU backend cannot be had: %s; set backend = host, or auto",
                                  d->backend.why.line);
        log_info("backend %s: %s%s%s", backend_name(d->backend.backend), d->backend.device,
                 d->backend.device[0] ? ", " : "", d->backend.why.line);
        return backend_size_pool(&d->backend, &d->config, why);
}

/* Makes the domains that are new, and gives the others their quotas. */
static int apply_domains(struct daemon *d, struct kvd_why *why) {
        for (const struct config_domain *c = d->config.domains; c; c = c->next) {
                struct domain_config config;
                struct domain *domain;
                int r;

                config_domain_to_store(c, &config);
                r = store_domain(d->store, &config, &domain);
                if (r < 0)
                        return kvd_refuse(why, r, "%s", store_why(d->store));
        }
        return 0;
}

static bool idle(void *data) {
        return store_idle(data);
}

static void stop_asked(struct loop_source *source, short revents) {
        loop_quit(source->loop);
}

static int open_stop(struct daemon *d) {
        d->stop = (struct loop_source){.events = POLLIN, .ready = stop_asked};
        d->stop.fd = sys->eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        return d->stop.fd < 0 ? -errno : loop_add(d->loop, &d->stop);
}

static int open_loop(struct daemon *d, struct kvd_why *why) {
        int r;

        r = loop_new(d->config.loop, server_max_sources(&d->config) + 2, &d->loop);
        if (r < 0)
                return kvd_refuse(why, r, "loop: %s; try loop = epoll", strerror(-r));
        loop_set_idle(d->loop, idle, d->store);
        r = open_stop(d);
        if (r >= 0)
                r = server_new(&d->config, d->loop, d->store, &d->server);
        if (r >= 0)
                d->server->backend = &d->backend;
        return r < 0 ? kvd_refuse(why, r, "cannot start: %s", strerror(-r)) : 0;
}

int daemon_new(struct config *config, struct daemon **ret, struct kvd_why *why) {
        _cleanup_(daemon_freep) struct daemon *d = NULL;
        int r;

        d = sys->calloc(1, sizeof *d);
        if (!d) {
                config_clear(config);
                return kvd_refuse(why, -ENOMEM, "out of memory");
        }
        d->config = *config;
        *config = (struct config){0};
        d->listener = LISTENER_NONE;
        d->notify.fd = d->signals.fd = d->stop.fd = -1;
        log_set_level(log_levels[d->config.log]);
        r = choose_backend(d, why);
        if (r >= 0)
                r = open_store(d, why);
        if (r >= 0)
                r = apply_domains(d, why);
        if (r >= 0)
                r = open_loop(d, why);
        if (r < 0)
                return r;
        *ret = STEAL(d);
        return 0;
}

/* Ended by a signal meanwhile is no failure: daemon_run notices. */
static int prepare_memory(struct daemon *d, struct kvd_why *why) {
        int r;

        if (d->backend.backend == KVD_BACKEND_HOST)
                return 0;
        d->gpu_clear = (struct gpu_clear){.loop = d->loop, .store = d->store,
                                          .child = server_memory_maker(d->server)};
        r = gpu_clear_wait(&d->gpu_clear, why);
        return d->ending ? 0 : r;
}

int daemon_listen(struct daemon *d, int fd, struct kvd_why *why) {
        int r = prepare_memory(d, why);

        if (r < 0)
                return r;
        if (fd >= 0)
                d->listener.fd = fd;
        else if (listener_open(&d->listener, d->config.socket, d->config.socket_mode,
                               d->config.socket_group, why) < 0)
                return -EADDRNOTAVAIL;
        r = server_listen(d->server, d->listener.fd);
        return r < 0 ? kvd_refuse(why, r, "cannot listen: %s", strerror(-r)) : 0;
}

/* ---- reload ---------------------------------------------------------------------------------- */

/* Settings that the running server was built with stay as they are. */
static void keep_fixed(const struct config *now, struct config *next) {
        for (const struct setting *s = daemon_settings; s->name; s++)
                if (s->fixed && setting_keep(s, now, next))
                        log_warning("%s changed; that takes effect when kvd is restarted", s->name);
        memcpy(next->worker_program, now->worker_program, sizeof next->worker_program);
}

static void reload(struct daemon *d) {
        struct config next;
        struct kvd_why why;
        int r = options_load(d->options, &next, &why);

        if (r >= 0)
                r = backend_size_pool(&d->backend, &next, &why);
        if (r < 0) {
                log_error("configuration not loaded, the old one stays: %s", why.line);
                config_clear(&next);
                return;
        }
        keep_fixed(&d->config, &next);
        config_clear(&d->config);
        d->config = next;
        log_set_level(log_levels[d->config.log]);
        if (apply_domains(d, &why) < 0)
                log_error("%s", why.line);
        log_info("configuration loaded again");
}

static void reload_and_tell(struct daemon *d) {
        char state[64];

        snprintf(state, sizeof state, "RELOADING=1\nMONOTONIC_USEC=%" PRIu64, sys_now_ns() / 1000);
        notify_send(&d->notify, state, NOTIFY_WAIT_MS);
        reload(d);
        notify_send(&d->notify, "READY=1", NOTIFY_WAIT_MS);
}

/* ---- signals --------------------------------------------------------------------------------- */

static void signal_came(struct loop_source *source, short revents) {
        struct daemon *d = container_of(source, struct daemon, signals);
        struct signalfd_siginfo info;

        if (read(source->fd, &info, sizeof info) != sizeof info)
                return;
        if (info.ssi_signo == SIGHUP) {
                reload_and_tell(d);
                return;
        }
        d->ending = true;
        log_info("%s: ending", info.ssi_signo == SIGTERM ? "SIGTERM" : "SIGINT");
        loop_quit(d->loop);
}

int daemon_handle_signals(struct daemon *d, const struct options *options) {
        sigset_t set;

        sigemptyset(&set);
        sigaddset(&set, SIGTERM);
        sigaddset(&set, SIGINT);
        sigaddset(&set, SIGHUP);
        d->options = options;
        d->signals = (struct loop_source){.events = POLLIN, .ready = signal_came};
        d->signals.fd = sys->signalfd(&set, SFD_CLOEXEC | SFD_NONBLOCK);
        return d->signals.fd < 0 ? -errno : loop_add(d->loop, &d->signals);
}

/* ---- run ------------------------------------------------------------------------------------- */

/* The loop feeds it, so that a loop that hangs is noticed. */
static void feed_watchdog(struct loop_timer *timer) {
        struct daemon *d = container_of(timer, struct daemon, watchdog);

        notify_send(&d->notify, "WATCHDOG=1", 0);
        loop_timer_set(d->loop, timer, sys_now_ns() + d->notify.watchdog_ns / 2);
}

int daemon_run(struct daemon *d) {
        int r;

        r = notify_open(&d->notify);
        if (r < 0)
                log_warning("the service manager cannot be told how we are: %s", strerror(-r));
        d->watchdog.fire = feed_watchdog;
        if (d->notify.watchdog_ns)
                feed_watchdog(&d->watchdog);
        notify_send(&d->notify, "READY=1\nSTATUS=Serving", NOTIFY_WAIT_MS);
        r = d->ending ? 0 : loop_run(d->loop);
        notify_send(&d->notify, "STOPPING=1", NOTIFY_WAIT_MS);
        if (r < 0)
                log_error("waiting for events failed: %s", strerror(-r));
        server_shut(d->server);
        listener_close(&d->listener);
        return r;
}

void daemon_stop(struct daemon *d) {
        uint64_t one = 1;

        while (write(d->stop.fd, &one, sizeof one) < 0 && errno == EINTR)
                ;
}

const char *daemon_loop_name(const struct daemon *d) {
        return loop_name(d->loop);
}

struct daemon *daemon_free(struct daemon *d) {
        if (!d)
                return NULL;
        server_free(d->server);
        listener_close(&d->listener);
        store_free(d->store);
        loop_free(d->loop);
        notify_close(&d->notify);
        closep(&d->signals.fd);
        closep(&d->stop.fd);
        config_clear(&d->config);
        free(d);
        return NULL;
}

void daemon_freep(struct daemon **daemon) {
        *daemon = daemon_free(*daemon);
}
