/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "ipc/base/util.h"
#include "tests/gpu/fakecuda/driver.h"

static struct range *ranges;
static unsigned n_in_use; /* number of streams that work on device memory */

struct range *range_add(enum range_kind kind, cu_address at, size_t bytes, struct device *device) {
        struct range *it = calloc(1, sizeof *it);

        if (!it)
                abort();
        *it = (struct range){.next = ranges,
                             .kind = kind,
                             .at = at,
                             .bytes = bytes,
                             .device = device,
                             .fd = -1};
        ranges = it;
        return it;
}

void range_drop(struct range *range) {
        struct range **to = &ranges;

        while (*to != range)
                to = &(*to)->next;
        *to = range->next;
        free(range);
}

struct range *range_at(unsigned kinds, cu_address at) {
        struct range *it = ranges;

        while (it && !(it->kind & kinds && it->at == at))
                it = it->next;
        return it;
}

struct range *range_holding(unsigned kinds, cu_address at) {
        return range_overlapping(kinds, at, 1);
}

struct range *range_overlapping(unsigned kinds, cu_address at, size_t bytes) {
        struct range *it = ranges;

        while (it && !(it->kind & kinds && it->at < at + bytes && at < it->at + it->bytes))
                it = it->next;
        return it;
}

struct range *range_first(unsigned kinds, const struct device *device) {
        struct range *it = ranges;

        while (it && !(it->kind & kinds && it->device == device))
                it = it->next;
        return it;
}

struct range *range_of_file(unsigned kinds, int fd) {
        struct range *it = ranges;
        struct stat want, has;

        if (fstat(fd, &want) < 0)
                return NULL;
        while (it && !(it->kind & kinds && fstat(it->fd, &has) == 0 && has.st_ino == want.st_ino &&
                       has.st_dev == want.st_dev))
                it = it->next;
        return it;
}

bool range_allows(cu_address at, size_t bytes, int access) {
        cu_address end = at + bytes;

        if (end < at)
                return false;
        while (at < end) {
                const struct range *it = range_holding(RANGE_OF_DEVICE | RANGE_OF_HOST, at);

                if (!it || (it->access & access) != access)
                        return false;
                at = it->at + it->bytes;
        }
        return true;
}

void range_protect(struct range *range) {
        int prot = range->access == CU_ACCESS_NONE ? PROT_NONE :
                   range->access == CU_ACCESS_READ ? PROT_READ :
                                                     PROT_READ | PROT_WRITE;

        if (fake_settings.strict && n_in_use == 0)
                prot = PROT_NONE;
        if (mprotect((void *)(uintptr_t)range->at, ALIGN_UP(range->bytes, FAKE_PAGE), prot) < 0)
                abort();
}

void ranges_in_use(bool begin) {
        n_in_use += begin ? 1 : -1;
        if (!fake_settings.strict || n_in_use != begin)
                return; /* it was accessible, and stays so */
        for (struct range *it = ranges; it; it = it->next)
                if (it->kind & RANGE_OF_DEVICE)
                        range_protect(it);
}

bool range_each_mapped(cu_address at, size_t bytes, void (*each)(struct range *range, int data),
                       int data) {
        cu_address end = at + bytes, next = at;
        struct range *it;

        for (; next < end; next += it->bytes) {
                it = range_at(RANGE_MAPPED, next);
                if (!it)
                        return false;
        }
        if (next != end || bytes == 0)
                return false;
        for (; at < end; at = next) {
                it = range_at(RANGE_MAPPED, at);
                next = at + it->bytes;
                each(it, data);
        }
        return true;
}
