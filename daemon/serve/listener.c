/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Opens the socket that clients connect to.
 *
 * A socket file stays behind when its daemon is killed. Connecting to it shows whether a process
 * still listens: ECONNREFUSED means that none does. The folder is locked from that check until
 * bind, so that two daemons that start together do not remove each other's socket. Any user who can
 * read a folder can lock it, so the daemon waits for the lock only briefly, and then goes on
 * without it.
 */

#include "daemon/serve/listener.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>

#include "daemon/base/config.h"
#include "daemon/base/identity.h"
#include "ipc/address.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define BACKLOG 128

#define LINGER_MS 1000 /* longest wait for the socket of a killed daemon to disappear */

static int lock_folder(const char *path) {
        char folder[108];
        char *slash;
        int fd;

        snprintf(folder, sizeof folder, "%s", path);
        slash = strrchr(folder, '/');
        slash[slash == folder] = 0;
        fd = sys->open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        for (int i = 0; fd >= 0 && i < 2 * LINGER_MS / 10; i++) {
                if (sys->flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK)
                        break;
                usleep(10000);
        }
        return fd;
}

/* Is the listening process gone? Its socket may outlive it for a while (is_alive). */
static bool listener_is_dead(int fd) {
        struct ucred peer = {0};
        unsigned n = sizeof peer;

        return sys->getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) == 0 && peer.pid > 0 &&
               kill(peer.pid, 0) < 0 && errno == ESRCH;
}

/* 1: some process listens there; 0: none does. */
static int is_listening(const struct kvd_address *address) {
        _cleanup_(closep) int fd = sys->socket(AF_UNIX,
                                               SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

        if (fd < 0)
                return negative_errno();
        if (sys->connect(fd, kvd_address_of(address), address->size) == 0)
                return !listener_is_dead(fd);
        return errno != ECONNREFUSED && errno != ENOENT;
}

/*
 * The kernel tears down the io_uring of a killed process, and with it the socket, some time after
 * the process is gone. So this waits up to LINGER_MS for the socket to stop listening.
 */
static int is_alive(const struct kvd_address *address) {
        int r = is_listening(address);

        for (int i = 0; r == 1 && i < LINGER_MS / 20; i++) {
                usleep(20000);
                r = is_listening(address);
        }
        return r;
}

static int remove_stale(const char *path, const struct kvd_address *address, struct kvd_why *why) {
        struct stat st;
        int r;

        if (lstat(path, &st) < 0)
                return 0; /* no file, or bind will report the error */
        if (!S_ISSOCK(st.st_mode))
                return kvd_refuse(why, -EADDRINUSE, "%s: exists and is not a socket; move it away",
                                  path);
        if (st.st_uid != geteuid() && geteuid() != 0)
                return kvd_refuse(why, -EADDRINUSE,
                                  "%s: exists and belongs to user %u; use another path", path,
                                  st.st_uid);
        r = is_alive(address);
        if (r < 0)
                return kvd_refuse(why, r, "cannot create a socket: %s", strerror(-r));
        if (r)
                return kvd_refuse(why, -EADDRINUSE,
                                  "%s: another daemon serves this socket; stop it, or give this "
                                  "one another path with --socket or --instance",
                                  path);
        unlink(path);
        return 0;
}

/* The mode is set by the umask, so that it is never wider than that, even for a moment. */
static int bind_path(struct listener *l, const struct kvd_address *address, mode_t mode) {
        mode_t before = umask(~mode & 0777);
        int r = sys->bind(l->fd, kvd_address_of(address), address->size) < 0 ? negative_errno() : 0;

        umask(before);
        return r;
}

static int open_socket(struct listener *l, const char *path, const struct kvd_address *address,
                       mode_t mode, uid_t owner, gid_t group, struct kvd_why *why) {
        bool is_file = path[0] != '@';
        int r;

        l->fd = sys->socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (l->fd < 0)
                return kvd_refuse(why, negative_errno(), "cannot create a socket: %s",
                                  strerror(errno));
        r = bind_path(l, address, mode);
        if (r < 0)
                return kvd_refuse(why, r, "%s: cannot be bound: %s", path, strerror(-r));
        if (is_file && lstat(path, &l->file) == 0)
                memcpy(l->path, path, strlen(path));
        if (is_file && (owner & group) != UINT32_MAX && sys->lchown(path, owner, group) < 0)
                return kvd_refuse(
                        why, negative_errno(),
                        "%s: cannot be given to group %u: %s; add the daemon's user to it", path,
                        group, strerror(errno));
        if (sys->listen(l->fd, BACKLOG) < 0)
                return kvd_refuse(why, negative_errno(), "%s: cannot listen: %s", path,
                                  strerror(errno));
        return 0;
}

static int open_at(struct listener *listener, const char *path, mode_t mode, uid_t owner,
                   gid_t group, struct kvd_why *why) {
        _cleanup_(listener_close) struct listener l = LISTENER_NONE;
        _cleanup_(closep) int folder = -1;
        struct kvd_address address;
        int r;

        r = kvd_address_make(path, &address);
        if (r < 0)
                return kvd_refuse(why, r, "'%s' is not a socket path of at most 107 bytes", path);
        if (path[0] != '@') {
                folder = lock_folder(path);
                r = remove_stale(path, &address, why);
                if (r < 0)
                        return r;
        }
        r = open_socket(&l, path, &address, mode, owner, group, why);
        if (r < 0)
                return r;
        *listener = l;
        l = LISTENER_NONE;
        return 0;
}

/* Clients see the credentials of the process at its last listen(), so it listens again. */
static int become(struct listener *listener, const struct identity *who, struct kvd_why *why) {
        int r = identity_take(who, why);

        if (r < 0 || who->stays)
                return r;
        if (sys->listen(listener->fd, BACKLOG) < 0)
                return kvd_refuse(why, negative_errno(), "cannot listen: %s", strerror(errno));
        return 0;
}

int listener_open_as(struct listener *listener, const struct config *config,
                     const struct identity *who, struct kvd_why *why) {
        uid_t owner = who->stays ? UINT32_MAX : who->uid;
        gid_t group = config->socket_group;
        int r;

        if (group == UINT32_MAX && !who->stays)
                group = who->gid;
        r = open_at(listener, config->socket, config->socket_mode, owner, group, why);
        return r < 0 ? r : become(listener, who, why);
}

void listener_close(struct listener *listener) {
        struct stat now;

        if (listener->path[0] && lstat(listener->path, &now) == 0 &&
            now.st_ino == listener->file.st_ino && now.st_dev == listener->file.st_dev)
                unlink(listener->path); /* ours: its inode number is not reused while we listen */
        closep(&listener->fd);
        *listener = LISTENER_NONE;
}
