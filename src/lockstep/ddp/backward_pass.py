"""What the reducer knows about the backward pass that is running or expected."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class PassPhase(Enum):
    IDLE = auto()  # gradients that arrive are not reduced: no_sync, or a backward pass of the bare module
    ARMED = auto()  # a forward has run whose backward pass will be reduced
    REDUCING = auto()  # the first gradient of that backward pass has arrived


@dataclass
class ForwardPass:
    """One forward, and whether a backward pass through it has been reduced."""

    reduced: bool = False


class BackwardPass:
    """State of one backward pass. Each reducer has one object, which `arm` resets for the next pass."""

    __slots__ = (
        "armed_late",
        "forwards",
        "is_stale",
        "order",
        "phase",
        "reached",
        "send_at_end",
        "start_seen",
        "static_counts",
        "uses_left",
    )

    def __init__(self) -> None:
        self.forwards: list[ForwardPass] = []  # forwards that the running backward pass goes through
        self.is_stale = False  # the running backward pass goes through a forward that was reduced before
        self.static_counts: list[int] = []  # while a static graph is learned: gradients per parameter
        self.arm(())
        self.phase = PassPhase.IDLE

    def arm(self, uses: tuple[int, ...] | list[int]) -> None:
        """Expect a backward pass. `uses` holds the gradients per parameter of a static graph, or is empty."""
        self.phase = PassPhase.ARMED
        self.start_seen = False  # the pass has been seen from its start, and `_backward_ended` will run at its end
        self.armed_late = False  # armed by a backward pass, not by the forward before it
        self.send_at_end = False  # buckets are sent when the pass ends, not as they become complete
        self.reached: list[bool] | None = None  # by parameter: whether the pass will compute its gradient
        self.order: list[int] = []  # parameters in the order in which their gradients arrived
        self.uses_left = list(uses)

    def end(self) -> None:
        """The gradients of this pass are complete: a second pass through the same forwards is an error."""
        self.phase = PassPhase.IDLE
        self.start_seen = False
        for forward in self.forwards:
            forward.reduced = True
        self.forwards = []

    def clear_stale(self) -> None:
        self.is_stale = False
