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
#include "ipc/base/layout.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "ipc/base/why.h"

#define PROBE_BYTES ((size_t)2 << 20)
#define NUMBERS 8192u

struct exporter {
        struct kvd_device devices[KVD_SHARDS]; /* those with a context are open */
        cu_address memory[NUMBERS];            /* owned; 0: none */
        struct kvd_why why;
};

static struct exporter exporter; /* lives as long as the process */

static int check(const struct kvd_cuda *cuda, cu_result error, const char *what) {
        char text[128];

        if (error == CU_OK)
                return 0;
        return kvd_refuse(&exporter.why, kvd_cuda_errno(error), "%s: %s", what,
                          kvd_cuda_why(cuda, error, text, sizeof text));
}

/* ---- memory ---------------------------------------------------------------------------------- */

static int refuse(const struct kvd_device *device, int error) {
        return kvd_refuse(&exporter.why, error, "%s", device->why);
}

/* Each GPU is opened once, and stays open. */
static int open_device(const uint8_t uuid[16], struct kvd_device **ret) {
        struct kvd_device *d = exporter.devices;
        struct cu_uuid wanted;
        int r;

        memcpy(wanted.bytes, uuid, sizeof wanted.bytes);
        while (d->context && memcmp(&d->uuid, &wanted, sizeof wanted) != 0)
                if (++d == exporter.devices + KVD_SHARDS)
                        return kvd_refuse(&exporter.why, -EPROTO, "too many GPUs");
        *ret = d;
        if (d->context)
                return 0;
        r = kvd_device_open(d, &wanted);
        if (r == 0)
                return 0;
        refuse(d, r);
        *d = (struct kvd_device){0};
        return r;
}

static int fill(const struct kvd_cuda *cuda, cu_address *at, uint64_t bytes,
                struct cu_ipc_handle *handle) {
        int r = check(cuda, cuda->cuMemAlloc(at, bytes), "cuMemAlloc");

        if (r < 0) {
                *at = 0;
                return r;
        }
        r = check(cuda, cuda->cuMemsetD8Async(*at, 0, bytes, NULL), "cuMemsetD8Async");
        if (r == 0)
                r = check(cuda, cuda->cuCtxSynchronize(), "cuCtxSynchronize");
        return r < 0 ? r : check(cuda, cuda->cuIpcGetMemHandle(handle, *at), "cuIpcGetMemHandle");
}

static int make(const uint8_t uuid[16], cu_address *at, uint64_t bytes,
                struct cu_ipc_handle *handle) {
        struct kvd_device *device;
        int r = open_device(uuid, &device);

        if (r < 0)
                return r;
        r = kvd_device_enter(device);
        if (r < 0)
                return refuse(device, r);
        if (*at)
                device->cuda->cuMemFree(*at);
        *at = 0;
        r = fill(device->cuda, at, bytes, handle);
        kvd_device_leave(device);
        return r;
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
        r = make(question->export.device.data, &exporter.memory[question->export.number],
                 question->export.bytes, &handle);
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
                r = make(uuid, &at, PROBE_BYTES, &handle);
        dprintf(SYS_SPAWN_FD, "%s", r == 0 ? "ok" : exporter.why.line);
        return r < 0;
}

int exporter_main(int argc, char **argv) {
        int r = asked_begin("kvd-exporter", "--exporter", "exporter process");

        if (r == 0)
                r = argc > 2 ? probe(argv[2]) : asked_serve(answer);
        return r;
}
