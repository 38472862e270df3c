/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Mooncake Store: a record is an object. This process is a client of the store, and lends it no
 * memory. The library's calls may return late, so a thread makes them. Its transfers may end late,
 * so they use a buffer of their own and never a block. If a transfer fails or a call does not
 * return, the process exits, and the daemon starts another one.
 *
 *      nothing ──library──► loaded ──setup──► away ◄──► up     open goes as far as it can
 */

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/process/remote/caller.h"
#include "daemon/process/remote/dialect.h"
#include "daemon/process/remote/mooncake_library.h"
#include "ipc/base/remote.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define SCHEME "mooncake://"
#define ADDRESS 256u
#define TEXT 1024u
#define SETUP_NS UINT64_C(5000000000) /* for which open waits; setup continues afterwards */
#define HOPELESS 20u                  /* timeouts after which the process gives up on a call */
#define LINE 64u                      /* bytes, alignment of records */
#define MIB (UINT64_C(1) << 20)
#define LOCAL_BUFFER (32 * MIB) /* bytes; the library reads objects on disks through it */

enum what { SETUP, MAKE_ROOM, LOOK, GET, PUT };
static const char *const what_text[] = {"setup", "register_buffer", "batch_is_exist",
                                        "batch_get_into", "batch_put_from"};

static struct mooncake {
        struct mooncake_library library;
        bool loaded, up;
        struct caller *caller;
        char master[ADDRESS], metadata[TEXT], devices[TEXT];
        uint64_t timeout_ns;
        struct kvd_why why;     /* it is not up; empty if it is */
        struct kvd_why refusal; /* error of an item of the last request */

        /* Owned by the thread while a call is under way. */
        enum what what;
        uint64_t since_ns;
        void *store;     /* NULL: not set up */
        uint8_t *memory; /* owned, registered; NULL: none yet */
        size_t bytes, wanted;
        int r; /* result of the call as a whole */
        uint32_t n;
        uint32_t items[KVD_REMOTE_FOUND]; /* index of each item in the records */
        char keys[KVD_REMOTE_FOUND][RECORD_KEY];
        const char *key_at[KVD_REMOTE_FOUND];
        void *at[KVD_REMOTE_ITEMS];
        size_t sizes[KVD_REMOTE_ITEMS];
        int results[KVD_REMOTE_FOUND];
        int64_t got[KVD_REMOTE_ITEMS];
} moon; /* lives as long as the process */

/* ---- on the thread --------------------------------------------------------------------------- */

static int find_address(const struct addrinfo *master, char ret[static ADDRESS]) {
        struct sockaddr_storage own = {0};
        socklen_t n = sizeof own;
        int fd = sys->socket(master->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0), r = -1;

        if (fd < 0)
                return -1;
        if (sys->connect(fd, master->ai_addr, master->ai_addrlen) == 0 &&
            getsockname(fd, (struct sockaddr *)&own, &n) == 0)
                r = getnameinfo((struct sockaddr *)&own, n, ret, ADDRESS, NULL, 0, NI_NUMERICHOST);
        close(fd);
        return r;
}

/* Where other machines reach this one: its address on the route to the master, or its host name. */
static void own_name(char ret[static ADDRESS]) {
        struct addrinfo hints = {.ai_socktype = SOCK_DGRAM}, *list = NULL;
        char host[ADDRESS], *colon;
        int r = -1;

        strcpy(host, moon.master);
        colon = strrchr(host, ':');
        *colon = 0;
        if (getaddrinfo(host, colon + 1, &hints, &list) == 0) {
                for (const struct addrinfo *to = list; to && r; to = to->ai_next)
                        r = find_address(to, ret);
                freeaddrinfo(list);
        }
        if (r)
                gethostname(ret, ADDRESS - 1);
}

static int set_up(void) {
        const char *devices = strcmp(moon.devices, "auto") == 0 ? "" : moon.devices;
        char name[ADDRESS] = "";
        void *store;
        int r;

        own_name(name);
        store = moon.library.create();
        if (!store)
                return MOONCAKE_INTERNAL_ERROR;
        r = moon.library.setup(store, name, moon.metadata, 0, LOCAL_BUFFER,
                               moon.devices[0] ? "rdma" : "tcp", devices, moon.master);
        if (r)
                moon.library.destroy(store);
        else
                moon.store = store;
        return r;
}

