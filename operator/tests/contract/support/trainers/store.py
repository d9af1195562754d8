"""A trainer's store, run by the engine environment's Python, which has torch: prints its port, and serves until its input ends.

Arguments: the host to listen on, and ``libuv`` or ``threads``, torch's two kinds of stores.
"""

import sys

import torch.distributed as dist
from torch.distributed.distributed_c10d import rendezvous

host, kind = sys.argv[1:]
store, _, _ = next(rendezvous(f"tcp://{host}:0?use_libuv={int(kind == 'libuv')}", 0, 1))
print(store.port, flush=True)
for line in sys.stdin:
    store.set("key", line.strip())
    client = dist.TCPStore(host, store.port, None, False, wait_for_workers=False)
    print(client.get("key").decode(), client.num_keys(), flush=True)
