"""Audits: which shards are computed twice, which worker is wrong if the results differ, and how a run heals."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.checkpoint.store import CheckpointStore, choose_outdated
from lockstep.data.sample_order import shards_of_rank
from lockstep.ddp.replica import position_digests
from lockstep.step import audit
from lockstep.step.audit import AuditSchedule, audit_tasks, count_wrong_answers, is_round, judge
from on_workers import on_workers, run_program
from runs import PROGRAMS, train, use

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


def shares_of(shards: int, size: int) -> list[list[int]]:
    return [list(shards_of_rank(shards, size, rank)) for rank in range(size)]


# ---- which shards ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3, 20])
@pytest.mark.parametrize(("shards", "size"), [(1, 1), (2, 2), (8, 2), (8, 3), (8, 5), (12, 4)])
def test_a_round_audits_one_shard_of_every_worker(shards: int, size: int, every: int) -> None:
    shares, seen = shares_of(shards, size), set[int]()
    for number in range(every - 1, every * 3 * shards, every):
        tasks = audit_tasks(number, shares, every)
        assert is_round(number, every)
        assert [task.owner for task in tasks] == [rank for rank, share in enumerate(shares) if share]
        assert all(task.shard in shares[task.owner] for task in tasks)
        assert all(task.auditor != task.owner for task in tasks) or size == 1
        assert len({task.auditor for task in tasks}) == len(tasks)  # one more pass for each worker
        seen |= {task.shard for task in tasks}
    assert seen == set(range(shards))


@pytest.mark.parametrize("every", [2, 3, 5, 7, 20])
def test_workers_with_fewer_shards_audit_once_between_two_rounds(every: int) -> None:
    shares, found = shares_of(8, 3), Counter[int]()
    for number in range(every * 12):
        tasks = audit_tasks(number, shares, every)
        if not is_round(number, every):
            assert len(tasks) == (1 if (number + 1) % every == every // 2 else 0)
            found.update(task.shard for task in tasks)
            assert all(len(shares[task.auditor]) == 2 for task in tasks)
    (idle,) = [shares[rank] for rank in range(3) if len(shares[rank]) == 2]
    assert found == dict.fromkeys(set(range(8)) - set(idle), 2)


def test_workers_with_as_many_shards_audit_only_in_rounds() -> None:
    assert [n for n in range(40) if audit_tasks(n, shares_of(8, 4), 10)] == [9, 19, 29, 39]


def test_without_audits_nothing_is_audited() -> None:
    assert not any(audit_tasks(number, shares_of(8, 3), 0) for number in range(50))


def test_how_often_depends_on_what_a_round_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(audit.time, "perf_counter", lambda: now_s[0])
    schedule, fixed = AuditSchedule("auto"), AuditSchedule(7)
    assert (schedule.every, fixed.every) == (audit.FIRST_ROUND, 7)

    numbers = (number // 2 for number in itertools.count())  # each of the two schedules gets every number

    def take_step(took_s: float, *, has_round: bool = False) -> None:
        for one in (schedule, fixed):
            one.begin_step(next(numbers))
        now_s[0] += took_s
        for one in (schedule, fixed):
            one.end_step(is_round=has_round)
        now_s[0] += 60.0  # the program evaluates, which does not count

    for took_s in (0.1, 0.1, 4.8, 0.1, 0.1, 0.1):  # one step is long: a checkpoint, say
        take_step(took_s)
    for cost_s, wanted in ((0.02, 200), (0.0005, audit.MIN_EVERY), (100.0, audit.MAX_EVERY)):
        schedule.round_s = fixed.round_s = cost_s
        assert schedule.wanted_every() == pytest.approx(wanted, abs=1)  # estimated
        assert fixed.wanted_every() == 7
    schedule.round_s = 0.01
    for took_s in (0.4, 7.0, 0.4):  # of which 0.3 s are the round's; and one that waited for something else
        take_step(took_s, has_round=True)
    assert schedule.wanted_every() == pytest.approx(750, abs=1)  # measured
    assert fixed.wanted_every() == 7


def test_steps_of_several_optimisers_are_compared_with_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(audit.time, "perf_counter", lambda: now_s[0])
    schedule = AuditSchedule("auto")
    for number in range(20):
        for took_s in (0.1, 1.0):  # of two optimisers
            schedule.begin_step(number)
            now_s[0] += took_s * (2 if number == 10 else 1)
            schedule.end_step(is_round=number == 10)
    assert schedule.wanted_every() == pytest.approx(1 / audit.SHARE_OF_TIME, abs=1)  # a round takes as long as a batch


# ---- which worker ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 4, 5])
def test_one_wrong_worker_is_named(size: int) -> None:
    for owner, faulty in itertools.product(range(size), repeat=2):
        auditor = (owner + 1) % size
        stays = [666 if rank == faulty else 1 for rank in range(size)]
        assert judge({owner: stays[owner], auditor: stays[auditor]}, stays) == (faulty,)
        if faulty in (owner, auditor):  # only once
            assert judge({owner: stays[owner], auditor: stays[auditor]}, [1] * size) == (faulty,)


def test_two_workers_are_told_apart_only_if_one_of_them_repeats_differently() -> None:
    assert judge({0: 666, 1: 1}, [1, 1]) == (0,)
    assert judge({0: 666, 1: 1}, [666, 1]) is None
    assert judge({}, [1]) is None


def test_what_does_not_repeat_anywhere_is_blamed_on_no_worker() -> None:
    assert judge({0: 1, 1: 2}, [3, 4, 5]) is None


def test_known_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_wrong_answers(CPU) == 0
    right = torch.Tensor.__matmul__

    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result = right(a, b)
        if result.dtype is torch.float32:
            result[0, 0] += 1
        return result

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    assert count_wrong_answers(CPU) == 6  # an element and a sum, of three matrices


def flipped(tensor: torch.Tensor, *places: tuple[int, int]) -> torch.Tensor:
    changed = tensor.clone()
    for element, bit in places:
        changed.view(torch.uint8).numpy()[4 * element + bit // 8] ^= 1 << bit % 8
    return changed


@pytest.mark.parametrize("count", [1, 2, 3, 2047, 2048, 2049, 10_001])
def test_every_bit_and_every_pair_of_bits_counts(count: int) -> None:
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(count))
    (digest,) = position_digests([tensor])
    assert position_digests([tensor.clone()]) == [digest]
    places = sorted({0, 1, count // 2, count - 1} & set(range(count)))
    for element, bit in itertools.product(places, range(32)):
        assert position_digests([flipped(tensor, (element, bit))]) != [digest]
        for other in range(0, count, max(1, count // 16)):
            if other != element:  # the same bit in another element
                assert position_digests([flipped(tensor, (element, bit), (other, bit))]) != [digest]


@pytest.mark.parametrize("bit", [15, 23, 30, 31])
@pytest.mark.parametrize("count", [4, 8, 2000])
def test_the_same_bit_of_many_elements_changes_a_digest(bit: int, count: int) -> None:
    """Such changes of the highest bits are alike in both halves of a word, and must not cancel between words."""
    generator = torch.Generator().manual_seed(count)
    for _ in range(50):
        tensor = torch.randn(count, generator=generator)
        damaged = flipped(tensor, *((element, bit) for element in range(count)))
        assert position_digests([damaged]) != position_digests([tensor])


def test_digests_of_other_kinds_of_tensors() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[3, 1]]), torch.tensor([1.0, 2.0]), (5,))
    other = torch.sparse_coo_tensor(torch.tensor([[3, 0]]), torch.tensor([1.0, 2.0]), (5,))
    for one, two in (
        (sparse, other),
        (torch.ones(3, 2, dtype=torch.bfloat16), torch.ones(3, 2, dtype=torch.bfloat16).neg()),
        (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().flip(0)),
        (torch.tensor(True), torch.tensor(False)),
    ):
        assert position_digests([one]) == position_digests([one.clone()]) != position_digests([two])
    assert position_digests([torch.empty(0)]) == [0]


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept_step", "outdated"),
    [(None, [2, 4, 6]), (9, [2, 4]), (6, [2, 4]), (5, [2, 6]), (1, [2, 4, 6]), (8, [2, 4, 6]), (20, [2, 4, 6])],
)
def test_the_newest_verified_checkpoint_is_kept(kept_step: int | None, outdated: list[int]) -> None:
    steps = [2, 4, 6, 8, 10] if kept_step != 9 else [2, 4, 6, 10]
    found = choose_outdated(steps, lambda _: True, written=10, kept=2, kept_step=kept_step)
    assert found == (outdated if kept_step != 9 else [2, 4])


def test_a_damaged_checkpoint_is_not_the_one_that_is_kept() -> None:
    assert choose_outdated([2, 4, 6, 8, 10], lambda s: s != 4, written=10, kept=2, kept_step=5) == [4, 6]


def test_suspect_checkpoints_are_set_aside(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.set_aside_after(0) == []
    for step in (3, 6, 9):
        store.kept_step = 3
        store.save(step, {"x": torch.tensor([step])})
    assert store.set_aside_after(5) == [6, 9]
    found = store.newest()
    assert found is not None
    assert found.step == 3
    assert sorted(path.name for path in (tmp_path / "suspect").iterdir()) == ["step-000000006", "step-000000009"]
    store.save(6, {"x": torch.tensor([7])})
    assert store.set_aside_after(5) == [6]  # what was there is replaced
    store.prune(6)  # by the thread that has just written it: there is nothing to report


def test_setting_aside_that_was_interrupted_is_finished_by_the_next_start(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.finish_setting_aside()
    for step in (3, 6):
        store.save(step, {"x": torch.tensor([step])})
    store.finish_setting_aside()
    assert store.last() == store.path_of(6)
    (store.directory / "suspect-after").write_text("5")
    with lockstep.Run(tmp_path, progress=False, device="cpu"):
        pass
    assert store.last() == store.path_of(3)
    assert not (store.directory / "suspect-after").exists()


@pytest.mark.parametrize("value", [-1, 1.5, True, "often", None])
def test_wrong_values(value: Any) -> None:
    with pytest.raises(ValueError, match="audit_every="):
        lockstep.Run(audit_every=value)


def train_compiled(rank: int, size: int, folder: str) -> list[str]:
    use("shm", f"{folder}/store {size}", rank, size)
    program, options = PROGRAMS["gpt with dropout and tied weights, AdamW"], {"compile": {"backend": "inductor"}}
    return [train(program, audit_every=every, **options)[0] for every in (0, 2)]


@pytest.mark.slow
def test_audits_of_a_compiled_model_change_no_bit(tmp_path: Path) -> None:
    found = [one for size in (1, 3) for one in on_workers(train_compiled, size, str(tmp_path))]
    assert len({digest for digests_ in found for digest in digests_}) == 1


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_faults_are_found_and_leave_no_trace() -> None:
    """Some of what `chaos/corruption.py` does 5,000 times."""
    options = ["--faults", "12", "--audits", "600", "--cost-steps", "0", "--seed", "3"]
    command = [sys.executable, "chaos/corruption.py", *options]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 faults, 0 failed; 600 audits without a fault, 0 false alarms" in done.stdout


PROGRAM = """
import os, sys
import torch
import lockstep
sys.path.insert(0, {chaos!r})
from corruption import Fault, flip, loss, mlp
from torch.utils.data import TensorDataset

