/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Puts the parts together: backend, store, loop, server and listener are made in this order and
 * freed in the reverse one. Signals come through the loop, so that a reload happens between two
 * requests.
 */

#include "daemon/main/daemon.h"

#include <errno.h>
#include <inttypes.h>
#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "daemon/base/degraded.h"
#include "daemon/base/identity.h"
#include "daemon/base/log.h"
#include "daemon/base/memory_limit.h"
#include "daemon/base/notify.h"
#include "daemon/base/setting.h"
#include "daemon/children/backend.h"
#include "daemon/children/disk_child.h"
#include "daemon/children/gpu_clear.h"
#include "daemon/children/host_tier.h"
#include "daemon/children/keeper_link.h"
#include "daemon/children/remote_child.h"
#include "daemon/children/worker_jobs.h"
#include "daemon/main/activation.h"
#include "daemon/main/options.h"
#include "daemon/main/reload.h"
#include "daemon/serve/large_pages.h"
#include "daemon/serve/listener.h"
#include "daemon/serve/server.h"
#include "ipc/base/numa.h"
#include "ipc/base/shared_file.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define NOTIFY_WAIT_MS 1000

struct daemon {
        struct config config; /* owned */
        struct backend backend;
        struct loop *loop;       /* owned */
        struct store *store;     /* owned */
        uint64_t trimmed;        /* number of deleted spaces whose memory was returned */
        struct server *server;   /* owned */
        struct disk_owner *disk; /* owned; NULL: there is no file tier */
        struct host_tier host_tier;
        struct remote_owner *remote; /* owned; NULL: there is no remote tier */
        struct listener listener;    /* owned */
        struct notify notify;        /* owned */
        struct keep keep;            /* owned */
        struct loop_timer watchdog;
        struct gpu_clear gpu_clear;
        bool ending;
        pid_t parent;               /* with --private: the daemon ends with it; else 0 */
        struct loop_source signals; /* its fd is owned; -1 */
        struct loop_source stop;    /* its fd is owned; -1 */
        struct reload reload;
        uint64_t failed_reloads; /* since the last one that worked */
};

/* ---- start ----------------------------------------------------------------------------------- */

static const int log_levels[] = {[CONFIG_ERROR] = LOG_ERR,
                                 [CONFIG_WARNING] = LOG_WARNING,
                                 [CONFIG_INFO] = LOG_INFO,
                                 [CONFIG_DEBUG] = LOG_DEBUG};

/*
 * Maximum number of descriptors for spaces: those that connections, with two each, and a few others
 * leave, but at least a quarter of the limit. 0: no limit.
 */
static uint64_t files_of_spaces(const struct config *config) {
        uint64_t others = UINT64_C(2) * seats_needed(config) + 64 + LARGE_PAGES_WAITING;
        struct rlimit limit;

        if (getrlimit(RLIMIT_NOFILE, &limit) < 0 || limit.rlim_cur == RLIM_INFINITY)
                return 0;
        return MAX(limit.rlim_cur - MIN(limit.rlim_cur, others), limit.rlim_cur / 4 + 1);
}

/* No space can be made without these calls: fail at the start, not at a client's request. */
static int try_memory(struct kvd_why *why) {
        struct shared_file file;
        int r = shared_file_new("kvd-start", 1, SHARED_MAPPED | SHARED_ONE_WRITER, &file), twin;

        if (r < 0)
                return kvd_refuse(
                        why, r,
                        "memory cannot be shared: %s; kvd needs memfd_create with seals (Linux 5.1)",
                        strerror(-r));
        twin = shared_file_for_reading(file.fd);
        shared_file_close(&file);
        if (twin == -ENOSYS)
                return kvd_refuse(why, twin,
                                  "there is no /proc, and kvd shares memory for reading through "
                                  "/proc/self/fd; mount /proc");
        if (twin < 0)
                return kvd_refuse(why, twin, "memory cannot be shared for reading only: %s",
                                  strerror(-twin));
        close(twin);
        return 0;
}

