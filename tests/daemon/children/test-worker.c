/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The worker's life: it is started when it is needed, dies in many ways, and at most work in flight
 * is lost.
 */

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "ipc/base/layout.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "ipc/frame.h"
#include "ipc/msg.h"
#include "tests/daemon/blocks.h"
#include "tests/lib/suite.h"

static struct instance in;
static struct user u;

static const char *const spilling[] = {"kvreviver=on", NULL};

static void start(const char *const daemon_settings[], const char *const settings[]) {
        instance_start(&in, daemon_settings);
        user_open(&u, in.socket, settings);
}

static void stop(void) {
        user_check(&u);
        user_close(&u);
        instance_end(&in);
}

/* ---- life ------------------------------------------------------------------------------------ */

START_TEST(a_worker_comes_when_it_is_needed) {
        pid_t worker;

        start(NULL, spilling);
        /* on a GPU, it has cleared memory already */
        ck_assert_uint_eq(user_info(&u).worker_starts, instance_on_gpu());
        user_append(&u, 8);
        worker = user_worker(&u);
        WAIT_UNTIL(getpriority(PRIO_PROCESS, (id_t)worker) == 10);
        user_spill(&u);
        ck_assert_uint_eq(user_flags(&u, KVD_ENTRY_SPILLED), 8);
        user_revive(&u);
        ck_assert_uint_eq(user_info(&u).worker_starts, 1);
        ck_assert_uint_ge(user_info(&u).jobs, 2);
        ck_assert_uint_ge(user_counter(&u, KVD_SPACE_REVIVED_EXACT), 8);
        stop();
        ck_assert_int_eq(kill(worker, 0), -1);
        ck_assert_int_eq(errno, ESRCH);
}
END_TEST

START_TEST(one_that_is_killed_is_replaced) {
        pid_t worker;

        start(NULL, spilling);
        user_append(&u, 8);
        for (uint64_t i = 1; i <= 3; i++) {
                worker = user_worker(&u);
                ck_assert_int_eq(kill(worker, SIGKILL), 0);
                WAIT_UNTIL(user_info(&u).worker_starts > i && user_worker(&u) != worker);
                user_spill(&u);
                user_revive(&u);
        }
        stop();
}
END_TEST

static uint32_t cool_all(void) {
        uint32_t slots[8] = {0, 1, 2, 3, 4, 5, 6, 7};
        int r = kvd_sequence_cool(u.sequence, 8, slots, KVD_COOL_SPILL);

        ck_assert_msg(r >= 0, "%s", kvd_error());
        return (uint32_t)r;
}

/* The daemon still answers requests. After these, it has sent the job to its worker. */
static void expect_answers(void) {
        for (int i = 0; i < 20; i++)
                user_info(&u);
}

/* The job is certainly in flight, as the worker is stopped. The next worker does it again. */
START_TEST(work_in_flight_is_done_again) {
        pid_t worker;

        start(SETTINGS("daemon.worker_deadline=3600"), spilling);
        user_append(&u, 8);
        worker = user_worker(&u);
        WAIT_UNTIL(user_info(&u).jobs_waiting == 0 && user_info(&u).jobs > 0);
        ck_assert_int_eq(kill(worker, SIGSTOP), 0);
        ck_assert_uint_eq(cool_all(), 8);
        expect_answers();
        user_sync(&u);
        ck_assert_uint_eq(user_resident(&u), 8);
        ck_assert_int_eq(kill(worker, SIGKILL), 0);
        WAIT_UNTIL((user_sync(&u), user_resident(&u)) == 0);
        ck_assert_uint_eq(user_counter(&u, KVD_SPACE_JOBS_LOST), 1);
        user_revive(&u);
        stop();
}
END_TEST

/* ---- waiting --------------------------------------------------------------------------------- */

#define WAIT_NS UINT64_C(60000000000) /* more than a test may take */

