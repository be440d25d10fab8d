"""Random numbers that depend on what they are for, never on who draws them.

A key is made from words: the user's seed, what the numbers are for, and which one of those. Two workers that make the
same key draw the same numbers, and nobody else's draws come between.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

KEY_BITS = 63  # what torch takes as a seed everywhere


def mix(*words: int | str) -> int:
    """One key from several words: equal words give equal keys, in any process and on any machine."""
    digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - KEY_BITS)


def sow(key: int, device: torch.device | None = None) -> None:
    """Torch's generator (the GPU's too, if that is the device), Python's and numpy's all start from this key."""
    torch.default_generator.manual_seed(key)
    if device is not None and device.type == "cuda":
        _cuda_generator(device).manual_seed(key)
    random.seed(key)
    numpy_random = _numpy_random()
    if numpy_random is not None:
        numpy_random.seed(key & 0xFFFFFFFF)


@contextmanager
def kept_random_state(device: torch.device | None = None) -> Iterator[None]:
    """Whatever is sown and drawn inside, outside the random numbers go on as if nothing had been."""
    on_gpu = device is not None and device.type == "cuda"
    torch_state = torch.default_generator.get_state()
    cuda_state = _cuda_generator(device).get_state() if on_gpu and device is not None else None
    python_state, numpy_random = random.getstate(), _numpy_random()
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        if cuda_state is not None and device is not None:
            _cuda_generator(device).set_state(cuda_state)
        random.setstate(python_state)
        if numpy_random is not None and numpy_state is not None:
            numpy_random.set_state(numpy_state)


def _cuda_generator(device: torch.device) -> torch.Generator:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _numpy_random() -> Any:
    """If the program has numpy: we do not import it. Asking for it loads it, before a step is the first to do so."""
    return getattr(sys.modules.get("numpy"), "random", None)
