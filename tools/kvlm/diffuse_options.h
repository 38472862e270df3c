/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_DIFFUSE_OPTIONS_H
#define KVLM_DIFFUSE_OPTIONS_H

/* Options of masked diffusion: what bidirectional models take beside the others. */

#include <stdint.h>

enum bicache_mode {
        BICACHE_SPACE, /* on or off, as the space's settings say */
        BICACHE_OFF,   /* all layers of the prefix are computed in every step */
        BICACHE_NAIVE, /* all are reused for ever, as a causal cache would: what BiCache is compared with */
        BICACHE_ON,    /* shallow layers are, deep ones are computed anew now and then */
};

struct diffuse_options {
        uint32_t prefix; /* with token ids: so many at the beginning are shared */
        uint32_t length; /* tokens to generate */
        uint32_t steps;  /* 0: one a token */
        enum bicache_mode bicache;
        const char *table;   /* file of ratios and depths; NULL: the space's table */
        uint32_t depth;      /* instead of a table: so many shallow layers; 0: see table */
        uint32_t refresh;    /* steps from one refresh of the deep layers to the next; 0: as the space says */
        const char *profile; /* file to append similarities to; NULL: do not profile */
        uint32_t profile_step; /* and cut each request at every so many percent; 0: at its own prefix only */
};

#define DIFFUSE_DEFAULTS {.length = 64}

/* For getopt: all take an argument and have one value in common. */
#define DIFFUSE_OPTIONS(value) \
        {"prefix-tokens", required_argument, NULL, value}, \
        {"gen-length", required_argument, NULL, value}, \
        {"steps", required_argument, NULL, value}, \
        {"bicache", required_argument, NULL, value}, \
        {"bicache-table", required_argument, NULL, value}, \
        {"bicache-depth", required_argument, NULL, value}, \
        {"refresh", required_argument, NULL, value}, \
        {"profile-out", required_argument, NULL, value}, \
        {"profile-step", required_argument, NULL, value}

#define DIFFUSE_HELP \
        "Masked diffusion (a model whose config.json says \"attention\": \"bidirectional\"):\n" \
        "  --gen-length N       length of the answer (default 64; a line of --prompts may have its \"gen_length\")\n" \
        "  --steps N            denoising steps (default: one a token; or a line's \"steps\")\n" \
        "  --bicache MODE       the document's keys and values: off computes them in every step; on shares those of\n" \
        "                       shallow layers and refreshes those of deep ones; naive shares all; space is on or\n" \
        "                       off, as \"kvctl space set\" says (default space)\n" \
        "  --bicache-table FILE how many layers are shallow, by the document's share of a request (default: the\n" \
        "                       space's table)\n" \
        "  --bicache-depth N    treat the first N layers as shallow, ignoring the table\n" \
        "  --prefix-tokens N    with --tokens: so many are the document\n" \
        "  --refresh N          steps between refreshes (default: as the space says, or 16)\n" \
        "  --profile-out FILE   generate nothing, but append to FILE how alike the document's keys and values are\n" \
        "                       with and without the rest of the request, layer by layer, a JSON line a request\n" \
        "  --profile-step P     the same for the first P, 2 P, 3 P ... percent of each request\n"

int diffuse_option(struct diffuse_options *, const char *name, const char *value); /* -EINVAL */

#endif
