/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The life of a client, and its searches for spaces by handle or by name. A process may outlive its
 * connection (and a forked child may hold the connection open longer than the process lives). So
 * everything that the process can still touch is kept until the kernel reports, through the pidfd
 * or a lifeline, that the process is gone.
 */

#include "daemon/serve/client.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/children/keeper_link.h"
#include "daemon/children/worker_jobs.h"
#include "daemon/serve/closer.h"
#include "daemon/serve/mates.h"
#include "ipc/base/lifeline.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

/* ---- life ------------------------------------------------------------------------------------ */

static void process_ended(struct loop_source *source, short revents);
static void quarantine_over(struct loop_timer *timer);

static void close_socket(struct client *c) {
        client_follow(c, NULL);
        rounds_leave(c);
        if (!c->end)
                turns_remove(&c->server->turns, &c->place);
        loop_remove(&c->socket);
        server_close_connection(c->server, c->socket.fd, c->may_bring_fds);
        c->socket.fd = -1;
}

static int watch_process(struct client *c) {
        c->process =
                (struct loop_source){.fd = c->peer.pidfd, .events = POLLIN, .ready = process_ended};
        return loop_add(c->server->loop, &c->process);
}

int client_make_lifeline(struct client *c, uint64_t process, int *writing) {
        int r = peer_make_lifeline(&c->peer, process, writing);

        if (r == 0)
                r = watch_process(c);
        c->closing = r < 0;
        return r;
}

int client_open(struct client *c, int fd, void (*ready)(struct loop_source *, short)) {
        int r;

        c->socket = (struct loop_source){.fd = fd, .events = POLLIN, .ready = ready};
        c->may_bring_fds = closer_is_needed(fd);
        c->connected_ns = sys_now_ns();
        r = peer_get(fd, &c->peer);
        if (r >= 0 && c->server->config->own_user_only && c->peer.uid != getuid())
                r = -EACCES;
        seats_belong(&c->server->seats, c);
        if (r >= 0 && c->peer.pidfd >= 0)
                r = watch_process(c);
        if (r >= 0)
                r = loop_add(c->server->loop, &c->socket);
        if (r < 0)
                client_end(c, false);
        else
                c->state = CLIENT_HALF_OPEN;
        return r;
}

/* Only the death of a client that used spaces is worth a line at level info. */
static void log_end(const struct client *c, bool died) {
        if (died && c->n_spaces)
                log_limited(LOG_INFO,
                            "client %u ('%s', process %d, user %u) of domain %s died: "
                            "its memory is taken back",
                            c->number, c->name, c->peer.pid, c->peer.uid,
                            domain_config(c->domain)->name);
        else
                log_debug("client %u ('%s', process %d, user %u) of domain %s left", c->number,
                          c->name, c->peer.pid, c->peer.uid, domain_config(c->domain)->name);
}

/*
 * All connections of a process end at the same time. Each is ended in a turn of its own, as if by a
 * request of its user, so that other users do not wait for all of them.
 */
static void in_its_turn(struct client *c, void (*end)(struct client *)) {
        c->end = end;
        turns_add(&c->server->turns, &c->place);
}

static void die(struct client *c) {
        client_end(c, true);
}

static void give_released(struct client *c) {
        for (uint32_t i = 0; i < CLIENT_SPACES; i++)
                if (c->spaces[i].attachment)
                        attachment_withhold(c->spaces[i].attachment, false);
}

/* What teammates have released is free once no dead process' GPU work can write it. */
static void let_mates_give(const struct client *c) {
        if (!mates_may_write(c))
                mates_each(c, give_released);
}

void client_end(struct client *c, bool died) {
        const struct client ended = *c;
        struct client *mate;

        if (c->state >= CLIENT_ATTACHED) {
                log_end(c, died);
                c->server->seats.n_attached--;
                c->user->n_attached--;
        }
        if (c->state == CLIENT_HALF_OPEN)
                seats_remove_half_open(&c->server->seats, c);
        if (c->n_spaces)
                loop_want_idle(c->server->loop);
        for (uint32_t i = 0; i < CLIENT_SPACES; i++)
                if (c->spaces[i].attachment)
                        attachment_free(c->spaces[i].attachment, died);
        close_socket(c);
        turns_remove(&c->server->turns, &c->place);
        free(c->late);
        loop_remove(&c->process);
        loop_timer_stop(&c->quarantine);
        closep(&c->peer.pidfd);
        if (c->n_spaces)
                shared_pages_watch_semaphores(&c->server->pages);
        seats_leave(&c->server->seats, c);
        let_mates_give(&ended);
        while ((mate = mates_without_team(&ended)))
                in_its_turn(mate, die);
}

