/* SPDX-License-Identifier: Apache-2.0 */

/* The scheme in front of the servers selects the dialect, as in a URL. */

#include "daemon/process/remote/dialect.h"

#include <errno.h>
#include <string.h>

#include "ipc/base/util.h"

static const struct dialect *const dialects[] = {&dialect_redis, &dialect_mooncake};

const struct dialect *dialect_of(const char *servers) {
        for (uint32_t i = 0; i < ARRAY_SIZE(dialects); i++)
                for (const char *const *scheme = dialects[i]->schemes; *scheme; scheme++)
                        if (strncmp(servers, *scheme, strlen(*scheme)) == 0)
                                return dialects[i];
        return NULL;
}

int dialect_check(const struct dialect_config *config, struct kvd_why *why) {
        const struct dialect *dialect = dialect_of(config->servers);

        if (!dialect)
                return kvd_refuse(
                        why, -EINVAL,
                        "remote '%.*s' must begin with redis://, rediss:// or mooncake://",
                        (int)strcspn(config->servers, "@"), config->servers);
        return dialect->check(config, why);
}
