"""The options of a `Run`, checked in one place."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Final, TypedDict, TypeVar

import torch

from lockstep.comm.integer_codec import IntegerCodec
from lockstep.comm.low_rank_sum import LowRank
from lockstep.comm.top_k_sum import MAX_RATIO, TopK
from lockstep.errors import refuse_unknown_options
from lockstep.step.compiled_model import CompileOptions, check_compile_option
from lockstep.step.precision import Precision
from lockstep.step.shard_graphs import Capture

Choice = TypeVar("Choice", bound=Enum)

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
RUN_ARGUMENTS: Final = ("directory", "seed", "exact", "resume")  # arguments of Run that are not fields of RunOptions
_TO_BATCHES: Final = (
    "it belongs to run.batches(dataset, global_batch_size=..., shards=..., epochs=..., num_workers=...)"
)
RENAMED: Final = {
    "clip_norm": "max_grad_norm",
    "clip": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm",
    "wire": "grad_comm",
    "compression": "grad_comm",
    "gradient_compression": "grad_comm",
    "mixed_precision": "precision",
    "fp16": 'write precision="fp16"',
    "bf16": 'write precision="bf16"',
    "amp": 'write precision="bf16" or precision="fp16"',
    "checkpoint_every": "save_every",
    "save_steps": "save_every",
    "output_dir": "directory",
    "dir": "directory",
    "fresh": "write resume=False",
    "epochs": _TO_BATCHES,
    "num_workers": _TO_BATCHES,
    "batch_size": _TO_BATCHES,
    "global_batch_size": _TO_BATCHES,
    "shards": _TO_BATCHES,
    "zero": "shard_optimizer",
    "fp32_master_weights": "master_weights",
    "zero_stage": "write shard_optimizer=True for the first stage of ZeRO",
    "gradient_accumulation_steps": "set shards= of run.batches: a worker runs its shards one after the other",
}


class OnNonFinite(Enum):
    """What all workers do when a loss or a gradient is not a finite number."""

    STOP = "stop"  # raise NonFiniteError, with the weights as they were before the step
    SKIP = "skip"  # leave the weights unchanged and continue with the next batch
    IGNORE = "ignore"  # do not check


class GradComm(Enum):
    """How gradients are sent."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"
    POWERSGD = "powersgd"
    TOPK = "topk"
    AUTO = "auto"  # which of them is decided by trial (step/grad_comm_tuner.py)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype to which gradients are rounded; None: to none."""
        return {GradComm.BF16: torch.bfloat16, GradComm.FP16: torch.float16}.get(self)

    @property
    def codec(self) -> IntegerCodec | None:
        bits = {GradComm.INT8: 8, GradComm.INT4: 4}.get(self)
        return None if bits is None else IntegerCodec(bits)

    @property
    def has_residuals(self) -> bool:
        """Whether what a gradient loses is sent in later steps."""
        return self in (GradComm.POWERSGD, GradComm.TOPK)


class OptionNames(TypedDict, total=False):
    """The keyword arguments of `Run`, for type checkers."""

    precision: str
    grad_comm: str | None
    grad_comm_dtype: str | None
    powersgd_rank: int
    topk_ratio: float
    compare_loss: bool
    max_grad_norm: float | None
    on_nonfinite: str
    check_every: int | None
    audit_every: int | str
    balance_shards: bool
    shard_optimizer: bool
    defer_weights: bool
    redundancy: int | None
    master_weights: bool
    save_every: int | str | None
    exit_on_interrupt: bool
    threads: int
    compile: bool | str | dict[str, Any]
    capture: bool | str
    progress: bool
    trace: bool
    tensorboard: bool
    backend: str | None
    device: str | torch.device | None


