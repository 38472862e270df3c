/* SPDX-License-Identifier: Apache-2.0 */

/* Compares the kernel's path of a descriptor with the one noted before. */

#include "daemon/children/file_place.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

void file_place_note(struct file_place *place, int fd) {
        char link[32];
        ssize_t n;

        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        n = readlink(link, place->path, sizeof place->path - 1);
        place->path[n > 0 ? n : 0] = 0;
}

bool file_place_holds(const struct file_place *place, int fd) {
        struct file_place now;

        file_place_note(&now, fd);
        return !now.path[0] || strcmp(now.path, place->path) == 0;
}
