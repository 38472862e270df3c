/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A handle outlives its connections. When one is lost, the next call makes a new one and increments
 * the epoch, which tells each view whether its daemon is still at the other end.
 */

#include <errno.h>
#include <string.h>

#include "client/conn/forked.h"
#include "client/internal.h"
#include "ipc/base/sys.h"

static int make_fork_guard(struct kvd *handle) {
        uint32_t *page = forked_page_new();

        if (!page)
                return client_fail(-ENOMEM, "out of memory");
        *page = 1;
        handle->not_forked = page;
        return 0;
}

static int join(struct conn *conn, const uint8_t team[16]) {
        const struct kvd_msg_join request = {.team = {team, 16}};

        return conn_call_by(conn, deadline_ns(), KVD_MSG_join, &request, NULL, NULL);
}

int handle_lock(struct kvd *handle) {
        return deadline_lock(&handle->lock);
}

void handle_lock_again(struct kvd *handle) {
        pthread_mutex_lock(&handle->lock);
}

int handle_wait(struct kvd *handle) {
        return deadline_wait(&handle->changed, &handle->lock);
}

void handle_changed(struct kvd *handle) {
        pthread_cond_broadcast(&handle->changed);
}

/* A thread that posted while we held the lock could not wake the daemon, and has set kick. */
void handle_unlock(struct kvd *handle) {
        pthread_mutex_unlock(&handle->lock);
        while (unlikely(atomic_load(&handle->kick)) && pthread_mutex_trylock(&handle->lock) == 0) {
                if (atomic_exchange(&handle->kick, false) && conn_is_open(handle->conn))
                        conn_tell(handle->conn, KVD_MSG_post);
                pthread_mutex_unlock(&handle->lock);
        }
}

void handle_kick(struct kvd *handle) {
        atomic_store(&handle->kick, true);
        if (pthread_mutex_trylock(&handle->lock) == 0)
                handle_unlock(handle);
}

/* Joins the team before the daemon attaches a space of this process. */
int handle_connect(struct kvd *handle) {
        char name[KVD_NAME_MAX + 1];
        int r;

        if (conn_is_open(handle->conn)) {
                if (unlikely(atomic_load(&handle->later)))
                        later_send(handle);
                return 0;
        }
        handle->conn = conn_close(handle->conn);
        own_name(name);
        r = conn_open_by(handle->path, &handle->server, name, deadline_ns(), &handle->conn);
        if (r == 0 && handle->joined)
                r = join(handle->conn, handle->team);
        if (r < 0) {
                handle->conn = conn_close(handle->conn);
                /* only kvd_open: from other calls -ENOENT means that their object does not exist */
                return r == -ENOENT && handle->epoch ? -ECONNREFUSED : r;
        }
        handle->epoch++;
        return 0;
}

int kvd_join(struct kvd *handle, const uint8_t team[16]) {
        int r;

        if (handle_check(handle) < 0)
                return -ECHILD;
        r = handle_lock(handle);
        if (r < 0)
                return r;
        r = handle_connect(handle);
        if (r == 0)
                r = join(handle->conn, team);
        if (r == 0) {
                handle->joined = true;
                memcpy(handle->team, team, sizeof handle->team);
        }
        handle_unlock(handle);
        return r;
}

int handle_call(struct kvd *handle, uint32_t number, const void *request, void *reply,
                struct kvd_fds *fds) {
        return conn_call_by(handle->conn, deadline_ns(), number, request, reply, fds);
}

static void kvd_closep(struct kvd **handle) {
        *handle = kvd_close(*handle);
}

int kvd_open_expecting(const char *socket_path, const char *server_user, struct kvd **ret) {
        _cleanup_(kvd_closep) struct kvd *handle = sys->calloc(1, sizeof *handle);
        int r;

        deadline_begin();
        if (!handle)
                return client_fail(-ENOMEM, "out of memory");
        pthread_mutex_init(&handle->lock, NULL);
        deadline_cond_init(&handle->changed);
        atomic_init(&handle->users, 1);
        r = make_fork_guard(handle);
        if (r < 0)
                return r;
        r = server_user_find(server_user, &handle->server);
        if (r < 0)
                return r;
        if (socket_path) {
                handle->path = sys->calloc(1, strlen(socket_path) + 1);
                if (!handle->path)
                        return client_fail(-ENOMEM, "out of memory");
                strcpy(handle->path, socket_path);
        }
        r = handle_connect(handle);
        if (r < 0)
                return r;
        *ret = STEAL(handle);
        return 0;
}

int kvd_open(const char *socket_path, struct kvd **ret) {
        return kvd_open_expecting(socket_path, NULL, ret);
}

struct kvd *kvd_close(struct kvd *handle) {
        if (!handle || atomic_fetch_sub(&handle->users, 1) != 1)
                return NULL;
        handle->conn = conn_close(handle->conn);
        later_send(handle); /* only frees them: there is no connection */
        forked_page_free((void *)handle->not_forked);
        pthread_cond_destroy(&handle->changed);
        free(handle->path);
        free(handle);
        return NULL;
}
