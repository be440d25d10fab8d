"""Is any damage to a checkpoint ever missed, and does any crash ever lose one?

    python campaigns/checkpoints.py             about fifteen minutes on two cores
    python campaigns/checkpoints.py --quick     about one

The tests in tests/test_checkpoint_*.py do the same things, fewer times. One row of the table is one kind of thing.
Exit status: 0 when all of it holds; 1 when not; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch

from lockstep.checkpoint import format as layout
from lockstep.checkpoint.manifest import verify
from lockstep.checkpoint.store import CheckpointStore
from test_checkpoint import everything, split_tensors, write
from test_checkpoint_crash import LATER, SCENES, fail_everywhere, in_a_clean_process, kill_everywhere
from test_checkpoint_damage import flip_every_bit, small_state, vandalise
from test_checkpoint_forged import forge

DEADLINE_S = 1800.0
ERRORS = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.ESTALE]

Part = Callable[[Path, int, bool], int]


def flips(folder: Path, seed: int, quick: bool) -> int:
    """Every bit of every file, of checkpoints of three kinds: looked at, and loaded."""
    paths = [write(folder / "small", small_state(seed)), write(folder / "all", everything())]
    paths.append(write(folder / "parts", everything()))
    split_tensors(paths[-1])
    count = 0
    for path in paths[:1] if quick else paths:
        for file in sorted(path.iterdir()):
            for check in (verify, layout.read):
                noticed = list(flip_every_bit(file, lambda check=check, path=path: check(path)))  # type: ignore[misc]
                assert all(noticed), f"{file}: bits {[n for n, seen in enumerate(noticed) if not seen][:9]} were missed"
                count += len(noticed)
    return count


def damages(folder: Path, seed: int, quick: bool) -> int:
    """Cuts, splices, swaps and so on; each is noticed, and the newest that is whole is found."""
    return sum(vandalise(folder, 5_000 if quick else 200_000, seed=seed).values())


def forgeries(folder: Path, seed: int, quick: bool) -> int:
    """Damage with all digests put right again."""
    count = 3_000 if quick else 100_000
    assert sum(forge(folder, count, seed=seed).values()) > 0.8 * count
    return count


def failing_calls(folder: Path, seed: int, quick: bool) -> int:
    """Each call of the system fails, with each error: alone, with later calls of its kind, or with all later ones."""
    count = 0
    for name, scene in SCENES.items():
        for code, later in itertools.product(ERRORS[:1] if quick else ERRORS, LATER):
            here = _new(folder / f"{name} {code} {later}")
            count += len(fail_everywhere(here, scene, code, later=later))
    return count


def kills_at_calls(folder: Path, seed: int, quick: bool) -> int:
    """SIGKILL at each call of the system."""
    return sum(
        len(in_a_clean_process(kill_everywhere, _new(folder / name), scene, deadline_s=DEADLINE_S))
        for name, scene in SCENES.items()
    )


def kills_at_any_time(folder: Path, seed: int, quick: bool) -> int:
    """SIGKILL after a random time, of a process that does nothing but save."""
    count = 40 if quick else 2000
    return int(in_a_clean_process(_kill_at_any_time, folder, seed, count, deadline_s=DEADLINE_S))


def _kill_at_any_time(folder: Path, seed: int, count: int, pipe: Connection) -> None:
    generator, last = random.Random(seed), 0
    torch.set_num_threads(1)  # a child that was forked has no others
    try:
        for _ in range(count):
            child = os.fork()
            if child == 0:
                _save_for_ever(folder, last)
            time.sleep(generator.uniform(0.005, 0.08))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            found = CheckpointStore(folder).newest()
            assert found is not None or last == 0, "all are gone"
            if found is not None:
                assert not found.skipped, found.skipped
                assert found.step >= last, f"step {last} was there, and now {found.step} is the newest"
                assert found.state["blob"].unique().tolist() == [found.step]
                last = found.step
        CheckpointStore(folder).save(last + 1, {})
        assert len(os.listdir(folder / "checkpoints")) == 2
        assert last > count / 4, f"only {last} were written: the kills came too early to tell anything"
        pipe.send(count)
    except BaseException:
        pipe.send(traceback.format_exc())


def _save_for_ever(folder: Path, step: int) -> None:
    store = CheckpointStore(folder)
    while True:
        step += 1
        store.save(step, {"blob": torch.full((1 << 16,), float(step))})


def _new(path: Path) -> Path:
    path.mkdir()
    return path


PARTS: dict[str, Part] = {
    "flipped bits": flips,
    "other damage": damages,
    "forgeries": forgeries,
    "calls that fail": failing_calls,
    "kills at calls": kills_at_calls,
    "kills at any time": kills_at_any_time,
}


def rows(chosen: argparse.Namespace) -> Iterator[bool]:
    print(f"{'what':<20} {'how many':>10} {'missed':>8} {'s':>8}", flush=True)
    for name, part in PARTS.items():
        if chosen.only and chosen.only not in name:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
            for inside in ("small", "all", "parts"):
                (Path(folder) / inside).mkdir()
            try:
                count, missed = part(Path(folder), chosen.seed, chosen.quick), "0"
            except AssertionError:
                traceback.print_exc()
                count, missed = 0, "FAILED"
        print(f"{name:<20} {count:>10,} {missed:>8} {time.monotonic() - began:>8.1f}", flush=True)
        yield missed == "0"


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="fewer of everything")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: 0)")
    parser.add_argument("--only", metavar="WORD", help=f"one of: {', '.join(PARTS)}")
    return 0 if all(list(rows(parser.parse_args()))) else 1


if __name__ == "__main__":
    sys.exit(main())
