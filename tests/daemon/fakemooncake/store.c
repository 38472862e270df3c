/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A stand-in for Mooncake Store's library: its C API over files in the folder $FAKE_MOONCAKE, so
 * that all processes with that folder share a store. Like the real library, it requires that memory
 * is registered and that a store is set up once. The file "fault" in that folder selects how it
 * fails.
 */

#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/process/remote/mooncake_library.h"

#define BUFFERS 8u

/* The declarations that kvd assumes of the library. */
#define PROTOTYPE(type, name, parameters) \
        __attribute__((visibility("default"))) type mooncake_store_##name parameters;
MOONCAKE_CALLS(PROTOTYPE)

struct store {
        bool ready;
        struct {
                char *at;
                size_t n;
        } buffers[BUFFERS];
};

/* ---- files ----------------------------------------------------------------------------------- */

static void wrong(const char *what) {
        fprintf(stderr, "fakemooncake: %s\n", what);
        abort();
}

static void path_of(char ret[static 512], const char *folder, const char *name) {
        snprintf(ret, 512, "%s/%s%s", getenv("FAKE_MOONCAKE") ?: "/nonexistent", folder, name);
}

/* Appends a line per event to a file; tests count the lines. */
__attribute__((format(printf, 2, 3))) static void note(const char *file, const char *format, ...) {
        char path[512], line[512];
        va_list words;
        int fd, n;

        va_start(words, format);
        n = vsnprintf(line, sizeof line, format, words);
        va_end(words);
        path_of(path, "", file);
        fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (fd < 0 || write(fd, line, (size_t)n) != n)
                wrong("no folder");
        close(fd);
}

/* The selected fault; "" if none. */
static const char *fault(void) {
        static _Thread_local char text[64];
        char path[512];
        ssize_t n = 0;
        int fd;

        path_of(path, "", "fault");
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd >= 0) {
                n = read(fd, text, sizeof text - 1);
                close(fd);
        }
        text[n > 0 ? n : 0] = 0;
        return text;
}

/* Every call begins here. Returns the selected fault. */
static const char *enter(void) {
        while (strcmp(fault(), "hang") == 0)
                usleep(2000);
        if (strcmp(fault(), "slow") == 0)
                usleep(30000);
        if (strcmp(fault(), "crash") == 0)
                raise(SIGSEGV);
        return fault();
}

static struct store *check(void *handle, bool ready) {
        struct store *s = handle;

        if (!s || s->ready != ready)
                wrong(ready ? "the store is not set up" : "the store is set up already");
        return s;
}

/* The error with which every call fails; 0 if none. moves: the call transfers data. */
static int trouble(const char *with, bool moves) {
        if (strcmp(with, "dead") == 0)
                return MOONCAKE_RPC_FAIL;
        if (strcmp(with, "transfer") == 0 && moves)
                return MOONCAKE_TRANSFER_FAIL;
        return 0;
}

static void check_registered(const struct store *s, const char *at, size_t n) {
        for (uint32_t i = 0; i < BUFFERS; i++)
                if (s->buffers[i].at && at >= s->buffers[i].at &&
                    at + n <= s->buffers[i].at + s->buffers[i].n)
                        return;
        wrong("the memory is not registered");
}

/* ---- life ------------------------------------------------------------------------------------ */

void *mooncake_store_create(void) {
        return calloc(1, sizeof(struct store));
}

void mooncake_store_destroy(void *handle) {
        free(handle);
}

int mooncake_store_setup(void *handle, const char *local_hostname, const char *metadata_server,
                         uint64_t global_segment_size, uint64_t local_buffer_size,
                         const char *protocol, const char *device_name,
                         const char *master_server_addr) {
        struct store *s = check(handle, false);

        if (strcmp(enter(), "dead") == 0)
                return MOONCAKE_INTERNAL_ERROR;
        note("setup", "%s %s %llu %d %s '%s' %s\n", local_hostname, metadata_server,
             (unsigned long long)global_segment_size, local_buffer_size > 0, protocol, device_name,
             master_server_addr);
        s->ready = true;
        return 0;
}

