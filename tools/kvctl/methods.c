/* SPDX-License-Identifier: Apache-2.0 */

/*
 * methods: which methods are on, and their settings. The rows are those of methods.def. Each
 * method's row counts the settings that differ from its profile.
 */

#include <math.h>
#include <string.h>

#include "ipc/base/layout.h"
#include "ipc/base/settings.h"
#include "tools/kvctl/kvctl.h"

static const struct column method_columns[] = {
        {"domain", "DOMAIN", UNIT_NONE | COLUMN_QUIET},
        {"space", "SPACE", UNIT_NONE | COLUMN_QUIET},
        {"method", "METHOD", UNIT_NONE},
        {"on", "ON", UNIT_NONE},
        {"profile", "PROFILE", UNIT_NONE},
        {"changed", "CHANGED", UNIT_NONE},
};

static const struct column setting_columns[] = {
        {"domain", "DOMAIN", UNIT_NONE | COLUMN_QUIET},
        {"space", "SPACE", UNIT_NONE | COLUMN_QUIET},
        {"setting", "SETTING", UNIT_NONE},
        {"value", "VALUE", UNIT_NONE},
        {"paper", "PAPER", UNIT_NONE},
        {"serve", "SERVE", UNIT_NONE},
        {"takes", "TAKES", UNIT_NONE},
        {"meaning", "MEANING", UNIT_NONE},
};

struct tables {
        struct table *methods, *settings;
        const struct space_name *space;
        struct kvd_slice values;
};

static double value_at(const struct tables *t, unsigned which) {
        double value = 0;

        if (t->values.size >= (which + 1) * sizeof value)
                memcpy(&value, (const uint8_t *)t->values.data + which * sizeof value,
                       sizeof value);
        return value;
}

static void put_value(struct table *table, unsigned which, double value) {
        char text[64];

        table_string(table, kvd_setting_format(which, value, text, sizeof text));
}

/* ---- one row per method ---------------------------------------------------------------------- */

/* Number of the method's settings that differ from its profile. */
static uint32_t changed(const struct tables *t, unsigned on) {
        double profile = value_at(t, on + 1);
        uint32_t n = 0;

        for (unsigned i = on + 2; i < KVD_N_SETTINGS; i++) {
                const struct kvd_setting_info *info = kvd_setting_info(i);

                if (strcmp(info->method, kvd_setting_info(on)->method) == 0)
                        n += value_at(t, i) != (profile == KVD_PAPER ? info->paper : info->serve);
        }
        return n;
}

static void fill_method(const struct tables *t, unsigned on) {
        uint32_t n = changed(t, on);

        table_string(t->methods, t->space->domain);
        table_string(t->methods, t->space->name);
        table_string(t->methods, kvd_setting_info(on)->method);
        put_value(t->methods, on, value_at(t, on));
        if (value_at(t, on))
                table_colour(t->methods, "32");
        put_value(t->methods, on + 1, value_at(t, on + 1));
        if (n)
                table_format(t->methods, "%u setting%s", n, n == 1 ? "" : "s");
        else
                table_none(t->methods);
}

/* ---- one row per setting --------------------------------------------------------------------- */

static void put_range(struct table *table, const struct kvd_setting_info *info) {
        if (info->words)
                table_string(table, info->words);
        else
                table_format(table, "%g to %g", info->least, info->most);
}

static void fill_setting(const struct tables *t, unsigned which) {
        const struct kvd_setting_info *info = kvd_setting_info(which);

        table_string(t->settings, t->space->domain);
        table_string(t->settings, t->space->name);
        table_format(t->settings, "%s.%s", info->method, info->name);
        put_value(t->settings, which, value_at(t, which));
        put_value(t->settings, which, info->paper);
        put_value(t->settings, which, info->serve);
        put_range(t->settings, info);
        table_string(t->settings, info->text);
}

static void fill(const struct tables *t) {
        for (unsigned i = 0; i < KVD_N_SETTINGS; i++) {
                if (strcmp(kvd_setting_info(i)->name, "on") == 0)
                        fill_method(t, i);
                if (t->settings)
                        fill_setting(t, i);
        }
}

static bool is_listed(const struct space_list *list, const struct space_name *space) {
        for (size_t i = 0; i < list->n; i++)
                if (space_name_equal(&list->spaces[i], space))
                        return true;
        return false;
}

int add_methods(struct kvctl *kvctl, struct answer *answer, const struct space_list *list,
                bool settings) {
        struct tables t = {.methods = ANSWER_ROWS(answer, "methods", method_columns)};
        struct kvd_msg_space_info_reply info;
        uint32_t cursor = 0;
        int r;

        if (settings)
                t.settings = ANSWER_ROWS(answer, "settings", setting_columns);
        if (!t.methods || (settings && !t.settings))
                return kvctl_out_of_memory(kvctl);
        while ((r = kvctl_next_space(kvctl, &cursor, &info)) == 1) {
                struct space_name space = space_name_of(&info);

                t.space = &space;
                t.values = info.settings;
                if (is_listed(list, &space))
                        fill(&t);
        }
        return r;
}

int verb_methods(struct kvctl *kvctl, struct answer *answer) {
        _cleanup_(space_list_clear) struct space_list list = {0};
        bool settings = args_has(&kvctl->args, FLAG_SETTINGS) || args_has(&kvctl->args, FLAG_JSON);
        int r = kvctl_spaces(kvctl, &list);

        if (r < 0)
                return r;
        if (list.n == 0)
                answer_say(answer, "No spaces yet, so no methods either.");
        r = add_methods(kvctl, answer, &list, settings);
        if (r == 0 && list.n && !settings)
                answer_say(answer, "\"kvctl methods SPACE --settings\" lists every setting; "
                                   "\"kvctl space set SPACE memshare=on\" changes one.");
        return r;
}
