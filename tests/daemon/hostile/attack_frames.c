/* SPDX-License-Identifier: Apache-2.0 */

/* Malformed and unexpected messages. */

#include <errno.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/daemon/hostile/hostile.h"
#include "tests/daemon/hostile/raw.h"
#include "tests/lib/oracle.h"

/* ---- bombs ----------------------------------------------------------------------------------- */

static void send_and_see(const struct hostile *h, bool attached, const void *frame, size_t n) {
        int fd = attached ? raw_attach(h->daemon.socket) : raw_connect(h->daemon.socket);
        struct kvd_msg reply;

        if (raw_exchange(fd, frame, n, &reply) == 1 && reply.number != KVD_MSG_error)
                die("nonsense of %zu bytes was accepted as message %u", n, reply.number);
        close(fd);
}

static void bombs(const struct hostile *h) {
        static const struct {
                uint8_t bytes[16];
                size_t n;
        } rows[] = {{{0xdd, 0x1f, 0, 0, 0}, 5},
                    {{0xdf, 0xff, 0xff, 0xff, 0xff}, 5},
                    {{0xdd, 0xff, 0xff, 0xff, 0xff}, 5},
                    {{0xc6, 0xff, 0xff, 0xff, 0xff}, 5},
                    {{0xdb, 0x7f, 0xff, 0xff, 0xff}, 5},
                    {{0xc9, 0xff, 0xff, 0xff, 0xff, 1}, 6},
                    {{0x93, 1, 1, 0xdf, 0, 1, 0, 0}, 8},
                    {{0x93, 1, 1, 0x81, 0xdd, 0xff, 0xff, 0xff, 0xff}, 9},
                    {{0xc1}, 1},
                    {{0x93, 0xcf, 0xff, 0xff, 0xff, 0xff, 0xff}, 7}};
        static uint8_t deep[KVD_FRAME_MAX];

        memset(deep, 0x91, sizeof deep); /* arrays of one array */
        for (int i = 0; i < 2; i++) {
                for (uint32_t k = 0; k < ARRAY_SIZE(rows); k++)
                        send_and_see(h, i, rows[k].bytes, rows[k].n);
                send_and_see(h, i, deep, sizeof deep);
                memset(deep, 0x81, sizeof deep); /* and maps */
                send_and_see(h, i, deep, sizeof deep);
        }
}

/* ---- valid frames, corrupted ----------------------------------------------------------------- */

static uint32_t open_decoy(int fd) {
        struct kvd_msg request = victim_space_message(), reply;
        struct kvd_fds fds;

        request.space.name = kvd_slice_of("decoy0");
        if (raw_call(fd, &request, &reply, &fds) != 1 || reply.number != KVD_MSG_space_reply)
                die("the decoy cannot be opened");
        kvd_fds_close(&fds);
        return reply.space_reply.space;
}

#define N_SAMPLES 17u

/* Encodes one request of each kind, in order of their numbers. They concern only the decoy. */
static size_t sample(uint32_t number, uint32_t space, uint8_t *frame) {
        static const uint64_t refs[2] = {UINT64_C(1) << 32, UINT64_C(1) << 32 | 1};
        static const uint32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8};
        static const uint8_t key[16] = {1};
        struct kvd_slice decoy = kvd_slice_of("decoy0");
        struct kvd_msg m = {.number = number, .serial = 5};

        switch (number) {
        case KVD_MSG_attach: m.attach.protocol = KVD_PROTOCOL; break;
        case KVD_MSG_space:
                m = victim_space_message();
                m.space.name = decoy;
                break;
        case KVD_MSG_detach: m.detach.space = space; break;
        case KVD_MSG_segments: m.segments = (struct kvd_msg_segments){space, 1, 0}; break;
        case KVD_MSG_allocate: m.allocate = (struct kvd_msg_allocate){space, 2}; break;
        case KVD_MSG_release:
                m.release = (struct kvd_msg_release){space, {refs, sizeof refs}};
                break;
        case KVD_MSG_seal:
                m.seal = (struct kvd_msg_seal){.space = space,
                                               .parent = refs[0],
                                               .blocks = {refs, 16},
                                               .tokens = {tokens, sizeof tokens}};
                break;
        case KVD_MSG_lease: m.lease = (struct kvd_msg_lease){space, 1, {key, 16}, 9}; break;
        case KVD_MSG_evict: m.evict = (struct kvd_msg_evict){.space = decoy, .blocks = 3}; break;
        case KVD_MSG_space_set:
                m.space_set = (struct kvd_msg_space_set){.space = decoy,
                                                         .key = kvd_slice_of("policy"),
                                                         .value = kvd_slice_of("lru")};
                break;
        case KVD_MSG_space_delete:
                m.space_delete = (struct kvd_msg_space_delete){.space = decoy};
                break;
        case KVD_MSG_space_info: m.space_info.cursor = 1; break;
        case KVD_MSG_client_info: m.client_info.cursor = 1; break;
        case KVD_MSG_block_map:
                m.block_map = (struct kvd_msg_block_map){.space = decoy, .first = 3};
                break;
        case KVD_MSG_chain_info:
                m.chain_info = (struct kvd_msg_chain_info){.space = decoy, .cursor = 1};
                break;
        case KVD_MSG_check: m.check = (struct kvd_msg_check){.space = decoy, .cursor = 1}; break;
        default: break;
        }
        return (size_t)kvd_msg_encode(&m, frame, KVD_FRAME_MAX);
}