/* No transfer uses the old memory any more: if one failed, the process has exited. */
static int make_room(void) {
        uint8_t *memory;
        int r = moon.memory ? moon.library.unregister_buffer(moon.store, moon.memory) : 0;

        if (r)
                return r;
        if (moon.memory)
                munmap(moon.memory, moon.bytes);
        moon.memory = NULL;
        moon.bytes = 0;
        memory = sys->mmap(NULL, moon.wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                           -1, 0);
        if (memory == MAP_FAILED)
                return -ENOMEM;
        r = moon.library.register_buffer(moon.store, memory, moon.wanted);
        if (r) {
                munmap(memory, moon.wanted);
                return r;
        }
        moon.memory = memory;
        moon.bytes = moon.wanted;
        return 0;
}

static void call(void *data) {
        switch (moon.what) {
        case SETUP: moon.r = set_up(); break;
        case MAKE_ROOM: moon.r = make_room(); break;
        case LOOK:
                moon.r = moon.library.batch_is_exist(moon.store, moon.key_at, moon.n, moon.results);
                break;
        case GET:
                moon.r = moon.library.batch_get_into(moon.store, moon.key_at, moon.at, moon.sizes,
                                                     moon.n, moon.got);
                break;
        case PUT:
                moon.r = moon.library.batch_put_from(moon.store, moon.key_at, moon.at, moon.sizes,
                                                     moon.n, NULL, moon.results);
        }
}

/* ---- calls ----------------------------------------------------------------------------------- */

_printf_(1, 2) static void go_away(const char *why, ...) {
        va_list words;

        moon.up = false;
        va_start(words, why);
        vsnprintf(moon.why.line, sizeof moon.why.line, why, words);
        va_end(words);
}

/* Skips the library's exit handlers, which may never return. */
static void leave(const char *why) {
        log_warning("remote process %d exits, and is replaced: %s", getpid(), why);
        _exit(2);
}

/* True: the call returned in time, and did not fail as a whole. */
static bool make_call(enum what what, uint64_t ns) {
        moon.what = what;
        moon.since_ns = sys_now_ns();
        moon.r = 0;
        caller_begin(moon.caller, call, NULL);
        if (!caller_wait(moon.caller, moon.since_ns + ns))
                go_away("%s: %s did not return within %llu ms", moon.master, what_text[what],
                        (unsigned long long)(ns / 1000000));
        else if (moon.r)
                go_away("%s: %s failed: %d", moon.master, what_text[what], moon.r);
        else
                return true;
        return false;
}

/* One more timeout for each MiB to move. */
static uint64_t time_for(uint64_t bytes) {
        return moon.timeout_ns * (1 + bytes / MIB);
}

static int64_t result(uint32_t i) {
        return moon.what == GET ? moon.got[i] : moon.results[i];
}

/* A failed transfer may still be reading or writing its memory. */
static bool transfer_failed(void) {
        if (moon.what != GET && moon.what != PUT)
                return false;
        for (uint32_t i = 0; i < moon.n; i++)
                if (moon.r || result(i) == MOONCAKE_TRANSFER_FAIL)
                        return true;
        return false;
}

/* Whether an error is of the store rather than of an item. */
static bool is_away(int64_t r) {
        return r == MOONCAKE_INTERNAL_ERROR || r == MOONCAKE_TRANSFER_FAIL ||
               (r <= MOONCAKE_RPC_FAIL && r >= MOONCAKE_LAST_HA_ERROR);
}

static int error_of(int64_t r) {
        switch (r) {
        case MOONCAKE_REPLICA_IS_NOT_READY:
        case MOONCAKE_OBJECT_NOT_FOUND:
        case MOONCAKE_LEASE_EXPIRED:
        case MOONCAKE_REPLICA_NOT_FOUND:
        case MOONCAKE_REPLICA_IS_GONE: return -ENOENT;
        case MOONCAKE_SEGMENT_NOT_FOUND:
        case MOONCAKE_NO_AVAILABLE_HANDLE: return -ENOSPC;
        case MOONCAKE_INVALID_PARAMS:
        case MOONCAKE_CHECKSUM_MISMATCH: return -EBADMSG;
        default: return is_away(r) ? -EHOSTUNREACH : -EREMOTEIO;
        }
}

