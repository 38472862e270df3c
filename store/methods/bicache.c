/* SPDX-License-Identifier: Apache-2.0 */

/*
 * BiCache's profile of a space is the similarity between a prefix's keys and values computed alone
 * and as part of a longer input, by layer and prefix ratio. A table of depths is built from it
 * (kernels/btable.h) and published in the index header.
 *
 * A worker measures the samples in order of arrival. Both definitions of similarity are kept. The
 * paper's estimator (the mean of the requests' depths) needs each request's own depth, which
 * depends on the threshold: after a change of the threshold it needs new samples.
 */

#include <errno.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "kernels/btable.h"
#include "store/hooks.h"
#include "store/methods/methods.h"

#define RATIOS KVD_BTABLE_STEPS
#define FAILURES 64u /* number of last tickets whose failure is remembered */

enum { SIM_FLAT, SIM_TOKEN_MEAN };          /* bicache.sim */
enum { B_MEAN_FLOOR, B_TAKEWHILE_OF_MEAN }; /* bicache.b_mode */
static_assert(RATIOS == ARRAY_SIZE(((struct kvd_index *)0)->depth), "a depth for each percent");

struct sample {
        struct sample *next;
        struct attachment *attachment; /* NULL: the client is gone */
        uint64_t ticket;
        uint32_t r, n_tokens, n_blocks;
        kvd_ref blocks[];
};

struct profile {
        struct ticket ticket;
        struct sample *first, **end; /* owned; waiting or in flight */
        uint64_t n_asked, n_done;    /* number of tickets given out, and done, in this order */
        uint64_t failed;             /* bit i: ticket n_done - i failed */
        struct kvd_bprofile sim[2];  /* of the same requests, by SIM_... */
        float *one;                  /* similarities of one request, behind sums */
        double sums[];               /* sums of sim[0], then of sim[1] */
};

static struct profile *profile_of(const struct space *space) {
        return space->parts.profile;
}

static int refuse(struct space *space, int error, const char *what) {
        return store_refuse(space_store(space), error, "profile of space '%s': %s",
                            space_name(space), what);
}

static float threshold(const struct space *space) {
        return (float)setting(space, KVD_bicache_tau);
}

static const struct kvd_bprofile *chosen(const struct space *space) {
        return &profile_of(space)->sim[(int)setting(space, KVD_bicache_sim)];
}

/* ---- samples --------------------------------------------------------------------------------- */

static void begin(struct space *space) {
        struct profile *p = profile_of(space);
        size_t n = (size_t)RATIOS * space_geometry(space)->layers;

        memset(p->sums, 0, 2 * n * sizeof p->sums[0]);
        for (uint32_t i = 0; i < ARRAY_SIZE(p->sim); i++)
                p->sim[i] = (struct kvd_bprofile){.n_layers = space_geometry(space)->layers,
                                                  .tau = threshold(space),
                                                  .sum = p->sums + i * n};
}

/* Adds results[layer][token_mean, flat]. Returns false if a result is not finite. */
static bool add(struct space *space, uint32_t r, const float (*results)[2]) {
        static const int place[] = {[SIM_FLAT] = 1, [SIM_TOKEN_MEAN] = 0};
        struct profile *p = profile_of(space);
        bool good = true;

        for (uint32_t sim = 0; sim < ARRAY_SIZE(p->sim); sim++) {
                for (uint32_t l = 0; l < p->sim[sim].n_layers; l++)
                        p->one[l] = results[l][place[sim]];
                good &= kvd_bprofile_add(&p->sim[sim], r, p->one) == 0;
        }
        return good;
}

static void pop(struct space *space, bool failed) {
        struct profile *p = profile_of(space);
        struct sample *s = p->first;

        p->first = s->next;
        if (!p->first)
                p->end = &p->first;
        p->failed = p->failed << 1 | failed;
        p->n_done = s->ticket;
        free(s);
        sync_news(space);
}

static bool still_there(const struct sample *s) {
        return s->attachment && blocks_filled_by(s->attachment, s->blocks, s->n_blocks);
}

static bool write_profile(struct ticket *t, struct job *job) {
        struct space *space = t->space;
        struct profile *p = profile_of(space);

        while (p->first && !still_there(p->first))
                pop(space, true);
        if (!p->first)
                return false;
        for (uint32_t i = 0; i < p->first->n_blocks; i++)
                job_add(job, p->first->blocks[i], i);
        job_param(job, 0, p->first->n_tokens);
        job_results(job, space_geometry(space)->layers);
        return true;
}

