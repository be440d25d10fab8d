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

from lockstep.comm.integer_codec import BLOCK, IntegerCodec, Kernels, Rows, TorchKernels, dither_table

logger = logging.getLogger(__name__)

SOURCE: Final = Path(__file__).with_suffix(".c")
FLAGS: Final = ("-O3", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC")
COMPILE_S: Final = 60.0
_NARROW: Final = (torch.uint8, torch.int16)


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
    kernels: Kernels, codec: IntegerCodec, device: torch.device, *, blocks: int = 6, sections: int = 2
) -> list[Tensor]:
    """Return what each of the kernels makes of the same gradients of two shards, some of them 0 or not finite."""
    generator, dtype = torch.Generator("cpu").manual_seed(blocks), torch.float32
    sizes = 10.0 ** torch.randint(-12, 12, (blocks, 1), generator=generator, dtype=dtype, device="cpu")
    shards = torch.randn(2, blocks, BLOCK, generator=generator, dtype=dtype, device="cpu") * sizes
    shards[0, -1], shards[1, blocks // 2, 5], shards[:, blocks // 3] = 0.0, float("inf"), 0.0
    shards, numbers = shards.to(device), torch.arange(7, 7 + blocks, device=device)
    codes = kernels.block_codes(shards)
    sums = torch.empty(blocks, BLOCK, dtype=codec.sum_dtype(2), device=device)
    kernels.encode(shards, codes, numbers, [2**62 + 5, 12], sums)
    width, numel = codec.sum_bits(2), blocks * BLOCK
    packed = torch.empty(sections, numel // sections * width // 8, dtype=torch.uint8, device=device)
    kernels.pack(sums.view(sections, -1), width, packed)
    total = torch.empty(numel // sections, dtype=torch.int16, device=device)
    kernels.unpack_sum(packed, width, total)
    values, shifts = torch.empty_like(sums, dtype=torch.uint8), torch.empty_like(codes)
    kernels.round_sums(sums.short(), 2 * codec.largest, numbers, 2**33 + 1, values, shifts)
    final = torch.empty(sections, numel // sections * codec.result_bits // 8, dtype=torch.uint8, device=device)
    kernels.pack(values.view(sections, -1), codec.result_bits, final)
    outs = [torch.empty_like(shards[0]) for _ in range(2)]
    kernels.decode(final, codes, shifts, 0.3, outs[0])
    kernels.decode(final, codes, shifts, torch.tensor(0.3, dtype=torch.float32, device=device), outs[1])
    return [codes, sums, packed, total, values, shifts, final, *(out.view(torch.int32) for out in outs)]


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


class CpuKernels:
    """See `Kernels`. Integers of more than 15 bits are left to torch."""

    def __init__(self, library: Any, codec: IntegerCodec) -> None:
        self._library, self.codec, self._torch = library, codec, TorchKernels(codec)
        tables = [dither_table(torch.device("cpu"), largest) for largest in (codec.largest, codec.largest_result)]
        self._table, self._table_of_sums = [(_at(table), ctypes.c_int64(len(table))) for table in tables]

    def block_codes(self, shards: Tensor) -> Tensor:
        codes = torch.empty(shards.shape[1], dtype=torch.uint8, device="cpu")
        for n, one in enumerate(shards):
            self._library.block_codes(_at(one), _at(codes), _count(one), self.codec.bits, int(n > 0))
        return codes

    def encode(self, shards: Tensor, codes: Tensor, numbers: Tensor, keys: Sequence[int], out: Tensor) -> None:
        if out.dtype not in _NARROW:
            self._torch.encode(shards, codes, numbers, keys, out)
            return
        encode = self._library.encode_uint8 if out.dtype == torch.uint8 else self._library.encode_int16
        for n, (one, key) in enumerate(zip(shards, keys, strict=True)):
            at = [_at(tensor) for tensor in (one, codes, numbers)]
            encode(*at, _key(key), *self._table, _at(out), _count(one), int(n > 0))

    def pack(self, values: Tensor, bits: int, out: Tensor) -> None:
        if values.dtype not in _NARROW:
            self._torch.pack(values, bits, out)
            return
        pack = self._library.pack_uint8 if values.dtype == torch.uint8 else self._library.pack_int16
        for row, packed in zip(values, out, strict=True):
            pack(_at(row), _at(packed), ctypes.c_int64(row.numel()), bits)

    def unpack_sum(self, packed: Rows, bits: int, out: Tensor) -> None:
        if out.dtype != torch.int16:
            self._torch.unpack_sum(packed, bits, out)
            return
        for n, row in enumerate(packed):
            self._library.unpack(_at(row), _at(out), ctypes.c_int64(out.numel()), bits, int(n > 0))

    def round_sums(self, sums: Tensor, offset: int, numbers: Tensor, key: int, values: Tensor, shifts: Tensor) -> None:
        if sums.dtype != torch.int16:
            self._torch.round_sums(sums, offset, numbers, key, values, shifts)
            return
        at, to = [_at(sums), offset, _at(numbers), _key(key)], [_at(values), _at(shifts)]
        self._library.round_sums(*at, *self._table_of_sums, *to, _count(sums), self.codec.result_bits)

    def decode(self, packed: Rows, codes: Tensor, shifts: Tensor, scale: float | Tensor, out: Tensor) -> None:
        blocks, factor = len(out) // len(packed), ctypes.c_float(float(scale))
        for n, section in enumerate(packed):
            at = slice(n * blocks, (n + 1) * blocks)
            given = [_at(tensor) for tensor in (section, codes[at], shifts[at])]
            self._library.decode(*given, factor, _at(out[at]), ctypes.c_int64(blocks), self.codec.result_bits)


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _count(blocks: Tensor) -> ctypes.c_int64:
    return ctypes.c_int64(len(blocks))


def _key(key: int) -> ctypes.c_uint32:
    return ctypes.c_uint32(key & 0xFFFFFFFF)
