/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/device_options.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvlm/note.h"

enum { ORDINAL_MAX = 1023 };

static int one_of(const char *const *names, size_t n, const char *text) {
        for (size_t i = 0; i < n; i++)
                if (strcmp(text, names[i]) == 0)
                        return (int)i;
        return -EINVAL;
}

static int read_device(struct device_choice *c, const char *text) {
        static const char *const names[] = {"auto", "cpu", "cuda"};
        int use = one_of(names, ARRAY_SIZE(names), text);
        char *end = NULL;
        long ordinal;

        c->options.ordinal = -1;
        if (use >= 0) {
                c->use = (enum use_device)use;
                return 0;
        }
        if (strncmp(text, "cuda:", 5) != 0 || !isdigit((unsigned char)text[5]))
                return note(-EINVAL, "--device takes auto, cpu, cuda or cuda:N, not \"%s\"", text);
        ordinal = strtol(text + 5, &end, 10);
        if (*end || ordinal > ORDINAL_MAX)
                return note(-EINVAL, "--device takes a number from 0 to %d behind cuda:, not \"%s\"", ORDINAL_MAX,
                            text + 5);
        c->use = DEVICE_GIVEN;
        c->options.ordinal = (cu_device)ordinal;
        return 0;
}

int device_option(struct device_choice *c, const char *name, const char *value) {
        static const char *const products[] = {"f32", "tf32", "bf16"}, *const decodes[] = {"fast", "exact"};
        int r;

        if (strcmp(name, "device") == 0)
                return read_device(c, value);
        if (strcmp(name, "matmul") == 0) {
                r = one_of(products, ARRAY_SIZE(products), value);
                c->options.products = (enum device_products)MAX(r, 0);
                return r < 0 ? note(r, "--matmul takes f32, tf32 or bf16, not \"%s\"", value) : 0;
        }
        r = one_of(decodes, ARRAY_SIZE(decodes), value);
        c->options.exact_decode = r == 1;
        return r < 0 ? note(r, "--decode takes fast or exact, not \"%s\"", value) : 0;
}
