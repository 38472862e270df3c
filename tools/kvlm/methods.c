/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/methods.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvlm/note.h"

static const char *const evict_names[] = {"none", "keydiff", "window", "random", "attention", "reviver", "int4", NULL};
static const char *const unit_names[] = {"head", "block", NULL};
static const char *const keys_names[] = {"unsigned", "signed", "centred", NULL};
static const char *const delete_names[] = {"exact", "estimate", "tombstone", NULL};
static const char *const hash_names[] = {"uniform", "permutation", NULL};

const char *evict_name(enum evict e) {
        return evict_names[e];
}

/* ---- values ---- */

static int read_word(const char *name, const char *text, const char *const *words) {
        for (int i = 0; words[i]; i++)
                if (strcmp(text, words[i]) == 0)
                        return i;
        return note(-EINVAL, "--%s does not know \"%s\"", name, text);
}

static int read_number(const char *name, const char *text, uint64_t most, uint64_t *ret) {
        char *end;

        errno = 0;
        *ret = strtoull(text, &end, 10);
        if (!isdigit((unsigned char)*text) || *end || errno || *ret > most)
                return note(-EINVAL, "--%s takes a number from 0 to %ju, not \"%s\"", name, (uintmax_t)most, text);
        return 0;
}

static int read_count(const char *name, const char *text, uint32_t *ret) {
        uint64_t value;
        int r = read_number(name, text, 1 << 24, &value);

        if (r == 0)
                *ret = (uint32_t)value;
        return r;
}

static int read_real(const char *name, const char *text, float least, float most, float *ret) {
        char *end;

        *ret = strtof(text, &end);
        if (end == text || *end || !(*ret >= least && *ret <= most))
                return note(-EINVAL, "--%s takes a number from %g to %g, not \"%s\"", name, (double)least,
                            (double)most, text);
        return 0;
}

/* One share, as a decimal or as a fraction; end is behind it. */
static float share_at(const char *text, char **end) {
        float a = strtof(text, end), b = 1.0f;

        if (*end != text && **end == '/')
                b = strtof(*end + 1, end);
        return *end != text && b > 0.0f && a >= 0.0f && a <= b ? a / b : NAN;
}

static int read_shares(const char *name, const char *text, char separator, float *a, float *b, float *c) {
        float *const to[] = {a, b, c};
        const char *at = text;
        char *end;

        for (int i = 0; i < 3; i++, at = end + 1) {
                *to[i] = share_at(at, &end);
                if (isnan(*to[i]) || *end != (i < 2 ? separator : '\0'))
                        return note(-EINVAL, "--%s takes three shares like 3/4%c0.75%c1, not \"%s\"", name, separator,
                                    separator, text);
        }
        return 0;
}

/* Numbers between commas; how many there were. */
static int read_list(const char *name, const char *text, uint32_t *to, uint32_t most) {
        char *end = (char *)text;
        uint32_t n = 0;

        do {
                unsigned long value;

                text = n ? end + 1 : text;
                value = strtoul(text, &end, 10);
                if (!isdigit((unsigned char)*text) || value > UINT32_MAX || n == most)
                        return note(-EINVAL, "--%s takes at most %u numbers with commas between them", name, most);
                to[n++] = (uint32_t)value;
        } while (*end == ',');
        return *end ? note(-EINVAL, "--%s takes numbers with commas between them", name) : (int)n;
}

/* ---- parameters ---- */

static int set_evict(const char *name, const char *v, struct methods *m) {
        int r = read_word(name, v, evict_names);

        m->evict = r < 0 ? EVICT_NONE : (enum evict)r;
        return MIN(r, 0);
}

static int set_unit(const char *name, const char *v, struct methods *m) {
        int r = read_word(name, v, unit_names);

        m->unit = r == UNIT_BLOCK ? UNIT_BLOCK : UNIT_HEAD;
        return MIN(r, 0);
}

static int set_budget(const char *name, const char *v, struct methods *m) {
        size_t n = strlen(v);
        char *end;

        if (n == 0 || v[n - 1] != '%')
                return read_count(name, v, &m->budget);
        m->budget_share = strtof(v, &end) / 100.0f;
        if (end == v || *end != '%' || !(m->budget_share > 0.0f && m->budget_share <= 1.0f))
                return note(-EINVAL, "--%s takes tokens, or up to 100%% of the prompt, not \"%s\"", name, v);
        return 0;
}

static int set_every(const char *name, const char *v, struct methods *m) {
        return read_count(name, v, &m->every);
}

static int set_slack(const char *name, const char *v, struct methods *m) {
        return read_count(name, v, &m->slack);
}

static int set_sink_blocks(const char *name, const char *v, struct methods *m) {
        return read_count(name, v, &m->sink_blocks);
}

static int set_recent(const char *name, const char *v, struct methods *m) {
        return read_real(name, v, 0.0f, 1.0f, &m->recent);
}

static int set_seed(const char *name, const char *v, struct methods *m) {
        return read_number(name, v, UINT64_MAX, &m->seed);
}

