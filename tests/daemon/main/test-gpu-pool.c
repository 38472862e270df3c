/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A daemon whose pool is on a GPU, with the stand-in driver, whose fresh memory is full of 0xa5,
 * not zeros. Clients are connections of this process that map segments as libkvd does.
 */

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/kvd.h"
#include "ipc/base/device.h"
#include "ipc/base/layout.h"
#include "ipc/base/util.h"
#include "tests/lib/amount.h"
#include "tests/lib/peer.h"
#include "tests/lib/suite.h"

#define MSG(name, ...) ((struct kvd_msg){.number = KVD_MSG_##name, .name = {__VA_ARGS__}})
#define BLOCK (UINT64_C(1) << 20)
#define POOL_BLOCKS 64u

static const char *const by_handle[] = {"daemon.backend=cuda-legacy", "domain a.client_quota=1T",
                                        "domain b.client_quota=1T", NULL};
static const char *const on_gpu[] = {"daemon.backend=cuda", "domain a.client_quota=1T",
                                     "domain b.client_quota=1T", NULL};

static struct instance in;

/* ---- a client -------------------------------------------------------------------------------- */

struct user {
        struct peer_end *peer;
        uint32_t handle;
        const struct kvd_index *ix;
        struct kvd_device device;
        cu_address base;
        bool mapped[KVD_MAX_SEGMENTS];
        kvd_ref refs[POOL_BLOCKS];
        uint32_t n;
};

static struct user *user_open(const char *domain) {
        struct user *u = calloc(1, sizeof *u);
        struct cu_uuid uuid;
        struct kvd_msg reply;
        void *at;

        u->peer = peer_attach(in.socket);
        reply = peer_ok(u->peer,
                        MSG(space, .name = kvd_slice_of("s"), .domain = kvd_slice_of(domain),
                            .create = 1, .layers = 32, .kv_heads = 4, .head_dim = 128,
                            .dtype = KVD_F16, .vocab = 1000));
        u->handle = reply.space_reply.space;
        at = mmap(NULL, reply.space_reply.index_bytes, PROT_READ, MAP_SHARED, u->peer->fds.fd[0],
                  0);
        ck_assert_ptr_ne(at, MAP_FAILED);
        u->ix = at;
        ck_assert_int_eq(kvd_index_validate(u->ix, reply.space_reply.index_bytes), 0);
        ck_assert_uint_eq(u->ix->block_bytes, BLOCK);
        memcpy(&uuid, u->ix->devices[0], sizeof uuid);
        ck_assert_msg(kvd_device_open(&u->device, &uuid) == 0, "%s", u->device.why);
        if (u->ix->backend == KVD_BACKEND_VMM)
                ck_assert_int_eq(kvd_device_reserve(&u->device,
                                                    u->ix->max_segments * u->ix->segment_bytes,
                                                    &u->base),
                                 0);
        return u;
}

static cu_address segment_at(const struct user *u, uint32_t segment) {
        return u->base + segment * u->ix->segment_bytes;
}

static void unmap(struct user *u, uint32_t segment) {
        ck_assert(u->mapped[segment]);
        ck_assert_int_eq(kvd_device_unmap(&u->device, segment_at(u, segment), u->ix->segment_bytes),
                         0);
        u->mapped[segment] = false;
}

static void user_leave(struct user *u) {
        if (u->ix->backend == KVD_BACKEND_LEGACY && u->base)
                kvd_device_close_handle(&u->device, u->base);
        for (uint32_t i = 0; u->ix->backend == KVD_BACKEND_VMM && i < u->ix->max_segments; i++)
                if (u->mapped[i])
                        unmap(u, i);
        if (u->ix->backend == KVD_BACKEND_VMM)
                kvd_device_unreserve(&u->device, u->base,
                                     u->ix->max_segments * u->ix->segment_bytes);
        kvd_device_close(&u->device);
        free(u);
}

