"""Fused kernels for the operations of comm/integer_codec.py: in C on a CPU, in Triton on a GPU.

They are used where a C compiler or Triton is found, and where they return the same bits as the operations of torch in
a short trial; else these are used. The C file takes a second to compile, and is kept in the user's cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lockstep.comm.integer_codec import BLOCK, SECTION_BLOCKS, IntegerCodec, Kernels, TorchKernels, dither_table

logger = logging.getLogger(__name__)

SOURCE: Final = Path(__file__).with_suffix(".c")
FLAGS: Final = ("-O3", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC")
COMPILE_S: Final = 60.0


@cache
def kernels_for(codec: IntegerCodec, device: torch.device) -> Kernels:
    """Return the fastest kernels that work on this device."""
    fused: Kernels | None = None
    if device.type == "cpu":
        library = load_library()
        fused = CpuKernels(library, codec) if library is not None else None
    elif device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from lockstep.comm.codec_triton import TritonKernels

        fused = TritonKernels(codec)
    if fused is None or not _agree(fused, codec, device):
        return TorchKernels(codec)
    return fused


def _agree(fused: Kernels, codec: IntegerCodec, device: torch.device) -> bool:
    """Whether the kernels return the same bits as those of torch in a trial."""
    try:
        same = all(map(torch.equal, trial(fused, codec, device), trial(TorchKernels(codec), codec, device)))
    except Exception as error:
        logger.warning("compression: the fused kernels for %s failed, those of torch are used: %s", device, error)
        return False
    if not same:
        logger.warning("compression: the fused kernels for %s compute other bits; those of torch are used", device)
    return same


def trial(
    kernels: Kernels, codec: IntegerCodec, device: torch.device, *, blocks: int = SECTION_BLOCKS, sections: int = 2
) -> list[Tensor]:
    """Return what each of the kernels makes of the same gradients of two shards, some of them 0 or not finite.

    blocks  of each section
    """
    generator, dtype, count = torch.Generator("cpu").manual_seed(blocks), torch.float32, blocks * sections
    sizes = 10.0 ** torch.randint(-12, 12, (count, 1), generator=generator, dtype=dtype, device="cpu")
    shards = torch.randn(2, count, BLOCK, generator=generator, dtype=dtype, device="cpu") * sizes
    shards[0, -1], shards[1, count // 2, 5], shards[:, count // 3] = 0.0, float("inf"), 0.0
    shards, numbers = shards.to(device), torch.arange(7, 7 + count, device=device)
    codes = torch.empty(count, dtype=torch.uint8, device=device)
    kernels.block_codes(shards, codes)

    def bytes_of(bits: int, more: int = 0) -> Tensor:
        return torch.empty(sections, blocks * BLOCK * bits // 8 + more, dtype=torch.uint8, device=device)

    width, total = codec.sum_bits(2), codec.sum_bits(6)
    one, both, none, sums = (bytes_of(codec.sum_bits(shards)) for shards in (1, 2, 2, 6))
    rounded = bytes_of(codec.result_bits, blocks)
    kernels.encode(shards[:1], codes, numbers, [12], codec.sum_bits(1), one)
    kernels.encode(shards, codes, numbers, [2**62 + 5, 12], width, both)
    kernels.encode(shards[:0], codes, numbers, [], width, none)
    kernels.add([both, both, both], width, sums, total)
    for n, (row, of_row) in enumerate(zip(rounded, numbers.view(sections, blocks), strict=True)):
        kernels.round([sums[n], sums[n - 1]], total, 12 * codec.largest, of_row, 2**33 + 1, row)
    outs = [torch.empty_like(shards[0]) for _ in range(2)]
    kernels.decode(list(rounded), codes, 0.3, outs[0])
    kernels.decode(list(rounded), codes, torch.tensor(0.3, dtype=dtype, device=device), outs[1])
    return [codes, one, both, none, sums, rounded, *(out.view(torch.int32) for out in outs)]


# -- CPU ---------------------------------------------------------------------------------------------------------------


@cache
def load_library() -> Any:
    """Return the compiled C file; None if there is no compiler, or if it fails."""
    try:
        compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or ""]
        if not compiler[0]:
            return None
        cache = _cache_folder()
        if cache is not None:
            return ctypes.CDLL(str(_compile(compiler, cache)))
        with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
            return ctypes.CDLL(str(_compile(compiler, Path(folder))))
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        logger.info("compression: %s could not be compiled, the kernels of torch are used: %s", SOURCE.name, error)
        return None


def _cache_folder() -> Path | None:
    """Return the folder in which compiled files are kept; None if other users can write to it, or this one cannot."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lockstep"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):
        return None
    is_own = found.st_uid == os.getuid() and not found.st_mode & 0o022
    return folder if is_own and os.access(folder, os.W_OK) else None


