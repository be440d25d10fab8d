"""How the gradients of each step are sent: one fixed kind, or with `Run(grad_comm="auto")` the fastest.

The first steps are never compressed, with "powersgd" and "topk" neither. With "auto" each kind is then used for some
steps at a time, in turns: for more of them if steps are short, since the speed of a machine varies within a second.
Times are compared within each round of turns, and more rounds are made while these comparisons differ so much that the
choice may be wrong. The length of a turn, the number of rounds and the choice are part of the state of the run: a run
that is resumed, or a worker that joins, continues with them, and the bits are those of any other run with the same.
A kind that a model may suffer from is used only after the losses of some steps with and without it were compared
(train/loss_comparison.py), and they are compared again later.

Note [Errors by rounding]
The errors of "int8" and "int4" are measured in the trial, and then in one step of MEASURED_EVERY. All workers decode
the whole sum, so all measure the same; a worker that has not taken a step gets its result, with the error, from another
one. So no collective call is needed to agree. If they are too large IN_A_ROW times, less is compressed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, final

from lockstep.comm.low_rank_sum import LowRank
from lockstep.comm.top_k_sum import TopK
from lockstep.step.run_options import GradComm

WARM_UP: Final = 8  # steps
KINDS: Final = (GradComm.FP32, GradComm.INT8, GradComm.INT4)
LEAST_TURN, MOST_TURN = 4, 32  # steps; the first of them is not timed
TURN_S: Final = 0.2  # about as long as a turn takes, if that many steps do
ROUNDS: Final = 6  # rounds after which a choice is made, or as many more follow
MOST_ROUNDS: Final = 24
TOLERANCE: Final = 0.05  # a kind that may be faster than the chosen one by more than this needs more rounds
WARM_UP_ROUND: Final = -1
REVIEWED_AFTER: Final = 24  # steps with what was chosen; then they are compared with what was expected
LEAST_GAIN: Final = 0.97  # a kind that loses more must be faster by this factor; less than TOLERANCE
# A kind whose errors by rounding are larger, relative to the norm of the gradient, is not used, however fast it is.
LARGEST_ERROR: Final = 0.7
NEEDS_COMPARISON: Final = (GradComm.INT4, GradComm.POWERSGD, GradComm.TOPK)  # kinds that a model may suffer from
COMPARISON: Final = 48  # the step before which losses are compared; with "auto" that is the end of the trial
COMPARISON_FACTOR: Final = 10  # the next comparison is made at so many times the step of the last one
MEASURED_EVERY: Final = 64  # steps: see Note [Errors by rounding]
IN_A_ROW: Final = 3


def trial_kind(step: int, turn: int) -> GradComm:
    """Return how the `step`-th step of the trial sends its gradients, if turns have so many steps."""
    return GradComm.FP32 if step < WARM_UP else KINDS[(step - WARM_UP) // turn % len(KINDS)]


def trial_length(turn: int, rounds: int = ROUNDS) -> int:
    """Return the number of steps of a trial, the first ones included."""
    return WARM_UP + len(KINDS) * turn * rounds


def turn_for(step_s: float) -> int:
    """Return how many steps a turn has, from the time of a step."""
    return min(max(LEAST_TURN, math.ceil(TURN_S / step_s)), MOST_TURN)


def median_of(times_s: Sequence[float]) -> float:
    """Return the median, 0 if nothing was measured."""
    return statistics.median(times_s) if times_s else 0.0


def whole_rounds(rounds: Sequence[Mapping[GradComm, float]]) -> list[Mapping[GradComm, float]]:
    """Return those of the rounds that have a time for each kind."""
    return [times for times in rounds if all(times[kind] > 0 for kind in KINDS)]


def step_times(rounds: Sequence[Mapping[GradComm, float]]) -> dict[GradComm, float]:
    """Return the time of a step with each kind, from those of each round; 0 if no round has all of them.

    The ratios to the first kind are the medians of those within each round: a machine that is slower for a while is so
    for all kinds of a round.
    """
    whole = whole_rounds(rounds)
    if not whole:
        return dict.fromkeys(KINDS, 0.0)
    first = statistics.median(times[KINDS[0]] for times in whole)
    return {kind: first * statistics.median(times[kind] / times[KINDS[0]] for times in whole) for kind in KINDS}


def may_be_faster(kind: GradComm, chosen: GradComm, rounds: Sequence[Mapping[GradComm, float]]) -> bool:
    """Return whether a kind may be faster than the chosen one by more than TOLERANCE, as far as these rounds tell.

    In each round their times have a ratio. The median of the ratios lies in an interval between two of them with a
    probability of about 80 %, if there are six or more; what counts is the lower end. There must be one whole round.
    """
    ratios = sorted(times[kind] / times[chosen] for times in whole_rounds(rounds))
    return ratios[max(0, int((len(ratios) - 1.28 * math.sqrt(len(ratios))) / 2))] < 1 - TOLERANCE


def choose(step_s: Mapping[GradComm, float], errors: Mapping[GradComm, float], kinds: Sequence[GradComm]) -> GradComm:
    """Return the kind to continue with, from the time of a step with each, and from its errors by rounding."""
    best = KINDS[0]
    for kind in KINDS[1:]:
        if kind in kinds and step_s[kind] < LEAST_GAIN * step_s[best] and errors[kind] <= LARGEST_ERROR:
            best = kind
    return best


@dataclass(frozen=True)
class PastComparison:
    """Which kind was compared, before which step, and how the gradients of that step are sent."""

    kind: GradComm
    step: int
    sent: GradComm

    def to_json(self) -> list[str | int]:
        return [self.kind.value, self.step, self.sent.value]

    @staticmethod
    def from_json(plain: Sequence[Any]) -> PastComparison:
        """Return what `to_json` has returned. Of the first comparison of a run the last entry may be missing."""
        kind, step, *sent = plain
        return PastComparison(GradComm(kind), step, GradComm(sent[0]) if sent else GradComm.FP32)


@final
class GradCommTuner:
    """What is sent in which step: one fixed kind, or with "auto" what the trial shows."""

    def __init__(
        self,
        asked: GradComm,
        *,
        compares: bool = False,
        why_not_compared: str | None = None,
        method: LowRank | TopK | None = None,
    ) -> None:
        """
        compares          a kind of NEEDS_COMPARISON is used only after a comparison of losses, and a kind whose errors
                          by rounding are too large is used no longer
        why_not_compared  why this run cannot do that; None: it can
        method            of `asked`, if it has residuals; a comparison of another rank or ratio does not count
        """
        self._method = None if method is None else asdict(method)
        self._may_fall_back = compares
        self.why_not_compared, compares = why_not_compared, compares and why_not_compared is None
        self._asked, self.is_auto = asked, asked is GradComm.AUTO
        # With "int4" nothing is compared: its errors have no bias, and the program has asked for it by name.
        self._compares = compares and (asked.has_residuals or self.is_auto)
        waits = self._compares and not self.is_auto
        self._candidate: GradComm | None = asked if waits else None  # to be used after a comparison
        self._last_comparison: PastComparison | None = None  # the last comparison
        self.chosen: GradComm | None = None if self.is_auto or waits else asked
        self.current = GradComm.FP32 if self.chosen is None else asked  # of the step that is prepared or taken
        self._began: int | None = None  # the first step of the trial
        self._turn: int | None = None  # steps; None: not known yet
        self._rounds = ROUNDS  # of the trial
        self._agreed: int | None = None  # the last step before which the workers have agreed on something
        self.expected_s = 0.0  # the time of a step with what was chosen, as the trial has shown it; 0: not known
        self._times: defaultdict[tuple[int, GradComm], list[float]] = defaultdict(list)  # by round and kind
        self._errors: dict[GradComm, float] = dict.fromkeys(KINDS, 0.0)  # the largest of a step
        self._next_best: GradComm = GradComm.FP32  # what is chosen if the candidate is not
        self._measured: dict[int, float] = {}  # after the trial: the last errors by rounding, by step
        self._last: tuple[int, float] | None = None  # the step that was prepared last, and when

    def state(self) -> dict[str, Any] | None:
        """Return when a trial began, its turns, and what was chosen, for a checkpoint; None: the kind never changes."""
        if not self.is_auto and self._asked.codec is None and not self._compares:
            return None
        values = [None if kind is None else kind.value for kind in (self.chosen, self._candidate, self._next_best)]
        found = {"asked": self._asked.value, "method": self._method, "began": self._began, "turn": self._turn} | dict(
            zip(("chosen", "candidate", "next_best"), values, strict=True)
        )
        return found | {
            "agreed": self._agreed,
            "rounds": self._rounds,
            "compared": None if self._last_comparison is None else self._last_comparison.to_json(),
            "measured": [[step, error] for step, error in sorted(self._measured.items())],
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue a trial, or with what was chosen after it.

        state  of a run with the same `grad_comm`, rank and ratio; any other, or None, changes nothing: what the program
               asks for counts
        """
        is_same = (
            state is not None
            and state.get("asked", GradComm.AUTO.value) == self._asked.value
            and state.get("method") == self._method
        )
        counts = self.is_auto or self._compares or (self._asked.codec is not None and self._may_fall_back)
        if state is None or not is_same or not counts:
            return
        compared, named = state.get("compared"), {name: state.get(name) for name in ("chosen", "candidate")}
        self._began, self._turn, self._agreed = state["began"], state.get("turn"), state.get("agreed")
        self._rounds = state.get("rounds", ROUNDS)
        self._next_best = GradComm(state.get("next_best") or GradComm.FP32.value)
        self.chosen, self._candidate = (None if kind is None else GradComm(kind) for kind in named.values())
        self._last_comparison = None if compared is None else PastComparison.from_json(compared)
        self._measured = {step: error for step, error in state.get("measured") or []}
        if not self._compares and self._candidate is not None:  # the program no longer wants a comparison
            self.chosen, self._candidate = self._candidate, None
        self.current = GradComm.FP32 if self.chosen is None else self.chosen

    @property
    def _is_trial(self) -> bool:
        return self.is_auto and self.chosen is None and self._candidate is None

    @property
    def last_error(self) -> float | None:
        """The errors by rounding that were measured last, relative to the norm of the gradient."""
        return self._measured[max(self._measured)] if self._measured else None

    def measures(self, number: int) -> bool:
        """Whether the errors by rounding in step `number` are measured: see Note [Errors by rounding]."""
        if not self._is_trial:
            return number % MEASURED_EVERY == 0
        step = number - (number if self._began is None else self._began)
        return step >= WARM_UP and (step - WARM_UP) % self.turn_steps == 0  # the first of a turn, which is not timed

    def add_error(self, number: int, error: float | None) -> None:
        """Note the errors by rounding in step `number`, relative to the norm of the gradient; None: not measured.

        A worker that joins in this step calls it once more than its state needs, which changes nothing.
        """
        if error is None:
            return
        if self._is_trial:
            self._errors[self.current] = max(self._errors[self.current], error)
            return
        self._measured[number] = max(error, self._measured.get(number, 0.0))  # with several optimizers the largest
        while len(self._measured) > IN_A_ROW:
            del self._measured[min(self._measured)]

    def prepare(self, number: int, agree: Callable[[list[float]], list[float]]) -> str | None:
        """Set `current` for step `number` of the run. Called by all workers. Returns what is to be told, if anything.

        agree  a collective call that returns the largest of each number over all workers
        """
        if not self.is_auto:
            is_early = self._asked.has_residuals and number < WARM_UP
            told = self._check_errors(number)
            self.current = GradComm.FP32 if is_early or self.chosen is None else self.chosen
            self._wait_until_compared(number)
            return told
        if self._began is None:
            self._began = number
        step, told = number - self._began, None
        self._record(step)
        is_open = self.chosen is None and self._candidate is None
        if self._agreed == number:  # a worker that joins in this step: its state has the result of the others' call
            agree([])
        elif is_open and self._turn is None and step >= WARM_UP:
            (step_s,) = agree([median_of(self._times[WARM_UP_ROUND, GradComm.FP32])])
            self._agreed = number  # only now: a worker that joins during the call takes part in it
            if step_s > 0:
                self._turn = turn_for(step_s)
            else:  # all workers have resumed, or are new: they warm up once more
                self._began, step = number, 0
        ends = self._trial_steps
        if is_open and step >= ends and self._agreed != number:
            told = self._decide(number, agree)
            self._agreed = number
        elif step == ends + REVIEWED_AFTER and self.expected_s and self.chosen is not None:
            told = self._review(self.chosen)
        told = self._check_errors(number) or told
        self.current = trial_kind(step, self.turn_steps) if self.chosen is None else self.chosen
        self._wait_until_compared(number)
        return told

    @property
    def _trial_steps(self) -> int:
        """The steps of the trial, as far as it is known how many it has."""
        return trial_length(self.turn_steps, self._rounds)

    @property
    def turn_steps(self) -> int:
        """The steps of a turn; before they are known as many as a turn can have, so that the trial is not over."""
        return MOST_TURN if self._turn is None else self._turn

    def _wait_until_compared(self, number: int) -> None:
        """Send step `number` without compression if losses are compared for the first time before it, or later.

        A worker that joins in this step has the state of one that has compared them already.
        """
        if self._candidate is not None:
            self.current = GradComm.FP32
        elif self._last_comparison is not None and number <= self._last_comparison.step:
            self.current = self._last_comparison.sent

    def _check_errors(self, number: int) -> str | None:
        """Choose another kind from step `number` on if the errors by rounding were too large. Returns what is told."""
        kind, last = self.chosen, sorted(step for step in self._measured if step < number)[-IN_A_ROW:]
        errors = [self._measured[step] for step in last]
        is_too_large = len(errors) == IN_A_ROW and min(errors) > LARGEST_ERROR
        if kind is None or kind.codec is None or not self._may_fall_back or not is_too_large:
            return None
        self.chosen = GradComm.FP32 if self._next_best is kind else self._next_best
        self.expected_s, self._measured = 0.0, {}
        return (
            f"the errors by rounding were {', '.join(f'{error:.2g}' for error in errors)} of the norm of the gradient "
            f'with grad_comm="{kind.value}" in steps {", ".join(map(str, last))} (at most {LARGEST_ERROR} is used): '
            f'grad_comm "{self.chosen.value}" from step {number} on'
        )

    def describe_start(self) -> str:
        """Return from which step on a kind that was asked for is used."""
        if self._candidate is not None:
            return f"from step {COMPARISON + 1} on, if the loss does not suffer"
        return f"from step {WARM_UP} on" if self.chosen is self._asked else "no longer: the loss suffered"

    def describe_change(self) -> str:
        """Return, for the first line of a run that resumes, that integers are not sent any more; empty if they are."""
        if self._asked.codec is None or self.chosen is self._asked:
            return ""
        return f', grad_comm="{self._asked.value}" no longer: its errors were too large'

    def candidate(self, number: int) -> GradComm | None:
        """Return the kind that is to be compared before step `number`, None if none is.

        A kind that is used is compared again and again, at intervals that grow with the number of steps.
        """
        if not self._compares:
            return None
        if self._last_comparison is not None and self._last_comparison.step == number:
            return self._last_comparison.kind  # by the other workers; this one takes over the result
        if self._candidate is not None:
            return self._candidate if self.is_auto or number >= COMPARISON else None
        last = COMPARISON if self._last_comparison is None else self._last_comparison.step
        return self.chosen if self.chosen in NEEDS_COMPARISON and number >= COMPARISON_FACTOR * last else None

    def conclude(self, kind: GradComm, number: int, *, is_harmless: bool) -> GradComm:
        """Choose this kind after a comparison before step `number`, or the next best. Returns what is chosen.

        It is used from the next step on.
        """
        self.chosen = kind if is_harmless else self._next_best
        if self._last_comparison is None or self._last_comparison.step != number:
            self._last_comparison = PastComparison(kind, number, sent=self.current)
        self._candidate = None
        if not is_harmless:
            self.expected_s, self._measured = 0.0, {}
        return self.chosen

    def _record(self, step: int) -> None:
        """Note how long the previous step took, with all that the program did in it."""
        now_s, before, turn, steps = time.perf_counter(), step - 1, self.turn_steps, self._trial_steps
        if self._last is not None and self._last[0] == before and 1 <= before < steps + REVIEWED_AFTER:
            is_trial = WARM_UP <= before < steps
            if not is_trial or (before - WARM_UP) % turn:
                number = WARM_UP_ROUND if before < WARM_UP else (before - WARM_UP) // (turn * len(KINDS))
                self._times[number, self.current].append(now_s - self._last[1])
        self._last = step, now_s

    def _decide(self, number: int, agree: Callable[[list[float]], list[float]]) -> str:
        """Choose a kind at the end of a trial, or continue the trial. Returns what is to be told."""
        mine = [median_of(self._times[one, kind]) for one in range(self._rounds) for kind in KINDS]
        agreed = agree(mine + list(self._errors.values()))
        parts = [agreed[first : first + len(KINDS)] for first in range(0, len(agreed), len(KINDS))]
        *rounds, errors = (dict(zip(KINDS, part, strict=True)) for part in parts)
        step_s = step_times(rounds)
        is_known = all(step_s.values())  # not if all workers are new, or resumed in the middle of the trial
        best = choose(step_s, errors, KINDS) if is_known else GradComm.FP32
        others = [kind for kind in KINDS if kind is not best and errors[kind] <= LARGEST_ERROR]
        # A worker that has resumed has no times of earlier rounds.
        is_certain = len(whole_rounds(rounds)) >= min(ROUNDS, self._rounds) and not any(
            may_be_faster(kind, best, rounds) for kind in others
        )
        if not is_certain and self._rounds < MOST_ROUNDS:
            self._rounds += ROUNDS
            last = number - trial_length(self.turn_steps, self._rounds - ROUNDS) + self._trial_steps
            return (
                f'grad_comm="auto": the times of steps do not suffice for a choice; the trial goes on until step {last}'
            )
        if best in NEEDS_COMPARISON:
            self._next_best = choose(step_s, errors, [kind for kind in KINDS if kind not in NEEDS_COMPARISON])
        if best in NEEDS_COMPARISON and self._compares:
            self._candidate = best
        else:
            self.chosen = best
        self.expected_s = step_s[best]
        self._times.clear()
        if not is_known:
            return f'grad_comm="auto": the trial was interrupted; "fp32" from step {number} on'
        tried = ", ".join(f"{kind.value} {1e3 * took_s:.3g}" for kind, took_s in step_s.items())
        lost = ", ".join(f"{kind.value} {errors[kind]:.2g}" for kind in KINDS[1:])
        about = f"ms of a step: {tried}; errors relative to the gradient: {lost}, at most {LARGEST_ERROR} is used"
        begins = f"from step {number} on" if self._candidate is None else "if the loss does not suffer"
        return f'grad_comm="auto": "{best.value}" {begins} ({about})'

    def _review(self, chosen: GradComm) -> str:
        took_s = median_of([one for (_, kind), times in self._times.items() if kind is chosen for one in times])
        got = f"{1e3 * took_s:.3g}" if took_s else "an unknown number of"
        return f'grad_comm="auto": "{chosen.value}" takes {got} ms a step, {1e3 * self.expected_s:.3g} were expected'
