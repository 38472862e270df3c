/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Reads the configuration line by line into the struct whose fields setting.c describes, and checks
 * it as a whole. Every refusal names the file and the line, and says what to write instead.
 */

#include "daemon/base/config.h"

#include <errno.h>
#include <string.h>

#include "daemon/base/lines.h"
#include "daemon/base/setting.h"
#include "ipc/base/sys.h"
#include "ipc/base/text.h"
#include "ipc/base/util.h"

#define SET_MOST 2048

/* ---- life ------------------------------------------------------------------------------------ */

static int set_defaults(const struct setting *settings, void *base) {
        struct kvd_why why;
        int r;

        for (; settings->name; settings++) {
                r = setting_parse(settings, settings->fallback, base, &why);
                if (r < 0)
                        return r;
        }
        return 0;
}

int config_init(struct config *config) {
        *config = (struct config){.owner = geteuid()};
        return set_defaults(daemon_settings, config);
}

static void domain_free(struct config_domain *domain) {
        free(domain->users.ids);
        free(domain->groups.ids);
        free(domain);
}

void config_clear(struct config *config) {
        while (config->domains) {
                struct config_domain *domain = config->domains;

                config->domains = domain->next;
                domain_free(domain);
        }
        free(config->admins.ids);
        *config = (struct config){0};
}

/* ---- sections -------------------------------------------------------------------------------- */

struct section {
        const struct setting *settings; /* NULL: before the first section */
        void *base;
        char title[KVD_NAME_MAX + 16];
        unsigned lines[SETTINGS_MOST]; /* line that sets each setting; 0: none yet */
};

static struct config_domain *find_domain(const struct config *config, const char *name) {
        for (struct config_domain *d = config->domains; d; d = d->next)
                if (strcmp(d->name, name) == 0)
                        return d;
        return NULL;
}

static int check_name(const char *name, struct kvd_why *why) {
        if (!kvd_is_name(name, KVD_NAME_MAX))
                return kvd_refuse(why, -EINVAL,
                                  "'%s' cannot name a domain; use 1 to %d of " KVD_NAME_LETTERS,
                                  name, KVD_NAME_MAX);
        if (strncmp(name, "uid-", 4) == 0)
                return kvd_refuse(
                        why, -EINVAL,
                        "'%s': names with uid- in front are those of unlisted users; choose another",
                        name);
        return 0;
}

static int add_domain(struct config *config, const char *name, struct config_domain **ret,
                      struct kvd_why *why) {
        struct config_domain **link = &config->domains, *domain;
        int r;

        r = check_name(name, why);
        if (r < 0)
                return r;
        domain = sys->calloc(1, sizeof *domain);
        if (!domain)
                return kvd_refuse(why, -EINVAL, "out of memory");
        memcpy(domain->name, name, strlen(name));
        while (*link)
                link = &(*link)->next;
        *ret = *link = domain;
        return set_defaults(domain_settings, domain);
}

/* title: "daemon" or "domain NAME". */
static int open_section(struct config *config, const char *title, bool may_exist,
                        struct section *ret, struct kvd_why *why) {
        struct config_domain *domain;
        int r;

        if (strcmp(title, "daemon") == 0) {
                *ret = (struct section){daemon_settings, config, .title = "daemon"};
                return 0;
        }
        if (strncmp(title, "domain ", 7) != 0)
                return kvd_refuse(why, -EINVAL,
                                  "there is no section [%s]; there are [daemon] and [domain NAME]",
                                  title);
        title += 7 + strspn(title + 7, " \t");
        domain = find_domain(config, title);
        if (domain && !may_exist)
                return kvd_refuse(
                        why, -EINVAL,
                        "domain '%s' was described before; put everything about it in one section",
                        title);
        if (!domain) {
                r = add_domain(config, title, &domain, why);
                if (r < 0)
                        return r;
        }
        *ret = (struct section){domain_settings, domain, .title = ""};
        snprintf(ret->title, sizeof ret->title, "domain %.*s", KVD_NAME_MAX, title);
        return 0;
}

/* ---- lines ----------------------------------------------------------------------------------- */

/* line 0: the command line, where the last value counts. */
static int check_once(struct section *section, const struct setting *setting, unsigned line,
                      struct kvd_why *why) {
        unsigned *before = &section->lines[setting - section->settings];

        if (*before && line)
                return kvd_refuse(why, -EINVAL, "%s was set in line %u; keep one of the two",
                                  setting->name, *before);
        *before = line;
        return 0;
}

