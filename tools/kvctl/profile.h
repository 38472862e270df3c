/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_PROFILE_H
#define KVCTL_PROFILE_H

/*
 * BiCache's profile of a space: samples, mean similarities, and the table made from them.
 */

#include <stdint.h>
#include <stdio.h>

#define PROFILE_RATIOS 101u /* 0 to 100 percent */

struct profile {
        char space[64];
        double tau;             /* the space's bicache.tau */
        uint32_t layers;
        uint32_t def;           /* kind of table: 0 none, 1 include_gen, 2 prompt_only */
        uint8_t depth[PROFILE_RATIOS];
        uint32_t samples[PROFILE_RATIOS];
        float *similarity;      /* owned: [PROFILE_RATIOS][layers], of ratios that have samples */
};

/* Pictures: lines for a terminal (owned by the caller; NULL: out of memory); an SVG document. */
char *profile_picture(const struct profile *profile);
void profile_svg(const struct profile *profile, FILE *to);

/* The table as a file: JSON that kvlm reads, too. profile_read: -EINVAL if text is not a table. */
void profile_write(const struct profile *profile, FILE *to);
int profile_read(const char *text, uint8_t depth[PROFILE_RATIOS], uint32_t *def);

#endif