static void user_close(struct user *u) {
        struct peer_end *peer = u->peer;
        uint32_t handle = u->handle;

        user_leave(u);
        peer_ok(peer, MSG(detach, handle));
        peer_close(peer);
}

static void map_one(struct user *u, uint32_t segment, int fd) {
        if (u->mapped[segment])
                return;
        ck_assert_msg(kvd_device_map(&u->device, segment_at(u, segment), u->ix->segment_bytes, fd,
                                     true) == 0,
                      "%s", u->device.why);
        u->mapped[segment] = true;
}

/* Maps the segment, and all others that come in the same reply. */
static void map(struct user *u, uint32_t segment) {
        struct kvd_msg_segments_reply m;
        uint32_t fd = 0;

        if (u->mapped[segment])
                return;
        m = peer_ok(u->peer, MSG(segments, u->handle, segment, 0)).segments_reply;
        ck_assert_uint_ge(m.count, 1);
        ck_assert_uint_eq(m.absent & 1, 0);
        if (m.handles.size) {
                struct cu_ipc_handle handle;

                ck_assert_uint_eq(m.handles.size, sizeof handle);
                memcpy(&handle, m.handles.data, sizeof handle);
                ck_assert_int_eq(kvd_device_open_handle(&u->device, &handle, &u->base), 0);
                u->mapped[0] = true;
                return;
        }
        for (uint32_t i = 0; i < m.count; i++)
                if (!(m.absent >> i & 1))
                        map_one(u, segment + i, u->peer->fds.fd[fd++]);
        ck_assert_uint_eq(fd, u->peer->fds.n);
}

/* The stand-in's device addresses are addresses of this process. */
static uint8_t *block(struct user *u, kvd_ref ref) {
        map(u, kvd_segment_of(u->ix, kvd_ref_id(ref)));
        return (uint8_t *)(uintptr_t)(u->base + kvd_ref_id(ref) * BLOCK);
}

static bool all_are(const uint8_t *at, uint8_t byte) {
        uint32_t others = 0;

        for (uint64_t i = 0; i < BLOCK; i++)
                others += at[i] != byte;
        return others == 0;
}

/*
 * Allocates blocks until the user has n, or the daemon has no more; returns how many. Each must be
 * full of zeros, or of fill if the user had it before.
 */
static uint32_t take(struct user *u, uint32_t n, uint8_t fill) {
        struct kvd_msg reply;
        uint32_t got = 0;

        while (u->n < n) {
                reply = peer_call(u->peer, MSG(allocate, u->handle, n - u->n));
                if (reply.number == KVD_MSG_error) {
                        ck_assert_int_eq((int)reply.error.code, ENOBUFS);
                        break;
                }
                memcpy(&u->refs[u->n], reply.allocate_reply.blocks.data,
                       reply.allocate_reply.blocks.size);
                for (uint32_t left = reply.allocate_reply.blocks.size / 8; left > 0;
                     left--, got++) {
                        uint8_t *at = block(u, u->refs[u->n++]);

                        ck_assert_msg(at[0] == 0 || at[0] == fill, "another user's byte %02x",
                                      at[0]);
                        ck_assert(all_are(at, at[0]));
                        memset(at, fill, BLOCK);
                }
        }
        return got;
}

static void give_back(struct user *u) {
        struct kvd_msg reply = peer_ok(u->peer, MSG(release, u->handle, {u->refs, u->n * 8}));

        ck_assert_uint_eq(reply.release_reply.released, u->n);
        u->n = 0;
}

static void drain(struct user *u) {
        struct kvd_msg reply = peer_ok(u->peer, MSG(drain, .space = u->handle, .unmapped = {0}));
        uint32_t wanted[64], n = reply.drain_reply.wanted.size / 4;

        if (!n)
                return;
        ck_assert_uint_le(n, ARRAY_SIZE(wanted));
        memcpy(wanted, reply.drain_reply.wanted.data, n * 4);
        for (uint32_t i = 0; i < n; i++)
                unmap(u, wanted[i]);
        reply = peer_ok(u->peer, MSG(drain, u->handle, {wanted, n * 4}));
        ck_assert_uint_eq(reply.drain_reply.wanted.size, 0);
}