fault = Fault("gradients", 0, 13, 0.5, (0.5,), 21)
x = torch.randn(160, 16, generator=torch.Generator().manual_seed(0))
now = -1

def wrong(gradient):
    if os.environ.get("FAULTY") == os.environ.get("LOCAL_RANK", "0") and now >= fault.step:
        gradient = gradient.clone()
        flip(gradient, fault)
    return gradient

with lockstep.Run("run", seed=1, device="cpu", audit_every=5, save_every=4) as run:
    model = run.replicate(mlp())
    model[0].weight.register_hook(wrong)
    batches = run.batches(TensorDataset(x, x[:, :5].argmax(1)), global_batch_size=16, shards=6, epochs=None)
    for batch in run.train(batches, torch.optim.AdamW(model.parameters(), lr=0.01), steps=40):
        now = batch.number
        run.step(loss, batch)
        print("step", now, flush=True)
    print("digest", run.digest(), flush=True)
"""


def launch(folder: Path, *options: str, **env: str) -> tuple[int, str, list[dict[str, Any]]]:
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM.format(chaos=str(ROOT / "chaos")))
    command = [sys.executable, "-m", "lockstep", "run", *options, "--log-dir", "logs", "program.py"]
    done = subprocess.run(
        command,
        cwd=folder,
        env=dict(os.environ) | {"CUDA_VISIBLE_DEVICES": ""} | env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    events = folder / "logs" / "events.jsonl"
    lines = events.read_text().splitlines() if events.exists() else []
    return done.returncode, done.stdout + done.stderr, [json.loads(line) for line in lines]


def digests(output: str) -> set[str]:
    return set(re.findall(r"digest (\w+)", output))


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    script = tmp_path_factory.mktemp("clean") / "program.py"
    script.write_text(PROGRAM.format(chaos=str(ROOT / "chaos")))
    status, output = run_program(script, CUDA_VISIBLE_DEVICES="")
    assert status == 0, output
    return digests(output)


def test_a_faulty_machine_is_left_out_and_the_others_end_with_the_digest_of_a_clean_run(
    tmp_path: Path, clean: set[str]
) -> None:
    status, output, events = launch(tmp_path / "run", "-n", "3", "--min", "1", FAULTY="1")
    assert status == 0, output
    assert digests(output) == clean, output
    assert "2 of 3 agree: rank 1 is wrong" in output
    assert "(slot 1) computed wrongly; no worker is started in its place" in output
    # Audited in steps 4, 9 and 14, saved after 4, 8 and 12 of them. If the disk is slow, the second is not written yet.
    assert re.search("resumed from step [48] ", output), output
    assert [event["slot"] for event in events if event["event"] == "faulty"] == [1]
    sizes = [len(event["members"]) for event in events if event["event"] == "generation"]
    assert (sizes[0], sizes[-1]) == (3, 2)  # on a busy machine one of the two may begin alone
    slots = [event["slot"] for event in events if event["event"] == "started"]
    assert sorted(slots[:3]) == [0, 1, 2]
    assert sorted(slots[3:]) == [0, 2]
    assert not [event for event in events if event["event"] == "lost"]
    # It is dropped, not set aside, if it was still being written.
    assert [path.name for path in (tmp_path / "run" / "run").glob("suspect/*")] in ([], ["step-000000012"])


@pytest.mark.slow
def test_of_two_workers_it_cannot_be_told_which_is_wrong(tmp_path: Path) -> None:
    status, output, events = launch(tmp_path / "run", "-n", "2", "--min", "1", FAULTY="1")
    assert status != 0, output
    assert "one of them is a faulty machine, and it cannot be told which" in output
    assert 2 <= len([event for event in events if event["event"] == "goes back"]) <= 6
    assert "workers failed with the same error" in output


@pytest.mark.slow
def test_a_fixed_world_ends_with_the_name_of_the_worker_and_resumes_from_what_is_verified(
    tmp_path: Path, clean: set[str]
) -> None:
    status, output, _ = launch(tmp_path / "run", "-n", "3", FAULTY="1")
    assert status == 1, output
    assert "DivergenceError" in output
    assert "rank 1 is wrong" in output
    again = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path / "run", capture_output=True, text=True, timeout=200, check=False
    )
    assert digests(again.stdout) == clean, again.stdout + again.stderr
