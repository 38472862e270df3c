/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_FILE_H
#define KVLM_FILE_H

/* Whole files: mapped for models, read for prompts (which may be pipes). */

#include <stddef.h>
#include <stdint.h>

struct mapping {
        const uint8_t *data; /* NULL: not mapped */
        size_t size;
};

/* an empty file is refused */
int map_file(const char *directory, const char *name, struct mapping *ret);
void unmap(struct mapping *);

/* "-" is standard input; terminated, to be freed */
int read_file(const char *path, char **ret, size_t *ret_size);

#endif
