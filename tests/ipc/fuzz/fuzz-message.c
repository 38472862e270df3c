/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A frame from a peer, as daemon and client decode it. A frame that decodes is within its limits
 * and encodes again.
 */

#include "ipc/frame.h"
#include "ipc/msg.h"
#include "tests/ipc/fuzz/fuzz.h"
#include "tests/ipc/sample.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
        static struct kvd_decoder *decoder;
        static uint8_t again[SAMPLE_FRAME_MAX];
        struct kvd_msg msg, copy;
        ssize_t n;

        if (size > KVD_FRAME_MAX || (!decoder && kvd_decoder_new(&decoder) < 0))
                return 0;
        if (kvd_msg_decode(decoder, data, size, &msg) < 0) {
                MUST(kvd_decoder_why(decoder)[0]);
                return 0;
        }
        n = kvd_msg_encode(&msg, again, sizeof again);
        MUST(n > 0);
        MUST(kvd_msg_decode(decoder, again, (size_t)n, &copy) == 0);
        MUST(!sample_difference(&msg, &copy));
        return 0;
}