static void settle_profile(struct job *job, enum job_end end, const void *results, uint32_t n) {
        struct profile *p = profile_of(job->space);

        if (!job->ticket || end == JOB_AGAIN)
                return;
        pop(job->space, end != JOB_DONE || !add(job->space, p->first->r, results));
        if (p->first)
                job_ask(&p->ticket);
}

static const struct job_kind job_profile = {.number = KVD_JOB_PROFILE,
                                            .rests = true,
                                            .result_bytes = 2 * sizeof(float),
                                            .write = write_profile,
                                            .settle = settle_profile};

/* ---- life ------------------------------------------------------------------------------------ */

static struct profile *profile_new(struct space *space) {
        size_t layers = space_geometry(space)->layers, n = 2 * RATIOS * layers;
        struct profile *p = space->parts.profile =
                sys->calloc(1, sizeof *p + n * sizeof p->sums[0] + layers * sizeof *p->one);

        if (!p)
                return NULL;
        p->end = &p->first;
        p->one = (float *)(p->sums + n);
        ticket_init(&p->ticket, &job_profile, space, NULL);
        begin(space);
        return p;
}

static void profile_free(struct space *space) {
        struct profile *p = profile_of(space);

        if (!p)
                return;
        job_withdraw(&p->ticket);
        while (p->first) {
                struct sample *s = p->first;

                p->first = s->next;
                free(s);
        }
        free(p);
        space->parts.profile = NULL;
}

/* The attachment's samples are removed when their turn comes. */
static bool profile_leave(struct attachment *a) {
        struct profile *p = profile_of(a->space);

        for (struct sample *s = p ? p->first : NULL; s; s = s->next)
                if (s->attachment == a)
                        s->attachment = NULL;
        return false;
}

/* ---- taking samples -------------------------------------------------------------------------- */

#define SAMPLES_WAITING 64u

static int check_sample(struct attachment *a, uint32_t r, uint32_t n_tokens, const kvd_ref *blocks,
                        uint32_t n) {
        const struct kvd_shape *g = space_geometry(a->space);
        uint32_t side = n / g->layer_groups / 2;

        if (r >= RATIOS)
                return refuse(a->space, -EINVAL, "a ratio is 0 to 100 percent");
        if (!n || n > KVD_JOB_ITEMS || n != side * 2 * g->layer_groups || !n_tokens ||
            n_tokens > (uint64_t)side * g->block_tokens)
                return refuse(a->space, -EINVAL,
                              "a sample is, for each layer group, the blocks of the prefix alone "
                              "and as many of the whole input");
        if (!blocks_filled_by(a, blocks, n))
                return refuse(a->space, -ESTALE,
                              "a block is not (or no longer) one that this client is filling");
        return 0;
}

int space_sample(struct attachment *a, uint32_t r, uint32_t n_tokens, const kvd_ref *blocks,
                 uint32_t n_blocks, uint64_t *ticket) {
        struct sample *s;
        struct profile *p;
        int error = space_refuse_opaque(a->space, "samples");

        if (error == 0)
                error = check_sample(a, r, n_tokens, blocks, n_blocks);
        if (error == 0)
                error = space_summary_fd(a->space,
                                         true); /* workers need it, also if bicache is off */
        if (error < 0)
                return error;
        p = profile_of(a->space) ?: profile_new(a->space);
        if (p && p->n_asked - p->n_done >= SAMPLES_WAITING)
                return refuse(a->space, -EBUSY,
                              "too many samples wait to be measured; ask whether one is done");
        s = p ? sys->calloc(1, sizeof *s + n_blocks * sizeof s->blocks[0]) : NULL;
        if (!s)
                return refuse(a->space, -ENOMEM, "out of memory for a sample");
        *s = (struct sample){.attachment = a,
                             .ticket = ++p->n_asked,
                             .r = r,
                             .n_tokens = n_tokens,
                             .n_blocks = n_blocks};
        memcpy(s->blocks, blocks, n_blocks * sizeof *blocks);
        *p->end = s;
        p->end = &s->next;
        *ticket = s->ticket;
        job_ask(&p->ticket);
        return 0;
}

int space_sample_done(struct attachment *a, uint64_t ticket) {
        const struct profile *p = profile_of(a->space);

        if (!p || ticket == 0 || ticket > p->n_asked)
                return refuse(a->space, -ENOENT, "there is no sample of that ticket");
        if (ticket > p->n_done)
                return 0;
        if (p->n_done - ticket < FAILURES && p->failed >> (p->n_done - ticket) & 1)
                return refuse(a->space, -EIO,
                              "the sample could not be measured: its values are not finite or have "
                              "8 bits, or its blocks are gone");
        return 1;
}

