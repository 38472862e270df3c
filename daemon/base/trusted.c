/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A file is checked by fstat after it was opened, so that it cannot be replaced in between. Root's
 * files are trusted: root may read and change everything anyway.
 */

#include "daemon/base/trusted.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define REFUSE(t, ...) refuse(t, why, __VA_ARGS__)

_printf_(3, 4) static int refuse(const struct trusted *t, struct kvd_why *why, const char *format,
                                 ...) {
        char text[256];
        va_list args;

        va_start(args, format);
        vsnprintf(text, sizeof text, format, args);
        va_end(args);
        return kvd_refuse(why, TRUSTED_NOT, "%s %s: %s", t->setting, t->path, text);
}

static bool is_ours(uid_t owner, uid_t user) {
        return owner == geteuid() || owner == user;
}

/* ---- links ----------------------------------------------------------------------------------- */

/* Another user may be able to put a link into a folder, but cannot make it belong to us. */
static int follow(const struct trusted *t, int flags, struct kvd_why *why) {
        struct stat st;
        int fd;

        if (lstat(t->path, &st) < 0)
                return negative_errno();
        if (!S_ISLNK(st.st_mode))
                return -ELOOP;
        if (st.st_uid != 0 && !is_ours(st.st_uid, t->user))
                return REFUSE(t, "it is a link of user %u; give the path of the file itself",
                              st.st_uid);
        fd = sys->open(t->path, flags);
        return fd < 0 ? negative_errno() : fd;
}

/*
 * O_NONBLOCK: a pipe instead of a file must not block us. The first try is without O_CREAT: with
 * it, the kernel may refuse another user's file in a sticky folder (fs.protected_regular), and the
 * refusal could not name the owner.
 */
static int open_path(const struct trusted *t, int flags, struct kvd_why *why) {
        int all = flags | O_CLOEXEC | O_NOCTTY | (t->trust == TRUST_CONFIG ? 0 : O_NONBLOCK);
        int fd = sys->open(t->path, (all & ~O_CREAT) | O_NOFOLLOW);

        if (fd < 0 && errno == ENOENT && flags & O_CREAT)
                fd = sys->open(t->path, all | O_EXCL);
        if (fd < 0 && errno == ELOOP)
                fd = follow(t, all & ~O_CREAT, why);
        else if (fd < 0)
                fd = negative_errno();
        if (fd < 0 && fd != TRUSTED_NOT)
                kvd_refuse(why, fd, "%s %s: %s", t->setting, t->path, strerror(-fd));
        return fd;
}

/* ---- files ----------------------------------------------------------------------------------- */

static int check_type(const struct trusted *t, const struct stat *st, struct kvd_why *why) {
        if (S_ISREG(st->st_mode) || (t->trust == TRUST_CONFIG && S_ISFIFO(st->st_mode)))
                return 0;
        if (t->trust != TRUST_DATA)
                return REFUSE(t, "it is not a regular file");
        return S_ISBLK(st->st_mode) ? 0 :
                                      REFUSE(t, "it is neither a regular file nor a block device");
}

static int check_owner(const struct trusted *t, const struct stat *st, struct kvd_why *why) {
        bool may_be_roots = t->trust != TRUST_DATA || S_ISBLK(st->st_mode);

        if (is_ours(st->st_uid, t->user) || (st->st_uid == 0 && may_be_roots))
                return 0;
        return REFUSE(t, "user %u owns it, so kvd does not trust it; chown it to user %u",
                      st->st_uid, t->user);
}

/* Root may share a secret with a group. A disk's group may access all disks anyway. */
static int check_mode(const struct trusted *t, const struct stat *st, struct kvd_why *why) {
        bool root_gave_it = st->st_uid == 0 && geteuid() != 0;
        mode_t others = st->st_mode & (S_IRWXG | S_IRWXO);

        if (t->trust <= TRUST_LIBRARY)
                return others & (S_IWGRP | S_IWOTH) ?
                               REFUSE(t, "others may change it; chmod go-w it") :
                               0;
        if (S_ISBLK(st->st_mode))
                return others & S_IRWXO ?
                               REFUSE(t, "every user may read or change it; chmod o= it") :
                               0;
        if (t->trust == TRUST_SECRET && root_gave_it)
                others &= ~(mode_t)S_IRGRP;
        return others ? REFUSE(t, "others may read or change it; chmod 600 it") : 0;
}

static int check_links(const struct trusted *t, const struct stat *st, struct kvd_why *why) {
        if (st->st_nlink == 1 || t->trust == TRUST_LIBRARY)
                return 0;
        return REFUSE(t, "it is named twice (%u hard links); keep one name, or copy it",
                      (unsigned)st->st_nlink);
}

/* /dev/null: an empty configuration. */
static bool is_null(const struct stat *st) {
        return S_ISCHR(st->st_mode) && st->st_rdev == makedev(1, 3);
}

static int check(const struct trusted *t, int fd, struct kvd_why *why) {
        struct stat st;
        int r;

        if (fstat(fd, &st) < 0)
                return kvd_refuse(why, negative_errno(), "%s %s: %s", t->setting, t->path,
                                  strerror(errno));
        if (t->trust == TRUST_CONFIG && is_null(&st))
                return 0;
        r = check_type(t, &st, why);
        if (r == 0)
                r = check_owner(t, &st, why);
        if (r == 0)
                r = check_mode(t, &st, why);
        return r < 0 ? r : check_links(t, &st, why);
}

int trusted_open(const struct trusted *t, int flags, struct kvd_why *why) {
        int fd = open_path(t, flags, why), r;

        if (fd < 0)
                return fd;
        r = check(t, fd, why);
        if (r == 0 && fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK) < 0)
                r = kvd_refuse(why, negative_errno(), "%s %s: %s", t->setting, t->path,
                               strerror(errno));
        if (r == 0)
                return fd;
        close(fd);
        return r;
}

/* ---- folders --------------------------------------------------------------------------------- */

/* In a sticky folder (/tmp) users may replace only their own files. */
static int check_folder(const char *path, uid_t user, struct kvd_why *why) {
        struct stat st;

        if (stat(path, &st) < 0)
                return kvd_refuse(why, negative_errno(), "%s: %s", path, strerror(errno));
        if (st.st_uid != 0 && !is_ours(st.st_uid, user))
                return kvd_refuse(
                        why, TRUSTED_NOT,
                        "%s: user %u owns this folder, and could replace the socket in it; choose another, or chown it to user %u",
                        path, st.st_uid, user);
        if (st.st_mode & (S_IWGRP | S_IWOTH) && !(st.st_mode & S_ISVTX))
                return kvd_refuse(
                        why, TRUSTED_NOT,
                        "%s: others may write to this folder, and could replace the socket in it; chmod go-w it, or choose another",
                        path);
        return 0;
}

int trusted_socket(const char *path, uid_t user, struct kvd_why *why) {
        _cleanup_(freep) char *folder = strdup(path);
        char *slash = folder ? strrchr(folder, '/') : NULL;

        if (!slash || path[0] == '@')
                return folder ? 0 : kvd_refuse(why, -ENOMEM, "out of memory");
        slash[slash == folder] = 0;
        return check_folder(folder, user, why);
}
