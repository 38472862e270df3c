/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Selects the server for each item, and limits the time for its reply. A server that is silent for
 * the timeout is away. A whole request takes at most PATIENCE timeouts, so that a server that drips
 * bytes cannot delay it without end.
 */

#include "daemon/process/remote/servers.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "ipc/base/text.h"
#include "ipc/base/util.h"

#define PATIENCE 20u                  /* maximum number of timeouts that a request may take */
#define NOBODY UINT32_MAX             /* instead of an item: the reply to ASKING */
#define OURS (UINT32_MAX - 1)         /* instead of an item: the reply to AUTH */
#define SENT_ON 3u                    /* maximum number of redirections of an item */
#define MAP_BYTES (UINT64_C(1) << 20) /* maximum bytes of a list of slots */

/* ---- addresses ------------------------------------------------------------------------------- */

static struct link *find_link(struct servers *s, const char *host, uint16_t port, bool enter) {
        struct link *unused = NULL;

        for (uint32_t i = 0; i < SERVERS; i++) {
                struct link *link = &s->links[i];

                if (link->host[0] && link->port == port && strcmp(link->host, host) == 0)
                        return link;
                if (!link->host[0])
                        unused = link;
        }
        if (!enter || !unused || strlen(host) >= sizeof unused->host)
                return NULL;
        strcpy(unused->host, host);
        unused->port = port;
        return unused;
}

/* Parses a port, which ends the text. 0: invalid. */
static uint16_t port_of(const char *text) {
        char *rest;
        unsigned long port = strtoul(text, &rest, 10);

        return *text >= '0' && *text <= '9' && !*rest && port <= UINT16_MAX ? (uint16_t)port : 0;
}

/* Parses "host:port", "host", "[IPv6]:port" or "[IPv6]", in place. NULL: invalid. */
static const char *split(char *text, uint16_t *port) {
        char *end = text[0] == '[' ? strchr(text, ']') : strrchr(text, ':');

        if (text[0] == '[') {
                if (!end || (end[1] && end[1] != ':'))
                        return NULL;
                *end++ = 0;
                text++;
        }
        if (end && *end) {
                *port = port_of(end + 1);
                *end = 0;
        }
        return text[0] && *port ? text : NULL;
}

/* enter: adds a new server. NULL: invalid, or too many. */
static struct link *link_of(struct servers *s, const char *text, size_t n, uint16_t port,
                            bool enter) {
        char copy[LINK_HOST + 10];
        const char *host;

        if (n >= sizeof copy)
                return NULL;
        memcpy(copy, text, n);
        copy[n] = 0;
        host = split(copy, &port);
        return host ? find_link(s, host, port, enter) : NULL;
}

/* Where does an IPv6 address end, and the port begin? */
static bool is_ambiguous(const char *text, size_t n) {
        const char *colon = memchr(text, ':', n);

        return text[0] != '[' && colon && memchr(colon + 1, ':', n - (size_t)(colon + 1 - text));
}

static int parse_one(struct servers *s, const char *text, size_t n, struct kvd_why *why) {
        struct link *link = is_ambiguous(text, n) ? NULL : link_of(s, text, n, 6379, true);

        if (!link)
                return kvd_refuse(
                        why, -EINVAL,
                        "'%.*s' is not a server; write %s://host:port,[IPv6]:port..., at most %u",
                        (int)n, text, s->wants_tls ? "rediss" : "redis", SERVERS);
        link->seed = true;
        return 0;
}

/* Text before an @ may be a password: the message does not repeat it. */
int servers_parse(struct servers *s, const char *text, struct kvd_why *why) {
        const char *at = strstr(text, "://") + 3;
        int r = 0;

        s->wants_tls = strncmp(text, "rediss:", 7) == 0;
        if (strchr(at, '@'))
                return kvd_refuse(
                        why, -EINVAL,
                        "remote must not contain users or passwords; write them to the file of remote_password");
        for (size_t n; r == 0; at += n + 1) {
                n = strcspn(at, ",");
                r = parse_one(s, at, n, why);
                if (!at[n])
                        break;
        }
        return r;
}

