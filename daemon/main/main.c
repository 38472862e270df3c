/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One program, six processes: the daemon itself, its keeper (--keep), its worker (--worker), its
 * exporter (--exporter), its disk process (--disk) and its remote process (--remote). The exit
 * status says whether the configuration or the system is at fault.
 */

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "daemon/main/activation.h"
#include "daemon/main/daemon.h"
#include "daemon/process/disk/main.h"
#include "daemon/process/exporter/main.h"
#include "daemon/base/identity.h"
#include "daemon/process/keeper/keeper.h"
#include "daemon/process/remote/main.h"
#include "daemon/serve/listener.h"
#include "daemon/base/log.h"
#include "daemon/main/options.h"
#include "daemon/main/private.h"
#include "daemon/base/trusted.h"
#include "daemon/process/worker/main.h"
#include "ipc/base/text.h"
#include "ipc/base/util.h"

enum { EXIT_CLEAN = 0, EXIT_CONFIG = 1, EXIT_SYSTEM = 2 };

/* Failed output is an error: half a configuration may still be valid. */
static int end_output(void) {
        int r = kvd_end_output(stdout);

        if (r < 0)
                fprintf(stderr, "kvd: cannot write: %s\n", strerror(-r));
        return r < 0 ? EXIT_SYSTEM : EXIT_CLEAN;
}

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
        signal(SIGPIPE, SIG_IGN); /* from stderr and --ready-fd; sockets use MSG_NOSIGNAL */
        signal(SIGXFSZ, SIG_IGN); /* beyond the limit of file sizes, the call fails */
}

/* A client needs two descriptors, a space a few, and a segment two. */
static void raise_file_limit(void) {
        struct rlimit limit;

        if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
                return;
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
}

/*
 * Core files contain private anonymous memory (0x1) and ELF headers (0x10), but no shared memory,
 * which has the clients' data and is as large as the pool. Child processes inherit this.
 */
static void keep_out_of_cores(void) {
        _cleanup_(closep) int fd = open("/proc/self/coredump_filter", O_WRONLY | O_CLOEXEC);

        if (fd < 0 || write(fd, "0x11", 4) < 0)
                log_warning("core files may hold what clients computed: "
                            "/proc/self/coredump_filter: %s",
                            strerror(errno));
}

static void tell_ready(int fd) {
        if (fd < 0)
                return;
        if (write(fd, "\n", 1) < 0)
                log_warning("--ready-fd %d: %s", fd, strerror(errno));
        close(fd);
}

/* State before the daemon, or its keeper, runs. */
struct start {
        struct config config; /* owned, until daemon_new takes it over */
        struct identity identity;
        struct activation handed; /* owned */
};

static int choose_identity(const struct options *options, struct start *s, struct kvd_why *why) {
        int r = identity_choose(&s->config, options->private_dir, &s->identity, why);

        if (r >= 0 && !s->identity.stays)
                s->config.owner = s->identity.uid;
        return r;
}

static int prepare(const struct options *options, pid_t parent, struct start *s,
                   struct kvd_why *why) {
        int r = 0;

        s->handed = ACTIVATION_NONE;
        if (options_load(options, &s->config, why) < 0)
                return -EINVAL;
        strcpy(s->config.worker_program, "/proc/self/exe");
        block_signals();
        raise_file_limit();
        keep_out_of_cores();
        if (options->private_dir)
                r = private_prepare(options->private_dir, parent, why);
        if (r >= 0)
                r = activation_take(&s->handed, why);
        if (r >= 0)
                r = choose_identity(options, s, why);
        if (r < 0)
                config_clear(&s->config);
        return r;
}

static int serve(struct daemon *daemon, const struct options *options, struct start *s,
                 const char *socket) {
        bool is_handed = s->handed.listen >= 0;
        struct kvd_why why;
        int r = daemon_handle_signals(daemon, options);

        if (r < 0) {
                kvd_refuse(&why, r, "signals cannot be received: %s", strerror(-r));
                return fail(EXIT_SYSTEM, why.line);
        }
        if (daemon_listen(daemon, &s->handed, &s->identity, &why) < 0)
                return fail(EXIT_SYSTEM, why.line);
        log_info("kvd " KVD_PROJECT_VERSION " serves %s (%s)",
                 is_handed ? "the socket of its service manager" : socket,
                 daemon_loop_name(daemon));
        tell_ready(options->ready_fd);
        return daemon_run(daemon) < 0 ? EXIT_SYSTEM : EXIT_CLEAN;
}

static uint32_t domains_of(const struct config *config) {
        uint32_t n = 0;

        for (const struct config_domain *d = config->domains; d; d = d->next)
                n++;
        return n;
}

