/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Creates and frees the server, accepts connections and gives each a seat. When no descriptors are
 * left, it accepts a connection with a spare one and closes it, so that the peer gets an error
 * instead of waiting.
 */

#include "daemon/serve/server.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include "daemon/base/degraded.h"
#include "daemon/base/log.h"
#include "daemon/children/exporter_child.h"
#include "daemon/children/worker_jobs.h"
#include "daemon/serve/client.h"
#include "daemon/serve/closer.h"
#include "daemon/serve/large_pages.h"
#include "daemon/serve/requests.h"
#include "ipc/base/sys.h"
#include "ipc/base/user.h"
#include "ipc/base/util.h"

#define ACCEPT_RETRY_NS UINT64_C(100000000)
#define CLOSING_FILES 256u /* maximum number of the store's large files that wait to be closed */

/* ---- life ------------------------------------------------------------------------------------ */

uint32_t server_max_sources(const struct config *config) {
        return 2 * seats_needed(config) + 1 + (3 + !!config->file[0]) * CHILD_SOURCES;
}

static int make_instance(struct server *server) {
        return sys->getrandom(&server->instance, sizeof server->instance, 0) ==
                               sizeof server->instance ?
                       0 :
                       -EIO;
}

static bool work(void *data) {
        struct server *server = data;

        return turns_run(&server->turns);
}

static void close_file(void *data, int fd) {
        closer_take(data, fd);
}

static void want_large(void *data, int fd, uint64_t from, uint64_t bytes) {
        large_pages_want(data, fd, from, bytes);
}

static bool large_busy(void *data) {
        return large_pages_busy(data);
}

static int make_threads(struct server *server) {
        int r = closer_new(2 * server->seats.n + CLOSING_FILES, &server->closer);

        if (r == 0)
                store_on_close(server->store, close_file, server->closer);
        if (r >= 0)
                r = large_pages_new(&server->large);
        if (r == 0)
                store_on_large(server->store,
                               &(struct store_large){want_large, large_busy, server->large});
        return r;
}

static void accept_again(struct loop_timer *timer);
static void too_late(struct loop_timer *timer);

int server_new(const struct config *config, struct loop *loop, struct store *store,
               struct server **ret) {
        _cleanup_(server_freep) struct server *server = NULL;
        int r;

        server = sys->calloc(1, sizeof *server);
        if (!server)
                return -ENOMEM;
        *server = (struct server){.config = config,
                                  .loop = loop,
                                  .store = store,
                                  .overflow_uid = user_overflow(),
                                  .started_ns = sys_now_ns(),
                                  .spare = -1};
        server->retry.fire = accept_again;
        server->turns.serve = request_serve;
        loop_set_work(loop, work, server);
        rounds_init(&server->rounds, loop, &server->turns);
        server->seats.deadline.fire = too_late;
        shared_pages_init(&server->pages, loop, store);
        server->scratch = sys->calloc(1, sizeof *server->scratch);
        if (!server->scratch || seats_init(&server->seats, server, seats_needed(config)) < 0)
                return -ENOMEM;
        r = make_threads(server);
        if (r >= 0)
                r = kvd_decoder_new(&server->decoder);
        if (r < 0)
                return r;
        r = make_instance(server);
        if (r < 0)
                return r;
        server->spare = sys->eventfd(0, EFD_CLOEXEC);
        if (server->spare < 0)
                return negative_errno();
        r = worker_new(config, loop, store, &server->worker);
        if (r == 0 && store_has_exporter(store))
                r = exporter_new(config, loop, store, server->worker, &server->exporter);
        if (r < 0)
                return r;
        *ret = STEAL(server);
        return 0;
}

void server_shut(struct server *server) {
        for (uint32_t i = 0; i < server->seats.n; i++)
                if (server->seats.clients[i].state != CLIENT_UNUSED)
                        client_end(&server->seats.clients[i], false);
        loop_timer_stop(&server->retry);
        loop_set_work(server->loop, NULL, NULL);
        shared_pages_stop(&server->pages);
        rounds_stop(&server->rounds);
        loop_remove(&server->listening);
        worker_stop(server->worker);
}

