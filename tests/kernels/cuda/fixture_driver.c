/* SPDX-License-Identifier: Apache-2.0 */
/* Through the driver: a GPU's, or the stand-in that LD_LIBRARY_PATH names. KVD_GPU is the device's ordinal (0). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/kernels/buffers.h"
#include "tests/kernels/cuda/fixture.h"

#define GUARD 1024u
#define RUBBISH 0xa5
#define MOST_PIECES 1024

static struct gpu gpu;
static bool is_open;
static struct piece {
        cu_address at; /* of the guard before it */
        size_t bytes;
} pieces[MOST_PIECES];
static size_t n_pieces;

static void must(cu_result r, const char *what) {
        if (gpu_check(&gpu, r, what) < 0)
                ck_abort_msg("%s", gpu.why);
}

struct gpu *device(void) {
        const char *ordinal = getenv("KVD_GPU");

        if (!is_open && gpu_open(&gpu, ordinal ? atoi(ordinal) : 0) < 0)
                ck_abort_msg("no device: %s", gpu.why);
        is_open = true;
        return &gpu;
}

const char *device_kind(void) {
        static char name[96];

        must(device()->cuda->cuDeviceGetName(name, sizeof name, gpu.ordinal), "cuDeviceGetName");
        return name;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

cu_address device_room(size_t bytes) {
        size_t whole = ALIGN_UP(bytes, 4) + 2 * GUARD;
        cu_address at = 0;

        ck_assert_uint_lt(n_pieces, MOST_PIECES);
        must(device()->cuda->cuMemAlloc(&at, whole), "cuMemAlloc");
        must(gpu.cuda->cuMemsetD8Async(at, RUBBISH, whole, NULL), "cuMemsetD8Async");
        pieces[n_pieces++] = (struct piece){at, bytes};
        return at + GUARD;
}

cu_address device_of(const void *from, size_t bytes) {
        cu_address at = device_room(bytes);

        device_put(at, from, bytes);
        return at;
}

void device_put(cu_address to, const void *from, size_t bytes) {
        if (bytes)
                must(device()->cuda->cuMemcpyHtoDAsync(to, from, bytes, NULL), "cuMemcpyHtoDAsync");
        device_wait(); /* from may be gone after this call */
}

void device_get(void *to, cu_address from, size_t bytes) {
        if (bytes)
                must(device()->cuda->cuMemcpyDtoHAsync(to, from, bytes, NULL), "cuMemcpyDtoHAsync");
        device_wait();
}

void device_wait(void) {
        must(device()->cuda->cuStreamSynchronize(NULL), "waiting for what was launched");
}

static void look_beside(const struct piece *piece) {
        uint8_t guard[GUARD];
        const cu_address at[] = {piece->at, piece->at + GUARD + piece->bytes};

        for (size_t side = 0; side < 2; side++) {
                device_get(guard, at[side], GUARD);
                for (size_t i = 0; i < GUARD; i++)
                        if (guard[i] != RUBBISH)
                                ck_abort_msg("a store %s a piece of %zu bytes, %zu bytes away",
                                             side ? "behind" : "before", piece->bytes, side ? i : GUARD - i);
        }
}

void device_done(void) {
        device_wait();
        for (; n_pieces; n_pieces--) {
                look_beside(&pieces[n_pieces - 1]);
                must(gpu.cuda->cuMemFree(pieces[n_pieces - 1].at), "cuMemFree");
        }
        buffers_free();
}

void device_order(uint64_t seed) {
}

/* ---- main ---------------------------------------------------------------------------------------------------------- */

/* Asks in a child: the driver must not be initialised in the process that forks the tests. 0, or 77: nothing here. */
static int say_device(void) {
        int status;
        pid_t pid;

        fflush(stdout);
        pid = fork();
        if (pid == 0) {
                struct gpu probe = {0};
                char name[96] = "";

                if (gpu_open(&probe, getenv("KVD_GPU") ? atoi(getenv("KVD_GPU")) : 0) < 0 ||
                    gpu_has_kernels(&probe) < 0) {
                        printf("not run: %s\n", probe.why);
                        exit(77);
                }
                probe.cuda->cuDeviceGetName(name, sizeof name, probe.ordinal);
                printf("on %s\n", name);
                exit(0);
        }
        return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

int device_suite(Suite *suite) {
        SRunner *runner = srunner_create(suite);
        int failed = say_device();

        if (!failed) {
                srunner_run_all(runner, CK_ENV);
                failed = srunner_ntests_failed(runner) > 0;
        }
        srunner_free(runner);
        return failed;
}
