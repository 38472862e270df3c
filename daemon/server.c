/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/server.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include "daemon/client.h"
#include "daemon/log.h"
#include "daemon/exporter.h"
#include "daemon/worker_jobs.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define ACCEPT_RETRY_NS UINT64_C(100000000)

/* ---- life ------------------------------------------------------------------------------------------------------ */

/* One more, for the connection that is taken before another makes room for it. */
static uint32_t n_seats(const struct config *config) {
        return config->max_clients + SERVER_HALF_OPEN + 1;
}

uint32_t server_max_sources(const struct config *config) {
        return 2 * n_seats(config) + 1 + 2 * CHILD_SOURCES;
}

static int make_instance(struct server *server) {
        return sys->getrandom(&server->instance, sizeof server->instance, 0) == sizeof server->instance ? 0 : -EIO;
}

static void accept_again(struct loop_timer *timer);
static void deadline_passed(struct loop_timer *timer);

int server_new(const struct config *config, struct loop *loop, struct store *store, struct server **ret) {
        _cleanup_(server_freep) struct server *server = NULL;
        int r;

        server = sys->calloc(1, sizeof *server);
        if (!server)
                return -ENOMEM;
        *server = (struct server){
                .config = config, .loop = loop, .store = store, .started_ns = sys_now_ns(), .spare = -1};
        server->retry.fire = accept_again;
        server->deadline.fire = deadline_passed;
        server->scratch = sys->calloc(1, sizeof *server->scratch);
        server->clients = sys->calloc(n_seats(config), sizeof *server->clients);
        if (!server->scratch || !server->clients)
                return -ENOMEM;
        server->n_seats = n_seats(config);
        for (uint32_t i = server->n_seats; i-- > 0;)
                server_client_unused(server, &server->clients[i]);
        r = kvd_decoder_new(&server->decoder);
        if (r < 0)
                return r;
        r = make_instance(server);
        if (r < 0)
                return r;
        server->spare = sys->eventfd(0, EFD_CLOEXEC);
        if (server->spare < 0)
                return -errno;
        r = worker_new(config, loop, store, &server->worker);
        if (r == 0 && store_has_exporter(store))
                r = exporter_new(config, loop, store, server->worker, &server->exporter);
        if (r < 0)
                return r;
        *ret = STEAL(server);
        return 0;
}

void server_shut(struct server *server) {
        for (uint32_t i = 0; i < server->n_seats; i++)
                if (server->clients[i].state != CLIENT_UNUSED)
                        client_end(&server->clients[i], false);
        loop_timer_stop(&server->retry);
        loop_timer_stop(&server->deadline);
        loop_timer_stop(&server->order);
        loop_timer_stop(&server->pins);
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
        free(server->clients);
        free(server);
        return NULL;
}

struct child *server_memory_maker(struct server *server) {
        return server->exporter ? exporter_child(server->exporter) : worker_child(server->worker);
}

void server_freep(struct server **server) {
        *server = server_free(*server);
}

/* ---- what streams have done -------------------------------------------------------------------------------------- */

#define ORDER_FIRST_NS UINT64_C(1000000)
#define ORDER_MOST_NS UINT64_C(64000000)

/*
 * No event tells that a stream has passed. Readers wait by themselves, in their streams; looking only spares them that
 * later on, and lets the blocks be evicted: so it is done rarely when little changes.
 */
static void look_at_order(struct loop_timer *timer) {
        struct server *server = container_of(timer, struct server, order);

        if (!store_order_look(server->store))
                return;
        server->order_pause_ns = MIN(2 * server->order_pause_ns, ORDER_MOST_NS);
        loop_timer_set(server->loop, timer, sys_now_ns() + server->order_pause_ns);
}

void server_watch_order(struct server *server) {
        if (server->order.link && server->order_pause_ns == ORDER_FIRST_NS)
                return; /* soon enough: who seals all the time must not put it off */
        server->order.fire = look_at_order;
        server->order_pause_ns = ORDER_FIRST_NS;
        loop_timer_set(server->loop, &server->order, sys_now_ns() + ORDER_FIRST_NS);
}

/* ---- what clients may expect ------------------------------------------------------------------------------------ */

#define PINS_NS UINT64_C(100000000)

/* Clients pin and let go without a word to us, and want to know what others' pins leave them. */
static void look_at_pins(struct loop_timer *timer) {
        struct server *server = container_of(timer, struct server, pins);

        if (!store_look_at_pins(server->store))
                return;
        loop_want_idle(server->loop);
        loop_timer_set(server->loop, timer, sys_now_ns() + PINS_NS);
}

void server_watch_pins(struct server *server) {
        if (server->pins.link)
                return;
        server->pins.fire = look_at_pins;
        loop_timer_set(server->loop, &server->pins, sys_now_ns() + PINS_NS);
}

