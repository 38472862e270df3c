/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_DEVICE_FORWARD_H
#define KVLM_DEVICE_FORWARD_H

/*
 * forward.h on a GPU. All blocks of a step are memory of the device, whole multiples of a block's
 * size apart. A step that wants logits waits for them; others return when they are launched.
 *
 * Bits. A token is computed in a product of ROWS rows, always, in the row that its position has
 * there: so every product of the model has one shape, and the library no reason to choose another
 * algorithm. What else a row is made of (norms, rotation, attention) depends on that row alone. So
 * a prefix that was found gives the same bits as one that is computed, wherever it ends, and
 * however the rest is cut into chunks. Attention of a decoding step is split over its positions, in
 * pieces of one size, and adds up in another order than that of a prompt: what was computed so is
 * not published (device_options.decode exact: computed like a prompt).
 */

#include "tools/kvlm/device_model.h"
#include "tools/kvlm/forward.h"

struct device_forward;

int device_forward_new(struct device *, const struct device_model *, const struct block_shape *,
                       uint32_t chunk, struct device_forward **ret);
struct device_forward *device_forward_free(struct device_forward *);

/* As forward_step, of what step has, and of its view blocks and stored. */
int device_forward_step(struct device_forward *, const struct step *);

#endif
