/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_BASE_CONFIG_H
#define KVD_DAEMON_BASE_CONFIG_H

/*
 * The configuration: a [daemon] section and any number of [domain NAME] sections. The parser, the
 * defaults and the output of kvd --print-config come from one table (setting.c).
 */

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#include "ipc/base/disk.h"
#include "ipc/base/why.h"
#include "store/store.h"

#define CONFIG_SEGMENT_MIN (64U << 10)
#define CONFIG_FILE_MIN (UINT64_C(4) << 20)

struct id_list {
        uint32_t *ids; /* owned */
        uint32_t n;
};
bool id_list_has(const struct id_list *list, uint32_t id);

struct number_list {
        uint32_t n, at[KVD_SHARDS];
};

enum { CONFIG_OWN, CONFIG_REFUSE };   /* unlisted */
enum { CONFIG_SHARED, CONFIG_ARENA }; /* isolation */
enum { CONFIG_AUTO, CONFIG_OFF };     /* worker */
/* backend */
enum { CONFIG_BACKEND_AUTO, CONFIG_BACKEND_HOST, CONFIG_BACKEND_CUDA, CONFIG_BACKEND_LEGACY };
enum { CONFIG_ERROR, CONFIG_WARNING, CONFIG_INFO, CONFIG_DEBUG }; /* log */

struct config_domain {
        char name[KVD_NAME_MAX + 1];
        struct id_list users, groups;
        uint64_t quota, guarantee, client_quota;
        uint32_t isolation;
        char remote_prefix[KVD_NAME_MAX + 1]; /* on the servers; "": same as name */
        struct config_domain *next;           /* owned */
};

struct config {
        char socket[108];
        uint32_t socket_mode;
        uint32_t socket_group; /* UINT32_MAX: leave as it is */
        uint32_t user;         /* user that root becomes; UINT32_MAX: not set */
        uint32_t backend;
        struct number_list device; /* numbers of the GPUs; none: the instance's number */
        uint32_t quarantine_ms;
        uint64_t pool, spill;
        uint64_t pool_most;        /* maximum for a reload of pool; 0: pool at the start */
        uint64_t overhead;         /* 0: the store chooses */
        uint64_t segment;          /* 0: the store chooses */
        char file[108];            /* of the file tier; "": none */
        uint64_t file_size;        /* bytes of the file; 0: its present size */
        uint32_t file_depth;       /* tokens: deeper blocks are written at their first use */
        uint32_t file_timeout;     /* seconds that the disk may take to answer its requests */
        uint64_t host_tier;        /* bytes of host memory below a pool on a GPU; 0: none */
        uint32_t host_tier_depth;  /* as file_depth */
        char remote[1024];         /* servers of the remote tier; "": none */
        char remote_key[108];      /* file with the secret that machines share; "": none */
        char remote_password[108]; /* file with the servers' password; "": none */
        /* PEM files for rediss:// servers; "": none */
        char remote_ca[108], remote_certificate[108], remote_certificate_key[108];
        char remote_library[108];                         /* Mooncake's; "": found by the loader */
        char remote_metadata[1024], remote_devices[1024]; /* Mooncake's; "": none */
        uint32_t remote_timeout; /* milliseconds that a server may be silent */
        uint32_t remote_depth;   /* as file_depth */
        uint64_t reserve;        /* 0: backend_size_pool chooses */
        /* percentage of memory that pool was given as; 0: it was given in bytes */
        uint32_t pool_share;
        uint32_t pages;        /* enum store_pages */
        uint32_t numa;         /* 1: the pool is on all nodes */
        uint32_t loop;         /* enum loop_kind */
        uint32_t max_clients;  /* maximum number of connections */
        uint32_t user_clients; /* maximum of one user; 0: as many as are still free */
        uint32_t max_spaces;   /* maximum number of spaces of one domain */
        struct id_list admins;
        uint32_t unlisted;
        uint32_t worker;                          /* CONFIG_AUTO, CONFIG_OFF */
        uint32_t worker_threads, worker_deadline; /* 0: half of the processors; seconds */
        uint32_t worker_share;                    /* percent of a GPU's time */
        /* run with --worker; "": none. Set by main, not by the file */
        char worker_program[256];
        uint32_t log;
        bool own_user_only;            /* kvd --private */
        uint32_t owner;                /* user that serves: own user, or the one root becomes */
        bool only_checked;             /* kvd --check-config: create and lock nothing */
        struct config_domain *domains; /* owned, in the order of the file */
};

/* Sets all defaults. */
int config_init(struct config *config);
void config_clear(struct config *config);

/*
 * Reads a file; its settings replace those in *config. Negative: the first fault is in why. If all
 * is not NULL, reading continues, and each fault is a line in all. optional: the file may be
 * missing.
 */
int config_read(struct config *config, const char *path, bool optional, FILE *all,
                struct kvd_why *why);

/* "daemon.pool=4G" or "domain NAME.quota=1G", as kvd --set takes it. */
int config_set(struct config *config, const char *assignment, struct kvd_why *why);

/* Checks the whole: sums of settings, and users in two domains. */
int config_check(const struct config *config, struct kvd_why *why);

/* Prints a configuration file with every option, its default and its description. */
void config_print(FILE *to);

/* The domain that lists the user, else the first that lists one of the groups, else NULL. */
const struct config_domain *config_find_domain(const struct config *config, uint32_t uid,
                                               const uint32_t *groups, uint32_t n_groups);
void config_domain_to_store(const struct config_domain *domain, struct domain_config *ret);

#endif
