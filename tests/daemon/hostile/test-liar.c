/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A worker that lies in the right form: its answers have the right size and number, and arbitrary
 * contents. Matches of blocks that do not exist, sources that have sources, scores that are not
 * numbers, copies that were never made, and now and then an answer to an old job. Storms of
 * requests give it work. What clients read may then be anything. But the daemon's tables must stay
 * sound, and everything must be freed.
 */

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "ipc/base/job.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tests/daemon/hostile/methods.h"
#include "tests/lib/inproc.h"
#include "tests/lib/sanitized.h"
#include "tests/lib/oracle.h"

/* ---- the worker ------------------------------------------------------------------------------ */

static const uint32_t result_bytes[] =
        {[KVD_JOB_SCORE] = 4,  [KVD_JOB_COMPARE] = 16, [KVD_JOB_SPILL] = 16, [KVD_JOB_REVIVE] = 4,
         [KVD_JOB_FORGET] = 4, [KVD_JOB_REBUILD] = 4,  [KVD_JOB_CONFIG] = 1, [KVD_JOB_PROFILE] = 8};

static uint32_t odd_number(struct random *random, uint32_t n_items) {
        static const float floats[] = {NAN, INFINITY, -INFINITY, -1, 0, 0.1f, 0.2f, 1, 2, 1e30f};
        uint32_t bits;

        switch (random_below(random, 8)) {
        case 0: return random_below(random, UINT32_MAX);
        case 1: return n_items + random_below(random, 2);
        case 2:
        case 3: return random_below(random, n_items + 1);
        case 4:
                memcpy(&bits, &floats[random_below(random, ARRAY_SIZE(floats))], sizeof bits);
                return bits;
        default: return 0;
        }
}

/* Two thirds of the matches name real items, with invented scores: the daemon believes those. */
static void lie(struct random *random, const struct kvd_job *job, uint8_t *result) {
        uint32_t n = job->n_results * result_bytes[job->kind % ARRAY_SIZE(result_bytes)];

        for (uint32_t i = 0; i + 4 <= n; i += 4) {
                uint32_t x = odd_number(random, job->n_items);

                memcpy(result + i, &x, sizeof x);
        }
        for (uint32_t i = 0; job->kind == KVD_JOB_CONFIG && i < n; i++)
                result[i] = (uint8_t)random_below(random, random_below(random, 2) ? 2 : 256);
        for (uint32_t i = 0; job->kind == KVD_JOB_COMPARE && i < job->n_results; i++) {
                struct kvd_match m = {random_below(random, job->n_items),
                                      random_below(random, job->n_items), 0.01f, 1};

                if (random_below(random, 3))
                        memcpy(result + i * sizeof m, &m, sizeof m);
        }
}

static int liar_main(int socket) {
        static uint8_t in[KVD_FRAME_MAX], out[KVD_FRAME_MAX], result[65536], late[KVD_FRAME_MAX];
        struct random random = {(uint64_t)getpid() * 77};
        const struct kvd_job *job = MAP_FAILED;
        struct kvd_decoder *decoder;
        ssize_t n, n_late = 0;
        struct kvd_fds fds;

        if (kvd_decoder_new(&decoder) < 0)
                return 1;
        while ((n = kvd_frame_receive(socket, in, &fds, 0)) > 0) {
                struct kvd_msg request, reply;

                if (kvd_msg_decode(decoder, in, (size_t)n, &request) < 0)
                        return 2;
                if (request.number == KVD_MSG_work_space && job == MAP_FAILED)
                        job = mmap(NULL, KVD_JOB_BYTES, PROT_READ, MAP_SHARED, fds.fd[2], 0);
                kvd_fds_close(&fds);
                reply = (struct kvd_msg){.number = request.number + KVD_REPLY,
                                         .serial = request.serial};
                if (request.number == KVD_MSG_work) {
                        uint32_t size = job->n_results *
                                        result_bytes[job->kind % ARRAY_SIZE(result_bytes)];

                        lie(&random, job, result);
                        reply.work_reply.id = request.work.id;
                        reply.work_reply.error = random_below(&random, 50) == 0 ? 5 : 0;
                        reply.work_reply.result = (struct kvd_slice){result, MIN(size, 61440)};
                }
                n = kvd_msg_encode(&reply, out, sizeof out);
                kvd_frame_send(socket, out, (size_t)n, NULL, 0);
                if (n_late && random_below(&random, 300) == 0)
                        kvd_frame_send(socket, late, (size_t)n_late, NULL, 0);
                if (random_below(&random, 20) == 0)
                        memcpy(late, out, (size_t)(n_late = n));
        }
        return 0;
}

