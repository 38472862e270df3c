/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include "daemon/log.h"
#include "daemon/work_internal.h"

/* ---- what there is to do ----------------------------------------------------------------------------------------- */

static void finish_job(struct work *w, int error, struct kvd_slice result) {
        w->has_job = false;
        if (result.size)
                memcpy(w->result, result.data, result.size);
        store_job_done(w->store, w->job.id, error, w->result, result.size);
        loop_want_idle(w->loop); /* relief goes on, and what nobody holds any more is freed */
}

/* True: asked. */
static bool forget_one(struct work *w) {
        struct kvd_msg msg = {.number = KVD_MSG_work_forget};
        struct known *k = w->known;

        while (k && work_find_space(w, k->number))
                k = k->next;
        if (!k)
                return false;
        msg.work_forget.space = k->number;
        work_forget_known(w, k->number);
        if (work_ask(w, &msg, NULL) < 0)
                work_end(w, "takes no messages");
        return true;
}

/* GPU memory that nobody else has mapped any more. True: asked. */
static bool unmap_one(struct work *w) {
        struct kvd_msg msg = {.number = KVD_MSG_work_unmap};
        struct known *k = NULL;
        struct space *space;
        uint32_t segment;

        while (!k && store_next_unmap(w->store, &space, &segment)) {
                k = work_find_known(w, space_number(space));
                if (!k) /* it was told to forget the space, or is another worker */
                        space_worker_unmapped(space, segment);
        }
        if (!k)
                return false;
        k->turns[segment] = 0;
        w->unmapping[0] = msg.work_unmap.space = k->number;
        w->unmapping[1] = msg.work_unmap.segment = segment;
        if (work_ask(w, &msg, NULL) < 0)
                work_end(w, "takes no messages");
        return true;
}

static void unmapped(struct work *w) {
        struct space *space = work_find_space(w, w->unmapping[0]);

        if (space)
                space_worker_unmapped(space, w->unmapping[1]);
}

/* True: asked. */
static bool clear_some(struct work *w) {
        struct kvd_msg msg = {.number = KVD_MSG_work_clear};
        struct kvd_fds fds = {.n = 0};

        fds.n = store_next_clear(w->store, fds.fd, &msg.work_clear.bytes);
        if (!fds.n)
                return false;
        msg.work_clear.count = fds.n;
        msg.work_clear.device = (struct kvd_slice){store_device(w->store), 16};
        if (work_ask(w, &msg, &fds) < 0)
                work_end(w, "takes no messages");
        return true;
}

static void cleared(struct work *w) {
        w->clear_failures = 0;
        w->backoff_ns = 0;
        store_clear_done(w->store, true);
        loop_want_idle(w->loop);
}

/* It has no context, or no memory of its own: somebody tries again later (store_make_missing). */
static void not_cleared(struct work *w, const struct kvd_msg_error *error) {
        w->clear_failures++;
        kvd_slice_copy(error->text, w->clear_why, sizeof w->clear_why);
        log_limited(LOG_WARNING, "worker %d cannot clear GPU memory: %s", w->pid, w->clear_why);
        store_clear_failed(w->store);
}

/* True: asked. */
static bool wake_some(struct work *w) {
        struct kvd_msg msg = {.number = KVD_MSG_work_wake};
        struct store_wake wake;
        struct kvd_fds fds;

        if (!store_next_wake(w->store, &wake))
                return false;
        fds.fd[0] = wake.fd;
        fds.n = 1;
        msg.work_wake.device = (struct kvd_slice){wake.device, sizeof wake.device};
        msg.work_wake.bytes = wake.bytes;
        msg.work_wake.words = (struct kvd_slice){wake.words, 2 * wake.n * (uint32_t)sizeof *wake.words};
        if (work_ask(w, &msg, &fds) < 0)
                work_end(w, "takes no messages");
        return true;
}

