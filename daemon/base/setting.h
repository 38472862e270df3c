/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_BASE_SETTING_H
#define KVD_DAEMON_BASE_SETTING_H

/* An option of the configuration: its name, type and limits, and the field that has its value. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/base/why.h"

enum setting_type {
        SETTING_PATH,    /* char[108] */
        SETTING_FILE,    /* char[108]; may be empty */
        SETTING_TEXT,    /* char[1024]; may be empty */
        SETTING_NAME,    /* char[KVD_NAME_MAX + 1]; may be empty */
        SETTING_MODE,    /* uint32_t, octal */
        SETTING_GROUP,   /* uint32_t, name or number; empty: UINT32_MAX */
        SETTING_USER,    /* the same */
        SETTING_BYTES,   /* uint64_t, with K M G T */
        SETTING_MEMORY,  /* the same, or a share of the machine's memory with % */
        SETTING_COUNT,   /* uint32_t */
        SETTING_NUMBERS, /* struct number_list, of different numbers; empty: none */
        SETTING_CHOICE,  /* uint32_t: index into the list of choices */
        SETTING_USERS,   /* struct id_list of names or numbers */
        SETTING_GROUPS,
};

#define SETTINGS_MOST 64u /* of a section */

struct setting {
        const char *name;
        enum setting_type type;
        const char *fallback; /* the default, as in a file */
        const char *choices;  /* "a|b|c" */
        uint64_t low, high;   /* BYTES, MEMORY, COUNT, NUMBERS */
        size_t offset;
        size_t share;      /* MEMORY: offset of a uint32_t for the percentage; 0: none */
        bool fixed;        /* changes only at a restart */
        bool fixed_on_gpu; /* the same, if the pool is on a GPU */
        const char *text;  /* description, one sentence or two */
};

/*
 * Options of [daemon], in struct config, and of [domain NAME], in struct config_domain. The last
 * entry's name is NULL.
 */
extern const struct setting daemon_settings[];
extern const struct setting domain_settings[];

const struct setting *setting_find(const struct setting *settings, const char *name);
const char *setting_unit(const struct setting *setting);

/* Copies the field from now to next. Returns whether they differed. Not for USERS and GROUPS. */
bool setting_keep(const struct setting *setting, const void *now, void *next);

/*
 * Sets the field in the struct at base. -EINVAL: why has what is wrong, and what to write instead.
 */
int setting_parse(const struct setting *setting, const char *value, void *base,
                  struct kvd_why *why);

#endif
