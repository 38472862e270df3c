/* SPDX-License-Identifier: Apache-2.0 */

/* kvlm's weights: any file is opened or refused, and every tensor that is found lies inside it. */

#include "tests/ipc/fuzz/folder.h"
#include "tools/kvlm/safetensors.h"

static void read_all(const struct safetensors *file, const struct tensor *t) {
        float row[64];

        MUST(t->data >= file->data && t->data <= file->data + file->data_size);
        for (uint32_t i = 0; i < t->rows; i++)
                tensor_read(t, kvd_ops_pick("scalar"), i, 1, row);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
        struct safetensors file;
        struct tensor tensor;

        if (safetensors_open(folder_with("model.safetensors", data, size), &file) < 0)
                return 0;
        if (safetensors_find(&file, "w", 4, 8, &tensor) == 0)
                read_all(&file, &tensor);
        if (safetensors_find(&file, "norm.weight", 0, 8, &tensor) == 0)
                read_all(&file, &tensor);
        safetensors_close(&file);
        return 0;
}