static int set_split(const char *name, const char *v, struct methods *m) {
        int r = read_shares(name, v, ':', &m->reviver.vague, &m->reviver.candidate, &m->reviver.recent);

        if (r == 0 && m->reviver.vague + m->reviver.candidate + m->reviver.recent > 1.0001f)
                return note(-EINVAL, "--%s: the three shares are more than the whole", name);
        return r;
}

static int set_replace_rate(const char *name, const char *v, struct methods *m) {
        return read_real(name, v, 1.0f, 1000.0f, &m->reviver.replace_rate);
}

static int set_keys(const char *name, const char *v, struct methods *m) {
        int r = read_word(name, v, keys_names);

        m->reviver.keys = r < 0 ? SKETCH_CENTRED : (enum sketch_keys)r;
        return MIN(r, 0);
}

static int set_hash(const char *name, const char *v, struct methods *m) {
        int r = read_word(name, v, hash_names);

        m->reviver.hash = r == 0 ? SKETCH_UNIFORM : SKETCH_PERMUTATION;
        return MIN(r, 0);
}

static int set_delete(const char *name, const char *v, struct methods *m) {
        int r = read_word(name, v, delete_names);

        m->reviver.delete = r < 0 ? DELETE_EXACT : (enum sketch_delete)r;
        return MIN(r, 0);
}

static int set_load(const char *name, const char *v, struct methods *m) {
        return read_real(name, v, 0.0f, INFINITY, &m->reviver.max_load);
}

static int set_spill(const char *name, const char *v, struct methods *m) {
        int r = read_word(name, v, (const char *const[]){"none", "exact", NULL});

        m->reviver.spill = r == 1;
        return MIN(r, 0);
}

static int set_revive(const char *name, const char *v, struct methods *m) {
        return read_count(name, v, &m->reviver.revive);
}

static int set_hshare(const char *name, const char *v, struct methods *m) {
        int r = read_shares(name, v, ',', &m->hshare.layer, &m->hshare.head, &m->hshare.query);

        m->hshare.on = r == 0;
        if (r == 0 && m->hshare.query <= 0.0f)
                return note(-EINVAL, "--%s: some queries must select", name);
        return r;
}

static int set_critical(const char *name, const char *v, struct methods *m) {
        uint32_t n[3];
        int r = read_list(name, v, n, 3);

        if (r < 0 || r != 3)
                return note(-EINVAL, "--%s takes three numbers: sinks,recent,middle", name);
        m->hshare.sinks = n[0];
        m->hshare.recent = n[1];
        m->hshare.middle = n[2];
        return n[1] == 0 ? note(-EINVAL, "--%s: the newest token is always critical, so recent is 1 or more", name) : 0;
}

static int set_labels(const char *name, const char *v, struct methods *m) {
        int r = read_list(name, v, m->hshare.given, LABEL_CHANNELS_MAX);

        if (r < 0)
                return r;
        m->hshare.n_given = strchr(v, ',') ? (uint32_t)r : 0;
        m->hshare.channels = strchr(v, ',') ? (uint32_t)r : m->hshare.given[0];
        for (int i = 1; i < r; i++)
                if (m->hshare.given[i] <= m->hshare.given[i - 1])
                        return note(-EINVAL, "--%s: channels must ascend", name);
        if (m->hshare.channels == 0 || m->hshare.channels > LABEL_CHANNELS_MAX)
                return note(-EINVAL, "--%s takes 1 to %d channels, or a list of them", name, LABEL_CHANNELS_MAX);
        return 0;
}

static int set_dense_layers(const char *name, const char *v, struct methods *m) {
        return read_count(name, v, &m->hshare.dense_layers);
}

static int set_algorithm(const char *name, const char *v, struct methods *m) {
        int r = read_word(name, v, (const char *const[]){"greedy", "star", NULL});

        m->hshare.star = r == 1;
        return MIN(r, 0);
}

static int set_decode_tail(const char *name, const char *v, struct methods *m) {
        return read_count(name, v, &m->decode_tail);
}

static int set_profile(const char *name, const char *v, struct methods *m) {
        int r = read_word(name, v, (const char *const[]){"serve", "paper", NULL});

        m->paper = r == 1;
        return MIN(r, 0);
}

enum for_what { ANYTHING, EVICTION, POLICY, RECENT, SKETCH, TIERS, LABELS, CRITICAL };

static const struct parameter {
        const char *name;
        enum for_what what; /* without this it would do nothing, which is an error */
        int (*set)(const char *name, const char *value, struct methods *);
} parameters[] = {
        {"profile", ANYTHING, set_profile}, /* first: the others change what it says */
        {"evict", ANYTHING, set_evict},
        {"budget", EVICTION, set_budget},
        {"evict-unit", POLICY, set_unit},
        {"evict-every", EVICTION, set_every},
        {"evict-slack", EVICTION, set_slack},
        {"evict-seed", EVICTION, set_seed},
        {"sink-blocks", EVICTION, set_sink_blocks},
        {"recent-frac", RECENT, set_recent},
        {"split", SKETCH, set_split},
        {"replace-rate", SKETCH, set_replace_rate},
        {"sketch-keys", SKETCH, set_keys},
        {"sketch-hash", SKETCH, set_hash},
        {"sketch-delete", SKETCH, set_delete},
        {"sketch-load", SKETCH, set_load},
        {"spill", TIERS, set_spill},
        {"revive", TIERS, set_revive},
        {"hshare", ANYTHING, set_hshare},
        {"critical", CRITICAL, set_critical},
        {"labels", LABELS, set_labels},
        {"dense-layers", CRITICAL, set_dense_layers},
        {"share-by", CRITICAL, set_algorithm},
        {"decode-tail", ANYTHING, set_decode_tail},
};
_Static_assert(ARRAY_SIZE(parameters) == METHOD_NAMES, "the header counts them");

