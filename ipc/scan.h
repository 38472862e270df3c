/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_IPC_SCAN_H
#define KVD_IPC_SCAN_H

/* Checks a frame from a peer, within limits, before msgpack-c sees it. */

#include <stddef.h>

#define KVD_SCAN_MAX_DEPTH 8 /* nesting of arrays and maps */
/* values of all kinds in one frame; an array of numbers travels as one bin */
#define KVD_SCAN_MAX_OBJECTS 256

#define KVD_SCAN_RESULTS(RESULT) \
        RESULT(OK, "fine") \
        RESULT(EMPTY, "the frame is empty") \
        RESULT(TRUNCATED, "the frame ends in the middle of a value") \
        RESULT(LENGTH, "a string or bin claims more bytes than the frame has") \
        RESULT(COUNT, "an array or map claims more elements than the frame has bytes for") \
        RESULT(OBJECTS, "the frame holds more than 256 values") \
        RESULT(DEPTH, "arrays and maps are nested deeper than 8") \
        RESULT(TRAILING, "there are bytes behind the message") \
        RESULT(TYPE, "the frame holds a float, an extension or the reserved byte 0xc1") \
        RESULT(KEY, "a key of a map is not a string") \
        RESULT(DUPLICATE, "a map has the same key twice")

enum kvd_scan_result {
#define KVD_SCAN_ENUM(name, text) KVD_SCAN_##name,
        KVD_SCAN_RESULTS(KVD_SCAN_ENUM)
#undef KVD_SCAN_ENUM
};

/*
 * Checks that the frame is exactly one msgpack value, within the limits above. Allocates nothing,
 * never recurses.
 */
enum kvd_scan_result kvd_scan(const void *frame, size_t size);
const char *kvd_scan_text(enum kvd_scan_result result);

#endif
