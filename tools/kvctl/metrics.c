/* SPDX-License-Identifier: Apache-2.0 */

/*
 * metrics: every figure that kvctl has, for a time-series database. Each column of another verb's
 * table is a family here, labelled by domain, space or tier, but by nothing that differs between
 * processes.
 */

#include "tools/kvctl/metrics.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "tools/kvctl/http.h"
#include "tools/kvctl/openmetrics.h"
#include "tools/kvctl/snapshot.h"

struct row { /* of metrics.def */
        struct family family;
        double factor;
};

#define ROW(type, name, unit, factor, member, help) {{name, #type, unit, help}, factor},
#define DAEMON ROW
#define WORK ROW
static const struct row daemon_rows[N_SNAPSHOT] = {
#include "tools/kvctl/metrics.def"
};
#undef DAEMON
#undef WORK
#define DAEMON(...) +1
static const size_t n_told_to_all = 0
#include "tools/kvctl/metrics.def"
        ;
#undef DAEMON
#define SPACE ROW
static const struct row space_rows[] = {
#include "tools/kvctl/metrics.def"
};
#undef SPACE
#define TIER ROW
static const struct row tier_rows[] = {
#include "tools/kvctl/metrics.def"
};
#undef TIER

static void put(struct openmetrics *om, const struct row *row, const struct label *labels, size_t n,
                uint64_t value) {
        if (row->factor == 1)
                openmetrics_number(om, labels, n, value);
        else
                openmetrics_real(om, labels, n, (double)value * row->factor);
}

/* A family of one sample. */
static void put_one(struct openmetrics *om, const struct row *row, uint64_t value) {
        openmetrics_family(om, &row->family);
        put(om, row, NULL, 0, value);
}

/* ---- names out of tables --------------------------------------------------------------------- */

#define NAME_MAX_BYTES 96u

static bool has_word(const char *name, const char *word) {
        const char *at = strcasestr(name, word);

        return at && (at == name || at[-1] == '_') &&
               (!at[strlen(word)] || at[strlen(word)] == '_');
}

/* PREFIX_name_unit, in lower case; the unit is added only if the name does not contain it. */
static void make_name(char to[NAME_MAX_BYTES], const char *prefix, const char *name,
                      const char *unit) {
        bool more = *unit && !has_word(name, unit);

        snprintf(to, NAME_MAX_BYTES, "%s_%s%s%s", prefix, name, more ? "_" : "", more ? unit : "");
        for (char *c = to; *c; c++)
                *c = (char)tolower((unsigned char)*c);
}

static bool ends_in(const char *name, const char *unit) {
        size_t n = strlen(name), k = strlen(unit);

        return k && n > k && name[n - k - 1] == '_' && strcmp(name + n - k, unit) == 0;
}

/* ---- daemon ---------------------------------------------------------------------------------- */

static void put_daemon(struct openmetrics *om, const struct snapshot *s) {
        static const struct family build = {"kvd_build", "info", "",
                                            "Version, backend and loop of the daemon."};
        static const struct row held = {{"kvd_pool_held_bytes", "gauge", "bytes",
                                         "Blocks that clients keep from eviction."},
                                        1},
                                evictable = {{"kvd_pool_evictable_bytes", "gauge", "bytes",
                                              "Cached blocks that are not in use."},
                                             1};
        const struct label labels[] = {{"version", s->version},
                                       {"backend", s->backend},
                                       {"loop", s->loop}};

        openmetrics_family(om, &build);
        openmetrics_number(om, labels, ARRAY_SIZE(labels), 1);
        for (size_t i = 0; i < (s->told ? N_SNAPSHOT : n_told_to_all); i++)
                put_one(om, &daemon_rows[i], s->value[i]);
        put_one(om, &held, s->bytes.held + s->bytes.filling);
        put_one(om, &evictable, s->bytes.evictable);
}

/* ---- spaces ---------------------------------------------------------------------------------- */

#define SPACE_LABELS(s) \
        {"domain", (s)->name.domain}, { \
                "space", (s)->name.name \
        }