/* ---- its victims ----------------------------------------------------------------------------- */

/* Waits for these children only: the daemon in this process has children, too. */
static void wait_for(const pid_t *pids, uint32_t n) {
        int status;

        for (uint32_t i = 0; i < n; i++)
                if (waitpid(pids[i], &status, 0) != pids[i] || status)
                        die("a storm ended with %#x", status);
}

static uint64_t jobs_of(const struct inproc *d) {
        struct kvd_msg_daemon_info_reply info = {0};
        struct conn *conn;

        if (conn_open(d->in.socket, "liar", &conn) < 0 ||
            conn_call(conn, KVD_MSG_daemon_info, NULL, &info) < 0)
                die("%s", kvd_error());
        conn_close(conn);
        printf("liar: %llu lies were received, from %llu workers\n", (unsigned long long)info.jobs,
               (unsigned long long)info.worker_starts);
        return info.jobs;
}

/* All blocks and copies are freed once the processes have ended and the jobs are done. */
static void expect_nothing_left(const struct inproc *d) {
        struct kvd_msg_space_info_reply info = {0};
        struct conn *conn;

        if (conn_open(d->in.socket, "liar", &conn) < 0)
                die("%s", kvd_error());
        for (int i = 0;
             i == 0 || info.clients || info.private || info.spilled || info.vague || info.sequences;
             i++) {
                if (i == PATIENCE_MS ||
                    conn_call(conn, KVD_MSG_space_info, &(struct kvd_msg_space_info){0}, &info) < 0)
                        die("%llu private blocks and %llu copies are left",
                            (unsigned long long)info.private, (unsigned long long)info.spilled);
                usleep(1000);
        }
        conn_close(conn);
        instance_expect_clean(&d->in);
}

#define STORMS 3u

static void storm(const struct inproc *d, uint64_t seed) {
        pid_t pids[STORMS];

        for (uint32_t i = 0; i < STORMS; i++) {
                pids[i] = fork();
                if (pids[i] != 0)
                        continue;
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                methods_storm(d->in.socket, "lies", seed + i, SANITIZED ? 5000 : 15000);
                fflush(stdout);
                _exit(0);
        }
        wait_for(pids, STORMS);
}

/*
 * Repeats the storms until the liar has answered 20 jobs: on a busy machine, a storm may end before
 * the liar has run.
 */
int main(int argc, char **argv) {
        static const char *const settings[] = {"daemon.worker=auto", NULL};
        uint64_t seed = getenv("SEED") ? strtoull(getenv("SEED"), NULL, 0) : 500;
        struct inproc d;

        if (argc > 2 && strcmp(argv[1], "--worker") == 0)
                return liar_main(SYS_SPAWN_FD);
        signal(SIGPIPE, SIG_IGN);
        inproc_start_with_worker(&d, settings, "/proc/self/exe");
        for (uint32_t i = 0; i == 0 || jobs_of(&d) < 20; i++) {
                if (i == 20)
                        die("the liar got hardly any jobs");
                storm(&d, seed + STORMS * i);
        }
        expect_nothing_left(&d);
        inproc_stop(&d);
        return 0;
}