static void check(struct user *u, const char *domain) {
        struct kvd_msg reply = {0};

        do {
                reply = peer_ok(u->peer, MSG(check, .space = kvd_slice_of("s"),
                                             .domain = kvd_slice_of(domain),
                                             .cursor = reply.check_reply.next));
                ck_assert_msg(reply.check_reply.broken == 0, "%.*s",
                              (int)reply.check_reply.first.size,
                              (const char *)reply.check_reply.first.data);
        } while (reply.check_reply.next);
}

struct told {
        char backend[64], device[192], why[256], pages[64];
        uint64_t worker_starts, jobs_waiting;
        pid_t worker;
};

static struct told info(void) {
        struct peer_end *p = peer_attach(in.socket);
        struct kvd_msg_daemon_info_reply m = peer_ok(p, MSG(daemon_info)).daemon_info_reply;
        struct told told = {.worker_starts = m.worker_starts,
                            .jobs_waiting = m.jobs_waiting,
                            .worker = (pid_t)m.worker};

        kvd_slice_copy(m.backend, told.backend, sizeof told.backend);
        kvd_slice_copy(m.device, told.device, sizeof told.device);
        kvd_slice_copy(m.backend_why, told.why, sizeof told.why);
        kvd_slice_copy(m.pages, told.pages, sizeof told.pages);
        peer_close(p);
        return told;
}

/* ---- starting -------------------------------------------------------------------------------- */

static bool holds_context(const char *call) {
        static const char *const calls[] = {"cuDevicePrimaryCtxRetain",
                                            "cuCtx",
                                            "cuMemAlloc",
                                            "cuMemMap",
                                            "cuMemcpy",
                                            "cuMemset",
                                            "cuMemHost",
                                            "cuStream",
                                            "cuEvent",
                                            "cuLaunch",
                                            "cuLibrary"};

        for (size_t i = 0; i < ARRAY_SIZE(calls); i++)
                if (strncmp(call, calls[i], strlen(calls[i])) == 0)
                        return true;
        return false;
}

START_TEST(the_owner_has_no_context) {
        char path[100], call[64];
        uint32_t mine = 0, others = 0;
        pid_t owner;
        struct user *u;
        FILE *log;
        int pid;

        snprintf(path, sizeof path, "/tmp/kvd-test-gpu-%d.log", getpid());
        setenv("FAKECUDA_LOG", path, 1);
        instance_start(&in, on_gpu);
        unsetenv("FAKECUDA_LOG");
        u = user_open("a");
        ck_assert_uint_eq(take(u, POOL_BLOCKS, 0x5a), POOL_BLOCKS);
        user_close(u);
        owner = in.pid;
        instance_end(&in);
        log = fopen(path, "r");
        ck_assert_ptr_nonnull(log);
        while (fscanf(log, "%d %63s%*[^\n]", &pid, call) == 2) {
                mine += pid == owner;
                others += pid != owner && holds_context(call);
                ck_assert_msg(pid != owner || !holds_context(call), "%s in the owner", call);
        }
        fclose(log);
        unlink(path);
        ck_assert_uint_ge(mine, POOL_BLOCKS / 2);
        ck_assert_uint_ge(others, 3);
}
END_TEST

START_TEST(the_device_is_reported) {
        struct told told;

        setenv("FAKECUDA_MIG", _i ? "1" : "0", 1);
        instance_start(&in, on_gpu);
        told = info();
        ck_assert_str_eq(told.backend, "cuda (vmm)");
        ck_assert_ptr_nonnull(strstr(told.device, _i ? " MIG " : "GPU"));
        ck_assert_ptr_nonnull(strstr(told.device, _i ? "UUID MIG-" : "UUID GPU-"));
        ck_assert_str_eq(told.pages, "GPU memory");
        ck_assert_uint_gt(strlen(told.why), 0);
        instance_end(&in);
}
END_TEST

