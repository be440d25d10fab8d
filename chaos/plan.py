"""Pure: a seed and a number become a case. What is decided here repeats; the moment a signal lands does not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random

MOST_WORKERS = 4
STOP_EVERY = 25  # after so many kills one worker is stopped instead
FORMING_SHARE = 0.25  # of the time that other events may take to come: a group is formed in some milliseconds

COLLECTIVES = (
    "all_reduce_small",
    "all_reduce_large",
    "all_reduce_allocated",  # in memory the group gave out
    "all_reduce_in_flight",  # several at once
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_coalesced",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
    "send_recv",
    "isend_irecv",
    "recv_from_any",
    "barrier",
    "monitored_barrier",
    "objects",
    "subgroup",
)
MIXED = "mixed"  # any of them, in an order that all workers know


class Event(StrEnum):
    KILL = "kill"  # one worker, somewhere in its loop
    FORMING = "forming"  # one worker, while the group is formed
    NEW_GROUP = "new group"  # one worker, while subgroups come and go
    TWO = "two"  # one after the other
    ALL = "all"  # at once: none is left to be told
    CHILD = "child"  # a child forked from it lives on and holds all it had open, as a data loader's worker does
    STOP = "stop"  # SIGSTOP: alive, and silent


# In the order of Event, without STOP, which has a rhythm of its own.
SHARES = {Event.KILL: 60, Event.FORMING: 14, Event.NEW_GROUP: 4, Event.TWO: 8, Event.ALL: 6, Event.CHILD: 8}


@dataclass(frozen=True)
class Case:
    seed: int
    number: int
    event: Event
    workers: int
    victims: tuple[int, ...]  # ranks, in the order of their deaths
    collective: str  # one of COLLECTIVES, or MIXED
    delay_s: float  # from the start of the loop (of the forming) to the first signal
    gap_s: float  # from the first signal to the second
    slow_rank: int | None  # this one sleeps between its collectives, so that the others wait for it
    store: str  # "file" or "tcp"
    timeout_s: float  # the group's
    continued: bool  # a stopped worker gets SIGCONT afterwards; else it is killed

    @property
    def survivors(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.workers) if rank not in self.victims)

    @property
    def patience_s(self) -> float:
        """A worker that was not told by then never will be."""
        return 2 * self.timeout_s + 6

    @property
    def deadline_counts(self) -> bool:
        """A worker may die before the others can know of it at all; then it is missed at the deadline."""
        return self.event is Event.FORMING

    def __str__(self) -> str:
        victims = " and ".join(map(str, self.victims))
        return f"case {self.number}: {self.event}, rank {victims} of {self.workers}, {self.collective}"


def plan(seed: int, number: int) -> Case:
    """The same case for the same two numbers, whatever ran before."""
    dice = Random(f"chaos {seed} {number}")
    stop = number % (STOP_EVERY + 1) == STOP_EVERY
    event = Event.STOP if stop else dice.choices(list(SHARES), weights=list(SHARES.values()))[0]
    workers = dice.randint(3 if event is Event.TWO else 2, MOST_WORKERS)
    ranks = dice.sample(range(workers), workers)
    count = {Event.ALL: workers, Event.TWO: 2}.get(event, 1)
    # Every collective has its turn, whatever the dice say; a third of the cases mixes them.
    collective = MIXED if dice.random() < 0.33 else COLLECTIVES[number % len(COLLECTIVES)]
    return Case(
        seed=seed,
        number=number,
        event=event,
        workers=workers,
        victims=tuple(ranks[:count]),
        collective=collective,
        delay_s=dice.uniform(0, 0.06) * (FORMING_SHARE if event is Event.FORMING else 1),
        gap_s=dice.choice([0.0, dice.uniform(0, 0.03)]) if event is Event.TWO else 0.0,
        slow_rank=dice.randrange(workers) if dice.random() < 0.3 else None,
        store=dice.choice(["file", "tcp"]),
        timeout_s=2.0 if stop else 3.0 if event in (Event.FORMING, Event.NEW_GROUP) else 6.0,
        continued=stop and dice.random() < 0.5,
    )


def cases(seed: int, kills: int) -> list[Case]:
    """So many kills, and the stops between them."""
    return [plan(seed, number) for number in range(kills + kills // STOP_EVERY)]
