/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_DOCTOR_H
#define KVCTL_DOCTOR_H

/*
 * Probes what this machine can do for kvd, by real calls. Each probe runs in its own process, which
 * may crash or hang; kvctl itself never loads a driver.
 */

#include <stdint.h>

#include "ipc/base/cuda.h"
#include "ipc/base/util.h"

enum health { HEALTH_OK, HEALTH_MISSING, HEALTH_NOTE };

#define FINDING_VALUES 4

struct finding {
        enum health health;
        uint64_t value[FINDING_VALUES]; /* meaning depends on the probe */
        struct cu_uuid uuid;
        char text[300];
};

/* Writes its result to f. On failure, f->text says why and f->health is not HEALTH_OK. */
typedef void probe_fn(struct finding *f, uint32_t device);

/* Runs the probe in a child process, which is killed after that many seconds. */
void probe(probe_fn *function, uint32_t device, unsigned seconds, struct finding *ret);

/*
 * For probes that need two processes: starts the second one, which must be done before the driver
 * is loaded. function gets one end of a socket pair. Returns the other end, or a negative errno.
 * The second process is killed when ours ends.
 */
int probe_other(void (*function)(int socket, uint32_t device), uint32_t device);
int socket_send(int socket, const void *bytes, size_t size, int fd); /* fd -1: none */
int socket_take(int socket, void *bytes, size_t size, int *fd);      /* all size bytes, or -EIO */

_printf_(3, 4) void found(struct finding *f, enum health health, const char *format, ...);

/* ---- the GPU --------------------------------------------------------------------------------- */

probe_fn probe_driver; /* value: CUDA version, devices */
probe_fn probe_device; /* value: memory, capability, MPS */
/* a chunk made without a context, imported, mapped, used by another process */
probe_fn probe_vmm;
probe_fn probe_readonly; /* the same, mapped for reading */
probe_fn probe_legacy;
probe_fn probe_order_device, probe_order_host, probe_order_store;
probe_fn probe_kernels; /* a launch, its result compared */
probe_fn probe_cublas;

/* ---- the system ------------------------------------------------------------------------------ */

probe_fn probe_memfd; /* sealed against writing */
probe_fn probe_pidfd;
probe_fn probe_uring;
probe_fn probe_huge;
probe_fn probe_limits;
probe_fn probe_memlock;
probe_fn probe_around; /* containers, gVisor, WSL */
probe_fn probe_mps;    /* value: 1 if its control daemon runs */

#endif
