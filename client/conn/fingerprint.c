/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A fingerprint of many parts. Each part is hashed; then the previous fingerprint, the part's hash
 * and its length are hashed together. So the order of the parts and their boundaries count.
 */

#include "client/kvd.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

void kvd_fingerprint(uint64_t fingerprint[2], const void *data, size_t bytes) {
        XXH128_hash_t part = XXH3_128bits(data, bytes);
        const uint64_t in[] = {fingerprint[0], fingerprint[1], part.low64, part.high64, bytes};
        XXH128_hash_t sum = XXH3_128bits(in, sizeof in);

        fingerprint[0] = sum.low64;
        fingerprint[1] = sum.high64;
}
