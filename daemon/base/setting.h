/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_BASE_SETTING_H
#define KVD_DAEMON_BASE_SETTING_H

/* One option of the configuration: how it is called, what it may be, and where it goes. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/base/why.h"

enum setting_type {
        SETTING_PATH,   /* char[108] */
        SETTING_FILE,   /* char[108]; may be empty */
        SETTING_FILES,  /* struct file_list; may be empty */
        SETTING_TEXT,   /* char[1024]; may be empty */
        SETTING_NAME,   /* char[KVD_NAME_MAX + 1]; may be empty */
        SETTING_MODE,   /* uint32_t, octal */
        SETTING_GROUP,  /* uint32_t, name or number; empty: UINT32_MAX */
        SETTING_USER,   /* the same */
        SETTING_BYTES,  /* uint64_t, with K M G T */
        SETTING_MEMORY, /* the same, or a share of the machine's memory with % */
        SETTING_COUNT,  /* uint32_t */
        SETTING_NUMBER, /* the same; empty: UINT32_MAX */
        SETTING_CHOICE, /* uint32_t: place in the list of choices */
        SETTING_USERS,  /* struct id_list of names or numbers */
        SETTING_GROUPS,
};

#define SETTINGS_MOST 64u /* of a section */

struct setting {
        const char *name;
        enum setting_type type;
        const char *fallback; /* the default, as one would write it */
        const char *choices;  /* "a|b|c" */
        uint64_t low, high;   /* BYTES, MEMORY, COUNT */
        size_t offset;
        size_t share;         /* MEMORY: of a uint32_t that takes the percentage, or 0 */
        bool fixed;           /* a reload does not change it */
        bool fixed_on_gpu;    /* ... where the pool is a GPU's */
        const char *text;     /* one sentence */
};

/*
 * Options of [daemon], in struct config, and of [domain NAME], in struct config_domain; name NULL
 * ends them.
 */
extern const struct setting daemon_settings[];
extern const struct setting domain_settings[];

const struct setting *setting_find(const struct setting *settings, const char *name);
const char *setting_unit(const struct setting *setting);

/* Copies the member from one struct to the other; none of a list. Was it different? */
bool setting_keep(const struct setting *setting, const void *now, void *next);

/*
 * Sets the member of the struct at base. -EINVAL with what is wrong, and what would be right, in
 * why.
 */
int setting_parse(const struct setting *setting, const char *value, void *base,
                  struct kvd_why *why);

#endif
