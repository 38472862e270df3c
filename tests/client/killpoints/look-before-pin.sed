# SPDX-License-Identifier: Apache-2.0
# Does C5 before C3: the second look comes before the pin.
/pins = count_pin(.*C3, C4 \*\/$/d
s/(slot, memory_order_seq_cst) == sealed/& \&\& (count_pin(view, id), true)/
/C8 \*\/$/d