static void revive_all(int expected) {
        uint32_t slots[8] = {0, 1, 2, 3, 4, 5, 6, 7};

        ck_assert_int_eq(kvd_sequence_revive(u.sequence, 8, slots, KVD_REVIVE_EXACT), expected);
}

/* After a wait, all changes of copies and summaries have been reported. */
START_TEST(a_wait_gets_all) {
        const char *const all[] = {"kvreviver=on", "hshare=on", "memshare=on", NULL};
        struct kvd_label_shape shape;

        start(NULL, all);
        ck_assert_int_eq(kvd_sequence_wait(u.sequence, 0), 0); /* nothing to wait for */
        user_append(&u, 8);
        ck_assert_int_eq(kvd_sequence_wait(u.sequence, WAIT_NS), 0);
        for (uint32_t i = 0; i < 8; i++)
                ck_assert_ptr_nonnull(kvd_sequence_labels(u.sequence, i, &shape));
        for (int round = 0; round < 20; round++) {
                ck_assert_uint_eq(cool_all(), 8);
                ck_assert_int_eq(kvd_sequence_wait(u.sequence, WAIT_NS), 8);
                ck_assert_uint_eq(user_resident(&u), 0);
                revive_all(8);
                ck_assert_int_eq(kvd_sequence_wait(u.sequence, WAIT_NS), 8);
                ck_assert_uint_eq(user_resident(&u), 8);
        }
        ck_assert_int_eq(kvd_sequence_wait(u.sequence, 0), 0);
        stop();
}
END_TEST

/* It gets an error, not 0 changes, as the table belongs to its parent. */
START_TEST(a_forked_child_waits_for_nothing) {
        uint32_t slots[1] = {0};
        pid_t pid;

        start(NULL, (const char *const[]){"kvreviver=on", NULL});
        user_append(&u, 8);
        pid = check_fork();
        if (pid == 0)
                _exit(kvd_sequence_wait(u.sequence, WAIT_NS) == -ECHILD &&
                                      kvd_sequence_cool(u.sequence, 1, slots, KVD_COOL_SPILL) ==
                                              -ECHILD ?
                              0 :
                              1);
        ck_assert_int_eq(wait_status(pid), 0);
        ck_assert_uint_eq(user_resident(&u), 8);
        stop();
}
END_TEST

static void stop_worker(pid_t *ret) {
        *ret = user_worker(&u);
        ck_assert_int_eq(kvd_sequence_wait(u.sequence, WAIT_NS), 0);
        ck_assert_int_eq(kill(*ret, SIGSTOP), 0);
        ck_assert_uint_eq(cool_all(), 8);
}

START_TEST(a_short_wait_times_out) {
        uint32_t last = 7;
        pid_t worker;

        start(NULL, spilling);
        user_append(&u, 8);
        stop_worker(&worker);
        ck_assert_int_eq(kvd_sequence_wait(u.sequence, 1000000), -ETIMEDOUT);
        ck_assert_uint_eq(user_resident(&u), 8);
        user_append(&u, 1); /* this one is dropped without a copy, and without the worker */
        last = 8;
        ck_assert_int_eq(kvd_sequence_cool(u.sequence, 1, &last, KVD_COOL_DROP), 1);
        ck_assert_int_eq(kvd_sequence_wait(u.sequence, 1000000), -ETIMEDOUT);
        ck_assert_uint_eq(user_flags(&u, KVD_ENTRY_DROPPED), 1);
        ck_assert_int_eq(kill(worker, SIGCONT), 0);
        ck_assert_int_eq(kvd_sequence_wait(u.sequence, WAIT_NS), 8);
        stop();
}
END_TEST

/* Kills the process while the caller waits, or before. */
static pid_t kill_soon(pid_t pid) {
        pid_t killer = fork();

        if (killer == 0) {
                usleep(30000);
                kill(pid, SIGKILL);
                _exit(0);
        }
        return killer;
}

