"""Whether hosts reach each other: each has a door, at which the others knock when nothing goes on.

Note [Hosts that cannot see each other]
Two hosts that both reach the store are alive for everybody. If they do not reach each other, their workers wait for
each other, in a collective or to connect, and nobody is missing. A long call looks the same from outside. So a host
whose workers have made no progress for half of --stuck-s knocks at the doors of the others; and those that it has not
reached for the other half, it names in a record that hangs on its lease. From all these records everybody concludes the
same: `left_out` says whose workers have to stop. They may come back when nobody complains any more.

Who never reached a door while the run went on does not complain: then it is a firewall that closes the door alone.
"""

from __future__ import annotations

import selectors
import socket
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, final

from lockstep.control.sockets import Address
from lockstep.errors import LockstepError

KNOCK_EVERY_S: Final = 1.0
KNOCK_S: Final = 3.0  # how long the other side may take
ACCEPTS_AT_ONCE: Final = 16


def left_out(complaints: Mapping[str, Collection[str]]) -> set[str]:
    """The hosts that must stop so that all others reach each other: those first who are in most pairs that do not."""
    pairs = {frozenset((one, other)) for one, others in complaints.items() for other in others if one != other}
    out: set[str] = set()
    while pairs:
        counts = Counter(name for pair in pairs for name in pair)
        worst = max(counts, key=lambda name: (counts[name], name))
        out.add(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return out


def partners(name: str, complaints: Mapping[str, Collection[str]]) -> list[str]:
    """Those that do not reach it, or that it does not."""
    return sorted({*complaints.get(name, ()), *(one for one, others in complaints.items() if name in others)})


@dataclass
class _Other:
    """What we know of another host's door."""

    door: Address
    calling: socket.socket | None = None
    called_s: float = -1e9
    reached: bool = False  # ever
    failing_since_s: float | None = None


@final
class Doors:
    """Ours, and those of the others. Registers with `selector`, as data an object with `ready(mask)`."""

    def __init__(self, address: str, selector: selectors.BaseSelector) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._listener = socket.create_server((address, 0), family=family, backlog=64)
        except OSError as error:
            raise LockstepError(
                f"cannot listen on {address}, where the other hosts would look for us: {error}; GLOO_SOCKET_IFNAME "
                "chooses another interface"
            ) from error
        self._listener.setblocking(False)
        self._selector = selector
        self._others: dict[str, _Other] = {}
        selector.register(self._listener, selectors.EVENT_READ, self)

    @property
    def own(self) -> Address:
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def ready(self, mask: int) -> None:
        """Somebody knocks. That it could is all it wanted to know."""
        with suppress(OSError):
            for _ in range(ACCEPTS_AT_ONCE):
                self._listener.accept()[0].close()

    def look(self, now_s: float, doors: Mapping[str, Address], *, all_of_them: bool) -> None:
        """Knock where it is due: where we have not been yet, or at `all_of_them`."""
        for name in self._others.keys() - doors.keys():
            self._hang_up(self._others.pop(name))
        for name, door in doors.items():
            other = self._others.setdefault(name, _Other(door))
            if other.calling is not None and now_s >= other.called_s + KNOCK_S:
                self._answered(other, reached=False)
            due = other.calling is None and now_s >= other.called_s + KNOCK_EVERY_S
            if due and (all_of_them or not other.reached or other.failing_since_s is not None):
                self._call(other, now_s)

    def unreached(self, now_s: float, for_s: float, *, also_new: bool) -> set[str]:
        """Hosts that did not answer for so long. `also_new`: such as never did."""
        return {
            name
            for name, other in self._others.items()
            if other.failing_since_s is not None
            and now_s - other.failing_since_s >= for_s
            and (other.reached or also_new)
        }

    def close(self) -> None:
        for other in self._others.values():
            self._hang_up(other)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _call(self, other: _Other, now_s: float) -> None:
        other.called_s = now_s
        family = socket.AF_INET6 if ":" in other.door[0] else socket.AF_INET
        other.calling = caller = socket.socket(family, socket.SOCK_STREAM)
        caller.setblocking(False)
        try:
            caller.connect(other.door)
        except BlockingIOError:
            pass
        except OSError:  # there is no way there at all
            caller.close()
            other.calling = None
            self._answered(other, reached=False)
            return
        self._selector.register(caller, selectors.EVENT_WRITE, _Call(self, other))

    def heard(self, other: _Other) -> None:
        if other.calling is not None:
            self._answered(other, reached=other.calling.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0)

    def _answered(self, other: _Other, *, reached: bool) -> None:
        self._hang_up(other)
        if reached:
            other.reached, other.failing_since_s = True, None
        elif other.failing_since_s is None:
            other.failing_since_s = other.called_s

    def _hang_up(self, other: _Other) -> None:
        if other.calling is not None:
            self._selector.unregister(other.calling)
            other.calling.close()
            other.calling = None


@dataclass(frozen=True)
class _Call:
    doors: Doors
    other: _Other

    def ready(self, mask: int) -> None:
        self.doors.heard(self.other)
