/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_MOONCAKE_LIBRARY_H
#define KVD_DAEMON_PROCESS_REMOTE_MOONCAKE_LIBRARY_H

/*
 * Mooncake Store's C API, as far as we call it, found at run time. The signatures are those of
 * mooncake-store/include/store_c.h, which has them in all releases since 0.3.11 and had them on 22
 * August 2026 (after 0.3.12.post1); the results are those of mooncake-store/include/types.h there.
 * A struct of theirs, how a record is to be replicated, has changed since: we always pass none.
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
        /* results: 1, 0, or what is wrong */ \
        CALL(int, batch_is_exist, \
             (void *store, const char **keys, size_t count, int *results)) \
        /* results: 0, also if it was there before, or what is wrong */ \
        CALL(int, batch_put_from, \
             (void *store, const char **keys, void **buffers, const size_t *sizes, size_t count, \
              const void *config, int *results)) \
        /* results: bytes, or what is wrong */ \
        CALL(int, batch_get_into, \
             (void *store, const char **keys, void **buffers, const size_t *sizes, size_t count, \
              int64_t *results))

/* What can be wrong, as far as we tell it apart. */
enum {
        MOONCAKE_INTERNAL_ERROR = -1,
        MOONCAKE_SEGMENT_NOT_FOUND = -101,
        MOONCAKE_NO_AVAILABLE_HANDLE = -200, /* of memory in the store */
        MOONCAKE_INVALID_PARAMS = -600,      /* get: it is larger than the buffer */
        MOONCAKE_REPLICA_IS_NOT_READY = -703,
        MOONCAKE_OBJECT_NOT_FOUND = -704,
        MOONCAKE_LEASE_EXPIRED = -707,       /* it may have gone while it was read */
        MOONCAKE_REPLICA_NOT_FOUND = -710,
        MOONCAKE_REPLICA_IS_GONE = -712,
        MOONCAKE_TRANSFER_FAIL = -800,
        MOONCAKE_CHECKSUM_MISMATCH = -801,
        MOONCAKE_RPC_FAIL = -900,            /* from here on the master does not answer, or ... */
        MOONCAKE_LAST_HA_ERROR = -1099,      /* ... is none at the moment */
};

struct mooncake_library {
#define MOONCAKE_MEMBER(type, name, parameters) type(*name) parameters;
        MOONCAKE_CALLS(MOONCAKE_MEMBER)
#undef MOONCAKE_MEMBER
};

/* path: "" for the one that the loader finds. It stays open. */
bool mooncake_library_open(const char *path, struct mooncake_library *ret, struct kvd_why *why);

#endif