START_TEST(a_wait_outlives_a_worker_that_dies) {
        pid_t worker, killer;

        start(NULL, spilling);
        user_append(&u, 8);
        stop_worker(&worker);
        killer = kill_soon(worker);
        ck_assert_int_eq(kvd_sequence_wait(u.sequence, WAIT_NS), 8);
        ck_assert_uint_eq(user_flags(&u, KVD_ENTRY_SPILLED), 8);
        ck_assert_int_eq(wait_status(killer), 0);
        stop();
}
END_TEST

/* The wait has no deadline, so it must end by the death. Resident blocks stay readable. */
START_TEST(a_wait_ends_with_the_daemon) {
        pid_t worker, killer;

        start(NULL, spilling);
        user_append(&u, 8);
        stop_worker(&worker);
        killer = kill_soon(in.pid);
        ck_assert_int_eq(kvd_sequence_wait(u.sequence, UINT64_MAX), -ESTALE);
        ck_assert_int_eq(kvd_sequence_wait(u.sequence, UINT64_MAX), -ESTALE);
        ck_assert_uint_eq(user_resident(&u), 8);
        ck_assert_int_eq(wait_status(killer), 0);
        waitpid(in.pid, NULL, 0);
        kill(worker, SIGKILL);
        user_close(&u);
        instance_sweep(&in);
}
END_TEST

/* ---- a worker that does not answer ----------------------------------------------------------- */

static char config[96];

static void write_deadline(uint32_t seconds) {
        FILE *f = fopen(config, "we");

        ck_assert_ptr_nonnull(f);
        fprintf(f, "[daemon]\nworker_deadline = %u\n", seconds);
        fclose(f);
}

/* Starts a daemon that can be reloaded. Returns the socket that gets its notifications. */
static int start_with_deadline(uint32_t seconds) {
        const char *arguments[] = {"--private",
                                   in.dir,
                                   "--config",
                                   config,
                                   "--pool",
                                   "64M",
                                   "--set",
                                   "daemon.segment=1M",
                                   "--set",
                                   "daemon.quarantine_ms=20",
                                   "--backend",
                                   getenv("KVD_TEST_BACKEND") ?: "host",
                                   instance_on_gpu() ? "--set" : NULL,
                                   "daemon.reserve=1M",
                                   NULL};
        int fd;

        instance_make_dir(&in);
        snprintf(config, sizeof config, "%s/kvd.conf", in.dir);
        write_deadline(seconds);
        fd = instance_notified(&in);
        instance_run(&in, arguments, true);
        ck_assert_int_eq(strncmp(next_state(fd), "READY=1", 7), 0);
        user_open(&u, in.socket, spilling);
        return fd;
}

static void reload_deadline(int fd, uint32_t seconds) {
        write_deadline(seconds);
        ck_assert_int_eq(kill(in.pid, SIGHUP), 0);
        ck_assert_int_eq(strncmp(next_state(fd), "RELOADING=1", 11), 0);
        ck_assert_str_eq(next_state(fd), "READY=1");
}

/*
 * A worker that exceeds its deadline is killed. The short deadline holds only for the job that the
 * stopped worker gets: the next worker, which may be slow, has an hour.
 */
START_TEST(one_that_does_not_answer_is_ended) {
        int fd = start_with_deadline(3600);
        pid_t worker;

        user_append(&u, 8);
        worker = user_worker(&u);
        WAIT_UNTIL(user_info(&u).jobs_waiting == 0 && user_info(&u).jobs > 0);
        ck_assert_int_eq(kill(worker, SIGSTOP), 0);
        reload_deadline(fd, 1);
        ck_assert_uint_eq(cool_all(), 8);
        expect_answers();
        reload_deadline(fd, 3600);
        WAIT_UNTIL(user_info(&u).worker_starts >= 2);
        user_spill(&u);
        close(fd);
        stop();
}
END_TEST

/*
 * Kills workers until the parent ends. If a worker's life was too short for a job, the next one's
 * may be twice as long.
 */