@dataclass(frozen=True)
class RunOptions:
    """
    precision     dtype of forward passes (autocast): "fp32", "bf16" or "fp16"
    grad_comm     how gradients are sent: "fp32": as they are; "bf16" or "fp16": in half precision, and still summed in
                  float32; "int8" or "int4": as integers of so many bits, rounded at random without bias
                  (docs/compression.md); "powersgd": as matrices of low rank; "topk": their largest elements; what these
                  lack is sent later; "auto": the fastest of "fp32", "int8" and "int4", by a trial in some of the
                  first steps. Each has bits of its own, the same on any number of workers. Complex and sparse
                  gradients are sent unchanged. `grad_comm_dtype` is another name of this option
    powersgd_rank  the rank of the matrices with grad_comm="powersgd"
    topk_ratio    the share of the elements that is sent with grad_comm="topk"
    compare_loss  with grad_comm="powersgd", "topk" or "auto": take 32 steps with and without compression before it is
                  used, and again later, undo them, and do without it if the loss falls less with it; with "int8" and
                  "int4": do without them if their errors become too large (docs/compression.md)
    max_grad_norm  largest norm of the gradient of the global batch; a larger one is clipped
    on_nonfinite  what to do if a loss or gradient is not finite: "stop", "skip" or "ignore"
    check_every   steps between two comparisons of the replicas; None: so many that they cost less than 0.5 %
    audit_every   steps between two rounds of audits, in which one shard of every worker is computed again by another;
                  "auto": so many that they cost less than 1 %; 0: never. In an elastic run a worker that computes
                  wrongly is left out, and the others go back to the last verified state
    balance_shards  with more shards than workers, give slow workers fewer shards; the bits are the same
    shard_optimizer  every worker keeps 1/N of the optimiser's state (ZeRO, stage 1); the bits are the same. Then
                  `Run.digest` in the loop, `save` and `save_best` are collective calls
    defer_weights  with shard_optimizer, between hosts: new weights arrive during the next forward pass, or when the
                  program reads them; on a GPU that workers share, only its streams wait for them. False: before
                  run.step returns
    redundancy    with shard_optimizer, how many other workers keep a copy of each worker's part: 1: the loss of a
                  worker is repaired from the copy; 0: the others go back to the last checkpoint. None: 1 in an elastic
                  run or with audits, else 0
    master_weights  with shard_optimizer, for parameters in bfloat16: the optimiser updates a float32 copy of each, and
                  the parameter is this copy, rounded
    save_every    steps between two checkpoints, or a time such as "5m"; None: after every epoch and at the end
    exit_on_interrupt  after SIGTERM, SIGUSR1 or Ctrl-C the program saves and exits after the current step; False: only
                  the loop ends, and the program checks `run.interrupted`
    threads       CPU threads of each worker. The bits depend on it, so it is not derived from the number of workers
    compile       True, or options of torch.compile: the forward pass of the replicated model is compiled. It computes
                  other bits than without, and the same on any number of workers. "regional", or True for this option:
                  only blocks that occur several times, such as the layers of a transformer, which takes less time
    capture       on a GPU, run forward and backward of a shard as CUDA graphs, with the same bits: "auto": after a few
                  steps, if the program allows it; True: as "auto", but raise if it does not; False: never
    progress      print the progress
    trace         record times and metrics of all steps, for `lockstep report` and `lockstep watch`
    tensorboard   also write loss, learning rate, speed and the metrics of `run.log` for TensorBoard; needs its package
    backend       "shm", "gloo", "nccl" or "hierarchy"; None: chosen as in `lockstep.init`
    device        None: a GPU for each worker if there are GPUs, else the CPU
    """

    precision: Precision = Precision.FP32
    grad_comm: GradComm = GradComm.FP32
    powersgd_rank: int = 4
    topk_ratio: float = 0.01
    compare_loss: bool = True
    max_grad_norm: float | None = None
    on_nonfinite: OnNonFinite = OnNonFinite.STOP
    check_every: int | None = None
    audit_every: int | str = 0
    balance_shards: bool = True
    shard_optimizer: bool = False
    defer_weights: bool = True
    redundancy: int | None = None
    master_weights: bool = False
    save_every: int | str | None = None
    exit_on_interrupt: bool = True
    threads: int = 1
    compile: CompileOptions = False
    capture: Capture = Capture.AUTO
    progress: bool = True
    trace: bool = True
    tensorboard: bool = False
    backend: str | None = None
    device: str | torch.device | None = None

    @staticmethod
    def from_keywords(named: OptionNames) -> RunOptions:
        """Check the keyword arguments of `Run`. Raises TypeError or ValueError."""
        known = [*RUN_ARGUMENTS, *(f.name for f in fields(RunOptions)), "grad_comm_dtype"]
        refuse_unknown_options("Run", named, known, RENAMED)
        values: dict[str, Any] = dict(named)
        values["precision"] = one_of(Precision, "precision", values.get("precision", "fp32"))
        values["on_nonfinite"] = one_of(OnNonFinite, "on_nonfinite", values.get("on_nonfinite", "stop"))
        values["compile"] = check_compile_option(values.get("compile", False))
        values["capture"] = one_of(Capture, "capture", values.get("capture", "auto"))
        values["grad_comm"] = _grad_comm(values)
        clip = values.get("max_grad_norm")
        if clip is not None and not (isinstance(clip, (int, float)) and clip > 0 and math.isfinite(clip)):
            raise ValueError(f"max_grad_norm={clip!r} must be a positive number, or None")
        for name, kind in (("powersgd_rank", GradComm.POWERSGD), ("topk_ratio", GradComm.TOPK)):
            if name in values and values["grad_comm"] is not kind:
                raise ValueError(f'{name}={values[name]!r} needs grad_comm="{kind.value}"')
        ratio = values.get("topk_ratio", RunOptions.topk_ratio)
        if not isinstance(ratio, float) or not 0.0 < ratio <= MAX_RATIO:
            raise ValueError(
                f"topk_ratio={ratio!r} must be a float above 0, {MAX_RATIO} or less: the share of the elements that "
                "is sent, 0.01 for 1 %"
            )
        if values["grad_comm"].has_residuals and values["precision"] is Precision.FP16:
            raise ValueError(
                f'grad_comm="{values["grad_comm"].value}" with precision="fp16": what is left of earlier gradients '
                'would have the loss scale of earlier steps; use precision="bf16", which needs none'
            )
        for name, least in (("check_every", 1), ("audit_every", 0), ("threads", 1), ("powersgd_rank", 1)):
            value = values.get(name, least)
            word = {"check_every": None, "audit_every": "auto"}.get(name, least)  # allowed instead of a number
            if isinstance(value, bool) or (value != word and (not isinstance(value, int) or value < least)):
                instead = "" if word == least else f", or {word!r}"
                raise ValueError(f"{name}={value!r} must be a whole number, {least} or more{instead}")
        for name in ("balance_shards", "shard_optimizer", "defer_weights", "compare_loss", "master_weights"):
            if not isinstance(value := values.get(name, True), bool):
                raise ValueError(f"{name}={value!r} must be True or False")
        _check_redundancy(values.get("redundancy"), is_sharded=values.get("shard_optimizer", False))
        if values.get("defer_weights") is False and not values.get("shard_optimizer"):
            raise ValueError("defer_weights=False is about weights that other workers update: add shard_optimizer=True")
        if values.get("master_weights") and not values.get("shard_optimizer"):
            raise ValueError(
                "master_weights=True: the copies are kept with the parts of the optimiser's state: add "
                "shard_optimizer=True, which also works on one worker"
            )
        try:
            read_interval(values.get("save_every"))
        except ValueError as error:
            raise ValueError(f"save_every: {error}") from None
        return RunOptions(**values)

    @property
    def error_feedback(self) -> LowRank | TopK | None:
        """The method of compression that keeps residuals; None: `grad_comm` is not such a method."""
        if self.grad_comm is GradComm.POWERSGD:
            return LowRank(self.powersgd_rank)
        return TopK(self.topk_ratio) if self.grad_comm is GradComm.TOPK else None


