"""Sums of gradients, which are formed for some parameters at a time: the same bits as tensor by tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.step import subtree_gradients
from lockstep.step.subtree_gradients import GradientAdder, SubtreeGradients, pack_groups

SIZES = (3, 50, 1, 200, 7, 7)


def draw(seed: int, missing: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return [None if n == missing else torch.randn(size, generator=generator) for n, size in enumerate(SIZES)]


def plain_sum(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None and right is None:
        return None
    return (0.0 if left is None else left) + (torch.zeros(()) if right is None else right)


@pytest.mark.parametrize("missing", [-1, 0, 3])
@pytest.mark.parametrize("summands", [1, 2, 4])
@pytest.mark.parametrize("group_bytes", [1, 256, 2**20])
def test_the_sum_is_that_of_single_tensors(
    group_bytes: int, summands: int, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subtree_gradients, "GROUP_BYTES", group_bytes)
    parameters = [torch.empty(size) for size in SIZES]
    groups = pack_groups(parameters, range(len(SIZES)))
    assert [i for group in groups for i in group] == list(range(len(SIZES)))
    assert len(groups) == {1: 6, 256: 3, 2**20: 1}[group_bytes]
    parts = [SubtreeGradients(draw(n, missing if n % 2 else -1)) for n in range(summands)]
    expected = [None if value is None else value.clone() for value in parts[-1].values]
    for part in parts[-2::-1]:
        expected = [plain_sum(left, right) for left, right in zip(part.values, expected, strict=True)]
    alias = parts[0].values[4]
    assert alias is not None
    alias, before = alias.view(-1), alias.clone()  # of the program, so this memory may not be written
    total = GradientAdder(parameters, []).add_and_scale(parts[-2::-1], parts[-1], 0.3)
    assert torch.equal(alias, before)
    for value, wanted in zip(total.values, expected, strict=True):
        assert (value is None) == (wanted is None)
        assert value is None or wanted is None or torch.equal(value, wanted * 0.3)


def test_what_is_not_added_stays_as_it_is() -> None:
    parameters, kept = [torch.empty(size) for size in SIZES], SubtreeGradients(draw(1, -1), is_owned=True)
    assert GradientAdder(parameters, []).add_all([], kept) is kept  # else its memory would not be written later


def test_gradients_that_are_there_are_added_together_also_if_another_one_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts, add = list[int](), subtree_gradients._torch.foreach_add_
    monkeypatch.setattr(subtree_gradients._torch, "foreach_add_", lambda a, b: counts.append(len(a)) or add(a, b))
    left, right = SubtreeGradients(draw(1, -1), is_owned=True), SubtreeGradients(draw(2, 3))
    places = [None if value is None else value.data_ptr() for value in left.values]
    total = GradientAdder([torch.empty(size) for size in SIZES], []).add_all([left], right)
    assert counts == [len(SIZES) - 1]
    assert [n for n, one in enumerate(total.values) if one is None or one.data_ptr() != places[n]] == [3]
