/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Every option of the configuration is a row of a table: its name, default, limits, description,
 * and the field for its value. The parser, --print-config and reloading use it.
 */

#include "daemon/base/setting.h"

#include <errno.h>
#include <grp.h>
#include <pwd.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/config.h"
#include "daemon/base/memory_limit.h"
#include "ipc/base/sys.h"
#include "ipc/base/text.h"
#include "ipc/base/util.h"

#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)
#define TIB (UINT64_C(1) << 40)

const struct setting daemon_settings[] = {
        {"socket", SETTING_PATH, "/run/kvd-%i.sock", .fixed = true,
         .offset = offsetof(struct config, socket),
         .text = "Where clients connect: a path, or '@' and an abstract name; %i is the number "
                 "given with --instance."},
        {"socket_mode", SETTING_MODE, "0660", .fixed = true,
         .offset = offsetof(struct config, socket_mode),
         .text = "Permissions of the socket; users who may write to it may use the pool."},
        {"socket_group", SETTING_GROUP, "", .fixed = true,
         .offset = offsetof(struct config, socket_group),
         .text = "Group of the socket; empty: the daemon's own."},
        {"user", SETTING_USER, "", .fixed = true, .offset = offsetof(struct config, user),
         .text = "User that the daemon becomes if root starts it, once its socket is open; empty: "
                 "kvd, if there is such a user."},
        {"backend", SETTING_CHOICE, "auto", .choices = "auto|host|cuda|cuda-legacy", .fixed = true,
         .offset = offsetof(struct config, backend),
         .text = "Where the pool is: auto takes the GPU if it can give memory to other processes, "
                 "else host memory."},
        {"device", SETTING_NUMBERS, "", .low = 0, .high = 4095, .fixed = true,
         .offset = offsetof(struct config, device),
         .text = "Number of the GPU, as nvidia-smi counts; with commas between them, numbers of up to "
                 "8 GPUs that have an equal part of each block (tensor parallelism); empty: the "
                 "number given with --instance."},
        {"pool", SETTING_MEMORY, "25%", .low = 4 * MIB, .high = 256 * TIB, .fixed_on_gpu = true,
         .offset = offsetof(struct config, pool), .share = offsetof(struct config, pool_share),
         .text = "Maximum memory for keys and values, of all domains together: host memory is taken "
                 "as it is needed, a GPU's at the start."},
        {"pool_most", SETTING_BYTES, "0", .low = 0, .high = 256 * TIB, .fixed = true,
         .offset = offsetof(struct config, pool_most),
         .text = "Size up to which a reload may raise a pool of host memory; indexes are made for "
                 "that size. 0: the size of pool at the start."},
        {"reserve", SETTING_BYTES, "0", .low = 0, .high = 256 * TIB, .fixed = true,
         .offset = offsetof(struct config, reserve),
         .text = "GPU memory that the pool leaves free, for the contexts of kvd's worker and of "
                 "every engine; 0: 1G, and less on a small GPU."},
        {"spill", SETTING_BYTES, "0", .low = 0, .high = 256 * TIB,
         .offset = offsetof(struct config, spill),
         .text = "Maximum memory for exact copies of blocks that left the pool, and for sketches; "
                 "0: as much as the pool."},
        {"file", SETTING_FILE, "", .fixed = true, .offset = offsetof(struct config, file),
         .text = "File or block device for blocks that leave the pool; the blocks survive a restart "
                 "of kvd or the machine. Empty: none."},
        {"file_size", SETTING_BYTES, "0", .low = 0, .high = 256 * TIB, .fixed = true,
         .offset = offsetof(struct config, file_size),
         .text = "Size of the file; a file of another size is not used. 0: as large as the file is, "
                 "or all of the block device."},
        {"file_depth", SETTING_COUNT, "1024", .low = 0, .high = 1u << 30, .fixed = true,
         .offset = offsetof(struct config, file_depth),
         .text = "Tokens: blocks go to the file at their second use, or at their first if they end at "
                 "least so many tokens into their chain."},
        {"file_timeout", SETTING_COUNT, "30", .low = 1, .high = 3600, .fixed = true,
         .offset = offsetof(struct config, file_timeout),
         .text = "Seconds for which the file's disk may be silent; after that, its blocks are misses "
                 "until it answers again."},
        {"host_tier", SETTING_BYTES, "0", .low = 0, .high = 256 * TIB, .fixed = true,
         .offset = offsetof(struct config, host_tier),
         .text = "Host memory, part of spill, for blocks that leave a pool on a GPU, in addition to "
                 "the file or without one; 0: none."},
        {"host_tier_depth", SETTING_COUNT, "1024", .low = 0, .high = 1u << 30, .fixed = true,
         .offset = offsetof(struct config, host_tier_depth),
         .text = "Like file_depth, which is used instead if there is a file."},
        {"remote", SETTING_TEXT, "", .fixed = true, .offset = offsetof(struct config, remote),
         .text = "Servers for blocks that leave the pool, shared by machines: redis://host:port, "
                 "Redis or Valkey, with commas between several, or some of a Cluster; "
                 "rediss://host:port, the same with TLS; mooncake://host:port, a Mooncake Store's "
                 "master; empty: none."},
        {"remote_key", SETTING_FILE, "", .fixed = true,
         .offset = offsetof(struct config, remote_key),
         .text = "File with a secret, the same on all machines, that encrypts blocks on the servers; "
                 "empty: anybody with access to the servers can read and forge blocks."},
        {"remote_password", SETTING_FILE, "", .fixed = true,
         .offset = offsetof(struct config, remote_password),
         .text = "File with the servers' password, or user:password, on one line; empty: the servers "
                 "ask for none."},
        {"remote_ca", SETTING_FILE, "", .fixed = true, .offset = offsetof(struct config, remote_ca),
         .text = "PEM file with the CA certificates for rediss:// servers; empty: the CAs that the "
                 "system trusts."},
        {"remote_certificate", SETTING_FILE, "", .fixed = true,
         .offset = offsetof(struct config, remote_certificate),
         .text = "PEM file with the client certificate for rediss:// servers; empty: the servers ask "
                 "for none."},
        {"remote_certificate_key", SETTING_FILE, "", .fixed = true,
         .offset = offsetof(struct config, remote_certificate_key),
         .text = "PEM file with the private key of remote_certificate, without a passphrase."},
        {"remote_library", SETTING_FILE, "", .fixed = true,
         .offset = offsetof(struct config, remote_library),
         .text = "Mooncake Store's library with the C API; empty: libmooncake_store.so, where the "
                 "loader finds it."},
        {"remote_metadata", SETTING_TEXT, "", .fixed = true,
         .offset = offsetof(struct config, remote_metadata),
         .text = "Mooncake's metadata server, the same as on the store's other machines; empty: they "
                 "have none (P2PHANDSHAKE)."},
        {"remote_devices", SETTING_TEXT, "", .fixed = true,
         .offset = offsetof(struct config, remote_devices),
         .text = "RDMA devices for Mooncake, with commas between several, or auto; empty: TCP."},
        {"remote_timeout", SETTING_COUNT, "100", .low = 1, .high = 10000, .fixed = true,
         .offset = offsetof(struct config, remote_timeout),
         .text = "Milliseconds for which a server may be silent; after that, it is left alone for a "
                 "while, and its blocks are misses."},
        {"remote_depth", SETTING_COUNT, "1024", .low = 0, .high = 1u << 30, .fixed = true,
         .offset = offsetof(struct config, remote_depth),
         .text = "Like file_depth, for the servers."},
        {"overhead", SETTING_BYTES, "0", .low = 0, .high = 256 * TIB, .fixed = true,
         .offset = offsetof(struct config, overhead),
         .text = "Maximum memory outside the pool, for indexes, tables and pin pages of all spaces; "
                 "0: half of the pool, and at least 2G."},
        {"segment", SETTING_BYTES, "0", .low = 0, .high = TIB, .fixed = true,
         .offset = offsetof(struct config, segment),
         .text = "Size of the pieces in which memory is given to a space and taken back; 0: 64M, or "
                 "less in a small pool."},
        {"pages", SETTING_CHOICE, "auto", .choices = "auto|small|huge", .fixed = true,
         .offset = offsetof(struct config, pages),
         .text = "Memory pages: huge are reserved 2 MiB pages (vm.nr_hugepages); auto takes them "
                 "if there are enough, and else 2 MiB pages of ordinary memory where it can."},
        {"numa", SETTING_CHOICE, "spread", .choices = "off|spread", .fixed = true,
         .offset = offsetof(struct config, numa),
         .text = "On hosts with several NUMA nodes: spread puts the pool on all of them, and gives "
                 "a client that runs on one node memory of it first; off leaves it to the kernel."},
        {"loop", SETTING_CHOICE, "auto", .choices = "auto|io_uring|epoll", .fixed = true,
         .offset = offsetof(struct config, loop),
         .text = "How the daemon waits; auto takes io_uring where it is allowed."},
        {"quarantine_ms", SETTING_COUNT, "1000", .low = 0, .high = 600000,
         .offset = offsetof(struct config, quarantine_ms),
         .text = "Milliseconds for which the GPU work of a process that has ended may still write; "
                 "until then, its blocks are not reused."},
        {"max_clients", SETTING_COUNT, "512", .low = 1, .high = 4096, .fixed = true,
         .offset = offsetof(struct config, max_clients),
         .text = "Maximum number of connections; root and admins may have four more."},
        {"user_clients", SETTING_COUNT, "0", .low = 0, .high = 4096,
         .offset = offsetof(struct config, user_clients),
         .text = "Maximum number of connections of one user; 0: as many as are still free, so that "
                 "one user alone gets at most half."},
        {"max_spaces", SETTING_COUNT, "64", .low = 1, .high = 4096,
         .offset = offsetof(struct config, max_spaces),
         .text = "Maximum number of spaces of one domain."},
        {"admins", SETTING_USERS, "", .offset = offsetof(struct config, admins),
         .text = "Users who may see and change every domain, with commas between them; root and the "
                 "daemon's own user always may."},
        {"unlisted", SETTING_CHOICE, "own", .choices = "own|refuse",
         .offset = offsetof(struct config, unlisted),
         .text = "own: a user that no [domain] lists gets a domain of its own, called uid-N; refuse: "
                 "it is refused, unless it is root or an admin."},
        {"worker", SETTING_CHOICE, "auto", .choices = "auto|off", .fixed = true,
         .offset = offsetof(struct config, worker),
         .text = "auto: a process of low priority runs the methods' kernels, once it is needed; off: "
                 "there is none."},
        {"worker_threads", SETTING_COUNT, "0", .low = 0, .high = 256,
         .offset = offsetof(struct config, worker_threads),
         .text = "Threads of the worker; 0: half of the processors, and at least one."},
        {"worker_share", SETTING_COUNT, "20", .low = 1, .high = 100,
         .offset = offsetof(struct config, worker_share),
         .text = "Maximum share of a GPU's time for the worker's kernels, in percent; for the rest of "
                 "the time, inference has the GPU alone."},
        {"worker_deadline", SETTING_COUNT, "60", .low = 1, .high = 3600,
         .offset = offsetof(struct config, worker_deadline),
         .text = "Seconds after which a worker that has not answered is ended and replaced."},
        {"log", SETTING_CHOICE, "info", .choices = "error|warning|info|debug",
         .offset = offsetof(struct config, log), .text = "Least severe kind of line to log."},
        {.name = NULL}};

