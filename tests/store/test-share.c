/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Unused memory goes to clients that need it: idle memory of other spaces of the domain, or of
 * other domains above their guarantees, can be allocated. The figure that a client sees is right.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "store/account.h"
#include "store/cache/inside.h"
#include "tests/lib/amount.h"
#include "tests/lib/oracle.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

#define SEGMENT 16u /* blocks, of the fixture's geometry */
#define POOL 512u   /* blocks */

/* ---- a client -------------------------------------------------------------------------------- */

struct user {
        struct space *space;
        struct attachment *a; /* NULL: the client has left */
        uint32_t next_token;
};

static struct user open_user(const char *name) {
        struct space *space = fixture_space(name, 0);

        return (struct user){space, fixture_attach(space), 1};
}

static void leave(struct user *u) {
        attachment_free(u->a, false);
        u->a = NULL;
        idle();
}

/* Does idle work run between two calls of ask_for, as it mostly does in a daemon? */
static bool has_time = true;

/* Asks for n blocks until an error or this many calls. Returns how many it got. */
static uint32_t ask_for(struct user *u, uint32_t n, uint32_t calls, kvd_ref *ret) {
        uint32_t got = 0;

        for (uint32_t i = 0; i < calls && got < n; i++) {
                int r = space_allocate(u->a, n - got, ret + got);

                if (r < 0)
                        break;
                got += (uint32_t)r;
                if (has_time)
                        idle();
        }
        return got;
}

/* Seals the blocks as chains of `length` blocks, each with tokens of its own. */
static void seal(struct user *u, const kvd_ref *blocks, uint32_t n, uint32_t length) {
        uint32_t tokens[POOL * BT];
        kvd_ref sealed[POOL];

        for (uint32_t done = 0; done < n; done += length) {
                uint32_t k = MIN(length, n - done);
                struct seal_request q = {.n_blocks = k,
                                         .blocks = blocks + done,
                                         .n_tokens = k * BT,
                                         .tokens = tokens};

                for (uint32_t i = 0; i < k * BT; i++)
                        tokens[i] = u->next_token++ % 99999;
                ck_assert_msg(space_seal(u->a, &q, sealed) == 0, "%s", store_why(store));
        }
}

static void fill(struct user *u, uint32_t n) {
        kvd_ref blocks[POOL];

        ck_assert_uint_eq(ask_for(u, n, POOL, blocks), n);
        seal(u, blocks, n, 4);
}

static void pin(const struct user *u, uint32_t id, int pins) {
        atomic_fetch_add(&u->a->words[id].pins, (uint32_t)pins);
        atomic_fetch_add(&u->a->page->held, 1);
}

/* Does what the daemon's timers do. */
static void look(void) {
        for (int i = 0; i < 2; i++) {
                while (store_look_at_pins(store) == STORE_SOON)
                        ;
                idle();
        }
}

static uint32_t available(const struct user *u) {
        return atomic_load(&u->a->page->available);
}

/* ---- single set-ups -------------------------------------------------------------------------- */

static void set_up(void) {
        fixture_open(POOL, 0);
}

static void tear_down(void) {
        for (struct space *s = store_next_space(store, 0); s;
             s = store_next_space(store, space_number(s) + 1))
                check_clean(s);
        fixture_close();
}

START_TEST(a_space_without_clients_gives_all_that_it_has) {
        struct user old = open_user("old"), new = open_user("new");
        kvd_ref blocks[POOL];

        fill(&old, 300);
        leave(&old);
        look();
        ck_assert_uint_eq(available(&new), POOL);
        ck_assert_uint_eq(ask_for(&new, POOL, POOL, blocks), POOL);
        ck_assert_uint_eq(usage_of(old.space).total, 0);
}
END_TEST

/* Each idle space has one segment, no more than the new space would have with it. */
START_TEST(sixteen_small_idle_spaces_give_to_the_next_one) {
        struct user new;
        kvd_ref blocks[POOL];

        for (uint32_t i = 0; i < POOL / SEGMENT; i++) {
                char name[16];
                struct user old;

                snprintf(name, sizeof name, "old%u", i);
                old = open_user(name);
                fill(&old, SEGMENT);
                leave(&old);
        }
        new = open_user("new");
        look();
        ck_assert_uint_eq(available(&new), POOL);
        ck_assert_uint_eq(ask_for(&new, 1, 2, blocks), 1);
        ck_assert_uint_eq(ask_for(&new, POOL - 1, POOL, blocks + 1), POOL - 1);
}
END_TEST