/* ---- the table ------------------------------------------------------------------------------- */

static bool has_samples(const struct space *space) {
        for (uint32_t r = 0; profile_of(space) && r < RATIOS; r++)
                if (chosen(space)->requests[r])
                        return true;
        return false;
}

static void set_table(struct space *space, const uint8_t depth[RATIOS], uint32_t def) {
        struct kvd_index *ix = space->ix;

        atomic_store(&ix->depth_def, 0);
        for (uint32_t r = 0; r < RATIOS; r++)
                atomic_store(&ix->depth[r], depth[r]);
        atomic_store(&ix->depth_def, def);
}

/*
 * Depths never decrease, and a ratio without samples has the depth of the one before. They are at
 * least 1, since nothing before the first layer attends.
 */
int space_profile_build(struct space *space) {
        bool means = (int)setting(space, KVD_bicache_b_mode) == B_TAKEWHILE_OF_MEAN;
        uint32_t def = 1 + (uint32_t)setting(space, KVD_bicache_r_def);
        struct kvd_bprofile profile;
        struct kvd_btable table;
        uint8_t depth[RATIOS];

        if (!has_samples(space))
                return refuse(space, -ENODATA, "there are no samples");
        profile = *chosen(space);
        if (!means && profile.tau != threshold(space))
                return refuse(space, -ENODATA,
                              "bicache.tau changed since the samples were taken, and mean_b_floor "
                              "needs it as it was; forget the samples and take new ones");
        profile.tau = threshold(space);
        profile.ratio = (enum kvd_ratio)def;
        kvd_btable_build(&profile, means ? KVD_ESTIMATE_MEAN_FIRST : KVD_ESTIMATE_MEAN_B, &table);
        for (uint32_t r = 0; r < RATIOS; r++)
                depth[r] = (uint8_t)MIN(kvd_btable_lookup(&table, table.ratio, r), UINT8_MAX);
        set_table(space, depth, def);
        return 0;
}

int space_profile_import(struct space *space, const uint8_t depth[101], uint32_t def) {
        uint32_t own = 1 + (uint32_t)setting(space, KVD_bicache_r_def);
        int error = space_refuse_opaque(space, "table of depths");

        if (error < 0)
                return error;
        if (def != own)
                return refuse(
                        space, -EINVAL,
                        "the table was made with the other bicache.r_def; make it again, or change the setting");
        for (uint32_t r = 0; r < RATIOS; r++)
                if (depth[r] == 0 || depth[r] > space_geometry(space)->layers ||
                    (r && depth[r] < depth[r - 1]))
                        return refuse(space, -EINVAL,
                                      "depths are 1 to the number of layers, and never decrease");
        set_table(space, depth, def);
        return 0;
}

void space_profile_forget(struct space *space) {
        static const uint8_t none[RATIOS];

        set_table(space, none, 0);
        if (profile_of(space))
                begin(space);
}

/* ---- reporting ------------------------------------------------------------------------------- */

static void tell_similarity(const struct kvd_bprofile *profile, struct profile_report *ret) {
        uint32_t layers = profile->n_layers;

        for (uint32_t r = 0; r < RATIOS; r++) {
                ret->samples[r] = profile->requests[r];
                if (!ret->samples[r] || ret->n_similarity + layers > ARRAY_SIZE(ret->similarity))
                        /* for models with many layers, only the first ratios fit in the reply */
                        continue;
                for (uint32_t l = 0; l < layers; l++)
                        ret->similarity[ret->n_similarity++] =
                                (float)(profile->sum[(size_t)r * layers + l] /
                                        profile->requests[r]);
        }
}

void space_profile(struct space *space, struct profile_report *ret) {
        const struct kvd_index *ix = space_index(space);

        ret->layers = ix->geometry.layers;
        ret->def = atomic_load(&ix->depth_def);
        for (uint32_t r = 0; r < RATIOS; r++)
                ret->depth[r] = (uint8_t)atomic_load(&ix->depth[r]);
        ret->n_similarity = 0;
        memset(ret->samples, 0, sizeof ret->samples);
        if (profile_of(space))
                tell_similarity(chosen(space), ret);
}

const struct hooks bicache_hooks = {.attachment_stops = profile_leave,
                                    .space_leaves = profile_free,
                                    .space_ends = profile_free};