const struct setting domain_settings[] = {
        {"users", SETTING_USERS, "", .offset = offsetof(struct config_domain, users),
         .text = "Users who belong to the domain, names or numbers with commas between them; a user "
                 "belongs to one domain."},
        {"groups", SETTING_GROUPS, "", .offset = offsetof(struct config_domain, groups),
         .text = "Groups whose members belong to the domain, unless a domain lists them as users; the "
                 "first match counts."},
        {"quota", SETTING_BYTES, "0", .low = 0, .high = 256 * TIB,
         .offset = offsetof(struct config_domain, quota),
         .text = "Maximum pool memory of the domain, which has the same share of everything else; 0: "
                 "the whole pool."},
        {"guarantee", SETTING_BYTES, "0", .low = 0, .high = 256 * TIB,
         .offset = offsetof(struct config_domain, guarantee),
         .text = "Pool memory that is reserved for the domain, with the same share of everything "
                 "else."},
        {"client_quota", SETTING_BYTES, "0", .low = 0, .high = 256 * TIB,
         .offset = offsetof(struct config_domain, client_quota),
         .text = "Maximum memory that one process may be filling in one space; 0: half of the space."},
        {"isolation", SETTING_CHOICE, "shared", .choices = "shared|arena",
         .offset = offsetof(struct config_domain, isolation),
         .text = "shared: clients of the domain may write all of its memory; arena: each may write "
                 "only segments of its own."},
        {"remote_prefix", SETTING_NAME, "", .fixed = true,
         .offset = offsetof(struct config_domain, remote_prefix),
         .text = "Prefix of the names of the domain's blocks on the servers: domains with the same "
                 "prefix share blocks, on all machines; empty: the domain's name."},
        {.name = NULL}};