static void put_states(struct openmetrics *om, const struct snapshot *all) {
        static const struct family family = {"kvd_space_blocks", "gauge", "blocks",
                                             "Blocks that have memory, by what they are doing."};

        openmetrics_family(om, &family);
        for (size_t i = 0; i < all->n_spaces; i++) {
                const struct snapshot_space *s = &all->spaces[i];
                const struct {
                        const char *name;
                        uint64_t n;
                } states[] = {{"free", s->free},
                              {"filling", s->filling},
                              {"held", s->sums.held},
                              {"evictable", s->sums.evictable},
                              {"limbo", s->limbo}};

                for (size_t k = 0; k < ARRAY_SIZE(states); k++) {
                        const struct label labels[] = {SPACE_LABELS(s), {"state", states[k].name}};

                        openmetrics_number(om, labels, 3, states[k].n);
                }
        }
}

static void put_kinds(struct openmetrics *om, const struct snapshot *all) {
        static const struct family family = {"kvd_space_blocks_by_kind", "gauge", "",
                                             "Blocks by kind; a block can be of several kinds."};
        static const struct {
                const char *name;
                enum snapshot_space_value value;
        } kinds[] = {
#define BLOCKS(kind, member) {kind, SNAPSHOT_SPACE_##member},
#include "tools/kvctl/metrics.def"
#undef BLOCKS
        };

        openmetrics_family(om, &family);
        for (size_t i = 0; i < all->n_spaces; i++)
                for (size_t k = 0; k < ARRAY_SIZE(kinds); k++) {
                        const struct snapshot_space *s = &all->spaces[i];
                        const struct label labels[] = {SPACE_LABELS(s), {"kind", kinds[k].name}};

                        openmetrics_number(om, labels, 3, s->value[kinds[k].value]);
                }
}

static void put_space_rows(struct openmetrics *om, const struct snapshot *all) {
        for (size_t i = 0; i < ARRAY_SIZE(space_rows); i++) {
                openmetrics_family(om, &space_rows[i].family);
                for (size_t k = 0; k < all->n_spaces; k++) {
                        const struct label labels[] = {SPACE_LABELS(&all->spaces[k])};

                        put(om, &space_rows[i], labels, 2, all->spaces[k].value[i]);
                }
        }
}

/* One counter for all spaces: number which of the daemon's counters, or of the clients'. */
static void put_counter(struct openmetrics *om, const struct snapshot *all,
                        const struct counter *counter, size_t which, bool of_clients) {
        bool is_now = !of_clients && which == KVD_SPACE_TAU_BLOCK;
        char name[NAME_MAX_BYTES];
        struct family family = {name, is_now ? "gauge" : "counter", "", counter->meaning};

        make_name(name, "kvd_space", counter->name,
                  strcmp(counter->unit, "calls") == 0 ? "" : counter->unit);
        family.unit = ends_in(name, counter->unit) ? counter->unit : "";
        openmetrics_family(om, &family);
        for (size_t i = 0; i < all->n_spaces; i++) {
                const struct snapshot_space *s = &all->spaces[i];
                const struct label labels[] = {SPACE_LABELS(s)};

                openmetrics_number(om, labels, 2, of_clients ? s->by[which] : s->of[which]);
        }
}

static void put_latency(struct openmetrics *om, const struct snapshot *all, enum kvd_latency which,
                        const struct family *family) {
        openmetrics_family(om, family);
        for (size_t i = 0; i < all->n_spaces; i++) {
                const struct snapshot_space *s = &all->spaces[i];
                const struct label labels[] = {SPACE_LABELS(s)};
                const uint64_t *words = s->by + kvd_latency_sum(which);
                const struct histogram h = {words + 1, KVD_LATENCY_BUCKETS,
                                            (1u << KVD_LATENCY_FIRST) * 1e-9,
                                            (double)words[0] * 1e-9};

                openmetrics_histogram(om, labels, 2, &h);
        }
}

static void put_latencies(struct openmetrics *om, const struct snapshot *all) {
        static const struct family families[KVD_N_LATENCIES] = {
                [KVD_LATENCY_LOOKUP] = {"kvd_space_lookup_seconds", "histogram", "seconds",
                                        "How long searches took; one in 64 is timed."},
                [KVD_LATENCY_SEAL] = {"kvd_space_seal_seconds", "histogram", "seconds",
                                      "How long clients waited for the answer to a seal."},
                [KVD_LATENCY_ALLOCATE] = {"kvd_space_allocate_seconds", "histogram", "seconds",
                                          "How long clients waited when they asked for blocks."},
                [KVD_LATENCY_FETCH] = {"kvd_space_fetch_seconds", "histogram", "seconds",
                                       "How long fetches took, from the request to their end."},
        };

        for (unsigned i = 0; i < KVD_N_LATENCIES; i++)
                put_latency(om, all, (enum kvd_latency)i, &families[i]);
}