void servers_password(struct servers *s, const char *text) {
        const char *colon = strchr(text, ':');

        snprintf(s->user, sizeof s->user, "%.*s", colon ? (int)(colon - text) : 0, text);
        snprintf(s->password, sizeof s->password, "%s", colon ? colon + 1 : text);
}

static uint16_t crc16(const char *data, size_t n) {
        uint16_t crc = 0;

        for (size_t i = 0; i < n; i++) {
                crc = (uint16_t)(crc ^ (uint16_t)((uint8_t)data[i] << 8));
                for (int bit = 0; bit < 8; bit++)
                        crc = (uint16_t)(crc << 1 ^ (crc & 0x8000 ? 0x1021 : 0));
        }
        return crc;
}

uint32_t servers_slot(const char *key) {
        return crc16(key, strlen(key)) % SLOTS;
}

/* ---- the password ---------------------------------------------------------------------------- */

static bool is_at_a_named_one(const struct servers *s, const struct link *link) {
        for (uint32_t i = 0; i < SERVERS; i++)
                if (s->links[i].seed && s->links[i].state == LINK_UP &&
                    address_equal(link_address(&s->links[i]), link_address(link)))
                        return true;
        return false;
}

static bool proves_a_name(const struct servers *s, const struct link *link) {
        for (uint32_t i = 0; i < SERVERS; i++)
                if (s->links[i].seed && tls_is_for(link->wire.ssl, s->links[i].host))
                        return true;
        return false;
}

/* Also true without a password. No server may redirect us to send the password to others. */
static bool gets_password(const struct servers *s, const struct link *link) {
        if (!s->password[0] || link->seed)
                return true;
        return s->tls ? proves_a_name(s, link) : is_at_a_named_one(s, link);
}

/* ---- items and replies ----------------------------------------------------------------------- */

static void ask_link(struct talk *talk, uint32_t item, struct link *link, bool asking) {
        bool said = link && link->state != LINK_AWAY;

        if (said && asking)
                said = link_say(link, 1, (const char *[]){"ASKING"}) && link_await(link, NOBODY);
        if (said && link->n == LINK_REPLIES)
                said = false;
        else if (said && !(talk->ask(talk, item, link) && link_await(link, item)))
                link_end(link, "out of memory for its commands");
        if (!said || link->state == LINK_AWAY)
                talk->answer(talk, item, NULL);
}

void talk_ask(struct talk *talk, uint32_t item, uint32_t slot) {
        uint32_t number = talk->servers->slots[slot];

        ask_link(talk, item, number ? &talk->servers->links[number - 1] : NULL, false);
}

/* "MOVED 3999 host:port", or ASK: asks that server again, if it is known. False: it does not. */
static bool send_on(struct talk *talk, uint32_t item, const struct resp *reply) {
        bool asking = resp_begins(reply, "ASK ");
        struct servers *s = talk->servers;
        const char *text = (const char *)reply->text, *end = text + reply->size, *host;
        struct link *link;
        uint32_t slot = 0;

        if (reply->type != RESP_ERROR || (!asking && !resp_begins(reply, "MOVED ")))
                return false;
        for (text += asking ? 4 : 6; text < end && *text >= '0' && *text <= '9'; text++)
                slot = slot * 10 + (uint32_t)(*text - '0');
        host = text + 1;
        link = host < end ? link_of(s, host, (size_t)(end - host), 0, false) : NULL;
        s->stale |= !link || !asking;
        if (!link || link->state == LINK_AWAY || ++talk->sent_on[item] > SENT_ON)
                return false;
        if (!asking && slot < SLOTS)
                s->slots[slot] = (uint8_t)(link - s->links + 1);
        ask_link(talk, item, link, asking);
        return true;
}