static void fail_all(const struct records *records, int error) {
        for (uint32_t i = 0; i < records->n; i++)
                if (records->errors[i] == -EINPROGRESS)
                        records->errors[i] = error;
}

/* Collects the items to request. False: the store is away, or there are none. */
static bool gather(const struct records *records) {
        moon.n = 0;
        moon.refusal.line[0] = 0;
        for (uint32_t i = 0; moon.up && i < records->n; i++) {
                if (records->errors[i] != -EINPROGRESS)
                        continue;
                records->key(i, moon.keys[moon.n]);
                moon.items[moon.n++] = i;
        }
        return moon.n > 0;
}

static void take_results(const struct records *records,
                         int (*take)(const struct records *, uint32_t i)) {
        for (uint32_t i = 0; i < moon.n; i++) {
                int64_t r = result(i);

                records->errors[moon.items[i]] = r < 0 ? error_of(r) : take(records, i);
                if (r < 0 && is_away(r))
                        go_away("%s: %s returned %lld", moon.master, what_text[moon.what],
                                (long long)r);
                else if (r < 0)
                        kvd_refuse(&moon.refusal, 0, "%s: %s returned %lld", moon.master,
                                   what_text[moon.what], (long long)r);
        }
}

/* ---- look ------------------------------------------------------------------------------------ */

static int take_look(const struct records *records, uint32_t i) {
        return moon.results[i] == 1 ? 0 : -ENOENT;
}

static void look(const struct records *records) {
        if (gather(records) && make_call(LOOK, moon.timeout_ns))
                take_results(records, take_look);
        fail_all(records, -EHOSTUNREACH);
}

/* ---- get, put -------------------------------------------------------------------------------- */

/* Places the records in memory, after enlarging it if they do not fit. */
static bool lay_out(const struct records *records, enum what what) {
        size_t all = 0;

        for (uint32_t i = 0; i < moon.n; i++) {
                moon.sizes[i] = what == GET ? records->most : records->bytes(moon.items[i]);
                all += ALIGN_UP(moon.sizes[i], LINE);
        }
        moon.wanted = MAX(all, KVD_REMOTE_BYTES + MIB);
        if (all > moon.bytes && !make_call(MAKE_ROOM, time_for(moon.wanted)))
                return false;
        all = 0;
        for (uint32_t i = 0; i < moon.n; i++) {
                moon.at[i] = moon.memory + all;
                all += ALIGN_UP(moon.sizes[i], LINE);
        }
        return true;
}

static uint64_t bytes_to_move(void) {
        uint64_t bytes = 0;

        for (uint32_t i = 0; i < moon.n; i++)
                bytes += moon.sizes[i];
        return bytes;
}

static int take_get(const struct records *records, uint32_t i) {
        return records->take(moon.items[i], moon.at[i], MIN((size_t)moon.got[i], moon.sizes[i]));
}

static void get(const struct records *records) {
        if (gather(records) && lay_out(records, GET) && make_call(GET, time_for(bytes_to_move())))
                take_results(records, take_get);
        fail_all(records, -EHOSTUNREACH);
}

static int take_put(const struct records *records, uint32_t i) {
        return 0;
}

/*
 * A put also succeeds if another client has begun to put the object. If that client has died, the
 * object cannot be read before the master expires it and it is put again.
 */
static void look_again(const struct records *records) {
        bool looked = make_call(LOOK, moon.timeout_ns);

        for (uint32_t i = 0; i < moon.n; i++) {
                int32_t *error = &records->errors[moon.items[i]];

                if (*error == 0 && (!looked || moon.results[i] != 1))
                        *error = -EBUSY;
        }
}

/* Leaves out records that cannot be made. */
static bool make_all(const struct records *records) {
        uint32_t n = 0;

        for (uint32_t i = 0; i < moon.n; i++) {
                if (!records->make(moon.items[i], moon.at[i])) {
                        records->errors[moon.items[i]] = -ENOMEM;
                        continue;
                }
                moon.items[n] = moon.items[i];
                moon.at[n] = moon.at[i];
                moon.sizes[n] = moon.sizes[i];
                memmove(moon.keys[n++], moon.keys[i], RECORD_KEY);
        }
        moon.n = n;
        return n > 0;
}