/* Memory of a space with a client is taken if the client does not use it. */
START_TEST(what_was_not_used_for_longest_goes_first) {
        struct user cold = open_user("cold"), warm = open_user("warm"), new = open_user("new");
        kvd_ref blocks[POOL];

        fill(&warm, POOL / 4);
        fill(&cold, POOL / 2);
        fill(&new, POOL / 4);
        look();
        for (uint32_t id = 0; id < POOL / 4; id++) {
                warm.a->words[id].touch = (uint32_t)warm.space->clock;
                pin(&warm, id, 0);
        }
        look();
        ck_assert_uint_eq(ask_for(&new, POOL / 4, POOL, blocks), POOL / 4);
        ck_assert_uint_eq(usage_of(cold.space).total, POOL / 4);
        ck_assert_uint_eq(usage_of(warm.space).total, POOL / 4);
        /* at most one for each segment that is still being moved */
        ck_assert_uint_le(counter(new.space, KVD_SPACE_EVICTED), POOL / 4 / SEGMENT);
}
END_TEST

/* The blocks of a are cold, but not as cold as those that b can evict itself. */
START_TEST(colder_blocks_of_ones_own_go_before_those_of_others) {
        struct user a = open_user("a"), b = open_user("b");
        kvd_ref blocks[POOL];

        fill(&b, POOL / 2);
        look();
        fill(&a, POOL / 2);
        look();
        ck_assert_uint_eq(ask_for(&b, SEGMENT, POOL, blocks), SEGMENT);
        ck_assert_uint_eq(usage_of(a.space).total, POOL / 2);
        seal(&b, blocks, SEGMENT, 4);
        for (uint32_t i = 1; i < POOL / 2 / SEGMENT; i++)
                fill(&b, SEGMENT);
        ck_assert_uint_eq(usage_of(a.space).total, POOL / 2);
        /* b has replaced all its blocks: now those of a are colder, or will be soon */
        for (uint32_t i = 0; i < 4; i++)
                fill(&b, SEGMENT);
        ck_assert_uint_lt(usage_of(a.space).total, POOL / 2);
}
END_TEST

/* A block in use holds its whole segment. The figure for the others is right. */
START_TEST(what_is_in_use_is_not_counted_and_not_taken) {
        struct user old = open_user("old"), new = open_user("new");
        kvd_ref blocks[POOL];

        fill(&old, POOL);
        pin(&old, 5, 1);
        pin(&old, 5 * SEGMENT, 1);
        look();
        ck_assert_uint_eq(available(&new), POOL - 2 * SEGMENT);
        ck_assert_uint_eq(ask_for(&new, POOL, POOL, blocks), POOL - 2 * SEGMENT);
        ck_assert_int_eq(space_allocate(new.a, 1, blocks), -ENOBUFS);
        ck_assert_ptr_nonnull(strstr(store_why(store), "old"));
        pin(&old, 5, -1);
        ck_assert_uint_eq(ask_for(&new, SEGMENT, POOL, blocks), SEGMENT);
        pin(&old, 5 * SEGMENT, -1);
}
END_TEST

/* ---- costs of spaces other than the pool ----------------------------------------------------- */

/* Opens a space, and retries as long as room is being made. */
static int open_space(const char *name, struct space **ret) {
        struct space_spec spec = {.geometry = space_index(store_next_space(store, 0))->geometry};
        bool created;
        int r;

        snprintf(spec.name, sizeof spec.name, "%s", name);
        do {
                r = space_open(domain, &spec, true, ret, &created);
                if (r < 0)
                        r = store_make_way(domain, NULL, r);
        } while (r == -EINPROGRESS && store_idle(store) + 1);
        return r;
}

static struct space *named(const char *name) {
        return space_by_name(domain, name);
}

/* Sets the limit of a cost so that the domain can have exactly n spaces of equal cost. */
static void leave_room_for(uint32_t n, enum kvd_cost cost) {
        uint64_t each = store_next_space(store, 0)->account.used[cost];

        store->account.limit[cost] = (n * each + each / 2) * 16 / 15;
        account_shares_changed(store);
}

static const enum kvd_cost costs[] = {KVD_COST_overhead, KVD_COST_files, KVD_COST_spaces};

/* The newest spaces stay, and the one that has a client. */
START_TEST(the_oldest_space_without_clients_makes_way) {
        struct space *space = fixture_space("used", 0);
        struct attachment *a = fixture_attach(space);
        uint32_t n = 0;

        leave_room_for(4, costs[_i]);
        for (char name[] = "a"; name[0] <= 'p'; name[0]++)
                ck_assert_msg(open_space(name, &space) == 0, "%s", store_why(store));
        ck_assert_ptr_nonnull(named("used"));
        for (char name[] = "a"; name[0] <= 'p'; name[0]++) {
                ck_assert(!n || named(name));
                n += named(name) != NULL;
        }
        ck_assert_uint_ge(n, 2);
        ck_assert_uint_le(n, 7);
        attachment_free(a, false);
}
END_TEST