void talk_refused(struct talk *talk, const struct resp *reply) {
        struct kvd_why *refusal = &talk->servers->refusal;

        kvd_refuse(refusal, 0, "%s:%u: %.*s", talk->from->host, talk->from->port,
                   (int)MIN(reply->size, 80), (const char *)reply->text);
        kvd_make_plain(refusal->line);
}

static void take_replies(struct talk *talk, struct link *link) {
        struct resp reply;
        uint32_t whose;
        size_t used;

        talk->from = link;
        while (link_reply(link, talk->most, &reply, &whose, &used)) {
                if (whose == OURS && reply.type == RESP_ERROR)
                        link_end(link, "%.*s", (int)MIN(reply.size, 80), (const char *)reply.text);
                else if (whose < OURS && !send_on(talk, whose, &reply))
                        talk->answer(talk, whose, &reply);
                link_taken(link, used);
        }
}

/* Ends the items that wait for a server that is away. */
static void give_up(struct talk *talk, struct link *link) {
        while (link->n) {
                uint32_t whose = link->awaited[link->first];

                link->first = (link->first + 1) % LINK_REPLIES;
                link->n--;
                if (whose < OURS)
                        talk->answer(talk, whose, NULL);
        }
}

/* How long it may still be silent; 0: it is away. If late, it may have another address to try. */
static uint64_t check_time(struct talk *talk, struct link *link, uint64_t now, uint64_t until) {
        while (link->state != LINK_AWAY) {
                uint64_t patience = link_patience(link, talk->servers->timeout_ns);
                uint64_t end = MIN(link->wire.since_ns + patience, until);

                if (now < end)
                        return end - now;
                link_late(link, patience);
        }
        return 0;
}

/* Lists the links with awaited replies. Returns their number; *wait: ns until the first is late. */
static uint32_t watch(struct talk *talk, uint64_t until, struct pollfd *fds, struct link **of,
                      uint64_t *wait) {
        uint64_t now = sys_now_ns();
        uint32_t n = 0;

        *wait = until;
        for (uint32_t i = 0; i < SERVERS; i++) {
                struct link *link = &talk->servers->links[i];
                uint64_t left = 0;

                if (link->n)
                        left = check_time(talk, link, now, until);
                if (link->state == LINK_AWAY)
                        give_up(talk, link);
                if (!left || !link->n)
                        continue;
                *wait = MIN(*wait, left);
                fds[n] = (struct pollfd){.fd = link_fd(link), .events = link_wants(link)};
                of[n++] = link;
        }
        return n;
}

/* Silence before the request does not count. */
static void begin_waiting(struct servers *s) {
        for (uint32_t i = 0; i < SERVERS; i++)
                if (s->links[i].state == LINK_UP)
                        s->links[i].wire.since_ns = sys_now_ns();
}

/* A link that has just come up has sent nothing yet. The password would be sent first. */
static void move(struct talk *talk, struct link *link, short revents) {
        bool more;

        do {
                bool was_up = link->state == LINK_UP;

                more = link_move(link, revents, talk->most);
                if (!was_up && link->state == LINK_UP && !gets_password(talk->servers, link))
                        link_end(
                                link,
                                "it is not listed in remote, so it gets no password: list it there");
                take_replies(talk, link);
                revents = POLLIN | POLLOUT;
        } while (more);
}

void talk_run(struct talk *talk) {
        uint64_t until = sys_now_ns() + PATIENCE * talk->servers->timeout_ns, wait;
        struct pollfd fds[SERVERS];
        struct link *of[SERVERS];
        uint32_t n;

        begin_waiting(talk->servers);
        while ((n = watch(talk, until, fds, of, &wait))) {
                if (sys->poll(fds, n, (int)(wait / 1000000 + 1)) < 0)
                        continue;
                for (uint32_t i = 0; i < n; i++)
                        move(talk, of[i], fds[i].revents);
        }
}

/* ---- opening --------------------------------------------------------------------------------- */

