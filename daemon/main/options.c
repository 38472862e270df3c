/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The command line. Most options are shorthands of settings, and are kept in the order of their
 * appearance, so that a reload of the configuration can apply them again.
 */

#include "daemon/main/options.h"

#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"

enum {
        OPT_CONFIG = 256,
        OPT_CONFIG_OPTIONAL,
        OPT_INSTANCE,
        OPT_SOCKET,
        OPT_USER,
        OPT_POOL,
        OPT_BACKEND,
        OPT_DEVICE,
        OPT_SET,
        OPT_PRIVATE,
        OPT_READY_FD,
        OPT_KEEP,
        OPT_PRINT_CONFIG,
        OPT_CHECK_CONFIG,
        OPT_VERSION,
        OPT_HELP
};

#define NO no_argument, NULL
#define YES required_argument, NULL

static const struct option long_options[] = {
        {"config", YES, OPT_CONFIG},
        {"config-optional", YES, OPT_CONFIG_OPTIONAL},
        {"instance", YES, OPT_INSTANCE},
        {"socket", YES, OPT_SOCKET},
        {"user", YES, OPT_USER},
        {"pool", YES, OPT_POOL},
        {"backend", YES, OPT_BACKEND},
        {"device", YES, OPT_DEVICE},
        {"set", YES, OPT_SET},
        {"private", YES, OPT_PRIVATE},
        {"ready-fd", YES, OPT_READY_FD},
        {"keep", NO, OPT_KEEP},
        {"print-config", NO, OPT_PRINT_CONFIG},
        {"check-config", YES, OPT_CHECK_CONFIG},
        {"version", NO, OPT_VERSION},
        {"help", NO, OPT_HELP},
        {0},
};

#define SHORT_OPTIONS ":hV"

void options_print_help(FILE *to) {
        fputs("Usage: kvd [options]\n"
              "Owns a KV cache in GPU or shared memory that several inference processes use\n"
              "in place.\n\n"
              "  --config FILE            read this configuration\n"
              "  --config-optional FILE   the same, if there is such a file\n"
              "  --instance N             number of this daemon on the machine; replaces %i\n"
              "                           in socket (0)\n"
              "  --socket PATH            the same as --set daemon.socket=PATH\n"
              "  --user NAME              the same as --set daemon.user=NAME: user that root\n"
              "                           becomes\n"
              "  --pool SIZE              the same as --set daemon.pool=SIZE\n"
              "  --backend NAME           the same as --set daemon.backend=NAME: auto, host,\n"
              "                           cuda, cuda-legacy\n"
              "  --device N               the same as --set daemon.device=N: number of the\n"
              "                           GPU (that of --instance)\n"
              "  --set SECTION.KEY=VALUE  set any option; overrides the file\n"
              "  --private DIR            serve only this user, at DIR/kvd.sock; end with the\n"
              "                           process that started kvd\n"
              "  --ready-fd N             write a newline to descriptor N when clients can\n"
              "                           connect\n"
              "  --keep                   start kvd again whenever it dies, and keep its socket\n"
              "                           meanwhile\n"
              "  --print-config           print a configuration file with all defaults and what\n"
              "                           they mean\n"
              "  --check-config FILE      print what is wrong with a configuration file, if\n"
              "                           anything\n"
              "  --version, -V\n"
              "  --help, -h\n\n"
              "See kvd(8) and kvd.conf(5).\n",
              to);
}

static int add_set(struct options *o, const char *assignment, struct kvd_why *why) {
        if (o->n_set == OPTIONS_MAX_SET)
                return kvd_refuse(why, -EINVAL,
                                  "more than %u settings on the command line; write a file and give it with --config",
                                  OPTIONS_MAX_SET);
        o->set[o->n_set++] = assignment;
        return 0;
}

static int add_shorthand(struct options *o, const char *key, const char *value, char to[static 128],
                         struct kvd_why *why) {
        if (snprintf(to, 128, "%s=%s", key, value) >= 128)
                return kvd_refuse(why, -EINVAL, "the value of %s is longer than 100 bytes", key);
        return add_set(o, to, why);
}

static int parse_number(const char *name, const char *value, long low, long high,
                        struct kvd_why *why) {
        char *end;
        long n = strtol(value, &end, 10);

        if (!value[0] || *end || n < low || n > high)
                return kvd_refuse(why, -EINVAL, "--%s: '%s' is not a number from %ld to %ld", name,
                                  value, low, high);
        return (int)n;
}

static int choose_action(struct options *o, int opt) {
        switch (opt) {
        case OPT_PRINT_CONFIG:
                o->action = OPTIONS_PRINT_CONFIG;
                break;
        case OPT_VERSION:
        case 'V':
                o->action = OPTIONS_VERSION;
                break;
        case OPT_HELP:
        case 'h':
                o->action = OPTIONS_HELP;
                break;
        case OPT_KEEP:
                o->keep = true;
                break;
        }
        return 0;
}

