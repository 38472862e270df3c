/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_DEVICE_FORWARD_H
#define KVLM_DEVICE_FORWARD_H

/*
 * forward.h on a GPU. All blocks of a step are in device memory, at distances that are multiples of
 * a block's size. A step that computes logits waits for them; other steps return once they are
 * launched.
 *
 * Bits. A token is always computed in a product of ROWS rows, in the row that its position
 * determines. So every product of the model has one shape, and the library has no reason to choose
 * a different algorithm. Everything else in a row (norms, rotation, attention) depends on that row
 * alone. So a prefix that was found gives the same bits as one that is computed, wherever it ends
 * and however the rest is cut into chunks. Attention of a decoding step is split over its
 * positions, in pieces of one size, and is added up in a different order than that of a prompt.
 * Tokens computed that way are not published (unless device_options.decode is exact: then they are
 * computed like a prompt).
 */

#include "tools/kvlm/device_model.h"
#include "tools/kvlm/forward.h"

struct device_forward;

int device_forward_new(struct device *, const struct device_model *, const struct block_shape *,
                       uint32_t chunk, struct device_forward **ret);
struct device_forward *device_forward_free(struct device_forward *);

/* As forward_step. Of step->view, only blocks and stored are used. */
int device_forward_step(struct device_forward *, const struct step *);

#endif
