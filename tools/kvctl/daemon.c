/* SPDX-License-Identifier: Apache-2.0 */

/*
 * status and ping: the daemon as a whole. ping asks twice, because the first answer also pays for
 * the connection.
 */

#include "ipc/base/sys.h"
#include "tools/kvctl/holders.h"

static const struct column daemon_columns[] = {
        {"version", "kvd", UNIT_NONE},
        {"pid", "pid", UNIT_NONE},
        {"uptime_ms", "up", UNIT_MS},
        {"socket", "socket", UNIT_NONE},
        {"domain", "domain", UNIT_NONE},
        {"administrator", "administrator", UNIT_NONE},
        {"backend", "backend", UNIT_NONE},
        {"device", "device", UNIT_NONE},
        {"backend_why", "why this backend", UNIT_NONE},
        {"loop", "loop", UNIT_NONE},
        {"pages", "pages", UNIT_NONE},
        {"pool_bytes", "pool", UNIT_BYTES},
        {"pool_used_bytes", "pool in use", UNIT_BYTES},
        {"pool_used_share", "share in use", UNIT_SHARE},
        {"held_bytes", "held by clients", UNIT_BYTES},
        {"evictable_bytes", "evictable", UNIT_BYTES},
        {"spaces", "spaces", UNIT_COUNT},
        {"clients", "clients", UNIT_COUNT},
        {"requests", "requests", UNIT_COUNT},
        {"request_errors", "of these refused", UNIT_COUNT},
        {"bad_frames", "bad frames", UNIT_COUNT},
        {"turn_max_us", "longest turn", UNIT_US},
        {"turn_recent_us", "in the last minute", UNIT_US},
        {"worker_pid", "worker", UNIT_NONE},
        {"worker_starts", "workers started", UNIT_COUNT},
        {"jobs", "jobs done", UNIT_COUNT},
        {"jobs_waiting", "jobs waiting", UNIT_COUNT},
        {"kept", "descriptors kept", UNIT_COUNT},
        {"large_pages", "2 MiB pages made", UNIT_COUNT},
        {"large_pages_failed", "could not be made", UNIT_COUNT},
};

/* The work of all domains is for administrators only. */
static void fill_work(struct table *t, bool told, const struct kvd_msg_daemon_info_reply *info) {
        if (told) {
                table_fields(t, 5, KVD_MSG_daemon_info_reply, info);
                table_number(t, info->worker);
                table_fields(t, 6, KVD_MSG_daemon_info_reply, info);
        }
        for (unsigned i = 0; i < 12 && !told; i++)
                table_none(t);
}

static void fill_daemon(struct table *t, const struct conn *conn, const struct map_sums *bytes,
                        const struct kvd_msg_daemon_info_reply *info) {
        table_fields(t, 3, KVD_MSG_daemon_info_reply, info);
        table_string(t, conn_path(conn));
        table_text(t, conn_peer(conn)->domain.data, conn_peer(conn)->domain.size);
        table_flag(t, conn_peer(conn)->admin);
        table_fields(t, 6, KVD_MSG_daemon_info_reply, info);
        table_number(t, info->pool_used);
        table_share(t, (double)info->pool_used, (double)info->pool_bytes);
        table_number(t, bytes->held + bytes->filling);
        table_number(t, bytes->evictable);
        table_fields(t, 2, KVD_MSG_daemon_info_reply, info);
        fill_work(t, conn_peer(conn)->admin, info);
}

int add_daemon(struct kvctl *kvctl, struct answer *answer) {
        _cleanup_(maps_clear) struct maps maps = {0};
        struct kvd_msg_daemon_info request = {};
        struct kvd_msg_daemon_info_reply info = {0};
        struct map_sums bytes;
        struct table *t;
        int r = maps_read(kvctl, false, &maps);

        if (r == 0)
                r = kvctl_call(kvctl, KVD_MSG_daemon_info, &request, &info);
        if (r < 0)
                return r;
        bytes = maps_bytes(&maps);
        t = ANSWER_RECORD(answer, "daemon", daemon_columns);
        if (!t)
                return kvctl_out_of_memory(kvctl);
        fill_daemon(t, kvctl->conn, &bytes, &info);
        return holders_say_full(kvctl, answer, &maps, info.pool_bytes);
}

int verb_status(struct kvctl *kvctl, struct answer *answer) {
        int r = add_daemon(kvctl, answer);

        if (r == 0)
                r = add_degraded(kvctl, answer);
        return r < 0 ? r : add_spaces(kvctl, answer);
}

/* ---- ping ------------------------------------------------------------------------------------ */

static const struct column ping_columns[] = {
        {"version", NULL, UNIT_NONE},
        {"pid", NULL, UNIT_NONE},
        {"socket", NULL, UNIT_NONE},
        {"answer_us", NULL, UNIT_US},
};

/* The first request also connects, so the second one is measured. */
static int ask_twice(struct kvctl *kvctl, struct kvd_msg_daemon_info_reply *info, uint64_t *us) {
        struct kvd_msg_daemon_info request = {};
        int r = kvctl_call(kvctl, KVD_MSG_daemon_info, &request, info);
        uint64_t start = sys_now_ns();

        if (r < 0)
                return r;
        r = kvctl_call(kvctl, KVD_MSG_daemon_info, &request, info);
        *us = (sys_now_ns() - start) / 1000;
        return r;
}

int verb_ping(struct kvctl *kvctl, struct answer *answer) {
        char version[64], time[UNIT_TEXT_MAX];
        struct kvd_msg_daemon_info_reply info;
        struct table *t;
        uint64_t us;
        int r = ask_twice(kvctl, &info, &us);

        if (r < 0)
                return r;
        t = ANSWER_RECORD(answer, "ping", ping_columns);
        if (!t)
                return kvctl_out_of_memory(kvctl);
        kvd_slice_copy(info.version, version, sizeof version);
        table_string(t, version);
        table_number(t, info.pid);
        table_string(t, conn_path(kvctl->conn));
        table_number(t, us);
        unit_format(UNIT_US, (double)us, time);
        answer_say(answer, "kvd %s (pid %u) at %s answered in %s", version, info.pid,
                   conn_path(kvctl->conn), time);
        return 0;
}
