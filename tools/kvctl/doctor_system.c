/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What the operating system offers: memory files, huge pages, io_uring, limits, containers. Each is
 * tried as the daemon would use it, not read from a version.
 */

#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <linux/memfd.h>
#include <stdio.h>
#include <string.h>
#include <sys/klog.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ipc/base/shared_file.h"
#include "tools/kvctl/doctor.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif

/* The daemon maps the index for writing and seals it; later mappings can only be read-only. */
void probe_memfd(struct finding *f, uint32_t device) {
        struct shared_file file;
        int r = shared_file_new("kvctl-doctor", 4096, SHARED_MAPPED | SHARED_ONE_WRITER, &file);

        if (r < 0)
                found(f, HEALTH_MISSING, "memfds cannot be sealed against writing: %s (Linux 5.1)",
                      strerror(-r));
        else if (mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, 0) != MAP_FAILED)
                found(f, HEALTH_MISSING, "a sealed memfd can be mapped for writing");
        else
                found(f, HEALTH_OK, "shared memory, sealed so that clients cannot write the index");
        shared_file_close(&file);
}

static bool has_peers_pidfds(void) {
        _cleanup_(closep) int fd = -1;
        socklen_t n = sizeof fd;
        int ends[2];
        bool has;

        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
                return false;
        has = getsockopt(ends[0], SOL_SOCKET, SO_PEERPIDFD, &fd, &n) == 0;
        close(ends[0]);
        close(ends[1]);
        return has;
}

void probe_pidfd(struct finding *f, uint32_t device) {
        _cleanup_(closep) int fd = (int)syscall(SYS_pidfd_open, getpid(), 0);

        if (fd < 0)
                found(f, HEALTH_MISSING, "pidfd_open: %s (Linux 5.3)", strerror(errno));
        else if (has_peers_pidfds())
                found(f, HEALTH_OK, "the kernel tells when a client's process is gone");
        else
                found(f, HEALTH_OK,
                      "the kernel tells when a client's process is gone; clients in other pid "
                      "namespaces hold a lifeline instead (Linux before 6.5)");
}

void probe_uring(struct finding *f, uint32_t device) {
        struct io_uring_params p = {0};
        int fd = (int)syscall(SYS_io_uring_setup, 8, &p);

        if (fd < 0)
                found(f, HEALTH_NOTE, "io_uring_setup: %s; the epoll loop is used instead",
                      strerror(errno));
        else
                found(f, HEALTH_OK, "available");
}

/* ---- memory and limits ----------------------------------------------------------------------- */

static uint64_t read_number(const char *path) {
        FILE *file = fopen(path, "re");
        unsigned long long n = 0;

        if (file) {
                if (fscanf(file, "%llu", &n) != 1)
                        n = 0;
                fclose(file);
        }
        return n;
}

static bool huge_page_works(void) {
        int fd = memfd_create("kvctl-doctor", MFD_CLOEXEC | MFD_HUGETLB | MFD_HUGE_2MB);
        bool works = fd >= 0 && ftruncate(fd, 2 << 20) == 0 && fallocate(fd, 0, 0, 2 << 20) == 0;

        closep(&fd);
        return works;
}

/* As the daemon does it with pages = auto. */
static bool large_page_works(void) {
        struct shared_file file;
        bool works = shared_file_new("kvctl-doctor", SHARED_LARGE, SHARED_MAPPED, &file) == 0 &&
                     fallocate(file.fd, 0, 0, 4096) == 0 &&
                     shared_file_enlarge(file.fd, 0, file.at) == 0;

        shared_file_close(&file);
        return works;
}

void probe_huge(struct finding *f, uint32_t device) {
        const char *folder = "/sys/kernel/mm/hugepages/hugepages-2048kB";
        char path[96];

        snprintf(path, sizeof path, "%s/nr_hugepages", folder);
        f->value[0] = read_number(path);
        snprintf(path, sizeof path, "%s/free_hugepages", folder);
        f->value[1] = read_number(path);
        if (huge_page_works())
                found(f, HEALTH_OK, "%llu pages of 2 MiB reserved, %llu free",
                      (unsigned long long)f->value[0], (unsigned long long)f->value[1]);
        else if (large_page_works())
                found(f, HEALTH_OK, "2 MiB, made of ordinary memory as far as it is not in pieces");
        else
                found(f, HEALTH_NOTE,
                      "none of 2 MiB: none is reserved (sysctl vm.nr_hugepages), and this kernel "
                      "makes none of ordinary memory (Linux 6.1, shmem_enabled not deny); small "
                      "pages work, too");
}