/* A pool of all memory leaves enough for two contexts: the worker's and a client's. */
START_TEST(contexts_fit_beside_the_pool) {
        const char *const all[] = {"daemon.backend=cuda", "daemon.pool=100%", "daemon.segment=8M",
                                   "domain a.client_quota=1T", NULL};
        struct user *u;

        setenv("FAKECUDA_MEMORY", "256M", 1);
        setenv("FAKECUDA_CONTEXT", "7M", 1);
        setenv("FAKECUDA_SLOW", "context:500", 1);
        instance_start(&in, all);
        u = user_open("a");
        ck_assert_uint_eq(take(u, POOL_BLOCKS, 0x5a), POOL_BLOCKS);
        user_close(u);
        instance_end(&in);
}
END_TEST

static const struct refusal {
        const char *environment, *value;
        const char *arguments;
        const char *why;
} refusals[] = {
        {"FAKECUDA_MEMORY", "1G", "--pool 2G --backend cuda",
         "pool is 2048 MiB, reserve 64 MiB, and Stand-in GPU 0"},
        {"FAKECUDA_MEMORY", "1G", "--pool 512M --backend cuda --set daemon.reserve=768M",
         "lower one of them"},
        {"FAKECUDA_DEVICES", "0", "--backend cuda", "CUDA_ERROR_NO_DEVICE"},
        {"FAKECUDA_DEVICES", "2", "--backend cuda --device 2",
         "there is no GPU 2; the driver sees 2"},
        {"FAKECUDA_DEVICES", "2", "--backend cuda --device 0,2",
         "there is no GPU 2; the driver sees 2"},
        {"FAKECUDA_DEVICES", "1", "--backend cuda --device 0,1",
         "there is no GPU 1; the driver sees 1"},
        {"FAKECUDA_DEVICES", "2", "--backend cuda --device 1,1", "1 is there twice"},
        {"FAKECUDA_DEVICES", "2 FAKECUDA_MEMORY=1G", "--backend cuda --device 0,1 --pool 2G",
         "pool is 2048 MiB on all GPUs together, reserve 64 MiB"},
        {"FAKECUDA_DEVICES", "2",
         "--backend cuda --device 0,1 --pool 64M --set daemon.host_tier=16M",
         "host_tier take the blocks of one GPU, and device names 2"},
        {"FAKECUDA_FAIL", "cuMemCreate:6=999 FAKECUDA_DEVICES=2",
         "--backend cuda --device 0,1 --pool 64M", "2 MiB cannot be allocated on GPU 1"},
        {"FAKECUDA_VERSION", "11040", "--backend cuda", "the GPU backend is not available"},
        {"LD_LIBRARY_PATH", "/", "--backend cuda", "libcuda.so.1"},
        {"FAKECUDA_FAIL", "cuMemCreate:1=999,cuMemAlloc:1=999", "--backend cuda",
         "cuMemCreate: CUDA_ERROR_UNKNOWN"},
        {"FAKECUDA_LEGACY", "0", "--backend cuda-legacy",
         "cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED"},
        {"FAKECUDA_DEVICES", "1",
         "--backend cuda-legacy --pool 64M --set 'domain a.isolation=arena'",
         "legacy CUDA handles cannot; set isolation = shared"},
        {"FAKECUDA_FAIL", "cuMemCreate:2=999", "--backend cuda --pool 64M",
         "no 1024 MiB left to keep free (reserve)"},
        {"FAKECUDA_FAIL", "cuMemCreate:3=999", "--backend cuda --pool 64M",
         "4 MiB cannot be allocated on GPU 0"},
        {"FAKECUDA_DEVICES", "1 prlimit --nofile=300:300",
         "--backend cuda --pool 1G --set daemon.segment=2M",
         "a pool of 512 segments needs 512 descriptors"},
        {"FAKECUDA_DEVICES", "2 prlimit --nofile=300:300",
         "--backend cuda --device 0,1 --pool 1G --set daemon.segment=4M",
         "a pool of 256 segments needs 512 descriptors"},
        {"FAKECUDA_FAIL", "cuDeviceTotalMem:1=999", "--backend cuda", "cuDeviceTotalMem"},
        {"FAKECUDA_FAIL", "cuMemsetD8Async:1=700",
         "--backend cuda --pool 64M --set daemon.quarantine_ms=0",
         "the GPU's memory cannot be allocated and cleared"},
        {"FAKECUDA_DEVICES", "1", "--backend cuda --set daemon.worker=off", "worker = off"},
        {"FAKECUDA_DEVICES", "1", "--backend cuda --pool 64M --set daemon.segment=65M",
         "segment is larger than pool"},
        {"FAKECUDA_DEVICES", "1",
         "--backend cuda --pool 64M --set daemon.host_tier=64M --set daemon.spill=16M",
         "spill is less than the 64 MiB"},
        {"FAKECUDA_DEVICES", "1",
         "--backend cuda --pool 64M --set daemon.host_tier=8M --set daemon.file=/nowhere/file "
         "--set daemon.remote=redis://127.0.0.1:1 --set daemon.spill=39M",
         "spill is less than the 40 MiB"},
        {"FAKECUDA_DEVICES", "1", "--backend host --pool 64M --set daemon.host_tier=16M",
         "host_tier is for pools on a GPU"},
};