int mooncake_store_register_buffer(void *handle, void *buffer, size_t size) {
        struct store *s = check(handle, true);

        enter();
        for (uint32_t i = 0; i < BUFFERS; i++) {
                if (s->buffers[i].at)
                        continue;
                s->buffers[i].at = buffer;
                s->buffers[i].n = size;
                return 0;
        }
        return MOONCAKE_INVALID_PARAMS;
}

int mooncake_store_unregister_buffer(void *handle, void *buffer) {
        struct store *s = check(handle, true);

        enter();
        for (uint32_t i = 0; i < BUFFERS; i++) {
                if (s->buffers[i].at != buffer)
                        continue;
                s->buffers[i].at = NULL;
                return 0;
        }
        return MOONCAKE_INVALID_PARAMS;
}

/* ---- objects --------------------------------------------------------------------------------- */

int mooncake_store_batch_is_exist(void *handle, const char **keys, size_t count, int *results) {
        const char *with = (check(handle, true), enter());
        char path[512];

        if (strcmp(with, "throws") == 0)
                return MOONCAKE_INTERNAL_ERROR;
        for (size_t i = 0; i < count; i++) {
                path_of(path, "objects/", keys[i]);
                results[i] = trouble(with, false) ?: access(path, F_OK) == 0;
        }
        return 0;
}

/*
 * Stores an object whole or not at all. Never replaces one, not even one that another process is
 * still writing.
 */
static int put(const char *key, const void *buffer, size_t size, const char *with) {
        char path[512], made[560];
        int fd, r = trouble(with, true);

        if (r || strcmp(with, "full") == 0)
                return r ?: MOONCAKE_NO_AVAILABLE_HANDLE;
        path_of(path, "objects/", key);
        if (access(path, F_OK) == 0 || strcmp(with, "begun") == 0)
                return 0;
        snprintf(made, sizeof made, "%s.%d", path, getpid());
        fd = open(made, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        if (fd < 0 || write(fd, buffer, size) != (ssize_t)size)
                wrong("no folder");
        close(fd);
        rename(made, path);
        note("put", "%s\n", key);
        return 0;
}

int mooncake_store_batch_put_from(void *handle, const char **keys, void **buffers,
                                  const size_t *sizes, size_t count, const void *config,
                                  int *results) {
        struct store *s = check(handle, true);
        const char *with = enter();

        if (config)
                wrong("the layout of this struct differs between releases");
        for (size_t i = 0; i < count; i++) {
                check_registered(s, buffers[i], sizes[i]);
                results[i] = put(keys[i], buffers[i], sizes[i], with);
        }
        return 0;
}

#ifndef LACKS_BATCH_GET_INTO
static int64_t get(const char *key, char *buffer, size_t size, const char *with) {
        char path[512];
        struct stat st;
        ssize_t n;
        int fd, r = trouble(with, true);

        if (r)
                return r;
        path_of(path, "objects/", key);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
                return MOONCAKE_OBJECT_NOT_FOUND;
        n = fstat(fd, &st) == 0 && (size_t)st.st_size <= size ? read(fd, buffer, size) :
                                                                MOONCAKE_INVALID_PARAMS;
        close(fd);
        note("get", "%s\n", key);
        if (strcmp(with, "flip") == 0 && n > 0)
                buffer[n / 2] ^= 1;
        if (strcmp(with, "lease") == 0)
                return MOONCAKE_LEASE_EXPIRED;
        return strcmp(with, "checksum") == 0 ? MOONCAKE_CHECKSUM_MISMATCH : n;
}

int mooncake_store_batch_get_into(void *handle, const char **keys, void **buffers,
                                  const size_t *sizes, size_t count, int64_t *results) {
        struct store *s = check(handle, true);
        const char *with = enter();

        for (size_t i = 0; i < count; i++) {
                check_registered(s, buffers[i], sizes[i]);
                results[i] = get(keys[i], buffers[i], sizes[i], with);
        }
        return 0;
}
#endif
