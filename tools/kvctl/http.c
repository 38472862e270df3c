/* SPDX-License-Identifier: Apache-2.0 */

/*
 * HTTP by libmicrohttpd, which serves all connections in a thread of its own. Each connection is
 * for one request. The number of connections is limited: a new one replaces the oldest.
 */

#include "tools/kvctl/http.h"

#include <errno.h>
#include <microhttpd.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "tools/kvctl/health.h"
#include "tools/kvctl/listen.h"
#include "tools/kvctl/metrics.h"

#define CONNECTIONS 64u
#define OWN_FILES 16u       /* descriptors for other purposes */
#define PATIENCE_SECONDS 10 /* for a connection that sends or receives nothing */

struct places {
        struct MHD_Connection *taken[CONNECTIONS]; /* NULL: free */
        size_t n, next;
};

/* ---- answers --------------------------------------------------------------------------------- */

#define OPENMETRICS "application/openmetrics-text"
#define OPENMETRICS_TYPE OPENMETRICS "; version=1.0.0; charset=utf-8"
#define PLAIN_TYPE "text/plain; version=0.0.4; charset=utf-8"
#define TEXT_TYPE "text/plain; charset=utf-8"

static enum MHD_Result respond(struct MHD_Connection *c, unsigned status, const char *type,
                               struct MHD_Response *response) {
        enum MHD_Result r;

        if (!response)
                return MHD_NO;
        MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
        MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
        if (status == MHD_HTTP_METHOD_NOT_ALLOWED)
                MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
        r = MHD_queue_response(c, status, response);
        MHD_destroy_response(response);
        return r;
}

static enum MHD_Result say(struct MHD_Connection *c, unsigned status, char *text) {
        return respond(c, status, TEXT_TYPE,
                       MHD_create_response_from_buffer(strlen(text), text, MHD_RESPMEM_PERSISTENT));
}

/* Called for each line of the head. */
static enum MHD_Result look_for_openmetrics(void *found, enum MHD_ValueKind kind, const char *name,
                                            const char *value) {
        if (strcasecmp(name, MHD_HTTP_HEADER_ACCEPT) == 0 && value &&
            strcasestr(value, OPENMETRICS))
                *(bool *)found = true;
        return MHD_YES;
}

static enum MHD_Result answer_metrics(struct kvctl *kvctl, struct MHD_Connection *c) {
        bool openmetrics = false;
        char *text = NULL;
        size_t size = 0;
        FILE *to = open_memstream(&text, &size);

        if (!to)
                return MHD_NO;
        MHD_get_connection_values(c, MHD_HEADER_KIND, look_for_openmetrics, &openmetrics);
        metrics_write(kvctl, to, !openmetrics, NULL);
        if (fclose(to) != 0) {
                free(text);
                return MHD_NO;
        }
        return respond(c, MHD_HTTP_OK, openmetrics ? OPENMETRICS_TYPE : PLAIN_TYPE,
                       MHD_create_response_from_buffer(size, text, MHD_RESPMEM_MUST_FREE));
}

/* The line of kvctl health. */
static enum MHD_Result answer_health(struct kvctl *kvctl, struct MHD_Connection *c) {
        struct health health;
        int r = health_ask(kvctl, &health);
        char text[sizeof health.line + 1];

        snprintf(text, sizeof text, "%s\n", r < 0 ? kvctl->why.line : health.line);
        return respond(c, r == 0 && health.serves ? MHD_HTTP_OK : MHD_HTTP_SERVICE_UNAVAILABLE,
                       TEXT_TYPE,
                       MHD_create_response_from_buffer(strlen(text), text, MHD_RESPMEM_MUST_COPY));
}

static enum MHD_Result on_request(void *kvctl, struct MHD_Connection *c, const char *path,
                                  const char *method, const char *version, const char *data,
                                  size_t *size, void **request) {
        if (strcmp(method, "GET") != 0 && strcmp(method, "HEAD") != 0)
                return say(c, MHD_HTTP_METHOD_NOT_ALLOWED, "Only GET and HEAD.\n");
        if (strcmp(path, "/metrics") == 0)
                return answer_metrics(kvctl, c);
        if (strcmp(path, "/healthz") == 0)
                return answer_health(kvctl, c);
        return say(c, MHD_HTTP_NOT_FOUND, "Metrics are at /metrics, health is at /healthz.\n");
}

/* ---- connections ----------------------------------------------------------------------------- */

/* Maximum number of connections that leaves enough descriptors for asking the daemon. */
static size_t maximum(void) {
        struct rlimit limit = {0};

        getrlimit(RLIMIT_NOFILE, &limit);
        return MIN(MAX(limit.rlim_cur, OWN_FILES + 1) - OWN_FILES, CONNECTIONS);
}

static void hang_up(struct MHD_Connection *c) {
        shutdown(MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd,
                 SHUT_RDWR);
}

/* A connection begins or ends. Places are taken in turn, so that the next one is the oldest's. */
static void on_connection(void *all, struct MHD_Connection *c, void **place_of,
                          enum MHD_ConnectionNotificationCode code) {
        struct places *places = all;
        struct MHD_Connection **place = *place_of;

        if (code == MHD_CONNECTION_NOTIFY_CLOSED) {
                if (*place == c)
                        *place = NULL;
                return;
        }
        place = &places->taken[places->next++ % places->n];
        if (*place)
                hang_up(*place);
        *place = c;
        *place_of = place;
}

/* ---- the server ------------------------------------------------------------------------------ */

/* One connection more than there are places, so that a new one is accepted while all are taken. */
static struct MHD_Daemon *start(struct kvctl *kvctl, int fd, struct places *places) {
        return MHD_start_daemon(MHD_USE_EPOLL | MHD_USE_INTERNAL_POLLING_THREAD, 0, NULL, NULL,
                                on_request, kvctl, MHD_OPTION_LISTEN_SOCKET, fd,
                                MHD_OPTION_NOTIFY_CONNECTION, on_connection, places,
                                MHD_OPTION_CONNECTION_LIMIT, (unsigned)places->n + 1,
                                MHD_OPTION_CONNECTION_TIMEOUT, PATIENCE_SECONDS, MHD_OPTION_END);
}

static int serve(struct kvctl *kvctl, const struct listener *listener) {
        struct places places = {.n = maximum()};
        struct MHD_Daemon *http = start(kvctl, listener->fd, &places);
        int r;

        if (!http)
                return kvctl_out_of_memory(kvctl);
        printf("Metrics are at %s (Ctrl-C ends)\n", listener->name);
        r = kvctl_flush(kvctl);
        while (r == 0 && screen_wait(&kvctl->screen, 86400))
                ;
        MHD_quiesce_daemon(http);
        MHD_stop_daemon(http);
        return r;
}

int http_serve(struct kvctl *kvctl, const char *address) {
        struct listener listener;
        int r = listener_open(address, args_has(&kvctl->args, FLAG_PUBLIC), &listener, &kvctl->why);

        if (r < 0) {
                kvctl->exit = r == -EINVAL ? KVCTL_USAGE : KVCTL_NO;
                return r;
        }
        screen_watch_begin(&kvctl->screen, false, false); /* no signal reaches the other thread */
        r = serve(kvctl, &listener);
        listener_close(&listener);
        screen_watch_end(&kvctl->screen);
        return r;
}
