/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Fake workers: a daemon in a thread of this program starts this program as its worker, which sends
 * garbage, lies, or does nothing. The daemon replaces it again and again, is not misled, and still
 * serves. Requests that need a worker are given up.
 */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "daemon/main/daemon.h"
#include "ipc/base/job.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tests/daemon/blocks.h"
#include "tests/lib/inproc.h"
#include "tests/lib/suite.h"

/* ---- the fake worker ------------------------------------------------------------------------- */

enum fake {
        DIES,
        CLOSES,
        GARBAGE,
        OTHER_SERIAL,
        OTHER_NUMBER,
        OTHER_JOB,
        TALKS_FIRST,
        SHORT_RESULT,
        LONG_RESULT,
        REFUSES_SPACES,
        REFUSES_JOBS,
        RESTS,
        WRONG_CHECKSUMS,
        RESTS_FOR_EVER,
        BUSY
};

/* A busy worker rests this often, each time after its kernels have used the GPU for BUSY_US. */
#define BUSY_RESTS 4u
#define BUSY_US 20000u
#define SHARE "25"
#define REST_NS (3 * UINT64_C(1000) * BUSY_US)

static uint64_t rests_since; /* 0 if it does not rest */
static uint32_t n_rests;

static bool is_told_too_early(void) {
        return rests_since && sys_now_ns() - rests_since < REST_NS;
}

static void rest(struct kvd_msg_work_reply *reply) {
        bool more = n_rests++ < BUSY_RESTS;

        rests_since = more ? sys_now_ns() : 0;
        if (more)
                *reply =
                        (struct kvd_msg_work_reply){.id = reply->id, .more = 1, .busy_us = BUSY_US};
}

static void answer_work(enum fake fake, const struct kvd_job *job, struct kvd_msg *reply,
                        uint8_t *result) {
        struct kvd_msg_work_reply *r = &reply->work_reply;
        uint32_t n = job->n_results *
                     (job->kind == KVD_JOB_SPILL ? (uint32_t)sizeof(struct kvd_spilled) : 4);

        memset(result, 0, 61440);
        r->result = (struct kvd_slice){result, n};
        if (fake == SHORT_RESULT)
                r->result.size = n ? n - 1 : 1;
        if (fake == LONG_RESULT)
                r->result.size = 61440;
        if (fake == REFUSES_JOBS)
                r->error = EIO;
        if (fake == RESTS_FOR_EVER || /* jobs that copy blocks must not rest at all */
            (fake == RESTS && job->turn == KVD_JOB_BEGIN))
                *r = (struct kvd_msg_work_reply){.id = r->id, .more = 1};
        if (fake == BUSY)
                rest(r);
        if (fake == OTHER_JOB)
                r->id++;
}

static int fake_main(enum fake fake, int socket) {
        static uint8_t in[KVD_FRAME_MAX], out[KVD_FRAME_MAX], result[61440];
        const struct kvd_job *job = MAP_FAILED;
        struct kvd_decoder *decoder;
        struct kvd_fds fds;
        ssize_t n;

        if (fake == DIES || kvd_decoder_new(&decoder) < 0)
                return 1;
        if (fake == TALKS_FIRST)
                kvd_frame_send(socket, "hello", 5, NULL, 0);
        while ((n = kvd_frame_receive(socket, in, &fds, 0)) > 0) {
                struct kvd_msg request, reply;

                if (kvd_msg_decode(decoder, in, (size_t)n, &request) < 0)
                        return 2;
                if (request.number == KVD_MSG_work_space && job == MAP_FAILED)
                        job = mmap(NULL, KVD_JOB_BYTES, PROT_READ, MAP_SHARED, fds.fd[2], 0);
                kvd_fds_close(&fds);
                reply = (struct kvd_msg){.number = request.number + KVD_REPLY,
                                         .serial = request.serial};
                if (fake == CLOSES)
                        return shutdown(socket, SHUT_RDWR) + (int)pause();
                if (fake == GARBAGE) {
                        kvd_frame_send(socket, result, sizeof result, NULL, 0);
                        continue;
                }
                if (request.number == KVD_MSG_work && is_told_too_early())
                        return 3;
                if (request.number == KVD_MSG_work) {
                        reply.work_reply.id = request.work.id;
                        answer_work(fake, job, &reply, result);
                }
                if (fake == REFUSES_SPACES && request.number == KVD_MSG_work_space)
                        reply = (struct kvd_msg){.number = KVD_MSG_error,
                                                 .serial = request.serial,
                                                 .error = {ENOMEM, kvd_slice_of("no room")}};
                reply.serial += fake == OTHER_SERIAL;
                if (fake == OTHER_NUMBER)
                        reply = (struct kvd_msg){.number = KVD_MSG_table_reply,
                                                 .serial = request.serial};
                n = kvd_msg_encode(&reply, out, sizeof out);
                kvd_frame_send(socket, out, (size_t)n, NULL, 0);
        }
        return 0;
}

