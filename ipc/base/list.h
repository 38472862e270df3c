/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_LIST_H
#define KVD_BASE_LIST_H

/*
 * An intrusive doubly linked list. Zeroed memory is an empty list, or a node in no list. A node has
 * a pointer to its list, so it can be removed without knowing the list, and tell whether it is in
 * one.
 *
 *      struct timer { struct kvd_list_node node; ... };
 *      struct timer *first = kvd_list_first(&timers, struct timer, node);     NULL: the list is empty
 */

#include <stdbool.h>
#include <stddef.h>

#include "ipc/base/util.h"

struct kvd_list {
        struct kvd_list_node *first, *last;
};

struct kvd_list_node {
        struct kvd_list_node *prev, *next;
        struct kvd_list *in; /* NULL: in no list */
};

/* Inserts before that node; NULL: at the end. */
static inline void kvd_list_insert(struct kvd_list *list, struct kvd_list_node *before,
                                   struct kvd_list_node *node) {
        node->in = list;
        node->next = before;
        node->prev = before ? before->prev : list->last;
        *(node->prev ? &node->prev->next : &list->first) = node;
        *(node->next ? &node->next->prev : &list->last) = node;
}

/* False: the node was in no list. */
static inline bool kvd_list_remove(struct kvd_list_node *node) {
        if (!node->in)
                return false;
        *(node->prev ? &node->prev->next : &node->in->first) = node->next;
        *(node->next ? &node->next->prev : &node->in->last) = node->prev;
        *node = (struct kvd_list_node){0};
        return true;
}

/* NULL: the list is empty. */
#define kvd_list_first(list, type, member) \
        ({ \
                struct kvd_list_node *first_ = (list)->first; \
                first_ ? container_of(first_, type, member) : NULL; \
        })

#endif