struct attacker {
        const char *socket;
        int fd;
        uint32_t space;
};

static void begin(struct attacker *a) {
        a->fd = raw_attach(a->socket);
        a->space = open_decoy(a->fd);
}

/* Sends the frame, and reconnects if that cost the connection. */
static void try_frame(struct attacker *a, const uint8_t *frame, size_t n) {
        struct kvd_msg reply;

        if (raw_exchange(a->fd, frame, n, &reply) == 1)
                return;
        close(a->fd);
        begin(a);
}

static void mutate_each_byte(const struct hostile *h, uint32_t number, uint32_t seed) {
        static uint8_t frame[KVD_FRAME_MAX], spoilt[KVD_FRAME_MAX];
        struct attacker a = {.socket = h->daemon.socket};
        struct random random = {seed};
        size_t n;

        begin(&a);
        n = sample(number, a.space, frame);
        for (size_t i = 0; i < n; i++) {
                memcpy(spoilt, frame, n);
                spoilt[i] ^= (uint8_t)(seed % 2 ? 1u << random_below(&random, 8) :
                                                  1 + random_below(&random, 255));
                try_frame(&a, spoilt, n);
        }
}

/*
 * Runs each attack in its own process, since the daemon keeps what a lost connection held until its
 * process ends.
 */
static void in_a_process(const struct hostile *h,
                         void (*run)(const struct hostile *, uint32_t, uint32_t), uint32_t a,
                         uint32_t b) {
        pid_t pid = fork();
        int status;

        if (pid == 0) {
                run(h, a, b);
                _exit(0);
        }
        waitpid(pid, &status, 0);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
                die("request %u, seed %u: the attacker ended with status %#x", a, b, status);
}

static void mutated(const struct hostile *h) {
        for (uint32_t number = 1; number <= N_SAMPLES; number++)
                for (uint32_t seed = 1; seed <= 8; seed++)
                        in_a_process(h, mutate_each_byte, number, seed);
}

static void cut_and_extended(const struct hostile *h) {
        static uint8_t frame[KVD_FRAME_MAX];
        struct attacker a = {.socket = h->daemon.socket};

        begin(&a);
        for (uint32_t number = 1; number <= N_SAMPLES; number++) {
                size_t n = sample(number, a.space, frame);

                for (size_t cut = 1; cut < n; cut += 3)
                        try_frame(&a, frame, cut);
                frame[n] = 0xc0;
                try_frame(&a, frame, n + 1);
        }
}

static void oversize(const struct hostile *h) {
        static uint8_t frame[KVD_FRAME_MAX + 4096];
        struct attacker a = {.socket = h->daemon.socket};
        size_t n;

        begin(&a);
        n = sample(KVD_MSG_seal, a.space, frame);
        memset(frame + n, 0, sizeof frame - n);
        try_frame(&a, frame, KVD_FRAME_MAX);
        try_frame(&a, frame, KVD_FRAME_MAX + 1);
        try_frame(&a, frame, sizeof frame);
}

/* Replies, errors and numbers that are no messages, sent as requests. */
static void not_requests(const struct hostile *h) {
        int fd = raw_attach(h->daemon.socket);
        struct kvd_msg reply;

        for (uint32_t number = 0; number < 300; number++) {
                uint8_t frame[] = {0x93, 0xcd, (uint8_t)(number >> 8), (uint8_t)number, 1, 0x80};

                if ((number >= 1 && number <= N_SAMPLES) || number == KVD_MSG_domain_info ||
                    number == KVD_MSG_post)
                        continue;
                if (raw_exchange(fd, frame, sizeof frame, &reply) != 1 ||
                    reply.number != KVD_MSG_error)
                        die("message %u was not refused", number);
        }
}

const struct attack_row frame_attacks[] = {{"msgpack bombs", bombs, 26},
                                           {"every request with each byte mutated", mutated, 64},
                                           {"requests cut short, and with a tail", cut_and_extended,
                                            64},
                                           {"frames of 64 KiB and more", oversize, 4},
                                           {"replies and unknown numbers as requests", not_requests,
                                            1},
                                           {0}};
