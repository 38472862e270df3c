/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The hash of keys, compiled once for each instruction set. XXH3 chooses its vectors at compile
 * time; we choose among the results at run time (key.c).
 */

#include "ipc/base/hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

struct kvd_key KVD_HASH_NAME(const void *data, size_t bytes, const uint8_t *secret) {
        XXH128_hash_t h = XXH3_128bits_withSecret(data, bytes, secret, KVD_SECRET_BYTES);

        return (struct kvd_key){h.low64, h.high64};
}
