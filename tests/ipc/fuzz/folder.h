/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_FUZZ_FOLDER_H
#define KVD_TESTS_FUZZ_FOLDER_H

/*
 * A folder with a single file, which is rewritten for each input: kvlm reads its files from a
 * model's folder.
 */

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/ipc/fuzz/fuzz.h"

static char folder[64];
static char folder_file[128];

static void folder_remove(void) {
        unlink(folder_file);
        rmdir(folder);
}

static const char *folder_with(const char *name, const uint8_t *data, size_t size) {
        int fd;

        if (!folder[0]) {
                snprintf(folder, sizeof folder, "/tmp/kvlm-fuzz-XXXXXX");
                MUST(mkdtemp(folder) != NULL);
                snprintf(folder_file, sizeof folder_file, "%s/%s", folder, name);
                atexit(folder_remove);
        }
        fd = open(folder_file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        MUST(fd >= 0 && write(fd, data, size) == (ssize_t)size);
        close(fd);
        return folder;
}

#endif