START_TEST(spaces_with_clients_stay_and_the_refusal_is_said) {
        struct space *space = fixture_space("first", 0);
        int r = 0;

        leave_room_for(4, costs[_i]);
        fixture_attach(space);
        for (char name[] = "a"; r == 0; name[0]++) {
                r = open_space(name, &space);
                if (r == 0)
                        r = attachment_new(space, NULL, 3, NULL, &(struct attachment *){NULL});
        }
        ck_assert_int_eq(r, -EDQUOT);
        ck_assert_ptr_nonnull(strstr(store_why(store), "is at its limit"));
        ck_assert_uint_ge(domain_spaces(domain), 2);
}
END_TEST

/* No space is deleted for a new one that would not fit even then. */
START_TEST(nothing_makes_way_in_vain) {
        struct space *a = fixture_space("a", 0), *space;

        leave_room_for(1, KVD_COST_overhead);
        store->account.limit[KVD_COST_overhead] /= 3;
        ck_assert_int_eq(open_space("b", &space), -EDQUOT);
        ck_assert_ptr_eq(named("a"), a);
}
END_TEST

START_TEST(other_domains_keep_what_they_are_guaranteed) {
        struct domain *own = domain, *others[2];
        struct space *space = fixture_space("a", 0);

        for (uint64_t i = 0; i < 2; i++) {
                struct domain_config c = {.name = {'x', (char)('0' + i)},
                                          .client_quota = UINT64_MAX,
                                          .guarantee = i * POOL / 2 * BLOCK_BYTES};

                ck_assert_int_eq(store_domain(store, &c, &others[i]), 0);
                domain = others[i];
                space = fixture_space("other", 0);
        }
        leave_room_for(3, KVD_COST_spaces);
        domain = own;
        fixture_attach(space_by_name(own, "a"));
        ck_assert_int_eq(open_space("b", &space), 0);
        fixture_attach(space);
        ck_assert_ptr_null(space_by_name(others[0], "other"));
        ck_assert_ptr_nonnull(space_by_name(others[1], "other"));
        ck_assert_int_lt(open_space("c", &space), 0);
        ck_assert_ptr_nonnull(space_by_name(others[1], "other"));
}
END_TEST

/* ---- any set-up ------------------------------------------------------------------------------ */

#define DOMAINS 3u
#define USERS 7u

struct world {
        struct domain *domains[DOMAINS];
        struct user users[USERS];
        struct random random;
};

static uint32_t any(struct world *w, uint32_t n) {
        return random_below(&w->random, n);
}

static void open_world(struct world *w) {
        uint32_t left = POOL;

        fixture_open(POOL, 0);
        for (uint32_t i = 0; i < DOMAINS; i++) {
                uint32_t guarantee = any(w, 2) ? any(w, left / 2 + 1) : 0;
                struct domain_config c = {.client_quota = UINT64_MAX,
                                          .guarantee = guarantee * BLOCK_BYTES};

                if (any(w, 2))
                        c.quota = (guarantee + SEGMENT + any(w, POOL)) * BLOCK_BYTES;
                snprintf(c.name, sizeof c.name, "domain%u", i);
                left -= guarantee;
                ck_assert_int_eq(store_domain(store, &c, &w->domains[i]), 0);
        }
        for (uint32_t i = 0; i < USERS; i++) {
                char name[16];

                domain = w->domains[any(w, DOMAINS)];
                snprintf(name, sizeof name, "space%u", i);
                w->users[i] = open_user(name);
        }
}

/* Is the block pinned, or any descendant? Examines all of them. */
static bool is_held(const struct space *space, uint32_t id) {
        if (block_pinned(space, id, NULL))
                return true;
        for (uint32_t c = space->blocks[id].child; c != NONE; c = space->blocks[c].sib_next)
                if (is_held(space, c))
                        return true;
        return false;
}

static bool can_be_had(const struct space *space, uint32_t id) {
        enum kvd_state state = space->blocks[id].state;

        return state == KVD_FREE || (state == KVD_SEALED && !is_held(space, id));
}

/* Bytes of the space's segments that have only free or evictable blocks. */
static uint64_t unused_bytes(const struct space *space) {
        uint64_t n = 0;

        for (uint32_t i = 0; i < space->ix->max_segments; i++) {
                uint32_t first = kvd_segment_first(space->ix, i), ready = 0;

                while (ready < space->memory.segments[i].n_ready &&
                       can_be_had(space, first + ready))
                        ready++;
                n += ready && ready == space->memory.segments[i].n_ready;
        }
        return n * space->ix->segment_bytes;
}