/* Does not wait for the reply: if the server refuses the password, the link ends. */
static void introduce(struct servers *s, struct link *link) {
        const char *words[] = {"AUTH", s->user, s->password};

        if (!s->password[0] || link->state == LINK_AWAY)
                return;
        if (!s->user[0])
                words[1] = s->password;
        if (!link_say(link, s->user[0] ? 3 : 2, words) || !link_await(link, OURS))
                link_end(link, "out of memory for the password");
}

static bool ask_ping(struct talk *talk, uint32_t item, struct link *link) {
        return link_say(link, 1, (const char *[]){"PING"});
}

static void answer_ping(struct talk *talk, uint32_t item, const struct resp *reply) {
        struct link *link = &talk->servers->links[item];

        if (reply && !(reply->type == RESP_TEXT && resp_begins(reply, "PONG")))
                link_end(link, "%.*s", (int)MIN(reply->size, 80), (const char *)reply->text);
}

/* Servers that do not answer are away then. named: configured servers; otherwise the others. */
static void greet(struct servers *s, bool named) {
        struct talk talk = {.servers = s,
                            .most = MAP_BYTES,
                            .ask = ask_ping,
                            .answer = answer_ping};

        for (uint32_t i = 0; i < SERVERS; i++) {
                if (!s->links[i].host[0] || s->links[i].seed != named)
                        continue;
                if (s->links[i].state == LINK_AWAY) {
                        link_begin(&s->links[i], s->tls);
                        introduce(s, &s->links[i]);
                }
                ask_link(&talk, i, &s->links[i], false);
        }
        talk_run(&talk);
}

static bool ask_slots(struct talk *talk, uint32_t item, struct link *link) {
        return link_say(link, 2, (const char *[]){"CLUSTER", "SLOTS"});
}

/* Parses the next member, of the list or of an array in it. */
static bool member(const struct resp *list, size_t *at, struct resp *ret) {
        size_t used;

        if (resp_take(list->text + *at, list->size - *at, MAP_BYTES, ret, &used) != 1)
                return false;
        *at += used;
        return true;
}

static bool skip(const struct resp *list, size_t *at, int64_t n) {
        struct resp some;
        size_t used;

        for (; n > 0; n--) {
                if (resp_take_whole(list->text + *at, list->size - *at, MAP_BYTES, &some, &used) !=
                    1)
                        return false;
                *at += used;
        }
        return true;
}

/* The first server of a range of slots is its master. No host: the server that was asked. */
static struct link *master(struct servers *s, const struct link *asked, const struct resp *list,
                           size_t *at) {
        struct resp node, host, port;
        char name[LINK_HOST];

        if (!member(list, at, &node) || node.type != RESP_ARRAY || node.number < 2 ||
            !member(list, at, &host) || !member(list, at, &port) || port.type != RESP_NUMBER ||
            !skip(list, at, node.number - 2) || port.number < 1 || port.number > UINT16_MAX ||
            host.size >= sizeof name)
                return NULL;
        snprintf(name, sizeof name, "%.*s", (int)host.size, (const char *)host.text);
        if (host.type != RESP_BULK || !name[0] || strcmp(name, "?") == 0)
                snprintf(name, sizeof name, "%s", asked->host);
        return find_link(s, name, (uint16_t)port.number, true);
}

static bool take_range(struct servers *s, const struct link *asked, const struct resp *list,
                       size_t *at) {
        struct resp range, first, last;
        struct link *link;

        if (!member(list, at, &range) || range.type != RESP_ARRAY || range.number < 3 ||
            !member(list, at, &first) || !member(list, at, &last) || first.type != RESP_NUMBER ||
            last.type != RESP_NUMBER)
                return false;
        link = master(s, asked, list, at);
        if (!link || !skip(list, at, range.number - 3) || first.number < 0 || last.number >= SLOTS)
                return false;
        link->mapped = true;
        for (int64_t slot = first.number; slot <= last.number; slot++)
                s->slots[slot] = (uint8_t)(link - s->links + 1);
        return true;
}