static const char *limit_text(rlim_t n, char *to, size_t size) {
        if (n == RLIM_INFINITY)
                return "unlimited";
        snprintf(to, size, "%llu", (unsigned long long)n);
        return to;
}

#define ENOUGH_FDS 4096

/*
 * A client holds a segment's descriptor only while it maps the segment. The daemon keeps one per
 * segment, and a connection and pages per client.
 */
void probe_limits(struct finding *f, uint32_t device) {
        struct rlimit limit = {0};
        char soft[24], hard[24];

        getrlimit(RLIMIT_NOFILE, &limit);
        f->value[0] = limit.rlim_cur;
        found(f, limit.rlim_max < ENOUGH_FDS ? HEALTH_NOTE : HEALTH_OK, "%s, at most %s%s",
              limit_text(limit.rlim_cur, soft, sizeof soft),
              limit_text(limit.rlim_max, hard, sizeof hard),
              limit.rlim_max < ENOUGH_FDS ?
                      ": few for a large pool with many clients (LimitNOFILE=65536)" :
                      "");
}

void probe_memlock(struct finding *f, uint32_t device) {
        struct rlimit limit = {0};
        char soft[24];

        getrlimit(RLIMIT_MEMLOCK, &limit);
        f->value[0] = limit.rlim_cur;
        found(f, HEALTH_OK, "%s bytes", limit_text(limit.rlim_cur, soft, sizeof soft));
}

/* ---- surroundings ---------------------------------------------------------------------------- */

static bool file_says(const char *path, const char *word) {
        char text[4096];
        FILE *file = fopen(path, "re");
        size_t n = file ? fread(text, 1, sizeof text - 1, file) : 0;

        if (file)
                fclose(file);
        text[n] = 0;
        return strcasestr(text, word);
}

static bool is_gvisor(void) {
        static char log[1 << 16];
        int n = klogctl(3, log, sizeof log - 1); /* read all */

        log[n > 0 ? n : 0] = 0;
        return strcasestr(log, "gvisor") || file_says("/proc/version", "gvisor");
}

static bool is_container(void) {
        return access("/.dockerenv", F_OK) == 0 || access("/run/.containerenv", F_OK) == 0 ||
               getenv("container") || file_says("/proc/1/cgroup", "docker") ||
               file_says("/proc/1/cgroup", "kubepods");
}

void probe_around(struct finding *f, uint32_t device) {
        bool wsl = file_says("/proc/version", "microsoft") || access("/dev/dxg", F_OK) == 0,
             gvisor = is_gvisor();
        bool container = is_container();

        if (gvisor)
                found(f, HEALTH_NOTE,
                      "gVisor: at most the processes of one sandbox can share GPU memory");
        else if (wsl)
                found(f, HEALTH_NOTE,
                      "WSL: trust the results above, not what is written about drivers");
        else if (container)
                found(f, HEALTH_NOTE,
                      "a container: clients in others need the socket's folder and, for legacy "
                      "handles, process numbers that differ from the owner's");
        else
                found(f, HEALTH_OK, "no container, as far as one can tell");
}

/* MPS runs if its control daemon listens in its folder. */
void probe_mps(struct finding *f, uint32_t device) {
        const char *folder = getenv("CUDA_MPS_PIPE_DIRECTORY");
        char path[256];

        snprintf(path, sizeof path, "%s/control", folder ? folder : "/tmp/nvidia-mps");
        f->value[0] = access(path, F_OK) == 0;
        if (f->value[0])
                found(f, HEALTH_NOTE,
                      "runs (%s): one client's fault on the GPU, even a store to read-only memory, kills all clients",
                      path);
        else
                found(f, HEALTH_OK, "does not run: a client's GPU fault affects no other client");
}
