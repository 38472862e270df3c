/* SPDX-License-Identifier: Apache-2.0 */

/* Whole files: those of a model are mapped; prompts, which may be pipes, are read to the end. */

#include "tools/kvlm/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "ipc/base/util.h"
#include "tools/kvlm/refuse.h"

int map_file(const char *directory, const char *name, struct mapping *ret) {
        _cleanup_(freep) char *path = NULL;
        _cleanup_(closep) int fd = -1;
        struct stat st;
        void *data;

        if (asprintf(&path, "%s/%s", directory, name) < 0)
                return refuse(-ENOMEM, "out of memory");
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || fstat(fd, &st) < 0)
                return refuse(negative_errno(), "cannot open %s: %s", path, strerror(errno));
        if (!S_ISREG(st.st_mode) || st.st_size == 0)
                return refuse(-EINVAL, "%s is %s", path,
                              S_ISREG(st.st_mode) ? "empty" : "not a regular file");
        data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (data == MAP_FAILED)
                return refuse(negative_errno(), "cannot map %s: %s", path, strerror(errno));
        ret->data = data;
        ret->size = (size_t)st.st_size;
        return 0;
}

void unmap(struct mapping *m) {
        if (m->data)
                munmap((void *)m->data, m->size);
        *m = (struct mapping){0};
}

static int read_all(FILE *f, char **ret, size_t *ret_size) {
        _cleanup_(freep) char *data = NULL;
        size_t size = 0, room = 0;

        for (;;) {
                size_t n;

                if (room - size < 2) {
                        char *larger = realloc(data, room = room ? 2 * room : 65536);

                        if (!larger)
                                return -ENOMEM;
                        data = larger;
                }
                n = fread(data + size, 1, room - size - 1, f);
                if (n == 0)
                        break;
                size += n;
        }
        if (ferror(f))
                return negative_errno();
        data[size] = '\0';
        *ret_size = size;
        *ret = STEAL(data);
        return 0;
}

int read_file(const char *path, char **ret, size_t *ret_size) {
        FILE *f = strcmp(path, "-") == 0 ? stdin : fopen(path, "re");
        int r;

        if (!f)
                return refuse(negative_errno(), "cannot open %s: %s", path, strerror(errno));
        r = read_all(f, ret, ret_size);
        if (f != stdin)
                fclose(f);
        return r < 0 ? refuse(r, "cannot read %s: %s", path, strerror(-r)) : 0;
}
