/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What all verbs share: the connection, requests with their replies, and the choice of spaces,
 * clients and domains. A repeated verb (--watch) reconnects after the daemon was replaced.
 */

#include "ipc/base/text.h"
#include "tools/kvctl/kvctl.h"

#include <endian.h>
#include <errno.h>
#include <string.h>

#include "client/conn/conn.h"
#include "client/conn/deadline.h"
#include "client/kvd.h"

int kvctl_out_of_memory(struct kvctl *kvctl) {
        return kvctl_fail(kvctl, KVCTL_NO, -ENOMEM, "out of memory");
}

int kvctl_flush(struct kvctl *kvctl) {
        int r = kvd_flush_output(stdout);

        return r < 0 ? kvctl_fail(kvctl, KVCTL_NO, r, "cannot write: %s", strerror(-r)) : 0;
}

/* ---- the daemon ------------------------------------------------------------------------------ */

static const char *socket_path(const struct kvctl *kvctl) {
        bool given = args_has(&kvctl->args, FLAG_SOCKET);

        return conn_choose_path(given ? kvctl->args.text[FLAG_SOCKET] : NULL);
}

static int no_daemon(struct kvctl *kvctl, int error) {
        if (error == -ENOENT || error == -ECONNREFUSED)
                return kvctl_fail(kvctl, KVCTL_NO_DAEMON, error,
                                  "no daemon at %s; start one (\"systemctl start kvd@0\", or "
                                  "\"kvd --private DIR\"), or say where it is with --socket",
                                  socket_path(kvctl));
        return kvctl_fail(kvctl, KVCTL_NO_DAEMON, error, "%s", kvd_error());
}

/* All other errors of a call are refusals of the daemon. */
static bool is_lost(int error) {
        return error == -ECONNRESET || error == -ECONNREFUSED || error == -EPIPE ||
               error == -ETIMEDOUT || error == -EPROTO || error == -ENOTCONN;
}

void kvctl_hang_up(struct kvctl *kvctl) {
        kvctl->conn = conn_close(kvctl->conn);
}

/* Only administrators see other domains. For others, an empty list would be misleading. */
static int check_domain(struct kvctl *kvctl) {
        const struct kvd_msg_attach_reply *peer = conn_peer(kvctl->conn);
        struct kvd_msg_domain_info_reply info;
        uint32_t cursor = 0;
        int r;

        if (!args_has(&kvctl->args, FLAG_DOMAIN) ||
            kvd_slice_is(peer->domain, kvctl->args.text[FLAG_DOMAIN]))
                return 0;
        if (!peer->admin)
                return kvctl_fail(kvctl, KVCTL_NO, -EPERM,
                                  "only administrators may name another domain; yours is %.*s",
                                  (int)peer->domain.size, (const char *)peer->domain.data);
        r = kvctl_next_domain(kvctl, &cursor, &info);
        if (r == 0) /* not -ENOENT, which means the end of a list */
                return kvctl_fail(kvctl, KVCTL_NO, -EINVAL,
                                  "there is no domain '%s'; \"kvctl domain\" lists those there are",
                                  kvctl->args.text[FLAG_DOMAIN]);
        return MIN(r, 0);
}

static const char *stated_user(const struct kvctl *kvctl) {
        return args_has(&kvctl->args, FLAG_SERVER_USER) ? kvctl->args.text[FLAG_SERVER_USER] : NULL;
}

static uint64_t deadline(const struct kvctl *kvctl) {
        return kvctl->deadline_ns ?: deadline_from_now();
}

static int connect_once(struct kvctl *kvctl) {
        struct server_user user;
        int r;

        if (kvctl->conn)
                return 0;
        r = server_user_find(stated_user(kvctl), &user);
        if (r < 0)
                return kvctl_fail(kvctl, KVCTL_USAGE, r, "%s", kvd_error());
        r = conn_open_by(socket_path(kvctl), &user, "kvctl", deadline(kvctl), &kvctl->conn);
        return r < 0 ? no_daemon(kvctl, r) : check_domain(kvctl);
}

int kvctl_call(struct kvctl *kvctl, uint32_t number, const void *request, void *reply) {
        return kvctl_call_fds(kvctl, number, request, reply, NULL);
}

int kvctl_call_fds(struct kvctl *kvctl, uint32_t number, const void *request, void *reply,
                   struct kvd_fds *fds) {
        int r = connect_once(kvctl);

        if (r < 0)
                return r;
        r = conn_call_by(kvctl->conn, deadline(kvctl), number, request, reply, fds);
        if (r >= 0)
                return 0;
        if (!is_lost(r))
                return kvctl_fail(kvctl, KVCTL_NO, r, "%s", kvd_error());
        kvctl_hang_up(kvctl);
        return kvctl_fail(kvctl, KVCTL_NO_DAEMON, r, "%s", kvd_error());
}

int kvctl_next(struct kvctl *kvctl, uint32_t number, const void *request, void *reply) {
        int r = kvctl_call(kvctl, number, request, reply);

        if (r == -ENOENT && kvctl->exit != KVCTL_NO_DAEMON)
                return 0;
        return r < 0 ? r : 1;
}

/* ---- spaces and clients ---------------------------------------------------------------------- */

struct kvd_slice kvctl_domain(const struct kvctl *kvctl) {
        return kvd_slice_of(args_has(&kvctl->args, FLAG_DOMAIN) ? kvctl->args.text[FLAG_DOMAIN] :
                                                                  "");
}

