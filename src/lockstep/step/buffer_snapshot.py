"""A snapshot of the buffers of a model that can be restored.

A forward pass may write to a buffer, replace it by another tensor, even of another shape, or register a new one: the
running averages of batch norm, a counter, the table of a rotary embedding that grows with the sequences, a mask that is
made for the first batch.

Note [Silent writes]
Torch counts the writes to a tensor (`_version`). But the kernels of batch norm write the running averages without
counting, and so does every write through `buffer.data`. A batch norm module counts its batches in the ordinary way, so
its averages are checked through that counter. The values of all other buffers are compared until the first step is
done. Later only these are compared: buffers that were found to be written silently, and small ones on a CPU. Comparing
the mask of a transformer with itself after each shard can cost more than a step, and on a GPU it would wait for the
forward pass.

Note [Numbers beside a buffer]
A module whose buffer grows often keeps a number beside it, such as the length for which its table was made. If only the
table were restored, the next forward pass would look up rows that do not exist. So where a forward pass gives a buffer
another shape, or registers one, the attributes of the same module that are numbers or strings are restored, and
exchanged, together with its buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lockstep._torch import BatchNormBase, NormBase
from lockstep.step.norm_buffers import NormBuffers, is_ordinary

ALWAYS_COMPARED_BYTES: Final = 65536  # on a CPU, where comparing that much takes some 10 microseconds
_SCALARS: Final = (bool, int, float, str, type(None))
_ATTRIBUTES_OF_EVERY_MODULE: Final = frozenset(nn.Module().__dict__)


class Gone(Enum):
    """Stands for the value of a buffer that the module does not have (any more)."""

    GONE = "gone"


BufferValue = Tensor | None | Gone  # None: it is registered, and has no tensor


class WriteDetection(Enum):
    """How a write to a buffer is detected. See Note [Silent writes]."""

    NORM_AVERAGE = "norm average"  # running average of batch norm: by the batch counter of the module
    NORM_COUNTER = "norm counter"  # batch counter of batch norm: by torch's version counter
    VERSION = "version"  # any other buffer: by torch's version counter
    COMPARE = "compare"  # any other buffer: its values are compared, in the first step or because that is cheap
    COMPARE_ALWAYS = "compare always"  # comparing has shown a silent write

    def __init__(self, label: str) -> None:
        # Attributes and not properties: they are read for every buffer, several times per shard.
        self.is_norm = label.startswith("norm")  # a buffer of a normalisation layer: writes are always counted
        self.compares = label.startswith("compare")


@dataclass
class BufferPlace:
    """One entry of `module._buffers`, and what it was when `capture` was called last.

    It refers to the entry and not to the tensor, so that a tensor that was replaced is noticed, too.
    """

    owner: Owner
    key: str
    detection: WriteDetection
    tensor: Tensor | None = None  # the tensor that was captured
    saved: Tensor | None = None  # a copy of its value
    versions: tuple[int, int] | None = None  # its version counter, and that of the batch counter of its module

    def __post_init__(self) -> None:
        self.name = self.owner.name_of(self.key)
        self.is_norm_average = self.detection is WriteDetection.NORM_AVERAGE  # which never changes

    def current(self) -> BufferValue:
        return self.owner.module._buffers.get(self.key, Gone.GONE)

    def capture(self) -> None:
        """Keep the current tensor and a copy of its value."""
        current = self.current()
        assert not isinstance(current, Gone)
        fits = current is not None and self.saved is not None and self._fits(current)
        if current is None:
            self.saved = None
        elif fits and self.saved is not None and self.saved.device == current.device:
            self.saved.copy_(current.detach())
        else:
            self.saved = current.detach().clone()
        self.tensor, self.versions = current, self._versions_of(current)

    def is_up_to_date(self) -> bool:
        """Whether it need not be captured again; never true where values are compared to find silent writes."""
        return self.versions is not None and not self.detection.compares and not self.has_changed()

    def _is_untouched(self) -> bool:
        """A fast check that does not read values; it is true for most buffers most of the time."""
        tensor, saved, versions = self.tensor, self.saved, self.versions
        if self.detection.compares or self.is_norm_average or tensor is None or saved is None or versions is None:
            return False
        is_there = self.owner.module._buffers.get(self.key) is tensor
        return (
            is_there and tensor._version == versions[0] and tensor.shape == saved.shape and tensor.dtype == saved.dtype
        )

    def has_changed(self) -> bool:
        """Whether its value differs from the captured one."""
        if self._is_untouched():
            return False
        if self.detection.is_norm and self.current() is self.tensor:
            return self.is_written()
        return self.is_incompatible() or (self._has_other_bits() if self.detection.compares else self.is_written())

    def is_written(self) -> bool:
        """Whether the tensor was replaced, or torch has counted a write to it."""
        current, tensor = self.current(), self.tensor
        if tensor is None or current is not tensor:
            return current is not tensor
        if self._versions_of(tensor) != self.versions:
            return True
        # Instance norm does not even count its batches.
        return self.is_norm_average and self.owner.module.training and not _counts(self.owner.module)

    def compare_less(self, *, is_found: bool) -> None:
        """Compare values only where that is needed, from the second step on.

        `is_found`: on some worker, comparing has shown a silent write.
        """
        if self.detection.is_norm or self.detection is WriteDetection.COMPARE_ALWAYS:
            return
        is_cheap = self.tensor is None or (not self.tensor.is_cuda and self.tensor.nbytes <= ALWAYS_COMPARED_BYTES)
        if is_found:
            self.detection = WriteDetection.COMPARE_ALWAYS
        else:
            self.detection = WriteDetection.COMPARE if is_cheap else WriteDetection.VERSION

    def is_gone(self) -> bool:
        return self.current() is Gone.GONE

    def is_incompatible(self) -> bool:
        """Whether its value does not fit into the captured tensor: another shape or dtype, or the buffer is gone."""
        if self._is_untouched():
            return False
        current = self.current()
        if isinstance(current, Tensor):
            return not self._fits(current)
        return isinstance(current, Gone) or self.tensor is not None

    def _has_other_bits(self) -> bool:
        current = self.current()
        return isinstance(current, Tensor) and self.saved is not None and not has_same_bits(current, self.saved)

    def restore(self, *, always: bool, waits: bool) -> None:
        """Put back the captured tensor, with its value. See `BufferSnapshot.restore`."""
        tensor, saved = self.tensor, self.saved
        is_suspect = always or self.detection.compares or self.is_written()
        if self.current() is not tensor:
            self.owner.module._buffers[self.key] = tensor
        if tensor is None or saved is None:
            return
        if not self._fits(tensor):  # resized, or given other memory
            tensor.data = saved.clone()
        elif (
            is_suspect
            and not is_expanded(tensor)
            and ((tensor.is_cuda and not waits) or not has_same_bits(tensor, saved))
        ):
            tensor.copy_(saved)

    def update_versions(self) -> None:
        if self.tensor is not None:
            self.versions = self._versions_of(self.tensor)

    def _fits(self, current: Tensor) -> bool:
        saved = self.saved
        return saved is not None and (current.shape, current.dtype, current.layout) == (
            saved.shape,
            saved.dtype,
            saved.layout,
        )

    def _versions_of(self, current: Tensor | None) -> tuple[int, int]:
        counter = self.owner.module._buffers.get("num_batches_tracked") if self.is_norm_average else None
        return -1 if current is None else current._version, 0 if counter is None else counter._version


@final
class Owner:
    """A module that has buffers, or may register some."""

    def __init__(self, prefix: str, module: nn.Module) -> None:
        self.prefix, self.module = prefix, module
        self.keys = tuple(module._buffers.keys())
        self._norm_keys = ("running_mean", "running_var", "num_batches_tracked") if isinstance(module, NormBase) else ()
        self._numbers: dict[str, Any] | None = None

    def name_of(self, key: str) -> str:
        return f"{self.prefix}.{key}" if self.prefix else key

    def new_keys(self) -> list[str]:
        """Names of buffers that were registered since."""
        return [key for key in self.module._buffers if key not in self.keys]

    def places(self) -> Iterator[BufferPlace]:
        for key in self.keys:
            if key not in self._norm_keys:
                detection = WriteDetection.COMPARE
            elif key == "num_batches_tracked":
                detection = WriteDetection.NORM_COUNTER
            else:
                detection = WriteDetection.NORM_AVERAGE
            yield BufferPlace(self, key, detection)

    def capture_numbers(self) -> None:
        """See Note [Numbers beside a buffer]."""
        self._numbers = numbers_of(self.module)

    def changed_numbers(self) -> dict[str, Any]:
        saved = self._numbers or {}
        return {key: value for key, value in numbers_of(self.module).items() if key not in saved or saved[key] != value}

    def restore(self) -> None:
        """Delete the buffers that were registered since, and restore the numbers."""
        module, saved = self.module, self._numbers or {}
        for key in self.new_keys():
            delattr(module, key)
        for key in numbers_of(module).keys() - saved.keys():
            delattr(module, key)
        for key, value in saved.items():
            if key not in module._buffers and module.__dict__.get(key, Gone.GONE) is not value:
                module.__dict__[key] = value

    def restore_order(self) -> None:
        """Put the buffers back in order: one that was deleted and restored is last, and all workers need one order."""
        if tuple(self.module._buffers) != self.keys:
            ordered = {key: self.module._buffers[key] for key in self.keys}
            self.module._buffers.clear()
            self.module._buffers.update(ordered)


@final
class BufferSnapshot:
    """All buffers of a model as they were when `capture` was called last."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.owners: list[Owner] = []
        self._numbered: list[Owner] = []
        self._sizes: list[int] = []
        self._dicts: list[Mapping[str, Any]] = []
        self.places: list[BufferPlace] = []  # by name: their order does not depend on when each was registered
        self.norms: NormBuffers | None = None  # those that are handled together
        self.norm_columns: list[int] = []  # which of `places` these are, in their order
        self.singles: list[tuple[int, BufferPlace]] = []  # the others, which are handled one by one, and their columns
        self.refresh()

    def refresh(self) -> None:
        """Find the buffers that have been registered, or deleted, since the last call."""
        self.check_norms()
        if self.owners and not self._has_other_number() and not any(place.is_gone() for _, place in self.singles):
            return
        known = {(id(place.owner.module), place.key): place for place in self.places}
        self.owners = [Owner(prefix, module) for prefix, module in self._module.named_modules()]
        self.places = sorted((place for owner in self.owners for place in owner.places()), key=lambda place: place.name)
        for place in self.places:
            place.detection = known.get((id(place.owner.module), place.key), place).detection
        self._numbered = list(self.owners)
        self._dicts = [owner.module._buffers for owner in self.owners]
        self._sizes = [len(owner.keys) for owner in self.owners]
        self._set_norms(None, [])

    def _has_other_number(self) -> bool:
        """Whether any module has more buffers than before, or fewer. Called after every shard, for all modules."""
        return list(map(len, self._dicts)) != self._sizes

    # -- buffers that are handled together ---------------------------------------------------------------------------

    def check_norms(self) -> NormBuffers | None:
        """Return the buffers that are handled together. If one of them was replaced, all are handled one by one."""
        if self.norms is not None and not self.norms.is_intact():
            self._separate_norms(self.norms)
        return self.norms

    def _separate_norms(self, norms: NormBuffers) -> None:
        for n, column in enumerate(self.norm_columns):
            place = self.places[column]
            place.versions = norms.versions[n], norms.counter_version(n) if place.is_norm_average else 0
        self._set_norms(None, [])

    def _set_norms(self, norms: NormBuffers | None, columns: list[int]) -> None:
        """Handle these buffers together, and all others one by one. `columns`: which of `places` they are."""
        self.norms, self.norm_columns, together = norms, columns, set(columns)
        self.singles = [(n, place) for n, place in enumerate(self.places) if n not in together]

    def _join_norms(self) -> None:
        """Handle the buffers of ordinary batch norm layers together from now on. They have been captured."""
        averages = (place.tensor for place in self.places if place.is_norm_average)
        first = next((tensor for tensor in averages if tensor is not None), None)
        if first is None:
            return
        layers = {id(owner.module) for owner in self.owners if is_ordinary(owner.module, first)}
        columns = [n for n, p in enumerate(self.places) if p.detection.is_norm and id(p.owner.module) in layers]
        if not columns:
            return
        columns.sort(key=lambda n: not self.places[n].is_norm_average)  # averages first, each kind by name
        places = [self.places[n] for n in columns]
        entries = [(place.owner.module, place.key) for place in places if place.is_norm_average]
        norms = NormBuffers(entries, [place.owner.module for place in places if not place.is_norm_average])
        for place, saved in zip(places, norms.saved, strict=True):
            place.saved = saved
        self._set_norms(norms, columns)

    # -- capture and restore -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def capture(self) -> None:
        """Keep the buffers as they are now."""
        self.refresh()
        if self.norms is not None and not self.norms.capture():
            self._separate_norms(self.norms)
        for _, place in self.singles:
            if not place.is_up_to_date():
                place.capture()
        for owner in self._numbered:
            owner.capture_numbers()
        # From now on only for modules that have such buffers; for the others the first capture has to suffice.
        others = [place for _, place in self.singles if not place.detection.is_norm]
        self._numbered = list({id(place.owner): place.owner for place in others}.values())
        if self.norms is None:
            self._join_norms()

    def compare_less(self) -> None:
        """Call it after the first forward pass: see Note [Silent writes]."""
        for _, place in self.singles:
            place.compare_less(is_found=place.has_changed() and not place.is_written())

    def incompatible_owners(self) -> list[Owner]:
        """Return the modules in which a buffer was registered or deleted, or has another shape or dtype than before."""
        found = {id(place.owner) for _, place in self.singles if place.is_incompatible()}
        if not found and not self._has_other_number():
            return []
        return [owner for owner in self.owners if id(owner) in found or owner.new_keys()]

    @torch.no_grad()
    def restore(self, *, always: bool = False, waits: bool = False) -> None:
        """Make the buffers what they were when `capture` was called.

        always  also buffers to which torch has counted no write and whose values are not compared
        waits   compare values on a GPU as well, and write nothing where the value is unchanged
        """
        norms = self.check_norms()
        if norms is not None:
            norms.restore(norms.all_written if always else norms.are_written())
        incompatible = self.incompatible_owners()
        touched = [place for _, place in self.singles if always or place.detection.compares or place.has_changed()]
        for place in touched:
            place.restore(always=always, waits=waits)
        for owner in incompatible:
            owner.restore()
            owner.restore_order()
        for place in touched:  # after all are restored: the counter of a batch norm is a buffer, too
            place.update_versions()


def has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of the same shape and dtype are equal bit by bit; a NaN equals itself."""
    both = [bytes_of(one), bytes_of(other)]
    if all(flat.numel() % 8 == 0 and flat.storage_offset() % 8 == 0 for flat in both):
        both = [flat.view(torch.int64) for flat in both]  # eight times as fast
    return torch.equal(*both)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as a flat tensor, which shares its memory where it is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Not view(-1): a single element may have any stride, and then has no view as bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements share their memory: torch refuses to write to such a tensor."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def numbers_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are numbers, strings, None, or tuples of these."""
    return {
        key: value
        for key, value in module.__dict__.items()
        if key not in _ATTRIBUTES_OF_EVERY_MODULE and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    return type(value) in _SCALARS or (type(value) is tuple and all(type(one) in _SCALARS for one in value))


def _counts(module: nn.Module) -> bool:
    """Whether a normalisation layer counts its batches."""
    return isinstance(module, BatchNormBase) and module.num_batches_tracked is not None