def _compile(compiler: Sequence[str], folder: Path) -> Path:
    """Compile into this folder, if it is not there yet for the same source, compiler and kind of CPU."""
    words = (SOURCE.read_text(), *compiler, *FLAGS, platform.machine(), _cpu_features())
    library = folder / f"codec-{hashlib.blake2b(repr(words).encode(), digest_size=10).hexdigest()}.so"
    if not library.exists() or library.stat().st_uid != os.getuid():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            made = Path(work) / library.name
            command = [*compiler, *FLAGS, "-o", str(made), str(SOURCE)]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
            made.replace(library)
    return library


def _cpu_features() -> str:
    """Return what this kind of CPU can do: a home directory may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


# The arguments of the functions in the C file: p, a pointer; i, an int; l, an int64; u, a uint32; f, a float.
_TYPES: Final = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "l": ctypes.c_int64,
    "u": ctypes.c_uint32,
    "f": ctypes.c_float,
}
_ARGUMENTS: Final = {
    "block_codes": "plipli",
    "encode": "plipppplplili",
    "add_packed": "pilipliil",
    "round_packed": "piiipuplppli",
    "decode": "pipfpli",
}
MOST_BITS: Final = 15  # of sums that the functions in C compute


class CpuKernels:
    """See `Kernels`. Integers of more than 15 bits are left to torch."""

    def __init__(self, library: Any, codec: IntegerCodec) -> None:
        self._library, self.codec, self._torch = library, codec, TorchKernels(codec)
        tables = [dither_table(torch.device("cpu"), largest) for largest in (codec.largest, codec.largest_result)]
        self._table, self._table_of_sums = [(table.data_ptr(), len(table)) for table in tables]
        for name, kinds in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = [_TYPES[kind] for kind in kinds], None

    def block_codes(self, shards: Tensor, out: Tensor) -> None:
        one, bits = _pointer(shards), self.codec.bits
        self._library.block_codes(one, shards.stride(0), len(shards), _pointer(out), shards.shape[1], bits)

    def encode(
        self, shards: Tensor, codes: Tensor, numbers: Tensor, keys: Sequence[int], bits: int, out: Tensor
    ) -> None:
        if bits > MOST_BITS:
            self._torch.encode(shards, codes, numbers, keys, bits, out)
            return
        gradient, all_keys = (_pointer(shards), shards.stride(0), len(shards)), _keys(keys)
        packed, blocks = (_pointer(out), out.stride(0), len(out)), len(codes) // len(out)
        pointers = _pointer(codes), _pointer(numbers), all_keys
        self._library.encode(*gradient, *pointers, *self._table, *packed, blocks, bits)

    def add(self, packed: Sequence[Tensor], bits: int, out: Tensor, out_bits: int) -> None:
        if out_bits > MOST_BITS:
            self._torch.add(packed, bits, out, out_bits)
            return
        first, blocks = packed[0], out.shape[1] * 8 // out_bits // BLOCK
        assert all(one.stride() == first.stride() for one in packed)
        rows = _pointers(packed), len(packed), first.stride(0), bits
        self._library.add_packed(*rows, _pointer(out), out.stride(0), out_bits, len(out), blocks)

    def round(self, packed: Sequence[Tensor], bits: int, offset: int, numbers: Tensor, key: int, out: Tensor) -> None:
        if (2 * offset).bit_length() > MOST_BITS:
            self._torch.round(packed, bits, offset, numbers, key, out)
            return
        rows, blocks = (_pointers(packed), len(packed), bits), len(numbers)
        found = _pointer(out), _pointer(out) + len(out) - blocks
        dither = _pointer(numbers), key & 0xFFFFFFFF, *self._table_of_sums
        self._library.round_packed(*rows, offset, *dither, *found, blocks, self.codec.result_bits)

    def decode(self, rounded: Sequence[Tensor], codes: Tensor, scale: float | Tensor, out: Tensor) -> None:
        sections = _pointers(rounded), len(rounded)
        to = _pointer(out), len(codes) // len(rounded), self.codec.result_bits
        self._library.decode(*sections, _pointer(codes), float(scale), *to)


def _pointer(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _pointers(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*map(_pointer, tensors))


def _keys(keys: Sequence[int]) -> Any:
    return (ctypes.c_uint32 * len(keys))(*(key & 0xFFFFFFFF for key in keys))
