/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The block table of one request. An entry whose block the sequence filled, or whose block arrived
 * later, holds a pin on it in the pin page. Borrowed blocks are held by the caller's kvd_pin. A
 * block is pinned before the request that makes it private, so the daemon can never evict it.
 */

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "client/gpu/gpu_view.h"
#include "ipc/base/sys.h"

#define PIECE_TOKENS 8192u
#define PIECE_BLOCKS 2048u

/* ---- requests -------------------------------------------------------------------------------- */

int sequence_ask(struct kvd_sequence *s, uint32_t number, const void *request, void *reply,
                 void (*take)(const void *reply, void *to), void *to) {
        struct kvd *handle = s->space->handle;
        struct view *now;
        int r;

        if (forked(handle))
                return space_check(s->space);
        r = handle_lock(handle);
        if (r < 0)
                return r;
        r = s->lost ? -ESTALE : view_attach(s->space, &now);
        if (r == -ESTALE || (r == 0 && now != s->view)) {
                s->lost = true;
                r = client_fail(-ESTALE,
                                "the sequence belongs to a daemon that is gone; open a new one");
        } else if (r == 0) {
                r = handle_call(handle, number, request, reply, NULL);
                s->lost = r < 0 && conn_in_doubt(handle->conn);
        }
        if (r == 0 && take)
                take(reply, to);
        handle_unlock(handle);
        return r;
}

int sequence_call(struct kvd_sequence *s, uint32_t number, const void *request, void *reply,
                  void (*take)(const void *reply, void *to), void *to) {
        deadline_begin();
        return sequence_ask(s, number, request, reply, take, to);
}

/* ---- life ------------------------------------------------------------------------------------ */

static void free_memory(struct kvd_sequence *s) {
        if (s->summaries)
                munmap(s->summaries, s->summary_bytes);
        free(s->entries);
        free(s);
}

static int check_open(const struct kvd_space *space, uint32_t max_blocks) {
        int r = check_memory(space);

        if (r < 0)
                return r;
        if (space->options.kind == KVD_BIDIRECTIONAL)
                return client_fail(-EINVAL, "sequences are for causal spaces");
        if (max_blocks == 0)
                return client_fail(-EINVAL, "a sequence of 0 blocks");
        return 0;
}

static int open_at_daemon(struct kvd_sequence *s) {
        struct kvd_msg_table request = {.op = 1, .max_blocks = s->max_blocks};
        struct kvd_msg_table_reply reply;
        struct kvd *handle = s->space->handle;
        struct view *view;
        int r;

        r = handle_lock(handle);
        if (r < 0)
                return r;
        r = view_attach(s->space, &view);
        if (r == 0) {
                request.space = view->handle;
                r = handle_call(handle, KVD_MSG_table, &request, &reply, NULL);
        }
        if (r == 0) {
                s->number = reply.sequence;
                s->view = view;
                atomic_fetch_add(&view->refs, 1);
        }
        handle_unlock(handle);
        return r;
}

int kvd_sequence_open(struct kvd_space *space, uint32_t max_blocks, struct kvd_sequence **ret) {
        struct kvd_sequence *s;
        int r = check_open(space, max_blocks);

        if (r < 0)
                return r;
        s = sys->calloc(1, sizeof *s);
        if (!s)
                return client_fail(-ENOMEM, "out of memory");
        *s = (struct kvd_sequence){.space = space, .max_blocks = max_blocks};
        s->entries = sys->calloc(max_blocks, sizeof *s->entries);
        r = s->entries ? open_at_daemon(s) :
                         client_fail(-ENOMEM, "out of memory for a table of %u blocks", max_blocks);
        if (r < 0) {
                free_memory(s);
                return r;
        }
        *ret = s;
        return 0;
}

static bool is_pinned_by_us(const struct kvd_entry *entry) {
        return entry->data && !(entry->flags & KVD_ENTRY_BORROWED);
}

struct kvd_sequence *kvd_sequence_close(struct kvd_sequence *s) {
        struct kvd_msg_table request = {.op = 2};

