/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Memory limits are found wherever they are set. Folders of files imitate what the kernel shows on
 * machines and in containers, with both versions of cgroups.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "daemon/base/memory_limit.h"
#include "ipc/base/util.h"
#include "tests/lib/instance.h"
#include "tests/lib/suite.h"

#define MIB (UINT64_C(1) << 20)

static struct instance in; /* its folder */
static struct memory_limit limit;

static void setup(void) {
        instance_make_dir(&in);
}

static void teardown(void) {
        char command[128];

        snprintf(command, sizeof command, "rm -r '%s'", in.dir);
        ck_assert_int_eq(system(command), 0);
}

/* Also creates the folders in the path. */
static void put(const char *name, const char *text) {
        char path[256];
        FILE *f;

        ck_assert_int_lt(snprintf(path, sizeof path, "%s/%s", in.dir, name), (int)sizeof path);
        for (char *slash = path + strlen(in.dir); (slash = strchr(slash + 1, '/'));) {
                *slash = 0;
                mkdir(path, 0700);
                *slash = '/';
        }
        f = fopen(path, "w");
        ck_assert_ptr_nonnull(f);
        fputs(text, f);
        fclose(f);
}

static const struct {
        const char *files[12]; /* name, text, ... */
        uint64_t bytes;
        bool soft;
        const char *group;
} machines[] = {
        /* version 2: the unit's own limit, not the root's */
        {{"proc/self/cgroup", "0::/system.slice/kvd.service\n", "sys/fs/cgroup/memory.max", "max\n",
          "sys/fs/cgroup/system.slice/kvd.service/memory.max", "104857600\n"},
         100 * MIB,
         false,
         "/system.slice/kvd.service"},
        /* a parent has a lower limit */
        {{"proc/self/cgroup", "0::/a/b\n", "sys/fs/cgroup/a/memory.max", "52428800\n",
          "sys/fs/cgroup/a/b/memory.max", "104857600\n"},
         50 * MIB,
         false,
         "/a"},
        /* memory.high is lower than memory.max; if they are equal, memory.max counts */
        {{"proc/self/cgroup", "0::/a\n", "sys/fs/cgroup/a/memory.max", "104857600\n",
          "sys/fs/cgroup/a/memory.high", "52428800\n"},
         50 * MIB,
         true,
         "/a"},
        {{"proc/self/cgroup", "0::/a\n", "sys/fs/cgroup/a/memory.max", "104857600\n",
          "sys/fs/cgroup/a/memory.high", "104857600\n"},
         100 * MIB,
         false,
         "/a"},
        /* a container: the path is the host's, and the mount begins with the container's cgroup */
        {{"proc/self/cgroup", "0::/docker/1234\n", "sys/fs/cgroup/memory.max", "104857600\n"},
         100 * MIB,
         false,
         "/"},
        {{"proc/self/cgroup", "0::/\n", "sys/fs/cgroup/memory.max", "104857600\n"},
         100 * MIB,
         false,
         "/"},
        /* outside of the namespace: files that happen to match the path do not count */
        {{"proc/self/cgroup", "0::/../a\n", "sys/fs/cgroup/memory.max", "104857600\n",
          "sys/fs/a/memory.max", "52428800\n", "sys/fs/cgroup/a/memory.max", "52428800\n"},
         100 * MIB,
         false,
         "/"},
        /* version 1, and both versions mounted */
        {{"proc/self/cgroup", "5:cpu,cpuacct:/c\n4:memory:/a/b\n0::/u\n",
          "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "104857600\n",
          "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n",
          "sys/fs/cgroup/u/memory.max", "52428800\n"},
         100 * MIB,
         false,
         "/a/b"},
        {{"proc/self/cgroup", "0::/u\n4:hugetlb,memory:/a:b\n",
          "sys/fs/cgroup/memory/a:b/memory.limit_in_bytes", "104857600\n",
          "sys/fs/cgroup/u/memory.max", "52428800\n"},
         100 * MIB,
         false,
         "/a:b"},
        /* no limit, or none that can be read */
        {{"proc/self/cgroup", "0::/a\n", "sys/fs/cgroup/a/memory.max", "max\n",
          "sys/fs/cgroup/a/memory.high", "max\n"},
         UINT64_MAX,
         false,
         ""},
        {{"proc/self/cgroup", "nonsense\n4\n5:memory\n:::\n\n"}, UINT64_MAX, false, ""},
        {{"proc/self/cgroup", ""}, UINT64_MAX, false, ""},
        {{NULL}, UINT64_MAX, false, ""},
};

START_TEST(the_lowest_limit_is_found) {
        for (const char *const *file = machines[_i].files; file[0]; file += 2)
                put(file[0], file[1]);
        memory_limit_read(in.dir, &limit);
        ck_assert_uint_eq(limit.bytes, machines[_i].bytes);
        ck_assert_int_eq(limit.soft, machines[_i].soft);
        ck_assert_str_eq(limit.group, machines[_i].group);
        ck_assert_uint_eq(memory_usable(in.dir), MIN(memory_usable("/nonexistent"), limit.bytes));
}
END_TEST

/* A path of maximum depth: folders that do not exist are skipped on the way up. */
START_TEST(a_long_path) {
        char text[8192] = "0::";

        for (int i = 0; i < 1000; i++)
                strcat(text, "/long");
        put("proc/self/cgroup", strcat(text, "\n"));
        put("sys/fs/cgroup/long/memory.max", "104857600\n");
        memory_limit_read(in.dir, &limit);
        ck_assert_str_eq(limit.group, "/long");
}
END_TEST

START_TEST(a_pool_above_the_limit_is_reported) {
        struct kvd_why why;

        put("proc/self/cgroup", "0::/a\n");
        put("sys/fs/cgroup/a/memory.max", "104857600\n");
        memory_limit_read(in.dir, &limit);
        ck_assert(!memory_limit_exceeded(&limit, 100 * MIB, &why));
        ck_assert(memory_limit_exceeded(&limit, 400 * MIB, &why));
        ck_assert_str_eq(why.line, "pool = 400M is more than the memory that the cgroup /a allows "
                                   "(100M): the kernel will kill kvd when that much is used");
        put("sys/fs/cgroup/a/memory.high", "52428800\n");
        memory_limit_read(in.dir, &limit);
        ck_assert(memory_limit_exceeded(&limit, 100 * MIB, &why));
        ck_assert_str_eq(why.line, "pool = 100M is more than the memory that the cgroup /a allows "
                                   "(50M): the kernel will slow down kvd when that much is used");
        put("sys/fs/cgroup/a/memory.max", "max\n");
        put("sys/fs/cgroup/a/memory.high", "max\n");
        memory_limit_read(in.dir, &limit);
        ck_assert(!memory_limit_exceeded(&limit, UINT64_MAX, &why));
}
END_TEST

SUITE("memory-limit", FIXTURE(setup, teardown),
      LOOPS(ARRAY_SIZE(machines), the_lowest_limit_is_found),
      TESTS(a_long_path, a_pool_above_the_limit_is_reported))
