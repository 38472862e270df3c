/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/daemon.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/conn.h"
#include "client/kvd.h"

#define START_MS 20000
#define MAX_ARGUMENTS 24

_Noreturn void die(const char *format, ...) {
        va_list args;

        va_start(args, format);
        vfprintf(stderr, format, args);
        va_end(args);
        fputc('\n', stderr);
        exit(1);
}

/* ---- the process -------------------------------------------------------------------------------------------- */

static void run_child(const struct daemon *d, const char *const *arguments, int ready) {
        const char *binary = getenv("KVD");
        const char *argv[MAX_ARGUMENTS] = {"kvd", "--private", d->dir, "--backend", "host", "--ready-fd"};
        char number[16];
        int n = 6;

        snprintf(number, sizeof number, "%d", ready);
        argv[n++] = number;
        while (arguments && *arguments && n < MAX_ARGUMENTS - 1)
                argv[n++] = *arguments++;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        execv(binary ? binary : "kvd", (char *const *)argv);
        die("cannot run kvd (set KVD to the binary): %s", strerror(errno));
}

void daemon_again(struct daemon *d, const char *const *arguments) {
        struct pollfd p = {.events = POLLIN};
        int ready[2];
        char byte;

        if (pipe(ready) < 0)
                die("pipe: %s", strerror(errno));
        d->pid = fork();
        if (d->pid == 0) {
                close(ready[0]);
                run_child(d, arguments, ready[1]);
        }
        close(ready[1]);
        p.fd = ready[0];
        if (poll(&p, 1, START_MS) != 1 || read(ready[0], &byte, 1) != 1)
                die("kvd did not become ready");
        while (read(ready[0], &byte, 1) > 0)
                ; /* until it has closed its end, for who counts descriptors */
        close(ready[0]);
}

void daemon_start(struct daemon *d, const char *const *arguments) {
        strcpy(d->dir, "/tmp/kvd-test-XXXXXX");
        if (!mkdtemp(d->dir))
                die("mkdtemp: %s", strerror(errno));
        snprintf(d->socket, sizeof d->socket, "%s/kvd.sock", d->dir);
        daemon_again(d, arguments);
}

void daemon_stop(struct daemon *d) {
        int status;

        kill(d->pid, SIGTERM);
        if (waitpid(d->pid, &status, 0) != d->pid || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
                die("kvd did not end cleanly: status %#x", status);
        d->pid = 0;
}

void daemon_kill(struct daemon *d) {
        kill(d->pid, SIGKILL);
        waitpid(d->pid, NULL, 0);
        d->pid = 0;
}

void daemon_sweep(struct daemon *d) {
        char path[512];
        struct dirent *e;
        DIR *dir = opendir(d->dir);

        while (dir && (e = readdir(dir))) {
                snprintf(path, sizeof path, "%s/%s", d->dir, e->d_name);
                unlink(path);
        }
        if (dir)
                closedir(dir);
        rmdir(d->dir);
}

/* ---- what it holds ------------------------------------------------------------------------------------------ */

uint32_t daemon_fds(const struct daemon *d) {
        char path[64];
        uint32_t n = 0;
        DIR *dir;

        snprintf(path, sizeof path, "/proc/%d/fd", d->pid);
        dir = opendir(path);
        if (!dir)
                die("%s: %s", path, strerror(errno));
        while (readdir(dir))
                n++;
        closedir(dir);
        return n - 2;
}

uint64_t daemon_rss_kib(const struct daemon *d) {
        char path[64], line[128];
        unsigned long long kib = 0;
        FILE *f;

        snprintf(path, sizeof path, "/proc/%d/status", d->pid);
        f = fopen(path, "re");
        while (f && fgets(line, sizeof line, f))
                if (sscanf(line, "RssAnon: %llu", &kib) == 1)
                        break;
        if (f)
                fclose(f);
        return kib;
}

/* ---- questions to it ------------------------------------------------------------------------------------------ */

struct conn *daemon_connect(const struct daemon *d) {
        struct conn *conn;

        if (conn_open(d->socket, "test", &conn) < 0)
                die("%s", kvd_error());
        return conn;
}

void space_facts(struct conn *conn, uint32_t nth, struct kvd_msg_space_info_reply *ret) {
        ret->next = 0;
        do {
                struct kvd_msg_space_info request = {ret->next};

                if (conn_call(conn, KVD_MSG_space_info, &request, ret) < 0)
                        die("space_info: %s", kvd_error());
        } while (nth--);
}

static void check_space(struct conn *conn, const char *name) {
        struct kvd_msg_check request = {.space = kvd_slice_of(name)};
        struct kvd_msg_check_reply reply;
        char first[256];

        do {
                if (conn_call(conn, KVD_MSG_check, &request, &reply) < 0)
                        die("check: %s", kvd_error());
                if (reply.broken)
                        die("space %s: %u invariants broken, first: %s", name, reply.broken,
                            kvd_slice_copy(reply.first, first, sizeof first));
                request.cursor = reply.next;
        } while (reply.next);
}

static bool next_space(struct conn *conn, struct kvd_msg_space_info_reply *info, char name[64]) {
        struct kvd_msg_space_info request = {info->next};
        int r = conn_call(conn, KVD_MSG_space_info, &request, info);

        if (r == -ENOENT)
                return false;
        if (r < 0)
                die("space_info: %s", kvd_error());
        kvd_slice_copy(info->name, name, 64);
        return true;
}

void expect_clean(struct conn *conn) {
        struct kvd_msg_space_info_reply info = {0};
        char name[64];

        while (next_space(conn, &info, name)) {
                if (info.free + info.filling + info.sealed + info.limbo != info.total)
                        die("space %s: free + filling + sealed + limbo is not total", name);
                check_space(conn, name);
        }
}

static bool is_quiet(struct conn *conn) {
        struct kvd_msg_space_info_reply info = {0};
        char name[64];

        while (next_space(conn, &info, name))
                if (info.filling || info.limbo || info.clients || info.leases)
                        return false;
        return true;
}

void expect_quiet(struct conn *conn, uint32_t ms) {
        for (uint32_t i = 0; i <= ms / 5; i++) {
                if (is_quiet(conn))
                        return;
                usleep(5000);
        }
        die("clients that are gone still hold something after %u ms", ms);
}
