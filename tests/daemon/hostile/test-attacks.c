/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One attack after another on a real daemon, while a well-behaved client works all the time. After
 * each attack the daemon must be alive, the victim must have seen no wrong byte, no error and no
 * long wait, every invariant must hold, and the daemon's descriptors and memory must be back to
 * their previous size.
 *
 *      test-attacks [--apart] [NAME]   only attacks whose name contains this
 *
 * The attacker and the victim share a domain. With --apart, which needs root, each is a user in its
 * own domain, and the victim, which has a guarantee, must not even be refused a block.
 */

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "ipc/base/util.h"
#include "tests/daemon/hostile/hostile.h"
#include "tests/daemon/hostile/raw.h"
#include "tests/lib/sanitized.h"

#define ATTACK_SECONDS 240u /* an attack that takes longer hangs */
#define USER_A 65534u       /* the attacker */
#define USER_B 65533u
#define KIB_PER_BAD 64u
/* memory for clients and frames, reserved at the start and not touched before the first attack */
#define KIB_SLACK 1024u
#define ATTEMPTS 3u     /* of one attack, since new memory may grow the daemon, ... */
#define MOST_GROWTHS 6u /* ... but no more than this in all attacks together */
#define BURIAL_MS 5000u /* the daemon frees the attack's spaces piece by piece */

/* ---- afterwards ------------------------------------------------------------------------------ */

static bool is_other(const struct kvd_msg_space_info_reply *info) {
        return !kvd_slice_is(info->name, "victim") || kvd_slice_is(info->domain, "a");
}

/* Deletes the spaces that an attack has left behind. */
static void delete_others(struct hostile *h) {
        struct kvd_msg_space_info_reply info = {0};
        uint32_t cursor = 0;
        char name[64], domain[64];

        while (conn_call(h->conn, KVD_MSG_space_info, &(struct kvd_msg_space_info){cursor},
                         &info) == 0) {
                cursor = info.next;
                if (!is_other(&info))
                        continue;
                kvd_slice_copy(info.name, name, sizeof name);
                kvd_slice_copy(info.domain, domain, sizeof domain);
                conn_call(h->conn, KVD_MSG_space_delete,
                          &(struct kvd_msg_space_delete){kvd_slice_of(name), kvd_slice_of(domain),
                                                         1},
                          NULL);
                cursor = 0;
        }
}

static void expect_same_daemon(const struct hostile *h, const struct attack_row *a) {
        if (waitpid(h->daemon.pid, NULL, WNOHANG) != 0)
                die("%s: the daemon is dead", a->name);
        WAIT_UNTIL(instance_fds(&h->daemon) == h->fds);
}

/*
 * Returns whether the daemon's memory has grown too far. If so, the new size is allowed from now
 * on.
 */
static bool has_grown(struct hostile *h, const struct attack_row *a) {
        uint64_t rss, allowed = h->rss_kib + KIB_SLACK + a->bad_connections * KIB_PER_BAD;

        if (SANITIZED)
                return false;
        for (uint32_t i = 0; (rss = instance_rss_kib(&h->daemon)) > allowed; i++) {
                if (i == BURIAL_MS) {
                        printf("%s: the daemon's memory has grown from %llu to %llu KiB\n", a->name,
                               (unsigned long long)h->rss_kib, (unsigned long long)rss);
                        h->rss_kib = rss;
                        return true;
                }
                usleep(1000);
        }
        return false;
}

void hostile_goes_on(const struct hostile *h, uint64_t operations) {
        uint64_t until = h->victim.facts->operations + operations;

        WAIT_UNTIL(h->victim.facts->operations >= until);
}

static void expect_happy_victim(const struct hostile *h, const struct attack_row *a) {
        struct victim_facts *f = h->victim.facts;

        hostile_goes_on(h, 5);
        if (f->bytes_wrong || f->errors)
                die("%s: the victim read %llu wrong bytes and had %llu errors", a->name,
                    (unsigned long long)f->bytes_wrong, (unsigned long long)f->errors);
        if (h->attacker && f->refusals)
                die("%s: the victim was refused %llu times within its guarantee", a->name,
                    (unsigned long long)f->refusals);
}

uint32_t hostile_fds(const struct hostile *h) {
        uint32_t n;

        if (h->attacker && seteuid(0) < 0)
                die("seteuid: %s", strerror(errno));
        n = instance_fds(&h->daemon);
        if (h->attacker && seteuid(h->attacker) < 0)
                die("seteuid: %s", strerror(errno));
        return n;
}

/* ---- one attack ------------------------------------------------------------------------------ */

