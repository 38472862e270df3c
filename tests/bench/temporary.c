/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/bench/temporary.h"

int temporary_make(char *ret, size_t room) {
        snprintf(ret, room, "%s/kvd-bench-XXXXXX",
                 access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
        return mkdtemp(ret) ? 0 : -errno;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw) {
        return remove(path);
}

void temporary_remove(const char *dir) {
        nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}
