/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/daemon/harness.h"

#include <check.h>
#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "ipc/address.h"
#include "ipc/base/util.h"

/* ---- the daemon ------------------------------------------------------------------------------------------------ */

void instance_make_dir(struct instance *in) {
        *in = (struct instance){.pid = -1};
        strcpy(in->dir, "/tmp/kvd-test-XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(in->dir));
        snprintf(in->socket, sizeof in->socket, "%s/kvd.sock", in->dir);
}

static void wait_ready(int fd) {
        struct pollfd p = {fd, POLLIN, 0};
        char newline = 0;

        ck_assert_int_eq(poll(&p, 1, 30000), 1);
        ck_assert_msg(read(fd, &newline, 1) == 1 && newline == '\n', "kvd did not start");
        close(fd);
}

void instance_run(struct instance *in, const char *const arguments[], bool ready) {
        const char *argv[64] = {getenv("KVD_BIN")};
        char number[16];
        int ends[2], n = 1;

        ck_assert_msg(argv[0] != NULL, "KVD_BIN is not set");
        while (arguments[n - 1]) {
                argv[n] = arguments[n - 1];
                n++;
        }
        ck_assert_int_eq(pipe(ends), 0);
        in->pid = fork();
        if (in->pid == 0) {
                close(ends[0]);
                snprintf(number, sizeof number, "%d", ends[1]);
                argv[n] = ready ? "--ready-fd" : NULL;
                argv[n + 1] = number;
                setenv("LISTEN_PID", "0", 0);
                execv(argv[0], (char **)argv);
                _exit(127);
        }
        close(ends[1]);
        if (ready)
                wait_ready(ends[0]);
        else
                close(ends[0]);
}

bool instance_on_gpu(void) {
        return getenv("KVD_TEST_BACKEND") != NULL;
}

void instance_start(struct instance *in, const char *const settings[]) {
        const char *arguments[60] = {"--private", NULL, "--pool", "64M", "--set", "daemon.segment=1M",
                                     "--backend", getenv("KVD_TEST_BACKEND") ?: "host",
                                     "--set", "daemon.quarantine_ms=20"};
        int n = 10;

        instance_make_dir(in);
        arguments[1] = in->dir;
        for (; settings && *settings; settings++) {
                arguments[n++] = "--set";
                arguments[n++] = *settings;
        }
        instance_run(in, arguments, true);
}

int wait_status(pid_t pid) {
        int status;

        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void instance_remove_dir(struct instance *in) {
        char path[400];
        struct dirent *entry;
        DIR *d = opendir(in->dir);

        while (d && (entry = readdir(d))) {
                snprintf(path, sizeof path, "%s/%s", in->dir, entry->d_name);
                unlink(path);
        }
        if (d)
                closedir(d);
        rmdir(in->dir);
}

void instance_stop(struct instance *in) {
        ck_assert_int_eq(kill(in->pid, SIGTERM), 0);
        ck_assert_int_eq(wait_status(in->pid), 0);
        ck_assert_int_eq(access(in->socket, F_OK), -1);
        instance_remove_dir(in);
}

unsigned instance_fds(const struct instance *in) {
        char path[64];
        unsigned n = 0;
        DIR *d;

        snprintf(path, sizeof path, "/proc/%d/fd", in->pid);
        d = opendir(path);
        ck_assert_ptr_nonnull(d);
        while (readdir(d))
                n++;
        closedir(d);
        return n - 2;
}

unsigned instance_free_fd(const struct instance *in) {
        char path[64], target[256];
        unsigned fd = 0;

        do
                snprintf(path, sizeof path, "/proc/%d/fd/%u", in->pid, fd++);
        while (readlink(path, target, sizeof target) > 0);
        return fd - 1;
}

double instance_cpu(const struct instance *in) {
        unsigned long user, system;
        char path[64];
        FILE *f;

        snprintf(path, sizeof path, "/proc/%d/stat", in->pid);
        f = fopen(path, "r");
        ck_assert_int_eq(fscanf(f, "%*d %*s %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &system), 2);
        fclose(f);
        return (double)(user + system) / (double)sysconf(_SC_CLK_TCK);
}

/* ---- a connection ---------------------------------------------------------------------------------------------- */

struct peer_end *peer_connect(const char *socket_path) {
        struct peer_end *p = calloc(1, sizeof *p);
        struct kvd_address address;

        ck_assert_ptr_nonnull(p);
        ck_assert_int_eq(kvd_address_make(socket_path, &address), 0);
        p->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        ck_assert_int_ge(p->fd, 0);
        ck_assert_msg(connect(p->fd, kvd_address_of(&address), address.size) == 0, "%s: %s", socket_path,
                      strerror(errno));
        ck_assert_int_eq(kvd_decoder_new(&p->decoder), 0);
        return p;
}

struct peer_end *peer_attach(const char *socket_path) {
        struct peer_end *p = peer_connect(socket_path);

        peer_ok(p, (struct kvd_msg){.number = KVD_MSG_attach, .attach = {KVD_PROTOCOL, kvd_slice_of("test")}});
        return p;
}

struct peer_end *peer_close(struct peer_end *p) {
        kvd_fds_close(&p->fds);
        kvd_decoder_free(p->decoder);
        close(p->fd);
        free(p);
        return NULL;
}

void peer_send(struct peer_end *p, const struct kvd_msg *request) {
        struct kvd_msg msg = *request;
        ssize_t n;

        msg.serial = ++p->serial;
        n = kvd_msg_encode(&msg, p->frame, sizeof p->frame);
        ck_assert_int_gt(n, 0);
        ck_assert_int_eq(kvd_frame_send(p->fd, p->frame, (size_t)n, NULL, 0), 0);
}

bool peer_receive(struct peer_end *p, struct kvd_msg *ret) {
        struct pollfd readable = {p->fd, POLLIN, 0};
        ssize_t n;

        ck_assert_msg(poll(&readable, 1, 10000) == 1, "no answer for ten seconds");
        kvd_fds_close(&p->fds);
        n = kvd_frame_receive(p->fd, p->frame, &p->fds, 0);
        if (n == 0 || n == -ECONNRESET)
                return false;
        ck_assert_int_gt(n, 0);
        ck_assert_msg(kvd_msg_decode(p->decoder, p->frame, (size_t)n, ret) == 0, "%s", kvd_decoder_why(p->decoder));
        return true;
}

struct kvd_msg peer_call(struct peer_end *p, struct kvd_msg request) {
        struct kvd_msg reply;

        peer_send(p, &request);
        ck_assert_msg(peer_receive(p, &reply), "the daemon closed the connection");
        ck_assert_uint_eq(reply.serial, p->serial);
        ck_assert(reply.number == KVD_MSG_error || reply.number == request.number + KVD_REPLY);
        return reply;
}

struct kvd_msg peer_ok(struct peer_end *p, struct kvd_msg request) {
        struct kvd_msg reply = peer_call(p, request);

        ck_assert_msg(reply.number != KVD_MSG_error, "%s: %.*s", kvd_msg_info(request.number)->name,
                      (int)reply.error.text.size, (const char *)reply.error.text.data);
        return reply;
}

void peer_refused(struct peer_end *p, struct kvd_msg request, int error) {
        struct kvd_msg reply = peer_call(p, request);

        ck_assert_uint_eq(reply.number, KVD_MSG_error);
        ck_assert_int_eq(-(int)reply.error.code, error);
        ck_assert_uint_gt(reply.error.text.size, 0);
}

uint32_t peer_open_space(struct peer_end *p, const char *name) {
        struct kvd_msg reply;

        reply = peer_ok(p, (struct kvd_msg){
                .number = KVD_MSG_space,
                .space = {.name = kvd_slice_of(name), .create = 1, .layers = 1, .kv_heads = 1, .head_dim = 8,
                          .block_tokens = 4, .dtype = 2, .vocab = 1000}});
        ck_assert_uint_eq(p->fds.n, instance_on_gpu() ? 3 : 2);
        return reply.space_reply.space;
}

struct kvd_msg peer_client(struct peer_end *p, pid_t pid) {
        struct kvd_msg reply = {0};

        do {
                reply = peer_call(p, (struct kvd_msg){.number = KVD_MSG_client_info,
                                                      .client_info = {reply.client_info_reply.next}});
                if (reply.number == KVD_MSG_error)
                        return (struct kvd_msg){0};
        } while (reply.client_info_reply.pid != (uint32_t)pid);
        return reply;
}