/* Opens a space of the victim's name in the attacker's domain, with memory. */
static void furnish(const struct hostile *h) {
        int fd = raw_attach(h->daemon.socket);
        kvd_ref refs[VICTIM_BLOCKS];

        if (!raw_allocate(fd, raw_open_space(fd, "victim"), VICTIM_BLOCKS, refs))
                die("the attacker's domain has no memory");
}

static void run_attack(const struct hostile *h, const struct attack_row *a) {
        pid_t pid = fork();
        int status;

        if (pid == 0) {
                if (h->attacker)
                        become_user(h->attacker);
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                alarm(ATTACK_SECONDS);
                if (h->attacker)
                        furnish(h);
                a->run(h);
                fflush(stdout);
                _exit(0);
        }
        waitpid(pid, &status, 0);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
                die("%s: the attacker ended with status %#x", a->name, status);
}

/* Runs an attack, and checks that the victim did not wait too long. */
static void attack_once(struct hostile *h, const struct attack_row *a) {
        struct victim_facts *f = h->victim.facts;
        uint64_t before = f->operations;

        f->work = (struct work_seen){0};
        run_attack(h, a);
        delete_others(h);
        expect_clean(h->conn);
        expect_same_daemon(h, a);
        expect_happy_victim(h, a);
        printf("%-46s victim: %5llu operations, %4llu ms of work for one at most\n", a->name,
               (unsigned long long)(f->operations - before),
               (unsigned long long)f->work.most_ns / 1000000);
        fflush(stdout);
        if (!work_is_bounded(&f->work))
                die("%s: the daemon worked for %llu ms while the victim waited for one answer",
                    a->name, (unsigned long long)f->work.most_ns / 1000000);
}

static void attack_until_it_rests(struct hostile *h, const struct attack_row *a) {
        static uint32_t growths;

        attack_once(h, a);
        for (uint32_t i = 1; has_grown(h, a); i++) {
                if (i == ATTEMPTS || growths++ == MOST_GROWTHS)
                        die("%s: the daemon's memory grows again and again", a->name);
                attack_once(h, a);
        }
}

static void attack_all(struct hostile *h, const struct attack_row *a, const char *only) {
        for (; a->name; a++)
                if (!only || strstr(a->name, only))
                        attack_until_it_rests(h, a);
}

/* Not --private, which is for a single user. */
static void start_for_two(struct instance *daemon) {
        instance_make_dir(daemon);
        if (chmod(daemon->dir, 0755) < 0)
                die("chmod: %s", strerror(errno));
        instance_run(daemon,
                     SETTINGS("--socket", daemon->socket, "--user", "root", "--backend", "host",
                              "--pool", "4M", "--set", "daemon.segment=256K", "--set",
                              "daemon.pages=small", "--set", "daemon.log=error", "--set",
                              "daemon.max_clients=256", "--set", "daemon.quarantine_ms=20", "--set",
                              "daemon.socket_mode=0666", "--set", "domain a.users=65534", "--set",
                              "domain b.users=65533", "--set", "domain b.guarantee=1M"),
                     true);
}

#define SAME_ANSWERS 100u

/*
 * Waits until the daemon has closed the warm-up's descriptors: their number must stay the same over
 * SAME_ANSWERS answers. Returns it.
 */
static uint32_t fds_at_rest(const struct hostile *h) {
        struct kvd_msg_daemon_info_reply info;
        uint32_t before = 0, now;

        for (uint32_t same = 0; same < SAME_ANSWERS; same++, before = now) {
                if (conn_call(h->conn, KVD_MSG_daemon_info, NULL, &info) < 0)
                        die("%s", kvd_error());
                usleep(1000);
                now = instance_fds(&h->daemon);
                same = now == before ? same : 0;
        }
        return before;
}

static void begin(struct hostile *h, bool apart) {
        if (apart)
                start_for_two(&h->daemon);
        else
                instance_start(&h->daemon, SETTINGS("daemon.pool=4M", "daemon.segment=256K",
                                                    "daemon.pages=small", "daemon.log=error",
                                                    "daemon.max_clients=256"));
        victim_start(&h->victim, &h->daemon, apart ? USER_B : 0);
        h->conn = instance_connect(&h->daemon);
        while (h->victim.facts->operations < 300) /* until the pool has all its segments */
                usleep(1000);
        methods_warm_up(h);
        delete_others(h);
        h->fds = fds_at_rest(h);
        h->rss_kib = instance_rss_kib(&h->daemon);
        h->attacker = apart ? USER_A : 0;
}

int main(int argc, char **argv) {
        bool apart = argc > 1 && strcmp(argv[1], "--apart") == 0;
        const char *only = argc > 1 + apart ? argv[1 + apart] : NULL;
        struct hostile h = {0};

        if (apart && getuid() != 0) {
                puts("skip: only root can become two other users");
                return 77;
        }
        signal(SIGPIPE, SIG_IGN);
        begin(&h, apart);
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
