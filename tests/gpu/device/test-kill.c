/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A client is killed right before or after each of its system calls, with work on its stream, while
 * another one reads what it publishes. The reader never sees a wrong byte that kvd_check_pin calls
 * right, and never hangs. The daemon is clean after the quarantine.
 */

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tests/gpu/device/peer.h"

#define DOCUMENTS 4u
#define BLOCKS 3u

static struct shared {
        _Atomic bool stop;
        _Atomic uint32_t round; /* each round has new documents */
        _Atomic uint64_t reads, right, gone;
} * shared;

/* ---- killing --------------------------------------------------------------------------------- */

static uint32_t until_death; /* points until it is killed; 0: it lives */
static bool counting;

static void point(void) {
        if (counting && --until_death == 0)
                raise(SIGKILL);
}

#define KILLING(type, name, parameters, arguments) \
        static type kill_##name parameters { \
                type r; \
                point(); \
                r = kvd_sys_real.name arguments; \
                point(); \
                return r; \
        }
KVD_SYS_CALLS(KILLING)
#undef KILLING

static const struct kvd_sys killing = {
#define MEMBER(type, name, parameters, arguments) .name = kill_##name,
        KVD_SYS_CALLS(MEMBER)
#undef MEMBER
};

/* ---- the one that dies ----------------------------------------------------------------------- */

static uint32_t document(uint32_t round, uint32_t n) {
        return 10 + (round * DOCUMENTS + n) % 4000;
}

static void doomed(struct role *role) {
        uint32_t round = shared->round, ids[BLOCKS];
        struct side s;

        sys = &killing;
        counting = true;
        side_open(&s, role->socket, "s");
        for (uint32_t i = 0; i < DOCUMENTS; i++) {
                struct kvd_pin pin = {0}, again = {0};

                publish(&s, document(round, i), BLOCKS, &pin);
                find(&s, document(round, i), BLOCKS, &again, ids);
                must(kvd_wait_on(s.space, &again, s.stream));
                put_read(&s, &again, ids, BLOCKS);
                kvd_unpin_on(s.space, &again, s.stream);
                kvd_unpin_on(s.space, &pin, s.stream);
        }
        sync_stream(&s);
        kvd_settle(s.space);
        side_close(&s);
        counting = false;
}

/* ---- the one that reads ---------------------------------------------------------------------- */

static void watcher(struct role *role) {
        struct side s;

        side_open(&s, role->socket, "s");
        say(role, 'o');
        while (!shared->stop) {
                uint32_t ids[BLOCKS],
                        doc = document(shared->round, (uint32_t)(shared->reads % DOCUMENTS)), n;
                struct kvd_pin pin = {0};
                int r;

                n = find(&s, doc, BLOCKS, &pin, ids);
                shared->reads++;
                if (!n)
                        continue;
                must(kvd_wait_on(s.space, &pin, s.stream));
                put_read(&s, &pin, ids, n);
                sync_stream(&s);
                r = kvd_check_pin(s.space, &pin);
                if (r == 0 && wrong_words(&s, doc, n))
                        die("document %u: wrong bytes", doc);
                if (r < 0 && r != -EIO)
                        die("document %u: %s", doc, kvd_error());
                shared->right += r == 0;
                shared->gone += r < 0;
                kvd_unpin_on(s.space, &pin, s.stream);
        }
        for (int i = 0; i < 1000 && kvd_settle(s.space); i++)
                usleep(1000);
        side_close(&s);
}

/* Returns true if the process ended by itself. */
static bool round_with(const struct instance *d, uint32_t point_of_death) {
        const char *const slow[] = {"FAKECUDA_SLOW=set:1", NULL};
        struct peer peer;
        int status;

        until_death = point_of_death;
        shared->round++;
        peer = peer_start(doomed, d->socket, slow);
        if (waitpid(peer.pid, &status, 0) != peer.pid)
                die("waitpid: %s", strerror(errno));
        close(peer.to);
        close(peer.from);
        if (WIFEXITED(status) && WEXITSTATUS(status) != 0)
                die("a process ended with status %#x at point %u", status, point_of_death);
        return WIFEXITED(status);
}

int main(void) {
        const char *const settings[] = {"daemon.quarantine_ms=20", "daemon.pool=16M", NULL};
        uint32_t n = 1;
        struct peer other;
        struct instance d;

        shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                      0);
        if (shared == MAP_FAILED)
                die("mmap: %s", strerror(errno));
        start_daemon(&d, settings);
        other = peer_start(watcher, d.socket, NULL);
        expect(&other, 'o');
        while (!round_with(&d, n)) {
                struct conn *conn = n % 8 ? NULL : instance_connect(&d);

                if (conn)
                        expect_clean(conn);
                if (conn)
                        conn_close(conn);
                n++;
        }
        WAIT_UNTIL(shared->right); /* the last round's documents stay readable */
        shared->stop = true;
        peer_end(&other);
        end_daemon(&d);
        printf("killed at %u points; %llu reads found something right, %llu what was never "
               "written\n",
               n - 1, (unsigned long long)shared->right, (unsigned long long)shared->gone);
        return n > 50 ? 0 : 1;
}
