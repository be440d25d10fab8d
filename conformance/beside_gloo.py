"""For tests of our own: compute something on the backend under test, again on Gloo in the same processes, compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close


class BesideGloo:
    """Mixed into PyTorch's test class, which forms the default group; `rank` and `file_name` are its."""

    rank: int
    file_name: str

    def compare_with_gloo(self, compute: Callable[[], dict[str, Tensor]], *, exact: bool = False) -> None:
        size, ours = dist.get_world_size(), compute()
        dist.destroy_process_group()
        store = dist.FileStore(f"{self.file_name}-gloo", size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=size)
        theirs = compute()
        assert theirs
        # Two numbers have one sum. Of more, the order in which they are added decides the last bit.
        tolerance: dict[str, Any] = {"rtol": 0, "atol": 0} if exact or size == 2 else {}
        assert_close({name: ours.get(name) for name in theirs}, theirs, **tolerance)
