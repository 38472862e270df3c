/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_DOCTOR_H
#define KVCTL_DOCTOR_H

/*
 * What this machine can do for kvd, each thing tried by a real call, in a process of its own that
 * may crash or hang: kvctl itself never loads a driver.
 */

#include <stdint.h>

#include "ipc/base/cuda.h"
#include "ipc/base/util.h"

enum health { HEALTH_OK, HEALTH_MISSING, HEALTH_NOTE };

#define FINDING_VALUES 4

struct finding {
        enum health health;
        uint64_t value[FINDING_VALUES]; /* of a probe's own meaning */
        struct cu_uuid uuid;
        char text[300];
};

/* 0: what was found is in f. Anything else is said in f, too, and f->health is not HEALTH_OK. */
typedef void probe_fn(struct finding *f, uint32_t device);

/* Runs it in a child, at most that long. */
void probe(probe_fn *function, uint32_t device, unsigned seconds, struct finding *ret);

/*
 * For probes that need two processes: starts another one, before the driver is loaded. Its end of a
 * socket is what function gets; ours is returned. It ends with us.
 */
int probe_other(void (*function)(int socket, uint32_t device), uint32_t device);
int socket_send(int socket, const void *bytes, size_t size, int fd); /* fd -1: none */
int socket_take(int socket, void *bytes, size_t size, int *fd);      /* whole, or -EIO */

_printf_(3, 4) void found(struct finding *f, enum health health, const char *format, ...);

/* ---- the GPU --------------------------------------------------------------------------------- */

probe_fn probe_driver;   /* value: CUDA version, devices */
probe_fn probe_device;   /* value: memory, capability, MPS */
/* a chunk made without a context, imported, mapped, used by another process */
probe_fn probe_vmm;
probe_fn probe_readonly; /* the same, mapped for reading */
probe_fn probe_legacy;
probe_fn probe_order_device, probe_order_host, probe_order_store;
probe_fn probe_kernels;  /* a launch, its result compared */
probe_fn probe_cublas;

/* ---- the system ------------------------------------------------------------------------------ */

probe_fn probe_memfd;    /* sealed against writing */
probe_fn probe_pidfd;
probe_fn probe_uring;
probe_fn probe_huge;
probe_fn probe_limits;
probe_fn probe_memlock;
probe_fn probe_around;   /* containers, virtual machines */
probe_fn probe_mps;      /* value: 1 if its control daemon runs */

#endif
