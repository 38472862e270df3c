# SPDX-License-Identifier: Apache-2.0
# Omits C5: the pin is trusted without a second look.
s/(slot, memory_order_seq_cst) == sealed)/(slot, memory_order_seq_cst) | sealed)/