START_TEST(impossible_settings_are_refused) {
        const struct refusal *r = &refusals[_i];
        char command[512], line[600], all[16384] = "";
        FILE *f;
        int status;

        instance_make_dir(&in);
        snprintf(command, sizeof command, "%s=%s %s --private %s %s 2>&1", r->environment, r->value,
                 getenv("KVD"), in.dir, r->arguments);
        f = popen(command, "r");
        while (fgets(line, sizeof line, f))
                if (strlen(all) + strlen(line) < sizeof all)
                        strcat(all, line);
        status = pclose(f);
        ck_assert_msg(strstr(all, r->why) != NULL, "%s", all);
        ck_assert_int_ne(WEXITSTATUS(status), 0);
        ck_assert_int_eq(access(in.socket, F_OK), -1);
        instance_sweep(&in);
}
END_TEST

static const struct {
        const char *environment, *value;
        const char *backend, *why;
} choices[] = {
        {"FAKECUDA_DEVICES", "1", "cuda (vmm)", "descriptors"},
        {"FAKECUDA_DEVICES", "0", "host", "CUDA_ERROR_NO_DEVICE"},
        {"LD_LIBRARY_PATH", "/", "host", "libcuda.so.1"},
        {"FAKECUDA_FAIL", "cuMemExportToShareableHandle:1=801", "cuda (legacy)",
         "cuMemExportToShareableHandle"},
        {"FAKECUDA_VMM", "0", "cuda (legacy)", "legacy handles"},
        {"FAKECUDA_FAIL", "cuMemCreate:1=801,cuIpcGetMemHandle:1=801", "host", "cuIpcGetMemHandle"},
};

START_TEST(auto_takes_what_works) {
        const char *const automatic[] = {"daemon.backend=auto", NULL};
        struct told told;

        setenv(choices[_i].environment, choices[_i].value, 1);
        instance_start(&in, automatic);
        told = info();
        ck_assert_str_eq(told.backend, choices[_i].backend);
        ck_assert_msg(strstr(told.why, choices[_i].why) != NULL, "%s", told.why);
        instance_end(&in);
}
END_TEST

