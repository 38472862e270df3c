/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Redis over a Unix socket, with a raw client: a request is put together before the clock starts,
 * and the size of the right answer is known, so that only one write and the reads are timed.
 * hiredis takes 1.5 to 2 times as long.
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
#include "tests/bench/harness.h"
#include "tests/bench/peers.h"

#define FILL_BATCH 512u
#define ANSWER_ROOM 16384u
#define NUMBER_ROOM 32u

struct redis_peer {
        struct process server;
        int fd;
        enum redis_form form;
        uint32_t n_keys;
        char *request;
        size_t request_bytes, request_room;
        char answer[ANSWER_ROOM];
        char *value; /* of redis_peer_read */
        size_t value_room;
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

static void add_bytes(struct redis_peer *peer, const void *bytes, size_t n) {
        memcpy(peer->request + peer->request_bytes, bytes, n);
        peer->request_bytes += n;
}

static void add_header(struct redis_peer *peer, char kind, size_t n) {
        peer->request_bytes += (size_t)sprintf(peer->request + peer->request_bytes, "%c%zu\r\n",
                                               kind, n);
}

static void add_string(struct redis_peer *peer, const void *string, size_t n) {
        add_header(peer, '$', n);
        add_bytes(peer, string, n);
        add_bytes(peer, "\r\n", 2);
}

static void add_command(struct redis_peer *peer, const char *name, size_t arguments) {
        add_header(peer, '*', 1 + arguments);
        add_string(peer, name, strlen(name));
}

static void add_request(struct redis_peer *peer, const struct block_key *keys, const void *value,
                        size_t bytes) {
        const char *together = peer->form == REDIS_EXISTS ? "EXISTS" : "MGET";
        bool apart = peer->form == REDIS_PIPELINE || peer->form == REDIS_SET;

        if (!apart)
                add_command(peer, together, peer->n_keys);
        for (uint32_t i = 0; i < peer->n_keys; i++) {
                if (apart)
                        add_command(peer, peer->form == REDIS_SET ? "SET" : "EXISTS",
                                    peer->form == REDIS_SET ? 2 : 1);
                add_string(peer, &keys[i], sizeof keys[i]);
                if (peer->form == REDIS_SET)
                        add_string(peer, value, bytes);
        }
}

int redis_peer_prepare(struct redis_peer *peer, enum redis_form form, const struct block_key *keys,
                       uint32_t n, const void *value, size_t bytes) {
        size_t room = (size_t)(n + 1) * (bytes + sizeof *keys + 4 * NUMBER_ROOM);
        int r;

        r = room_for(&peer->request, &peer->request_room, room);
        if (r < 0)
                return r;
        peer->form = form;
        peer->n_keys = n;
        peer->request_bytes = 0;
        add_request(peer, keys, value, bytes);
        return 0;
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

/* Bytes of the answer if all keys are there. */
static size_t answer_bytes(const struct redis_peer *peer) {
        switch (peer->form) {
        case REDIS_PIPELINE:
                return peer->n_keys * strlen(":1\r\n");
        case REDIS_EXISTS:
                return (size_t)snprintf(NULL, 0, ":%u\r\n", peer->n_keys);
        case REDIS_MGET:
                return (size_t)snprintf(NULL, 0, "*%u\r\n", peer->n_keys) +
                       peer->n_keys * (strlen("$16\r\n\r\n") + PEER_VALUE_BYTES);
        case REDIS_SET:
                return peer->n_keys * strlen("+OK\r\n");
        }
        return 0;
}

/* The number of keys that were found, according to the answer, which has the right size. */
static int answer_count(const struct redis_peer *peer) {
        int found = 0;

        if (peer->form == REDIS_EXISTS)
                return atoi(peer->answer + 1);
        if (peer->form != REDIS_PIPELINE)
                return (int)peer->n_keys;
        for (uint32_t i = 0; i < peer->n_keys; i++)
                found += peer->answer[i * strlen(":1\r\n") + 1] == '1';
        return found;
}

int redis_peer_ask(struct redis_peer *peer) {
        size_t expected = answer_bytes(peer);
        int r;

        if (expected > sizeof peer->answer)
                return -EMSGSIZE;
        r = write_all(peer->fd, peer->request, peer->request_bytes);
        if (r >= 0)
                r = read_all(peer->fd, peer->answer, expected);
        return r < 0 ? r : answer_count(peer);
}

int redis_peer_read(struct redis_peer *peer, struct block_key key, size_t bytes, uint64_t *sum) {
        size_t header = (size_t)snprintf(NULL, 0, "$%zu\r\n", bytes),
               total = header + bytes + strlen("\r\n");
        int r;

        r = room_for(&peer->value, &peer->value_room, total);
        if (r < 0 || (r = room_for(&peer->request, &peer->request_room, 4 * NUMBER_ROOM)) < 0)
                return r;
        peer->request_bytes = 0;
        add_command(peer, "GET", 1);
        add_string(peer, &key, sizeof key);
        r = write_all(peer->fd, peer->request, peer->request_bytes);
        if (r >= 0)
                r = read_all(peer->fd, peer->value, total);
        if (r < 0)
                return r;
        *sum += sum_bytes(peer->value + header, bytes);
        return 1;
}

/* ---- server ---------------------------------------------------------------------------------- */

static int connect_to(const char *path) {
        struct sockaddr_un address = {.sun_family = AF_UNIX};
        struct timeval timeout = {.tv_sec = 60};
        int fd;

        if (strlen(path) >= sizeof address.sun_path)
                return -ENAMETOOLONG;
        strcpy(address.sun_path, path);
        fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0)
                return -errno;
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
        if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0) {
                int r = -errno;

                close(fd);
                return r;
        }
        return fd;
}

