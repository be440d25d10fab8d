"""How much of the time a run makes progress while workers and hosts fail, with a restart or with recovery in place.

Failures of workers and of hosts are independent and have constant rates, so that the times between failures of the
whole run are exponential. Goodput is the progress of the run divided by what it would be with all workers and without
failures or checkpoints.

Sources: J. W. Young, A First Order Approximation to the Optimum Checkpoint Interval, 1974; J. T. Daly, A Higher Order
Estimate of the Optimum Checkpoint Interval for Restart Dumps, 2006.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FailureModel:
    """What fails how often, and what a failure costs.

    mtbf_worker_s         mean time between failures of one worker (a process or its GPU); `math.inf`: it never fails
    mtbf_host_s           the same of one host, which takes all of its workers with it; None: hosts never fail
    step_s                time of one training step with all workers
    checkpoint_s          time that it takes to write a checkpoint
    checkpoint_is_async   whether training continues while a checkpoint is written
    restart_s             from a failure until training resumes from a checkpoint
    recovery_s            from a failure until the remaining workers resume without a restart
    recompute_steps       steps that the remaining workers have to compute again
    replacement_s         how long a lost worker or host is missing
    redundancy            whether another worker keeps a copy of each part of a sharded optimiser
    shard_optimizer       whether each worker has a part of the optimiser's state that no other worker needs
    """

    mtbf_worker_s: float
    mtbf_host_s: float | None = None
    workers: int
    hosts: int
    step_s: float
    checkpoint_s: float
    checkpoint_is_async: bool
    restart_s: float
    recovery_s: float
    recompute_steps: float = 1.0
    replacement_s: float
    redundancy: bool = False
    shard_optimizer: bool = False

    def __post_init__(self) -> None:
        _check_positive(mtbf_worker_s=self.mtbf_worker_s, step_s=self.step_s)
        if self.mtbf_host_s is not None:
            _check_positive(mtbf_host_s=self.mtbf_host_s)
        _check_finite(step_s=self.step_s, checkpoint_s=self.checkpoint_s, restart_s=self.restart_s)
        _check_finite(recovery_s=self.recovery_s, replacement_s=self.replacement_s)
        _check_finite(recompute_steps=self.recompute_steps)
        for name, count in (("workers", self.workers), ("hosts", self.hosts)):
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{name}={count!r} has to be a whole number of 1 or more")
        if self.workers % self.hosts:
            raise ValueError(f"workers={self.workers} is not a multiple of hosts={self.hosts}")

    @property
    def failures_per_s(self) -> float:
        """Failures of all workers and hosts together, per second."""
        return self.workers / self.mtbf_worker_s + self._host_failures_per_s * self.hosts

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the run: of any worker or host."""
        return 1 / self.failures_per_s if self.failures_per_s else math.inf

    @property
    def _host_failures_per_s(self) -> float:
        return 0.0 if self.mtbf_host_s is None else 1 / self.mtbf_host_s

    @property
    def share_of_workers_present(self) -> float:
        """Average share of the workers that are present, where lost ones are missing for `replacement_s`."""
        worker = 1 / (1 + self.replacement_s / self.mtbf_worker_s)
        return worker / (1 + self.replacement_s * self._host_failures_per_s)

    @property
    def fallbacks_per_s(self) -> float:
        """Failures per second that recovery in place cannot repair: the run goes back to its last checkpoint.

        These are the loss of all workers at once, and, with a sharded optimiser, the loss of a part of its state: every
        failure without redundancy, and with it the loss of a worker and, within `recovery_s`, of the one that has the
        copy of its part, or of the one whose copy it had. Copies are on another host if there is one.
        """
        if not (self.shard_optimizer and self.redundancy):
            return self._unrecoverable_per_s
        partners, partner_hosts = min(2, self.workers - 1), min(2, self.hosts - 1)
        worker_failures_per_s, host_failures_per_s = 1 / self.mtbf_worker_s, self._host_failures_per_s
        after_worker = partners * worker_failures_per_s + partner_hosts * host_failures_per_s
        after_host = partner_hosts * (self.workers // self.hosts * worker_failures_per_s + host_failures_per_s)
        both_per_s = self.workers * worker_failures_per_s * -math.expm1(-self.recovery_s * after_worker)
        both_per_s += self.hosts * host_failures_per_s * -math.expm1(-self.recovery_s * after_host)
        return self._unrecoverable_per_s + both_per_s

    @property
    def _unrecoverable_per_s(self) -> float:
        """Failures per second after which no recovery in place is tried."""
        if self.shard_optimizer and not self.redundancy:
            return self.failures_per_s
        of_all_workers = 1 / self.mtbf_worker_s if self.workers == 1 else 0.0
        return of_all_workers + (self._host_failures_per_s if self.hosts == 1 else 0.0)

    @property
    def recoveries_per_s(self) -> float:
        """Failures per second after which the remaining workers recover in place, or try to."""
        return max(0.0, self.failures_per_s - self._unrecoverable_per_s)


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Returns Young's first-order estimate of the best time between two checkpoints."""
    _check_finite(checkpoint_s=checkpoint_s)
    _check_positive(mtbf_s=mtbf_s)
    return math.sqrt(2 * checkpoint_s * mtbf_s) if checkpoint_s else 0.0


def daly_interval_s(checkpoint_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Returns Daly's higher-order estimate of the best computing time between two checkpoints.

    The time of a restart does not change it: each failure costs one restart, however often checkpoints are written.
    """
    _check_finite(checkpoint_s=checkpoint_s, restart_s=restart_s)
    _check_positive(mtbf_s=mtbf_s)
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_s / (2 * mtbf_s)
    return young_interval_s(checkpoint_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def goodput_with_restart(model: FailureModel, interval_s: float) -> float:
    """Returns the goodput of a run that starts again from its last checkpoint after every failure, in (0, 1].

    `interval_s` is the computing time between two checkpoints. The formula is exact: between two failures the run
    completes whole intervals only, and failures also hit restarts and the writing of checkpoints. With a checkpoint
    that is written in the background, only what was computed since the last one that is complete is lost, but an
    interval is at least as long as it takes to write one. `math.inf` is allowed if nothing fails.
    """
    return _restart_goodput(model, interval_s, mtbf_s=model.mtbf_s, restart_s=_mean_restart_s(model))


def best_interval_s(model: FailureModel) -> float:
    """Returns the computing time between two checkpoints with which `goodput_with_restart` is highest.

    It is a step at least. With checkpoints that are written in the background it is the time that one takes to write;
    `math.inf` if nothing fails and a checkpoint costs time.
    """
    return _best_interval_s(model, mtbf_s=model.mtbf_s)


def goodput_in_place(model: FailureModel, *, interval_s: float | None = None) -> float:
    """Returns the goodput of a run whose remaining workers resume after a failure without a restart, in (0, 1].

    A failure costs `recovery_s` and the steps that are computed again; a failure during recovery starts it anew. Then
    the run has fewer workers for `replacement_s`. Failures that cannot be repaired so (`fallbacks_per_s`) cost what
    they cost with a restart. `interval_s` is the computing time between two checkpoints; None: the best one for these
    failures, or no checkpoints if there are none of them.
    """
    fallbacks_per_s = model.fallbacks_per_s
    share = math.exp(-model.recoveries_per_s * (model.recovery_s + model.recompute_steps * model.step_s))
    # Recoveries stretch all other times, which is the same as failures that are closer to each other. They do not
    # stretch a restart: any failure starts it anew.
    mtbf_s = share / fallbacks_per_s if fallbacks_per_s else math.inf
    if mtbf_s == 0:
        return sys.float_info.min
    if interval_s is None:
        interval_s = _best_interval_s(model, mtbf_s=mtbf_s)
    restarts = _restart_goodput(model, interval_s, mtbf_s=mtbf_s, restart_s=share * _mean_restart_s(model))
    return max(model.share_of_workers_present * share * restarts, sys.float_info.min)


def _restart_goodput(model: FailureModel, interval_s: float, *, mtbf_s: float, restart_s: float) -> float:
    """Expected progress between two failures, divided by the expected time between two resumptions.

    A run that resumes fails after an exponential time with mean `mtbf_s`. With blocking checkpoints it has completed k
    intervals if it lives for k (interval + checkpoint), with others if it lives for k interval + checkpoint. The sum of
    these probabilities over k is a geometric series. Then it takes `restart_s` on average until it resumes.
    """
    _check_positive(interval_s=interval_s)
    if math.isinf(interval_s) and not math.isinf(mtbf_s):
        raise ValueError(f"interval_s={interval_s} has to be finite: the run needs a checkpoint every {mtbf_s:.6g} s")
    cycle_s, after_s = interval_s + model.checkpoint_s, 0.0
    if model.checkpoint_is_async:
        interval_s = max(interval_s, model.checkpoint_s)
        cycle_s, after_s = interval_s, model.checkpoint_s
    if math.isinf(mtbf_s):
        return 1.0 if math.isinf(interval_s) else interval_s / cycle_s
    cycles = cycle_s / mtbf_s
    intervals = math.exp(-cycles - after_s / mtbf_s) / -math.expm1(-cycles)
    return min(1.0, max(interval_s * intervals / (mtbf_s + restart_s), sys.float_info.min))


def _mean_restart_s(model: FailureModel) -> float:
    """Expected time of a restart, which any failure starts anew."""
    failures = model.restart_s * model.failures_per_s
    if failures == 0:
        return model.restart_s
    return math.expm1(failures) / model.failures_per_s if failures < 500 else math.inf


def _best_interval_s(model: FailureModel, *, mtbf_s: float) -> float:
    least_s = max(model.step_s, model.checkpoint_s) if model.checkpoint_is_async else model.step_s
    if model.checkpoint_is_async or not model.checkpoint_s:
        return least_s
    if math.isinf(mtbf_s):
        return math.inf
    # The derivative of the goodput is zero where 1 - x = exp(-(x + checkpoint / M)), x being interval / M in (0, 1).
    checkpoint = model.checkpoint_s / mtbf_s
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        is_below = -middle - math.expm1(-(middle + checkpoint)) > 0
        low, high = (middle, high) if is_below else (low, middle)
    return max(least_s, high * mtbf_s)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value!r} has to be positive")


def _check_finite(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}={value!r} has to be 0 or more, and finite")
