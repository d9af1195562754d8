"""A trainer's store, run by the engine environment's Python, which has torch: prints its port, and serves until its input ends.

Arguments: the host to listen on, and ``libuv`` or ``threads``, torch's two kinds of stores.
"""

import sys

import torch.distributed as dist

host, kind = sys.argv[1:]
store = dist.TCPStore(host, 0, None, True, wait_for_workers=False, use_libuv=kind == "libuv")
print(store.port, flush=True)
for line in sys.stdin:
    store.set("key", line.strip())
    client = dist.TCPStore(host, store.port, None, False, wait_for_workers=False)
    print(client.get("key").decode(), client.num_keys(), flush=True)
