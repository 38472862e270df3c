/* SPDX-License-Identifier: Apache-2.0 */

/* The file tier in host memory: counts the places of exact copies that its records name (Q21). */

#include "ipc/base/place.h"
#include "store/check/check.h"
#include "store/file/file.h"
#include "store/file/host.h"

#define RECORD_NS 5u

bool check_records(struct walk *w, uint64_t *at) {
        const struct file *file = space_store(w->space)->file;
        uint64_t n = file && file->host && file->config.host ?
                             (uint64_t)file->catalog.n_extents * FILE_SLOTS :
                             0;

        for (; *at < n && check_may_go_on(w); ++*at) {
                uint32_t place;

                w->spent += RECORD_NS;
                if (!file->catalog.extents[*at / FILE_SLOTS].slot_bytes) {
                        *at |= FILE_SLOTS - 1;
                        continue;
                }
                place = host_copy(file, w->space, (uint32_t)*at);
                if (place == KVD_NOWHERE)
                        continue;
                w->audit->places += check_mixed(place);
                w->audit->n_places++;
        }
        return *at >= n;
}
