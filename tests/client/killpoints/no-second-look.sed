# SPDX-License-Identifier: Apache-2.0
# The pin is believed at once: C5 is gone.
s/(slot, memory_order_seq_cst) == sealed)/(slot, memory_order_seq_cst) | sealed)/
