/* SPDX-License-Identifier: Apache-2.0 */

/* Judges the superblocks of the file, which its callers have read. Nothing here reads or writes. */

#include "store/file/head.h"

#include <errno.h>
#include <string.h>

#include "ipc/base/sys.h"

#define refuse(head, error, ...) kvd_refuse(&(head)->why, error, __VA_ARGS__)

#define EXTENT_BYTES (UINT64_C(64) << 20)
#define EXTENT_LEAST (UINT64_C(1) << 20)
#define EXTENTS_FEW 16u /* a small file has smaller extents, but about this many */

/* ---- what is there --------------------------------------------------------------------------- */

void head_begin(struct head *head, uint64_t bytes) {
        *head = (struct head){.bytes = bytes};
}

static bool all_zero(const void *sector) {
        const uint8_t *at = sector;

        return !at[0] && memcmp(at, at + 1, DISK_SECTOR - 1) == 0;
}

struct copies { /* what the copies of the superblock include */
        bool resized, other;
};

static void judge_copy(struct head *head, const struct file_super *s, struct copies *seen) {
        if (all_zero(s))
                return;
        if (s->mark.magic != FILE_MAGIC || s->mark.version != FILE_VERSION) {
                seen->other = true;
        } else if (!file_super_makes_sense(s)) {
                head->ours = true;
        } else if (s->bytes != head->bytes) {
                seen->resized = true;
        } else {
                if (!head->whole || s->serial > head->found.serial)
                        memcpy(&head->found, s, sizeof *s);
                head->whole = true;
        }
}

static void judge_copies(struct head *head, const void *copies) {
        struct copies seen = {0};

        head->whole = head->ours = false;
        for (uint32_t copy = 0; copy < FILE_COPIES; copy++) {
                struct file_super s; /* the bytes are from a message and not aligned */

                memcpy(&s, (const uint8_t *)copies + copy * DISK_SECTOR, sizeof s);
                judge_copy(head, &s, &seen);
        }
        if (!head->whole && seen.resized)
                head->error = -ERANGE;
        else if (!head->whole && !head->ours && seen.other)
                head->error = -EMEDIUMTYPE;
}

void head_see(struct head *head, int error, const void *copies) {
        head->seen = true;
        head->error = error;
        if (!error)
                judge_copies(head, copies);
}

int head_see_again(struct head *head, const void *copies) {
        int error = head->error;

        if (!head->told)
                return 0;
        judge_copies(head, copies);
        head->error = error;
        return head->whole && head->found.life == head->super.life &&
                               memcmp(head->found.secret, head->super.secret,
                                      sizeof head->found.secret) == 0 ?
                       0 :
                       -ESTALE;
}

const char *head_why(int error) {
        return error == -EMEDIUMTYPE ?
                       "the file is not kvd's, or of another version; empty it if it may go" :
               error == -ERANGE    ? "the file was made with another file_size; "
                                     "set that size, or empty the file if you do not need it" :
               error == -EINVAL    ? "the file is too small" :
               error == -ETIMEDOUT ? "its disk hangs" :
               error == -ESTALE    ? "the file was changed by somebody else" :
                                     strerror(-error);
}

/* ---- its opening ----------------------------------------------------------------------------- */

static int draw(struct head *head, void *ret, size_t bytes) {
        if (sys->getrandom(ret, bytes, 0) != (ssize_t)bytes)
                return refuse(head, -EIO, "the kernel gives no random numbers for the file");
        return 0;
}

static uint64_t extent_bytes_for(uint64_t bytes) {
        uint64_t part = (bytes - MIN(bytes, FILE_HEAD)) / EXTENTS_FEW / DISK_SECTOR * DISK_SECTOR;

        return MIN(MAX(part, EXTENT_LEAST), EXTENT_BYTES);
}

/* Makes the superblock of this opening, with numbers that no superblock had before. */
static int begin_opening(struct head *head) {
        struct file_super *s = &head->super;
        int r = 0;

        if (head->whole)
                memcpy(s, &head->found, sizeof *s);
        else
                *s = (struct file_super){.next_epoch = 1};
        if (!head->whole)
                r = draw(head, s->secret, sizeof s->secret);
        if (r == 0)
                r = draw(head, &s->set, sizeof s->set);
        s->opening++;
        s->serial++;
        return r;
}

int head_judge(struct head *head, uint64_t extent_bytes) {
        head->extent_bytes = extent_bytes ?: extent_bytes_for(head->bytes);
        if (!head->error && !head->whole && head->bytes < FILE_HEAD + head->extent_bytes)
                head->error = -EINVAL;
        if (head->error)
                return refuse(head, head->error, "%s", head_why(head->error));
        if (head->whole)
                head->extent_bytes = head->found.extent_bytes;
        return begin_opening(head);
}

int head_alone(struct head *head) {
        return begin_opening(head);
}

/* ---- the superblock -------------------------------------------------------------------------- */

static struct kvd_disk_namespace *find_namespace(struct file_super *s, struct kvd_key id) {
        for (uint32_t i = 0; i < s->n_namespaces; i++)
                if (kvd_key_equal(s->namespaces[i].id, id))
                        return &s->namespaces[i];
        return NULL;
}

int head_name(struct head *head, struct kvd_key id, uint64_t *epoch) {
        struct file_super *s = &head->super;
        struct kvd_disk_namespace *n = find_namespace(s, id);

        if (!n && s->n_namespaces == FILE_NAMESPACES)
                return refuse(head, -ENOSPC, "the file has %u spaces already", FILE_NAMESPACES);
        if (!n) {
                n = &s->namespaces[s->n_namespaces++];
                *n = (struct kvd_disk_namespace){.id = id, .epoch = s->next_epoch++};
                s->serial++;
        }
        *epoch = n->epoch;
        return 0;
}

void head_forget(struct head *head, struct kvd_key id) {
        struct file_super *s = &head->super;
        struct kvd_disk_namespace *n = find_namespace(s, id);

        if (!n)
                return;
        *n = s->namespaces[--s->n_namespaces];
        s->namespaces[s->n_namespaces] = (struct kvd_disk_namespace){0};
        s->serial++;
}

void head_tell(const struct head *head, struct file_super *ret) {
        memcpy(ret, &head->super, sizeof *ret);
        ret->bytes = head->bytes;
        ret->extent_bytes = head->extent_bytes;
        file_sector_seal(ret->secret, FILE_SUPER, &ret->mark);
}
