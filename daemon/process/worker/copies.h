/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_COPIES_H
#define KVD_DAEMON_PROCESS_WORKER_COPIES_H

/* Exact copies of blocks, written to and read from their places (ipc/base/place.h). */

#include "ipc/base/place.h"

struct task;

struct copy {
        uint32_t place;    /* KVD_NOWHERE: this copy is skipped */
        uint8_t *block;    /* put: source; get: destination; read: set to the copy's address */
        uint64_t checksum; /* XXH3-64. put: set; get, read: expected value */
        /*
         * An errno: ENODATA: no such place; EBADMSG: the checksum differs. get and read
         * set it to 0 on success. It is unchanged if the copy was put or skipped.
         */
        uint32_t error;
};

void copies_put(struct task *task, struct copy *copies, uint32_t n);
void copies_get(struct task *task, struct copy *copies, uint32_t n);
/* sets block to the copy itself, which stays valid until the job's end */
void copies_read(struct task *task, struct copy *copies, uint32_t n);

#endif
