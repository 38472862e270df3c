# SPDX-License-Identifier: Apache-2.0
"""A machine of a Mooncake Store that lends it memory. Says so when it does, and stays."""
import sys
import time

from mooncake.store import MooncakeDistributedStore

store = MooncakeDistributedStore()
if store.setup("127.0.0.1", "P2PHANDSHAKE", 256 << 20, 32 << 20, "tcp", "", sys.argv[1]):
    sys.exit("node.py: the store cannot be set up")
print("ready", flush=True)
while True:
    time.sleep(60)