static_assert(ARRAY_SIZE(daemon_settings) <= SETTINGS_MOST &&
                      ARRAY_SIZE(domain_settings) <= SETTINGS_MOST,
              "config.c has a place for each");

const struct setting *setting_find(const struct setting *settings, const char *name) {
        for (; settings->name; settings++)
                if (strcmp(settings->name, name) == 0)
                        return settings;
        return NULL;
}

const char *setting_unit(const struct setting *setting) {
        static const char *const units[] = {[SETTING_PATH] = "path",
                                            [SETTING_FILE] = "path",
                                            [SETTING_TEXT] = "text",
                                            [SETTING_NAME] = "name",
                                            [SETTING_MODE] = "octal mode",
                                            [SETTING_GROUP] = "group name or number",
                                            [SETTING_USER] = "user name or number",
                                            [SETTING_BYTES] = "bytes, with K, M, G or T",
                                            [SETTING_MEMORY] =
                                                    "bytes, with K, M, G or T, or % of memory",
                                            [SETTING_COUNT] = "number",
                                            [SETTING_NUMBERS] = "numbers",
                                            [SETTING_USERS] = "users",
                                            [SETTING_GROUPS] = "groups"};

        return setting->type == SETTING_CHOICE ? setting->choices : units[setting->type];
}

