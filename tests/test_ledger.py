"""The ledger: which samples went into which applied step, and the proof that each did exactly once."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.cli import main as cli
from lockstep.data.ledger import NAME, Ledger, fingerprint, fingerprint_of_all, prove
from lockstep.data.sample_order import Shuffled
from lockstep.errors import LockstepError

WORD = 2**64


def hash_of(sample: int) -> int:
    """Written down once more, in plain numbers."""
    x = (sample + 0x9E3779B97F4A7C15) % WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


@pytest.mark.parametrize("samples", [[], [0], [5, 3, 5], range(1000), [2**40, 7], range(3, 100, 7)])
def test_a_fingerprint_is_the_sum_of_hashes(samples: Sequence[int]) -> None:
    assert fingerprint(samples) == sum(map(hash_of, samples)) % WORD


def test_all_samples_at_once_are_all_samples() -> None:
    assert fingerprint_of_all(3_000_001) == (fingerprint(range(3_000_000)) + hash_of(3_000_000)) % WORD


SIZE, BATCH = 50, 8
FACTS = {"global_batch_size": BATCH, "samples": SIZE, "seed": 3, "order": "Shuffled", "drop_last": False}
ORDER = Shuffled(SIZE, BATCH, 3)
STEPS = ORDER.steps(0)


def note(ledger: Ledger, number: int, samples: Sequence[int] | None = None) -> None:
    epoch, step = divmod(number, STEPS)
    used = ORDER.batch(epoch, step) if samples is None else samples
    ledger.record(number, epoch=epoch, samples=len(used), fingerprint=fingerprint(used), writes=False)


def keep(folder: Path, steps: int, changes: dict[int, Sequence[int]] | None = None) -> None:
    ledger = Ledger(folder)
    ledger.begin(0, FACTS, writes=True)
    ledger.set_workers(2)
    for number in range(steps):
        note(ledger, number, (changes or {}).get(number))
        if number % 3 == 0:
            ledger.write()
    ledger.write()


def test_every_sample_once(tmp_path: Path) -> None:
    keep(tmp_path, 2 * STEPS + 3)
    proof = prove(tmp_path)
    assert proof.holds
    assert [(epoch.steps, epoch.samples, epoch.complete, epoch.exact) for epoch in proof.epochs] == [
        (STEPS, SIZE, True, True),
        (STEPS, SIZE, True, True),
        (3, 3 * BATCH, False, True),
    ]


def test_one_sample_in_the_place_of_another_is_found(tmp_path: Path) -> None:
    """In every step of a complete and of an incomplete epoch."""
    for number in range(STEPS + 2):
        folder = tmp_path / str(number)
        epoch, step = divmod(number, STEPS)
        used = ORDER.batch(epoch, step)
        keep(folder, STEPS + 2, {number: [used[1], *used[1:]]})
        assert not prove(folder).holds
        keep(tmp_path / f"{number} short", STEPS + 2, {number: used[1:]})
        assert not prove(tmp_path / f"{number} short").holds


def test_two_mistakes_that_cancel_out_in_number_are_found(tmp_path: Path) -> None:
    first, second = ORDER.batch(0, 0), ORDER.batch(0, 1)
    keep(tmp_path, STEPS, {0: first[1:], 1: [*second, second[0]]})
    assert not prove(tmp_path).holds


def test_order_of_samples_inside_an_epoch_is_no_matter_of_the_proof(tmp_path: Path) -> None:
    keep(tmp_path, STEPS, {0: ORDER.batch(0, 1), 1: ORDER.batch(0, 0)})
    assert prove(tmp_path).holds


def test_another_writer_goes_on_behind_the_last_line(tmp_path: Path) -> None:
    ledgers = [Ledger(tmp_path) for _ in range(3)]
    ledgers[0].begin(0, FACTS, writes=True)
    for ledger in ledgers[1:]:
        ledger.begin(0, FACTS, writes=False)
    writer = random.Random(1)
    for number in range(2 * STEPS):
        for ledger in ledgers:
            note(ledger, number)
        if number % 4 == 0:
            for ledger in ledgers:
                ledger.set_workers(3)
            writer.choice(ledgers).write()
    ledgers[0].set_workers(1)
    ledgers[0].write()
    assert prove(tmp_path).holds
    assert prove(tmp_path).steps == 2 * STEPS


def test_a_worker_that_hands_its_state_over_writes_nothing_twice(tmp_path: Path) -> None:
    """It writes before the next generation has formed: it has not been told yet that the writer is another one now."""
    first, second = Ledger(tmp_path), Ledger(tmp_path)
    first.begin(0, FACTS, writes=True)
    second.begin(0, FACTS, writes=False)
    for number in range(3):
        note(first, number)
        note(second, number)
    first.write()
    second.write()
    for number in range(3, STEPS):
        note(first, number)
        note(second, number)
    second.write()
    first.write()
    assert prove(tmp_path).holds
    assert prove(tmp_path).steps == STEPS


def test_going_back_to_a_checkpoint(tmp_path: Path) -> None:
    keep(tmp_path, 6)
    again = Ledger(tmp_path)
    again.begin(4, FACTS, writes=True)
    for number in range(4, STEPS):
        note(again, number)
    again.write()
    assert prove(tmp_path).holds
    assert prove(tmp_path).restarts == 1


@pytest.mark.parametrize("lines", [[1, 0, 2], [0, 2], [0, 1, 1, 2]])
def test_lines_that_are_missing_doubled_or_swapped_are_refused(tmp_path: Path, lines: list[int]) -> None:
    keep(tmp_path, STEPS)
    head, *rest = (tmp_path / NAME).read_text().splitlines()
    (tmp_path / NAME).write_text("\n".join([head, *(rest[n] for n in lines)]) + "\n")
    with pytest.raises(LockstepError, match="missing, or were applied twice"):
        prove(tmp_path)


def test_what_is_no_ledger(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match="is not there"):
        prove(tmp_path)
    (tmp_path / NAME).write_text("[1]\n")
    with pytest.raises(LockstepError, match="line 1, is no line of a ledger"):
        prove(tmp_path)


# ---- through the front door ------------------------------------------------------------------------------------------


def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[0])


def train(folder: Path, *, order: Any = None, drop_last: bool = False, steps: int | None = None) -> None:
    data = TensorDataset(torch.randn(SIZE, 3), torch.randn(SIZE, 1))
    with lockstep.Run(folder, seed=3, progress=False, save_every=5) as run:
        model = run.replicate(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batches = run.batches(data, global_batch_size=BATCH, shards=4, epochs=3, order=order, drop_last=drop_last)
        for batch in run.train(batches, optimizer, steps=steps):
            run.step(loss, batch)


class SomeTwice:
    """An order that uses the first sample in every batch."""

    def steps(self, epoch: int) -> int:
        return STEPS

    def batch(self, epoch: int, step: int) -> list[int]:
        return [0, *ORDER.batch(epoch, step)[1:]]


def test_a_run_proves_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, steps=9)
    train(tmp_path)  # goes on
    assert cli.main(["ledger", str(tmp_path)]) == 0
    said = capfd.readouterr().out
    assert said.count("each sample once") == 3
    assert "proven" in said
    assert cli.main(["ledger", str(tmp_path), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["holds"] is True


def test_dropped_samples_are_not_missed(tmp_path: Path) -> None:
    train(tmp_path, drop_last=True)
    assert prove(tmp_path).holds


def test_an_order_that_repeats_a_sample_is_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, order=SomeTwice())
    assert cli.main(["ledger", str(tmp_path)]) == 1
    assert "but not each of 50 once" in capfd.readouterr().out


def test_bad_input(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ledger", str(tmp_path / "nowhere")]) == 2
    assert "is not there" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty: the run was lost before it had noted a step"),
        (b"\n\n", "line 1, is no line of a ledger"),
        (b'{"begin": 0}\n', "is empty: the run was lost"),
        (
            b'{"start": 0, "stop": 2, "epoch": 0, "samples": 4, "fingerprint": 1, "workers": 1}\n',
            "does not say samples",
        ),
        (b"\xff\xfe\x00", "is no ledger: "),
    ],
)
def test_a_file_without_lines_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, words: str
) -> None:
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(LockstepError, match=words):
        prove(tmp_path)
    assert cli.main(["ledger", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"lockstep: {tmp_path / NAME}")
