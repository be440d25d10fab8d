"""The other hosts of a run, as this one sees them: who is there, who is cut off, and when there is nothing left to do.

It looks, and tells the others what it saw. What follows for the workers of this host is the business of `crew`.
"""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from lockstep.elastic.reachability import Doors, left_out, partners
from lockstep.elastic.records import Records
from lockstep.launcher.hosts import Contact, Hosts, Station, address_towards, title_of

STAY_LEASES: Final = 2.0  # so long whoever keeps the store waits for hosts that have not ended yet


@dataclass(frozen=True)
class End:
    """Of the run, on this host, for reasons that are not here."""

    status: int
    why: str


@dataclass(frozen=True)
class News:
    text: str
    leaves_us_out: bool = False  # the workers of this host have to stop


@final
class Moved:
    """When the workers of this host last made progress, in the generation that they are in. Pure."""

    def __init__(self) -> None:
        self._at_s, self._generation, self._moves = 0.0, 0, 0
        self.ever = False  # since the generation began

    def still_s(self, now_s: float, generation: int, moves: int) -> float:
        """For how long they have not. `moves`: how often they have, all in all."""
        if generation != self._generation:
            self._generation, self._at_s, self.ever = generation, now_s, False
        elif moves != self._moves:
            self._at_s, self.ever = now_s, True
        self._moves = moves
        return now_s - self._at_s


@final
class Neighbours:
    """`terms`: what must be the same on all hosts. Made after `selector`, closed before it."""

    def __init__(
        self,
        hosts: Hosts,
        *,
        records: Records,
        station: Station,
        terms: Mapping[str, int],
        selector: selectors.BaseSelector,
    ) -> None:
        self._hosts, self._records, self._station, self._terms = hosts, records, station, dict(terms)
        self._contact = Contact(hosts)
        self._moved = Moved()
        self._missed: set[str] = set()  # hosts that ours does not reach
        self._out: set[str] = set()  # those that are left out because of that
        self._doors: Doors | None = None
        if hosts.count > 1:
            address = address_towards(hosts.where, os.environ.get("GLOO_SOCKET_IFNAME"))
            self._doors = Doors(address, selector) if address is not None else None

    def close(self) -> None:
        if self._doors is not None:
            self._doors.close()

    def greet(self) -> None:
        self._records.propose_terms(**self._terms)

    # -- the store, and who is there ---------------------------------------------------------------------------------

    def look_around(self, now_s: float) -> list[str]:
        """What there is to say."""
        records, arbiter = self._records, self._station.arbiter
        lines = self._contact.look(now_s, trouble=arbiter.trouble)
        if records.is_listed and arbiter.is_connected:
            others = {host.name for host in records.hosts} - {records.name}
            lines += self._contact.meet(others, records.hosts_left)
        return lines

    def why_end(self, now_s: float, *, ending: bool) -> End | None:
        """`ending`: we are about to, anyway, and what others have to say about it is no news."""
        terms, blame = self._records.terms, self._records.blame
        if terms not in (None, self._terms):
            return End(2, f"this host has {_options(self._terms)}, and the first one has "
                          f"{_options(terms)}; start all hosts with the same")  # fmt: skip
        if blame is not None and not ending:
            return End(**blame)
        if self._contact.is_hopeless(now_s):
            return End(1, f"gave up without the control store: {self._station.arbiter.trouble}")
        return None

    # -- who reaches whom --------------------------------------------------------------------------------------------

    @property
    def leave_us_out(self) -> bool:
        return self._records.name in self._out

    def look_at_network(self, now_s: float, *, inside: bool, moves: int) -> list[News]:
        """See doors.py, Note [Hosts that cannot see each other]. `inside`: one of our workers is in a generation."""
        records, doors, half_s = self._records, self._doors, self._hosts.stuck_s / 2
        if doors is None or not records.is_listed:
            return []
        networks = {name: one for name, one in records.networks.items() if name != records.name}
        still_s = self._moved.still_s(now_s, records.generation.number, moves) if inside else 0.0
        others = {name: (str(one["door"][0]), int(one["door"][1])) for name, one in networks.items()}
        doors.look(now_s, others, all_of_them=still_s >= half_s)
        missed = doors.unreached(now_s, half_s, also_new=inside and not self._moved.ever)
        self._missed &= doors.unreached(now_s, 0.0, also_new=True)
        news = []
        if still_s >= self._hosts.stuck_s:
            stuck = f"nothing has gone on for {still_s:.0f} s, and host"
            unheard = sorted(missed - self._missed)
            news = [News(f"{stuck} {title_of(name)} cannot be reached from here") for name in unheard]
            self._missed |= missed
        records.tell_network(door=doors.own, missed=self._missed)
        told = {name: one["missed"] for name, one in networks.items()} | {records.name: sorted(self._missed)}
        return news + self._leave_out({name: set(missed) & told.keys() for name, missed in told.items()})

    def _leave_out(self, complaints: Mapping[str, set[str]]) -> list[News]:
        before, self._out = self._out, left_out(complaints)
        news = []
        for name in sorted(self._out - before):
            others = " and ".join(map(title_of, partners(name, complaints)))
            text = f"host {title_of(name)} is left out: it and {others} do not reach each other"
            news.append(News(text, leaves_us_out=name == self._records.name))
        back = [News(f"host {title_of(name)} is not left out any more") for name in sorted(before - self._out)]
        return news + back

    def forget(self) -> None:
        """Our lease has ended, and with it what we told: from now on we are a host like one that has just come."""
        self._missed, self._out = set(), set()
        if self._doors is not None:
            self._records.tell_network(door=self._doors.own, missed=())

    # -- the end -----------------------------------------------------------------------------------------------------

    @property
    def stay_s(self) -> float:
        """How long `must_stay` counts."""
        return STAY_LEASES * self._hosts.lease_s

    def take_leave(self, ended_by: int | None) -> None:
        """`ended_by`: a signal, in the midst of the run."""
        if self._station.keeps_store and ended_by is not None:
            name = signal.Signals(ended_by).name
            why = f"{title_of(self._records.name)}, which kept the store, was ended by {name}"
            self._records.accuse(status=128 + ended_by, why=why)
        if self._records.is_listed:
            self._records.leave()

    @property
    def must_stay(self) -> bool:
        """The others have not heard all that we have to say. Whoever keeps the store goes last: they need it."""
        if self._station.keeps_store and not self._contact.met <= self._records.hosts_left:
            return True
        return bool(self._records.wishes) and self._station.arbiter.is_connected


def _options(terms: Mapping[str, int] | None) -> str:
    return " ".join(f"{name} {value}" for name, value in (terms or {}).items())
