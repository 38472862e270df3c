/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Messages of calls that cannot fail, which could not be sent before the deadline because another
 * thread's call had the connection. They are kept here and sent with the next call to the same
 * daemon. If that daemon is gone, they are dropped.
 */

#include <string.h>

#include "client/internal.h"
#include "ipc/base/sys.h"

struct later {
        struct later *next;
        uint64_t epoch; /* of the connection that the message is for */
        struct kvd_msg msg;
        kvd_ref refs[]; /* blocks of msg.release */
};

static void push(struct kvd *handle, struct later *later) {
        later->next = atomic_load(&handle->later);
        while (!atomic_compare_exchange_weak(&handle->later, &later->next, later))
                ;
}

static void keep(struct kvd *handle, uint64_t epoch, const struct kvd_msg *msg, const kvd_ref *refs,
                 uint32_t n) {
        struct later *later = sys->calloc(1, sizeof *later + n * sizeof *refs);

        if (!later)
                return; /* the daemon frees it all when the connection ends */
        later->epoch = epoch;
        later->msg = *msg;
        if (n) {
                memcpy(later->refs, refs, n * sizeof *refs);
                later->msg.release.blocks.data = later->refs;
        }
        push(handle, later);
}

void later_release(const struct view *view, const kvd_ref *refs, uint32_t n) {
        const struct kvd_msg msg = {.number = KVD_MSG_release,
                                    .release = {view->handle, {refs, n * (uint32_t)sizeof *refs}}};

        keep(view->space->handle, view->epoch, &msg, refs, n);
}

void later_detach(struct kvd *handle, uint64_t epoch, uint32_t space) {
        keep(handle, epoch, &(struct kvd_msg){.number = KVD_MSG_detach, .detach = {space}}, NULL,
             0);
}

void later_close(const struct view *view, uint32_t sequence) {
        const struct kvd_msg msg = {.number = KVD_MSG_table,
                                    .table = {.space = view->handle,
                                              .op = 2,
                                              .sequence = sequence}};

        keep(view->space->handle, view->epoch, &msg, NULL, 0);
}

void later_send(struct kvd *handle) {
        struct later *later = atomic_exchange(&handle->later, NULL), *next;

        for (; later; later = next) {
                next = later->next;
                if (later->epoch == handle->epoch && conn_is_open(handle->conn))
                        handle_call(handle, later->msg.number, &later->msg.attach, NULL, NULL);
                free(later);
        }
}
