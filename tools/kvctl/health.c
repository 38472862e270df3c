/* SPDX-License-Identifier: Apache-2.0 */

/*
 * health: one line and an exit status for a probe. A daemon that starts, ends or hangs does not
 * answer, so only what it reports when it answers is judged here.
 */

#include "tools/kvctl/health.h"

#include <stdio.h>

#include "client/conn/deadline.h"
#include "tools/kvctl/degraded.h"

static const struct column columns[] = {
        {"ready", NULL, UNIT_NONE},  {"version", NULL, UNIT_NONE},  {"pid", NULL, UNIT_NONE},
        {"socket", NULL, UNIT_NONE}, {"degraded", NULL, UNIT_NONE},
};

static const struct {
        const char *name, *what;
} states[KVD_N_DEGRADED] = {
#define KVD_DEGRADED(whose, name, unit, text, remedy) [KVD_DEGRADED_##name] = {#name, text},
#include "ipc/base/degraded.def"
#undef KVD_DEGRADED
};

/* In all other degraded states clients are served, with less, or more slowly. */
static bool is_unable(enum kvd_degraded state) {
        return state == KVD_DEGRADED_gpu_memory;
}

/* Notes the states that apply. Returns why clients get no memory, or NULL. */
static const char *judge(const uint64_t n[KVD_N_DEGRADED], struct health *ret) {
        const char *why = NULL;
        size_t used = 0;

        for (unsigned i = 0; i < KVD_N_DEGRADED; i++) {
                if (!n[i])
                        continue;
                if (is_unable((enum kvd_degraded)i))
                        why = states[i].what;
                used += (size_t)snprintf(ret->degraded + used, sizeof ret->degraded - used, "%s%s",
                                         used ? ", " : "", states[i].name);
        }
        return why;
}

static void write_line(struct health *h, const char *socket, const char *why) {
        int n = snprintf(h->line, sizeof h->line, "%s: kvd %s (pid %u) at %s",
                         h->serves ? "ready" : "not ready", h->version, h->pid, socket);

        if (why)
                n += snprintf(h->line + n, sizeof h->line - (size_t)n, "; %s", why);
        if (*h->degraded)
                snprintf(h->line + n, sizeof h->line - (size_t)n, "; degraded: %s", h->degraded);
}

/* Connecting and the answer share one time limit. */
static int ask(struct kvctl *kvctl, struct kvd_msg_daemon_info_reply *ret) {
        struct kvd_msg_daemon_info request = {};
        int r;

        kvctl->deadline_ns = deadline_from_now();
        r = kvctl_call(kvctl, KVD_MSG_daemon_info, &request, ret);
        kvctl->deadline_ns = 0;
        return r;
}

int health_ask(struct kvctl *kvctl, struct health *ret) {
        struct kvd_msg_daemon_info_reply info;
        uint64_t n[KVD_N_DEGRADED];
        const char *why;
        int r = ask(kvctl, &info);

        if (r < 0)
                return r;
        *ret = (struct health){.pid = info.pid};
        kvd_slice_copy(info.version, ret->version, sizeof ret->version);
        degraded_of_daemon(&info, n);
        why = judge(n, ret);
        ret->serves = !why;
        write_line(ret, conn_path(kvctl->conn), why);
        return 0;
}

int verb_health(struct kvctl *kvctl, struct answer *answer) {
        struct table *t = ANSWER_RECORD(answer, "health", columns);
        struct health health;
        int r;

        if (!t)
                return kvctl_out_of_memory(kvctl);
        r = health_ask(kvctl, &health);
        if (r < 0)
                return r;
        table_flag(t, health.serves);
        table_string(t, health.version);
        table_number(t, health.pid);
        table_string(t, conn_path(kvctl->conn));
        table_string(t, health.degraded);
        answer_say(answer, "%s", health.line);
        return !health.serves && !args_has(&kvctl->args, FLAG_ALIVE);
}