struct server *server_free(struct server *server) {
        if (!server)
                return NULL;
        server_shut(server);
        closep(&server->spare);
        server->exporter = exporter_free(server->exporter);
        server->worker = worker_free(server->worker);
        kvd_decoder_free(server->decoder);
        free(server->scratch);
        seats_clear(&server->seats);
        store_on_large(server->store, &(struct store_large){0});
        server->large = large_pages_free(server->large);
        store_on_close(server->store, NULL, NULL);
        server->closer = closer_free(server->closer);
        free(server);
        return NULL;
}

struct child *server_memory_maker(struct server *server) {
        return server->exporter ? exporter_child(server->exporter) : worker_child(server->worker);
}

void server_freep(struct server **server) {
        *server = server_free(*server);
}

void server_close_connection(struct server *server, int fd, bool may_bring_fds) {
        if (fd >= 0 && may_bring_fds)
                closer_take(server->closer, fd);
        else
                closep(&fd);
}

/* ---- clients --------------------------------------------------------------------------------- */

static void too_late(struct loop_timer *timer) {
        struct server *server = container_of(timer, struct server, seats.deadline);
        struct client *c;

        while ((c = seats_late(&server->seats))) {
                log_limited(LOG_INFO, "process %d of user %u connected and did not attach: dropped",
                            c->peer.pid, c->peer.uid);
                client_end(c, false);
        }
}

/*
 * There is always a seat: attach limits the number of attached clients, and seats_too_many that of
 * half-open ones.
 */
static void welcome(struct server *server, int fd) {
        struct client *client = seats_take(&server->seats), *oldest;
        uint64_t began = sys_now_ns();
        int r = client_open(client, fd, request_came);

        if (r < 0) {
                log_limited(LOG_WARNING, "a connection was dropped: %s", strerror(-r));
                return;
        }
        oldest = seats_too_many(&server->seats, client->peer.uid);
        if (oldest) {
                log_limited(LOG_WARNING,
                            "user %u has too many connections that did not attach: "
                            "the oldest is dropped",
                            oldest->peer.uid);
                client_end(oldest, false);
        }
        seats_add_half_open(&server->seats, client);
        turns_charge(&server->turns, &client->user->turns, sys_now_ns() - began);
}

/* ---- accept ---------------------------------------------------------------------------------- */

static void accept_again(struct loop_timer *timer) {
        struct server *server = container_of(timer, struct server, retry);

        if (loop_add(server->loop, &server->listening) < 0)
                loop_timer_set(server->loop, &server->retry, sys_now_ns() + ACCEPT_RETRY_NS);
}

/* Accepts a connection with the spare descriptor and closes it. False: accept failed. */
static bool shed(struct server *server) {
        int fd;

        closep(&server->spare);
        fd = sys->accept(server->listening.fd, SOCK_CLOEXEC | SOCK_NONBLOCK);
        server_close_connection(server, fd, fd >= 0 && closer_is_needed(fd));
        server->spare = sys->eventfd(0, EFD_CLOEXEC);
        if (fd < 0)
                return false;
        log_limited(LOG_WARNING, "out of descriptors: a connection was refused; raise "
                                 "LimitNOFILE (ulimit -n)");
        degraded_note(connections);
        return true;
}

/*
 * The connection stays in the backlog and the socket stays readable, so it is not polled for a
 * while.
 */
static void pause_accepting(struct server *server, int error) {
        log_limited(LOG_WARNING, "cannot accept connections: %s; trying again every 0.1 s",
                    strerror(error));
        degraded_note(connections);
        loop_remove(&server->listening);
        loop_timer_set(server->loop, &server->retry, sys_now_ns() + ACCEPT_RETRY_NS);
}

static void accept_one(struct loop_source *source, short revents) {
        struct server *server = container_of(source, struct server, listening);
        int fd, error;

        if (closer_waiting(server->closer) >= server->seats.n) {
                pause_accepting(server, EBUSY);
                return;
        }
        fd = sys->accept(source->fd, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) {
                welcome(server, fd);
                return;
        }
        error = errno;
        if (error == EAGAIN || error == EINTR || error == ECONNABORTED)
                return;
        if ((error != EMFILE && error != ENFILE) || !shed(server))
                pause_accepting(server, error);
}

int server_listen(struct server *server, int fd) {
        if (!closer_forbid_fds(fd))
                log_debug(
                        "Linux before 6.16: descriptors that clients send are closed by a thread");
        server->listening = (struct loop_source){.fd = fd, .events = POLLIN, .ready = accept_one};
        return loop_add(server->loop, &server->listening);
}
