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
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define LISTED 4096 /* characters of a list as "0-3,8" */

/* Calls back with the numbers of a list that is in a file. False: it cannot be read. */
static bool read_list(const char *path, void (*each)(void *data, unsigned long n), void *data) {
        char list[LISTED] = "", *end;
        FILE *file = fopen(path, "re");
        bool whole = file && fgets(list, sizeof list, file) && strchr(list, '\n');

        if (file)
                fclose(file);
        for (const char *at = list; whole && *at >= '0' && *at <= '9';
             at = *end == ',' ? end + 1 : end) {
                unsigned long first = strtoul(at, &end, 10),
                              last = *end == '-' ? strtoul(end + 1, &end, 10) : first;

                for (unsigned long i = first; i <= last && i < CPU_SETSIZE; i++)
                        each(data, i);
        }
        return whole;
}

static void add_node(void *data, unsigned long node) {
        *(uint64_t *)data |= node < 64 ? UINT64_C(1) << node : 0;
}

/* Memory of others, such as that of a GPU or of a slow kind, is not for this. */
static uint64_t nodes_with_processors(void) {
        uint64_t nodes = 0;

        return read_list("/sys/devices/system/node/has_cpu", add_node, &nodes) ? nodes : 0;
}

uint64_t numa_nodes(void) {
        uint64_t allowed[16] = {0}, nodes; /* as many as kernels are built for */
        int mode = MPOL_DEFAULT;

        if (syscall(SYS_get_mempolicy, &mode, NULL, 0, NULL, 0) < 0 || mode != MPOL_DEFAULT ||
            syscall(SYS_get_mempolicy, NULL, allowed, 1024, NULL, MPOL_F_MEMS_ALLOWED) < 0)
                return 0;
        nodes = allowed[0] & nodes_with_processors();
        return nodes & (nodes - 1) ? nodes : 0;
}

static void remove_processor(void *data, unsigned long cpu) {
        CPU_CLR(cpu, (cpu_set_t *)data);
}

int numa_here(void) {
        char path[64];
        unsigned cpu, node;
        cpu_set_t mine;

        if (sched_getaffinity(0, sizeof mine, &mine) < 0 || getcpu(&cpu, &node) < 0)
                return -1;
        snprintf(path, sizeof path, "/sys/devices/system/node/node%u/cpulist", node);
        return read_list(path, remove_processor, &mine) && !CPU_COUNT(&mine) ? (int)node : -1;
}

int numa_place(int fd, uint64_t from, uint64_t bytes, uint32_t node) {
        void *at = sys->mmap(NULL, bytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, (off_t)from);
        int r;

        if (at == MAP_FAILED)
                return negative_errno();
        r = sys->prefer_node(at, bytes, node) < 0 ? negative_errno() : 0;
        munmap(at, bytes);
        return r;
}

int numa_node_of(int fd) {
        uint64_t bytes = sys_page_bytes(), nodes = 0;
        void *at = sys->mmap(NULL, bytes, PROT_NONE, MAP_SHARED, fd, 0);
        int mode = MPOL_DEFAULT, node = -1;

        if (at == MAP_FAILED)
                return -1;
        if (syscall(SYS_get_mempolicy, &mode, &nodes, 64 + 1, at, MPOL_F_ADDR) == 0 &&
            mode == MPOL_PREFERRED && nodes)
                node = __builtin_ctzll(nodes);
        munmap(at, bytes);
        return node;
}
