"""From what a worker left behind to the card: the pure parts, without processes."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from pathlib import Path
from traceback import TracebackException

import pytest

from lockstep.failures import crash_record, traceback_parser
from lockstep.failures.card import ASCII, LINES, Card, Evidence, draw, explain
from lockstep.failures.crash_record import CrashRecord
from lockstep.failures.postmortem import (
    FailedWorker,
    describe_failure,
    describe_place,
    last_seen,
    make_card,
    named_by_all,
)
from lockstep.failures.traceback_parser import Frame, is_users
from lockstep.launcher.worker_group import OomKills, describe_oom_kills

OURS = str(Path(traceback_parser.__file__).parents[1] / "train" / "run.py")
TRACE = f"""\
some line before
Traceback (most recent call last):
  File "/home/me/data.py", line 7, in __getitem__
    raise ValueError("bad")
ValueError: bad

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 20, in <module>
    for batch in run.train(batches, optimizer):
  File "{OURS}", line 419, in track
    batch = next(self._coming)
            ^^^^^^^^^^^^^^^^^^
lockstep.data.reader.DataError: dataset[3] failed
[W1115 something from torch]
""".splitlines()


def test_the_place_is_that_of_the_cause_in_the_users_own_code() -> None:
    found = traceback_parser.read(TRACE)
    assert found.what == "DataError: dataset[3] failed"
    assert found.cause == "ValueError: bad"
    assert found.frame == Frame("/home/me/data.py", 7, "__getitem__", 'raise ValueError("bad")')


def test_what_was_raised_while_handling_something_else_is_not_its_fault() -> None:
    text = "\n".join(TRACE).replace(traceback_parser.BY_CAUSE, traceback_parser.MEANWHILE)
    found = traceback_parser.read(text.splitlines())
    assert found.cause == ""
    assert found.frame == Frame("train.py", 20, "<module>", "for batch in run.train(batches, optimizer):")


def test_a_cause_inside_of_torch_is_not_shown() -> None:
    torchs = "/x/lib/python3.11/site-packages/torch/nn/modules/module.py"
    found = traceback_parser.read([line.replace("/home/me/data.py", torchs) for line in TRACE])
    assert found.cause == ""
    assert found.frame is not None
    assert found.frame.file == "train.py"


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("train.py", True),
        ("/home/me/project/src/train.py", True),
        ("<string>", True),
        (OURS, False),
        ("<frozen runpy>", False),
        ("/x/.venv/lib/python3.11/site-packages/torch/x.py", False),
        (str(Path(traceback_parser.sysconfig.get_paths()["stdlib"]) / "contextlib.py"), False),
    ],
)
def test_whose_file_it_is(file: str, expected: bool) -> None:
    assert is_users(file) is expected


def test_the_text_of_torchs_loader_process_is_shortened() -> None:
    text = (
        "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\n"
        'Original Traceback (most recent call last):\n  File "x", line 1, in f\n    g()\nKeyError: 3\n'
    )
    assert traceback_parser.shorten(text).splitlines() == [text.splitlines()[0], "KeyError: 3"]


def test_without_a_traceback_nothing_is_known() -> None:
    assert traceback_parser.read(["hello", "bye"]) == traceback_parser.ParsedError()


def raised(*files: str, cause: Exception | None = None) -> Exception:
    """An exception that went through functions in these files, the last of which raised it."""
    scope: dict[str, object] = {"error": ValueError(files[-1]), "cause": cause}
    code = "raise error from cause" if cause else "raise error"
    for file in reversed(files):
        exec(compile(f"def call():\n    {code}\n", file, "exec"), scope)
        scope, code = {"inner": scope["call"]}, "inner()"
    try:
        scope["inner"]()  # type: ignore[operator]
    except ValueError as error:
        return error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
    raise AssertionError


def cut(error: Exception) -> tuple[str, int]:
    told = TracebackException.from_exception(error)
    left_out = traceback_parser.cut(told)
    return "".join(told.format()), left_out


TORCHS = "/x/lib/python3.11/site-packages/torch/nn/modules/module.py"
OTHERS = "/x/lib/python3.11/site-packages/wandb/sdk.py"


def test_a_traceback_is_cut_to_the_users_own_frames() -> None:
    text, left_out = cut(raised("train.py", OURS, TORCHS, "model.py", OTHERS, TORCHS))
    assert re.findall(r'File "([^"]+)"', text) == ["train.py", "model.py"]
    assert left_out == 4
    assert text.endswith(f"ValueError: {TORCHS}\n")
    same = raised("train.py", "model.py")
    assert cut(same) == ("".join(TracebackException.from_exception(same).format()), 0)


def test_a_program_that_is_installed_as_a_package_keeps_its_frames() -> None:
    assert re.findall(r'File "([^"]+)"', cut(raised(OTHERS, OURS, OTHERS))[0]) == [OTHERS, OTHERS]
    assert re.findall(r'File "([^"]+)"', cut(raised(OURS, TORCHS))[0]) == [TORCHS], "or else the last one"


def test_a_cause_is_shown_where_it_has_a_frame_of_the_users() -> None:
    theirs = raised(OURS, "data.py")
    text, left_out = cut(raised("train.py", OURS, cause=theirs))
    assert re.findall(r'File "([^"]+)"', text) == ["data.py", "train.py"]
    assert text.count(traceback_parser.BY_CAUSE) == 1
    assert left_out == 2
    text, left_out = cut(raised("train.py", OURS, cause=raised(OURS, TORCHS)))
    assert re.findall(r'File "([^"]+)"', text) == ["train.py"]
    assert traceback_parser.BY_CAUSE not in text
    assert left_out == 3


def test_the_traceback_of_a_loader_process_is_cut_too() -> None:
    told = "".join(TracebackException.from_exception(raised(OURS, "data.py", TORCHS)).format())
    away = ValueError("away")
    away.add_note(f"in the loader process:\n{told}")
    text, left_out = cut(raised("train.py", OURS, cause=away))
    assert re.findall(r'File "([^"]+)"', text) == ["data.py", "train.py"]
    assert left_out == 3


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (
            "UnevenDataError: the data of rank 1 ended before step 3, and that of others goes on",
            "rank 1 has fewer batches",
        ),
        ("UnevenDataError: (the end of an epoch: False on rank 0, True on rank 2)", "rank 2 has fewer batches"),
        ("UnevenDataError: (the end of an epoch: True on rank 0, False on rank 2)", "rank 0 has fewer batches"),
        ("UnevenDataError: (samples: 8 on rank 0, 4 on rank 1)", "a batch of 4 samples where that one has 8"),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...", "the GPU is out of memory"),
        ("MemoryError: ", "could not get more memory"),
        ("FailOnRecompileLimitHit: Hard failure due to fail_on_recompile_limit_hit", "too many shapes"),
        ("OSError: [Errno 98] Address already in use", "has the port"),
        ("DistNetworkError: EADDRINUSE, address: :29500", "has the port"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", "a loader process was killed"),
        ("RuntimeError: unable to write to file </torch_1_2>: No space left on device (28)", "/dev/shm is too small"),
        ("OSError: [Errno 28] No space left on device: 'x'", "a disk is full"),
        ("DesyncError: rank 0 called a, but rank 1 is in b", "mismatching collectives"),
        ("WorldError: SLURM_PROCID=3 is not below SLURM_NTASKS=2", "the variables of SLURM"),
        ("ValueError: 4 workers for 2 shards: 2 would have nothing to do", "4 for 2"),
    ],
)
def test_causes(what: str, why: str) -> None:
    found = explain(Evidence(what, "", 1))
    assert found is not None
    assert why in found.why
    assert found.do
    assert "{" not in found.why + found.do


@pytest.mark.parametrize(
    ("largest", "advice"),
    [
        ("rest", "shards="),
        ("optimizer", "ShardedOptimizer"),
        ("graphs", "capture=False"),
        ("buckets", "fewer shards"),
        ("weights", "smaller model"),
    ],
)
def test_out_of_memory_names_what_it_was_used_for_and_what_to_change(largest: str, advice: str) -> None:
    parts = {"weights": 2**30, "gradients": 2**30, "buckets": 2**20, "optimizer": 2**30, "graphs": 0, "rest": 2**29}
    parts[largest] = 9 * 2**30
    gpu = Evidence("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "", 1)
    host = Evidence("MemoryError: ", "", 1)
    for evidence, device, general in ((gpu, "cuda", "nvidia-smi"), (host, "cpu", "fewer workers")):
        used = replace(evidence, memory=parts | {"peak": sum(parts.values())}, device=device)
        found = explain(used)
        assert found is not None
        assert f"{sum(parts.values()) / 2**30:.2f} GiB: {largest} 9.00 GiB, " in found.why
        assert general in found.do
        assert (advice in found.do) == (device == "cuda" or largest != "rest")
        elsewhere = explain(replace(used, device="cpu" if device == "cuda" else "cuda"))  # of which nothing is known
        assert elsewhere == explain(evidence)


def test_out_of_memory_counts_what_could_not_be_allocated() -> None:
    memory = {"weights": 2**30, "rest": 2**20, "peak": 2**30 + 2**20}
    found = explain(Evidence("OutOfMemoryError: Tried to allocate 200.00 GiB.", "", 1, memory=memory, device="cuda"))
    assert found is not None
    assert "activations" in found.do


def test_an_exception_of_the_users_own_has_no_other_cause() -> None:
    assert explain(Evidence("ValueError: bad", "Connection reset by peer\nDesync", 1)) is None


@pytest.mark.parametrize(
    ("number", "memory", "words", "why"),
    [
        (signal.SIGKILL, "it has killed 1 in this container", "", "it has killed 1 in this container"),
        (signal.SIGKILL, "", "", "its counters do not say so"),
        (signal.SIGBUS, "", "", "/dev/shm is full"),
        (signal.SIGABRT, "", "terminate called after throwing 'gloo::EnforceNotMet'", "mismatching collectives"),
        (signal.SIGSEGV, "", "", "native code crashed"),
    ],
)
def test_causes_of_signals(number: int, memory: str, words: str, why: str) -> None:
    found = explain(Evidence("", words, -number, memory))
    assert found is not None
    assert why in found.why


def test_what_the_kernel_counts() -> None:
    assert describe_oom_kills(OomKills(1, 5), OomKills(1, 5)) == ""
    assert describe_oom_kills(OomKills(), OomKills()) == ""
    assert describe_oom_kills(OomKills(1, 5, "1073741824"), OomKills(3, 7, "1073741824")) == (
        "it has killed 2 in this container, whose limit is 1.00 GiB"
    )
    assert (
        describe_oom_kills(OomKills(None, 5), OomKills(None, 6))
        == "it has killed 1 on this machine since the run began"
    )
    assert OomKills.count() == OomKills.count()


def test_drawing() -> None:
    card = Card("lockstep: rank 1 failed", what="word " * 60, place=("train.py:3", "    x = caf\u00e9()"), do="this")
    plain = draw(card)
    assert plain.isascii()
    lines = plain.splitlines()
    assert lines[0].startswith("+-- lockstep: rank 1 failed ---")
    assert all(len(line) <= 100 for line in lines)
    assert lines[-2] == "| do     this"
    assert "| who" not in plain, "what is not known takes no line"
    assert "caf\u00e9" in draw(card, box=LINES)
    assert len(draw(Card("t", what="x\n" * 100), box=ASCII).splitlines()) < 14, "a long text does not fill the screen"


def dead(folder: Path, code: int = 1) -> FailedWorker:
    return FailedWorker("rank 1", 2, 77, code, TRACE, folder, "rank1.log", trace_name="rank1")


def test_facts_say_more_than_the_last_words(tmp_path: Path) -> None:
    where = {"rank": 1, "size": 2, "step": 5, "epoch": 1, "call": "run.step", "shard": 3}
    record = CrashRecord(77, "node2", "DataError", "dataset[3] failed", "\n".join(TRACE), where)
    crash_record.write(crash_record.path_of(tmp_path, 77), record)
    card = describe_failure(dead(tmp_path), crash_record.read(tmp_path, 77, "rank1"))
    assert card.who == "rank 1 of 2, pid 77 on node2"
    assert card.where == "step 5, epoch 1 (both count from 0), shard 3, in run.step"
    assert card.place == ("/home/me/data.py:7, in __getitem__", '    raise ValueError("bad")')
    assert [path.name for path in tmp_path.iterdir()] == ["failure-rank1.json"]
    assert crash_record.read(tmp_path, 77, "rank1") is None, "those of a later process with the same name are its own"


def test_a_worker_whose_rank_changes_is_named_with_the_rank_that_errors_speak_of(tmp_path: Path) -> None:
    facts = CrashRecord(77, "node2", "DataError", "rank 1: dataset[3] failed", "\n".join(TRACE), {"rank": 1, "size": 2})
    card = make_card(replace(dead(tmp_path), name="worker 5 on node2"), facts, {})
    assert card.who == "worker 5 on node2 (rank 1 of 2 then), pid 77 on node2"
    assert make_card(replace(dead(tmp_path), name="worker 5"), None, {}).who.startswith("worker 5 of 2, pid 77 on ")


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"pid": 77}', b'"x"'])
def test_facts_that_are_damaged_are_left_alone(tmp_path: Path, damage: bytes) -> None:
    crash_record.path_of(tmp_path, 77).write_bytes(damage)
    assert crash_record.read(tmp_path, 77, "rank1") is None
    assert "DataError: dataset[3] failed" in describe_failure(dead(tmp_path), None).what


def test_of_one_that_was_killed_the_trace_says_how_far_it_was(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "rank1.now").write_text('{"pid": 77, "step": 4, "epoch": 0}')
    assert last_seen(dead(tmp_path)) == {"step": 3, "epoch": 0}
    (tmp_path / "trace" / "rank1.now").write_text('{"pid": 78, "step": 4, "epoch": 0}')
    assert last_seen(dead(tmp_path)) == {}, "of an earlier one"
    card = make_card(dead(tmp_path, -9), None, {"step": 3, "epoch": 0})
    assert card.where == "after step 3, epoch 0 (both count from 0)"


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("NonFiniteError: step 2: the loss of shards 2, 3 is not a finite number, on rank 1; of the gradient", None),
        (
            "NonFiniteError: step 2: the loss of shards 0, 1 is not a finite number, on rank 0; of the gradient",
            "rank 0",
        ),
        ("UnevenDataError: (the end of an epoch: True on rank 0, False on rank 1)", "rank 0"),
        ("UnevenDataError: (samples: 8 on rank 0, 4 on rank 1)", None),
        ("ValueError: about rank 0", None),
        ("DivergenceError: rank 7 is unknown here", None),
    ],
)
def test_an_error_of_all_workers_is_about_the_one_it_names(tmp_path: Path, what: str, named: str | None) -> None:
    """We are rank 1."""
    one = replace(dead(tmp_path), pids={"rank 0": 76, "rank 1": 77}, last_lines=[*TRACE[:-2], what])
    assert named_by_all(what, one) == named
    card = make_card(one, None, {})
    assert card.who.startswith("rank 0 of 2, pid 76" if named else "rank 1 of 2, pid 77")


def test_places() -> None:
    assert describe_place({}) == ""
    assert describe_place({"rank": 0, "call": "run.replicate"}) == "before the first step, in run.replicate"
