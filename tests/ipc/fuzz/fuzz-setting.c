/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A method's setting, "name=value", as any client may send it. It is refused, or gives a number
 * that the setting may have.
 */

#include <math.h>
#include <string.h>

#include "ipc/base/settings.h"
#include "tests/ipc/fuzz/fuzz.h"

static void try_value(enum kvd_setting which, const char *text) {
        const struct kvd_setting_info *info = kvd_setting_info(which);
        double value = NAN, again;
        char printed[64];

        if (kvd_setting_parse(which, text, &value) < 0)
                return;
        MUST(isfinite(value));
        if (info->words)
                MUST(value == floor(value) && value >= 0 && value < 16);
        else
                MUST(value >= info->least && value <= info->most);
        MUST(kvd_setting_parse(which, kvd_setting_format(which, value, printed, sizeof printed),
                               &again) == 0);
        MUST(fabs(again - value) <= 1e-5 * fabs(value));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
        char text[320], *equals;
        int which;

        if (size >= sizeof text)
                return 0;
        memcpy(text, data, size);
        text[size] = 0;
        equals = strchr(text, '=');
        if (!equals)
                return 0;
        *equals = 0;
        which = kvd_setting_by_name(text);
        MUST(which >= -1 && which < KVD_N_SETTINGS);
        if (which >= 0)
                try_value((enum kvd_setting)which, equals + 1);
        for (int i = 0; i < KVD_N_SETTINGS; i++)
                try_value((enum kvd_setting)i, equals + 1);
        return 0;
}
