/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/client/killpoints/elsewhere.h"

#include <string.h>
#include <unistd.h>

#include "tests/client/killpoints/chains.h"
#include "tests/lib/instance.h"

const struct kvd_space_options causal_options = {.max_blocks = CAUSAL_BLOCKS};

struct kvd *open_spaces(const char *socket, struct kvd_space **causal, struct kvd_space **whole) {
        static const struct kvd_space_options prefixes = {.kind = KVD_BIDIRECTIONAL,
                                                          .max_blocks = 256};
        struct kvd *handle;

        if (kvd_open(socket, &handle) < 0 ||
            kvd_space_open(handle, CAUSAL_SPACE, &chain_geometry, &causal_options, causal) < 0 ||
            kvd_space_open(handle, WHOLE_SPACE, &chain_geometry, &prefixes, whole) < 0)
                die("open: %s", kvd_error());
        return handle;
}

int publish_elsewhere(const char *socket, uint32_t chain, uint32_t n_tokens) {
        uint32_t tokens[CHAIN_TOKENS];
        struct kvd_space *causal, *whole;
        struct kvd *handle = open_spaces(socket, &causal, &whole);
        struct kvd_pin pin = {0};
        bool is_whole = chain == WHOLE_CHAIN;
        int r;

        chain_tokens(chain, n_tokens, tokens);
        r = chain_publish(is_whole ? whole : causal, &pin, tokens, n_tokens, is_whole);
        kvd_unpin(is_whole ? whole : causal, &pin);
        kvd_space_close(causal);
        kvd_space_close(whole);
        kvd_close(handle);
        return r;
}

/* ---- partners -------------------------------------------------------------------------------- */

#define HELD_FOR_US 1500 /* microseconds after the operation has begun */

static void tell_ready(int fd) {
        if (write(fd, "r", 1) != 1)
                die("pipe: ready");
}

static void hold_lease(const char *socket, struct stage *stage, int ready, bool finish) {
        uint32_t tokens[WHOLE_TOKENS];
        struct kvd_space *causal, *whole;
        struct kvd_pin pin = {0};

        open_spaces(socket, &causal, &whole);
        chain_tokens(WHOLE_CHAIN, WHOLE_TOKENS, tokens);
        if (kvd_lease(whole, tokens, WHOLE_TOKENS, 0) != 1)
                die("the partner's lease: %s", kvd_error());
        tell_ready(ready);
        while (!stage->prepared)
                usleep(50);
        usleep(HELD_FOR_US);
        if (finish && chain_publish(whole, &pin, tokens, WHOLE_TOKENS, true) < 0)
                die("the partner's prefix: %s", kvd_error());
        if (kvd_lease_end(whole, tokens, WHOLE_TOKENS) < 0)
                die("the partner's lease: %s", kvd_error());
}

void finishes(const char *socket, struct stage *stage, int ready) {
        hold_lease(socket, stage, ready, true);
}

void gives_up(const char *socket, struct stage *stage, int ready) {
        hold_lease(socket, stage, ready, false);
}

#define SCRIBBLED 300u

_Noreturn void rewrite_all(const char *socket) {
        struct kvd_block blocks[SCRIBBLED];
        struct kvd_space *causal, *whole;

        open_spaces(socket, &causal, &whole);
        if (take_blocks(causal, SCRIBBLED, blocks) < 0)
                die("rewrite: %s", kvd_error());
        for (uint32_t i = 0; i < SCRIBBLED; i++)
                memset(blocks[i].data, 0xee, kvd_block_bytes(&chain_geometry));
        kvd_free(causal, SCRIBBLED, blocks);
        for (uint32_t chain = OPERATION_CHAIN + 1; chain < OPERATION_CHAIN + 4; chain++)
                if (publish_elsewhere(socket, chain, CHAIN_TOKENS) < 0)
                        die("rewrite: %s", kvd_error());
        _exit(0);
}