        if (!s)
                return NULL;
        if (forked(s->space->handle)) {
                s->summaries = NULL; /* not mapped in a child */
                free_memory(s);
                return NULL;
        }
        for (uint32_t i = 0; i < s->n; i++)
                if (is_pinned_by_us(&s->entries[i]))
                        unpin_block(s->view, s->entries[i].block);
        pins_moved(s->view);
        request.space = s->view->handle;
        request.sequence = s->number;
        deadline_begin();
        if (view_is_current(s->view) &&
            sequence_ask(s, KVD_MSG_table, &request, NULL, NULL, NULL) == -ETIMEDOUT && !s->lost)
                later_close(s->view, s->number); /* the request was not sent */
        view_put(s->view);
        free_memory(s);
        return NULL;
}

const struct kvd_entry *kvd_sequence_entries(const struct kvd_sequence *s, uint32_t *n) {
        *n = s->n;
        return s->entries;
}

/* ---- growing --------------------------------------------------------------------------------- */

/* The entry at which the daemon put the blocks. If it is not our next one, the tables differ. */
static void take_first(const void *reply, void *to) {
        *(uint32_t *)to = ((const struct kvd_msg_append_reply *)reply)->first;
}

static int append(struct kvd_sequence *s, bool own, const kvd_ref *refs, uint32_t n,
                  const uint32_t *tokens, uint32_t n_tokens) {
        struct kvd_msg_append request = {
                .space = s->view->handle,
                .sequence = s->number,
                .own = own,
                .blocks = {refs, n * (uint32_t)sizeof *refs},
                .tokens = {tokens, n_tokens * (uint32_t)sizeof *tokens},
        };
        struct kvd_msg_append_reply reply;
        uint32_t first = UINT32_MAX;
        int r = sequence_ask(s, KVD_MSG_append, &request, &reply, take_first, &first);

        if (r == 0 && first != s->n) {
                s->lost = true;
                r = client_fail(-EPROTO, "the daemon put blocks at entry %u instead of %u", first,
                                s->n);
        }
        return r;
}

static void add_entry(struct kvd_sequence *s, kvd_ref ref, uint32_t n_tokens, uint32_t flags) {
        uint32_t id = kvd_ref_id(ref);

        s->entries[s->n++] = (struct kvd_entry){
                .data = s->view->sealed + (uint64_t)id * s->view->ix->block_bytes,
                .block = id,
                .generation = kvd_ref_generation(ref),
                .position = s->n_tokens,
                .n_tokens = n_tokens,
                .flags = flags,
                .row = id,
                .row_generation = kvd_ref_generation(ref),
        };
        if (flags & KVD_ENTRY_OWN)
                use_begin(s, id, (struct kvd_use){0});
        s->n_tokens += n_tokens;
}

static int check_room(const struct kvd_sequence *s, uint32_t n, uint32_t n_tokens) {
        uint32_t bt = s->space->geometry.block_tokens;

        if (space_check(s->space) < 0)
                return -ECHILD;
        if (n == 0 || DIV_UP((uint64_t)n_tokens, bt) != n)
                return client_fail(-EINVAL, "%u tokens do not fit %u blocks of %u", n_tokens, n,
                                   bt);
        if (n > s->max_blocks - s->n)
                return client_fail(
                        -ENOSPC,
                        "the sequence was opened for %u blocks and has %u; %u more do not fit",
                        s->max_blocks, s->n, n);
        return 0;
}

static kvd_ref ref_now(const struct kvd_index *ix, uint32_t id) {
        return kvd_ref_make(id, kvd_slot_generation(shm_load(&kvd_index_desc(ix, id)->slot)));
}

static int borrow_piece(struct kvd_sequence *s, uint32_t n, const uint32_t *ids,
                        const uint32_t *tokens) {
        uint32_t bt = s->space->geometry.block_tokens;
        kvd_ref refs[PIECE_BLOCKS];
        int r;

        for (uint32_t i = 0; i < n; i++)
                refs[i] = ref_now(s->view->ix, ids[i]);
        r = append(s, false, refs, n, tokens, n * bt);
        for (uint32_t i = 0; r == 0 && i < n; i++)
                add_entry(s, refs[i], bt, KVD_ENTRY_BORROWED);
        return r;
}

