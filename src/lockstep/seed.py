"""Random numbers that depend on their purpose, never on the worker that draws them.

A seed is derived from words: the user's seed, the purpose of the numbers, and an index. Two workers with the same words
draw the same numbers, independently of all other draws. Those of a shard are in `seed_of` of step/step.py.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

KEY_BITS = 63  # torch accepts seeds of this size everywhere
_spares: list[Any] = []  # generators of numpy that are not in use: making one takes as long as copying its state


def derive_seed(*words: int | str) -> int:
    """Return a seed made from several words: equal words give equal seeds in any process and on any machine."""
    digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - KEY_BITS)


def seed_all(key: int, device: torch.device | None = None) -> None:
    """Seed the generators of torch (also that of `device`, if it is a GPU), Python and numpy."""
    for generator in _torch_generators(device):
        generator.manual_seed(key)
    random.seed(key)
    numpy_random = _numpy_random()
    if numpy_random is not None:
        numpy_random.seed(key & 0xFFFFFFFF)


@contextmanager
def preserve_random_state(device: torch.device | None = None, *, is_seeded: bool = False) -> Iterator[None]:
    """Restore the state of all generators at the end of the block.

    is_seeded  the block calls `seed_all` before it draws numbers, which makes this several times as fast
    """
    torch_states = [(generator, generator.get_state()) for generator in _torch_generators(device)]
    python_state = random.getstate()
    restore_numpy = _keep_numpy_state(is_seeded=is_seeded)
    try:
        yield
    finally:
        for generator, state in torch_states:
            generator.set_state(state)
        random.setstate(python_state)
        restore_numpy()


def _keep_numpy_state(*, is_seeded: bool) -> Callable[[], None]:
    """Return a function that restores the state of numpy's global generator.

    To copy the state there and back takes half a millisecond. So before a block that seeds the generator, another one
    takes its place. What is lost then is the second number of a pair, if the program has drawn one normally distributed
    number just before.
    """
    numpy_random = _numpy_random()
    if numpy_random is None:
        return lambda: None
    if not is_seeded or not hasattr(numpy_random, "set_bit_generator"):  # numpy 1.24 and newer have it
        return partial(numpy_random.set_state, numpy_random.get_state())
    own, spare = numpy_random.get_bit_generator(), _spares.pop() if _spares else numpy_random.MT19937(0)
    numpy_random.set_bit_generator(spare)

    def restore() -> None:
        numpy_random.set_bit_generator(own)
        _spares.append(spare)

    return restore


def _torch_generators(device: torch.device | None) -> list[torch.Generator]:
    """Return the generator of the CPU, and that of `device` if it is a GPU."""
    if device is None or device.type != "cuda":
        return [torch.default_generator]
    return [torch.default_generator, cuda_generator(device)]


def cuda_generator(device: torch.device) -> torch.Generator:
    """Return the generator that torch uses for random numbers on this GPU."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def host_random_state() -> tuple[Any, ...]:
    """Return the state of all generators of the host, to be compared with a later one."""
    numpy_random = _numpy_random()
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    numpy_key = None if numpy_state is None else (numpy_state[1].tobytes(), *numpy_state[2:])
    return torch.default_generator.get_state().tolist(), random.getstate(), numpy_key


def _numpy_random() -> Any:
    """Return `numpy.random`, None if the program has not imported numpy.

    Accessing it loads the submodule, so that no step is the first to do so.
    """
    return getattr(sys.modules.get("numpy"), "random", None)