/* The instance's number selects the GPU, unless there is only one. */
START_TEST(an_instance_takes_its_gpu) {
        const char *arguments[] = {"--private", NULL,     "--instance", "1", "--backend",
                                   "cuda",      "--pool", "64M",        NULL};
        struct told told;

        setenv("FAKECUDA_DEVICES", _i ? "1" : "3", 1);
        instance_make_dir(&in);
        arguments[1] = in.dir;
        instance_run(&in, arguments, true);
        told = info();
        ck_assert_msg(strstr(told.device, _i ? "GPU 0" : "GPU 1") != NULL, "%s", told.device);
        instance_end(&in);
}
END_TEST

/* ---- domains --------------------------------------------------------------------------------- */

/*
 * Domain a has the whole pool, then domain b gets half of it. Each only ever sees zeros or its own
 * bytes.
 */
START_TEST(two_domains_never_see_each_others_bytes) {
        struct user *a, *b;
        uint32_t got;

        instance_start(&in, on_gpu);
        a = user_open("a");
        b = user_open("b");
        ck_assert_uint_eq(take(a, POOL_BLOCKS, 0x5a), POOL_BLOCKS);
        ck_assert_uint_eq(take(b, 1, 0x5b), 0);
        give_back(a);
        for (got = 0; got < POOL_BLOCKS / 2 - 4;) {
                got += take(b, POOL_BLOCKS, 0x5b);
                drain(a);
                usleep(1000);
        }
        check(a, "a");
        check(b, "b");
        take(a, POOL_BLOCKS / 4, 0x5a);
        give_back(a);
        give_back(b);
        for (int i = 0; i < AMOUNT(200, 40); i++) {
                take(i % 2 ? a : b, POOL_BLOCKS, i % 2 ? 0x5a : 0x5b);
                give_back(i % 2 ? a : b);
                drain(a);
                drain(b);
        }
        check(a, "a");
        check(b, "b");
        user_close(a);
        user_close(b);
        instance_end(&in);
}
END_TEST

/* A client dies while it has segments mapped; their memory is cleared before domain b gets it. */
START_TEST(the_memory_of_the_dead_is_cleared) {
        struct user *b;
        uint32_t got = 0;
        pid_t child;

        instance_start(&in, on_gpu);
        child = fork();
        if (child == 0) {
                struct user *a = user_open("a");

                take(a, POOL_BLOCKS, 0x5a);
                raise(SIGKILL);
        }
        waitpid(child, NULL, 0);
        b = user_open("b");
        WAIT_UNTIL((got += take(b, POOL_BLOCKS, 0x5b)) >= POOL_BLOCKS / 2 - 4);
        check(b, "b");
        user_close(b);
        instance_end(&in);
}
END_TEST

/* ---- the worker ------------------------------------------------------------------------------ */

static pid_t worker(void) {
        return info().worker;
}

START_TEST(a_worker_killed_while_it_clears_is_replaced) {
        const char *const settings[] = {"daemon.backend=cuda", "daemon.quarantine_ms=50",
                                        "domain a.client_quota=1T", "domain b.client_quota=1T",
                                        NULL};
        struct user *a, *b;
        pid_t first;

        setenv("FAKECUDA_SLOW", "set:20", 1);
        instance_start(&in, settings);
        unsetenv("FAKECUDA_SLOW");
        a = user_open("a");
        b = user_open("b");
        first = worker();
        ck_assert_int_gt(first, 0);
        take(a, POOL_BLOCKS, 0x5a);
        give_back(a);
        for (uint32_t got = 0, kills = 0; got < POOL_BLOCKS / 2 - 4;) {
                uint32_t now = take(b, POOL_BLOCKS, 0x5b);
                pid_t pid = worker();

                got += now;
                drain(a);
                usleep(5000);
                if (kills < 3 && pid > 0 && kill(pid, SIGKILL) == 0)
                        kills++;
        }
        ck_assert_int_ne(worker(), first);
        check(a, "a");
        check(b, "b");
        user_close(a);
        user_close(b);
        instance_end(&in);
}
END_TEST