/* A comment after a path would become part of the path. */
static int check_comment(const struct setting *setting, const char *value, struct kvd_why *why) {
        for (const char *at = value; (at = strpbrk(at, "#;")); at++)
                if (at > value && (at[-1] == ' ' || at[-1] == '\t'))
                        return kvd_refuse(why, -EINVAL,
                                          "%s: '%.64s': write a comment in a line of its own",
                                          setting->name, value);
        return 0;
}

static int assign(struct section *section, char *text, unsigned line, struct kvd_why *why) {
        char *equals = strchr(text, '='), *key, *value;
        const struct setting *setting;

        if (!equals)
                return kvd_refuse(
                        why, -EINVAL,
                        "'%.64s' is neither a section nor an assignment; write key = value", text);
        *equals = 0;
        key = lines_strip(text);
        value = lines_strip(equals + 1);
        setting = setting_find(section->settings, key);
        if (!setting)
                return kvd_refuse(why, -EINVAL,
                                  "[%s] has no option '%.64s'; see kvd --print-config",
                                  section->title, key);
        if (check_once(section, setting, line, why) < 0 || check_comment(setting, value, why) < 0)
                return -EINVAL;
        if (setting_parse(setting, value, section->base, why) < 0)
                return kvd_refuse(why, -EINVAL, "%s: %s", setting->name, why->line);
        return 0;
}

struct reader {
        struct config *config;
        struct section section;
        bool seen_daemon;
        bool lost; /* the current section was refused: skip its lines */
};

static int read_header(struct reader *reader, char *line, struct kvd_why *why) {
        size_t n = strlen(line);
        bool daemon;
        char *title;

        if (line[n - 1] != ']')
                return kvd_refuse(why, -EINVAL, "'%.64s' lacks its closing bracket", line);
        line[n - 1] = 0;
        title = lines_strip(line + 1);
        daemon = strcmp(title, "daemon") == 0;
        if (daemon && reader->seen_daemon)
                return kvd_refuse(
                        why, -EINVAL,
                        "[daemon] was opened before; put everything about it in one section");
        reader->seen_daemon |= daemon;
        return open_section(reader->config, title, false, &reader->section, why);
}

static int read_line(void *data, char *line, unsigned number, struct kvd_why *why) {
        struct reader *reader = data;

        if (line[0] == '[') {
                int r = read_header(reader, line, why);

                reader->lost = r < 0;
                return r;
        }
        if (reader->lost)
                return 0;
        if (!reader->section.settings)
                return kvd_refuse(why, -EINVAL,
                                  "'%.64s' is before the first section; write [daemon] above it",
                                  line);
        return assign(&reader->section, line, number, why);
}

int config_read(struct config *config, const char *path, bool optional, FILE *all,
                struct kvd_why *why) {
        struct reader reader = {.config = config};
        const struct lines lines = {path, optional, all, read_line, &reader};

        return lines_read(&lines, why);
}

int config_set(struct config *config, const char *assignment, struct kvd_why *why) {
        char copy[SET_MOST], *equals, *dot;
        struct section section;
        int r;

        if (strlen(assignment) >= sizeof copy)
                return kvd_refuse(why, -EINVAL, "--set: the assignment is longer than %d bytes",
                                  SET_MOST - 1);
        strcpy(copy, assignment);
        equals = strchr(copy, '=');
        dot = equals ? memrchr(copy, '.', (size_t)(equals - copy)) : NULL;
        if (!dot)
                return kvd_refuse(why, -EINVAL,
                                  "--set %.200s: write section.key=value, such as daemon.pool=4G",
                                  assignment);
        *dot = 0;
        r = open_section(config, copy, true, &section, why);
        if (r >= 0)
                r = assign(&section, dot + 1, 0, why);
        if (r < 0)
                return kvd_refuse(why, -EINVAL, "--set %.100s: %s", assignment, why->line);
        return 0;
}

/* ---- as a whole ------------------------------------------------------------------------------ */

bool id_list_has(const struct id_list *list, uint32_t id) {
        for (uint32_t i = 0; i < list->n; i++)
                if (list->ids[i] == id)
                        return true;
        return false;
}

/*
 * pool is a share of memory whose size is known only when the backend has been chosen:
 * backend_size_pool checks again.
 */
