/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_POOLED_OPTIONS_H
#define KVLM_POOLED_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

enum pooled_use { POOLED_AUTO, POOLED_OFF, POOLED_ON };

struct pooled_options {
        enum pooled_use use;
        bool own_prompt; /* the prompt is the sequence's, too, and not published */
        bool align;
        uint32_t wait_ms; /* at the end of each step, for what the daemon proposes */
        float random;    /* share of blocks that a random older one replaces: what MemShare is compared with */
        uint64_t seed;   /* of random */
};

#define POOLED_DEFAULTS {.align = true, .seed = 1}

#define POOLED_OPTIONS(value) \
        {"sequence", required_argument, NULL, value}, \
        {"own-prompt", required_argument, NULL, value}, \
        {"align-steps", required_argument, NULL, value}, \
        {"sync-wait", required_argument, NULL, value}, \
        {"share-random", required_argument, NULL, value}

#define POOLED_HELP \
        "Sequences of the pool (the daemon's MemShare and KVReviver work on them):\n" \
        "  --sequence WHEN      auto: if the space has one of them on (default); on; or off\n" \
        "  --own-prompt YES     yes: the prompt is part of the sequence, and not shared as a prefix (default no)\n" \
        "  --align-steps YES    long steps of reasoning begin in a fresh block (default yes)\n" \
        "  --sync-wait MS       wait so long at the end of each step for what the daemon proposes (default 0)\n" \
        "  --share-random F     replace this share of a step's blocks by random older ones, without the daemon\n"

/* On the command line, whatever the space says. */
static inline bool pooled_asked_for(const struct pooled_options *o) {
        return o->use == POOLED_ON || o->random > 0;
}

int pooled_option(struct pooled_options *, const char *name, const char *value); /* -EINVAL */

#endif
