/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/container.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include "ipc/base/util.h"
#include "tests/lib/instance.h"

#define EXIT_NO_CONTAINER 3

/* ---- namespaces ------------------------------------------------------------------------------ */

static bool write_text(const char *path, const char *text) {
        int fd = open(path, O_WRONLY | O_CLOEXEC);
        bool done = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);

        closep(&fd);
        return done;
}

static bool map_root(uid_t uid, gid_t gid) {
        char users[32], groups[32];

        snprintf(users, sizeof users, "0 %u 1", uid);
        snprintf(groups, sizeof groups, "0 %u 1", gid);
        return write_text("/proc/self/setgroups", "deny") &&
               write_text("/proc/self/uid_map", users) && write_text("/proc/self/gid_map", groups);
}

/* If mounting a new /proc is not permitted, the old one stays. */
static bool furnish(uid_t uid, gid_t gid) {
        if (!map_root(uid, gid) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
                return false;
        mount("proc", "/proc", "proc", 0, NULL);
        return true;
}

static pid_t try_fork(void) {
        unsigned long flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | SIGCHLD;
        uid_t uid = geteuid();
        gid_t gid = getegid();
        pid_t pid = (pid_t)syscall(SYS_clone, flags, 0, 0, 0, 0);

        if (pid == 0 && !furnish(uid, gid))
                _exit(EXIT_NO_CONTAINER);
        return pid;
}

pid_t container_fork(void) {
        pid_t pid = try_fork();

        if (pid < 0)
                die("no container: %s", strerror(errno));
        return pid;
}

bool container_is_possible(void) {
        pid_t pid = try_fork();

        if (pid == 0)
                _exit(0);
        if (pid > 0 && wait_status(pid) == 0)
                return true;
        fprintf(stderr, "SKIP: user, pid, mount and net namespaces cannot be made here: %s\n",
                pid < 0 ? strerror(errno) : "their users or mounts are not permitted");
        return false;
}

/* ---- an old kernel --------------------------------------------------------------------------- */

void forget_socket_option(int option) {
        struct sock_filter code[] = {
                BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_setsockopt, 1, 0),
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getsockopt, 0, 3),
                BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)option, 0, 1),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOPROTOOPT),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        const struct sock_fprog program = {ARRAY_SIZE(code), code};

        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ||
            prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0)
                die("no filter of system calls: %s", strerror(errno));
}
