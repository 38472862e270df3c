/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The lowest possible cost of a daemon that is asked over a socket: a SEQPACKET pair, one message
 * each way. One server answers with meaningless bytes; the other looks keys up in an
 * open-addressing table, as a lookup daemon does.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "ipc/base/util.h"
#include "tests/bench/peers.h"

#define MESSAGE_ROOM 65536u

struct table_slot {
        struct block_key key;
        uint64_t place, pad;
};

struct socket_peer {
        struct peer peer;
        struct process process;
        uint64_t mask;
        struct table_slot *slots; /* in the child */
};

/* ---- lookup over a socket -------------------------------------------------------------------- */

static struct table_slot *slot_of(const struct socket_peer *socket, struct block_key key) {
        uint64_t i = key.lo & socket->mask;

        while (socket->slots[i].place && memcmp(&socket->slots[i].key, &key, sizeof key) != 0)
                i = (i + 1) & socket->mask;
        return &socket->slots[i];
}

/* Keys in, places out, up to the first key that is missing. */
static size_t look_up(void *ctx, void *message, size_t n) {
        struct socket_peer *socket = ctx;
        struct block_key *keys = message;
        uint64_t *places = message;
        size_t n_keys = n / sizeof *keys, i;

        for (i = 0; i < n_keys; i++) {
                uint64_t place = slot_of(socket, keys[i])->place;

                if (!place)
                        break;
                places[i] = place;
        }
        return i * sizeof *places;
}

/* Makes the table, and the process that has it. */
static int fill(struct peer *peer, uint64_t n_blocks) {
        struct socket_peer *socket = container_of(peer, struct socket_peer, peer);
        int r;

        socket->mask = pow2_up(2 * n_blocks) - 1;
        socket->slots = calloc(socket->mask + 1, sizeof *socket->slots);
        if (!socket->slots)
                return -ENOMEM;
        for (uint64_t i = 0; i < n_blocks; i++) {
                struct block_key key = block_key(i);

                *slot_of(socket, key) = (struct table_slot){.key = key, .place = i + 1};
        }
        r = process_fork(look_up, socket, &socket->process);
        free(socket->slots);
        return r;
}

static int run(struct peer *peer) {
        const struct process *process = &container_of(peer, struct socket_peer, peer)->process;
        uint64_t places[PEER_KEYS];
        ssize_t got;

        if (send(process->fd, peer->keys, peer->n * sizeof *peer->keys, MSG_NOSIGNAL) < 0)
                return -errno;
        got = recv(process->fd, places, sizeof places, 0);
        return got < 0 ? -errno : (int)((size_t)got / sizeof *places);
}

static void end(struct peer *peer) {
        struct socket_peer *socket = container_of(peer, struct socket_peer, peer);

        process_end(&socket->process);
        free(socket);
}

int socket_peer_new(struct peer **ret) {
        struct socket_peer *socket = calloc(1, sizeof *socket);

        if (!socket)
                return -ENOMEM;
        socket->peer = (struct peer){.name = "socket", .fill = fill, .run = run, .end = end};
        socket->process = NO_PROCESS;
        *ret = &socket->peer;
        return 0;
}

/* ---- ping-pong ------------------------------------------------------------------------------- */

/* The first word of a request is the length of the answer. */
static size_t echo(void *ctx, void *request, size_t n) {
        uint32_t answer;

        memcpy(&answer, request, sizeof answer);
        return answer;
}

int echo_start(struct process *ret) {
        return process_fork(echo, NULL, ret);
}

int echo_ask(const struct process *peer, size_t request_bytes, size_t answer_bytes) {
        static char message[MESSAGE_ROOM];
        uint32_t answer = (uint32_t)answer_bytes;

        memcpy(message, &answer, sizeof answer);
        if (send(peer->fd, message, request_bytes, MSG_NOSIGNAL) < 0)
                return -errno;
        return recv(peer->fd, message, sizeof message, 0) == (ssize_t)answer_bytes ? 0 : -EIO;
}
