/* SPDX-License-Identifier: Apache-2.0 */

/* What a space is, for all rooms: its name, domain, numbers and index. */

#include "store/cache/cache.h"

const char *space_name(const struct space *space) {
        return space->name;
}

struct domain *space_domain(const struct space *space) {
        return space->domain;
}

uint32_t space_number(const struct space *space) {
        return space->number;
}

uint32_t space_place(const struct space *space) {
        return space->listed.place;
}

const struct kvd_index *space_index(const struct space *space) {
        return space->ix;
}

int space_index_fd(const struct space *space) {
        return space->index.fd_ro;
}
