"""The control store of elastic runs: keys, revisions and leases, with compare-and-swap; in memory, over TCP or etcd."""