/* ---- values ---------------------------------------------------------------------------------- */

static bool parse_number(const char *text, int base, uint64_t *ret, const char **rest) {
        char *end;

        errno = 0;
        *ret = strtoull(text, &end, base);
        *rest = end;
        return errno == 0 && end != text && text[0] >= '0' && text[0] <= '9';
}

static int parse_path(const char *value, char to[static 108], struct kvd_why *why) {
        if (!value[0] || (value[0] != '/' && value[0] != '@'))
                return kvd_refuse(
                        why, -EINVAL,
                        "'%s' is not a path; write one that begins with / or, if abstract, with @",
                        value);
        if (strlen(value) > 107)
                return kvd_refuse(why, -EINVAL,
                                  "the path has %zu bytes; a socket's has at most 107",
                                  strlen(value));
        memset(to, 0, 108);
        memcpy(to, value, strlen(value));
        return 0;
}

/* "/a, /b" or "/a," */
static bool is_list(const char *value) {
        const char *comma = strchr(value, ','), *next = comma ? comma + strspn(comma, ", \t") : "";

        return comma && (!*next || *next == '/');
}

static int parse_file(const char *value, char to[static 108], struct kvd_why *why) {
        if (is_list(value))
                return kvd_refuse(why, -EINVAL,
                                  "name one path, and no list; the system makes one "
                                  "device of several disks (RAID, LVM)");
        if (value[0] && value[0] != '/')
                return kvd_refuse(why, -EINVAL, "'%s' is not a path; write one that begins with /",
                                  value);
        if (strlen(value) > 107)
                return kvd_refuse(why, -EINVAL, "the path has %zu bytes; 107 are enough here",
                                  strlen(value));
        memset(to, 0, 108);
        memcpy(to, value, strlen(value));
        return 0;
}

static int parse_text(const char *value, char to[static 1024], struct kvd_why *why) {
        if (strlen(value) > 1023)
                return kvd_refuse(why, -EINVAL, "it has more than 1023 bytes");
        memset(to, 0, 1024);
        memcpy(to, value, strlen(value));
        return 0;
}

static int parse_name(const char *value, char to[static KVD_NAME_MAX + 1], struct kvd_why *why) {
        if (value[0] && !kvd_is_name(value, KVD_NAME_MAX))
                return kvd_refuse(
                        why, -EINVAL,
                        "'%s' is not a name; use letters, digits, dot, underscore and minus, at most %u",
                        value, KVD_NAME_MAX);
        memset(to, 0, KVD_NAME_MAX + 1);
        memcpy(to, value, strlen(value));
        return 0;
}

