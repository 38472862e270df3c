/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One program, three processes: the daemon itself, its worker (--worker) and its exporter
 * (--exporter), told apart by the first argument. The exit status says whether the configuration or
 * the system is at fault.
 */

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "daemon/activation.h"
#include "daemon/daemon.h"
#include "daemon/exporter/main.h"
#include "daemon/log.h"
#include "daemon/options.h"
#include "daemon/worker/main.h"
#include "ipc/base/util.h"

enum { EXIT_CLEAN = 0, EXIT_CONFIG = 1, EXIT_SYSTEM = 2 };

static int fail(int status, const char *why) {
        log_error("%s", why);
        return status;
}

static void block_signals(void) {
        sigset_t set;

        sigemptyset(&set);
        sigaddset(&set, SIGTERM);
        sigaddset(&set, SIGINT);
        sigaddset(&set, SIGHUP);
        sigprocmask(SIG_BLOCK, &set, NULL);
        signal(SIGPIPE, SIG_IGN); /* of stderr and --ready-fd; sockets say MSG_NOSIGNAL */
}

/* A client is two descriptors, a space a few, and a segment two. */
static void raise_file_limit(void) {
        struct rlimit limit;

        if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
                return;
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
}

/*
 * SIGTERM when whoever started us ends: Linux means the thread. -ESRCH if that has happened
 * already.
 */
static int bind_to_parent(pid_t parent) {
        if (prctl(PR_SET_PDEATHSIG, SIGTERM) < 0)
                return -errno;
        return getppid() == parent ? 0 : -ESRCH;
}

static int prepare_private(const struct options *options, pid_t parent, struct kvd_why *why) {
        int r;

        if (mkdir(options->private_dir, 0700) < 0 && errno != EEXIST)
                return kvd_refuse(why, -EINVAL,
                                  "--private %s: %s; give a folder that exists or can be made",
                                  options->private_dir, strerror(errno));
        r = bind_to_parent(parent);
        return r < 0 ? kvd_refuse(why, r, "--private: the process that started kvd has ended") : 0;
}

static void tell_ready(int fd) {
        if (fd < 0)
                return;
        if (write(fd, "\n", 1) < 0)
                log_warning("--ready-fd %d: %s", fd, strerror(errno));
        close(fd);
}

static int serve(struct daemon *daemon, const struct options *options, int fd, const char *socket) {
        struct kvd_why why;

        if (daemon_handle_signals(daemon, options) < 0)
                return fail(EXIT_SYSTEM, "signals cannot be received");
        if (daemon_listen(daemon, fd, &why) < 0)
                return fail(EXIT_SYSTEM, why.line);
        log_info("kvd " KVD_PROJECT_VERSION " serves %s (%s)",
                 fd >= 0 ? "the socket of its service manager" : socket, daemon_loop_name(daemon));
        tell_ready(options->ready_fd);
        return daemon_run(daemon) < 0 ? EXIT_SYSTEM : EXIT_CLEAN;
}

static int run(const struct options *options, pid_t parent) {
        _cleanup_(daemon_freep) struct daemon *daemon = NULL;
        struct config config;
        struct kvd_why why;
        char socket[sizeof config.socket];
        int fd = -1, r;

        if (options_load(options, &config, &why) < 0)
                return fail(EXIT_CONFIG, why.line);
        strcpy(config.worker_program, "/proc/self/exe");
        memcpy(socket, config.socket, sizeof socket);
        block_signals();
        raise_file_limit();
        r = options->private_dir ? prepare_private(options, parent, &why) :
                                   activation_take(&fd, &why);
        if (r < 0) {
                config_clear(&config);
                return fail(EXIT_CONFIG, why.line);
        }
        if (daemon_new(&config, &daemon, &why) < 0)
                return fail(EXIT_SYSTEM, why.line);
        return serve(daemon, options, fd, socket);
}

static int check_config(const struct options *options) {
        struct config config;
        struct kvd_why why;

        if (options_load(options, &config, &why) < 0) {
                fprintf(stderr, "%s\n", why.line);
                return EXIT_CONFIG;
        }
        config_clear(&config);
        return EXIT_CLEAN;
}

int main(int argc, char **argv) {
        pid_t parent = getppid();
        struct options options;
        struct kvd_why why;

        if (argc > 1 && strcmp(argv[1], "--worker") == 0)
                return worker_main(argc, argv);
        if (argc > 1 && strcmp(argv[1], "--exporter") == 0)
                return exporter_main(argc, argv);
        if (options_parse(&options, argc, argv, &why) < 0) {
                fprintf(stderr, "kvd: %s\n", why.line);
                return EXIT_CONFIG;
        }
        switch (options.action) {
        case OPTIONS_PRINT_CONFIG:
                config_print(stdout);
                return EXIT_CLEAN;
        case OPTIONS_CHECK_CONFIG:
                return check_config(&options);
        case OPTIONS_VERSION:
                puts("kvd " KVD_PROJECT_VERSION);
                return EXIT_CLEAN;
        case OPTIONS_HELP:
                options_print_help(stdout);
                return EXIT_CLEAN;
        case OPTIONS_RUN:
                break;
        }
        return run(&options, parent);
}