static int take_option(struct options *o, int opt, const char *value, struct kvd_why *why) {
        switch (opt) {
        case OPT_CONFIG:
        case OPT_CONFIG_OPTIONAL:
        case OPT_CHECK_CONFIG:
                if (o->config)
                        return kvd_refuse(why, -EINVAL,
                                          "two configurations, %s and %s: only one is read; give one",
                                          o->config, value);
                o->config = value;
                o->config_optional = opt == OPT_CONFIG_OPTIONAL;
                if (opt == OPT_CHECK_CONFIG)
                        o->action = OPTIONS_CHECK_CONFIG;
                return 0;
        case OPT_INSTANCE:
                o->instance = value;
                return parse_number("instance", value, 0, 9999, why);
        case OPT_SOCKET:
                return add_shorthand(o, "daemon.socket", value, o->socket, why);
        case OPT_USER:
                return add_shorthand(o, "daemon.user", value, o->user, why);
        case OPT_POOL:
                return add_shorthand(o, "daemon.pool", value, o->pool, why);
        case OPT_BACKEND:
                return add_shorthand(o, "daemon.backend", value, o->backend, why);
        case OPT_DEVICE:
                return add_shorthand(o, "daemon.device", value, o->device, why);
        case OPT_SET:
                return add_set(o, value, why);
        case OPT_PRIVATE:
                o->private_dir = value;
                return 0;
        case OPT_READY_FD:
                return o->ready_fd = parse_number("ready-fd", value, 0, 65535, why);
        default:
                return choose_action(o, opt);
        }
}

/* If several letters follow one hyphen, optopt is the one at fault. */
static int refuse_option(int opt, char **argv, struct kvd_why *why) {
        bool is_letter = optopt > 0 && optopt < OPT_CONFIG;
        const char letter[] = {'-', (char)optopt, 0};

        return kvd_refuse(why, -EINVAL, "option '%s' %s; see kvd --help",
                          is_letter ? letter : argv[optind - 1],
                          opt == '?' ? "is unknown" : "needs a value");
}

int options_parse(struct options *o, int argc, char **argv, struct kvd_why *why) {
        int opt, r;

        *o = (struct options){.instance = "0", .ready_fd = -1};
        opterr = 0;
        optind = 1;
        while ((opt = getopt_long(argc, argv, SHORT_OPTIONS, long_options, NULL)) != -1) {
                if (opt == '?' || opt == ':')
                        return refuse_option(opt, argv, why);
                r = take_option(o, opt, optarg, why);
                if (r < 0)
                        return r;
        }
        if (optind < argc)
                return kvd_refuse(why, -EINVAL, "'%s' is not an option; see kvd --help",
                                  argv[optind]);
        return 0;
}

/* Each step of getopt_long is one option with its value, in any notation. */
void options_of_kept(int argc, char **argv, char **to) {
        int opt, at = 1;

        *to++ = argv[0];
        for (optind = 1; (opt = getopt_long(argc, argv, SHORT_OPTIONS, long_options, NULL)) != -1; at = optind)
                for (; opt != OPT_KEEP && opt != OPT_READY_FD && at < optind; at++)
                        *to++ = argv[at];
        *to = NULL;
}

/* ---- configuration --------------------------------------------------------------------------- */

static int make_private(const char *dir, struct config *config, struct kvd_why *why) {
        if (snprintf(config->socket, sizeof config->socket, "%s/kvd.sock", dir) >=
            (int)sizeof config->socket)
                return kvd_refuse(why, -EINVAL,
                                  "--private: the folder's path is too long for a socket; at most %zu bytes",
                                  sizeof config->socket - sizeof "/kvd.sock");
        config->socket_mode = 0600;
        config->socket_group = UINT32_MAX;
        config->own_user_only = true;
        return 0;
}

static int put_instance(const char *instance, struct config *config, struct kvd_why *why) {
        char path[sizeof config->socket], *at = strstr(config->socket, "%i");
        int n;

        if (config->device == UINT32_MAX)
                config->device = (uint32_t)strtoul(instance, NULL, 10);
        if (!at)
                return 0;
        n = snprintf(path, sizeof path, "%.*s%s%s", (int)(at - config->socket), config->socket,
                     instance, at + 2);
        if (n >= (int)sizeof path)
                return kvd_refuse(why, -EINVAL,
                                  "socket: the path with its instance number has more than 107 bytes; shorten it");
        memcpy(config->socket, path, (size_t)n + 1);
        return 0;
}

static int load(const struct options *o, struct config *config, struct kvd_why *why) {
        int r = 0;

        if (config_init(config) < 0)
                return kvd_refuse(why, -EINVAL, "out of memory");
        if (o->config)
                r = config_read(config, o->config, o->config_optional, NULL, why);
        for (unsigned i = 0; i < o->n_set && r >= 0; i++)
                r = config_set(config, o->set[i], why);
        if (r >= 0 && o->private_dir)
                r = make_private(o->private_dir, config, why);
        if (r >= 0)
                r = put_instance(o->instance, config, why);
        return r < 0 ? r : config_check(config, why);
}

int options_load(const struct options *options, struct config *config, struct kvd_why *why) {
        int r = load(options, config, why);

        if (r < 0)
                config_clear(config);
        return r;
}

int options_check(const struct options *options, FILE *to) {
        struct config config;
        struct kvd_why why;
        int r = config_init(&config);

        if (r == 0)
                r = config_read(&config, options->config, false, to, &why);
        config_clear(&config);
        if (r < 0)
                return r;
        r = options_load(options, &config, &why); /* faults between settings */
        if (r < 0)
                fprintf(to, "%s\n", why.line);
        else
                config_clear(&config);
        return r;
}
