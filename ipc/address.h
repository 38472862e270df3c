/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_IPC_ADDRESS_H
#define KVD_IPC_ADDRESS_H

#include <sys/socket.h>
#include <sys/un.h>

struct kvd_address {
        struct sockaddr_un un;
        socklen_t size;
};

/*
 * path: a path, or '@' and an abstract name. -EINVAL: it is empty; -ENAMETOOLONG: it has more than
 * 107 bytes.
 */
int kvd_address_make(const char *path, struct kvd_address *ret);

static inline const struct sockaddr *kvd_address_of(const struct kvd_address *a) {
        return (const struct sockaddr *)&a->un;
}

#endif
