/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The exporter holds memory for each number that was requested. The memory is allocated by
 * cuMemAlloc in the exporter's own context, and cleared before its handle leaves the process. The
 * exporter ends with its owner.
 */

#include "daemon/process/exporter/main.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/process/child_end.h"
#include "ipc/base/device.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "ipc/base/why.h"

#define PROBE_BYTES ((size_t)2 << 20)
#define NUMBERS 8192u

struct exporter {
        struct kvd_device device;
        bool open;
        cu_address memory[NUMBERS]; /* owned; 0: none */
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

/* The context stays current, since there is only one thread. */
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

/* ---- the owner's requests -------------------------------------------------------------------- */

static int answer(const struct kvd_msg *question, struct kvd_fds *fds, struct kvd_msg *reply,
                  struct kvd_why *why) {
        static struct cu_ipc_handle handle; /* in use until the reply is sent */
        int r;

        if (question->number != KVD_MSG_export || question->export.device.size != 16 ||
            question->export.number >= NUMBERS)
                return EPROTO;
        exporter.why.line[0] = 0;
        r = open_device(question->export.device.data);
        if (r == 0)
                r = make(&exporter.memory[question->export.number], question->export.bytes,
                         &handle);
        *why = exporter.why;
        reply->export_reply.handle = (struct kvd_slice){&handle, sizeof handle};
        return r;
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
        dprintf(SYS_SPAWN_FD, "%s", r == 0 ? "ok" : exporter.why.line);
        return r < 0;
}

int exporter_main(int argc, char **argv) {
        int r = asked_begin("kvd-exporter", "--exporter", "exporter process");

        if (r == 0)
                r = argc > 2 ? probe(argv[2]) : asked_serve(answer);
        return r;
}
