/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_DEVICE_INPUTS_H
#define KVLM_DEVICE_INPUTS_H

/*
 * The inputs of a step on a GPU that come from the host: tokens, their angles, and the ids of
 * blocks.
 */

#include "tools/kvlm/device.h"
#include "tools/kvlm/forward.h"

struct device_inputs {
        struct device *device;
        struct block_shape shape;
        float *frequencies; /* [half] */
        uint32_t half;
        uint8_t *staging; /* pinned; same offsets as the addresses below */
        cu_event copied;  /* when it has passed, staging may be refilled */
        cu_address memory;

        cu_address tokens;       /* [chunk] */
        cu_address cosine, sine; /* [chunk][half] */
        cu_address length;       /* of the sequence, including the step's tokens */
        cu_address starts;       /* {0, tokens} */
        cu_address ids;          /* of the sequence's blocks; last, because it is rarely full */
};

int device_inputs_new(struct device *, const struct config *, const struct block_shape *,
                      uint32_t chunk, struct device_inputs **ret);
struct device_inputs *device_inputs_free(struct device_inputs *);

/*
 * Copies the inputs in stream order. ret: the blocks. -EXDEV if they are not multiples of a block's
 * size apart.
 */
int device_inputs_send(struct device_inputs *, const struct step *, struct gpu_blocks *ret);

#endif
