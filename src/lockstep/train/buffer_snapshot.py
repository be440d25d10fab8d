"""The buffers of a model at one moment, and the way back to it.

A forward pass may write to a buffer, put another tensor in its place, of another shape even, or register a new one: the
averages of batch norm, a counter, the table of a rotary embedding that grows with the sequences, a mask that is made
when the first batch comes.

Note [Silent writes]
Torch counts the changes of a tensor. But the kernels of batch norm write running averages without counting, and so does
everything that is written through `buffer.data`. The module of a batch norm counts its batches, in the ordinary way: so
there we look at that counter. Of all other buffers the values themselves are compared until one step is through, and
later only those of buffers that were found to be written silently, and of small ones on a CPU: to compare the mask of a
transformer with itself after each shard costs more than many a step, and on a GPU one would wait for the forward pass.

Note [Numbers beside a buffer]
A module whose buffer grows often keeps a number beside it, such as the length up to which its table is made. If the
table went back and the number did not, the next forward pass would look for rows that are not there. So where a forward
pass gives a buffer another shape, or registers one, the numbers and texts that are attributes of the same module go the
same way as its buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

ALWAYS_COMPARED_BYTES: Final = 65536  # on a CPU, where that takes some 10 microseconds
_SCALARS: Final = (bool, int, float, str, type(None))
_OF_EVERY_MODULE: Final = frozenset(nn.Module().__dict__)


class Gone(Enum):
    """In the place of a buffer: the module does not have one of this name."""

    GONE = "gone"


BufferValue = Tensor | None | Gone  # None: it is registered, and has no tensor


@dataclass
class BufferPlace:
    """Where a buffer is kept, so that another tensor put in its place is found too; and what was there."""

    owner: Owner
    key: str
    averages: bool  # running averages of batch norm
    is_silent: bool  # it may be written without a count: see Note [Silent writes]
    compares: bool  # its values, to see whether it was written
    was_found: bool = False  # by comparing: it is written silently
    held: Tensor | None = None  # the tensor that was there when we looked
    start: Tensor | None = None  # a copy of its value then
    versions: tuple[int, int] | None = None  # how often it, and the counter of its module, had been written then

    def __post_init__(self) -> None:
        self.name = self.owner.name_of(self.key)

    def is_counted(self) -> bool:
        """A buffer of batch norm that is still the tensor that was held: counts tell whether it was written."""
        held = self.held
        return not self.is_silent and held is not None and self.owner.module._buffers.get(self.key) is held

    def now(self) -> BufferValue:
        return self.owner.module._buffers.get(self.key, Gone.GONE)

    def hold(self) -> None:
        """Keep what is there now."""
        now = self.now()
        assert not isinstance(now, Gone)
        fits = now is not None and self.start is not None and self._fits(now)
        if now is None:
            self.start = None
        elif fits and self.start is not None and self.start.device == now.device:
            self.start.copy_(now.detach())
        else:
            self.start = now.detach().clone()
        self.held, self.versions = now, self._count(now)

    def is_up_to_date(self) -> bool:
        """Nothing has to be held anew: never true where values are compared, which finds silent writes."""
        return self.versions is not None and not self.compares and not self.has_changed()

    def _is_untouched(self) -> bool:
        """Most buffers, most of the time: a quick look at the tensor, without its values."""
        held, start, versions = self.held, self.start, self.versions
        if self.compares or self.averages or held is None or start is None or versions is None:
            return False
        is_there = self.owner.module._buffers.get(self.key) is held
        return is_there and held._version == versions[0] and held.shape == start.shape and held.dtype == start.dtype

    def has_changed(self) -> bool:
        """Whether it has another value than when it was held."""
        if self._is_untouched():
            return False
        if not self.is_silent and self.now() is self.held:
            return self.is_written()
        return self.is_odd() or (self._has_other_bits() if self.compares else self.is_written())

    def is_written(self) -> bool:
        """Whether there is another tensor, or torch has counted a write to it."""
        now, held = self.now(), self.held
        if held is None or now is not held:
            return now is not held
        # Instance norm does not even count.
        is_uncounted = self.averages and self.owner.module.training and not _counts(self.owner.module)
        return self._count(held) != self.versions or is_uncounted

    def compare_less(self, *, is_found: bool) -> None:
        """From the second step on. `is_found`: comparing has shown a silent write, on some worker."""
        self.was_found = self.was_found or is_found
        is_cheap = self.held is None or (not self.held.is_cuda and self.held.nbytes <= ALWAYS_COMPARED_BYTES)
        self.compares = self.is_silent and (self.was_found or is_cheap)

    def is_gone(self) -> bool:
        return self.now() is Gone.GONE

    def is_odd(self) -> bool:
        """Whether its value cannot be put into the tensor that was held: it has another shape or dtype, or is gone."""
        if self._is_untouched():
            return False
        now = self.now()
        if isinstance(now, Tensor):
            return not self._fits(now)
        return isinstance(now, Gone) or self.held is not None

    def _has_other_bits(self) -> bool:
        now = self.now()
        return isinstance(now, Tensor) and self.start is not None and not has_same_bits(now, self.start)

    def go_back(self, *, always: bool, waits: bool) -> None:
        """Put back the tensor that was held, with its value. See `BufferSnapshot.go_back`."""
        held, start = self.held, self.start
        is_suspect = always or self.compares or self.is_written()
        if self.now() is not held:
            self.owner.module._buffers[self.key] = held
        if held is None or start is None:
            return
        if not self._fits(held):  # resized, or given other memory
            held.data = start.clone()
        elif is_suspect and not is_expanded(held) and ((held.is_cuda and not waits) or not has_same_bits(held, start)):
            held.copy_(start)

    def note_versions(self) -> None:
        if self.held is not None:
            self.versions = self._count(self.held)

    def _fits(self, now: Tensor) -> bool:
        start = self.start
        return start is not None and (now.shape, now.dtype, now.layout) == (start.shape, start.dtype, start.layout)

    def _count(self, now: Tensor | None) -> tuple[int, int]:
        counter = self.owner.module._buffers.get("num_batches_tracked") if self.averages else None
        return -1 if now is None else now._version, 0 if counter is None else counter._version


@final
class Owner:
    """A module that has buffers, or may get some."""

    def __init__(self, prefix: str, module: nn.Module) -> None:
        self.prefix, self.module = prefix, module
        self.keys = tuple(module._buffers)
        self._of_norm = ("running_mean", "running_var", "num_batches_tracked") if isinstance(module, _NormBase) else ()
        self._numbers: dict[str, Any] | None = None

    def name_of(self, key: str) -> str:
        return f"{self.prefix}.{key}" if self.prefix else key

    def born(self) -> list[str]:
        """Names of buffers that were registered since."""
        return [key for key in self.module._buffers if key not in self.keys]

    def places(self) -> Iterator[BufferPlace]:
        for key in self.keys:
            is_silent = key not in self._of_norm
            averages = not is_silent and key != "num_batches_tracked"
            yield BufferPlace(self, key, averages, is_silent, compares=is_silent)

    def hold_numbers(self) -> None:
        """See Note [Numbers beside a buffer]."""
        self._numbers = numbers_of(self.module)

    def changed_numbers(self) -> dict[str, Any]:
        held = self._numbers or {}
        return {key: value for key, value in numbers_of(self.module).items() if key not in held or held[key] != value}

    def go_back(self) -> None:
        """Drop what was registered since, and put back the numbers."""
        module, held = self.module, self._numbers or {}
        for key in self.born():
            delattr(module, key)
        for key in numbers_of(module).keys() - held.keys():
            delattr(module, key)
        for key, value in held.items():
            if key not in module._buffers and module.__dict__.get(key, Gone.GONE) is not value:
                module.__dict__[key] = value

    def put_in_order(self) -> None:
        """A buffer that was deleted and put back has come to the end; all workers have them in one order."""
        if tuple(self.module._buffers) != self.keys:
            ordered = {key: self.module._buffers[key] for key in self.keys}
            self.module._buffers.clear()
            self.module._buffers.update(ordered)


@final
class BufferSnapshot:
    """All buffers of a model as they were when `look` was called last."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.owners: list[Owner] = []
        self._numbered: list[Owner] = []
        self._sizes: list[tuple[Mapping[str, Any], int]] = []
        self.places: list[BufferPlace] = []  # by name: their order does not depend on when each was registered
        self.find()

    def find(self) -> None:
        """Look for buffers that have been registered since the last time, or dropped."""
        if self.owners and not self._has_other_number() and not any(place.is_gone() for place in self.places):
            return
        known = {(id(place.owner.module), place.key): place for place in self.places}
        self.owners = [Owner(prefix, module) for prefix, module in self._module.named_modules()]
        self.places = sorted((place for owner in self.owners for place in owner.places()), key=lambda place: place.name)
        for place in self.places:
            before = known.get((id(place.owner.module), place.key), place)
            place.compares, place.was_found = before.compares, before.was_found
        self._numbered = list(self.owners)
        self._sizes = [(owner.module._buffers, len(owner.keys)) for owner in self.owners]
        self._of_norm = [place for place in self.places if not place.is_silent]
        self._silent = [place for place in self.places if place.is_silent]

    def _has_other_number(self) -> bool:
        """Whether some module has more buffers than before, or fewer. Asked after every shard, of all modules."""
        return any(len(buffers) != size for buffers, size in self._sizes)

    @torch.no_grad()
    def look(self) -> None:
        """Keep the buffers as they are now."""
        self.find()
        for place in self.places:
            if not place.is_up_to_date():
                place.hold()
        for owner in self._numbered:
            owner.hold_numbers()
        # From now on only of modules that have such buffers: of those that have none yet, the first time has to do.
        self._numbered = list({id(place.owner): place.owner for place in self.places if place.is_silent}.values())

    def compare_less(self) -> None:
        """After the first forward pass: see Note [Silent writes]."""
        for place in self._silent:
            place.compare_less(is_found=place.has_changed() and not place.is_written())

    def odd_owners(self) -> list[Owner]:
        """Modules in which a buffer was registered, dropped, or has another shape than it had."""
        replaced = [place for place in self._of_norm if not place.is_counted()]
        odd = {id(place.owner) for place in (*self._silent, *replaced) if place.is_odd()}
        if not odd and not self._has_other_number():
            return []
        return [owner for owner in self.owners if id(owner) in odd or owner.born()]

    @torch.no_grad()
    def go_back(self, *, always: bool = False, waits: bool = False) -> None:
        """The buffers are as they were when `look` was called.

        always  also where torch has counted no write, and values are not compared
        waits   for a GPU: nothing is written where the value is as it was
        """
        odd = self.odd_owners()
        counted = [place for place in self._of_norm if place.is_counted() and (always or place.is_written())]
        if counted:  # most of what there is, in few calls
            torch._foreach_copy_([place.held for place in counted], [place.start for place in counted])  # type: ignore[misc]
        others = [place for place in self.places if not place.is_counted()]
        touched = [place for place in others if always or place.compares or place.has_changed()]
        for place in touched:
            place.go_back(always=always, waits=waits)
        for owner in odd:
            owner.go_back()
            owner.put_in_order()
        for place in (*counted, *touched):  # when all are back: the counter of a batch norm is a buffer too
            place.note_versions()


def has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of the same shape and dtype are the same; a NaN is the same as itself."""
    both = [bytes_of(one), bytes_of(other)]
    if all(flat.numel() % 8 == 0 and flat.storage_offset() % 8 == 0 for flat in both):
        both = [flat.view(torch.int64) for flat in both]  # eight times as fast
    return torch.equal(*both)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in a row; they are its own memory where it is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Not view(-1): a single element may have any stride, and then has no view as bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements share their memory: torch refuses to write to such a tensor."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def numbers_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are numbers, texts, None, or tuples of them."""
    return {key: value for key, value in module.__dict__.items() if key not in _OF_EVERY_MODULE and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return type(value) in _SCALARS or (type(value) is tuple and all(type(one) in _SCALARS for one in value))


def _counts(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.num_batches_tracked is not None