/* Where a stream cannot, the store's own write has to do. */
static void woken(struct work *w, const struct kvd_msg *m) {
        char why[160];

        if (m->number == KVD_MSG_error)
                log_limited(LOG_WARNING, "worker %d cannot wake streams that wait for a dead client: %s", w->pid,
                            kvd_slice_copy(m->error.text, why, sizeof why));
        store_wake_done(w->store, true);
        loop_want_idle(w->loop);
}

bool work_forgetting(const struct work *w) {
        struct known *k = w->known;

        while (k && work_find_space(w, k->number))
                k = k->next;
        return k || w->asked == KVD_MSG_work_forget;
}

static bool take_job(struct work *w) {
        if (!w->has_job) {
                w->has_job = store_next_job(w->store, w->arguments, &w->job);
                if (w->has_job)
                        w->job_space = space_number(w->job.space);
        }
        return w->has_job;
}

/* Asks the next question; a job that nothing can be asked about has failed. */
void work_go_on(struct work *w) {
        while (!w->asked && w->socket.loop && !forget_one(w) && !unmap_one(w) && !wake_some(w) && !clear_some(w) &&
               take_job(w)) {
                struct space *space = work_find_space(w, w->job_space);
                int r = space ? work_tell_next(w, space) : -ESTALE;

                if (r == -EPIPE || r == -ECONNRESET || r == -EAGAIN) {
                        work_end(w, "takes no messages");
                        return;
                }
                if (r < 0)
                        finish_job(w, -r, (struct kvd_slice){0});
        }
}

/* ---- answers ----------------------------------------------------------------------------------------------------- */

/* What a job needs cannot be had: the job fails, and the next one tries from the beginning. */
static void cannot_map(struct work *w, uint32_t asked, const struct kvd_msg *m) {
        log_limited(LOG_WARNING, "worker %d has no room for a job: %.*s", w->pid, (int)m->error.text.size,
                    (const char *)m->error.text.data);
        if (asked == KVD_MSG_work_sketch)
                w->sketch_space = w->sketch = 0;
        if (asked == KVD_MSG_work_space || asked == KVD_MSG_work_segments)
                work_forget_known(w, w->job_space);
        if (w->has_job)
                finish_job(w, (int)m->error.code ?: EIO, (struct kvd_slice){0});
}

static void take_answer(struct work *w, const struct kvd_msg *m) {
        uint32_t asked = w->asked;

        w->asked = 0;
        loop_timer_stop(&w->deadline);
        if (m->number == KVD_MSG_error && asked == KVD_MSG_work_clear)
                not_cleared(w, &m->error);
        else if (asked == KVD_MSG_work_wake)
                woken(w, m);
        else if (m->number == KVD_MSG_error)
                cannot_map(w, asked, m);
        else if (asked == KVD_MSG_work_clear)
                cleared(w);
        else if (asked == KVD_MSG_work_unmap)
                unmapped(w);
        if (m->number == KVD_MSG_error || asked != KVD_MSG_work)
                return;
        w->done++;
        w->backoff_ns = 0;
        finish_job(w, (int)m->work_reply.error, m->work_reply.result);
}

static bool is_answer(const struct work *w, const struct kvd_msg *m) {
        if (!w->asked || m->serial != w->serial)
                return false;
        if (m->number == KVD_MSG_error)
                return true;
        return m->number == w->asked + KVD_REPLY && (w->asked != KVD_MSG_work || m->work_reply.id == w->job.id);
}

void work_answer_came(struct loop_source *source, short revents) {
        struct work *w = container_of(source, struct work, socket);
        ssize_t n = kvd_frame_receive(source->fd, w->frame, NULL, MSG_DONTWAIT);
        struct kvd_msg answer = {0};

        if (n == -EAGAIN)
                return;
        if (n <= 0) {
                work_end(w, "closed its connection");
                return;
        }
        if (kvd_msg_decode(w->decoder, w->frame, (size_t)n, &answer) < 0 || !is_answer(w, &answer)) {
                work_end(w, "sent what is no answer");
                return;
        }
        take_answer(w, &answer);
        work_go_on(w);
}