/* ---- half-open connections ------------------------------------------------------------------------------------- */

/*
 * A connection that does not attach costs a slot and two descriptors, so there are few of them, each for a second.
 * When there are too many, the oldest makes room: whoever means to attach has done so long before 64 others came.
 */

static void watch_deadline(struct server *server) {
        if (server->half_open)
                loop_timer_set(server->loop, &server->deadline, server->half_open->connected_ns + SERVER_ATTACH_NS);
        else
                loop_timer_stop(&server->deadline);
}

static void half_open_add(struct server *server, struct client *client) {
        struct client **link = &server->half_open;

        while (*link)
                link = &(*link)->next;
        client->next = NULL;
        *link = client;
        server->n_half_open++;
        watch_deadline(server);
}

void server_half_open_remove(struct server *server, struct client *client) {
        struct client **link = &server->half_open;

        while (*link != client)
                link = &(*link)->next;
        *link = client->next;
        server->n_half_open--;
        watch_deadline(server);
}

static void deadline_passed(struct loop_timer *timer) {
        struct server *server = container_of(timer, struct server, deadline);
        uint64_t now = sys_now_ns();

        while (server->half_open && server->half_open->connected_ns + SERVER_ATTACH_NS <= now) {
                log_limited(LOG_INFO, "process %d of user %u connected and did not attach: dropped",
                            server->half_open->peer.pid, server->half_open->peer.uid);
                client_end(server->half_open, false);
        }
        watch_deadline(server);
}

/* The oldest half-open connection that has to go before this user may have one more, or NULL. */
static struct client *half_open_victim(const struct server *server, uint32_t uid) {
        struct client *oldest = NULL;
        uint32_t n = 0;

        for (struct client *c = server->half_open; c; c = c->next) {
                if (c->peer.uid != uid)
                        continue;
                oldest = oldest ?: c;
                n++;
        }
        if (n >= SERVER_USER_HALF_OPEN)
                return oldest;
        return server->n_half_open >= SERVER_HALF_OPEN ? server->half_open : NULL;
}

/* ---- clients --------------------------------------------------------------------------------------------------- */

uint32_t server_user_clients(const struct server *server, uint32_t uid) {
        uint32_t n = 0;

        for (uint32_t i = 0; i < server->n_seats; i++)
                n += server->clients[i].state >= CLIENT_ATTACHED && server->clients[i].peer.uid == uid;
        return n;
}

void server_client_unused(struct server *server, struct client *client) {
        *client = (struct client){.server = server, .next = server->unused, .socket.fd = -1, .peer.pidfd = -1};
        server->unused = client;
}

/* There is a slot: attached ones are limited when they attach, and half-open ones by half_open_victim. */
static void welcome(struct server *server, int fd) {
        struct client *client = server->unused, *victim;
        int r;

        server->unused = client->next;
        r = client_open(client, fd);
        if (r < 0) {
                log_limited(LOG_WARNING, "a connection was dropped: %s", strerror(-r));
                return;
        }
        victim = half_open_victim(server, client->peer.uid);
        if (victim) {
                log_limited(LOG_WARNING, "user %u has too many connections that did not attach: the oldest is dropped",
                            victim->peer.uid);
                client_end(victim, false);
        }
        half_open_add(server, client);
}

/* ---- accept ---------------------------------------------------------------------------------------------------- */

static void accept_again(struct loop_timer *timer) {
        struct server *server = container_of(timer, struct server, retry);

        if (loop_add(server->loop, &server->listening) < 0)
                loop_timer_set(server->loop, &server->retry, sys_now_ns() + ACCEPT_RETRY_NS);
}

/* Without a descriptor for the connection: takes it with the spare one and closes it, so that its peer knows. */
static bool shed(struct server *server) {
        int fd;

        closep(&server->spare);
        fd = sys->accept(server->listening.fd, SOCK_CLOEXEC | SOCK_NONBLOCK);
        closep(&fd);
        server->spare = sys->eventfd(0, EFD_CLOEXEC);
        if (fd >= 0)
                log_limited(LOG_WARNING, "out of descriptors: a connection was refused; raise LimitNOFILE (ulimit -n)");
        return fd >= 0;
}

/* The connection stays in the backlog, and the socket stays readable. Look away for a while. */
static void pause_accepting(struct server *server, int error) {
        log_limited(LOG_WARNING, "cannot accept connections: %s; trying again every 0.1 s", strerror(error));
        loop_remove(&server->listening);
        loop_timer_set(server->loop, &server->retry, sys_now_ns() + ACCEPT_RETRY_NS);
}

static void accept_one(struct loop_source *source, short revents) {
        struct server *server = container_of(source, struct server, listening);
        int fd, error;

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
        server->listening = (struct loop_source){.fd = fd, .events = POLLIN, .ready = accept_one};
        return loop_add(server->loop, &server->listening);
}