static _Noreturn void kill_workers(pid_t parent) {
        const uint32_t first = instance_on_gpu() ? 1000000 : 30000; /* a context takes time */
        struct peer_end *p = peer_attach(in.socket);
        uint32_t random = 12345, pause = first;
        uint64_t jobs = 0;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        while (getppid() == parent) {
                struct kvd_msg_daemon_info_reply info =
                        peer_ok(p, (struct kvd_msg){.number = KVD_MSG_daemon_info})
                                .daemon_info_reply;

                pause = info.jobs > jobs ? first : MIN(2 * pause, 4000000);
                jobs = info.jobs;
                if (info.worker)
                        kill((pid_t)info.worker, SIGKILL);
                random = random * 1103515245 + 12345;
                usleep(1000 + random % pause);
        }
        _exit(0);
}

/* Workers die at random while a client spills and revives: every byte is right at every moment. */
START_TEST(no_byte_is_lost_with_workers_that_die_at_random) {
        pid_t killer, parent = getpid();

        start(NULL, spilling);
        user_append(&u, 32);
        user_worker(&u);
        killer = fork();
        if (killer == 0)
                kill_workers(parent);
        for (int round = 0; round < 60 || user_info(&u).worker_starts <= 6; round++) {
                user_spill(&u);
                user_revive(&u);
        }
        kill(killer, SIGKILL);
        waitpid(killer, NULL, 0);
        ck_assert_uint_gt(user_info(&u).worker_starts, 5);
        ck_assert_uint_eq(user_flags(&u, KVD_ENTRY_APPROX), 0);
        ck_assert_uint_eq(user_counter(&u, KVD_SPACE_REVIVE_BROKEN), 0);
        user_spill(&u);
        user_revive(&u);
        stop();
}
END_TEST

static bool is_gone(pid_t pid) {
        return waitpid(pid, NULL, WNOHANG) == pid || (kill(pid, 0) < 0 && errno == ESRCH);
}

/* It notices by its socket. If it is stopped, the kernel kills it. */
START_TEST(a_worker_ends_with_its_daemon) {
        pid_t worker;

        prctl(PR_SET_CHILD_SUBREAPER, 1);
        start(NULL, spilling);
        user_append(&u, 8);
        worker = user_worker(&u);
        WAIT_UNTIL(user_info(&u).jobs > 0); /* by now it has asked the kernel for that */
        if (_i)
                ck_assert_int_eq(kill(worker, SIGSTOP), 0);
        ck_assert_int_eq(kill(in.pid, SIGKILL), 0);
        waitpid(in.pid, NULL, 0);
        WAIT_UNTIL(is_gone(worker));
        ck_assert_uint_eq(user_resident(&u), 8);
        user_close(&u);
        instance_sweep(&in);
}
END_TEST

/* ---- memory ---------------------------------------------------------------------------------- */

static uint32_t mappings(pid_t pid) {
        char path[64], line[512];
        uint32_t n = 0;
        FILE *f;

        snprintf(path, sizeof path, "/proc/%d/maps", pid);
        f = fopen(path, "r");
        while (f && fgets(line, sizeof line, f))
                n += strstr(line, "memfd:kvd") != NULL;
        if (f)
                fclose(f);
        return n;
}

/* Only the memory for jobs stays mapped. */
START_TEST(a_deleted_space_is_unmapped) {
        struct kvd_msg delete = {.number = KVD_MSG_space_delete,
                                 .space_delete = {.space = kvd_slice_of("s"), .force = 1}};
        pid_t worker;

        start(NULL, spilling);
        user_append(&u, 8);
        user_spill(&u);
        worker = user_worker(&u);
        ck_assert_uint_gt(mappings(worker), 3);
        peer_ok(u.peer, delete);
        WAIT_UNTIL(mappings(worker) == 1);
        user_close(&u);
        instance_end(&in);
}
END_TEST

/* ---- without one ----------------------------------------------------------------------------- */

