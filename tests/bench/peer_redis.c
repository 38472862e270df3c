/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Redis over a Unix socket, with a raw client: a request is put together before the clock starts,
 * and the size of the right answer is known, so that only one write and the reads are timed.
 * hiredis takes 1.5 to 2 times as long. Keys are looked up by one EXISTS with all of them, which is
 * faster than a pipeline or MGET.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>

#include "ipc/base/util.h"
#include "tests/bench/peers.h"

#define NUMBER_ROOM 32u

struct redis_peer {
        struct peer peer;
        struct process server;
        int fd;
        char *request, *answer;
        size_t request_bytes, request_room, answer_bytes, answer_room;
};

/* ---- request --------------------------------------------------------------------------------- */

static int room_for(char **buffer, size_t *room, size_t bytes) {
        char *larger;

        if (bytes <= *room)
                return 0;
        larger = realloc(*buffer, bytes);
        if (!larger)
                return -ENOMEM;
        *buffer = larger;
        *room = bytes;
        return 0;
}

static void add_header(struct redis_peer *redis, char kind, size_t n) {
        redis->request_bytes += (size_t)sprintf(redis->request + redis->request_bytes, "%c%zu\r\n",
                                                kind, n);
}

static void add_string(struct redis_peer *redis, const void *string, size_t n) {
        add_header(redis, '$', n);
        memcpy(redis->request + redis->request_bytes, string, n);
        memcpy(redis->request + redis->request_bytes + n, "\r\n", 2);
        redis->request_bytes += n + 2;
}

static void add_command(struct redis_peer *redis, const char *name, size_t arguments) {
        add_header(redis, '*', 1 + arguments);
        add_string(redis, name, strlen(name));
}

static void add_request(struct redis_peer *redis) {
        const struct peer *peer = &redis->peer;

        if (peer->verb != PEER_PUT)
                add_command(redis, peer->verb == PEER_FIND ? "EXISTS" : "GET", peer->n);
        for (uint32_t i = 0; i < peer->n; i++) {
                if (peer->verb == PEER_PUT)
                        add_command(redis, "SET", 2);
                add_string(redis, &peer->keys[i], sizeof peer->keys[i]);
                if (peer->verb == PEER_PUT)
                        add_string(redis, peer->value, peer->bytes);
        }
}

/* Bytes of the answer if all keys are found, or stored. Reads are of one key. */
static size_t answer_to(const struct peer *peer) {
        switch (peer->verb) {
        case PEER_FIND: return (size_t)snprintf(NULL, 0, ":%u\r\n", peer->n);
        case PEER_READ: return (size_t)snprintf(NULL, 0, "$%zu\r\n\r\n", peer->bytes) + peer->bytes;
        case PEER_PUT: return peer->n * strlen("+OK\r\n");
        }
        return 0;
}

static int prepare(struct peer *peer) {
        struct redis_peer *redis = container_of(peer, struct redis_peer, peer);
        size_t value = peer->verb == PEER_PUT ? peer->bytes : 0;
        int r;

        redis->request_bytes = 0;
        redis->answer_bytes = answer_to(peer);
        r = room_for(&redis->request, &redis->request_room,
                     (peer->n + 1) * (value + sizeof *peer->keys + 4 * NUMBER_ROOM));
        if (r >= 0)
                r = room_for(&redis->answer, &redis->answer_room, redis->answer_bytes + 1);
        if (r >= 0)
                add_request(redis);
        return r;
}

/* ---- question and answer --------------------------------------------------------------------- */

static int write_all(int fd, const char *bytes, size_t n) {
        while (n) {
                ssize_t done = send(fd, bytes, n, MSG_NOSIGNAL);

                if (done <= 0)
                        return -EIO;
                bytes += done;
                n -= (size_t)done;
        }
        return 0;
}

/* An error answer is shorter than a right one; the socket's receive timeout then ends the read. */
static int read_all(int fd, char *to, size_t n) {
        while (n) {
                ssize_t done = recv(fd, to, n, 0);

                if (done <= 0)
                        return -EIO;
                to += done;
                n -= (size_t)done;
        }
        return 0;
}

static int run(struct peer *peer) {
        struct redis_peer *redis = container_of(peer, struct redis_peer, peer);
        int r = write_all(redis->fd, redis->request, redis->request_bytes);

        if (r >= 0)
                r = read_all(redis->fd, redis->answer, redis->answer_bytes);
        if (r < 0)
                return r;
        redis->answer[redis->answer_bytes] = 0;
        if (peer->verb == PEER_FIND)
                return atoi(redis->answer + 1);
        if (peer->verb == PEER_READ)
                peer->sum += sum_bytes(redis->answer, redis->answer_bytes);
        return (int)peer->n;
}

static int fill(struct peer *peer, uint64_t n_blocks) {
        struct redis_peer *redis = container_of(peer, struct redis_peer, peer);
        int r = 0;

        peer->verb = PEER_PUT;
        peer->value = PEER_VALUE;
        peer->bytes = sizeof PEER_VALUE;
        for (uint64_t done = 0; done < n_blocks && r >= 0; done += peer->n) {
                peer->n = (uint32_t)MIN(n_blocks - done, (uint64_t)PEER_KEYS);
                for (uint32_t i = 0; i < peer->n; i++)
                        peer->keys[i] = block_key(done + i);
                r = prepare(peer);
                if (r >= 0)
                        r = run(peer);
        }
        process_settle(&redis->server);
        return r;
}

/* ---- server ---------------------------------------------------------------------------------- */

static int connect_to(const char *path) {
        struct sockaddr_un address = {.sun_family = AF_UNIX};
        struct timeval timeout = {.tv_sec = 60};
        _cleanup_(closep) int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

        if (fd < 0)
                return -errno;
        if (strlen(path) >= sizeof address.sun_path)
                return -ENAMETOOLONG;
        strcpy(address.sun_path, path);
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
        if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0)
                return -errno;
        return STEAL_FD(fd);
}

static int start_server(struct redis_peer *redis, const char *dir) {
        char path[512], log[512];
        char *argv[] = {"redis-server", "--port", "0",     "--unixsocket", path, "--save", "",
                        "--appendonly", "no",     "--dir", (char *)dir,    NULL};
        int r;

        snprintf(path, sizeof path, "%s/redis.sock", dir);
        snprintf(log, sizeof log, "%s/redis.log", dir);
        r = process_start(argv, log, &redis->server);
        if (r < 0)
                return r;
        for (int i = 0; i < 6000 && redis->fd < 0; i++) {
                nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
                redis->fd = connect_to(path);
        }
        return MIN(redis->fd, 0);
}

static void end(struct peer *peer) {
        struct redis_peer *redis = container_of(peer, struct redis_peer, peer);

        if (redis->fd >= 0)
                close(redis->fd);
        process_end(&redis->server);
        free(redis->request);
        free(redis->answer);
        free(redis);
}

int redis_peer_new(const char *dir, struct peer **ret) {
        struct redis_peer *redis;
        int r;

        if (system("command -v redis-server >/dev/null 2>&1") != 0)
                return -ENOSYS;
        redis = calloc(1, sizeof *redis);
        if (!redis)
                return -ENOMEM;
        *redis = (struct redis_peer){.server = NO_PROCESS, .fd = -1};
        redis->peer = (struct peer){.name = "redis",
                                    .fill = fill,
                                    .prepare = prepare,
                                    .run = run,
                                    .end = end};
        r = start_server(redis, dir);
        if (r < 0)
                end(&redis->peer);
        else
                *ret = &redis->peer;
        return r;
}
