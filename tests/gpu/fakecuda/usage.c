/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Device memory is memfds with a name. /proc shows which of them exist, and so how much memory is
 * in use: the open descriptors and mappings of all processes that may be inspected. A killed
 * process leaves nothing behind, and a descriptor that outlives its maker counts. A descriptor
 * inside a socket is not seen.
 */

#include <ctype.h>
#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/gpu/fakecuda/driver.h"

struct files {
        const char *name; /* "/memfd:fakecuda-all-0-" */
        uint64_t inodes[4096], bytes;
        unsigned n;
};

int usage_memfd(const struct device *device, const char *kind) {
        char name[48];

        snprintf(name, sizeof name, "fakecuda-%s-%d-%s", fake_settings.group, device->number, kind);
        return memfd_create(name, MFD_CLOEXEC);
}

bool usage_is_ours(int fd, const char *kind, int *device) {
        char path[32], link[80] = "", group[17], name[16];

        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        return readlink(path, link, sizeof link - 1) > 0 &&
               sscanf(link, "/memfd:fakecuda-%16[a-z0-9]-%d-%15[a-z]", group, device, name) == 3 &&
               strcmp(group, fake_settings.group) == 0 && strcmp(name, kind) == 0;
}

static void count(struct files *files, uint64_t inode, uint64_t bytes) {
        for (unsigned i = 0; i < files->n; i++)
                if (files->inodes[i] == inode)
                        return;
        if (files->n == ARRAY_SIZE(files->inodes))
                abort();
        files->inodes[files->n++] = inode;
        files->bytes += bytes;
}

static void count_open(struct files *files, const char *pid) {
        char path[PATH_MAX], link[80];
        struct dirent *entry;
        struct stat st;
        DIR *folder;
        ssize_t n;

        snprintf(path, sizeof path, "/proc/%s/fd", pid);
        folder = opendir(path);
        while (folder && (entry = readdir(folder))) {
                snprintf(path, sizeof path, "/proc/%s/fd/%s", pid, entry->d_name);
                n = readlink(path, link, sizeof link - 1);
                if (n <= 0)
                        continue;
                link[n] = '\0';
                if (strncmp(link, files->name, strlen(files->name)) == 0 && stat(path, &st) == 0)
                        count(files, st.st_ino, (uint64_t)st.st_size);
        }
        if (folder)
                closedir(folder);
}

/*
 * Memory is mapped whole, so a mapping is as large as its file. Parts into which mprotect splits it
 * do not matter.
 */
static void count_mapped(struct files *files, const char *pid) {
        char path[64], line[512];
        unsigned long from, to, inode;
        FILE *maps;

        snprintf(path, sizeof path, "/proc/%s/maps", pid);
        maps = fopen(path, "re");
        while (maps && fgets(line, sizeof line, maps))
                if (strstr(line, files->name) &&
                    sscanf(line, "%lx-%lx %*s %*x %*s %lu", &from, &to, &inode) == 3)
                        count(files, inode, to - from);
        if (maps)
                fclose(maps);
}

/* The files of all processes, or of all but one. */
static const struct files *files_of_all(const struct device *device, pid_t but) {
        static struct files files;
        static char name[48];
        struct dirent *entry;
        DIR *folder = opendir("/proc");

        snprintf(name, sizeof name, "/memfd:fakecuda-%s-%d-", fake_settings.group, device->number);
        files = (struct files){.name = name};
        while (folder && (entry = readdir(folder)))
                if (isdigit((unsigned char)entry->d_name[0]) && atoi(entry->d_name) != but) {
                        count_open(&files, entry->d_name);
                        count_mapped(&files, entry->d_name);
                }
        if (folder)
                closedir(folder);
        return &files;
}

uint64_t usage_bytes(const struct device *device) {
        return fake_settings.shared_memory ? files_of_all(device, 0)->bytes : device->used;
}

bool usage_is_elsewhere(const struct device *device, int fd) {
        const struct files *files = files_of_all(device, getpid());
        struct stat st;

        if (fstat(fd, &st) < 0)
                abort();
        for (unsigned i = 0; i < files->n; i++)
                if (files->inodes[i] == st.st_ino)
                        return true;
        return false;
}

bool usage_fits(const struct device *device, uint64_t more) {
        uint64_t used = usage_bytes(device);

        return more <= fake_settings.memory && used <= fake_settings.memory - more;
}