int kvd_sequence_borrow(struct kvd_sequence *s, const struct kvd_pin *pin, uint32_t n,
                        const uint32_t *ids, const uint32_t *tokens) {
        uint32_t bt = s->space->geometry.block_tokens,
                 most = MIN(PIECE_BLOCKS, MAX(PIECE_TOKENS / bt, 1)), k;
        int r = check_room(s, n, n * bt);

        deadline_begin();
        if (r == 0 && pin->view != s->view)
                r = client_fail(-ESTALE,
                                "the pin holds nothing, or blocks of another space or daemon");
        for (uint32_t i = 0; r == 0 && i < n; i++)
                if (ids[i] >= s->view->ix->capacity)
                        r = client_fail(-EINVAL, "there is no block %u", ids[i]);
        for (uint32_t i = 0; r == 0 && i < n; i += k) {
                k = MIN(most, n - i);
                r = borrow_piece(s, k, ids + i, tokens + (size_t)i * bt);
        }
        return r;
}

/* From now on the sequence's pins hold the blocks, and its reference holds the view. */
static void consume(struct kvd_sequence *s, const kvd_ref *refs, uint32_t n,
                    struct kvd_block *blocks, uint32_t n_tokens) {
        uint32_t bt = s->space->geometry.block_tokens;

        for (uint32_t i = 0; i < n; i++) {
                add_entry(s, refs[i], MIN(bt, n_tokens - i * bt), KVD_ENTRY_OWN);
                blocks[i] = (struct kvd_block){0};
                view_put(s->view);
        }
        count(s->space, COUNT_SEALED, n);
}

static int append_piece(struct kvd_sequence *s, uint32_t n, struct kvd_block *blocks,
                        const uint32_t *tokens, uint32_t n_tokens) {
        kvd_ref refs[PIECE_BLOCKS];
        int r;

        for (uint32_t i = 0; i < n; i++) {
                refs[i] = kvd_ref_make(blocks[i].id, blocks[i].generation);
                count_pin(s->view, blocks[i].id);
        }
        r = append(s, true, refs, n, tokens, n_tokens);
        pins_moved(s->view);
        if (r == 0) {
                consume(s, refs, n, blocks, n_tokens);
                return 0;
        }
        for (uint32_t i = 0; i < n; i++) {
                unpin_block(s->view, blocks[i].id);
                if (s->lost && r != -ESTALE)   /* of which nothing was sent */
                        blocks[i].data = NULL; /* perhaps private by now: it can only be freed */
        }
        return r;
}

static int check_blocks(const struct kvd_sequence *s, uint32_t n, const struct kvd_block *blocks) {
        for (uint32_t i = 0; i < n; i++)
                if (!blocks[i].data || blocks[i].view != s->view)
                        return client_fail(
                                -ESTALE,
                                "a block is not allocated, or belongs to a daemon that is gone");
        return 0;
}

int kvd_sequence_append(struct kvd_sequence *s, uint32_t n, struct kvd_block *blocks,
                        const uint32_t *tokens, uint32_t n_tokens) {
        uint32_t bt = s->space->geometry.block_tokens,
                 most = MIN(PIECE_BLOCKS, MAX(PIECE_TOKENS / bt, 1)), k;
        int r = check_room(s, n, n_tokens);

        deadline_begin();
        if (r == 0)
                r = check_blocks(s, n, blocks);
        for (uint32_t i = 0; r == 0 && i < n; i += k) {
                k = MIN(most, n - i);
                r = append_piece(s, k, blocks + i, tokens + (size_t)i * bt,
                                 MIN(n_tokens - i * bt, k * bt));
                if (r < 0 && i > 0)
                        return (int)i;
        }
        return r < 0 ? r : (int)n;
}
