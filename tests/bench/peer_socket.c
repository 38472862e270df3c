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

#define REQUEST_ROOM 65536u

struct table_slot {
        struct block_key key;
        uint64_t place, pad;
};

struct socket_peer {
        struct process process;
        uint64_t mask;
        struct table_slot *slots; /* in the child */
};

struct echo_peer {
        struct process process;
};

/* ---- lookup over a socket -------------------------------------------------------------------- */

static struct table_slot *slot_of(const struct socket_peer *peer, struct block_key key) {
        uint64_t i = key.lo & peer->mask;

        while (peer->slots[i].place && memcmp(&peer->slots[i].key, &key, sizeof key) != 0)
                i = (i + 1) & peer->mask;
        return &peer->slots[i];
}

static int fill_table(struct socket_peer *peer, uint64_t n_blocks) {
        peer->mask = pow2_up(2 * n_blocks) - 1;
        peer->slots = calloc(peer->mask + 1, sizeof *peer->slots);
        if (!peer->slots)
                return -ENOMEM;
        for (uint64_t i = 0; i < n_blocks; i++) {
                struct block_key key = block_key(i);

                *slot_of(peer, key) = (struct table_slot){.key = key, .place = i + 1};
        }
        return 0;
}

/* Keys in, places out, up to the first key that is missing. */
static size_t look_up(void *ctx, void *message, size_t n) {
        struct socket_peer *peer = ctx;
        struct block_key *keys = message;
        uint64_t *places = message;
        size_t n_keys = n / sizeof *keys, i;

        for (i = 0; i < n_keys; i++) {
                uint64_t place = slot_of(peer, keys[i])->place;

                if (!place)
                        break;
                places[i] = place;
        }
        return i * sizeof *places;
}

int socket_peer_new(uint64_t n_blocks, struct socket_peer **ret) {
        struct socket_peer *peer;
        int r;

        peer = calloc(1, sizeof *peer);
        if (!peer)
                return -ENOMEM;
        peer->process = NO_PROCESS;
        r = fill_table(peer, n_blocks);
        if (r >= 0)
                r = process_fork(look_up, peer, &peer->process);
        free(peer->slots);
        peer->slots = NULL;
        if (r < 0) {
                socket_peer_free(peer);
                return r;
        }
        *ret = peer;
        return 0;
}

struct socket_peer *socket_peer_free(struct socket_peer *peer) {
        if (peer)
                process_end(&peer->process);
        free(peer);
        return NULL;
}

int socket_peer_get(struct socket_peer *peer, const struct block_key *keys, uint32_t n) {
        uint64_t places[CHAIN_BLOCKS];
        ssize_t got;

        if (send(peer->process.fd, keys, n * sizeof *keys, MSG_NOSIGNAL) < 0)
                return -errno;
        got = recv(peer->process.fd, places, sizeof places, 0);
        return got < 0 ? -errno : (int)((size_t)got / sizeof *places);
}

/* ---- ping-pong ------------------------------------------------------------------------------- */

static char message[REQUEST_ROOM];

/* The first word of a request is the length of the answer. */
static size_t echo(void *ctx, void *request, size_t n) {
        uint32_t answer;

        memcpy(&answer, request, sizeof answer);
        return answer;
}

int echo_peer_new(struct echo_peer **ret) {
        struct echo_peer *peer;
        int r;

        peer = calloc(1, sizeof *peer);
        if (!peer)
                return -ENOMEM;
        r = process_fork(echo, NULL, &peer->process);
        if (r < 0) {
                free(peer);
                return r;
        }
        *ret = peer;
        return 0;
}

struct echo_peer *echo_peer_free(struct echo_peer *peer) {
        if (peer)
                process_end(&peer->process);
        free(peer);
        return NULL;
}

uint64_t echo_peer_cpu_ns(const struct echo_peer *peer) {
        return process_cpu_ns(&peer->process);
}

int echo_peer_tell(struct echo_peer *peer, size_t request_bytes, size_t answer_bytes) {
        uint32_t answer = (uint32_t)answer_bytes;

        if (request_bytes > sizeof message || answer_bytes > sizeof message ||
            request_bytes < sizeof answer)
                return -EMSGSIZE;
        memcpy(message, &answer, sizeof answer);
        return send(peer->process.fd, message, request_bytes, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

int echo_peer_hear(struct echo_peer *peer, size_t answer_bytes) {
        return recv(peer->process.fd, message, sizeof message, 0) == (ssize_t)answer_bytes ? 0 :
                                                                                             -EIO;
}

int echo_peer_ask(struct echo_peer *peer, size_t request_bytes, size_t answer_bytes) {
        int r = echo_peer_tell(peer, request_bytes, answer_bytes);

        return r < 0 ? r : echo_peer_hear(peer, answer_bytes);
}
