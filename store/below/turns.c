/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The queue of a tier's fetches. Domains take turns, and so do the clients of a domain.
 */

#include <errno.h>

#include "store/below/bring.h"

#define PLACES 512u /* fetches of a domain, in each tier */

static struct fetch *fetch_of(struct kvd_list_node *node) {
        return container_of(node, struct fetch, waiting);
}

/* -EBUSY: the client has at least as many fetches as its domain has places left. */
int turns_check(const struct kvd_list *queue, const struct attachment *a) {
        uint64_t n = 0, own = 0;

        for (struct kvd_list_node *node = queue->first; node; node = node->next) {
                const struct fetch *f = fetch_of(node);

                n += space_domain(f->space) == space_domain(a->space);
                own += f->attachment == a;
        }
        if (n + own >= PLACES)
                return store_refuse(space_store(a->space), -EBUSY,
                                    "%llu fetches of domain '%s' wait already, "
                                    "%llu of them this client's; ask again when some have ended",
                                    (unsigned long long)n, space_domain(a->space)->config.name,
                                    (unsigned long long)own);
        return 0;
}

/* The turn after the client's last fetch; or else the turn of its domain's first one. */
static void take_turn(const struct kvd_list *queue, struct fetch *f) {
        for (struct kvd_list_node *node = queue->last; node; node = node->prev) {
                const struct fetch *other = fetch_of(node);

                if (space_domain(other->space) != space_domain(f->space))
                        continue;
                f->turn = other->turn;
                if (other->attachment == f->attachment) {
                        f->turn++;
                        return;
                }
        }
}

/* After the fetches of the same round, which came first. */
static void insert(struct kvd_list *queue, struct fetch *f) {
        struct kvd_list_node *before = NULL, *last = queue->last;

        while (last && fetch_of(last)->round > f->round) {
                before = last;
                last = last->prev;
        }
        kvd_list_insert(queue, before, &f->waiting);
}

/*
 * Takes the position of the domain's first fetch with a later turn. Each displaced fetch takes the
 * position of the domain's next one.
 */
void turns_enqueue(struct kvd_list *queue, struct fetch *f) {
        const struct domain *domain = space_domain(f->space);
        uint64_t round = queue->first ? fetch_of(queue->first)->round : 0;
        bool displaces = false;
        struct kvd_list_node *next;

        take_turn(queue, f);
        for (struct kvd_list_node *node = queue->first; node; node = next) {
                struct fetch *other = fetch_of(node);

                next = node->next;
                if (space_domain(other->space) != domain)
                        continue;
                round = other->round + 1;
                displaces = displaces || other->turn > f->turn;
                if (!displaces)
                        continue;
                f->round = other->round;
                kvd_list_insert(queue, node, &f->waiting);
                kvd_list_remove(node);
                f = other;
        }
        f->round = round;
        insert(queue, f);
}
