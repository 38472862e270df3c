/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A file in shared memory has a memory policy of its own, which is set through a mapping and stays
 * when that ends.
 */

#include "ipc/base/numa.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

uint64_t numa_nodes(void) {
        uint64_t nodes[16] = {0}; /* as many as kernels are built for */
        int mode = MPOL_DEFAULT;

        if (syscall(SYS_get_mempolicy, &mode, NULL, 0, NULL, 0) < 0 || mode != MPOL_DEFAULT ||
            syscall(SYS_get_mempolicy, NULL, nodes, 1024, NULL, MPOL_F_MEMS_ALLOWED) < 0)
                return 0;
        return nodes[0] & (nodes[0] - 1) ? nodes[0] : 0;
}

/* Removes the processors of a list as "0-3,8" from the set. */
static void remove_listed(const char *list, cpu_set_t *set) {
        char *end;

        for (const char *at = list; *at >= '0' && *at <= '9'; at = *end == ',' ? end + 1 : end) {
                unsigned long first = strtoul(at, &end, 10),
                              last = *end == '-' ? strtoul(end + 1, &end, 10) : first;

                for (unsigned long i = first; i <= last && i < CPU_SETSIZE; i++)
                        CPU_CLR(i, set);
        }
}

int numa_here(void) {
        char path[64], list[1024] = "";
        unsigned cpu, node;
        cpu_set_t mine;
        FILE *file;

        if (sched_getaffinity(0, sizeof mine, &mine) < 0 || getcpu(&cpu, &node) < 0)
                return -1;
        snprintf(path, sizeof path, "/sys/devices/system/node/node%u/cpulist", node);
        file = fopen(path, "re");
        if (!file)
                return -1;
        if (fgets(list, sizeof list, file))
                remove_listed(list, &mine);
        fclose(file);
        return CPU_COUNT(&mine) ? -1 : (int)node;
}

int numa_place(int fd, uint64_t from, uint64_t bytes, uint32_t node) {
        void *at = sys->mmap(NULL, bytes, PROT_NONE, MAP_SHARED, fd, (off_t)from);
        int r;

        if (at == MAP_FAILED)
                return negative_errno();
        r = sys->prefer_node(at, bytes, node) < 0 ? negative_errno() : 0;
        munmap(at, bytes);
        return r;
}
