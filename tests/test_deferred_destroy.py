"""A Gloo group whose operation never ends: destroying it does not wait, and the process can end."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from lockstep.comm.abortable_group import deferred_destroy

# Rank 1 stops for good after they have met. Rank 0 calls a collective that can never end, and lets go of the group.
PROGRAM = """
import gc, os, signal, sys, time
import torch, torch.distributed as dist
from datetime import timedelta
from lockstep.comm.abortable_group import deferred_destroy

folder, rank = sys.argv[1], int(sys.argv[2])
store = dist.FileStore(folder + "/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
group = dist.group.WORLD
work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
if sys.argv[3] == "keep":
    deferred_destroy.keep_alive(group)
began = time.monotonic()
dist.distributed_c10d._world.pg_map.clear()
dist.distributed_c10d._update_default_pg(None)
for kept in vars(dist.distributed_c10d._world).values():
    if isinstance(kept, dict):
        kept.clear()
del group, work, store
gc.collect()
deferred_destroy.destroy_unreferenced()
print(f"{time.monotonic() - began:.3f} {len(deferred_destroy.kept)}", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["keep", pytest.param("let go", marks=pytest.mark.slow)])
def test_a_group_that_cannot_end(tmp_path, way: str) -> None:  # type: ignore[no-untyped-def]
    """Without deferred_destroy, dropping the last reference blocks: if that ever changes, the module may go."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    stopped = subprocess.Popen([*command, "1", way], stderr=subprocess.DEVNULL)
    try:
        began_s = time.monotonic()
        waits_s = 40.0 if way == "keep" else 12.0
        try:
            done = subprocess.run([*command, "0", way], capture_output=True, text=True, timeout=waits_s, check=False)
        except subprocess.TimeoutExpired:
            assert way == "let go"
            return
        assert way == "keep", "torch's destructor does not wait any more"
        took_s, kept = done.stdout.split()
        assert float(took_s) < 2.0
        assert time.monotonic() - began_s < 30.0  # the whole process has ended
        assert done.returncode == 0
        assert int(kept) <= 1
    finally:
        stopped.kill()
        stopped.wait()


def test_a_group_that_is_still_referenced_is_not_destroyed() -> None:
    class Group:
        pass

    group = Group()
    before = len(deferred_destroy.kept)
    deferred_destroy.keep_alive(group)
    deferred_destroy.keep_alive(group)
    deferred_destroy.destroy_unreferenced()
    assert len(deferred_destroy.kept) == before + 1
    del group
    deferred_destroy.destroy_unreferenced()
    assert len(deferred_destroy.kept) == before