static void put_spaces(struct openmetrics *om, const struct snapshot *all) {
        put_states(om, all);
        put_kinds(om, all);
        put_space_rows(om, all);
        for (size_t i = 0; i < KVD_N_SPACE_COUNTERS; i++)
                put_counter(om, all, &space_counters[i], i, false);
        for (size_t i = 0; i < KVD_N_CLIENT_COUNTERS; i++)
                put_counter(om, all, &client_counters[i], i, true);
        put_latencies(om, all);
}

/* ---- domains --------------------------------------------------------------------------------- */

static void put_of_domains(struct openmetrics *om, const struct snapshot *all,
                           const struct family *family, size_t offset) {
        openmetrics_family(om, family);
        for (size_t i = 0; i < all->n_domains; i++) {
                const struct label label = {"domain", all->domains[i].name};
                uint64_t value;

                memcpy(&value, (const uint8_t *)&all->domains[i] + offset, sizeof value);
                openmetrics_number(om, &label, 1, value);
        }
}

static void put_cost(struct openmetrics *om, const struct snapshot *all, const char *name,
                     const char *unit, const char *meaning, size_t which) {
        static const struct {
                const char *name;
                size_t offset;
        } sides[] = {{"used", offsetof(struct snapshot_domain, used)},
                     {"guaranteed", offsetof(struct snapshot_domain, guaranteed)},
                     {"limit", offsetof(struct snapshot_domain, most)}};

        for (size_t i = 0; i < ARRAY_SIZE(sides); i++) {
                char prefix[64], full[NAME_MAX_BYTES], help[256];
                struct family family = {full, "gauge", "", help};

                snprintf(prefix, sizeof prefix, "kvd_domain_%s", name);
                snprintf(help, sizeof help, "%s: %s.", sides[i].name, meaning);
                make_name(full, prefix, sides[i].name, strcmp(unit, "bytes") == 0 ? unit : "");
                family.unit = ends_in(full, "bytes") ? "bytes" : "";
                put_of_domains(om, all, &family, sides[i].offset + which * sizeof(uint64_t));
        }
}

static void put_domains(struct openmetrics *om, const struct snapshot *all) {
        static const struct family clients = {"kvd_domain_clients", "gauge", "",
                                              "Clients that are connected."};
        static const struct family disconnected =
                {"kvd_domain_clients_disconnected", "gauge", "",
                 "Clients whose process may still write to their blocks."};
        static const struct family filling = {"kvd_domain_filling_bytes", "gauge", "bytes",
                                              "Blocks that clients are writing."};
        static const struct family pinned = {"kvd_domain_pinned_blocks", "gauge", "blocks",
                                             "Blocks that clients pin directly."};

#define KVD_COST(name, unit, text) put_cost(om, all, #name, unit, text, KVD_COST_##name);
#include "ipc/base/costs.def"
#undef KVD_COST
        put_of_domains(om, all, &clients, offsetof(struct snapshot_domain, clients));
        put_of_domains(om, all, &disconnected, offsetof(struct snapshot_domain, disconnected));
        put_of_domains(om, all, &filling, offsetof(struct snapshot_domain, filling_bytes));
        put_of_domains(om, all, &pinned, offsetof(struct snapshot_domain, pinned));
}

/* ---- tiers ----------------------------------------------------------------------------------- */

static void put_tiers(struct openmetrics *om, const struct snapshot *all) {
        static const struct family up = {"kvd_tier_up", "gauge", "",
                                         "1: all of it is in use; 0: see kvctl tiers."};

        openmetrics_family(om, &up);
        for (size_t i = 0; i < all->n_tiers; i++) {
                const struct label label = {"tier", all->tiers[i].name};

                openmetrics_number(om, &label, 1, strcmp(all->tiers[i].state, "on") == 0);
        }
        for (size_t i = 0; i < ARRAY_SIZE(tier_rows); i++) {
                openmetrics_family(om, &tier_rows[i].family);
                for (size_t k = 0; k < all->n_tiers; k++) {
                        const struct label label = {"tier", all->tiers[k].name};

                        put(om, &tier_rows[i], &label, 1, all->tiers[k].value[i]);
                }
        }
}

/* ---- degraded states ------------------------------------------------------------------------- */

enum whose { DAEMON, SPACE, DOMAIN };

static const struct {
        enum whose whose;
        const char *name;
} states[KVD_N_DEGRADED] = {
#define KVD_DEGRADED(whose, name, unit, text, remedy) [KVD_DEGRADED_##name] = {whose, #name},
#include "ipc/base/degraded.def"
#undef KVD_DEGRADED
};

