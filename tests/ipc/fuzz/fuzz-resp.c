/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Replies of a server: any bytes are a reply, the beginning of a reply, or an error. A parsed text
 * lies inside the input. Every shorter part of a complete reply is the beginning of one.
 */

#include <errno.h>
#include <string.h>

#include "daemon/process/remote/resp.h"
#include "tests/ipc/fuzz/fuzz.h"

#define MOST 4096u
#define CUTS 64u

static void check_part(const uint8_t *data, size_t size, const struct resp *r, size_t used) {
        MUST(used <= size);
        MUST(!r->size || (r->text >= data && r->text + r->size <= data + used));
        MUST(r->type != RESP_BULK || r->size <= MOST);
        MUST(r->type != RESP_ARRAY || (r->number >= 0 && r->number <= (int64_t)RESP_MEMBERS));
        MUST((r->type != RESP_TEXT && r->type != RESP_ERROR) || r->size < RESP_LINE);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
        struct resp whole, part;
        size_t used = 0, some = 0;
        int r = resp_take_whole(data, size, MOST, &whole, &used), first;

        MUST(r == 0 || r == 1 || r == -EPROTO);
        first = resp_take(data, size, MOST, &part, &some);
        if (first == 1)
                check_part(data, size, &part, some);
        if (r != 1)
                return 0;
        MUST(first == 1 && some <= used && whole.type == part.type && whole.text == part.text);
        MUST(used <= size);
        for (size_t cut = used > CUTS ? used - CUTS : 0; cut < used; cut++)
                MUST(resp_take_whole(data, cut, MOST, &part, &some) == 0);
        MUST(resp_take_whole(data, used, MOST, &part, &some) == 1 && some == used);
        return 0;
}
