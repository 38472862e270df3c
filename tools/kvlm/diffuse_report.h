/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_DIFFUSE_REPORT_H
#define KVLM_DIFFUSE_REPORT_H

#include "tools/kvlm/diffuse.h"

/* Write one result to standard output: a JSON line, or the text and a line of numbers below it. -EIO */
int diffuse_report_json(const struct diffuse_result *, const struct diffuser *);
int diffuse_report_text(const struct diffuse_result *, const struct diffuser *);

#endif