static void put_degraded_space(struct openmetrics *om, const struct snapshot *all, size_t state) {
        for (size_t i = 0; i < all->n_spaces; i++) {
                const struct snapshot_space *s = &all->spaces[i];
                const struct label labels[] = {{"state", states[state].name}, SPACE_LABELS(s)};

                openmetrics_number(om, labels, 3, s->degraded[state]);
        }
}

static void put_degraded_domain(struct openmetrics *om, const struct snapshot *all, size_t state) {
        static const char *const costs[KVD_N_COSTS] = {
#define KVD_COST(name, unit, text) [KVD_COST_##name] = #name,
#include "ipc/base/costs.def"
#undef KVD_COST
        };

        for (size_t i = 0; i < all->n_domains; i++)
                for (size_t k = 0; k < KVD_N_COSTS; k++) {
                        const struct label labels[] = {{"state", states[state].name},
                                                       {"domain", all->domains[i].name},
                                                       {"cost", costs[k]}};

                        openmetrics_number(om, labels, 3, all->domains[i].near_limit[k]);
                }
}

static void put_degraded(struct openmetrics *om, const struct snapshot *all) {
        static const struct family family =
                {"kvd_degraded", "gauge", "",
                 "Degraded states: 0, or the number that kvctl status shows."};

        openmetrics_family(om, &family);
        for (size_t i = 0; i < KVD_N_DEGRADED; i++) {
                const struct label label = {"state", states[i].name};

                if (states[i].whose == SPACE)
                        put_degraded_space(om, all, i);
                else if (states[i].whose == DOMAIN)
                        put_degraded_domain(om, all, i);
                else if (all->told)
                        openmetrics_number(om, &label, 1, all->degraded[i]);
        }
}

/* ---- all of it ------------------------------------------------------------------------------- */

static void put_scrape(struct openmetrics *om, bool up, uint64_t begun_ns) {
        static const struct family family = {"kvd_up", "gauge", "", "1: the daemon answers."};
        static const struct family asking = {"kvd_scrape_seconds", "gauge", "seconds",
                                             "How long asking the daemon took for this scrape."};

        openmetrics_family(om, &family);
        openmetrics_number(om, NULL, 0, up);
        openmetrics_family(om, &asking);
        openmetrics_real(om, NULL, 0, (double)(sys_now_ns() - begun_ns) * 1e-9);
}

int metrics_write(struct kvctl *kvctl, FILE *to, bool plain, struct table *rows) {
        struct openmetrics om = {.to = to, .plain = plain, .rows = rows};
        uint64_t begun_ns = sys_now_ns();
        struct snapshot snapshot;
        int r = snapshot_take(kvctl, &snapshot);

        put_scrape(&om, r == 0, begun_ns);
        if (r == 0) {
                put_daemon(&om, &snapshot);
                put_spaces(&om, &snapshot);
                put_domains(&om, &snapshot);
                put_tiers(&om, &snapshot);
                put_degraded(&om, &snapshot);
        }
        openmetrics_end(&om);
        snapshot_clear(&snapshot);
        return r;
}

/* ---- the verb -------------------------------------------------------------------------------- */

static int print_metrics(struct kvctl *kvctl, struct answer *answer) {
        struct table *rows = ANSWER_ROWS(answer, "metrics", openmetrics_columns);
        char *text = NULL;
        size_t size;
        FILE *to = open_memstream(&text, &size);
        int r;

        if (!rows || !to)
                return kvctl_out_of_memory(kvctl);
        r = metrics_write(kvctl, to, true, rows);
        if (fclose(to) != 0)
                r = kvctl_out_of_memory(kvctl);
        if (r == 0)
                answer_picture(answer, text);
        else
                free(text);
        return r;
}

int verb_metrics(struct kvctl *kvctl, struct answer *answer) {
        if (!args_has(&kvctl->args, FLAG_LISTEN))
                return print_metrics(kvctl, answer);
        if (args_has(&kvctl->args, FLAG_JSON))
                return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL,
                                  "--listen serves text; without it, --json prints once");
#ifdef KVCTL_LISTENS
        return http_serve(kvctl, kvctl->args.text[FLAG_LISTEN]);
#else
        return kvctl_fail(kvctl, KVCTL_NO, -ENOPKG,
                          "--listen: this kvctl was built without libmicrohttpd");
#endif
}
