/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_HOST_H
#define KVD_STORE_FILE_HOST_H

/* Memory of the host below a pool on a GPU, in place of a file. Its life is in store/disk.h. */

#include "store/core.h"

struct file;

/* Of the record at that place, if it is the space's: of the exact copy; or KVD_NOWHERE. */
uint32_t host_copy(const struct file *file, const struct space *space, uint32_t record);

#endif
