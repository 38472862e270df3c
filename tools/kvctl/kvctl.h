/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_KVCTL_H
#define KVCTL_KVCTL_H

/* What all verbs work with: the command line, the terminal, the daemon. */

#include <string.h>

#include "client/conn/conn.h"
#include "ipc/base/layout.h"
#include "ipc/base/why.h"
#include "tools/kvctl/answer.h"
#include "tools/kvctl/args.h"
#include "tools/kvctl/screen.h"

struct top;

enum kvctl_exit { KVCTL_OK, KVCTL_NO, KVCTL_USAGE, KVCTL_NO_DAEMON };

struct tier_work { /* of a tier, since the daemon was started */
        uint64_t read_bytes, read_ns, written_bytes, write_ns;
};

#define KVCTL_TIERS 3u /* maximum number of tiers: host memory, the file, the servers */

struct kvctl {
        struct args args;
        struct screen screen;
        struct conn *conn;                   /* NULL until the first request */
        uint64_t deadline_ns;                /* of several requests together; 0: one for each */
        uint64_t pictures;                   /* shown so far, by --watch and top */
        struct top *top;                     /* owned; NULL for other verbs */
        struct tier_work tiers[KVCTL_TIERS]; /* as of the previous picture */
        bool streams;         /* the verb writes its whole answer itself, as it comes */
        enum kvctl_exit exit; /* of the last failure */
        struct kvd_why why;
};

/*
 * kvctl_fail(kvctl, exit, error, format, ...): notes why a verb failed and the program's exit
 * status, and returns error.
 */
#define kvctl_fail(kvctl, status, ...) \
        ((kvctl)->exit = (status), kvd_refuse(&(kvctl)->why, __VA_ARGS__))
int kvctl_out_of_memory(struct kvctl *kvctl);
int kvctl_flush(struct kvctl *kvctl); /* stdout; 0, or negative, noted with kvctl_fail() */

/* ---- the daemon ------------------------------------------------------------------------------ */

/*
 * Sends a request of ipc/msg.h, connecting first if needed, and waits for its reply, whose slices
 * live until the next call. 0, or a negative errno, noted with kvctl_fail().
 */
int kvctl_call(struct kvctl *kvctl, uint32_t number, const void *request, void *reply);

/* The same, and takes the descriptors that come with the reply, which the caller must close. */
int kvctl_call_fds(struct kvctl *kvctl, uint32_t number, const void *request, void *reply,
                   struct kvd_fds *fds);

/* The same, for lists. 1: there was one more; 0: no more. */
int kvctl_next(struct kvctl *kvctl, uint32_t number, const void *request, void *reply);

void kvctl_hang_up(struct kvctl *kvctl);

/* ---- spaces and clients ---------------------------------------------------------------------- */

struct space_name {
        char name[64], domain[64];
};

static inline bool space_name_equal(const struct space_name *a, const struct space_name *b) {
        return strcmp(a->name, b->name) == 0 && strcmp(a->domain, b->domain) == 0;
}

struct space_list {
        struct space_name *spaces;
        size_t n;
};

static inline void space_list_clear(struct space_list *list) {
        free(list->spaces);
}

/* The value of --domain; empty: the user's own domain. */
struct kvd_slice kvctl_domain(const struct kvctl *kvctl);

/* The next one after *cursor that --domain selects. 1; 0 if there are no more; or negative. */
int kvctl_next_space(struct kvctl *kvctl, uint32_t *cursor, struct kvd_msg_space_info_reply *ret);
int kvctl_next_client(struct kvctl *kvctl, uint32_t *cursor, struct kvd_msg_client_info_reply *ret);
int kvctl_next_domain(struct kvctl *kvctl, uint32_t *cursor, struct kvd_msg_domain_info_reply *ret);
struct space_name space_name_of(const struct kvd_msg_space_info_reply *info);

/* The space that the operand names, or all of them. Empty only if no operand was given. */
int kvctl_spaces(struct kvctl *kvctl, struct space_list *ret);

/* The space that the operand names, or the only one. */
int kvctl_space(struct kvctl *kvctl, struct space_name *ret);

/* ---- tables that several verbs show: 0 or negative ------------------------------------------- */

int add_daemon(struct kvctl *kvctl, struct answer *answer);
int add_degraded(struct kvctl *kvctl, struct answer *answer); /* and a sentence for each */
int add_clients(struct kvctl *kvctl, struct answer *answer);
int add_spaces(struct kvctl *kvctl, struct answer *answer);
int add_counters(struct kvctl *kvctl, struct answer *answer, const struct space_list *list);
int add_methods(struct kvctl *kvctl, struct answer *answer, const struct space_list *list,
                bool settings);
int add_chains(struct kvctl *kvctl, struct answer *answer, const struct space_list *list);
int add_states(struct kvctl *kvctl, struct answer *answer, const struct space_list *list);

struct counter {
        const char *name, *unit, *meaning;
};

extern const struct counter space_counters[KVD_N_SPACE_COUNTERS];
/* Counted by the clients themselves; sums over all that are or were attached. */
extern const struct counter client_counters[KVD_N_CLIENT_COUNTERS];

/* i-th little-endian counter of a bin field, 0 if it is not there (an older daemon has fewer). */
uint64_t counter_at(struct kvd_slice counters, unsigned i);

#endif
