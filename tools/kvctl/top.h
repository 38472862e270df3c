/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_TOP_H
#define KVCTL_TOP_H

struct kvctl;
struct sample;

struct sample *sample_free(struct sample *sample); /* NULL is fine; returns NULL */
double top_seconds(const struct kvctl *kvctl);     /* between two pictures */

#endif