static int run(const struct options *options, struct start *s) {
        _cleanup_(daemon_freep) struct daemon *daemon = NULL;
        const char *path = options->config;
        char socket[sizeof s->config.socket];
        uint32_t domains = domains_of(&s->config);
        struct kvd_why why;

        memcpy(socket, s->config.socket, sizeof socket);
        if (daemon_new(&s->config, &daemon, &why) < 0)
                return fail(EXIT_SYSTEM, why.line);
        log_info("configuration: %s; domains in it: %u",
                 path && access(path, F_OK) == 0 ? path : "no file", domains);
        return serve(daemon, options, s, socket);
}

/* The path, not /proc/self/exe: a restart uses the program that is installed there by then. */
static int own_path(char to[static PATH_MAX]) {
        ssize_t n = readlink("/proc/self/exe", to, PATH_MAX - 1);

        if (n < 0)
                return negative_errno();
        to[n] = 0;
        return 0;
}

static int keep(const struct options *options, struct start *s, int argc, char **argv) {
        _cleanup_(listener_close) struct listener listener = LISTENER_NONE;
        _cleanup_(freep) char **arguments = calloc((size_t)argc + 1, sizeof *arguments);
        char program[PATH_MAX];
        struct kvd_why why;
        int r = arguments ? own_path(program) : -ENOMEM;

        listener.fd = STEAL_FD(s->handed.listen);
        if (r < 0)
                kvd_refuse(&why, r, "kvd cannot be started: %s", strerror(-r));
        else
                r = listener.fd < 0 ? listener_open_as(&listener, &s->config, &s->identity, &why) :
                                      identity_take(&s->identity, &why);
        config_clear(&s->config);
        if (r < 0)
                return fail(EXIT_SYSTEM, why.line);
        options_of_kept(argc, argv, arguments);
        return keeper_run(program, arguments, listener.fd, options->ready_fd);
}

static int begin(const struct options *options, pid_t parent, int argc, char **argv) {
        struct kvd_why why;
        struct start s;
        int status;

        if (prepare(options, parent, &s, &why) < 0)
                return fail(EXIT_CONFIG, why.line);
        if (s.handed.listen < 0 && trusted_socket(s.config.socket, s.config.owner, &why) < 0)
                status = fail(EXIT_SYSTEM, why.line);
        else
                status = options->keep ? keep(options, &s, argc, argv) : run(options, &s);
        config_clear(&s.config);
        activation_clear(&s.handed);
        return status;
}

/* Starts without creating or locking anything, and stops before clients can connect. */
static int try_start(const struct options *options, struct kvd_why *why) {
        _cleanup_(daemon_freep) struct daemon *daemon = NULL;
        struct start s;
        int r = options_load(options, &s.config, why);

        if (r < 0)
                return r;
        s.config.only_checked = true;
        strcpy(s.config.worker_program, "/proc/self/exe");
        r = choose_identity(options, &s, why);
        if (r >= 0)
                r = trusted_socket(s.config.socket, s.config.owner, why);
        if (r >= 0)
                r = daemon_new(&s.config, &daemon, why);
        config_clear(&s.config);
        return r;
}

static int check(const struct options *options) {
        struct kvd_why why;

        log_set_level(LOG_ERR);
        if (options_check(options, stderr) < 0)
                return EXIT_CONFIG;
        if (try_start(options, &why) < 0) {
                fprintf(stderr, "%s\n", why.line);
                return EXIT_CONFIG;
        }
        return EXIT_CLEAN;
}

int main(int argc, char **argv) {
        pid_t parent = getppid();
        struct options options;
        struct kvd_why why;

        if (argc > 1 && strcmp(argv[1], "--worker") == 0)
                return worker_main(argc, argv);
        if (argc > 1 && strcmp(argv[1], "--disk") == 0)
                return disk_main();
        if (argc > 1 && strcmp(argv[1], "--remote") == 0)
                return remote_main();
        if (argc > 1 && strcmp(argv[1], "--exporter") == 0)
                return exporter_main(argc, argv);
        if (options_parse(&options, argc, argv, &why) < 0) {
                fprintf(stderr, "kvd: %s\n", why.line);
                return EXIT_CONFIG;
        }
        switch (options.action) {
        case OPTIONS_PRINT_CONFIG: config_print(stdout); return end_output();
        case OPTIONS_CHECK_CONFIG: return check(&options);
        case OPTIONS_VERSION: puts("kvd " KVD_PROJECT_VERSION); return end_output();
        case OPTIONS_HELP: options_print_help(stdout); return end_output();
        case OPTIONS_RUN: break;
        }
        return begin(&options, parent, argc, argv);
}
