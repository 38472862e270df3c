/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One attack after another on a real daemon, while a well-behaved client works all the time. After each: the daemon
 * lives, the victim had no wrong byte and no error and was never kept waiting for long, every invariant holds, and the
 * daemon's descriptors and memory are what they were.
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
#define TRIES 5
#define KIB_PER_BAD 64u
#define KIB_SLACK 1536u /* set aside for clients and frames at the start, and not touched before the first attack */

/* ---- afterwards --------------------------------------------------------------------------------------------- */

static bool is_other(const struct kvd_msg_space_info_reply *info) {
        return !kvd_slice_is(info->name, "victim");
}

/* Spaces that an attack has left behind. */
static void delete_others(struct hostile *h) {
        struct kvd_msg_space_info_reply info = {0};
        uint32_t cursor = 0;
        char name[64];

        while (conn_call(h->conn, KVD_MSG_space_info, &(struct kvd_msg_space_info){cursor}, &info) == 0) {
                cursor = info.next;
                if (!is_other(&info))
                        continue;
                kvd_slice_copy(info.name, name, sizeof name);
                conn_call(h->conn, KVD_MSG_space_delete,
                          &(struct kvd_msg_space_delete){.space = kvd_slice_of(name), .force = 1}, NULL);
                cursor = 0;
        }
}

static uint32_t settled_fds(const struct hostile *h) {
        for (int i = 0; i < 400 && daemon_fds(&h->daemon) != h->fds; i++)
                usleep(5000);
        return daemon_fds(&h->daemon);
}

static void expect_same_daemon(const struct hostile *h, const struct attack_row *a) {
        uint64_t rss, allowed = h->rss_kib + KIB_SLACK + a->bad_connections * KIB_PER_BAD;

        if (waitpid(h->daemon.pid, NULL, WNOHANG) != 0)
                die("%s: the daemon is dead", a->name);
        if (settled_fds(h) != h->fds)
                die("%s: the daemon had %u descriptors and has %u", a->name, h->fds, daemon_fds(&h->daemon));
        rss = daemon_rss_kib(&h->daemon);
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

/* ---- one attack --------------------------------------------------------------------------------------------- */

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

/* True: the victim did not have to wait too long. */
static bool attack_once(struct hostile *h, const struct attack_row *a) {
        struct victim_facts *f = h->victim.facts;
        uint64_t before = f->operations;

        f->longest_ns = 0;
        run_attack(h, a);
        delete_others(h);
        expect_clean(h->conn);
        expect_same_daemon(h, a);
        expect_happy_victim(h, a);
        printf("%-46s victim: %5llu operations, longest %4llu ms\n", a->name,
               (unsigned long long)(f->operations - before), (unsigned long long)f->longest_ns / 1000000);
        fflush(stdout);
        return f->longest_ns <= STALL_NS || SANITIZED;
}

/* The machine has other things to do, too: the victim was kept waiting if it was every time. */
static void attack_all(struct hostile *h, const struct attack_row *a, const char *only) {
        for (; a->name; a++) {
                int tries = only && !strstr(a->name, only) ? 0 : TRIES;

                while (tries > 0 && !attack_once(h, a))
                        if (--tries == 0)
                                die("%s: the victim had to wait for %llu ms, every time", a->name,
                                    (unsigned long long)h->victim.facts->longest_ns / 1000000);
        }
}

int main(int argc, char **argv) {
        static const char *const arguments[] = {"--pool", "4M", "--set", "daemon.segment=256K", "--set",
                                                "daemon.pages=small", "--set", "daemon.log=error", NULL};
        const char *only = argc > 1 ? argv[1] : NULL;
        struct hostile h;

        signal(SIGPIPE, SIG_IGN);
        daemon_start(&h.daemon, arguments);
        victim_start(&h.victim, h.daemon.socket);
        h.conn = daemon_connect(&h.daemon);
        while (h.victim.facts->operations < 300) /* until the pool has all its segments */
                usleep(1000);
        methods_warm_up(&h);
        delete_others(&h);
        usleep(300000);
        h.fds = daemon_fds(&h.daemon);
        h.rss_kib = daemon_rss_kib(&h.daemon);
        attack_all(&h, frame_attacks, only);
        attack_all(&h, session_attacks, only);
        attack_all(&h, block_attacks, only);
        attack_all(&h, memory_attacks, only);
        attack_all(&h, method_attacks, only);
        attack_all(&h, storm_attacks, only);
        victim_stop(&h.victim);
        expect_quiet(h.conn, 1000);
        expect_clean(h.conn);
        conn_close(h.conn);
        daemon_stop(&h.daemon);
        daemon_sweep(&h.daemon);
        return 0;
}