START_TEST(without_a_worker_requests_fail_at_once) {
        const char *const off[] = {"daemon.worker=off", NULL};
        const char *const methods[] = {"kvreviver=on", "memshare=on", "hshare=on", "keydiff=on",
                                       NULL};
        uint32_t slots[2] = {0, 1};
        struct kvd_block block;

        start(off, methods);
        user_append(&u, 8);
        ck_assert_int_eq(kvd_alloc(u.space, 1, &block), 1);
        ck_assert_int_eq(kvd_sequence_cool(u.sequence, 2, slots, KVD_COOL_SPILL), -EOPNOTSUPP);
        ck_assert_msg(strstr(kvd_error(), "worker"), "%s", kvd_error());
        ck_assert_int_eq(kvd_sequence_cool(u.sequence, 2, slots, KVD_COOL_VAGUE), -EOPNOTSUPP);
        ck_assert_int_eq(kvd_sequence_revive(u.sequence, 2, slots, KVD_REVIVE_EXACT), -EOPNOTSUPP);
        ck_assert_int_eq(kvd_sequence_step(u.sequence, 0, 64), -EOPNOTSUPP);
        ck_assert_int_eq(kvd_sequence_critical(u.sequence, 1, &block, 1, 1, 1), -EOPNOTSUPP);
        ck_assert_int_eq(kvd_prefix_sample(u.space, 50, 0, NULL, 1) < 0, 1);
        ck_assert_int_eq(kvd_sequence_cool(u.sequence, 2, slots, KVD_COOL_DROP), 2);
        WAIT_UNTIL((user_sync(&u), user_resident(&u)) == 6);
        WAIT_UNTIL(user_info(&u).jobs_waiting == 0);
        ck_assert_uint_eq(user_info(&u).worker_starts, 0);
        kvd_free(u.space, 1, &block);
        stop();
}
END_TEST

static const char *const options_of_children[] = {"--worker", "--disk", "--remote"};

START_TEST(people_cannot_start_workers) {
        const char *const arguments[] = {"--worker", "7", NULL};

        instance_make_dir(&in);
        instance_run(&in, arguments, false);
        ck_assert_int_eq(wait_status(in.pid), 1);
        instance_sweep(&in);
}
END_TEST

/*
 * The daemon is killed while it starts a process. Requests that it has sent must not be done, as
 * the next daemon may have given the memory to another client.
 */
START_TEST(an_orphan_answers_nothing) {
        char *const arguments[] = {"kvd", (char *)options_of_children[_i], NULL};
        const struct kvd_msg question = {.number = KVD_MSG_work_forget, .serial = 1};
        static uint8_t frame[KVD_FRAME_MAX];
        int ends[2], status;
        pid_t daemon;

        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
        ck_assert_int_eq(kvd_frame_send(ends[0], frame,
                                        (size_t)kvd_msg_encode(&question, frame, sizeof frame),
                                        NULL, 0),
                         0);
        daemon = fork();
        if (daemon == 0)
                _exit(sys->spawn(getenv("KVD"), arguments, ends[1]) < 0);
        close(ends[1]);
        ck_assert_int_eq(waitpid(daemon, &status, 0), daemon);
        ck_assert_int_eq(status, 0);
        ck_assert_int_le(recv(ends[0], frame, sizeof frame, 0), 0);
        close(ends[0]);
}
END_TEST

SUITE("worker",
      TESTS(a_worker_comes_when_it_is_needed, one_that_is_killed_is_replaced,
            work_in_flight_is_done_again, a_wait_gets_all, a_forked_child_waits_for_nothing,
            a_short_wait_times_out, a_wait_outlives_a_worker_that_dies, a_wait_ends_with_the_daemon,
            one_that_does_not_answer_is_ended, no_byte_is_lost_with_workers_that_die_at_random),
      LOOPS(2, a_worker_ends_with_its_daemon), TESTS(a_deleted_space_is_unmapped),
      /* a pool on a GPU needs a worker */
      WHEN(!instance_on_gpu(), TESTS(without_a_worker_requests_fail_at_once)),
      TESTS(people_cannot_start_workers),
      LOOPS(ARRAY_SIZE(options_of_children), an_orphan_answers_nothing))