/* The kernel has closed the other end. */
static bool peer_gone(struct peer_end *p) {
        char byte;

        return recv(p->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
}

/*
 * The first copy to the host, and all later ones, fail in every worker. The worker ends and is
 * replaced, and its job is given up at last. Clients that only use the cache are not affected.
 */
START_TEST(an_error_of_the_gpu_ends_the_worker_and_nothing_else) {
        const char *const settings[] = {"daemon.backend=cuda", "daemon.quarantine_ms=1",
                                        "domain a.client_quota=1T", "domain b.client_quota=1T",
                                        NULL};
        struct kvd_msg reply;
        uint32_t tokens[16] = {0};
        struct user *a, *b;
        uint64_t starts;

        setenv("FAKECUDA_FAIL", "cuMemcpyDtoHAsync:1=700", 1);
        instance_start(&in, settings);
        unsetenv("FAKECUDA_FAIL");
        a = user_open("a");
        b = user_open("b");
        peer_ok(a->peer, MSG(space_set, .space = kvd_slice_of("s"), .domain = kvd_slice_of("a"),
                             .key = kvd_slice_of("keydiff"), .value = kvd_slice_of("on")));
        starts = info().worker_starts;
        ck_assert_uint_eq(take(a, 8, 0x5a), 8);
        for (uint32_t i = 0; i < 8; i++) {
                tokens[0] = i;
                reply = peer_ok(a->peer, MSG(seal, .space = a->handle, .blocks = {&a->refs[i], 8},
                                             .tokens = {tokens, sizeof tokens}));
                ck_assert_int_eq(memcmp(reply.seal_reply.blocks.data, &a->refs[i], 8), 0);
        }
        WAIT_UNTIL(info().worker_starts >= starts + 2);
        WAIT_UNTIL(info().jobs_waiting == 0);
        ck_assert_uint_eq(take(b, 8, 0x5b), 8);
        for (uint32_t i = 0; i < 8; i++)
                ck_assert(all_are(block(a, a->refs[i]), 0x5a));
        check(a, "a");
        check(b, "b");
        user_close(a);
        user_close(b);
        instance_end(&in);
}
END_TEST

/* ---- the owner ------------------------------------------------------------------------------- */

/* The pool takes the whole device. Old memory stays with its clients until they unmap it. */
START_TEST(the_next_daemon_gets_memory_of_old_clients) {
        const char *arguments[] = {"--private", NULL,
                                   "--backend", "cuda",
                                   "--pool",    "64M",
                                   "--set",     "daemon.segment=1M",
                                   "--set",     "domain a.client_quota=1T",
                                   "--set",     "daemon.reserve=2M",
                                   NULL};
        struct user *old, *new;
        uint32_t got = 0;

        setenv("FAKECUDA_MEMORY", "66M", 1);
        instance_make_dir(&in);
        arguments[1] = in.dir;
        instance_run(&in, arguments, true);
        old = user_open("a");
        ck_assert_uint_eq(take(old, POOL_BLOCKS / 2, 0x5a), POOL_BLOCKS / 2);
        kill(in.pid, SIGKILL);
        wait_status(in.pid);
        WAIT_UNTIL(peer_gone(old->peer));
        instance_run(&in, arguments, true);
        new = user_open("a");
        got = take(new, POOL_BLOCKS, 0x5b);
        ck_assert_uint_le(got, POOL_BLOCKS / 2 + 2);
        for (uint32_t i = 0; i < old->n; i++)
                ck_assert_int_eq(block(old, old->refs[i])[i], 0x5a);
        peer_close(old->peer);
        user_leave(old);
        WAIT_UNTIL((take(new, POOL_BLOCKS, 0x5b), new->n >= POOL_BLOCKS));
        ck_assert_uint_eq(new->n, POOL_BLOCKS);
        check(new, "a");
        user_close(new);
        instance_end(&in);
}
END_TEST

/* ---- legacy handles -------------------------------------------------------------------------- */

static void delete (struct peer_end *p, const char *domain, uint32_t force, int error) {
        struct kvd_msg request = MSG(space_delete, .space = kvd_slice_of("s"),
                                     .domain = kvd_slice_of(domain), .force = force);

        if (error)
                peer_refused(p, request, error);
        else
                peer_ok(p, request);
}

/*
 * The pool is 8 segments of 8 MiB, one for each space. A ninth space only gets memory because that
 * of deleted spaces is cleared and reused.
 */
START_TEST(a_space_has_one_segment_from_the_exporter) {
        struct peer_end *p;
        struct user *a, *b;

        instance_start(&in, by_handle);
        p = peer_attach(in.socket);
        a = user_open("a");
        b = user_open("b");
        ck_assert_uint_eq(a->ix->backend, KVD_BACKEND_LEGACY);
        ck_assert_uint_eq(a->ix->max_segments, 1);
        for (int i = 0; i < 3; i++) {
                ck_assert_uint_eq(take(a, POOL_BLOCKS, 0x5a), POOL_BLOCKS / 8);
                ck_assert_uint_eq(take(b, POOL_BLOCKS, 0x5b), POOL_BLOCKS / 8);
                check(a, "a");
                give_back(a);
                give_back(b);
        }
        for (int i = 0; i < 20; i++) {
                delete (p, "a", 1, -EBUSY);
                user_close(a);
                delete (p, "a", 0, 0);
                a = user_open("a");
                WAIT_UNTIL(take(a, POOL_BLOCKS, (uint8_t)(1 + i)) > 0);
        }
        check(b, "b");
        user_close(a);
        user_close(b);
        peer_close(p);
        instance_end(&in);
}
END_TEST

/* Clients keep memory that they have mapped. New spaces are in memory of the next exporter. */
START_TEST(an_exporter_that_dies_takes_the_spaces_with_it) {
        struct user *a, *again;
        pid_t exporter;

        instance_start(&in, by_handle);
        a = user_open("a");
        ck_assert_uint_eq(take(a, POOL_BLOCKS, 0x5a), POOL_BLOCKS / 8);
        exporter = child_of(in.pid, "kvd-exporter");
        ck_assert_int_gt(exporter, 0);
        ck_assert_int_eq(kill(exporter, SIGKILL), 0);
        WAIT_UNTIL(atomic_load(&a->ix->alive) == 0);
        peer_refused(a->peer, MSG(allocate, a->handle, 1), -ESTALE);
        for (uint32_t i = 0; i < a->n; i++)
                ck_assert_int_eq(block(a, a->refs[i])[i], 0x5a);
        again = user_open("a");
        WAIT_UNTIL(take(again, POOL_BLOCKS, 0x5b) > 0);
        ck_assert_int_ne(child_of(in.pid, "kvd-exporter"), exporter);
        check(again, "a");
        user_close(again);
        peer_close(a->peer);
        user_leave(a);
        instance_end(&in);
}
END_TEST

/* Tests that run at the same time do not count as users of this test's device memory. */
static void setup(void) {
        char group[32];

        snprintf(group, sizeof group, "gpu%d", getpid());
        setenv("FAKECUDA_GROUP", group, 1);
        setenv("FAKECUDA_FREE", "alone", 1); /* an exporter frees nothing that a client has open */
}

SUITE("gpu", FIXTURE(setup, NULL), TESTS(the_owner_has_no_context, contexts_fit_beside_the_pool),
      LOOPS(2, the_device_is_reported),
      LOOPS(ARRAY_SIZE(refusals), impossible_settings_are_refused),
      LOOPS(ARRAY_SIZE(choices), auto_takes_what_works), LOOPS(2, an_instance_takes_its_gpu),
      TESTS(two_domains_never_see_each_others_bytes, the_memory_of_the_dead_is_cleared,
            a_worker_killed_while_it_clears_is_replaced,
            an_error_of_the_gpu_ends_the_worker_and_nothing_else,
            the_next_daemon_gets_memory_of_old_clients, a_space_has_one_segment_from_the_exporter,
            an_exporter_that_dies_takes_the_spaces_with_it))