/* ---- the daemon ------------------------------------------------------------------------------ */

static struct inproc it;
static struct user u;

static void start_daemon(const char *program) {
        inproc_start_with_worker(&it,
                                 SETTINGS("daemon.pool=64M", "daemon.segment=1M",
                                          "daemon.worker_deadline=3600",
                                          "daemon.worker_share=" SHARE),
                                 program);
}

static const char *const spilling[] = {"kvreviver=on", NULL};

/* Whether all requests were given up, so that the client can make them again. */
static bool all_settled(void) {
        uint32_t slots[8] = {0, 1, 2, 3, 4, 5, 6, 7};

        user_sync(&u);
        return user_info(&u).jobs_waiting == 0 &&
               kvd_sequence_cool(u.sequence, 8, slots, KVD_COOL_SPILL) == 8;
}

static uint32_t cool_all(void) {
        uint32_t slots[8] = {0, 1, 2, 3, 4, 5, 6, 7};

        return (uint32_t)kvd_sequence_cool(u.sequence, 8, slots, KVD_COOL_SPILL);
}

/* The worker that the next daemon starts is a fake. */
static void play(enum fake fake) {
        char name[8];

        snprintf(name, sizeof name, "%d", fake);
        setenv("KVD_TEST_FAKE", name, 1);
}

/* Whether the daemon replaces the worker. Otherwise its reply is well-formed, and the job fails. */
static bool is_replaced(enum fake fake) {
        return fake < SHORT_RESULT;
}

START_TEST(nothing_breaks) {
        enum fake fake = (enum fake)_i;

        play(fake);
        start_daemon("/proc/self/exe");
        user_open(&u, it.in.socket, spilling);
        user_append(&u, 8);
        ck_assert_uint_eq(cool_all(), 8);
        WAIT_UNTIL(all_settled());
        ck_assert_uint_eq(user_resident(&u), 8);
        ck_assert_uint_eq(user_flags(&u, KVD_ENTRY_SPILLED), 0);
        if (is_replaced(fake))
                ck_assert_uint_ge(user_info(&u).worker_starts, 2);
        else
                ck_assert_uint_eq(user_info(&u).worker_starts, 1);
        user_check(&u);
        user_close(&u);
        inproc_stop(&it);
}
END_TEST

