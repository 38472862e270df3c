/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_REPORT_H
#define KVLM_REPORT_H

#include <stdbool.h>

#include "tools/kvlm/diffuse.h"
#include "tools/kvlm/generate.h"

/*
 * Write one result to standard output: a JSON line, or the text and a line of numbers below it.
 * -EIO if that fails.
 */
int report_json(const struct result *, bool verified);
int report_text(const struct result *, bool verified);
int report_diffused_json(const struct diffuse_result *, const struct diffuser *);
int report_diffused_text(const struct diffuse_result *, const struct diffuser *);
int report_failure(const char *line); /* JSON: {"error": ...} */

#endif