const char *method_name(size_t i) {
        return parameters[i].name;
}

/* ---- profiles ---- */

static void set_defaults(struct methods *m, bool paper) {
        *m = (struct methods){.paper = paper, .every = 128};
        m->slack = UINT32_MAX; /* not said */
        m->sink_blocks = paper ? 0 : 1;
        m->recent = paper ? 0.0f : 0.1f;
        m->reviver.vague = 0.1f;
        m->reviver.candidate = m->reviver.recent = 0.45f;
        m->reviver.replace_rate = 1.1f;
        m->reviver.keys = paper ? SKETCH_UNSIGNED : SKETCH_CENTRED;
        m->reviver.hash = paper ? SKETCH_UNIFORM : SKETCH_PERMUTATION;
        m->reviver.delete = paper ? DELETE_ESTIMATE : DELETE_EXACT;
        m->reviver.max_load = paper ? INFINITY : 2.0f;
        m->reviver.spill = !paper;
        m->reviver.revive = 16;
        m->hshare.layer = m->hshare.head = m->hshare.query = 1.0f;
        m->hshare.sinks = paper ? 8 : 16;
        m->hshare.recent = paper ? 32 : 64;
        m->hshare.middle = paper ? 88 : 432;
        m->hshare.dense_layers = paper ? 0 : 2;
        m->hshare.star = !paper;
}

static bool makes_sense(enum for_what what, const struct methods *m) {
        switch (what) {
        case EVICTION:
                return m->evict != EVICT_NONE;
        case POLICY:
                return m->evict != EVICT_NONE && m->evict < EVICT_REVIVER;
        case RECENT:
                return m->evict != EVICT_NONE && m->evict != EVICT_REVIVER;
        case SKETCH:
                return m->evict == EVICT_REVIVER;
        case TIERS:
                return m->evict >= EVICT_REVIVER;
        case LABELS:
                return m->hshare.on || (m->evict >= EVICT_REVIVER && m->reviver.spill);
        case CRITICAL:
                return m->hshare.on;
        default:
                return true;
        }
}

static bool values_say(const char *const values[], const char *name) {
        for (size_t i = 0; i < METHOD_NAMES; i++)
                if (strcmp(parameters[i].name, name) == 0)
                        return values[i];
        return false;
}

static int check(const char *const values[], const struct methods *m) {
        static const char *const needs[] = {
                [EVICTION] = "--evict",
                [POLICY] = "--evict keydiff, window, random or attention",
                [RECENT] = "--evict keydiff, window, random, attention or int4 (--split has reviver's shares)",
                [SKETCH] = "--evict reviver",
                [TIERS] = "--evict reviver or int4",
                [LABELS] = "--hshare, or --spill exact",
                [CRITICAL] = "--hshare",
        };

        for (size_t i = 0; i < METHOD_NAMES; i++)
                if (values[i] && !makes_sense(parameters[i].what, m))
                        return note(-EINVAL, "--%s needs %s", parameters[i].name, needs[parameters[i].what]);
        if (m->evict != EVICT_NONE && m->budget == 0 && m->budget_share == 0.0f)
                return note(-EINVAL, "--evict %s needs --budget, in tokens or in %% of the prompt",
                            evict_name(m->evict));
        if (values_say(values, "sketch-delete") && m->reviver.delete == DELETE_EXACT && !m->reviver.spill)
                return note(-EINVAL, "--sketch-delete exact needs --spill exact: who lacks the vector cannot take it "
                            "out again");
        return 0;
}

int methods_read(const char *const values[METHOD_NAMES], struct methods *ret) {
        struct methods m;
        int r;

        set_defaults(&m, values[0] && strcmp(values[0], "paper") == 0);
        for (size_t i = 0; i < METHOD_NAMES; i++) {
                r = values[i] ? parameters[i].set(parameters[i].name, values[i], &m) : 0;
                if (r < 0)
                        return r;
        }
        r = check(values, &m);
        if (r < 0)
                return r;
        if (m.slack == UINT32_MAX) /* the sketch's slack is a block in both profiles */
                m.slack = m.paper && m.evict < EVICT_REVIVER ? 0 : 16;
        if (!m.reviver.spill && m.reviver.delete == DELETE_EXACT)
                m.reviver.delete = DELETE_TOMBSTONE;
        *ret = m;
        return r;
}

bool methods_active(const struct methods *m) {
        return m->evict != EVICT_NONE || m->hshare.on;
}
