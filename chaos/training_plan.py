"""Pure: a seed and a number become a case. What is decided here repeats; the moment a signal lands does not."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

EPOCHS = 30  # of 12 steps
STEPS = 12 * EPOCHS
ALL = -1  # all that live
STACKS = signal.SIGRTMIN + 5  # workers write their stacks down
PAIR = "pair"  # a program with two optimisers
BODIES = ("target", "rate", "plateau", "gpt", "draws", PAIR)  # programs that change their state between the steps
RUN_SEEDS = 2  # of each program; what they compute undisturbed is computed once

# Places of `lockstep.faults`, by what must happen for a worker to come by.
IN_STEP = ("top", "forward", "table", "backward", "exchange", "waiting", "reduced", "committed", "optimizer", "applied",
           "compared")  # fmt: skip
SAVING = ("copy", "write", "fsync", "verify", "rename", "prune")
FORMING = ("joining", "forming", "catching-up", "sending-state", "receiving-state", "restored", "moving-state")
EPOCH_ENDS = ("evaluating", "logging")
OUTSIDE = "outside"  # no place: a process is killed from outside, wherever it is
ENDING = "ending"

# Every place has its turn, whatever the dice say.
TURNS = (
    "backward", "joining", "exchange", OUTSIDE, "committed", "receiving-state", "write", "table",
    "evaluating", "forming", "optimizer", OUTSIDE, "fsync", "sending-state", "reduced", "top",
    "rename", "catching-up", "waiting", OUTSIDE, "applied", "start", "copy", "forward",
    "logging", "restored", "compared", "verify", OUTSIDE, "receiving-state", "prune", ENDING,
)  # fmt: skip


class Who(StrEnum):
    ANY = "any"  # the first that comes by
    FIRST = "rank 0"
    OTHER = "not rank 0"
    NEWCOMER = "newcomer"


@dataclass(frozen=True)
class Strike:
    place: str
    who: Who = Who.ANY
    also: int = 0  # so many others in the same moment, or ALL
    nth: int = 1  # the n-th time that a worker that is meant comes by
    members: int = 1  # not before so many train together; 0: at once, while the last strike is being recovered from
    pause_s: float = 0.0  # and not before they have done so for this long
    pace_s: float = 0.0  # how long the program sleeps between steps meanwhile
    late_s: float | None = None  # SIGSTOP, and SIGCONT after so long; None: SIGKILL
    drains: bool = False  # SIGTERM: it leaves after its step
    kills_other: bool = False  # another one is killed while this one is stopped, when it has begun the next step

    @property
    def signal(self) -> int:
        if self.drains:
            return signal.SIGTERM
        return signal.SIGKILL if self.late_s is None else signal.SIGSTOP

    def __str__(self) -> str:
        also = "" if not self.also else " and all others" if self.also == ALL else f" and {self.also} more"
        stop = "" if self.late_s is None else f" (stopped for {self.late_s:.2f} s)"
        return f"{self.who} at {self.place}{also}{stop}"


@dataclass(frozen=True)
class Case:
    seed: int
    number: int
    variant: str
    run_seed: int
    backend: str
    workers: int
    save_every: int
    num_workers: int
    strikes: tuple[Strike, ...]
    stall_s: float = 10.0
    epochs: int = EPOCHS
    device: str = "cpu"
    sharded: bool = False  # the optimiser's state is distributed over the workers
    grad_comm: str = "fp32"

    @property
    def program(self) -> str:
        return f"{self.variant}:{self.run_seed}:{self.grad_comm}"

    @property
    def most_hits(self) -> int:
        return sum(self.workers if strike.also == ALL else 1 + strike.also for strike in self.strikes)

    def __str__(self) -> str:
        what = f"{self.variant}, {self.workers} workers on {self.backend}, a checkpoint every {self.save_every} steps"
        comm = "" if self.grad_comm == "fp32" else f", gradients as {self.grad_comm}"
        return f"case {self.seed}/{self.number}: {what}{', sharded' if self.sharded else ''}{comm}"


STRIKES = 16  # of a case


def shard(case: Case) -> Case:
    """The same case with a distributed state of the optimiser: some strikes hit workers that exchange its parts."""
    places = {"applied": "weights", "compared": "weights", "forming": "moving-state", "catching-up": "moving-state"}
    strikes = tuple(
        replace(strike, place=places.get(strike.place, strike.place) if n % 2 else strike.place)
        for n, strike in enumerate(case.strikes)
    )
    variant = "half" if case.number % 4 == 3 else case.variant  # with master weights
    return replace(case, variant=variant, sharded=True, strikes=strikes)


def compress(case: Case) -> Case:
    """The same case with gradients that are sent as integers, as matrices of low rank, or of which parts are sent."""
    return replace(case, grad_comm=("int8", "int4", "powersgd", "topk")[(case.seed + case.number // 2) % 4])


def plan(seed: int, number: int) -> Case:
    """The same case for the same two numbers, whatever ran before."""
    dice = Random(f"training {seed} {number}")
    case = _setting(dice, seed, number)
    turns = [TURNS[(number * STRIKES + n + 5 * seed) % len(TURNS)] for n in range(STRIKES)]
    return replace(case, strikes=tuple(_strike(dice, place, case.workers) for place in in_order(turns)))


def _setting(dice: Random, seed: int, number: int) -> Case:
    return Case(
        seed=seed,
        number=number,
        variant=dice.choice(("mlp", "cnn", "gpt", "tiny", *BODIES)),
        run_seed=dice.randrange(RUN_SEEDS),
        backend=("shm", "gloo")[(number + seed) % 2],
        workers=2 + (number + seed // 2) % 5,
        save_every=dice.choice((2, 3, 5, 7, 11)),
        num_workers=1 if dice.random() < 0.2 else 0,
        strikes=(),
    )


def in_order(places: Sequence[str]) -> list[str]:
    """The end comes last. State is handed over only after a worker was lost, so that does not come first."""
    first = [place for place in places if place != ENDING]
    while first and first[0] in ("sending-state", "receiving-state", "restored"):
        first.append(first.pop(0))
    return first + [place for place in places if place == ENDING]


def _strike(dice: Random, place: str, workers: int) -> Strike:
    who = dice.choices((Who.ANY, Who.FIRST, Who.OTHER), weights=(3, 2, 2))[0]
    if place in SAVING or place == "sending-state":
        who = Who.ANY  # only one comes by
    elif place in ("start", "receiving-state"):
        who = dice.choice((Who.ANY, Who.NEWCOMER))
    elif place in FORMING:
        who = dice.choice((who, Who.NEWCOMER))
    # Two of two are all. All are lost now and then only: that is another way to recover, and a slow one.
    also = dice.choices((0, 1, ALL), weights=(80, 14, 6) if workers > 2 else (92, 0, 8))[0]
    if place == ENDING and also == ALL:
        also = 0
    return Strike(
        place=place,
        who=who,
        also=also,
        nth=dice.choice((1, 1, 2)) if place in IN_STEP else 1,
        members=_members(dice, place, workers),
        pause_s=dice.choice((0.0, dice.uniform(0.0, 0.4))),
        pace_s=dice.choice((0.0, 0.0, 0.002, 0.01)),
    )


def _members(dice: Random, place: str, workers: int) -> int:
    if place in FORMING or place == "start":
        return 0  # while the last strike is being recovered from, or its victims are being replaced
    return dice.choice((workers, workers, dice.randint(1, workers)))


# --------------------------------------------------------------------------------------------------------------- stops

STOPPED_AT = ("exchange", "optimizer", "waiting", "table", "committed", OUTSIDE, "applied", "top", "backward", "fsync")
STOPS = 5  # of a case
STALL_S = 1.0


def plan_stops(seed: int, number: int) -> Case:
    """Workers that are stopped for longer than they may give no sign of life, and sometimes not quite as long."""
    dice = Random(f"stops {seed} {number}")
    case = replace(_setting(dice, seed, number), stall_s=STALL_S, num_workers=0)
    places = [STOPPED_AT[(number * STOPS + n) % len(STOPPED_AT)] for n in range(STOPS)]
    return replace(case, strikes=tuple(_stop(dice, place, case.workers) for place in places))


def _stop(dice: Random, place: str, workers: int) -> Strike:
    least_s, most_s = dice.choice(((0.2, 0.7), (0.9, 1.4), (1.6, 3.0), (1.6, 3.0)))
    return Strike(
        place=place,
        who=Who.ANY if place in SAVING else dice.choice((Who.FIRST, Who.FIRST, Who.OTHER, Who.ANY)),
        members=dice.choice((workers, dice.randint(2, workers))),
        pause_s=dice.uniform(0.0, 0.3),
        late_s=dice.uniform(least_s, most_s),
    )


def surely_noticed(strike: Strike, stall_s: float) -> bool:
    """It was stopped for so long that it must have been taken for dead. Its last sign of life was a moment before."""
    return strike.late_s is not None and strike.late_s > stall_s + 0.5


# ------------------------------------------------------------------------------------------------------------- drained

DRAINS = 10  # of a case
DRAINED_AT = (
    OUTSIDE, "top", "forward", "exchange", OUTSIDE, "committed", "optimizer", "applied", OUTSIDE, "evaluating", "write",
    "compared",
)  # fmt: skip


def plan_drains(seed: int, number: int) -> Case:
    """Workers that are asked to leave with a signal, and are replaced."""
    dice = Random(f"drains {seed} {number}")
    case = replace(_setting(dice, seed, number), num_workers=0)
    places = [DRAINED_AT[(number * DRAINS + n) % len(DRAINED_AT)] for n in range(DRAINS)]
    strikes = tuple(
        Strike(
            place=place,
            who=Who.ANY if place in SAVING else dice.choice((Who.FIRST, Who.OTHER, Who.ANY)),
            members=dice.choice((case.workers, 2)),
            pause_s=dice.choice((0.0, dice.uniform(0.0, 0.4))),
            drains=True,
        )
        for place in places
    )
    return replace(case, strikes=strikes)


# ----------------------------------------------------------------------------------------------------- one step behind

BEHIND = 25  # of a case
BEHIND_AT = ("reduced", "waiting", "reduced")  # after the others have all they need of it for this step


def plan_behind(seed: int, number: int) -> Case:
    """A worker is stopped right before it applies a step, another one killed in the next step, the first continued."""
    dice = Random(f"behind {seed} {number}")
    variant, backend = BODIES[(number // 2) % len(BODIES)], ("shm", "gloo")[number % 2]
    case = replace(_setting(dice, seed, number), variant=variant, backend=backend, num_workers=0)
    places = [BEHIND_AT[n % len(BEHIND_AT)] for n in range(BEHIND)]
    strikes = tuple(
        Strike(
            place=place,
            who=dice.choice((Who.ANY, Who.FIRST, Who.OTHER)),
            members=3,  # one that is stopped, one that is killed, one that is ahead; others start meanwhile
            pause_s=dice.uniform(0.0, 0.1),
            late_s=dice.uniform(0.05, 0.3),
            kills_other=True,
        )
        for place in places
    )
    return replace(case, workers=dice.choice((3, 4, 5)), strikes=strikes)