static void orphan(struct client *c) {
        rounds_leave(c);
        c->state = CLIENT_ORPHANED;
        loop_want_idle(c->server->loop);
        for (uint32_t i = 0; i < CLIENT_SPACES; i++)
                if (c->spaces[i].attachment)
                        attachment_orphan(c->spaces[i].attachment);
}

bool client_ends(struct client *c) {
        void (*end)(struct client *) = c->end;

        c->end = NULL;
        if (end)
                end(c);
        return end;
}

void client_disconnect(struct client *c) {
        if (c->n_spaces == 0) {
                client_end(c, false);
                return;
        }
        log_debug("client %u ('%s', process %d) of domain %s closed its connection; its blocks are "
                  "kept until the process ends",
                  c->number, c->name, c->peer.pid, domain_config(c->domain)->name);
        orphan(c);
        close_socket(c);
}

static bool used_gpu(const struct client *c) {
        for (uint32_t i = 0; i < CLIENT_SPACES; i++)
                if (c->spaces[i].attachment &&
                    space_semaphore_fd(attachment_space(c->spaces[i].attachment)) >= 0)
                        return true;
        return false;
}

static void begin_quarantine(struct client *c) {
        c->quarantine.fire = quarantine_over;
        loop_timer_set(c->server->loop, &c->quarantine,
                       sys_now_ns() + c->server->config->quarantine_ms * UINT64_C(1000000) +
                               lifeline_delay_ns(c->peer.pidfd));
}

static bool is_held(const struct client *c) {
        struct pollfd p = {.fd = c->socket.fd};

        return p.fd >= 0 && sys->poll(&p, 1, 0) >= 0 && !(p.revents & (POLLHUP | POLLERR));
}

static bool any_of_process(const struct client *c, bool (*is)(const struct client *c)) {
        const struct seats *seats = &c->server->seats;

        for (uint32_t i = 0; i < seats->n; i++) {
                const struct client *it = &seats->clients[i];

                if (it->state >= CLIENT_ATTACHED && it->peer.process == c->peer.process && is(it))
                        return true;
        }
        return false;
}

/*
 * A child that the dead process forked has inherited its descriptors: those of the GPU, which keep
 * its queued work running, and its connections. A connection without a hangup is thus still open in
 * a child. All connections of the process are checked, since some may be newer than the fork. (It
 * would not be enough if libkvd closed the GPU's descriptors in the child: the inherited mappings
 * hold these files open, too.)
 */
static bool held_by_child(const struct client *c) {
        return any_of_process(c, is_held);
}

static void log_held(const struct client *c) {
        log_limited(
                LOG_INFO,
                "client %u ('%s', process %d, user %u) of domain %s died, and a process that it "
                "forked keeps its GPU work going: its blocks stay in quarantine",
                c->number, c->name, c->peer.pid, c->peer.uid, domain_config(c->domain)->name);
}

static void streams_end(struct client *c) {
        for (uint32_t i = 0; i < CLIENT_SPACES; i++)
                if (c->spaces[i].attachment)
                        attachment_streams_end(c->spaces[i].attachment);
        close_socket(c);
        let_mates_give(c);
        loop_want_idle(c->server->loop);
}

/*
 * A teammate may have filled the blocks that this client holds, and the other way round. So the
 * team's blocks are kept until the last quarantine of its processes is over.
 */
static void end_after_quarantine(struct client *c) {
        c->gone = c->n_spaces && mates_alive(c);
        if (c->gone)
                streams_end(c);
        else
                die(c);
}

/* Ends the client a whole quarantine after the last check that found a child with a connection. */
static void quarantine_over(struct loop_timer *timer) {
        struct client *c = container_of(timer, struct client, quarantine);
        bool was_held = c->held;

        c->held = held_by_child(c);
        if (c->held && !was_held)
                log_held(c);
        if (c->held || was_held)
                begin_quarantine(c);
        else
                in_its_turn(c, end_after_quarantine);
}

static void orphan_in_quarantine(struct client *c) {
        loop_remove(&c->socket); /* it stays open for is_held, but is not read */
        if (c->state == CLIENT_ATTACHED)
                orphan(c);
        begin_quarantine(c);
}

/*
 * Keeps the client's blocks, since a teammate may be using them. But what its streams have not
 * written, nobody need wait for.
 */
static void wait_for_team(struct client *c) {
        c->gone = true;
        if (used_gpu(c)) {
                orphan_in_quarantine(c);
                return;
        }
        if (c->state == CLIENT_ATTACHED)
                client_disconnect(c);
        let_mates_give(c);
}

/*
 * The kernel closes the GPU context of a process before it reports that the process is gone, but no
 * call reports when its last work has left the GPU. So blocks that it may have been writing or
 * reading are given to others only after a quarantine. A forked child keeps the context open, so
 * all connections of the process stay open meanwhile, to detect such a child.
 */
