/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Finds the limits of memory that apply to this process. Limits of parent cgroups apply too, so
 * this walks up from the path in /proc/self/cgroup to the root of the mount. In a container, that
 * path may be the host's; then only the root can be read, which is the container's cgroup.
 */

#include "daemon/base/memory_limit.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/util.h"

struct version {
        const char *mount;
        const char *hard, *soft; /* files; soft may be NULL */
};

static const struct version version1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", NULL};
static const struct version version2 = {"/sys/fs/cgroup", "memory.max", "memory.high"};

/* A line is "number:controllers:/path", or "0::/path" for version 2. */
static const struct version *read_line(char *line, const char **path) {
        char *controllers = strchr(line, ':'), *colon, *name;

        colon = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!colon)
                return NULL;
        *colon = 0;
        *path = colon + 1;
        colon[1 + strcspn(colon + 1, "\n")] = 0;
        if (!controllers[1])
                return &version2;
        for (controllers++; (name = strsep(&controllers, ","));)
                if (strcmp(name, "memory") == 0)
                        return &version1;
        return NULL;
}

/* Where both versions are mounted, a controller belongs to one of them: to version 1 if listed. */
static const struct version *find_group(const char *root, char path[static PATH_MAX]) {
        const struct version *found = NULL, *version;
        char file[PATH_MAX], line[PATH_MAX + 64];
        const char *at;
        FILE *f;

        snprintf(file, sizeof file, "%s/proc/self/cgroup", root);
        f = fopen(file, "re");
        if (!f)
                return NULL;
        while (found != &version1 && fgets(line, sizeof line, f)) {
                version = read_line(line, &at);
                if (!version)
                        continue;
                found = version;
                snprintf(path, PATH_MAX, "%s", at);
        }
        fclose(f);
        return found;
}

/* "max", or a missing file, is no limit. */
static void take_least(const char *folder, const char *name, bool soft, const char *group,
                       struct memory_limit *least) {
        char file[2 * PATH_MAX + 64];
        unsigned long long bytes;
        FILE *f;

        snprintf(file, sizeof file, "%s%s/%s", folder, group, name);
        f = fopen(file, "re");
        if (!f)
                return;
        if (fscanf(f, "%llu", &bytes) == 1 && bytes < least->bytes) {
                *least = (struct memory_limit){.bytes = bytes, .soft = soft};
                snprintf(least->group, sizeof least->group, "%s", group[0] ? group : "/");
        }
        fclose(f);
}

static void take_both(const struct version *version, const char *folder, const char *group,
                      struct memory_limit *least) {
        take_least(folder, version->hard, false, group, least);
        if (version->soft)
                take_least(folder, version->soft, true, group, least);
}

void memory_limit_read(const char *root, struct memory_limit *ret) {
        char path[PATH_MAX], folder[PATH_MAX];
        const struct version *version = find_group(root, path);
        char *slash;

        *ret = (struct memory_limit){.bytes = UINT64_MAX};
        if (!version)
                return;
        snprintf(folder, sizeof folder, "%s%s", root, version->mount);
        if (strcmp(path, "/") == 0 || strstr(path, "/..")) /* "/..": outside our namespace */
                path[0] = 0;
        take_both(version, folder, path, ret);
        while ((slash = strrchr(path, '/'))) {
                *slash = 0;
                take_both(version, folder, path, ret);
        }
}

uint64_t memory_usable(const char *root) {
        uint64_t all = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
        struct memory_limit limit;

        memory_limit_read(root, &limit);
        return MIN(all, limit.bytes);
}

bool memory_limit_exceeded(const struct memory_limit *limit, uint64_t pool, struct kvd_why *why) {
        if (pool <= limit->bytes)
                return false;
        kvd_refuse(
                why, 0,
                "pool = %lluM is more than the memory that the cgroup %s allows (%lluM): the kernel will %s kvd when that much is used",
                (unsigned long long)(pool >> 20), limit->group,
                (unsigned long long)(limit->bytes >> 20), limit->soft ? "slow down" : "kill");
        return true;
}

uint64_t memory_oom_kills(const char *root) {
        char path[PATH_MAX], line[128];
        unsigned long long n = 0;
        FILE *f;

        snprintf(path, sizeof path, "%s/proc/vmstat", root);
        f = fopen(path, "re");
        if (!f)
                return 0;
        while (fgets(line, sizeof line, f) && sscanf(line, "oom_kill %llu", &n) != 1)
                ;
        fclose(f);
        return n;
}
