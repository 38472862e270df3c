/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_DEVICE_PEER_H
#define KVD_TESTS_DEVICE_PEER_H

/*
 * Processes that share a GPU's pool, on whatever driver libcuda.so.1 is (in the suite:
 * tests/gpu/fakecuda). Each test is a numbered play of a few of them; the one that directs it never
 * touches the driver, so that it may fork at any time. Failures end the test with a line: none of
 * these calls returns one.
 */

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "client/kvd_cuda.h"
#include "ipc/base/cuda.h"
#include "tests/lib/instance.h"

#define BT 16u
#define BLOCK_WORDS (2u * 2 * 2 * BT * 64) /* of the geometry below: 32 KiB, f32 */
#define BLOCK_BYTES (4u * BLOCK_WORDS)

extern const struct kvd_geometry geometry;

/* ---- the director ---------------------------------------------------------------------------- */

struct peer {
        pid_t pid;
        int to, from; /* pipes */
};

/* In the peer: where it is. */
struct role {
        const char *socket;
        int to, from;
};

/* settings: "NAME=value" of the environment, ended by NULL; may be NULL. */
struct peer peer_start(void (*play)(struct role *), const char *socket,
                       const char *const *settings);
void cue(struct peer *peer, char what);    /* tells it */
void expect(struct peer *peer, char what); /* waits for what it says */
void peer_end(struct peer *peer);          /* it must have ended well */
void peer_kill(struct peer *peer);         /* SIGKILL, and it is gone */

uint64_t now_ms(void);

/* of daemons to be started: as where descriptors of GPU memory cannot be had */
extern bool legacy_handles;

/*
 * A daemon on the GPU with 16 segments of 2 MiB, or otherwise as the settings say ("daemon.x=y",
 * ended by NULL).
 */
void start_daemon(struct instance *d, const char *const *settings);
void again_daemon(struct instance *d, const char *const *settings);
/* Clean, nothing left over but what is in the cache, and ended. */
void end_daemon(struct instance *d);
uint64_t evict_all(struct conn *conn); /* from space "s"; how many went */

/* ---- a peer ---------------------------------------------------------------------------------- */

void say(struct role *role, char what);
void hear(struct role *role, char what);

struct side {
        kvd *kvd;
        kvd_space *space;
        const struct kvd_cuda *cuda;
        struct kvd_place place;
        cu_stream stream;      /* of its own */
        uint32_t *words;       /* pinned host memory, of SIDE_BLOCKS blocks */
};
#define SIDE_BLOCKS 32u

void side_open(struct side *s, const char *socket, const char *space);
void side_close(struct side *s);
cu_stream make_stream(const struct side *s);
/* another thread's: its own stream, the same space */
void side_join(struct side *s, const struct side *other);
/* without a stream of its own */
void side_attach(struct side *s, const char *socket, const char *space);

/* Work put into the stream: a block full of one word; blocks of a pin to s->words. */
void put_fill(struct side *s, const struct kvd_block *block, uint32_t word);
void put_read(struct side *s, const struct kvd_pin *pin, const uint32_t *ids, uint32_t n);
void sync_stream(struct side *s);

/*
 * Between these, what is put into the stream becomes a graph's, as between cuStreamBeginCapture in
 * mode 0 (global), 1 or 2 and cuStreamEndCapture. Returns the number of its nodes; -1: somebody
 * broke the capture.
 */
void capture_begin(cu_stream stream, int mode);
int capture_end(cu_stream stream);

/* Tokens that begin with this one; what a block of them holds. */
void make_tokens(uint32_t first, uint32_t n_blocks, uint32_t *ret);
uint32_t word_of(uint32_t first, uint32_t block);
void alloc(struct side *s, uint32_t n, struct kvd_block *ret);

/* n blocks of the chain `first`, behind nothing, filled in the stream and sealed on it. */
void publish(struct side *s, uint32_t first, uint32_t n, struct kvd_pin *pin);
/* Looks it up: ids, and how many blocks. */
uint32_t find(struct side *s, uint32_t first, uint32_t n, struct kvd_pin *pin, uint32_t *ids);
/* Words of s->words that are not what they should be. */
uint64_t wrong_words(const struct side *s, uint32_t first, uint32_t n);

#define must(call) must_(#call, call)
int must_(const char *what, int r); /* not negative, or the test ends with kvd_error() */

#endif