static void put(const struct records *records) {
        if (gather(records) && lay_out(records, PUT) && make_all(records) &&
            make_call(PUT, time_for(bytes_to_move()))) {
                take_results(records, take_put);
                if (moon.up)
                        look_again(records);
        }
        fail_all(records, -EHOSTUNREACH);
}

/* ---- check and open -------------------------------------------------------------------------- */

static int take_master(const char *servers, char ret[static ADDRESS], struct kvd_why *why) {
        const char *text = servers + strlen(SCHEME), *colon = strrchr(text, ':');
        size_t n = colon ? (size_t)(colon - text) : strlen(text);
        char *rest = "";
        unsigned long port = colon ? strtoul(colon + 1, &rest, 10) : 50051;

        if (!n || n > ADDRESS - 8 || strcspn(text, ",/") < strlen(text) || *rest || !port ||
            port > UINT16_MAX)
                return kvd_refuse(why, -EINVAL,
                                  "'%s' is not a Mooncake master; write mooncake://host:port",
                                  servers);
        snprintf(ret, ADDRESS, "%.*s:%lu", (int)n, text, port);
        return 0;
}

static int check(const struct dialect_config *config, struct kvd_why *why) {
        char master[ADDRESS];

        if (config->password[0])
                return kvd_refuse(why, -EINVAL, "remote_password: Mooncake Store has no passwords");
        if (config->files.ca >= 0 || config->files.certificate >= 0 || config->files.key >= 0)
                return kvd_refuse(why, -EINVAL, TLS_ALONE);
        return take_master(config->servers, master, why);
}

static int begin(const struct dialect_config *config, struct kvd_why *why) {
        int r = take_master(config->servers, moon.master, why);

        if (r == 0 && caller_new(&moon.caller) < 0)
                r = kvd_refuse(why, -ENOMEM, "out of memory for a thread");
        moon.timeout_ns = config->timeout_ns;
        snprintf(moon.metadata, sizeof moon.metadata, "%s",
                 config->metadata[0] ? config->metadata : "P2PHANDSHAKE");
        snprintf(moon.devices, sizeof moon.devices, "%s", config->devices);
        for (uint32_t i = 0; i < KVD_REMOTE_FOUND; i++)
                moon.key_at[i] = moon.keys[i];
        return r;
}

/*
 * Waits for the last call. False: it has not returned in time. Exits if the call is hopelessly late
 * or its transfer failed.
 */
static bool is_back(void) {
        uint64_t now = sys_now_ns(), ns = moon.what == SETUP ? SETUP_NS : moon.timeout_ns;
        bool back = caller_wait(moon.caller, now + ns);

        if (!back && moon.what != SETUP && now > moon.since_ns + HOPELESS * moon.timeout_ns)
                leave("a call of Mooncake does not return");
        if (back && transfer_failed())
                leave("a transfer of Mooncake failed");
        return back;
}

static bool is_set_up(const char *library) {
        if (!moon.loaded)
                moon.loaded = mooncake_library_open(library, &moon.library, &moon.why);
        return moon.loaded && (moon.store || make_call(SETUP, SETUP_NS));
}

/* Looks for any key: that it is missing also proves that the master answers. */
static void greet(void) {
        strcpy(moon.keys[0], "kvd");
        moon.n = 1;
        if (!make_call(LOOK, moon.timeout_ns))
                return;
        moon.up = moon.results[0] >= 0;
        moon.why.line[0] = 0;
        if (!moon.up)
                go_away("%s: %s returned %d", moon.master, what_text[LOOK], moon.results[0]);
}

static int open_it(const struct dialect_config *config, struct kvd_why *why) {
        int r = moon.caller ? 0 : begin(config, why);

        if (r == 0 && is_back() && is_set_up(config->library))
                greet();
        return r;
}

static void state(struct dialect_state *ret) {
        *ret = (struct dialect_state){.servers = 1,
                                      .away = !moon.up,
                                      .why = moon.why.line,
                                      .refusal = moon.refusal.line};
}

const struct dialect dialect_mooncake = {.schemes = (const char *const[]){SCHEME, NULL},
                                         .check = check,
                                         .open = open_it,
                                         .look = look,
                                         .get = get,
                                         .put = put,
                                         .state = state};
