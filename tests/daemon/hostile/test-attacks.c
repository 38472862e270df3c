/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One attack after another on a real daemon, while a well-behaved client works all the time. After
 * each: the daemon lives, the victim had no wrong byte and no error and was never kept waiting for
 * long, every invariant holds, and the daemon's descriptors and memory are what they were.
 *
 *      test-attacks [NAME]     only attacks whose name contains this
 */

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/conn.h"
#include "ipc/base/util.h"
#include "tests/daemon/hostile/hostile.h"
#include "tests/lib/sanitized.h"

#define ATTACK_SECONDS 30u
#define STALL_NS UINT64_C(2000000000)
#define KIB_PER_BAD 64u
/* set aside for clients and frames at the start, and not touched before the first attack */
#define KIB_SLACK 1536u

/* ---- afterwards ------------------------------------------------------------------------------ */

static bool is_other(const struct kvd_msg_space_info_reply *info) {
        return !kvd_slice_is(info->name, "victim");
}

/* Spaces that an attack has left behind. */
static void delete_others(struct hostile *h) {
        struct kvd_msg_space_info_reply info = {0};
        uint32_t cursor = 0;
        char name[64];

        while (conn_call(h->conn, KVD_MSG_space_info, &(struct kvd_msg_space_info){cursor},
                         &info) == 0) {
                cursor = info.next;
                if (!is_other(&info))
                        continue;
                kvd_slice_copy(info.name, name, sizeof name);
                conn_call(h->conn, KVD_MSG_space_delete,
                          &(struct kvd_msg_space_delete){.space = kvd_slice_of(name), .force = 1},
                          NULL);
                cursor = 0;
        }
}

static void expect_same_daemon(const struct hostile *h, const struct attack_row *a) {
        uint64_t rss, allowed = h->rss_kib + KIB_SLACK + a->bad_connections * KIB_PER_BAD;

        if (waitpid(h->daemon.pid, NULL, WNOHANG) != 0)
                die("%s: the daemon is dead", a->name);
        WAIT_UNTIL(instance_fds(&h->daemon) == h->fds);
        rss = instance_rss_kib(&h->daemon);
        if (rss > allowed && !SANITIZED)
                die("%s: the daemon's memory has grown from %llu to %llu KiB", a->name,
                    (unsigned long long)h->rss_kib, (unsigned long long)rss);
}

static void expect_happy_victim(const struct hostile *h, const struct attack_row *a) {
        struct victim_facts *f = h->victim.facts;
        uint64_t before = f->operations;

        for (int i = 0; i < 2000 && f->operations < before + 5; i++)
                usleep(1000);
        if (f->operations < before + 5)
                die("%s: the victim does not get on", a->name);
        if (f->bytes_wrong || f->errors)
                die("%s: the victim read %llu wrong bytes and had %llu errors", a->name,
                    (unsigned long long)f->bytes_wrong, (unsigned long long)f->errors);
}

/* ---- one attack ------------------------------------------------------------------------------ */

static void run_attack(const struct hostile *h, const struct attack_row *a) {
        pid_t pid = fork();
        int status;

        if (pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                alarm(ATTACK_SECONDS);
                a->run(h);
                fflush(stdout);
                _exit(0);
        }
        waitpid(pid, &status, 0);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
                die("%s: the attacker ended with status %#x", a->name, status);
}

/* The victim did not have to wait too long. */
static void attack_once(struct hostile *h, const struct attack_row *a) {
        struct victim_facts *f = h->victim.facts;
        uint64_t before = f->operations;

        f->most_work_ns = 0;
        run_attack(h, a);
        delete_others(h);
        expect_clean(h->conn);
        expect_same_daemon(h, a);
        expect_happy_victim(h, a);
        printf("%-46s victim: %5llu operations, %4llu ms of work for one at most\n", a->name,
               (unsigned long long)(f->operations - before),
               (unsigned long long)f->most_work_ns / 1000000);
        fflush(stdout);
        if (f->most_work_ns > STALL_NS && !SANITIZED)
                die("%s: the daemon worked for %llu ms while the victim waited for one answer",
                    a->name, (unsigned long long)f->most_work_ns / 1000000);
}

static void attack_all(struct hostile *h, const struct attack_row *a, const char *only) {
        for (; a->name; a++)
                if (!only || strstr(a->name, only))
                        attack_once(h, a);
}

int main(int argc, char **argv) {
        const char *only = argc > 1 ? argv[1] : NULL;
        struct hostile h;

        signal(SIGPIPE, SIG_IGN);
        instance_start(&h.daemon, SETTINGS("daemon.pool=4M", "daemon.segment=256K",
                                           "daemon.pages=small", "daemon.log=error"));
        victim_start(&h.victim, &h.daemon);
        h.conn = instance_connect(&h.daemon);
        while (h.victim.facts->operations < 300) /* until the pool has all its segments */
                usleep(1000);
        methods_warm_up(&h);
        delete_others(&h);
        usleep(300000);
        h.fds = instance_fds(&h.daemon);
        h.rss_kib = instance_rss_kib(&h.daemon);
        attack_all(&h, frame_attacks, only);
        attack_all(&h, session_attacks, only);
        attack_all(&h, block_attacks, only);
        attack_all(&h, memory_attacks, only);
        attack_all(&h, method_attacks, only);
        attack_all(&h, storm_attacks, only);
        victim_stop(&h.victim);
        expect_quiet(h.conn);
        expect_clean(h.conn);
        conn_close(h.conn);
        instance_stop(&h.daemon);
        instance_sweep(&h.daemon);
        return 0;
}