static int parse_mode(const char *value, uint32_t *to, struct kvd_why *why) {
        const char *rest;
        uint64_t n;

        if (!parse_number(value, 8, &n, &rest) || *rest || n > 0777)
                return kvd_refuse(why, -EINVAL,
                                  "'%s' is not a mode; write octal digits, such as 0660", value);
        *to = (uint32_t)n;
        return 0;
}

/* A percentage is of the memory that machine and cgroups allow, and gives at least the minimum. */
static bool scale(const char *unit, const struct setting *o, uint64_t *n) {
        static const char letters[] = "KMGT";
        const char *letter = unit[0] ? strchr(letters, unit[0]) : NULL;
        unsigned shift = letter ? 10 * (unsigned)(letter - letters + 1) : 0;

        if (o->type == SETTING_MEMORY && strcmp(unit, "%") == 0 && *n <= 100) {
                *n = *n ? MAX(memory_usable("") / 100 * *n, o->low) : 0;
                return true;
        }
        if ((unit[0] && !letter) || (letter && unit[1]) || *n > UINT64_MAX >> shift)
                return false;
        *n <<= shift;
        return true;
}

static int parse_bytes(const struct setting *o, const char *value, uint64_t *to, uint32_t *share,
                       struct kvd_why *why) {
        const char *rest;
        uint64_t n;

        if (!parse_number(value, 10, &n, &rest) || !scale(rest, o, &n))
                return kvd_refuse(why, -EINVAL, "'%s' is not a size; write %s, such as 512M or 8G",
                                  value, setting_unit(o));
        if (n < o->low || n > o->high)
                return kvd_refuse(why, -EINVAL,
                                  "'%s' is out of range; at least %lluK, at most %lluG", value,
                                  (unsigned long long)(o->low / KIB),
                                  (unsigned long long)(o->high >> 30));
        *to = n;
        if (share)
                *share = strcmp(rest, "%") == 0 ? (uint32_t)strtoul(value, NULL, 10) : 0;
        return 0;
}

static int parse_count(const struct setting *o, const char *value, uint32_t *to,
                       struct kvd_why *why) {
        const char *rest;
        uint64_t n;

        if (!parse_number(value, 10, &n, &rest) || *rest || n < o->low || n > o->high)
                return kvd_refuse(why, -EINVAL, "'%s' is not a number from %llu to %llu", value,
                                  (unsigned long long)o->low, (unsigned long long)o->high);
        *to = (uint32_t)n;
        return 0;
}

static int add_number(const struct setting *o, const char *value, struct number_list *list,
                      struct kvd_why *why) {
        uint32_t number;
        int r = parse_count(o, value, &number, why);

        if (r < 0)
                return r;
        for (uint32_t i = 0; i < list->n; i++)
                if (list->at[i] == number)
                        return kvd_refuse(why, -EINVAL, "%u is there twice; leave one out", number);
        if (list->n == ARRAY_SIZE(list->at))
                return kvd_refuse(why, -EINVAL, "there are more than %zu numbers",
                                  ARRAY_SIZE(list->at));
        list->at[list->n++] = number;
        return 0;
}

static int parse_numbers(const struct setting *o, const char *value, struct number_list *to,
                         struct kvd_why *why) {
        char copy[128], *save = NULL;
        struct number_list list = {0};
        int r = 0;

        if (strlen(value) >= sizeof copy)
                return kvd_refuse(why, -EINVAL, "the list is longer than %zu bytes",
                                  sizeof copy - 1);
        strcpy(copy, value);
        for (char *number = strtok_r(copy, ", \t", &save); number && r == 0;
             number = strtok_r(NULL, ", \t", &save))
                r = add_number(o, number, &list, why);
        if (r == 0)
                *to = list;
        return r;
}

static int parse_choice(const struct setting *o, const char *value, uint32_t *to,
                        struct kvd_why *why) {
        const char *at = o->choices;
        size_t n;

        for (uint32_t i = 0; *at; i++) {
                n = strcspn(at, "|");
                if (strlen(value) == n && memcmp(at, value, n) == 0) {
                        *to = i;
                        return 0;
                }
                at += n + (at[n] == '|');
        }
        return kvd_refuse(why, -EINVAL, "'%s' is not known; write one of %s", value, o->choices);
}

