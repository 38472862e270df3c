/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The command line. Most options are shorthands of settings, and are kept in the order of their
 * appearance, so that a reload of the configuration can apply them again.
 */

#include "daemon/main/options.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "ipc/base/options.h"
#include "ipc/base/util.h"

enum { CONFIG = KVD_OPTION_OWN, SHORTHAND, SET, ACTION }; /* kinds of our own */

#define AT(member) offsetof(struct options, member)
/* The same as --set daemon.NAME=VALUE. */
#define SHORT(name, value, text) \
        { \
#name, 0, value, "the same as --set daemon." #name "=" value text, \
                        .kind = SHORTHAND, .at = AT(name) \
        }
#define DOES(name, letter, action, text) \
        { name, letter, NULL, text, .kind = ACTION, .least = action }

static const struct kvd_option table[] = {
        {"config", 0, "FILE", "read this configuration", .kind = CONFIG},
        {"config-optional", 0, "FILE", "the same, if there is such a file", .kind = CONFIG},
        {"instance", 0, "N", "number of this daemon on the machine; replaces %i in socket (0)",
         KVD_OPTION_U32, AT(instance_number), .most = 9999},
        SHORT(socket, "PATH", ""),
        SHORT(user, "NAME", ": user that root becomes"),
        SHORT(pool, "SIZE", ""),
        SHORT(backend, "NAME", ": auto, host, cuda, cuda-legacy"),
        SHORT(device, "N", ": number of the GPU (that of --instance)"),
        {"set", 0, "SECTION.KEY=VALUE", "set any option; overrides the file", .kind = SET},
        {"private", 0, "DIR",
         "serve only this user, at DIR/kvd.sock; end with the process that started kvd",
         KVD_OPTION_TEXT, .at = AT(private_dir)},
        {"ready-fd", 0, "N", "write a newline to descriptor N when clients can connect",
         KVD_OPTION_U32, AT(ready_fd), .most = 65535},
        {"keep", 0, NULL, "start kvd again whenever it dies, and keep its socket meanwhile",
         KVD_OPTION_BOOL, AT(keep), .most = true},
        DOES("print-config", 0, OPTIONS_PRINT_CONFIG,
             "print a configuration file with all defaults and what they mean"),
        {"check-config", 0, "FILE", "print what is wrong with a configuration file, if anything",
         CONFIG, .least = OPTIONS_CHECK_CONFIG},
        DOES("version", 'V', OPTIONS_VERSION, "print the version"),
        DOES("help", 'h', OPTIONS_HELP, "print this help"),
};

void options_print_help(FILE *to) {
        fputs("Usage: kvd [options]\n"
              "Owns a KV cache in GPU or shared memory that several inference processes use\n"
              "in place.\n\n",
              to);
        for (size_t i = 0; i < ARRAY_SIZE(table); i++)
                kvd_option_help(to, &table[i]);
        fputs("\nSee kvd(8) and kvd.conf(5).\n", to);
}

static int add_set(struct options *o, const char *assignment, struct kvd_why *why) {
        if (o->n_set == OPTIONS_MAX_SET)
                return kvd_refuse(
                        why, -EINVAL,
                        "more than %u settings on the command line; write a file and give it with --config",
                        OPTIONS_MAX_SET);
        o->set[o->n_set++] = assignment;
        return 0;
}

static int add_shorthand(struct options *o, const struct kvd_option *option, const char *value,
                         struct kvd_why *why) {
        char *to = (char *)o + option->at;

        if (snprintf(to, sizeof o->socket, "daemon.%s=%s", option->name, value) >=
            (int)sizeof o->socket)
                return kvd_refuse(why, -EINVAL, "the value of daemon.%s is longer than 100 bytes",
                                  option->name);
        return add_set(o, to, why);
}

static int take_config(struct options *o, const struct kvd_option *option, const char *path,
                       struct kvd_why *why) {
        if (o->config)
                return kvd_refuse(why, -EINVAL,
                                  "two configurations, %s and %s: only one is read; give one",
                                  o->config, path);
        o->config = path;
        o->config_optional = strcmp(option->name, "config-optional") == 0;
        if (option->least > 0)
                o->action = (enum options_action)option->least;
        return 0;
}

static int take(struct options *o, const struct kvd_option *option, const char *value,
                struct kvd_why *why) {
        switch (option->kind) {
        case CONFIG: return take_config(o, option, value, why);
        case SHORTHAND: return add_shorthand(o, option, value, why);
        case SET: return add_set(o, value, why);
        case ACTION: o->action = (enum options_action)option->least; return 0;
        }
        if (option->at == AT(instance_number))
                o->instance = value;
        return kvd_option_store(option, value, o, why);
}

int options_parse(struct options *o, int argc, char **argv, struct kvd_why *why) {
        struct kvd_words words = {"kvd", table, ARRAY_SIZE(table), argc, argv, .why = why};
        int r;

        *o = (struct options){.instance = "0", .ready_fd = -1};
        while ((r = kvd_next_option(&words)) > 0) {
                if (!words.option)
                        return kvd_refuse(why, -EINVAL, "'%s' is not an option; see kvd --help",
                                          words.value);
                r = take(o, words.option, words.value, why);
                if (r < 0)
                        return r;
        }
        return r;
}

void options_of_kept(int argc, char **argv, char **to) {
        struct kvd_why why;
        struct kvd_words words = {"kvd", table, ARRAY_SIZE(table), argc, argv, .why = &why};

        *to++ = argv[0];
        for (int at = 1; kvd_next_option(&words) > 0;)
                for (; at < words.at; at++)
                        if (words.option->at != AT(keep) && words.option->at != AT(ready_fd))
                                *to++ = argv[at];
        *to = NULL;
}

/* ---- configuration --------------------------------------------------------------------------- */

static int make_private(const char *dir, struct config *config, struct kvd_why *why) {
        if (snprintf(config->socket, sizeof config->socket, "%s/kvd.sock", dir) >=
            (int)sizeof config->socket)
                return kvd_refuse(
                        why, -EINVAL,
                        "--private: the folder's path is too long for a socket; at most %zu bytes",
                        sizeof config->socket - sizeof "/kvd.sock");
        config->socket_mode = 0600;
        config->socket_group = UINT32_MAX;
        config->own_user_only = true;
        return 0;
}

static int put_instance(const struct options *o, struct config *config, struct kvd_why *why) {
        char path[sizeof config->socket], *at = strstr(config->socket, "%i");
        int n;

        if (!config->device.n)
                config->device = (struct number_list){1, {o->instance_number}};
        if (!at)
                return 0;
        n = snprintf(path, sizeof path, "%.*s%s%s", (int)(at - config->socket), config->socket,
                     o->instance, at + 2);
        if (n >= (int)sizeof path)
                return kvd_refuse(
                        why, -EINVAL,
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
                r = put_instance(o, config, why);
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