def _check_redundancy(redundancy: object, *, is_sharded: bool) -> None:
    if redundancy not in (None, 0, 1) or isinstance(redundancy, bool):
        raise ValueError(f"redundancy={redundancy!r} is not known; choose 0, 1 or None")
    if redundancy is not None and not is_sharded:
        raise ValueError(f"redundancy={redundancy} is about parts of the optimiser's state: add shard_optimizer=True")


def read_interval(text: str | int | None) -> int | float | None:
    """Parse how often to save: 200 or "200" are steps, an int; "30s", "5m", "2h" are seconds, a float; None: per epoch.

    Raises ValueError for anything else.
    """
    if text is None:
        return None
    if isinstance(text, int) and not isinstance(text, bool) and text >= 1:
        return text
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh]?)", text.strip()) if isinstance(text, str) else None
    if match is not None and match[2] and float(match[1]) > 0:
        return float(match[1]) * _SECONDS[match[2]]
    if match is not None and not match[2] and match[1].isdecimal() and int(match[1]) >= 1:
        return int(match[1])
    raise ValueError(f"{text!r} is not how often to save: a number of steps such as 200, or a time such as 30s, 5m, 2h")


def one_of(kind: type[Choice], name: str, value: object) -> Choice:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(repr(choice.value) for choice in kind)
        raise ValueError(f"{name}={value!r} is not known; choose one of {known}") from None


def _grad_comm(values: dict[str, Any]) -> GradComm:
    """Return the value of `grad_comm`, or of its other name `grad_comm_dtype`, which is removed."""
    dtype, comm = values.pop("grad_comm_dtype", None), values.get("grad_comm")
    if dtype is not None and dtype not in ("fp32", "bf16", "fp16"):
        hint = f"; write grad_comm={dtype!r}" if dtype in [kind.value for kind in GradComm] else ""
        raise ValueError(f"grad_comm_dtype={dtype!r} is not known; choose one of 'fp32', 'bf16', 'fp16'{hint}")
    if dtype is not None and comm is not None and dtype != comm:
        raise ValueError(f"grad_comm={comm!r} and grad_comm_dtype={dtype!r} are two names of one option; give one")
    given = dtype if comm is None else comm
    return one_of(GradComm, "grad_comm", "fp32" if given is None else given)