static void end_process(struct client *c) {
        if (c->n_spaces && mates_alive(c)) {
                wait_for_team(c);
                return;
        }
        if (c->state < CLIENT_ATTACHED || !any_of_process(c, used_gpu) ||
            !c->server->config->quarantine_ms) {
                client_end(c, true);
                return;
        }
        orphan_in_quarantine(c);
}

static void process_ended(struct loop_source *source, short revents) {
        struct client *c = container_of(source, struct client, process);

        loop_remove(source);
        in_its_turn(c, end_process);
}

/* ---- following ------------------------------------------------------------------------------- */

/* NULL: none, or the space was deleted. No other space gets its number. */
static struct space *followed_space(const struct client *c) {
        return c->followed ? store_space_by_number(c->server->store, c->followed - 1) : NULL;
}

void client_follow(struct client *c, struct space *space) {
        struct space *before = followed_space(c);

        if (before == space)
                return;
        if (before)
                space_follow(before, false);
        if (space)
                space_follow(space, true);
        c->followed = space ? space_number(space) + 1 : 0;
}

/* ---- spaces ---------------------------------------------------------------------------------- */

static_assert(CLIENT_SPACES <= 64, "a bit each, in one word");

static uint64_t bit_of(const struct client *c, const struct client_space *place) {
        return UINT64_C(1) << (place - c->spaces);
}

static void not_used(struct client *c, const struct client_space *place) {
        uint64_t others = ~bit_of(c, place);

        c->used &= others;
        c->rings &= others;
        c->told &= others;
}

static void space_gone(struct attachment *attachment) {
        struct client *c = attachment_owner(attachment);

        for (uint32_t i = 0; i < CLIENT_SPACES; i++)
                if (c->spaces[i].attachment == attachment) {
                        c->spaces[i].attachment = NULL; /* the handle stays, for -ESTALE */
                        not_used(c, &c->spaces[i]);
                }
        c->n_spaces--;
        if (c->state == CLIENT_ORPHANED && c->n_spaces == 0)
                client_end(c, false);
}

static struct client_space *find_handle(struct client *c, uint32_t handle) {
        struct client_space *s = &c->spaces[handle % CLIENT_SPACES];

        return handle && s->handle == handle ? s : NULL;
}

int client_find_space(struct client *c, uint32_t handle, struct attachment **ret) {
        struct client_space *s = find_handle(c, handle);

        if (!s)
                return client_refuse(c, -EBADF,
                                     "space handle %u is not of this connection; open the space",
                                     handle);
        if (!s->attachment)
                return client_refuse(c, -ESTALE, "space was deleted; open it again");
        *ret = s->attachment;
        return 0;
}

/* Prefers places without a handle, so that deleted spaces are remembered for long. */
static struct client_space *find_place(struct client *c) {
        struct client_space *place = NULL;

        for (uint32_t i = 0; i < CLIENT_SPACES; i++) {
                if (!c->spaces[i].handle && !c->spaces[i].attachment)
                        return &c->spaces[i];
                if (!c->spaces[i].attachment)
                        place = &c->spaces[i];
        }
        return place;
}

/*
 * Each attachment needs a pidfd that is an open file of its own, because systemd stores an open
 * file only once, whatever its names. If none can be opened, the attachment is kept all the same,
 * so that the next daemon notices that its process is missing.
 */
static int keep(const struct client *c, struct attachment *attachment) {
        _cleanup_(closep) int pidfd = -1;

        if (!c->server->keep || !keep_ops(c->server->keep))
                return 0;
        if (peer_pidfd(c->socket.fd, &c->peer, &pidfd) < 0)
                pidfd = -1;
        return attachment_keep(attachment, pidfd < 0 ? c->peer.pidfd : pidfd);
}

/*
 * A client that the keeper has no room for is refused: the next daemon would have to drop the
 * space.
 */
static int attach(struct client *c, struct space *space, struct attachment **ret) {
        int r = attachment_new(space, c, c->peer.process, space_gone, ret);

        if (r == 0)
                r = keep(c, *ret);
        if (r < 0)
                *ret = attachment_free(*ret, false);
        return r;
}

int client_make_way(struct client *c, struct domain *domain, const struct space *except,
                    int error) {
        int r = store_make_way(domain, except, error);

        return r == -EINPROGRESS ? CLIENT_LATER : client_store_failed(c, r);
}

