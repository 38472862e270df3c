/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The exporter keeps memory for each number that it was asked for. The memory is made by cuMemAlloc
 * in its own context, and cleared before its handle leaves the process. It ends with its owner, and
 * with an error of its context, since its memory is of no use then.
 */

#include "daemon/exporter/main.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/log.h"
#include "ipc/base/device.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "ipc/base/why.h"
#include "ipc/frame.h"
#include "ipc/msg.h"

#define PROBE_BYTES ((size_t)2 << 20)
#define NUMBERS 8192u

struct exporter {
        int socket;
        struct kvd_decoder *decoder;
        struct kvd_device device;
        bool open;
        cu_address memory[NUMBERS]; /* owned; 0: none */
        uint8_t in[KVD_FRAME_MAX], out[KVD_FRAME_MAX];
        struct kvd_why why;
};

static struct exporter exporter; /* lives as long as the process */

static int check(cu_result error, const char *what) {
        char text[128];

        if (error == CU_OK)
                return 0;
        return kvd_refuse(&exporter.why, kvd_cuda_errno(error), "%s: %s", what,
                      kvd_cuda_why(exporter.device.cuda, error, text, sizeof text));
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Its context stays current: there is one thread. */
static int open_device(const uint8_t uuid[16]) {
        struct cu_uuid wanted;
        int r;

        if (exporter.open)
                return 0;
        memcpy(wanted.bytes, uuid, sizeof wanted.bytes);
        r = kvd_device_open(&exporter.device, &wanted);
        if (r == 0)
                r = kvd_device_enter(&exporter.device);
        if (r < 0)
                return kvd_refuse(&exporter.why, r, "%s", exporter.device.why);
        exporter.open = true;
        return 0;
}

static int make(cu_address *at, uint64_t bytes, struct cu_ipc_handle *handle) {
        const struct kvd_cuda *cuda = exporter.device.cuda;
        int r;

        if (*at)
                cuda->cuMemFree(*at);
        *at = 0;
        r = check(cuda->cuMemAlloc(at, bytes), "cuMemAlloc");
        if (r < 0) {
                *at = 0;
                return r;
        }
        r = check(cuda->cuMemsetD8Async(*at, 0, bytes, NULL), "cuMemsetD8Async");
        if (r == 0)
                r = check(cuda->cuCtxSynchronize(), "cuCtxSynchronize");
        return r < 0 ? r : check(cuda->cuIpcGetMemHandle(handle, *at), "cuIpcGetMemHandle");
}

/* ---- the owner's questions ------------------------------------------------------------------- */

static int answer(size_t size) {
        struct kvd_msg request, reply;
        struct cu_ipc_handle handle;
        ssize_t n;
        int r;

        if (kvd_msg_decode(exporter.decoder, exporter.in, size, &request) < 0 ||
            request.number != KVD_MSG_export || request.export.device.size != 16 ||
            request.export.number >= NUMBERS)
                return -EPROTO;
        reply = (struct kvd_msg){.number = KVD_MSG_export_reply, .serial = request.serial};
        r = open_device(request.export.device.data);
        if (r == 0)
                r = make(&exporter.memory[request.export.number], request.export.bytes, &handle);
        if (r == 0) {
                reply.export_reply.handle = (struct kvd_slice){&handle, sizeof handle};
        } else {
                reply.number = KVD_MSG_error;
                reply.error.code = (uint32_t)-r;
                reply.error.text = kvd_slice_cut(exporter.why.line, KVD_MOST_error_text);
        }
        n = kvd_msg_encode(&reply, exporter.out, sizeof exporter.out);
        return n < 0 ? (int)n : kvd_frame_send(exporter.socket, exporter.out, (size_t)n, NULL, 0);
}

static int serve(void) {
        struct kvd_fds fds;
        ssize_t n;
        int r = kvd_decoder_new(&exporter.decoder);

        while (r == 0) {
                n = kvd_frame_receive(exporter.socket, exporter.in, &fds, 0);
                if (n <= 0)
                        return n == 0 || n == -ECONNRESET ? 0 : (int)n;
                kvd_fds_close(&fds);
                r = answer((size_t)n);
        }
        return r == -EPIPE || r == -ECONNRESET ? 0 : r;
}

/* ---- start ----------------------------------------------------------------------------------- */

static int parse_uuid(const char *text, uint8_t uuid[16]) {
        for (int i = 0; i < 16; i++) {
                unsigned byte;

                if (sscanf(text + 2 * i, "%2x", &byte) != 1)
                        return -EINVAL;
                uuid[i] = (uint8_t)byte;
        }
        return 0;
}

static int probe(const char *text) {
        struct cu_ipc_handle handle;
        cu_address at = 0;
        uint8_t uuid[16];
        int r = strlen(text) == 32 ? parse_uuid(text, uuid) : -EINVAL;

        if (r == 0)
                r = open_device(uuid);
        if (r == 0)
                r = make(&at, PROBE_BYTES, &handle);
        dprintf(exporter.socket, "%s", r == 0 ? "ok" : exporter.why.line);
        return r < 0;
}

static int is_socket(int fd) {
        unsigned n = sizeof(int);
        int type;

        return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &n) == 0;
}

int exporter_main(int argc, char **argv) {
        int r;

        exporter.socket = SYS_SPAWN_FD;
        if (!is_socket(exporter.socket)) {
                fprintf(stderr, "kvd: --exporter is how the daemon starts its exporter process; it "
                                "is not for people\n");
                return 1;
        }
        fcntl(exporter.socket, F_SETFD, FD_CLOEXEC);
        signal(SIGINT, SIG_IGN);
        signal(SIGHUP, SIG_IGN);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        prctl(PR_SET_NAME, "kvd-exporter");
        if (argc > 2)
                return probe(argv[2]);
        r = serve();
        if (r < 0)
                log_error("exporter %d ends: %s", getpid(), strerror(-r));
        return r < 0 ? 2 : 0;
}
