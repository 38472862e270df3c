/* SPDX-License-Identifier: Apache-2.0 */

/*
 * While a space is followed, its clients note their lookups in their own pages (client/cache/asked.c).
 * This file reads those pages. A client can write anything there, so notes are shown but not
 * trusted.
 */

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "ipc/base/shared_file.h"
#include "tools/kvctl/follow.h"

struct page {
        ino_t inode;                  /* unique while the page is mapped */
        const struct kvd_pinpage *at; /* owned mapping */
        const shm_u64 *words;         /* inside it */
        uint64_t bytes;
        uint64_t seen, not_noted; /* last values of the page's asked and not_noted */
        uint32_t client;
        bool found, gone;
};

struct pages {
        struct kvctl *kvctl;
        struct space_name name;
        const struct kvd_index *ix; /* of the space, during pages_find */
        bool begun;                 /* the initial clients are known */
        struct page *at;            /* owned */
        size_t n;
        uint64_t words[KVD_ASKED_WORDS];
};

/* ---- finding pages --------------------------------------------------------------------------- */

static void forget(struct pages *p, size_t i) {
        munmap((void *)p->at[i].at, p->at[i].bytes);
        p->at[i] = p->at[--p->n];
}

/* A known page is marked as found. */
static bool is_new(struct pages *p, ino_t inode) {
        for (size_t i = 0; i < p->n; i++)
                if (p->at[i].inode == inode) {
                        p->at[i].found = true;
                        return false;
                }
        return true;
}

/* Notes from before the beginning are skipped; pages of later clients are read from the start. */
static int add(struct pages *p, ino_t inode, int fd, const struct kvd_msg_follow_reply *reply) {
        struct page *grown = realloc(p->at, (p->n + 1) * sizeof *grown), *page;
        void *at;
        int r;

        if (!grown)
                return kvctl_out_of_memory(p->kvctl);
        p->at = grown;
        if (reply->bytes != kvd_pinpage_bytes(p->ix))
                return kvctl_fail(p->kvctl, KVCTL_NO, -EPROTO, "a client's page has another size");
        r = shared_file_map(fd, reply->bytes, PROT_READ, &at);
        if (r < 0)
                return kvctl_fail(p->kvctl, KVCTL_NO, r, "a client's page cannot be mapped: %s",
                                  strerror(-r));
        page = &p->at[p->n++];
        *page = (struct page){.inode = inode,
                              .at = at,
                              .words = (void *)((uint8_t *)at + kvd_asked_off(p->ix->capacity)),
                              .bytes = reply->bytes,
                              .client = reply->client,
                              .found = true};
        if (!p->begun) {
                page->seen = shm_load(&page->at->asked);
                page->not_noted = shm_load(&page->at->not_noted);
        }
        return 0;
}

/* 1: there was another page; 0: no more. */
static int find_next(struct pages *p, uint32_t *cursor) {
        struct kvd_msg_follow request = {.space = kvd_slice_of(p->name.name),
                                         .domain = kvd_slice_of(p->name.domain),
                                         .cursor = *cursor};
        struct kvd_msg_follow_reply reply;
        struct kvd_fds fds = {.n = 0};
        struct stat st;
        int r = kvctl_call_fds(p->kvctl, KVD_MSG_follow, &request, &reply, &fds);

        if (r == 0 && (fds.n != 1 || fstat(fds.fd[0], &st) < 0))
                r = kvctl_fail(p->kvctl, KVCTL_NO, -EPROTO, "no page came");
        if (r == 0) {
                *cursor = reply.next;
                r = is_new(p, st.st_ino) ? add(p, st.st_ino, fds.fd[0], &reply) : 0;
                r = r < 0 ? r : 1;
        }
        kvd_fds_close(&fds);
        return r == -ENOENT ? 0 : r;
}

/* A client that left may have noted something before, so its page is kept for one more round. */
static void forget_gone(struct pages *p) {
        for (size_t i = p->n; i-- > 0;) {
                bool gone = p->at[i].gone;

                p->at[i].gone = !p->at[i].found;
                if (gone)
                        forget(p, i);
        }
}

int pages_find(struct pages *p, const struct kvd_index *ix) {
        uint32_t cursor = 1;
        int r = 0;

        for (size_t i = 0; i < p->n; i++)
                p->at[i].found = false;
        p->ix = ix;
        while (ix && (r = find_next(p, &cursor)) == 1)
                ;
        forget_gone(p);
        p->begun = true;
        return r < 0 && p->kvctl->exit == KVCTL_NO_DAEMON ? 0 : r;
}

/* ---- reading pages --------------------------------------------------------------------------- */

/* Copies new words to p->words and returns their number. 0: none, or some were overwritten. */
static size_t read_words(struct pages *p, struct page *page, bool *missed) {
        shm_u64 *words = (shm_u64 *)page->words;
        uint64_t end = shm_load(&page->at->asked), from = page->seen, n = end - from;

        page->seen = end;
        *missed = n > KVD_ASKED_WORDS;
        for (uint64_t i = 0; i < n && !*missed; i++)
                p->words[i] = atomic_load_explicit(&words[(from + i) % KVD_ASKED_WORDS],
                                                   memory_order_relaxed);
        if (shm_load_again(&page->at->asked_begun) > from + KVD_ASKED_WORDS)
                *missed = true;
        return *missed ? 0 : (size_t)n;
}

static void read_page(struct pages *p, struct page *page, const struct asked_ops *ops, void *arg) {
        uint64_t not_noted = shm_load(&page->at->not_noted);
        bool missed;
        size_t n = read_words(p, page, &missed), at = 0;

        while (n - at >= KVD_ASKED_HEAD) {
                const struct kvd_asked *note = (const void *)&p->words[at];

                if (note->n_keys > MIN(n - at - KVD_ASKED_HEAD, KVD_ASKED_KEYS))
                        break;
                ops->asked(arg, page->client, note);
                at += KVD_ASKED_HEAD + note->n_keys;
        }
        if (missed || at < n || not_noted != page->not_noted)
                ops->missed(arg, page->client);
        page->not_noted = not_noted;
}

void pages_read(struct pages *p, const struct asked_ops *ops, void *arg) {
        for (size_t i = 0; i < p->n; i++)
                read_page(p, &p->at[i], ops, arg);
}

/* ---- life ------------------------------------------------------------------------------------ */

struct pages *pages_new(struct kvctl *kvctl, const struct space_name *space) {
        struct pages *p = calloc(1, sizeof *p);

        if (!p)
                return NULL;
        p->kvctl = kvctl;
        p->name = *space;
        return p;
}

struct pages *pages_free(struct pages *p) {
        if (!p)
                return NULL;
        while (p->n)
                forget(p, p->n - 1);
        free(p->at);
        free(p);
        return NULL;
}

void pages_freep(struct pages **p) {
        pages_free(*p);
}
