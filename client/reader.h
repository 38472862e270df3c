/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_READER_H
#define KVD_CLIENT_READER_H

/*
 * The parts of kvd_reader_attention, for an engine whose threads divide the heads, and that has an
 * attention of its own. Of a pass, in each layer:
 *
 *      reader_look      for each KV head, by one thread each: what its queries need
 *      reader_fetch     by one thread, while no other uses the sequence: fetches what is missing
 *      reader_seen      by one thread: what the layer's attention sees
 */

#include <stdbool.h>

#include "client/kvd_attend.h"

enum { READER_CALIBRATION = 32 }; /* last queries of a prompt that choose who shares with whom */

/* Whether queries look at what they need; if not, the parts need not be called. */
bool reader_looks(const kvd_reader *);
/* [entries] to which this pass must add its attention mass; NULL: it is not measured */
float *reader_mass(const kvd_reader *);

/* q: the head's queries of the pass's first token, ldq floats before those of the next one */
void reader_look(kvd_reader *, uint32_t layer, uint32_t head, const float *q, size_t ldq);
/*
 * Returns how many entries have changed, or, if blocks that are needed do not come, the error of
 * kvd_reader_attention; then entries may have changed.
 */
int reader_fetch(kvd_reader *);
/* The lists are valid until the next call. */
void reader_seen(kvd_reader *, uint32_t layer, struct kvd_seen *ret);

#endif
