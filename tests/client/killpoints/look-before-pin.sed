# SPDX-License-Identifier: Apache-2.0
# Does C5 before C3: the second look comes before the pin.
/pins = atomic_fetch_add_explicit/,/C3, C4 \*\/$/d
s/(slot, memory_order_seq_cst) == sealed/& \&\& (atomic_fetch_add(\&view->words[id].pins, 1), true)/
/C8 \*\/$/d
