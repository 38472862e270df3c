/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_MAIN_OPTIONS_H
#define KVD_DAEMON_MAIN_OPTIONS_H

/* The command line of kvd. It overrides the file, also when the file is read again. */

#include <stdbool.h>

#include "daemon/base/config.h"

#define OPTIONS_MAX_SET 64u

enum options_action {
        OPTIONS_RUN,
        OPTIONS_PRINT_CONFIG,
        OPTIONS_CHECK_CONFIG,
        OPTIONS_VERSION,
        OPTIONS_HELP
};

struct options {
        enum options_action action;
        const char *config; /* NULL: defaults only */
        bool config_optional;
        const char *instance; /* as given */
        uint32_t instance_number;
        const char *private_dir;          /* NULL: not private */
        const char *set[OPTIONS_MAX_SET]; /* "section.key=value", in the order given */
        unsigned n_set;
        /* --socket and other shorthands, as such assignments */
        char socket[128], user[128], pool[128], backend[128], device[128];
        int ready_fd; /* -1: none */
        bool keep;
};

/* Negative: one line in why. Strings belong to argv. */
int options_parse(struct options *options, int argc, char **argv, struct kvd_why *why);
void options_print_help(FILE *to);

/*
 * Arguments of the daemon that kvd --keep starts: those of a parsed command line, without --keep
 * and --ready-fd. to has room for argc + 1 pointers.
 */
void options_of_kept(int argc, char **argv, char **to);

/* Defaults, the file, then the command line. On failure config is empty. */
int options_load(const struct options *options, struct config *config, struct kvd_why *why);

/* --check-config: writes a line for each fault of the file. Negative: there are faults. */
int options_check(const struct options *options, FILE *to);

#endif
