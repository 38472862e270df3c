# SPDX-License-Identifier: Apache-2.0
# An epoch is used again once its namespace is forgotten.
s/.epoch = s->next_epoch++}/.epoch = s->n_namespaces}/
