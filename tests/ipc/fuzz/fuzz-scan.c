/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The scan against msgpack-c: input that passes can be unpacked completely, within the memory
 * reserved for it.
 */

#include <msgpack.h>

#include "ipc/scan.h"
#include "tests/ipc/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
        msgpack_object root;
        msgpack_zone zone;
        size_t offset = 0;

        if (kvd_scan(data, size) != KVD_SCAN_OK || !msgpack_zone_init(&zone, 65536))
                return 0;
        MUST(msgpack_unpack((const char *)data, size, &offset, &zone, &root) ==
             MSGPACK_UNPACK_SUCCESS);
        MUST(offset == size);
        msgpack_zone_destroy(&zone);
        return 0;
}