static int open_store(struct daemon *d, struct kvd_why *why) {
        struct store_config config = {.pool_bytes = d->config.pool,
                                      .pool_most = d->config.pool_most,
                                      .segment_bytes = d->config.segment,
                                      .spill_bytes = d->config.spill,
                                      .overhead_bytes = d->config.overhead,
                                      .max_files = files_of_spaces(&d->config),
                                      .reserve_bytes = d->config.reserve,
                                      .quarantine_ns = d->backend.backend == KVD_BACKEND_HOST ?
                                                               0 :
                                                               d->config.quarantine_ms *
                                                                       UINT64_C(1000000),
                                      .backend = d->backend.backend,
                                      .cuda = d->backend.cuda,
                                      .n_gpus = d->backend.n_gpus,
                                      .pages = d->config.pages,
                                      .nodes = d->config.numa ? numa_nodes() : 0,
                                      .keep = keep_ops(&d->keep),
                                      .keep_arg = &d->keep,
                                      .max_attachments = d->config.max_clients + SEATS_ADMIN};
        int r;

        keep_room(&d->keep, &config.keep_bytes, &config.keep_least);
        memcpy(config.gpus, d->backend.gpus, sizeof config.gpus);
        r = store_new(&config, &d->store);
        if (r < 0)
                return kvd_refuse(why, r, "%s", d->store ? store_why(d->store) : strerror(-r));
        return 0;
}

/* Host memory is taken as it is needed, so nothing else would warn before it is too late. */
static void warn_of_limit(const struct config *config) {
        struct memory_limit limit;
        struct kvd_why why;

        memory_limit_read("", &limit);
        degraded_set(memory_limit, config->pool > memory_usable(""));
        if (memory_limit_exceeded(&limit, config->pool, &why))
                log_warning("%s", why.line);
        else if (config->pool > memory_usable(""))
                log_warning(
                        "pool = %lluM is more than the memory of this machine (%lluM): the kernel will kill processes when that much is used",
                        (unsigned long long)(config->pool >> 20),
                        (unsigned long long)(memory_usable("") >> 20));
}

static int choose_backend(struct daemon *d, struct kvd_why *why) {
        int r = backend_choose(&d->config, &d->backend);

        if (r < 0)
                return kvd_refuse(
                        why, r, "the GPU backend is not available: %s; set backend = host, or auto",
                        d->backend.why.line);
        log_info("backend %s: %s%s%s", backend_name(d->backend.backend), d->backend.device,
                 d->backend.device[0] ? ", " : "", d->backend.why.line);
        r = backend_size_pool(&d->backend, &d->config, why);
        if (r < 0)
                return r;
        log_info("pool: %llu MiB of %s memory", (unsigned long long)(d->config.pool >> 20),
                 d->backend.backend == KVD_BACKEND_HOST ? "host" :
                 d->backend.n_gpus > 1                  ? "the GPUs'" :
                                                          "the GPU's");
        if (d->backend.backend == KVD_BACKEND_HOST)
                warn_of_limit(&d->config);
        return 0;
}

/* Creates new domains, and sets the quotas of the others. */
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

#define TRIM_SPACES 64u /* memory is returned after so many, to bound the time of one turn */

/*
 * Returns the memory of deleted spaces to the system when idle work is over: malloc by itself keeps
 * all free memory that is below a chunk in use.
 */
static bool idle(void *data) {
        struct daemon *d = data;
        bool more = store_idle(d->store);
        uint64_t buried = store_buried(d->store) - d->trimmed;

        if (buried >= (more ? TRIM_SPACES : 1)) {
                malloc_trim(0);
                d->trimmed += buried;
        }
        return more;
}

static void stop_asked(struct loop_source *source, short revents) {
        loop_quit(source->loop);
}

/* Comes before open_store: the store sends descriptors to the keeper as soon as it has some. */
static int open_notify(struct daemon *d, struct kvd_why *why) {
        int r = notify_open(&d->notify);

        degraded_set(notify, r < 0);
        if (r < 0)
                log_warning("the service manager cannot be notified: %s", strerror(-r));
        r = keep_init(&d->keep, &d->notify);
        return r < 0 ? kvd_refuse(why, r, "out of memory") : 0;
}

