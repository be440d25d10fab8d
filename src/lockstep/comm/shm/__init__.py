"""Collectives at memory speed for workers on one host: the torch.distributed backend `shm`."""

from lockstep.comm.shm.group import ShmGroup

__all__ = ["ShmGroup"]