/* Bytes that others could give to the space, above their guarantees and within its quota. */
static uint64_t bytes_of_others(const struct world *w, const struct user *u) {
        const struct domain *own = u->space->domain;
        uint64_t of_domain[DOMAINS] = {0}, foreign = 0, same = 0;
        uint64_t most = domain_most(own, KVD_COST_pool), used = domain_used(own, KVD_COST_pool);

        for (uint32_t i = 0; i < USERS; i++)
                for (uint32_t d = 0; d < DOMAINS; d++)
                        if (&w->users[i] != u && w->users[i].space->domain == w->domains[d])
                                of_domain[d] += unused_bytes(w->users[i].space);
        for (uint32_t d = 0; d < DOMAINS; d++) {
                uint64_t above = less(domain_used(w->domains[d], KVD_COST_pool),
                                      domain_guaranteed(w->domains[d], KVD_COST_pool));
                uint64_t segment = u->space->ix->segment_bytes;

                if (w->domains[d] == own)
                        same = less(of_domain[d], less(used, most));
                else
                        foreign += MIN(of_domain[d], above) / segment * segment;
        }
        return same + MIN(foreign, less(less(most, used),
                                        segments_to_come(u->space) * u->space->ix->segment_bytes));
}

/* The number of blocks that a client can get. Examines everything. */
static uint32_t can_have(const struct world *w, const struct user *u) {
        const struct space *space = u->space;
        uint64_t own = 0, more, bytes = less(bytes_of_others(w, u), account_over(space->domain));

        for (uint32_t id = 0; id < space_ids(space); id++)
                own += can_be_had(space, id);
        more = (segments_to_come(space) + bytes / space->ix->segment_bytes +
                space->memory.n_with_memory) *
                       space->ix->segment_blocks -
               blocks_with_memory(space);
        return (uint32_t)(own + MIN(more, space->memory.max_blocks - blocks_with_memory(space)));
}

static void change_something(struct world *w) {
        struct user *u = &w->users[any(w, USERS)];
        uint32_t n = 1 + any(w, POOL / 8), ids = space_ids(u->space);
        kvd_ref blocks[POOL];

        if (!u->a)
                u->a = fixture_attach(u->space);
        switch (any(w, 8)) {
        case 0: leave(u); break;
        case 1:
        case 2:
                for (uint32_t i = 0; ids && i < n / 8 + 1; i++) {
                        uint32_t id = any(w, ids);

                        if (u->space->blocks[id].state == KVD_SEALED)
                                pin(u, id, atomic_load(&u->a->words[id].pins) ? -1 : 1);
                }
                break;
        default:
                n = ask_for(u, n, POOL, blocks);
                if (any(w, 4))
                        seal(u, blocks, n, 1 + any(w, 8));
                else
                        space_release(u->a, blocks, n);
        }
        if (any(w, 2))
                look();
}

#define CALLS (4 * POOL / SEGMENT + 8) /* calls for one allocation, at most: several per segment */

static void try_to_have_all(struct world *w, struct user *u, uint32_t round) {
        kvd_ref blocks[POOL];
        uint32_t n, told, got;

        look();
        n = can_have(w, u);
        has_time = any(w, 2);
        told = available(u);
        ck_assert_msg(told == n, "seed %u: it is told of %u blocks, and can have %u", round, told,
                      n);
        got = ask_for(u, n, CALLS, blocks);
        ck_assert_msg(got == n, "seed %u: it can have %u blocks, and gets %u: %s", round, n, got,
                      store_why(store));
        ck_assert_int_le(space_allocate(u->a, 1, blocks + got), 0);
        space_release(u->a, blocks, got);
}

START_TEST(whatever_can_be_had_is_got) {
        for (uint32_t round = 0; round < AMOUNT(2000, 60); round++) {
                struct world w = {.random = {round + 1}};

                open_world(&w);
                for (uint32_t i = 0; i < 60; i++) {
                        struct user *u = &w.users[any(&w, USERS)];

                        change_something(&w);
                        if (u->a && any(&w, 3) == 0)
                                try_to_have_all(&w, u, round);
                }
                tear_down();
        }
}
END_TEST

SUITE("share", TESTS(whatever_can_be_had_is_got), CASE("set-ups"), FIXTURE(set_up, tear_down),
      TESTS(a_space_without_clients_gives_all_that_it_has,
            sixteen_small_idle_spaces_give_to_the_next_one,
            what_was_not_used_for_longest_goes_first,
            colder_blocks_of_ones_own_go_before_those_of_others,
            what_is_in_use_is_not_counted_and_not_taken, nothing_makes_way_in_vain,
            other_domains_keep_what_they_are_guaranteed),
      LOOPS(ARRAY_SIZE(costs), the_oldest_space_without_clients_makes_way,
            spaces_with_clients_stay_and_the_refusal_is_said))
