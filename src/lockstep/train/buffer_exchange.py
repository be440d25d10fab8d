"""Buffers that a forward pass changes, such as the running averages of batch norm, made independent of the workers.

Every shard sees the buffers as they were before the step. What its forward pass makes of them is put aside. When all
shards are through, the running averages of batch norm become the mean of what the shards made of them, weighted by
their samples: one update per step, with the statistics of all shards. Any other buffer becomes what the first shard
that changed it made of it. So does one that has got another shape, or was registered in the forward pass.

Note [One table]
Averages travel as float64, which holds float32 as it is: those of every shard, since all count. Of any other buffer one
shard's value travels, as it is: four of its bytes are a whole number that float64 holds. So one sum of tables does it
for all dtypes. What has another shape than before is described in words first; that costs two more messages, in
steps in which it happens.

Note [Healed buffers]
A buffer that differs on one worker before a step is equal everywhere after it, because all get what the shards made of
it: wrong everywhere, and no difference shows. So what every buffer was before it was overwritten goes into a digest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lockstep.comm import agreement
from lockstep.comm.exact_sum import ShardSum
from lockstep.ddp.state_digest import cheap_digests, sum_of_bits
from lockstep.errors import LockstepError
from lockstep.train.buffer_snapshot import BufferPlace, BufferSnapshot, BufferValue, Gone, Owner, bytes_of

SEEN, FOUND_BY_VALUE = 1, 2  # how a change of a buffer was noticed: see Note [Silent writes] in buffers.py
WORD_BYTES: Final = 4


@dataclass(frozen=True)
class BufferKind:
    """What a buffer is without its values, in words that travel."""

    dtype: str | None  # None: it has no tensor
    shape: tuple[int, ...] = ()
    is_persistent: bool = True
    is_gone: bool = False
    is_on_host: bool = False

    @property
    def words(self) -> int:
        if self.dtype is None:
            return 0
        return -(-math.prod(self.shape) * self.torch_dtype.itemsize // WORD_BYTES)

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, str(self.dtype))
        assert isinstance(found, torch.dtype)
        return found

    @staticmethod
    def of(value: BufferValue, *, is_persistent: bool) -> BufferKind:
        if not isinstance(value, Tensor):
            return BufferKind(None, (), is_persistent, is_gone=value is Gone.GONE)
        dtype = str(value.dtype).removeprefix("torch.")
        return BufferKind(dtype, tuple(value.shape), is_persistent, is_on_host=value.device.type == "cpu")


@dataclass(frozen=True)
class BufferChange:
    """A buffer that gets a value in this step: from one shard, or as the mean over several."""

    owner: Owner
    key: str
    kind: BufferKind
    shards: tuple[int, ...]
    place: BufferPlace | None  # whose tensor gets the value; None: the value comes as a tensor of its own
    averages: bool = False

    @property
    def name(self) -> str:
        return self.owner.name_of(self.key)

    @property
    def width(self) -> int:
        """In the table. See Note [One table]."""
        return len(self.shards) * math.prod(self.kind.shape) if self.averages else self.kind.words


@dataclass(frozen=True)
class NewBuffer:
    """A buffer and its value after the step."""

    change: BufferChange
    value: BufferValue


@dataclass(frozen=True)
class NewNumber:
    """An attribute beside a buffer, and its value after the step."""

    owner: Owner
    key: str
    value: Any


@final
class RunningState:
    """The buffers of one model, from shard to shard."""

    def __init__(self, module: nn.Module, shards: int, *, checks_weights: bool = True) -> None:
        """`checks_weights`: whether the first forward pass must not write to weights."""
        self._module, self._snapshot = module, BufferSnapshot(module)
        self._weights: list[int] | None = None  # digests of the weights before the first step, until it was looked at
        self._checks_weights = checks_weights
        self._shards = shards
        self._made: dict[tuple[int, str], Tensor] = {}  # (shard, buffer) -> what the shard made of it
        self._odd: dict[int, list[list[Any]]] = {}  # shard -> what has no column in the table, in words
        self._past: dict[str, Tensor] = {}  # digests of what was overwritten: Note [Healed buffers]
        self._in_step = False

    def __len__(self) -> int:
        """How many columns the table of a step has: one for each buffer, and one for what has none."""
        self._snapshot.find()
        return len(self._snapshot.places) + 1

    def begin(self) -> None:
        """A new step starts from the buffers as they are."""
        self._made, self._odd, self._in_step = {}, {}, True
        self._snapshot.look()
        if self._checks_weights:
            self._weights, self._checks_weights = cheap_digests(self._module.parameters()), False

    @torch.no_grad()
    def take(self, shard: int) -> list[int]:
        """After the forward pass of a shard: put aside what it made of the buffers.

        Returns for each buffer whether it was changed: 0, SEEN or FOUND_BY_VALUE; and last, whether there is more.
        Raises ValueError if the first forward pass has written to weights.
        """
        self._refuse_written_weights()
        changed = []
        for place in self._snapshot.places:
            if place.is_counted():
                is_written = place.is_written()
                if is_written and place.held is not None:
                    self._made[shard, place.name] = place.held.clone()
                changed.append(SEEN if is_written else 0)
                continue
            is_regular = place.has_changed() and not place.is_odd()
            if is_regular:
                self._keep(shard, place.name, place.now())
            changed.append((SEEN if place.is_written() else FOUND_BY_VALUE) if is_regular else 0)
        odd = [entry for owner in self._snapshot.odd_owners() for entry in self._describe(shard, owner)]
        if odd:
            self._odd[shard] = odd
        return [*changed, int(bool(odd))]

    def _refuse_written_weights(self) -> None:
        """Looked at once: a program that does so does it always."""
        before, self._weights = self._weights, None
        if before is None:
            return
        named = dict(self._module.named_parameters())
        written = [n for n, a, b in zip(named, before, cheap_digests(named.values()), strict=True) if a != b]
        if written:
            raise ValueError(
                f"the forward pass has written to {written[0]}"
                f"{f' and {len(written) - 1} more weights' if len(written) > 1 else ''}. Every worker would write "
                "something else, as often as it has shards; nothing was trained. Write to weights in the loop, behind "
                "run.step(loss, batch), where all workers do the same (an embedding's max_norm= writes, too)"
            )

    def _keep(self, shard: int, name: str, value: BufferValue) -> None:
        if isinstance(value, Tensor):
            if type(value) is not Tensor or value.layout != torch.strided or value.is_meta:
                raise ValueError(
                    f"a forward pass made the buffer {name} a {type(value).__name__} ({value.layout}, on "
                    f"{value.device}); a buffer that a forward pass changes must be a plain dense tensor"
                )
            self._made[shard, name] = value.detach().clone()

    def _describe(self, shard: int, owner: Owner) -> list[list[Any]]:
        """[module, name, what it is now] of each buffer without a column; and of the numbers beside them."""
        places = [place for place in self._snapshot.places if place.owner is owner and place.is_odd()]
        found = []
        for key in [*(place.key for place in places), *owner.born()]:
            value = owner.module._buffers.get(key, Gone.GONE)
            self._keep(shard, owner.name_of(key), value)
            kept = key not in owner.module._non_persistent_buffers_set
            kind = BufferKind.of(value, is_persistent=kept)
            found.append([owner.prefix, key, list(astuple(kind))])
        return [*found, *([owner.prefix, key, {"number": n}] for key, n in owner.changed_numbers().items())]

    def rewind(self) -> None:
        """After the backward pass, which may still need them: the buffers are as they were before the step."""
        self._snapshot.go_back()

    def abandon(self) -> None:
        """If we are in the middle of a step: it has not been."""
        if self._in_step:
            self.rewind()
        self._in_step = False

    @torch.no_grad()
    def gather(self, changed: Tensor, counts: Sequence[int], sum_: ShardSum) -> list[NewBuffer | NewNumber]:
        """All workers: which buffers get which values. Nothing is changed yet.

        `changed[shard, buffer]` of all shards, on the host; `counts`: samples of each shard.
        """
        columns = changed[:, :-1].bool().tolist()
        by_shard = [[shard for shard in range(self._shards) if columns[shard][n]] for n in range(changed.shape[1] - 1)]
        places = zip(self._snapshot.places, by_shard, strict=True)
        changes = [_regular(place, shards) for place, shards in places if shards]
        numbers: list[NewNumber] = []
        if bool(changed[:, -1].any()):
            told = agreement.tell_all(sum_.group, [[s, odd] for s, odd in self._odd.items()], device=sum_.device)
            odd = sorted((entry for one in told for entry in one), key=lambda entry: int(entry[0]))
            changes, numbers = self._merge(changes, odd)
        self._compare_less(changed)
        if not changes:
            return [*numbers]
        widths = [change.width for change in changes]
        table = torch.zeros(sum(widths), dtype=torch.float64, device=sum_.device)
        parts = torch.split(table, widths)
        for change, part in zip(changes, parts, strict=True):
            self._fill(change, part)
        sum_.wait(sum_.add_up(table), "the exchange of buffers")
        return [*(NewBuffer(c, _read(c, part, counts)) for c, part in zip(changes, parts, strict=True)), *numbers]

    def _merge(
        self, regular: Sequence[BufferChange], odd: Sequence[tuple[int, list[list[Any]]]]
    ) -> tuple[list[BufferChange], list[NewNumber]]:
        """Of each buffer the change by the first shard. `odd`: in the order of shards, what has no column."""
        owners = {owner.prefix: owner for owner in self._snapshot.owners}
        changes, numbers = {change.name: change for change in regular}, {}
        seen: set[str] = set()
        for shard, entries in odd:
            for prefix, key, what in entries:
                if prefix not in owners:
                    raise LockstepError(
                        f"the forward pass of shard {shard} has made the buffer {key} in the module {prefix}, which "
                        "other workers do not have; make all modules before run.replicate(model)"
                    )
                name, owner = owners[prefix].name_of(key), owners[prefix]
                if name in seen:
                    continue
                seen.add(name)
                if isinstance(what, Mapping):
                    value = what["number"]
                    numbers[name] = NewNumber(owner, key, tuple(value) if isinstance(value, list) else value)
                    continue
                dtype, shape, *flags = what
                other = changes.get(name)
                if other is not None and other.shards[0] < shard:
                    changes[name] = BufferChange(owner, key, other.kind, other.shards[:1], other.place)
                else:
                    kind = BufferKind(dtype, tuple(shape), *flags)
                    changes[name] = BufferChange(owner, key, kind, (shard,), None)
        return [changes[name] for name in sorted(changes)], list(numbers.values())

    def _fill(self, change: BufferChange, part: Tensor) -> None:
        rows = part.view(len(change.shards), -1) if change.averages else part.view(1, -1)
        for row, shard in zip(rows, change.shards, strict=True):
            value = self._made.get((shard, change.name))
            if value is not None and value.numel():
                row += (value.reshape(-1) if change.averages else _to_words(value)).to(row.device)

    def _compare_less(self, changed: Tensor) -> None:
        """After the first step, equally on all workers: see Note [Silent writes] in buffers.py."""
        found = (changed[:, :-1] == FOUND_BY_VALUE).any(dim=0).tolist()
        for place, is_found in zip(self._snapshot.places, found, strict=True):
            place.compare_less(is_found=bool(is_found))

    @torch.no_grad()
    def finish(self, new: Sequence[NewBuffer | NewNumber]) -> None:
        """The step is over: take over what `gather` gave."""
        self._in_step = False
        for one in new:
            if isinstance(one, NewNumber):
                setattr(one.owner.module, one.key, one.value)
                continue
            change, place = one.change, one.change.place
            before = change.owner.module._buffers.get(change.key)
            if before is not None:
                past, digest = self._past.get(change.name), sum_of_bits(before)
                self._past[change.name] = digest if past is None else past * 3 + digest
            if place is None:
                put_buffer(change.owner.module, change.key, one.value, is_persistent=change.kind.is_persistent)
            elif place.held is not None and isinstance(one.value, Tensor):
                place.held.copy_(one.value.view(place.held.shape))

    def encode(self, new: Sequence[NewBuffer | NewNumber]) -> list[dict[str, Any]]:
        """What `gather` gave, for a worker that has missed it: dicts of plain values and tensors."""
        found: list[dict[str, Any]] = []
        for one in new:
            if isinstance(one, NewNumber):
                found.append({"module": one.owner.prefix, "key": one.key, "number": one.value})
                continue
            kind, is_gone = one.change.kind, isinstance(one.value, Gone)
            found.append(
                {
                    "module": one.change.owner.prefix,
                    "key": one.change.key,
                    "in_place": one.change.place is not None,
                    "is_persistent": kind.is_persistent,
                    "is_gone": is_gone,
                    "value": None if is_gone else one.value,
                }
            )
        return found

    def decode(self, sent: Sequence[Mapping[str, Any]]) -> list[NewBuffer | NewNumber]:
        """The inverse of `encode`, on a worker whose buffers are as they were before the step."""
        owners = {owner.prefix: owner for owner in self._snapshot.owners}
        places = {(place.owner.prefix, place.key): place for place in self._snapshot.places}
        found: list[NewBuffer | NewNumber] = []
        for one in sent:
            owner, key = owners[one["module"]], one["key"]
            if "number" in one:
                found.append(NewNumber(owner, key, one["number"]))
                continue
            value = Gone.GONE if one["is_gone"] else one["value"]
            kind = BufferKind.of(value, is_persistent=one["is_persistent"])
            place = places[owner.prefix, key] if one["in_place"] else None
            found.append(NewBuffer(BufferChange(owner, key, kind, (), place), value))
        return found

    def past(self) -> dict[str, Tensor]:
        """For comparing the replicas. See Note [Healed buffers]."""
        return {f"{name} before a step": digest for name, digest in sorted(self._past.items())}


def put_buffer(module: nn.Module, key: str, value: BufferValue, *, is_persistent: bool) -> None:
    """Give a module a buffer, in place of one of the same name if there is one; or take it away."""
    if isinstance(value, Gone):
        if key in module._buffers:
            delattr(module, key)
        return
    if key in module._buffers:
        module._buffers[key] = value
    else:
        module.register_buffer(key, value)
    (set.discard if is_persistent else set.add)(module._non_persistent_buffers_set, key)


def _regular(place: BufferPlace, shards: Sequence[int]) -> BufferChange:
    held = place.start
    assert held is not None
    kind = BufferKind.of(held, is_persistent=True)
    which = tuple(shards) if place.averages else (shards[0],)
    return BufferChange(place.owner, place.key, kind, which, place, averages=place.averages)


def _read(change: BufferChange, part: Tensor, counts: Sequence[int]) -> BufferValue:
    """The value of a buffer after the step, from the table of all workers."""
    if change.averages:
        values = part.view(len(change.shards), -1)
        weight = sum(counts[s] for s in change.shards)
        weighed = (row * (counts[s] / weight) for row, s in zip(values, change.shards, strict=True))
        return sum(weighed, torch.zeros_like(values[0]))
    if change.kind.is_gone:
        return Gone.GONE
    return None if change.kind.dtype is None else _from_words(part, change.kind)


def _to_words(value: Tensor) -> Tensor:
    """The bytes of a tensor, four to a number."""
    flat = bytes_of(value)
    missing = -flat.numel() % WORD_BYTES
    padded = torch.cat([flat, flat.new_zeros(missing)]) if missing else flat.clone()
    return padded.view(torch.int32).to(torch.float64)


def _from_words(words: Tensor, kind: BufferKind) -> Tensor:
    dtype, count = kind.torch_dtype, math.prod(kind.shape)
    flat = words.to(torch.int32).view(torch.uint8)[: count * dtype.itemsize]
    found = flat.clone().view(dtype).view(kind.shape)
    return found.cpu() if kind.is_on_host else found
