/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_DEVICE_PEER_H
#define KVD_TESTS_DEVICE_PEER_H

/*
 * Processes that share a GPU's pool, with any driver as libcuda.so.1 (in the suite:
 * tests/gpu/fakecuda). Each test is a play of a few processes. The director of a play never uses
 * the driver, so that it may fork at any time. These calls do not return failures: a failure ends
 * the test with a line.
 */

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "client/kvd_cuda.h"
#include "ipc/base/cuda.h"
#include "tests/lib/instance.h"

#define BT 16u
#define BLOCK_WORDS (2u * 2 * 2 * BT * 64) /* for the geometry below: 32 KiB, f32 */
#define BLOCK_BYTES (4u * BLOCK_WORDS)

extern const struct kvd_geometry geometry;

/* ---- the director ---------------------------------------------------------------------------- */

struct peer {
        pid_t pid;
        int to, from; /* pipes */
};

/* A play's own process: the daemon's socket, and pipes to the director. */
struct role {
        const char *socket;
        int to, from;
};

/* settings: environment variables "NAME=value", ended by NULL; may be NULL. */
struct peer peer_start(void (*play)(struct role *), const char *socket,
                       const char *const *settings);
void cue(struct peer *peer, char what);    /* sends a letter to it */
void expect(struct peer *peer, char what); /* waits for this letter from it */
void peer_end(struct peer *peer);          /* waits for its end, which must be good */
void peer_kill(struct peer *peer);         /* SIGKILL, and waits for its end */

uint64_t now_ms(void);

/* daemons started from now on use legacy handles, as without descriptors of GPU memory */
extern bool legacy_handles;

/*
 * Starts a daemon on the GPU with 16 segments of 2 MiB, unless the settings ("daemon.x=y", ended by
 * NULL) change that.
 */
void start_daemon(struct instance *d, const char *const *settings);
void again_daemon(struct instance *d, const char *const *settings);
/* Checks that it is clean and that nothing is left but sealed blocks, and stops it. */
void end_daemon(struct instance *d);
uint64_t evict_all(struct conn *conn); /* from space "s"; returns how many */

/* ---- a peer ---------------------------------------------------------------------------------- */

void say(struct role *role, char what);
void hear(struct role *role, char what);

struct side {
        kvd *kvd;
        kvd_space *space;
        const struct kvd_cuda *cuda;
        struct kvd_place place;
        cu_stream stream; /* the side's own */
        uint32_t *words;  /* pinned host memory for SIDE_BLOCKS blocks */
};
#define SIDE_BLOCKS 32u

void side_open(struct side *s, const char *socket, const char *space);
void side_close(struct side *s);
cu_stream make_stream(const struct side *s);
/* for another thread: the same space, with a stream of its own */
void side_join(struct side *s, const struct side *other);
/* like side_open, without a stream */
void side_attach(struct side *s, const char *socket, const char *space);

/* Queue work on the stream: fill a block with one word; copy a pin's blocks to s->words. */
void put_fill(struct side *s, const struct kvd_block *block, uint32_t word);
void put_read(struct side *s, const struct kvd_pin *pin, const uint32_t *ids, uint32_t n);
void sync_stream(struct side *s);

/*
 * Capture the stream's work into a graph, as cuStreamBeginCapture in mode 0 (global), 1 or 2 and
 * cuStreamEndCapture do. capture_end returns the number of nodes, or -1 if the capture was broken.
 */
void capture_begin(cu_stream stream, int mode);
int capture_end(cu_stream stream);

/* The tokens of chain `first`, and the word that fills one of its blocks. */
void make_tokens(uint32_t first, uint32_t n_blocks, uint32_t *ret);
uint32_t word_of(uint32_t first, uint32_t block);
void alloc(struct side *s, uint32_t n, struct kvd_block *ret);

/* Fills n blocks of the chain `first` with the stream, and seals them on it. */
void publish(struct side *s, uint32_t first, uint32_t n, struct kvd_pin *pin);
/* Looks the chain up. Returns the number of blocks, and their ids. */
uint32_t find(struct side *s, uint32_t first, uint32_t n, struct kvd_pin *pin, uint32_t *ids);
/* The number of wrong words in s->words. */
uint64_t wrong_words(const struct side *s, uint32_t first, uint32_t n);

#define must(call) must_(#call, call)
int must_(const char *what, int r); /* ends the test with kvd_error() if r is negative */

#endif