/* Copies that were not made, or were overwritten, do not come back, and no wrong bytes do. */
START_TEST(a_false_copy_never_comes_back) {
        uint32_t slots[8] = {0, 1, 2, 3, 4, 5, 6, 7};

        play(WRONG_CHECKSUMS);
        start_daemon("/proc/self/exe");
        user_open(&u, it.in.socket, spilling);
        user_append(&u, 8);
        ck_assert_uint_eq(cool_all(), 8);
        /* the daemon believes the reply, which is well-formed */
        WAIT_UNTIL((user_sync(&u), user_resident(&u)) == 0);
        user_close(&u);
        inproc_stop(&it);

        unsetenv("KVD_TEST_FAKE"); /* now the real worker, with copies that are overwritten */
        start_daemon(getenv("KVD"));
        user_open(&u, it.in.socket, spilling);
        user_append(&u, 8);
        user_spill(&u);
        {
                char path[64], line[512] = "";
                unsigned long from, to;
                int mem;
                FILE *f;

                snprintf(path, sizeof path, "/proc/%d/maps", user_worker(&u));
                f = fopen(path, "r");
                while (fgets(line, sizeof line, f) && !strstr(line, "memfd:kvd-spill"))
                        ;
                fclose(f);
                ck_assert_int_eq(sscanf(line, "%lx-%lx", &from, &to), 2);
                snprintf(path, sizeof path, "/proc/%d/mem", user_worker(&u));
                mem = open(path, O_RDWR | O_CLOEXEC);
                ck_assert_int_ge(mem, 0);
                for (off_t at = (off_t)from + 100; at < (off_t)from + 8 * 16384; at += 16384)
                        ck_assert_int_eq(pwrite(mem, "x", 1, at), 1);
                close(mem);
        }
        ck_assert_int_eq(kvd_sequence_revive(u.sequence, 8, slots, KVD_REVIVE_EXACT), 8);
        WAIT_UNTIL((user_sync(&u), user_flags(&u, KVD_ENTRY_DROPPED)) == 8);
        ck_assert_uint_eq(user_resident(&u), 0);
        ck_assert_uint_eq(user_counter(&u, KVD_SPACE_REVIVE_BROKEN), 8);
        user_check(&u);
        user_close(&u);
        inproc_stop(&it);
}
END_TEST

/* Expects that all jobs end, done or failed, and that the worker is not replaced. */
static void expect_jobs_to_end(enum fake fake) {
        static const char *const labels[] = {"hshare=on", NULL};

        play(fake);
        start_daemon("/proc/self/exe");
        user_open(&u, it.in.socket, labels);
        user_append(&u, 8);
        ck_assert_int_eq(kvd_sequence_wait(u.sequence, UINT64_C(100000000000)), 0);
        ck_assert_uint_eq(user_info(&u).worker_starts, 1);
        user_check(&u);
        user_close(&u);
        inproc_stop(&it);
}

/* The job may rest, but rests for ever. */
START_TEST(a_job_that_is_never_done_fails) {
        expect_jobs_to_end(RESTS_FOR_EVER);
}
END_TEST

/* Before it is told to go on, it rests three times as long as its kernels used the GPU. */
START_TEST(a_worker_that_was_busy_has_a_rest) {
        expect_jobs_to_end(BUSY);
}
END_TEST

/* The daemon stops trying after some attempts, and requests are given up. */
START_TEST(a_worker_that_cannot_be_started) {
        start_daemon("/nonexistent/kvd");
        user_open(&u, it.in.socket, spilling);
        user_append(&u, 8);
        ck_assert_uint_eq(cool_all(), 8);
        WAIT_UNTIL(all_settled());
        ck_assert_uint_eq(user_info(&u).worker_starts, 0);
        ck_assert_uint_eq(user_resident(&u), 8);
        user_check(&u);
        user_close(&u);
        inproc_stop(&it);
}
END_TEST

SUITE("worker-fake",
      WHEN(argc > 2 && strcmp(argv[1], "--worker") == 0 && getenv("KVD_TEST_FAKE"),
           _exit(fake_main((enum fake)atoi(getenv("KVD_TEST_FAKE")), SYS_SPAWN_FD))),
      LOOPS(WRONG_CHECKSUMS, nothing_breaks),
      TESTS(a_false_copy_never_comes_back, a_job_that_is_never_done_fails,
            a_worker_that_was_busy_has_a_rest, a_worker_that_cannot_be_started))