/* ---- users and groups ------------------------------------------------------------------------ */

static int resolve(const char *name, bool group, uint32_t *ret, struct kvd_why *why) {
        const char *rest;
        uint64_t n;

        if (parse_number(name, 10, &n, &rest) && !*rest && n < UINT32_MAX) {
                *ret = (uint32_t)n;
                return 0;
        }
        if (group) {
                const struct group *g = getgrnam(name);

                *ret = g ? g->gr_gid : UINT32_MAX;
        } else {
                const struct passwd *p = getpwnam(name);

                *ret = p ? p->pw_uid : UINT32_MAX;
        }
        if (*ret == UINT32_MAX)
                return kvd_refuse(
                        why, -EINVAL,
                        "there is no %s '%s' on this machine; create it or write its number",
                        group ? "group" : "user", name);
        return 0;
}

static int parse_id(const char *value, bool group, uint32_t *to, struct kvd_why *why) {
        *to = UINT32_MAX;
        return value[0] ? resolve(value, group, to, why) : 0;
}

static int append(struct id_list *list, uint32_t id, struct kvd_why *why) {
        uint32_t *ids = sys->calloc(list->n + 1, sizeof *ids);

        if (!ids)
                return kvd_refuse(why, -EINVAL, "out of memory");
        if (list->n)
                memcpy(ids, list->ids, list->n * sizeof *ids);
        ids[list->n++] = id;
        free(list->ids);
        list->ids = ids;
        return 0;
}

static int parse_ids(const char *value, bool groups, struct id_list *to, struct kvd_why *why) {
        char copy[1024], *save = NULL;
        uint32_t id;
        int r = 0;

        if (strlen(value) >= sizeof copy)
                return kvd_refuse(why, -EINVAL,
                                  "the list is longer than %zu bytes; use a group instead",
                                  sizeof copy - 1);
        strcpy(copy, value);
        free(to->ids);
        *to = (struct id_list){0};
        for (char *name = strtok_r(copy, ", \t", &save); name && r >= 0;
             name = strtok_r(NULL, ", \t", &save)) {
                r = resolve(name, groups, &id, why);
                if (r >= 0)
                        r = append(to, id, why);
        }
        return r;
}

bool setting_keep(const struct setting *o, const void *now, void *next) {
        static const size_t sizes[] =
                {[SETTING_PATH] = 108,  [SETTING_FILE] = 108,
                 [SETTING_TEXT] = 1024, [SETTING_NAME] = KVD_NAME_MAX + 1,
                 [SETTING_MODE] = 4,    [SETTING_GROUP] = 4,
                 [SETTING_BYTES] = 8,   [SETTING_MEMORY] = 8,
                 [SETTING_COUNT] = 4,   [SETTING_CHOICE] = 4,
                 [SETTING_USER] = 4,    [SETTING_NUMBERS] = sizeof(struct number_list)};
        const void *from = (const char *)now + o->offset;
        void *to = (char *)next + o->offset;
        bool changed = memcmp(from, to, sizes[o->type]) != 0;

        memcpy(to, from, sizes[o->type]);
        return changed;
}

int setting_parse(const struct setting *o, const char *value, void *base, struct kvd_why *why) {
        void *to = (char *)base + o->offset;

        switch (o->type) {
        case SETTING_PATH: return parse_path(value, to, why);
        case SETTING_FILE: return parse_file(value, to, why);
        case SETTING_TEXT: return parse_text(value, to, why);
        case SETTING_NAME: return parse_name(value, to, why);
        case SETTING_MODE: return parse_mode(value, to, why);
        case SETTING_GROUP:
        case SETTING_USER: return parse_id(value, o->type == SETTING_GROUP, to, why);
        case SETTING_BYTES:
        case SETTING_MEMORY:
                return parse_bytes(o, value, to,
                                   o->share ? (uint32_t *)((char *)base + o->share) : NULL, why);
        case SETTING_COUNT: return parse_count(o, value, to, why);
        case SETTING_NUMBERS: return parse_numbers(o, value, to, why);
        case SETTING_CHOICE: return parse_choice(o, value, to, why);
        case SETTING_USERS:
        case SETTING_GROUPS: return parse_ids(value, o->type == SETTING_GROUPS, to, why);
        }
        return -EINVAL;
}