static bool share_unknown(const struct config *config) {
        return config->pool_share && config->backend != CONFIG_BACKEND_HOST;
}

static int check_most(const struct config *config, struct kvd_why *why) {
        if (config->pool_most && config->pool > config->pool_most && !share_unknown(config))
                return kvd_refuse(
                        why, -EINVAL,
                        "pool (%llu MiB) is larger than pool_most; raise that, or leave it out",
                        (unsigned long long)(config->pool >> 20));
        return 0;
}

static int check_segment(const struct config *config, struct kvd_why *why) {
        if (config->segment && config->segment < CONFIG_SEGMENT_MIN)
                return kvd_refuse(why, -EINVAL,
                                  "segment is smaller than %u KiB; raise it, or leave it out",
                                  CONFIG_SEGMENT_MIN >> 10);
        if (config->segment > config->pool && !share_unknown(config))
                return kvd_refuse(
                        why, -EINVAL,
                        "segment is larger than pool (%llu MiB); lower it, or leave it out",
                        (unsigned long long)(config->pool >> 20));
        return 0;
}

static int check_file(const struct config *config, struct kvd_why *why) {
        if (config->file_size && config->file_size < CONFIG_FILE_MIN)
                return kvd_refuse(why, -EINVAL,
                                  "file_size is smaller than 4M; raise it, or leave it out");
        return 0;
}

static int check_users(const struct config_domain *a, struct kvd_why *why) {
        for (const struct config_domain *b = a->next; b; b = b->next)
                for (uint32_t i = 0; i < a->users.n; i++)
                        if (id_list_has(&b->users, a->users.ids[i]))
                                return kvd_refuse(
                                        why, -EINVAL,
                                        "user %u is in domain '%s' and in domain '%s'; take it out of one",
                                        a->users.ids[i], a->name, b->name);
        return 0;
}

int config_check(const struct config *config, struct kvd_why *why) {
        uint64_t guaranteed = 0;
        int r;

        for (const struct config_domain *d = config->domains; d; d = d->next) {
                r = check_users(d, why);
                if (r < 0)
                        return r;
                if (d->quota && d->guarantee > d->quota)
                        return kvd_refuse(
                                why, -EINVAL,
                                "the guarantee of domain '%s' is larger than its quota; lower it",
                                d->name);
                guaranteed += d->guarantee;
                if (guaranteed > config->pool && !share_unknown(config))
                        return kvd_refuse(
                                why, -EINVAL,
                                "all guarantees together are larger than the pool (%llu MiB); lower them",
                                (unsigned long long)(config->pool >> 20));
        }
        r = check_most(config, why);
        if (r == 0)
                r = check_file(config, why);
        return r < 0 ? r : check_segment(config, why);
}

const struct config_domain *config_find_domain(const struct config *config, uint32_t uid,
                                               const uint32_t *groups, uint32_t n_groups) {
        for (const struct config_domain *d = config->domains; d; d = d->next)
                if (id_list_has(&d->users, uid))
                        return d;
        for (const struct config_domain *d = config->domains; d; d = d->next)
                for (uint32_t i = 0; i < n_groups; i++)
                        if (id_list_has(&d->groups, groups[i]))
                                return d;
        return NULL;
}

void config_domain_to_store(const struct config_domain *domain, struct domain_config *ret) {
        *ret = (struct domain_config){.quota = domain->quota,
                                      .guarantee = domain->guarantee,
                                      .client_quota = domain->client_quota,
                                      .arena = domain->isolation == CONFIG_ARENA};
        memcpy(ret->name, domain->name, sizeof ret->name);
        memcpy(ret->remote_prefix, domain->remote_prefix, sizeof ret->remote_prefix);
}

/* ---- print ----------------------------------------------------------------------------------- */

static void print_settings(FILE *to, const struct setting *settings) {
        for (; settings->name; settings++) {
                fprintf(to, "\n# %s\n# (%s)\n", settings->text, setting_unit(settings));
                fprintf(to, "#%s =%s%s\n", settings->name, settings->fallback[0] ? " " : "",
                        settings->fallback);
        }
}

void config_print(FILE *to) {
        fputs("# kvd.conf: configuration of kvd. Every option is shown with its default.\n\n[daemon]\n",
              to);
        print_settings(to, daemon_settings);
        fputs("\n# A domain is a group of users who share a cache. Any number of sections like this one:\n"
              "#[domain NAME]\n",
              to);
        print_settings(to, domain_settings);
}
