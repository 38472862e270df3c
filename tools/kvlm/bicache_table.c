/* SPDX-License-Identifier: Apache-2.0 */

/* Makes the kernels' table of steps from a table file, which gives the depth at each percentage. */

#include "tools/kvlm/bicache_table.h"

#include <errno.h>

#include "tools/kvctl/profile.h"
#include "tools/kvlm/refuse.h"

int bicache_table_read(const char *path, uint32_t layers, struct kvd_btable *ret) {
        uint8_t depth[PROFILE_RATIOS], last = 1;
        uint32_t def;
        int r = profile_read(path, depth, &def, &kvlm_why);

        if (r < 0)
                return r;
        if (depth[PROFILE_RATIOS - 1] > layers)
                return refuse(-EINVAL, "table %s reuses %u layers; the model has %u", path,
                              depth[PROFILE_RATIOS - 1], layers);
        *ret = (struct kvd_btable){.ratio = (enum kvd_ratio)def};
        for (unsigned percent = 0; percent < PROFILE_RATIOS; percent++) {
                if (depth[percent] != last)
                        ret->steps[ret->n++] = (struct kvd_bstep){(uint8_t)percent, depth[percent]};
                last = depth[percent];
        }
        return 0;
}

uint32_t bicache_table_deepest(const struct kvd_btable *t) {
        return t->n > 0 ? t->steps[t->n - 1].b : 1;
}
