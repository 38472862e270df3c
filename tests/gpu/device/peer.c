/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/device/peer.h"

#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "ipc/base/util.h"

#define MAX_SETTINGS 24

const struct kvd_geometry geometry = {.layers = 2,
                                      .kv_heads = 2,
                                      .head_dim = 64,
                                      .block_tokens = BT,
                                      .dtype = KVD_F32,
                                      .vocab = 1u << 24};

bool legacy_handles;

uint64_t now_ms(void) {
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

int must_(const char *what, int r) {
        if (r < 0)
                die("%s: %s (%s)", what, strerror(-r), kvd_error());
        return r;
}

/* ---- talking --------------------------------------------------------------------------------- */

static void put(int fd, char what) {
        if (write(fd, &what, 1) != 1)
                die("the other side is gone when it should hear '%c'", what);
}

static void get(int fd, char what) {
        struct pollfd p = {fd, POLLIN, 0};
        char got;

        if (poll(&p, 1, PATIENCE_MS) != 1)
                die("nothing is said; '%c' was expected", what);
        if (read(fd, &got, 1) != 1)
                die("the other side is gone; '%c' was expected", what);
        if (got != what)
                die("'%c' is said; '%c' was expected", got, what);
}

void cue(struct peer *peer, char what) {
        put(peer->to, what);
}

void expect(struct peer *peer, char what) {
        get(peer->from, what);
}

void say(struct role *role, char what) {
        put(role->to, what);
}

void hear(struct role *role, char what) {
        get(role->from, what);
}

/* ---- peers ----------------------------------------------------------------------------------- */

struct peer peer_start(void (*play)(struct role *), const char *socket,
                       const char *const *settings) {
        struct peer peer;
        int down[2], up[2];

        signal(SIGPIPE, SIG_IGN);
        fflush(NULL);
        if (pipe(down) < 0 || pipe(up) < 0)
                die("pipe: %s", strerror(errno));
        peer.pid = fork();
        if (peer.pid == 0) {
                struct role role = {socket, up[1], down[0]};

                prctl(PR_SET_PDEATHSIG, SIGKILL);
                alarm(3 * PATIENCE_MS / 1000);
                close(down[1]);
                close(up[0]);
                for (; settings && *settings; settings++)
                        putenv((char *)*settings);
                play(&role);
                exit(0);
        }
        close(down[0]);
        close(up[1]);
        peer.to = down[1];
        peer.from = up[0];
        return peer;
}

static int gone(struct peer *peer) {
        int status;

        if (waitpid(peer->pid, &status, 0) != peer->pid)
                die("waitpid: %s", strerror(errno));
        close(peer->to);
        close(peer->from);
        return status;
}

void peer_end(struct peer *peer) {
        int status = gone(peer);

        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
                die("a process ended with status %#x", status);
}

void peer_kill(struct peer *peer) {
        kill(peer->pid, SIGKILL);
        gone(peer);
}

/* ---- the daemon ------------------------------------------------------------------------------ */

static void run_daemon(struct instance *in, const char *const *more,
                       void (*run)(struct instance *, const char *const *)) {
        const char *settings[MAX_SETTINGS] = {"daemon.backend=cuda", "daemon.pool=32M",
                                              "daemon.segment=2M", "daemon.quarantine_ms=100",
                                              "daemon.log=warning"};
        int n = 5;

        if (legacy_handles)
                settings[0] = "daemon.backend=cuda-legacy";
        while (more && *more && n < MAX_SETTINGS - 1)
                settings[n++] = *more++;
        run(in, settings);
}

void start_daemon(struct instance *in, const char *const *settings) {
        run_daemon(in, settings, instance_start);
}

void again_daemon(struct instance *in, const char *const *settings) {
        run_daemon(in, settings, instance_again);
}

static bool waits_for_streams(struct conn *conn) {
        struct kvd_msg_space_info request = {0};
        struct kvd_msg_space_info_reply info;

        for (; conn_call(conn, KVD_MSG_space_info, &request, &info) == 0;
             request.cursor = info.next)
                if (info.pending || info.poisoned)
                        return true;
        return false;
}

void end_daemon(struct instance *d) {
        struct conn *conn = instance_connect(d);

        WAIT_UNTIL(!waits_for_streams(conn));
        conn_close(conn);
        instance_end_clean(d);
}

uint64_t evict_all(struct conn *conn) {
        struct kvd_msg_evict request = {.space = kvd_slice_of("s")};
        struct kvd_msg_evict_reply reply;

        must(conn_call(conn, KVD_MSG_evict, &request, &reply));
        return reply.evicted;
}

/* ---- a side ---------------------------------------------------------------------------------- */

static void ok(const struct side *s, cu_result error, const char *what) {
        char text[128];

        if (error)
                die("%s: %s", what, kvd_cuda_why(s->cuda, error, text, sizeof text));
}
#define OK(s, call, ...) ok(s, (s)->cuda->call(__VA_ARGS__), #call)

void side_attach(struct side *s, const char *socket, const char *space) {
        const char *why = "";

        *s = (struct side){.cuda = kvd_cuda_load(&why)};
        if (!s->cuda)
                die("no driver: %s", why);
        must(kvd_open(socket, &s->kvd));
        must(kvd_space_open(s->kvd, space, &geometry, NULL, &s->space));
        must(kvd_space_place(s->space, &s->place));
        if (s->place.memory != KVD_MEMORY_CUDA)
                die("the space is not on a GPU");
}

cu_stream make_stream(const struct side *s) {
        cu_stream stream;

        OK(s, cuStreamCreateWithPriority, &stream, CU_STREAM_NON_BLOCKING, 0);
        return stream;
}

static void make_own(struct side *s) {
        cu_context context;

        OK(s, cuDevicePrimaryCtxRetain, &context, s->place.device);
        OK(s, cuCtxPushCurrent, context);
        s->stream = make_stream(s);
        OK(s, cuMemHostAlloc, (void **)&s->words, (size_t)SIDE_BLOCKS * BLOCK_BYTES,
           CU_HOST_PORTABLE);
}

void side_open(struct side *s, const char *socket, const char *space) {
        side_attach(s, socket, space);
        make_own(s);
}

void side_join(struct side *s, const struct side *other) {
        *s = *other;
        make_own(s);
}

void side_close(struct side *s) {
        s->space = kvd_space_close(s->space);
        s->kvd = kvd_close(s->kvd);
        if (s->stream)
                OK(s, cuStreamDestroy, s->stream);
}

void put_fill(struct side *s, const struct kvd_block *block, uint32_t word) {
        OK(s, cuMemsetD32Async, (cu_address)block->data, word, BLOCK_WORDS, s->stream);
}

void put_read(struct side *s, const struct kvd_pin *pin, const uint32_t *ids, uint32_t n) {
        if (n > SIDE_BLOCKS)
                die("a side reads %u blocks at most", SIDE_BLOCKS);
        for (uint32_t i = 0; i < n; i++)
                OK(s, cuMemcpyDtoHAsync, s->words + i * BLOCK_WORDS,
                   (cu_address)kvd_pin_block(pin, ids[i]), BLOCK_BYTES, s->stream);
}

/* A function of the driver that kvd itself does not use. */
static void *symbol(const char *name) {
        void *driver = dlopen("libcuda.so.1", RTLD_NOW), *at = driver ? dlsym(driver, name) : NULL;

        if (!at)
                die("the driver has no %s", name);
        return at;
}

void capture_begin(cu_stream stream, int mode) {
        cu_result (*begin)(cu_stream stream, int mode);
        cu_result error;

        *(void **)&begin = symbol("cuStreamBeginCapture_v2");
        error = begin(stream, mode);
        if (error)
                die("cuStreamBeginCapture: %d", error);
}

int capture_end(cu_stream stream) {
        cu_result (*end)(cu_stream stream, void **ret);
        cu_result (*get_nodes)(void *graph, void **nodes, size_t *n);
        cu_result (*destroy)(void *graph);
        void *graph = NULL;
        size_t n = 0;
        cu_result error;

        *(void **)&end = symbol("cuStreamEndCapture");
        *(void **)&get_nodes = symbol("cuGraphGetNodes");
        error = end(stream, &graph);
        if (error == CU_CAPTURE_INVALIDATED)
                return -1;
        *(void **)&destroy = symbol("cuGraphDestroy");
        if (error || get_nodes(graph, NULL, &n) || destroy(graph))
                die("cuStreamEndCapture: %d", error);
        return (int)n;
}

void sync_stream(struct side *s) {
        OK(s, cuStreamSynchronize, s->stream);
}

void make_tokens(uint32_t first, uint32_t n_blocks, uint32_t *ret) {
        for (uint32_t i = 0; i < n_blocks * BT; i++)
                ret[i] = (first << 12) + i;
}

/* Never a word of fresh or cleared memory. */
uint32_t word_of(uint32_t first, uint32_t block) {
        return (first << 12 | block << 1 | 1) * 2654435761u | 1;
}

void alloc(struct side *s, uint32_t n, struct kvd_block *ret) {
        for (uint32_t got = 0; got < n;)
                got += (uint32_t)must(kvd_alloc(s->space, n - got, ret + got));
}

void publish(struct side *s, uint32_t first, uint32_t n, struct kvd_pin *pin) {
        struct kvd_block blocks[SIDE_BLOCKS];
        uint32_t tokens[SIDE_BLOCKS * BT];

        make_tokens(first, n, tokens);
        alloc(s, n, blocks);
        for (uint32_t i = 0; i < n; i++)
                put_fill(s, &blocks[i], word_of(first, i));
        must(kvd_seal_on(s->space, pin, n, blocks, tokens, n * BT, s->stream));
}

uint32_t find(struct side *s, uint32_t first, uint32_t n, struct kvd_pin *pin, uint32_t *ids) {
        uint32_t tokens[SIDE_BLOCKS * BT];

        make_tokens(first, n, tokens);
        kvd_catch_up(s->space); /* may fail without a daemon: mapped blocks are still found */
        return (uint32_t)must((int)kvd_lookup(s->space, 0, tokens, n * BT, ids, n, pin)) / BT;
}

uint64_t wrong_words(const struct side *s, uint32_t first, uint32_t n) {
        uint64_t wrong = 0;

        for (uint32_t i = 0; i < n; i++)
                for (uint32_t k = 0; k < BLOCK_WORDS; k++)
                        wrong += s->words[i * BLOCK_WORDS + k] != word_of(first, i);
        return wrong;
}