static bool is_in_domain(const struct kvctl *kvctl, struct kvd_slice domain) {
        return !args_has(&kvctl->args, FLAG_DOMAIN) ||
               kvd_slice_is(domain, kvctl->args.text[FLAG_DOMAIN]);
}

int kvctl_next_space(struct kvctl *kvctl, uint32_t *cursor, struct kvd_msg_space_info_reply *ret) {
        int r;

        do {
                struct kvd_msg_space_info request = {.cursor = *cursor};

                r = kvctl_next(kvctl, KVD_MSG_space_info, &request, ret);
                if (r == 1)
                        *cursor = ret->next;
        } while (r == 1 && !is_in_domain(kvctl, ret->domain));
        return r;
}

int kvctl_next_client(struct kvctl *kvctl, uint32_t *cursor,
                      struct kvd_msg_client_info_reply *ret) {
        int r;

        do {
                struct kvd_msg_client_info request = {.cursor = *cursor};

                r = kvctl_next(kvctl, KVD_MSG_client_info, &request, ret);
                if (r == 1)
                        *cursor = ret->next;
        } while (r == 1 && !is_in_domain(kvctl, ret->domain));
        return r;
}

int kvctl_next_domain(struct kvctl *kvctl, uint32_t *cursor,
                      struct kvd_msg_domain_info_reply *ret) {
        int r;

        do {
                struct kvd_msg_domain_info request = {.cursor = *cursor};

                r = kvctl_next(kvctl, KVD_MSG_domain_info, &request, ret);
                if (r == 1)
                        *cursor = ret->next;
        } while (r == 1 && !is_in_domain(kvctl, ret->name));
        return r;
}

struct space_name space_name_of(const struct kvd_msg_space_info_reply *info) {
        struct space_name name = {0};

        kvd_slice_copy(info->name, name.name, sizeof name.name);
        kvd_slice_copy(info->domain, name.domain, sizeof name.domain);
        return name;
}

static int append(struct kvctl *kvctl, struct space_list *list, struct space_name name) {
        struct space_name *spaces = realloc(list->spaces, (list->n + 1) * sizeof *spaces);

        if (!spaces)
                return kvctl_out_of_memory(kvctl);
        list->spaces = spaces;
        list->spaces[list->n++] = name;
        return 0;
}

static int all_spaces(struct kvctl *kvctl, struct space_list *list) {
        struct kvd_msg_space_info_reply info;
        uint32_t cursor = 0;
        int r;

        while ((r = kvctl_next_space(kvctl, &cursor, &info)) == 1) {
                r = append(kvctl, list, space_name_of(&info));
                if (r < 0)
                        return r;
        }
        return r;
}

static int no_such_space(struct kvctl *kvctl, const struct space_list *all, const char *name) {
        struct kvd_nearest nearest = kvd_nearest_to(name);

        for (size_t i = 0; i < all->n; i++)
                kvd_consider(&nearest, all->spaces[i].name);
        if (nearest.name)
                return kvctl_fail(kvctl, KVCTL_NO, -ENOENT, "no space \"%s\"; did you mean \"%s\"?",
                                  name, nearest.name);
        return kvctl_fail(kvctl, KVCTL_NO, -ENOENT, "no space \"%s\"; \"kvctl spaces\" lists them",
                          name);
}

static bool is_own(const struct kvctl *kvctl, const struct space_name *space) {
        return kvd_slice_is(conn_peer(kvctl->conn)->domain, space->domain);
}

/*
 * Reduces the list to the space that the operand names: the one in the user's own domain, or else
 * the only one of that name.
 */
static int pick(struct kvctl *kvctl, struct space_list *list) {
        const char *name = kvctl->args.operand[0];
        struct space_name found;
        size_t n = 0;

        for (size_t i = 0; i < list->n; i++) {
                if (strcmp(list->spaces[i].name, name) != 0)
                        continue;
                found = list->spaces[i];
                n++;
                if (is_own(kvctl, &found)) {
                        n = 1;
                        break;
                }
        }
        if (n == 0)
                return no_such_space(kvctl, list, name);
        if (n > 1)
                return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL,
                                  "%zu domains have a space \"%s\"; say which with --domain", n,
                                  name);
        list->spaces[0] = found;
        list->n = 1;
        return 0;
}

int kvctl_spaces(struct kvctl *kvctl, struct space_list *ret) {
        int r = all_spaces(kvctl, ret);

        return r < 0 || !kvctl->args.n_operands ? r : pick(kvctl, ret);
}

int kvctl_space(struct kvctl *kvctl, struct space_name *ret) {
        _cleanup_(space_list_clear) struct space_list list = {0};
        int r = kvctl_spaces(kvctl, &list);

        if (r < 0)
                return r;
        if (list.n == 0)
                return kvctl_fail(
                        kvctl, KVCTL_NO, -ENOENT,
                        "there is no space yet; \"kvctl space create\" or an engine's first use makes one");
        if (list.n > 1)
                return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL,
                                  "there are %zu spaces; say which, as in \"kvctl %s %s\"", list.n,
                                  kvctl->args.verb->name, list.spaces[0].name);
        *ret = list.spaces[0];
        return 0;
}

uint64_t counter_at(struct kvd_slice counters, unsigned i) {
        uint64_t value = 0;

        if (counters.size >= (i + 1) * sizeof value)
                memcpy(&value, (const uint8_t *)counters.data + i * sizeof value, sizeof value);
        return le64toh(value);
}
