"""A 64-bit hash of the content of a sample: equal in every process that has read the same sample.

Note [Equal content]
The hash is used to find out whether two workers have read the same samples. A false alarm would stop a correct run, so
only what is certainly part of the data is hashed: tensors, arrays, images, numbers, strings, bytes, and containers and
objects of these. Of anything else only the name of its type is hashed. Sets are hashed independently of their order,
which differs between processes.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Number
from typing import Any, Final

import torch
from torch import Tensor

_WORD: Final = 2**64
_LEVELS: Final = 20  # of nested containers; of deeper ones only the type is hashed


def hash_of_sample(sample: Any) -> int:
    """Return a 64-bit hash that is never 0."""
    digest = hashlib.blake2b(digest_size=8)
    _add(digest, sample, 0)
    return int.from_bytes(digest.digest(), "big") or 1


def hash_of_samples(samples: Iterable[Any]) -> int:
    """Return a 64-bit hash of all samples in their order. It is never 0."""
    digest = hashlib.blake2b(digest_size=8)
    for sample in samples:
        digest.update(hash_of_sample(sample).to_bytes(8, "big"))
    return int.from_bytes(digest.digest(), "big") or 1


def _add(digest: Any, value: Any, level: int) -> None:
    """Hash a value, preceded by its type, so that 1, True, 1.0 and "1" differ."""
    digest.update(f"<{type(value).__qualname__}>".encode())
    if level > _LEVELS or value is None:
        return
    if isinstance(value, str | bytes | bytearray):
        raw = value.encode(errors="surrogatepass") if isinstance(value, str) else value
        digest.update(len(raw).to_bytes(8, "big"))
        digest.update(raw)
    elif isinstance(value, float):
        digest.update(struct.pack(">d", value))
    elif isinstance(value, Number):
        digest.update(repr(value).encode())
    elif isinstance(value, Tensor):
        _add_tensor(digest, value)
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            _add(digest, key, level + 1)
            _add(digest, inside, level + 1)
    elif isinstance(value, Set):
        total = sum(hash_of_sample(inside) for inside in value) % _WORD
        digest.update(total.to_bytes(8, "big"))
    elif callable(getattr(value, "tobytes", None)):  # numpy arrays and scalars, images, array.array, memoryview
        _add_array(digest, value)
    elif isinstance(value, Sequence):
        digest.update(len(value).to_bytes(8, "big"))
        for inside in value:
            _add(digest, inside, level + 1)
    elif hasattr(value, "__dict__") and not callable(value):
        for name, inside in sorted(vars(value).items()):
            _add(digest, name, level + 1)
            _add(digest, inside, level + 1)


def _add_tensor(digest: Any, tensor: Tensor) -> None:
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        return
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    digest.update(ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b"")


def _add_array(digest: Any, array: Any) -> None:
    if str(getattr(array, "dtype", "")) == "object":  # its bytes are memory addresses
        digest.update(repr(getattr(array, "shape", "")).encode())
        return
    for name in ("dtype", "shape", "size", "mode"):
        fact = getattr(array, name, None)
        digest.update(repr(fact).encode() if isinstance(fact, str | int | tuple) else str(fact).encode())
    digest.update(array.tobytes())
