/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_FOLLOW_H
#define KVD_CLIENT_FOLLOW_H

/* For kvctl, which follows a space without opening it: as kvd_follow_begin, with an index of its own. */

#include <stdbool.h>

#include "client/kvd.h"
#include "ipc/base/layout.h"

/* whole: skip part-filled blocks, and objects that are found by key. NULL: out of memory. */
struct kvd_follow *follower_new(bool whole, const struct kvd_follow_ops *ops, void *arg);

void follower_report_to(struct kvd_follow *follow, const struct kvd_follow_ops *ops);

/* Compares with this index from now on. It must stay mapped until the next call. 0 or -ENOMEM. */
int follower_take(struct kvd_follow *follow, const struct kvd_index *ix);
void follower_lose(
        struct kvd_follow *follow); /* the space is gone: reports that, if any was there */
void follower_away(struct kvd_follow *follow, bool is); /* reports it if that has changed */

/* Reports what has happened since the last round. There must be an index. */
void follower_round(struct kvd_follow *follow);

/* Reports all blocks to other ops, parents first; rounds go on as if it had not. 0 or -ENOMEM. */
int follower_tell_all(struct kvd_follow *follow, const struct kvd_follow_ops *ops, void *arg);

#endif
