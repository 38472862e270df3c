/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A space's policy, its size and the methods' settings (ipc/base/methods.def) may be changed while
 * it is in use. They are in the header of its index, where clients and workers read them.
 *
 * Those that are part of the memory's layout (KVD_FIXED) are fixed when the space is created, and
 * the setting only reports them.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/enums.h"
#include "store/cache/cache.h"
#include "store/hooks.h"

static int check_policy(struct space *space, const char *value) {
        uint32_t policy = kvd_enum_number(KVD_ENUM_policy, value);
        char what[32];

        if (!policy)
                return store_refuse(space_store(space), -EINVAL,
                                    "policy is one of " KVD_LIST(policy) ", not '%s'", value);
        snprintf(what, sizeof what, "policy %s", value);
        return policy_goes_by_worth(policy) ? space_refuse_opaque(space, what) : 0;
}

static int check_max_blocks(struct space *space, const char *value) {
        char *end;
        unsigned long long n = strtoull(value, &end, 10);

        if (*end || end == value || n > space_index(space)->capacity)
                return store_refuse(space_store(space), -EINVAL,
                                    "max_blocks is 1 to %u (the space's index holds no "
                                    "more), or 0 for what quota and pool allow; not '%s'",
                                    space_index(space)->capacity, value);
        return 0;
}

static void set_max_blocks(struct space *space, const char *value) {
        space->ix->max_blocks = (uint32_t)strtoull(value, NULL, 10);
        space_fit(space);
        space_is_busy(space);
}

/* ---- the methods' settings ------------------------------------------------------------------- */

static int refuse_value(struct space *space, enum kvd_setting which, const char *value) {
        const struct kvd_setting_info *info = kvd_setting_info(which);
        struct store *store = space_store(space);

        if (info->words)
                return store_refuse(store, -EINVAL, "%s.%s is one of: %s; not '%.64s'",
                                    info->method, info->name, info->words, value);
        return store_refuse(store, -EINVAL, "%s.%s is a number from %g to %g, not '%.64s'",
                            info->method, info->name, info->least, info->most, value);
}

static int refuse_fixed(struct space *space, enum kvd_setting which, double is) {
        const struct kvd_setting_info *info = kvd_setting_info(which);

        return store_refuse(space_store(space), -EINVAL,
                            "%s.%s is fixed when a space is made; it is %g in space '%s'",
                            info->method, info->name, is, space_name(space));
}

static void tell_fixed(struct kvd_index *ix) {
#define KVD_FIXED(method, name, member) \
        kvd_setting_put(ix->settings, KVD_##method##_##name, ix->member);
#include "ipc/base/methods.def"
}

static int check_method(struct space *space, enum kvd_setting which, const char *text) {
        double is = kvd_setting_get(space_index(space)->settings, which), value;
        int r = space_refuse_opaque(space, kvd_setting_info(which)->method);

        if (r < 0)
                return r;
        if (kvd_setting_parse(which, text, &value) < 0)
                return refuse_value(space, which, text);
        if (kvd_setting_is_fixed(which) && value != is)
                return refuse_fixed(space, which, is);
        /* methods need a worker, and that needs the summaries: allocate them now, or refuse */
        if (value != 0 && strcmp(kvd_setting_info(which)->name, "on") == 0)
                r = space_summary_fd(space, true);
        return MIN(r, 0);
}

static void set_method(struct space *space, enum kvd_setting which, const char *text) {
        struct kvd_index *ix = space->ix;
        double value = 0;

        kvd_setting_parse(which, text, &value);
        kvd_setting_put(ix->settings, which, value);
        tell_fixed(ix); /* a profile may have changed it */
        hooks_setting_changed(space);
}

void settings_init(struct kvd_index *ix) {
        kvd_settings_init(ix->settings);
        tell_fixed(ix);
}

int space_check_setting(struct space *space, const char *key, const char *value) {
        int which;

        if (strcmp(key, "policy") == 0)
                return check_policy(space, value);
        if (strcmp(key, "max_blocks") == 0)
                return check_max_blocks(space, value);
        which = kvd_setting_by_name(key);
        if (which >= 0)
                return check_method(space, (enum kvd_setting)which, value);
        return store_refuse(space_store(space), -EINVAL,
                            "a space has no setting '%s'; it has policy, max_blocks and "
                            "those of the methods (kvctl space set --help)",
                            key);
}

int space_set(struct space *space, const char *key, const char *value) {
        int r = space_check_setting(space, key, value);

        if (r < 0)
                return r;
        if (strcmp(key, "policy") == 0)
                evict_set_policy(space, kvd_enum_number(KVD_ENUM_policy, value));
        else if (strcmp(key, "max_blocks") == 0)
                set_max_blocks(space, value);
        else
                set_method(space, (enum kvd_setting)kvd_setting_by_name(key), value);
        return 0;
}
