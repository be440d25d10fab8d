"""Collectives on tensors, over shared memory, Gloo, NCCL and several hosts; knows no modules.

`tree_order` has the order of additions, `shard_sum` the sum over shards, `shm/` the shared-memory backend, `hierarchy`
the backend for several hosts, and `peer_watch` names a worker that is missing.
"""