static void forget_slots(struct servers *s) {
        memset(s->slots, 0, sizeof s->slots);
        for (uint32_t i = 0; i < SERVERS; i++)
                s->links[i].mapped = false;
}

/* The head of the list has the number of ranges that follow. */
static void answer_slots(struct talk *talk, uint32_t item, const struct resp *reply) {
        struct servers *s = talk->servers;
        struct resp list = {.size = s->links[item].in_n}, head;
        size_t at = 0;

        if (!reply)
                return;
        s->cluster = reply->type == RESP_ARRAY;
        if (!s->cluster)
                return;
        list.text = s->links[item].in;
        forget_slots(s);
        if (!member(&list, &at, &head))
                return;
        s->stale = false;
        for (int64_t i = 0; i < head.number; i++)
                if (!take_range(s, &s->links[item], &list, &at))
                        break;
        for (uint32_t i = 0; i < SERVERS; i++)
                if (s->links[i].mapped)
                        return;
        link_end(&s->links[item], "its reply to CLUSTER SLOTS contains no valid server");
}

/* Asks one server. False: no server is up. */
static bool ask_for_slots(struct servers *s) {
        struct talk talk = {.servers = s,
                            .most = MAP_BYTES,
                            .ask = ask_slots,
                            .answer = answer_slots};

        for (uint32_t i = 0; i < SERVERS; i++) {
                if (s->links[i].state != LINK_UP)
                        continue;
                ask_link(&talk, i, &s->links[i], false);
                talk_run(&talk);
                return true;
        }
        return false;
}

/* Servers without a Cluster get equal parts of the slots, in the order of the configuration. */
static void spread(struct servers *s) {
        uint32_t n = 0, k = 0;

        forget_slots(s);
        for (uint32_t i = 0; i < SERVERS; i++)
                n += s->links[i].seed;
        for (uint32_t i = SERVERS; i-- > 0;) {
                if (!s->links[i].seed)
                        continue;
                s->links[i].mapped = true;
                for (uint32_t slot = SLOTS * k / n; slot < SLOTS * (k + 1) / n; slot++)
                        s->slots[slot] = (uint8_t)(i + 1);
                k++;
        }
}

/* Drops servers that are neither configured nor have slots. */
static void drop_others(struct servers *s) {
        for (uint32_t i = 0; i < SERVERS; i++) {
                struct link *link = &s->links[i];

                if (!link->host[0] || link->seed || link->mapped)
                        continue;
                link_end(link, "it has no slots any more");
                *link = (struct link){0};
        }
}

/* Connects to configured servers first: their addresses decide which others get the password. */
void servers_open(struct servers *s) {
        greet(s, true);
        greet(s, false);
        if (ask_for_slots(s)) {
                if (!s->cluster)
                        spread(s);
                drop_others(s);
                if (s->cluster)
                        greet(s, false);
        }
}

/* While no server has slots, counts those that are configured. */
uint32_t servers_away(const struct servers *s, uint32_t *n) {
        uint32_t away = 0, mapped = 0;

        for (uint32_t i = 0; i < SERVERS; i++)
                mapped += s->links[i].mapped;
        *n = 0;
        for (uint32_t i = 0; i < SERVERS; i++) {
                const struct link *link = &s->links[i];

                if (!(mapped ? link->mapped : link->seed))
                        continue;
                *n += 1;
                away += link->state != LINK_UP;
        }
        return away;
}

const char *servers_why(struct servers *s) {
        for (uint32_t i = 0; i < SERVERS; i++) {
                const struct link *link = &s->links[i];

                if ((!link->mapped && !link->seed) || link->state == LINK_UP)
                        continue;
                kvd_refuse(&s->why, 0, "%s:%u: %s", link->host, link->port, link->why.line);
                return kvd_make_plain(s->why.line);
        }
        return "";
}
