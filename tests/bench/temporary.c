/* SPDX-License-Identifier: Apache-2.0 */

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/bench/temporary.h"

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw) {
        return remove(path);
}

int with_temporary(int (*run)(char **argv, const char *dir), char **argv) {
        char dir[64];
        int r;

        snprintf(dir, sizeof dir, "%s/kvd-bench-XXXXXX",
                 access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
        if (!mkdtemp(dir))
                return -1;
        r = run(argv, dir);
        nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
        return r;
}
