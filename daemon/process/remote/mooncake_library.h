/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_MOONCAKE_LIBRARY_H
#define KVD_DAEMON_PROCESS_REMOTE_MOONCAKE_LIBRARY_H

/*
 * The functions of Mooncake Store's C API that kvd calls, resolved at run time. All releases since
 * 0.3.11 declare them like this in mooncake-store/include/store_c.h, as did the source of 22 August
 * 2026 (after 0.3.12.post1). The results are those of mooncake-store/include/types.h there. The
 * struct with which a put configures replication has changed since 0.3.11: kvd always passes NULL.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/base/why.h"

#define MOONCAKE_CALLS(CALL) \
        CALL(void *, create, (void)) \
        CALL(void, destroy, (void *store)) \
        CALL(int, setup, \
             (void *store, const char *local_hostname, const char *metadata_server, \
              uint64_t global_segment_size, uint64_t local_buffer_size, const char *protocol, \
              const char *device_name, const char *master_server_addr)) \
        CALL(int, register_buffer, (void *store, void *buffer, size_t size)) \
        CALL(int, unregister_buffer, (void *store, void *buffer)) \
        /* results: 1 (stored), 0 (not stored), or a negative error */ \
        CALL(int, batch_is_exist, (void *store, const char **keys, size_t count, int *results)) \
        /* results: 0, also if the object exists, or a negative error */ \
        CALL(int, batch_put_from, \
             (void *store, const char **keys, void **buffers, const size_t *sizes, size_t count, \
              const void *config, int *results)) \
        /* results: bytes, or a negative error */ \
        CALL(int, batch_get_into, \
             (void *store, const char **keys, void **buffers, const size_t *sizes, size_t count, \
              int64_t *results))

/* Errors that kvd distinguishes. */
enum {
        MOONCAKE_INTERNAL_ERROR = -1,
        MOONCAKE_SEGMENT_NOT_FOUND = -101,
        MOONCAKE_NO_AVAILABLE_HANDLE = -200, /* the store is out of memory */
        MOONCAKE_INVALID_PARAMS = -600,      /* get: larger than the buffer */
        MOONCAKE_REPLICA_IS_NOT_READY = -703,
        MOONCAKE_OBJECT_NOT_FOUND = -704,
        MOONCAKE_LEASE_EXPIRED = -707, /* perhaps evicted while it was read */
        MOONCAKE_REPLICA_NOT_FOUND = -710,
        MOONCAKE_REPLICA_IS_GONE = -712,
        MOONCAKE_TRANSFER_FAIL = -800,
        MOONCAKE_CHECKSUM_MISMATCH = -801,
        MOONCAKE_RPC_FAIL = -900,       /* from here on: the master does not answer, */
        MOONCAKE_LAST_HA_ERROR = -1099, /* to here: or there is no master now */
};

struct mooncake_library {
#define MOONCAKE_MEMBER(type, name, parameters) type(*name) parameters;
        MOONCAKE_CALLS(MOONCAKE_MEMBER)
#undef MOONCAKE_MEMBER
};

/* path: "" for the library that the loader finds. Once loaded, it stays open. */
bool mooncake_library_open(const char *path, struct mooncake_library *ret, struct kvd_why *why);

#endif