static int connect_when_ready(const char *path) {
        int fd = -ENOENT;

        for (int i = 0; i < 6000 && fd < 0; i++) {
                nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
                fd = connect_to(path);
        }
        return fd;
}

static int start_server(struct redis_peer *peer, const char *dir) {
        char path[512], log[512];
        char *argv[] = {"redis-server", "--port", "0",     "--unixsocket", path, "--save", "",
                        "--appendonly", "no",     "--dir", (char *)dir,    NULL};
        int r;

        snprintf(path, sizeof path, "%s/redis.sock", dir);
        snprintf(log, sizeof log, "%s/redis.log", dir);
        r = process_start(argv, log, &peer->server);
        if (r < 0)
                return r;
        peer->fd = connect_when_ready(path);
        return MIN(peer->fd, 0);
}

int redis_peer_new(const char *dir, struct redis_peer **ret) {
        struct redis_peer *peer;
        int r;

        if (system("command -v redis-server >/dev/null 2>&1") != 0)
                return -ENOSYS;
        peer = calloc(1, sizeof *peer);
        if (!peer)
                return -ENOMEM;
        peer->fd = -1;
        peer->server = NO_PROCESS;
        r = start_server(peer, dir);
        if (r < 0) {
                redis_peer_free(peer);
                return r;
        }
        *ret = peer;
        return 0;
}

struct redis_peer *redis_peer_free(struct redis_peer *peer) {
        if (!peer)
                return NULL;
        if (peer->fd >= 0)
                close(peer->fd);
        process_end(&peer->server);
        free(peer->request);
        free(peer->value);
        free(peer);
        return NULL;
}

int redis_peer_fill(struct redis_peer *peer, uint64_t n_blocks) {
        struct block_key keys[FILL_BATCH];
        char value[PEER_VALUE_BYTES] = "a block's place";

        for (uint64_t done = 0; done < n_blocks;) {
                uint32_t n = (uint32_t)MIN(n_blocks - done, (uint64_t)FILL_BATCH);
                int r;

                for (uint32_t i = 0; i < n; i++)
                        keys[i] = block_key(done + i);
                r = redis_peer_prepare(peer, REDIS_SET, keys, n, value, sizeof value);
                if (r < 0 || (r = redis_peer_ask(peer)) < 0)
                        return r;
                done += n;
        }
        process_settle(&peer->server);
        return 0;
}
