/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Socket addresses from paths. A path that does not fit is refused, because the kernel would
 * truncate it to another path.
 */

#include "ipc/address.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

int kvd_address_make(const char *path, struct kvd_address *ret) {
        size_t n = strlen(path);

        if (n == 0 || (path[0] == '@' && n == 1))
                return -EINVAL;
        if (n >= sizeof ret->un.sun_path)
                return -ENAMETOOLONG;
        *ret = (struct kvd_address){.un.sun_family = AF_UNIX};
        memcpy(ret->un.sun_path, path, n);
        ret->size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n);
        if (path[0] == '@')
                ret->un.sun_path[0] = 0; /* an abstract name has no terminating NUL */
        else
                ret->size += 1;
        return 0;
}