int client_add_space(struct client *c, struct space *space, uint32_t *handle) {
        struct client_space *place = find_place(c);
        int r;

        if (!place)
                return client_refuse(c, -EMFILE,
                                     "a connection can use %u spaces at a time; close one",
                                     CLIENT_SPACES);
        r = attach(c, space, &place->attachment);
        if (r < 0)
                return client_make_way(c, space_domain(space), space, r);
        c->next_handle = c->next_handle % (UINT32_MAX / CLIENT_SPACES - 1) + 1;
        place->handle = c->next_handle * CLIENT_SPACES + (uint32_t)(place - c->spaces);
        c->n_spaces++;
        c->used |= bit_of(c, place);
        shared_pages_watch_pins(&c->server->pages);
        *handle = place->handle;
        return 0;
}

int client_remove_space(struct client *c, uint32_t handle) {
        struct client_space *s = find_handle(c, handle);

        if (!s)
                return client_refuse(c, -EBADF, "space handle %u is not of this connection",
                                     handle);
        if (s->attachment)
                attachment_take_posts(s->attachment);
        if (s->attachment && (attachment_pending(s->attachment) || mates_alive(c))) {
                /* its streams or teammates may still use the blocks */
                attachment_orphan(s->attachment);
                s->handle = 0;
                return 0;
        }
        if (s->attachment) {
                attachment_free(s->attachment, false);
                not_used(c, s);
                c->n_spaces--;
        }
        *s = (struct client_space){0};
        return 0;
}

/*
 * While the client is in the rounds, a ring that had posts is polled from now on (told), and the
 * client posts to it without messages. A ring without posts is not: its posts were taken before,
 * and the next one must send a message again.
 */
static bool take_ring(struct client *c, uint32_t place) {
        struct attachment *a = c->spaces[place].attachment;
        uint64_t bit = UINT64_C(1) << place;

        if (c->round.in && attachment_take_posts(a)) {
                c->told |= bit;
                return true;
        }
        return !(c->told & bit) && attachment_was_kicked(a);
}

/* Takes one ring only, since its posts may cost as much as a request. */
void client_take_ring(struct client *c) {
        bool taken = false;

        while (c->rings && !taken) {
                uint32_t place = (uint32_t)__builtin_ctzll(c->rings);

                c->rings &= c->rings - 1;
                taken = take_ring(c, place);
        }
}

/* ---- domains --------------------------------------------------------------------------------- */

struct client *client_by_number(const struct seats *seats, const struct domain *domain,
                                uint32_t number) {
        for (uint32_t i = 0; i < seats->n; i++) {
                struct client *c = &seats->clients[i];

                if (c->state >= CLIENT_ATTACHED && c->domain == domain && c->number == number)
                        return c;
        }
        return NULL;
}

bool client_sees(const struct client *c, const struct domain *domain) {
        return c->admin || c->domain == domain;
}

int client_find_domain(struct client *c, struct kvd_slice name, struct domain **ret) {
        char text[KVD_NAME_MAX + 1];

        *ret = c->domain;
        if (name.size == 0 || kvd_slice_is(name, domain_config(c->domain)->name))
                return 0;
        if (!c->admin)
                return client_refuse(c, -EPERM,
                                     "only administrators may name another domain; "
                                     "see admins in kvd.conf");
        *ret = store_domain_by_name(c->server->store, kvd_slice_copy(name, text, sizeof text));
        if (!*ret)
                return client_refuse(c, -ENOENT, "there is no domain '%s'", text);
        return 0;
}

int client_await_space(struct space *space) {
        return space_take_over(space) ? 0 : CLIENT_LATER;
}

int client_find_named(struct client *c, struct kvd_slice domain_name, struct kvd_slice name,
                      struct space **ret) {
        char text[KVD_NAME_MAX + 1];
        struct domain *domain;
        int r;

        r = client_find_domain(c, domain_name, &domain);
        if (r < 0)
                return r;
        *ret = space_by_name(domain, kvd_slice_copy(name, text, sizeof text));
        if (!*ret)
                return client_refuse(c, -ENOENT, "there is no space '%s' in domain '%s'", text,
                                     domain_config(domain)->name);
        return client_await_space(*ret);
}

/* ---- refusals -------------------------------------------------------------------------------- */

/* The text says what the daemon lacks; the error is -ENOMEM for all such resources. */
int client_store_failed(struct client *c, int error) {
        if (error == -EMFILE || error == -ENFILE || error == -ENOSYS || error == -ENODEV)
                error = -ENOMEM;
        return client_refuse(c, error, "%s", store_why(c->server->store));
}

/*
 * Refuses at once a request that only a worker can meet. Labels and scores are computed without a
 * request, so they are not refused.
 */
int client_needs_worker(struct client *c, const char *what) {
        if (worker_is_on(c->server->worker))
                return 0;
        return client_refuse(c, -EOPNOTSUPP,
                             "%s needs a worker, and this daemon runs none; see worker in kvd.conf",
                             what);
}
