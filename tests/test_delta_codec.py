"""Weights that are sent as differences from those that the receiver has: with all their bits, by every kernel."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import codec_kernels, delta_codec
from lockstep.ddp.optimizer_cells import Piece
from lockstep.ddp.weight_exchange import TRIALS, TRIED_EVERY, DifferenceTrial, WeightExchange
from on_workers import on_workers

SPECIAL = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, 3.4e38, float("inf"), float("-inf"), float("nan"), 1.0, -1.0])


def pairs(numel: int) -> list[tuple[Tensor, Tensor]]:
    """Old and new values of several kinds."""
    dice = torch.Generator().manual_seed(numel)
    old = torch.randn(numel, generator=dice)
    step = torch.randn(numel, generator=dice)
    special = SPECIAL[torch.randint(len(SPECIAL), (2, numel), generator=dice)]
    bits = torch.randint(-(2**31), 2**31, (2, numel), generator=dice).to(torch.int32).view(torch.float32)
    few = torch.where(torch.arange(numel) % 37 == 3, step, old)
    return [(old, old), (old, old - 1e-4 * step), (old, step), (special[0], special[1]), (bits[0], bits[1]), (old, few)]


def coded(old: Tensor, new: Tensor) -> Tensor:
    message = torch.full((delta_codec.most_bytes(len(new)),), 255, dtype=torch.uint8)
    return message[: delta_codec.encode(old, new, message)]


@pytest.mark.parametrize("numel", [1, 15, 16, 17, 1000, 4096])
def test_all_bits_arrive(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for old, new in pairs(numel):
        message, by_torch, found = coded(old, new), old.clone(), old.clone()
        longer = torch.cat([message, torch.full((7,), 255, dtype=torch.uint8)])  # another one follows
        assert delta_codec.decode(longer, found) == len(message)
        assert torch.equal(found.view(torch.int32), new.view(torch.int32))
        with monkeypatch.context() as patched:
            patched.setattr(delta_codec, "load_library", lambda: None)
            assert delta_codec.decode(longer, by_torch) == len(message)
        assert torch.equal(by_torch.view(torch.int32), new.view(torch.int32))


def test_kernels_for_every_cpu_write_the_same() -> None:
    library = codec_kernels.load_library()
    for old, new in pairs(1003):
        message = coded(old, new)
        other = torch.zeros(delta_codec.most_bytes(len(new)), dtype=torch.uint8)
        planes, count = other[64:], ctypes.c_int64(len(new))  # 63 groups
        library.encode_delta_portable.restype = ctypes.c_int64
        at: Any = [ctypes.c_void_p(one.data_ptr()) for one in (old, new, other, planes)]
        written = library.encode_delta_portable(*at, count)
        assert torch.equal(other[: 64 + 2 * written], message)
        found = old.clone()
        library.decode_delta_portable(ctypes.c_void_p(found.data_ptr()), *at[2:], count)
        assert torch.equal(found.view(torch.int32), new.view(torch.int32))


def test_a_small_step_needs_few_bytes() -> None:
    old, new = pairs(64 * 1024)[1]
    assert len(coded(old, new)) < 0.75 * new.nbytes
    assert len(coded(old, old)) < 0.02 * new.nbytes
    numel = len(new)
    worst = coded(torch.zeros(numel), torch.full((numel,), -1.0))
    assert len(worst) <= delta_codec.most_bytes(numel) < 1.02 * new.nbytes


def test_a_damaged_message_is_refused() -> None:
    old, new = pairs(100)[1]
    message = coded(old, new)
    wide = message.clone()
    wide[3] = 33
    for damaged in (message[:-2], message[:5], wide):
        with pytest.raises(ValueError, match="damaged"):
            delta_codec.decode(damaged, old.clone())


def test_kernels_that_compute_other_bits_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert delta_codec.can_encode()
    encode = delta_codec.encode

    def wrong(old: Tensor, new: Tensor, message: Tensor) -> int:
        return encode(old, (new.view(torch.int32) + 1).view(torch.float32), message)

    monkeypatch.setattr(delta_codec, "encode", wrong)
    delta_codec.can_encode.cache_clear()
    try:
        assert not delta_codec.can_encode()
        assert "weights are sent whole" in caplog.text
    finally:
        delta_codec.can_encode.cache_clear()


def test_what_is_faster_is_chosen() -> None:
    for differences_s, expected in ((1.0, True), (3.0, False)):
        trial, order = DifferenceTrial(), list[bool]()
        for _ in range(2 * TRIALS + 4):
            order.append(trial.wants_differences)
            trial.note(differences_s if order[-1] else 2.0, as_differences=order[-1])
        assert order == [False, True] * TRIALS + [expected] * 4


def test_another_trial_is_made_later() -> None:
    trial, taken_s = DifferenceTrial(), {True: 1.0, False: 2.0}
    for n in range(2 * TRIED_EVERY):
        if n == TRIED_EVERY // 2:  # the learning rate rises
            taken_s = {True: 3.0, False: 2.0}
        trial.note(taken_s[trial.wants_differences], as_differences=trial.wants_differences)
        if n in (TRIED_EVERY - 1, 2 * TRIED_EVERY - 1):
            assert trial.wants_differences == (n == TRIED_EVERY - 1)


def exchange(rank: int, size: int, has_compiler: bool) -> tuple[list[bool], bool]:
    """Exchange weights of several dtypes often, as a step changes them; rank 1 may have no kernels."""
    encode = delta_codec.encode
    with pytest.MonkeyPatch.context() as patched:
        if not has_compiler and rank == 1:
            patched.setattr(delta_codec, "load_library", lambda: None)
            patched.setattr(delta_codec, "can_encode", lambda: False)
        dice = torch.Generator().manual_seed(1)
        weights = [torch.randn(numel, generator=dice) for numel in (5000, 70001, 3)]
        weights += [weights[1].bfloat16(), torch.arange(999)]
        pieces = {
            one: [Piece(n, len(one) * n // size, len(one) * (n + 1) // size) for n in range(size)] for one in weights
        }
        group: Any = dist.group.WORLD
        exchange = WeightExchange(group, pieces, 64 * 1024, spans_hosts=True, sends=True)
        expected, as_differences = [one.clone() for one in weights], list[bool]()
        for step in range(10):
            exchange.copy_old_weights()
            lengths = list[int]()
            patched.setattr(delta_codec, "encode", lambda *given, to=lengths: to.append(encode(*given)) or to[-1])
            for one, wanted in zip(weights, expected, strict=True):
                change = torch.randn(len(one), generator=torch.Generator().manual_seed(step))
                wanted.add_((1e-3 * change).to(one.dtype) if one.is_floating_point() else (9 * change).long())
                for piece in pieces[one]:
                    if piece.owner == rank:
                        one[piece.start : piece.stop] = wanted[piece.start : piece.stop]
            exchange.run()
            as_differences.append(bool(lengths))
        return as_differences, all(map(torch.equal, weights, expected))


@pytest.mark.parametrize("has_compiler", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_weights_arrive_as_they_are(size: int, has_compiler: bool) -> None:
    found = on_workers(exchange, size, has_compiler)
    for rank, (as_differences, is_equal) in enumerate(found):
        assert is_equal
        if rank == 1 and not has_compiler:
            assert not any(as_differences)
        else:
            assert as_differences[: 2 * TRIALS] == [False, True] * TRIALS
