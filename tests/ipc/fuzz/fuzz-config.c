/* SPDX-License-Identifier: Apache-2.0 */

/* The configuration file: any bytes give a configuration, or one error line with its place. */

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/config.h"
#include "tests/ipc/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
        struct kvd_why why = {""};
        char path[64];
        int fd = memfd_create("config", MFD_CLOEXEC), r;
        struct config config;

        MUST(fd >= 0 && write(fd, data, size) == (ssize_t)size);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        MUST(config_init(&config) == 0);
        r = config_read(&config, path, false, NULL, &why);
        if (r >= 0)
                r = config_check(&config, &why);
        MUST(r >= 0 || (why.line[0] && !strchr(why.line, '\n')));
        config_clear(&config);
        close(fd);
        return 0;
}