static int open_stop(struct daemon *d) {
        d->stop = (struct loop_source){.events = POLLIN, .ready = stop_asked};
        d->stop.fd = sys->eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        return d->stop.fd < 0 ? negative_errno() : loop_add(d->loop, &d->stop);
}

static int open_loop(struct daemon *d, struct kvd_why *why) {
        int r;

        r = loop_new(d->config.loop, server_max_sources(&d->config) + 4, &d->loop);
        if (r < 0)
                return kvd_refuse(why, r, "loop: %s; try loop = epoll", strerror(-r));
        loop_set_idle(d->loop, idle, d);
        r = open_stop(d);
        if (r >= 0)
                r = server_new(&d->config, d->loop, d->store, &d->server);
        if (r >= 0)
                d->server->backend = &d->backend;
        if (r >= 0)
                d->server->keep = &d->keep;
        if (r < 0)
                return kvd_refuse(why, r, "cannot start: %s", strerror(-r));
        r = host_tier_begin(&d->host_tier, &d->config, d->loop, d->store, why);
        if (r >= 0)
                r = disk_owner_new(&d->config, d->loop, d->store, &d->disk, why);
        return r < 0 ? r : remote_owner_new(&d->config, d->loop, d->store, &d->remote, why);
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
        d->reload = RELOAD_NONE;
        if (!d->config.only_checked)
                log_set_level(log_levels[d->config.log]);
        r = open_notify(d, why);
        if (r >= 0)
                r = choose_backend(d, why);
        if (r >= 0)
                r = try_memory(why);
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

/* A signal that ends the daemon meanwhile is no failure: daemon_run checks for it. */
static int prepare_memory(struct daemon *d, struct kvd_why *why) {
        int r = store_make_memory(d->store);

        if (r < 0)
                return kvd_refuse(why, r, "%s", store_why(d->store));
        if (d->backend.backend == KVD_BACKEND_HOST)
                return 0;
        d->gpu_clear = (struct gpu_clear){.loop = d->loop,
                                          .store = d->store,
                                          .child = server_memory_maker(d->server)};
        r = gpu_clear_wait(&d->gpu_clear, why);
        return d->ending ? 0 : r;
}

/* Creates the domain that an unlisted user had in the previous daemon, if that is still allowed. */
static struct domain *domain_of_user(struct keep *keep, const char *name) {
        struct daemon *d = container_of(keep, struct daemon, keep);
        struct domain_config config = {0};
        struct domain *domain;
        uint32_t uid;

        if (sscanf(name, "uid-%" SCNu32, &uid) != 1 ||
            (d->config.unlisted == CONFIG_REFUSE && !id_list_has(&d->config.admins, uid)))
                return NULL;
        snprintf(config.name, sizeof config.name, "uid-%u", uid);
        if (strcmp(config.name, name) != 0 || config_find_domain(&d->config, uid, NULL, 0) ||
            store_domain(d->store, &config, &domain) < 0)
                return NULL;
        return domain;
}

static void say_short(int spaces) {
        if (spaces > 0)
                log_warning(
                        "%d spaces cannot grow to the size that they may have, since their indexes were made for less; "
                        "delete them, or give them max_blocks",
                        spaces);
}

/* Takes over the previous daemon's spaces. All of it is checked, since others could write it. */
static void adopt(struct daemon *d, struct activation *handed) {
        if (!handed->n)
                return;
        notify_send(&d->notify, "STATUS=Taking over the previous daemon's spaces", NOTIFY_WAIT_MS);
        d->keep.domain = domain_of_user;
        for (size_t i = 0; i < handed->n; i++)
                keep_known(&d->keep, handed->files[i].name);
        store_adopt(d->store, handed->files, handed->n);
        loop_want_idle(d->loop);
        handed->n = 0;
        say_short(store_resize(d->store, d->config.pool, d->config.spill));
        /* streams may wait for a client that ends before the first one connects */
        shared_pages_watch_pins(&d->server->pages);
}

int daemon_listen(struct daemon *d, struct activation *handed, const struct identity *identity,
                  struct kvd_why *why) {
        int r;

        d->listener.fd = STEAL_FD(handed->listen);
        r = d->listener.fd < 0 ? listener_open_as(&d->listener, &d->config, identity, why) :
                                 identity_take(identity, why);
        if (r < 0)
                return r;
        r = store_check_pages(d->store, handed->files, handed->n);
        if (r < 0)
                return kvd_refuse(why, r, "%s", store_why(d->store));
        adopt(d, handed);
        disk_owner_start(d->disk);
        remote_owner_start(d->remote);
        r = prepare_memory(d, why);
        if (r < 0)
                return r;
        r = server_listen(d->server, d->listener.fd);
        return r < 0 ? kvd_refuse(why, r, "cannot listen: %s", strerror(-r)) : 0;
}

/* ---- reload ---------------------------------------------------------------------------------- */

/* Settings that only a restart changes keep their values. Returns how many of them differ. */
static uint64_t keep_fixed(const struct config *now, bool on_gpu, struct config *next) {
        uint64_t n = 0;

        for (const struct setting *s = daemon_settings; s->name; s++) {
                if ((!s->fixed && !(s->fixed_on_gpu && on_gpu)) || !setting_keep(s, now, next))
                        continue;
                log_warning("%s changed; that takes effect when kvd is restarted", s->name);
                n++;
        }
        memcpy(next->worker_program, now->worker_program, sizeof next->worker_program);
        return n;
}

/* Indexes are made for pool_most: more needs a restart. */
static uint64_t size_allowed(struct daemon *d, const struct config *next) {
        uint64_t most = store_pool_most(d->store);

        if (next->pool <= most || d->backend.backend != KVD_BACKEND_HOST)
                return next->pool;
        log_warning(
                "pool = %lluM is more than pool_most, as it was at the start (%lluM): the rest takes effect when kvd is restarted",
                (unsigned long long)(next->pool >> 20), (unsigned long long)(most >> 20));
        return most;
}

/*
 * Applies the sizes of pool and spill, and fits spaces to changed quotas. If that fails, the pool
 * keeps its size.
 */
static void resize(struct daemon *d, uint64_t before) {
        int r = store_resize(d->store, d->config.pool, d->config.spill);

        if (r < 0) {
                log_error("pool stays at %lluM: %s", (unsigned long long)(before >> 20),
                          store_why(d->store));
                d->config.pool = before;
                r = store_resize(d->store, before, d->config.spill);
        } else if (d->config.pool != before) {
                log_info("pool: %llu MiB, after %llu MiB",
                         (unsigned long long)(d->config.pool >> 20),
                         (unsigned long long)(before >> 20));
                warn_of_limit(&d->config);
        }
        say_short(r);
}

/* Takes over *next. */
static int apply(struct daemon *d, struct config *next, struct kvd_why *why) {
        uint64_t before = d->config.pool, asked, n_kept;
        int r = backend_size_pool(&d->backend, next, why);

        if (r < 0) {
                config_clear(next);
                return r;
        }
        n_kept = keep_fixed(&d->config, d->backend.backend != KVD_BACKEND_HOST, next);
        asked = next->pool;
        next->pool = size_allowed(d, next);
        degraded_set(restart, n_kept + (next->pool < asked));
        config_clear(&d->config);
        d->config = *next;
        *next = (struct config){0};
        log_set_level(log_levels[d->config.log]);
        if (apply_domains(d, why) < 0)
                log_error("%s", why->line);
        resize(d, before);
        return 0;
}

static void end_reload(struct daemon *d, int r, const struct kvd_why *why) {
        d->failed_reloads = r < 0 ? d->failed_reloads + 1 : 0;
        degraded_set(reload, d->failed_reloads);
        if (r < 0)
                log_error("configuration not loaded, the old one stays: %s", why->line);
        else
                log_info("configuration loaded again");
        notify_send(&d->notify, "READY=1", NOTIFY_WAIT_MS);
}

static void loaded(struct reload *reload, int r, struct config *next, struct kvd_why *why) {
        struct daemon *d = container_of(reload, struct daemon, reload);

        end_reload(d, r < 0 ? r : apply(d, next, why), why);
}

static void begin_reload(struct daemon *d) {
        struct kvd_why why;
        char state[64];

        snprintf(state, sizeof state, "RELOADING=1\nMONOTONIC_USEC=%" PRIu64, sys_now_ns() / 1000);
        notify_send(&d->notify, state, NOTIFY_WAIT_MS);
        if (!reload_begin(&d->reload))
                end_reload(d, kvd_refuse(&why, -EAGAIN, "no thread can be started"), &why);
}

/* ---- signals --------------------------------------------------------------------------------- */

static void log_end(const struct daemon *d, const struct signalfd_siginfo *info) {
        if (d->parent && getppid() != d->parent)
                log_info("process %d, which started kvd, has ended: ending", d->parent);
        else
                log_info("%s from process %u: ending",
                         info->ssi_signo == SIGTERM ? "SIGTERM" : "SIGINT", info->ssi_pid);
}

static void signal_came(struct loop_source *source, short revents) {
        struct daemon *d = container_of(source, struct daemon, signals);
        struct signalfd_siginfo info;

        if (read(source->fd, &info, sizeof info) != sizeof info)
                return;
        if (info.ssi_signo == SIGHUP) {
                begin_reload(d);
                return;
        }
        d->ending = true;
        log_end(d, &info);
        loop_quit(d->loop);
}

int daemon_handle_signals(struct daemon *d, const struct options *options) {
        sigset_t set;
        int r;

        sigemptyset(&set);
        sigaddset(&set, SIGTERM);
        sigaddset(&set, SIGINT);
        sigaddset(&set, SIGHUP);
        d->parent = options && options->private_dir ? getppid() : 0;
        d->reload.options = options;
        d->reload.loaded = loaded;
        r = reload_init(&d->reload, d->loop);
        if (r < 0)
                return r;
        d->signals = (struct loop_source){.events = POLLIN, .ready = signal_came};
        d->signals.fd = sys->signalfd(&set, SFD_CLOEXEC | SFD_NONBLOCK);
        return d->signals.fd < 0 ? negative_errno() : loop_add(d->loop, &d->signals);
}

/* ---- run ------------------------------------------------------------------------------------- */

/* The loop feeds the watchdog, so that it notices a loop that hangs. */
static void feed_watchdog(struct loop_timer *timer) {
        struct daemon *d = container_of(timer, struct daemon, watchdog);

        notify_send(&d->notify, "WATCHDOG=1", 0);
        loop_timer_set(d->loop, timer, sys_now_ns() + d->notify.watchdog_ns / 2);
}

/* The keeper counts from that time for how long it has served. */
static void say_ready(const struct daemon *d) {
        char state[80];

        snprintf(state, sizeof state, "READY=1\nSTATUS=Serving\nMONOTONIC_USEC=%" PRIu64,
                 sys_now_ns() / 1000);
        notify_send(&d->notify, state, NOTIFY_WAIT_MS);
}

int daemon_run(struct daemon *d) {
        int r;

        keep_start(&d->keep, d->loop);
        d->watchdog.fire = feed_watchdog;
        if (d->notify.watchdog_ns)
                feed_watchdog(&d->watchdog);
        say_ready(d);
        r = d->ending ? 0 : loop_run(d->loop);
        notify_send(&d->notify, "STOPPING=1", NOTIFY_WAIT_MS);
        if (r < 0)
                log_error("waiting for events failed: %s", strerror(-r));
        store_hand_on(d->store);
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
        reload_close(&d->reload);
        server_free(d->server);
        host_tier_end(&d->host_tier);
        disk_owner_free(d->disk);
        remote_owner_free(d->remote);
        listener_close(&d->listener);
        store_free(d->store);
        keep_clear(&d->keep);
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
